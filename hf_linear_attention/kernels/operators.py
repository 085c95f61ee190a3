# SPDX-License-Identifier: Apache-2.0
"""The kernels as torch operators: torch.compile sees one node for each, with its shapes and its gradients.

An operator checks its arguments; then C computes if it supports them, and torch otherwise. Its backward pass is an
operator too. If torch keeps a graph of the backward pass (second derivatives, torch.func), the gradients are computed
by plain operations.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, D head dimension of the keys, F
features, W head dimension of the values. Inside, every tensor is `[B, Hkv, G or 1, rows, columns]`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_kernels.attention import in_torch
from ..torch_kernels.blocks import EXP, HEDGEHOG, PLAIN, accumulation_dtype, is_eager, needs_plain, with_dtype
from ..torch_kernels.causal import gradients_with_graph
from .checks import check_attention, check_axes, check_blocks, check_heads, check_needed, check_results, check_shape
from .cpu import (
    FLOAT32,
    attend,
    differentiate,
    in_large_pages,
    library,
    refuse_without_library,
    run_attention,
    run_short_step,
    step_states,
    takes,
    takes_attention,
    takes_step,
    without_dispatcher,
)


NAMESPACE = "hf_linear_attention"
ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? log_decay, Tensor? state, Tensor? key_weight, "
    "Tensor? key_bias, Tensor? key_norm, Tensor? query_weight, int function, bool is_causal"
)
Tensors = Sequence["Tensor | None"]


class Operator(NamedTuple):
    """The definition of an operator: its schema, its function, the shapes of its results, and its gradient."""

    schema: str
    function: Callable[..., Any]
    fake: Callable[..., Any]
    differentiate: Callable[..., Any] | None = None
    save: Callable[..., Any] | None = None


def register(operators: Mapping[str, Operator]) -> Any:
    """Define operators, each once per process, whatever is imported twice; returns their namespace in `torch.ops`."""
    registered: Any = getattr(torch.ops, NAMESPACE)
    with _LOCK:
        library = getattr(registered, "library", None) or torch.library.Library(NAMESPACE, "FRAGMENT")
        registered.library = library  # dropping the library would remove its operators
        for name, operator in operators.items():
            if hasattr(registered, name):
                continue
            library.define(name + operator.schema)
            library.impl(name, operator.function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", operator.fake, lib=library)
            if operator.differentiate is not None:
                options: dict[str, Any] = {"setup_context": operator.save, "lib": library}
                torch.library.register_autograd(f"{NAMESPACE}::{name}", operator.differentiate, **options)
    return registered


def saving(tensors: int, outputs: int = 0, constants: Sequence[int] = ()) -> Callable[..., None]:
    """What an operator keeps for its gradient: its first arguments, which are tensors, and the first of its results.

    `constants` are the places of the results that have no gradient. The other arguments become `ctx.how`.
    """

    def save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.how = inputs[tensors:]
        ctx.save_for_backward(*inputs[:tensors], *output[:outputs])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output[place] for place in constants))

    return save


def is_bare_hedgehog(function: int, key_weight: Tensor | None) -> bool:
    """Whether this is Hedgehog without a projection, which the C kernels do not implement."""
    return function == HEDGEHOG and key_weight is None


def _attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, log_decay: Tensor | None,
    state: Tensor | None, key_weight: Tensor | None, key_bias: Tensor | None, key_norm: Tensor | None,
    query_weight: Tensor | None, *how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    function = how[0]
    affine = key_weight, key_bias, key_norm, query_weight
    features = check_attention(query, key, value, key_mask, log_decay, state, *affine, *how)
    given = (query, key, value, key_mask, log_decay, state, *affine)
    if not takes_attention(query, key, value, key_mask, features) or is_bare_hedgehog(function, key_weight):
        output, denominator, scale, state = _in_torch(*given, *how)
        scale = denominator.new_empty(0) if scale is None else scale
        return tuple(x.contiguous() for x in (output, denominator, scale, state))
    output, denominator, scale, new_state = _new_outputs(query, key, value, features, function)
    output = in_large_pages(output)
    arguments = arguments_of_map(given, key.shape[1])
    output_by_head = grouped(output.transpose(1, 2), key.shape[1])
    results = (output_by_head, denominator, scale if function >= EXP else None, new_state.unsqueeze(2))
    attend((features, *how), (*arguments, *results))
    return output, denominator, scale, new_state


def _new_outputs(
    query: Tensor, key: Tensor, value: Tensor, features: int, function: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    dtype, is_exp = accumulation_dtype(value), function >= EXP
    output = query.new_empty(batch, length, heads, width)
    denominator = query.new_empty(batch, kv_heads, heads // kv_heads, length, 1, dtype=dtype)
    scale = torch.empty_like(denominator) if is_exp else denominator.new_empty(0)
    return output, denominator, scale, denominator.new_empty(batch, kv_heads, features, width + 1 + is_exp)


def _fake_attention(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    features = check_attention(*given)
    query, key, value, *_ = given
    return _new_outputs(query, key, value, features, given[10])


def _attention_backward(
    grad_output: Tensor | None, grad_denominator: Tensor | None, grad_state: Tensor | None, *given: Any
) -> list[Tensor]:
    *arguments, output, denominator, scale, needed = given
    inputs = arguments[:10]
    query, key, value, key_mask, log_decay, _, *affine = inputs
    features = check_attention(*arguments)
    likes = _new_outputs(query.to("meta"), key.to("meta"), value.to("meta"), features, arguments[10])
    results = {"grad_output": grad_output, "grad_denominator": grad_denominator, "grad_state": grad_state}
    computed = {"output": output, "denominator": denominator, "scale": scale}
    check_results(query, (*likes[:2], likes[3], *likes[:3]), **results, **computed)
    check_needed(needed, 10)
    if not takes_attention(query, key, value, key_mask, features) or is_bare_hedgehog(arguments[10], affine[0]):
        wanted = (True, True, True, *needed[3:])  # as C makes them
        given_grads = (grad_output, grad_denominator, None, grad_state)
        grads = gradients_in_torch(lambda *x: _in_torch(*x, *arguments[10:]), inputs, wanted, given_grads)
        return [*grads[:3], *(grad.contiguous() for grad in grads[3:])]
    kv_heads = key.shape[1]
    described = arguments_of_map(inputs, kv_heads)
    # The C code always computes these three.
    grads = [in_large_pages(gradient_like(tensor)) for tensor in (query, key, value)]
    made = [grouped(grads[0], kv_heads), *(grad.unsqueeze(2) for grad in grads[1:])]
    # It computes these per batch member and head.
    wanted = (needed[4], *needed[6:10], False, False, needed[5])
    others = memory_per_head(described[4:], wanted)
    grad_output = None if grad_output is None else with_rows(grad_output).transpose(1, 2)
    incoming = (
        None if grad_output is None else grouped(grad_output, kv_heads),
        None if grad_denominator is None else grad_denominator.contiguous(),
        None if grad_state is None else grad_state.contiguous().unsqueeze(2),
    )
    outputs = (grouped(output.transpose(1, 2), kv_heads), denominator, scale if scale.numel() else None, None)
    differentiate((features, *given[10:12]), (*described, *outputs, *incoming, *made, *others))
    return [or_nothing(grad, query) for grad in (*grads, None, *shared_gradients(others, log_decay, affine))]


def memory_per_head(arguments: Tensors, needed: Sequence[bool]) -> list[Tensor | None]:
    """Memory for gradients that C computes per batch member and head; None for those that are not needed."""
    return [
        torch.empty(x.shape, dtype=torch.float32, device="cpu") if need and x is not None else None
        for x, need in zip(arguments, needed)
    ]


def shared_gradients(grads: Tensors, log_decay: Tensor | None, affine: Tensors) -> list[Tensor | None]:
    """The gradients of the decay, the state and the feature map, from those per batch member and head."""
    decay, first_state = grads[0], grads[-1]
    decay = None if decay is None or log_decay is None else decay.sum(0).flatten().to(log_decay.dtype)
    maps = [None if x is None or y is None else gradient_of_map(x, y) for x, y in zip(grads[1:], affine)]
    return [decay, None if first_state is None else first_state.squeeze(2), *maps]


def _fake_attention_backward(
    grad_output: Tensor | None, grad_denominator: Tensor | None, grad_state: Tensor | None, *given: Any
) -> list[Tensor]:
    *inputs, _, _, _, _, _, needed = given
    check_attention(*given[:12])
    others = [x.new_empty(x.shape) if need and x is not None else None for x, need in zip(inputs[3:], needed[3:])]
    return [*(gradient_like(x) for x in inputs[:3]), *(or_nothing(grad, inputs[0]) for grad in others)]


def or_nothing(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or an empty tensor for None, which an operator cannot return in a list."""
    return like.new_empty(0) if grad is None else grad


