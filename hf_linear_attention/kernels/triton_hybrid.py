# SPDX-License-Identifier: Apache-2.0
"""`hybrid` on CUDA by Triton kernels: which calls they take, and the operators that run them.

A decoding step is three launches (triton_step.py), reading many tokens at most thirteen (triton_prefill.py), the scores
of keys one (triton_scores.py), and the gradients of whole sequences eleven and some of torch (triton_backward.py).
Gradients through a state and the feature map of Hedgehog stay with torch and fla-core. Triton is imported by the first
call that it takes.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..torch_kernels.blocks import EXP, accumulated, needs_plain
from ..torch_kernels.causal import gradients_with_graph
from . import fla
from .checks import check_blocks, check_shape
from .hybrid import check_hybrid
from .hybrid_arguments import HybridArguments, StepArguments
from .hybrid_in_torch import hybrid_in_torch
from .hybrid_step import PLACES, check_hybrid_step
from .operators import Operator, gradient_like, or_nothing, register, saving


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Those of the largest blocks for which the kernels were compiled.
MOST_COLUMNS, MOST_FEATURES, MOST_WEIGHTS, MOST_GROUPS, MOST_SINKS, MOST_SCORES = 256, 128, 8192, 32, 64, 64
# Bytes of shared memory of the largest program, by those of the largest row, with as many features as may be.
SHARED = {128: 65_536, 256: 99_328, 512: 98_304, 1024: 168_448}
# The same in training, where blocks of rows of more than 128 bytes are loaded ahead.
ROOM = 114_688

STEP = (
    "Tensor query, Tensor key, Tensor value, Tensor? score, Tensor? slope, Tensor? position, "
    "Tensor key_weight, Tensor? key_bias, Tensor? key_norm, Tensor query_weight, Tensor? log_decay, {} state, "
    "Tensor log_scale, Tensor norm_weight, Tensor? frequencies, Tensor? rows, int first_turned, bool is_interleaved, "
    "int trained_length, float scaling, float slope_scale, bool is_rate"
)
POSITION, STEP_STATE = 5, 11  # places among these arguments
# The same without what comes before, where there are gradients.
TRAINING = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? score, Tensor? position, Tensor? key_position, Tensor key_weight, Tensor? key_bias, Tensor? key_norm, "
    "Tensor query_weight, Tensor? log_decay, Tensor log_scale, Tensor norm_weight, Tensor? frequencies, Tensor? spans, "
    "int window, int count, int first_turned, bool is_interleaved, int trained_length, float scaling, bool is_rate"
)
TRAINING_TENSORS = 19
DIFFERENTIABLE = (0, 1, 2, 4, 5, *range(10, 17))
PREFILL = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? score, Tensor? position, Tensor? key_position, Tensor key_weight, Tensor? key_bias, Tensor? key_norm, "
    "Tensor query_weight, Tensor? log_decay, Tensor? sums, Tensor[] kept, Tensor log_scale, Tensor norm_weight, "
    "Tensor? frequencies, Tensor? spans, int window, int count, int first_turned, bool is_interleaved, "
    "int trained_length, float scaling, bool is_rate"
)
COUNT = 20  # the place of this number among the arguments of `TRAINING`


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program on a GPU may have; 0 without a Triton to compile it with."""
    if importlib.util.find_spec("triton") is None:
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@torch.compiler.assume_constant_result
def _has_shared_memory(device: torch.device, least: int) -> bool:
    return shared_memory(device) >= least


def _columns(rows: Tensor) -> int:
    """Those of a block in a kernel, a power of 2."""
    return 1 << max(4, (rows.shape[3] - 1).bit_length())


def takes(
    query: Tensor, key: Tensor, value: Tensor, sink_key: Tensor, key_weight: Tensor, function: int
) -> bool:  # fmt: skip
    """Whether the kernels compute `hybrid` for these tensors on CUDA, which are of sizes for which they are.

    Args:
        key_weight: `[Hkv, D, F]`, of the feature map whose function is `function`.
    """
    if needs_plain(query):
        return False
    if not query.ndim == key.ndim == value.ndim == sink_key.ndim == 4 or not key.shape[1]:
        return False  # torch says what is wrong
    features, columns = key_weight.shape[2], max(query.shape[3], value.shape[3])
    row = max(_columns(x) * x.element_size() for x in (query, key, value))
    return (
        function == EXP
        and all(x.dtype in DTYPES for x in (query, key, value))
        and 0 < columns <= MOST_COLUMNS
        and features <= min(MOST_FEATURES, MOST_WEIGHTS // columns)
        and query.shape[1] // key.shape[1] <= MOST_GROUPS
        and sink_key.shape[2] <= MOST_SINKS
        and query.shape[0] > 0
        and _has_shared_memory(query.device, next(least for size, least in SHARED.items() if size >= row))
    )


def step(
    query: Tensor, key: Tensor, value: Tensor, score: Tensor | None, slope: Tensor | None, position: Tensor | None,
    key_weight: Tensor, key_bias: Tensor | None, key_norm: Tensor | None, query_weight: Tensor,
    log_decay: Tensor | None, state: Sequence[Tensor], log_scale: Tensor, norm_weight: Tensor,
    frequencies: Tensor | None, rows: Tensor | None, *, first_turned: int, is_interleaved: bool, trained_length: int,
    scaling: float, slope_scale: float, is_rate: bool, in_place: bool,
) -> tuple[Tensor, Sequence[Tensor]]:  # fmt: skip
    """One new real token of `hybrid` in arguments that `takes` takes: the output `[B, 1, H, W]` and the new state.

    ValueError if the shapes, dtypes or devices do not match, or blocks of a state that changes in place are not dense.

    Args:
        slope: `[Hkv]`; the score of token n (counted from 1) is `score [B, 1, Hkv]` + n `slope` `slope_scale`.
        position: int32 or int64 `[B, 1]`.
        log_decay: `[Hkv]`, the logarithm of the decay per token, or with `is_rate` the rate of `LearnedDecay`.
        state: the 7, 8, 12 or 14 tensors of the mechanism's state; with `in_place` they become the new state, those of
            sequence b in block `rows[b]`, or b without `rows`.
        frequencies: float32 on the device, one for each pair of columns that rotary embedding turns; the feature map
            does not see the turns from `first_turned` on.
        trained_length: from it on (0: never), sinks and exact keys are compared as far away as at most there.
    """
    given = (query, key, value, score, slope, position, key_weight, key_bias, key_norm, query_weight, log_decay)
    others: Any = (log_scale, norm_weight, frequencies, rows, first_turned, is_interleaved, trained_length, scaling)
    others = (*others, slope_scale, is_rate)
    if in_place:
        return OPERATORS.hybrid_step_on_cuda_(*given, list(state), *others), state
    *new, output = OPERATORS.hybrid_step_on_cuda(*given, list(state), *others)
    return output, tuple(new)


def prefill(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sink_key: Tensor, sink_value: Tensor, seen: Tensor,
    score: Tensor | None, position: Tensor | None, key_position: Tensor | None, key_weight: Tensor,
    key_bias: Tensor | None, key_norm: Tensor | None, query_weight: Tensor, log_decay: Tensor | None,
    sums: Tensor | None, kept: Sequence[Tensor], log_scale: Tensor, norm_weight: Tensor, frequencies: Tensor | None,
    *, window: int, count: int, first_turned: int, is_interleaved: bool, trained_length: int, scaling: float,
    is_rate: bool, spans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:  # fmt: skip
    """Several tokens of `hybrid` in arguments that `takes` takes, of which the first ones of a row may be padding.

    ValueError if the shapes, dtypes or devices do not match, as in `step`.

    Args:
        key, value: `[B, Hkv, L, D or W]` of N tokens, or of the `window` rows before them too.
        visible: bool `[B, L]`, True where there is a key that is no sink. In a row, these are the last ones.
        seen: bool `[B, N, s]`, which of the sinks `[B, Hkv, s, D or W]` each query sees.
        score: float32 `[B, Hkv, L, 1]`, with exact keys, of which `count` are kept; 0 without them.
        position, key_position: int32 `[B, N]` and `[B, L]`, where keys are turned.
        sums, kept: `[B, Hkv, F, W + 2]` and the tensors of `Kept` from before, or None and nothing.
        frequencies, first_turned, trained_length, log_decay, is_rate: see `step`.
        spans: int32 `[2, B, N]` where rows hold packed sequences, without padding between tokens of one: where that of
            each token begins, and where it ends. Nothing comes before, there are exact keys, and no sinks.

    Returns:
        The output `[B, N, H, W]`, the sums and the tensors of `Kept` after the last token, which are undefined after
        packed sequences; with gradients, if nothing comes before.
    """
    query, key, value, *sinks = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, sink_key, sink_value)
    )
    places = [None if x is None else x.contiguous() for x in (position, key_position)]
    given: Any = (query, key, value, visible.contiguous(), *sinks, seen.contiguous(), score, *places)
    parameters = [None if x is None else x.contiguous() for x in (key_weight, key_bias, key_norm, query_weight)]
    given = (*given, *parameters, log_decay)
    before: Any = () if torch.is_grad_enabled() else (sums, [x.contiguous() for x in kept])
    last = log_scale, norm_weight, frequencies, spans
    how = window, count, first_turned, is_interleaved, trained_length, scaling, is_rate
    if torch.is_grad_enabled():
        output, _, _, _, new_sums, *new = OPERATORS.hybrid_training_on_cuda(*given, *last, *how)
        return output, new_sums, new[: (4 + (key_position is not None)) * (count > 0)]
    output, new_sums, *new = OPERATORS.hybrid_on_cuda(*given, *before, *last, *how)
    return output, new_sums, new