def _in_torch(*given: Any, plain: bool = False) -> tuple[Any, ...]:
    """The operator in torch, with results in its layout."""
    output, denominator, scale, state = in_torch(*given, plain=plain)
    return output.flatten(1, 2).transpose(1, 2).to(given[0].dtype), denominator, scale, state


def gradients_in_torch(
    function: Callable[..., Any], inputs: Sequence[Any], needed: Sequence[bool], incoming: Tensors
) -> list[Tensor]:
    """The gradients of `inputs` through `function`, which computes the results of an operator in torch."""
    leaves = [
        x.detach().requires_grad_(need) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x, need in zip(inputs, needed)
    ]
    with autograd_in_operator():
        outputs = function(*leaves)
    return gradients_of(outputs, incoming, leaves)


def gradients_of(outputs: Tensors, incoming: Tensors, inputs: Sequence[Any]) -> list[Tensor]:
    """The gradients of `inputs` through `outputs`: 0 for an unused input, empty for one that requires no gradient."""
    pairs = [(y, g) for y, g in zip(outputs, incoming) if y is not None and g is not None and y.requires_grad]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    grads: Any = iter(())
    if pairs and wanted:
        grads = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    found = [next(grads, None) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]
    made = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    return [
        (gradient_like(x).zero_() if grad is None else gradient_like(x).copy_(grad))
        if need
        else or_nothing(None, inputs[0])
        for x, grad, need in zip(inputs, found, made)
    ]