def scores(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """`hidden [B, N, E]` times `weight [Hkv, E]` over sqrt(E), `[B, N, Hkv]` in float32; None where torch computes it.

    ValueError if the shapes or devices do not match.
    """
    if torch.is_grad_enabled() or needs_plain(hidden) or not fla.is_on_cuda(hidden):
        return None
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES or not 0 < weight.shape[0] <= MOST_SCORES:
        return None
    if not _has_shared_memory(hidden.device, 1):
        return None
    return OPERATORS.scores_on_cuda(hidden, weight)


def _scores(hidden: Tensor, weight: Tensor) -> Tensor:
    out = _fake_scores(hidden, weight)
    if out.numel():
        from .triton_scores import run

        run(hidden, weight, out)
    return out


def _fake_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    check_shape("weight", weight, (*weight.shape[:1], *hidden.shape[-1:]), like=hidden)
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0], dtype=torch.float32)


def _prefill(*given: Any) -> list[Tensor]:
    output, sums, *kept = found = _fake_prefill(*given)
    from .triton_prefill import run

    cast(Any, run)(*given, out=output, new_sums=sums, new_kept=kept)
    return found


def _fake_prefill(*given: Any) -> list[Tensor]:
    _check_prefill(*given)
    query, key, value, _, _, _, _, _, _, key_position, key_weight, *_ = given
    (batch, heads, length, _), kv_heads, width, count = query.shape, key.shape[1], value.shape[3], given[22]
    sums = query.new_empty(batch, kv_heads, key_weight.shape[2], width + 2, dtype=torch.float32)
    found = [query.new_empty(batch, length, heads, width), sums]
    if count:
        rows = (batch, kv_heads, count)
        number, place = torch.float32, torch.int32
        found += [key.new_empty(*rows, key.shape[3]), value.new_empty(*rows, width)]
        found += [key.new_empty(*rows, 1, dtype=number), key.new_empty(*rows, 1, dtype=place)]
        found += [] if key_position is None else [key.new_empty(*rows, 1, dtype=place)]
    return found


def _check_prefill(*given: Any) -> None:
    """Raise ValueError for the first argument that does not fit, as the operator `hybrid` does."""
    *tensors, key_weight, key_bias, key_norm, query_weight, log_decay, sums, kept = given[:17]
    log_scale, norm_weight, frequencies, spans, *how = given[17:]
    window, count, first, is_interleaved, trained_length, scaling, _ = how
    *line, score, position, key_position = tensors
    arguments: Any = (
        *(*line, log_decay, sums, key_weight, key_bias, key_norm, query_weight, log_scale, norm_weight),
        *(*kept, *[None] * (5 - len(kept)), score, position, key_position, EXP, window, scaling),
        *(_frequencies(frequencies, line[0]), first, is_interleaved, trained_length, count),
    )
    features, (heads, kv_heads) = check_hybrid(HybridArguments(*arguments)), (line[0].shape[1], line[1].shape[1])
    shapes = {  # which may be those of one head in torch
        "key_weight": (key_weight, (kv_heads, line[1].shape[3], features)),
        "key_bias": (key_bias, (kv_heads, 1, features)),
        "key_norm": (key_norm, (kv_heads, 1, 1)),
        "query_weight": (query_weight, (heads, line[1].shape[3], features)),
    }
    for name, (tensor, shape) in shapes.items():
        check_shape(name, tensor, shape, like=line[0])
    if spans is not None:
        check_shape("spans", spans, (2, line[0].shape[0], line[0].shape[2]), like=line[0])
        if spans.dtype != torch.int32 or not spans.is_contiguous():
            raise ValueError(f"`spans` is {spans.dtype} of strides {spans.stride()}; it must be torch.int32 and dense.")
        if line[1].shape[2] != line[0].shape[2] or line[4].shape[2] or not count:
            raise ValueError("Packed sequences have no keys before them, no sinks, and at least one exact key.")