@contextlib.contextmanager
def autograd_in_operator() -> Iterator[None]:
    """A context with autograd, which the dispatcher may have switched off for the code of an operator.

    Another thread would have autograd too, but neither the current device nor the current stream of CUDA.
    """
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _differentiate_attention(
    ctx: Any, grad_output: Tensor | None, grad_denominator: Tensor | None, _: Any, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, output, denominator, scale = ctx.saved_tensors
    if torch.is_grad_enabled():

        def plain(*leaves: Any) -> tuple[Any, ...]:
            output, total, own_scale, state = _in_torch(*leaves, *ctx.how, plain=True)
            if own_scale is not None:  # C divides a denominator by another constant
                total = total * (own_scale - scale).exp()
            return output, total, own_scale, state

        grads = gradients_with_graph(plain, inputs, (grad_output, grad_denominator, None, grad_state))
    else:
        needed = [bool(need) for need in ctx.needs_input_grad[:10]]
        found = OPERATORS.attention_backward(
            grad_output, grad_denominator, grad_state, *inputs, *ctx.how, output, denominator, scale, needed
        )
        grads = [grad if need and x is not None else None for grad, need, x in zip(found, needed, inputs)]
    return *grads, None, None


def arguments_of_map(given: Tensors, kv_heads: int, constants: Tensors = (None, None)) -> list[Tensor | None]:
    """The arguments of C up to the ages of keys, with five axes each; `constants` are bias and norm of queries."""
    query, key, value, mask, log_decay, state, *key_map, query_weight = given
    if query is None or key is None or value is None:
        raise ValueError("Queries, keys and values are required; got None.")
    batch, heads = query.shape[:2]
    return [
        grouped(with_rows(query), kv_heads),
        with_rows(key).unsqueeze(2),
        with_rows(value).unsqueeze(2),
        None if mask is None else mask[:, None, None, :, None].expand(-1, kv_heads, -1, -1, -1),
        None if log_decay is None else log_decay.float()[None, :, None, None, None].expand(batch, -1, -1, -1, -1),
        *(_per_head(x, batch, kv_heads, kv_heads) for x in key_map),
        *(_per_head(x, batch, kv_heads, heads) for x in (query_weight, *constants)),
        None if state is None else state.contiguous().unsqueeze(2),
        *[None] * 3,
    ]


def window_arguments(
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
    sink_turn: Tensor | None = None,
) -> list[Tensor | None]:
    """The arguments of the C kernel for window and sinks, up to the angles of the sinks, with five axes each."""
    kv_heads = key.shape[1]
    scale = query.new_full((1,) * 5, scaling, dtype=torch.float32)
    numbers = (visible[:, None, None, :, None], seen[:, None, None], scale)
    visible, seen, scale = (with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    keys = [with_rows(x).unsqueeze(2) for x in (key, value, sink_key, sink_value)]
    sink_query = None if sink_query is None else grouped(with_rows(sink_query), kv_heads)
    turn = table_per_head(sink_turn, query, kv_heads)
    return [grouped(with_rows(query), kv_heads), *keys[:2], visible, *keys[2:], seen, sink_query, scale, turn]


def gradient_like(x: Tensor) -> Tensor:
    """New memory for the gradient of `x`, in its layout if its rows are dense, because C writes dense rows."""
    grad = torch.empty_like(x)
    return grad if grad.stride(-1) == 1 else x.new_empty(x.shape)


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """`[B, H, N, X]` -> `[B, Hkv, G, N, X]`."""
    return x.unflatten(1, (kv_heads, -1))


def table_per_head(turn: Tensor | None, query: Tensor, kv_heads: int) -> Tensor | None:
    """A table of angles `[B or 1, rows, columns]` for every head."""
    return None if turn is None else with_rows(turn)[:, None, None].expand(query.shape[0], kv_heads, -1, -1, -1)


def _per_head(x: Tensor | None, batch: int, kv_heads: int, heads: int) -> Tensor | None:
    """`[heads or 1, rows, columns]` -> `[B, Hkv, G, rows, columns]` in float32."""
    return None if x is None else grouped(with_rows(x.float()).expand(batch, heads, -1, -1), kv_heads)


def gradient_of_map(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`, summed over the batch, and over the heads if all of them share `x`."""
    return grad.flatten(1, 2).sum(0).sum_to_size(x.shape).to(x.dtype)


def _attention_step(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, log_decay: Tensor | None, log_features: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One new token of `torch_kernels.attention.kernel_attention`, without gradients."""
    function = EXP if log_features else PLAIN
    check_attention(query, key, value, None, log_decay, state, *(None,) * 4, function, True, rows)
    if query.shape[2] != 1:
        raise ValueError(f"Got {query.shape[2]} tokens; a step has one.")
    refuse_without_library(query, key, value)
    if not log_features and log_decay is not None:
        raise NotImplementedError(
            "C has no step for plain features with a decay; use `torch_kernels.attention.kernel_attention`."
        )
    tokens = [with_dtype(x, torch.float32).contiguous() for x in (query, key, value)]
    output = _fake_attention_step_(*tokens, state)
    old, new = step_states(state, rows)
    (batch, heads, _, features), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    size = output.new_empty(batch, heads) if log_features else None
    log_decay = None if log_decay is None else log_decay.float().contiguous()
    shape = (batch, state.shape[0], kv_heads, heads // kv_heads, 0, 0, 0, features, width, function, 4, 4, 4)
    run_short_step("attention_step", shape, (*tokens, log_decay, None, output, size, old, new), 0, rows)
    return output, new


def _attention_step_(*given: Any) -> Tensor:
    """`_attention_step` in the blocks `rows` of the state."""
    check_blocks(given[3])
    return _attention_step(*given)[0]


def _fake_attention_step(*given: Any) -> tuple[Tensor, Tensor]:
    return _fake_attention_step_(*given), given[3].new_empty(given[3].shape)


def _fake_attention_step_(query: Tensor, key: Tensor, value: Tensor, state: Tensor, *others: Any) -> Tensor:
    return state.new_empty(*query.shape[:3], value.shape[-1])


def with_rows(x: Tensor) -> Tensor:
    """`x`, or a copy of it whose rows are dense in memory, as the C kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 of a float32 tensor of four axes, in its memory order."""
    check_axes(x)
    refuse_without_library(x, dtypes=FLOAT32)
    if not (x.is_contiguous() or x.transpose(1, -2).is_contiguous()):
        x = x.contiguous()
    output = torch.empty_like(x)
    library().elu_plus_one(x.data_ptr(), output.data_ptr(), x.numel())
    return output


def _fake_elu_plus_one(x: Tensor) -> Tensor:
    check_axes(x)
    dense = x.is_contiguous() or x.transpose(1, -2).is_contiguous()
    return torch.empty_like(x) if dense else x.new_empty(x.shape)


def makes_features(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, num_features: int) -> bool:
    """Whether `attention` computes the features inside a kernel."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return is_eager(value) and takes_attention(query, key, value, key_mask, num_features)


def attention(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The operator `attention` where a graph or C takes these tensors; None leaves checked arguments to torch."""
    query, key, value, key_mask, *_ = given
    if needs_plain(value) or not (torch.compiler.is_compiling() or takes_attention(query, key, value, key_mask, 1)):
        check_attention(*given)
        return None
    return OPERATORS.attention(*given)


def attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    log_features: bool,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """The operator `attention_step` or `attention_step_` where C takes these; None leaves them to torch.

    `rows` is None, or int64 `[B]`: the blocks of `state` that are read and written; IndexError if one is no block.
    """
    given = (query, key, value, state, log_decay, log_features)
    if (log_features or log_decay is None) and takes_step(query, key, value, state):
        if rows is None:
            return without_dispatcher(OPERATORS.attention_step, _attention_step)(*given)
        return without_dispatcher(OPERATORS.attention_step_, _attention_step_)(*given, rows), state
    function = EXP if log_features else PLAIN
    check_attention(query, key, value, None, log_decay, state, *(None,) * 4, function, True, rows)
    return None


def elu_plus_one(x: Tensor) -> Tensor | None:
    """The operator `elu_plus_one` where C takes `x`."""
    if not takes(x, dtypes=FLOAT32):
        return None
    return without_dispatcher(OPERATORS.elu_plus_one, _elu_plus_one)(x)


def slot_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> Tensor | None:
    """The operator where C takes these tensors; None leaves checked arguments to torch.

    torch's fused kernel is made for many queries and many keys; without gradients, C takes two thirds of its time.
    """
    check_slots(query, key, value, visible)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if has_gradient or not is_eager(query) or not takes_attention(query, key, value, None, 1):
        return None
    step = without_dispatcher(OPERATORS.slot_attention, _slot_attention)
    return step(query, key, value, visible, scaling).transpose(1, 2)


def check_slots(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> None:
    """Raise ValueError for the first invalid argument of the operator `slot_attention`."""
    batch, heads, kv_heads = check_heads(query, key, value)
    check_shape("query", query, (batch, heads, query.shape[2], key.shape[3]), like=query)
    if visible is None:
        return
    check_shape("visible", visible, *((b, h, key.shape[2]) for b in (batch, 1) for h in (kv_heads, 1)), like=query)
    if visible.dtype != torch.bool:
        raise ValueError(f"`visible` is {visible.dtype}; it must be bool, True where a key takes part.")


def _slot_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """The operator behind `slot_attention`; its output is `[B, N, H, W]`."""
    check_slots(query, key, value, visible)
    refuse_without_library(query, key, value)
    batch, length, kv_heads = query.shape[0], query.shape[2], key.shape[1]
    output = in_large_pages(_fake_slot_attention(query, key, value, visible, scaling))
    if not key.shape[2]:
        return output.zero_()
    are_few_keys = key.shape[2] <= length
    # Scaled in float32: the softmax of logits near 100 would change if they were rounded to bfloat16.
    query, key = (query, key.float() * scaling) if are_few_keys else (query.float() * scaling, key)
    if visible is not None:
        visible = visible[:, :, None, :, None].expand(batch, kv_heads, -1, -1, -1)
    by_head = output.transpose(1, 2).unflatten(1, (kv_heads, -1))
    query = with_rows(query).unflatten(1, (kv_heads, -1))
    key, value = (with_rows(x).unsqueeze(2) for x in (key, value))
    run_attention("slots_forward", (0, PLAIN, are_few_keys), (query, key, value, visible, by_head))
    return output


def _fake_slot_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


OPERATORS_OF_ATTENTION = {
    "attention": Operator(
        f"({ATTENTION}) -> (Tensor, Tensor, Tensor, Tensor)",
        _attention,
        _fake_attention,
        _differentiate_attention,
        saving(10, outputs=3, constants=[2]),
    ),
    "attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_denominator, Tensor? grad_state, {ATTENTION}, Tensor output, "
        "Tensor denominator, Tensor scale, bool[] needed) -> Tensor[]",
        _attention_backward,
        _fake_attention_backward,
    ),
    "attention_step": Operator(
        "(Tensor query, Tensor key, Tensor value, Tensor state, Tensor? log_decay, bool log_features) "
        "-> (Tensor, Tensor)",
        _attention_step,
        _fake_attention_step,
    ),
    "attention_step_": Operator(
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, Tensor? log_decay, bool log_features, Tensor rows) "
        "-> Tensor",
        _attention_step_,
        _fake_attention_step_,
    ),
    "elu_plus_one": Operator("(Tensor x) -> Tensor", _elu_plus_one, _fake_elu_plus_one),
    "slot_attention": Operator(
        "(Tensor query, Tensor key, Tensor value, Tensor? visible, float scaling) -> Tensor",
        _slot_attention,
        _fake_slot_attention,
    ),
}
_LOCK = threading.Lock()
OPERATORS = register(OPERATORS_OF_ATTENTION)