def _frequencies(frequencies: Tensor | None, query: Tensor) -> list[float]:
    """As many numbers as there are `frequencies`; to read them would wait for the device."""
    if frequencies is None:
        return []
    check_shape("frequencies", frequencies, (frequencies.numel(),), like=query)
    if frequencies.dtype != torch.float32:
        raise ValueError(f"`frequencies` is {frequencies.dtype}; it must be torch.float32.")
    return [0.0] * frequencies.shape[0]


def _train(*given: Any) -> tuple[Tensor, ...]:
    from .triton_prefill import run

    output, size, _, _, sums, *kept = _fake_train(*given)
    new = kept[: (4 + (given[9] is not None)) * (given[COUNT] > 0)]
    call = cast(Any, run)(*given[:15], None, (), *given[15:], out=output, new_sums=sums, new_kept=new, size=size)
    chosen = (size.new_empty(0, dtype=torch.int32) if x is None else x for x in call)
    return (output, size, *chosen, sums, *kept)


def _fake_train(*given: Any) -> tuple[Tensor, ...]:
    query, count = given[0], given[COUNT]
    output, sums, *kept = _fake_prefill(*given[:15], None, (), *given[15:])
    (batch, length, heads, _), rows = output.shape, query.shape[0] * given[1].shape[1]
    size = query.new_empty(batch, heads, length, dtype=torch.float32)
    lengths = (count + length, length) if count else ()
    chosen = [query.new_empty(rows, n, dtype=torch.int32) for n in lengths]
    chosen = chosen or [query.new_empty(0, dtype=torch.int32) for _ in range(2)]
    return (output, size, *chosen, sums, *kept, *(query.new_empty(0) for _ in range(5 - len(kept))))


def _train_backward(grad_output: Tensor, *given: Any) -> list[Tensor]:
    from .triton_backward import run

    *tensors, _, position, key_position = given[:10]
    *others, output, size, leave, gone = given[10:]
    of_line = *tensors, position, key_position
    has_room = shared_memory(given[0].device) >= ROOM
    found = cast(Any, run)(grad_output.contiguous(), output, size, leave, gone, *of_line, *others, has_room)
    return [or_nothing(x, given[0]) for x in found]


def _fake_train_backward(grad_output: Tensor, *given: Any) -> list[Tensor]:
    tensors = [given[place] for place in DIFFERENTIABLE]
    others = [None if x is None else x.new_empty(x.shape) for x in tensors[3:]]
    return [*map(gradient_like, tensors[:3]), *(or_nothing(x, given[0]) for x in others)]


def _differentiate(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, output, size, leave, gone = ctx.saved_tensors
    of_state = grads[3:6]
    if torch.is_grad_enabled() or any(x is not None for x in of_state):
        with torch.enable_grad():
            found = gradients_with_graph(lambda *x: _train_in_torch(*x, *ctx.how), inputs, (grad_output, *of_state))
        found = found if torch.is_grad_enabled() else [None if x is None else x.detach() for x in found]
    else:
        given = (grad_output, *inputs, *ctx.how, output, size, leave, gone)
        made = iter(() if grad_output is None else OPERATORS.hybrid_training_backward_on_cuda(*given))
        found = [next(made, None) if place in DIFFERENTIABLE else None for place in range(TRAINING_TENSORS)]
    needed = ctx.needs_input_grad
    return *(grad if need else None for grad, need in zip(found, needed)), *(None for _ in ctx.how)


def _train_in_torch(*given: Any) -> list[Tensor]:
    """The output, the sums, and the keys and values that are kept, in operations that torch can differentiate twice."""
    query, key_weight, key_bias, key_norm, query_weight, log_decay, log_scale, norm_weight = (
        given[place] for place in (0, *range(10, 17))
    )
    frequencies, spans, window, count, first, is_interleaved, trained_length, scaling, is_rate = given[17:]
    if log_decay is not None and is_rate:
        log_decay = -torch.nn.functional.softplus(accumulated(log_decay))
    norm, root = None if key_norm is None else key_norm * scaling, scaling**0.5
    maps = key_weight * root, key_bias, norm, query_weight * root, log_scale, norm_weight
    turns = () if frequencies is None else tuple(frequencies.tolist()), first, is_interleaved, trained_length

    def part(row: slice, tokens: slice) -> list[Tensor]:
        query, key, value, sink_key, sink_value, score = (
            x if x is None else x[row, :, tokens] for x in (*given[:3], *given[4:6], given[7])
        )
        visible, seen, *places = (x if x is None else x[row, tokens] for x in (given[3], given[6], *given[8:10]))
        arguments: Any = (
            *(query, key, value, visible, sink_key, sink_value, seen, log_decay, None, *maps, *[None] * 5),
            *(score, *places, EXP, window, scaling, *turns, count),
        )
        return hybrid_in_torch(HybridArguments(*arguments))

    if spans is None:
        output, *state = part(slice(None), slice(None))
        return [output.to(query.dtype), *state[:3]]
    rows = []
    for row, ends in enumerate(zip(*spans.tolist())):
        found = (part(slice(row, row + 1), slice(*own))[0] for own in sorted(set(zip(*ends))))
        rows.append(torch.cat(list(found), dim=1))
    return [torch.cat(rows).to(query.dtype)]


def _in_order(state: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if place is None else state[place] for place in PLACES[len(state)]]


def _step_(*given: Any) -> Tensor:
    state = given[STEP_STATE]
    return _run_step(given, state, state)


def _step(*given: Any) -> list[Tensor]:
    state = [x.contiguous() for x in given[STEP_STATE]]
    new = [torch.empty_like(x) for x in state]
    return [*new, _run_step(given, state, new)]


def _run_step(given: Sequence[Any], state: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    *shared, frequencies, rows, first, is_interleaved, trained, scaling, slope_scale, is_rate = given[STEP_STATE + 1 :]
    turns: Any = _frequencies(frequencies, given[0]), first, is_interleaved, trained
    checked: Any = (*given[: STEP_STATE + 1], *shared, *turns, EXP, scaling)
    check_hybrid_step(StepArguments(*checked), rows, converts=True)
    check_blocks(*state)
    from .triton_step import run

    tensors = [x if x is None or x is given[POSITION] else x.contiguous() for x in given[:STEP_STATE]]
    out = _fake_step_(*given)
    states = _in_order(state), _in_order(new)
    arguments = (*tensors, *states, *shared, frequencies, first, is_interleaved, trained, scaling)
    cast(Any, run)(*arguments, slope_scale=slope_scale, is_rate=is_rate, rows=rows, out=out)
    return out


def _fake_step_(*given: Any) -> Tensor:
    query, _, value, *_ = given
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


def _fake_step(*given: Any) -> list[Tensor]:
    new = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[STEP_STATE]]
    return [*new, _fake_step_(*given)]


OPERATORS = register(
    {
        "scores_on_cuda": Operator("(Tensor hidden, Tensor weight) -> Tensor", _scores, _fake_scores),
        "hybrid_on_cuda": Operator(f"({PREFILL}) -> Tensor[]", _prefill, _fake_prefill),
        "hybrid_training_on_cuda": Operator(
            f"({TRAINING}) -> ({', '.join(['Tensor'] * 10)})",
            _train,
            _fake_train,
            _differentiate,
            saving(TRAINING_TENSORS, outputs=4, constants=[1, 2, 3, 7, 8, 9]),
        ),
        "hybrid_training_backward_on_cuda": Operator(
            f"(Tensor grad_output, {TRAINING}, Tensor output, Tensor size, Tensor leave, Tensor gone) -> Tensor[]",
            _train_backward,
            _fake_train_backward,
        ),
        "hybrid_step_on_cuda": Operator(f"({STEP.format('Tensor[]')}) -> Tensor[]", _step, _fake_step),
        "hybrid_step_on_cuda_": Operator(f"({STEP.format('Tensor(a!)[]')}) -> Tensor", _step_, _fake_step_),
    }
)
