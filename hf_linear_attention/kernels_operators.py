# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of torch: one node each for torch.compile, with what it needs to know of them.

An operator checks its arguments, then C computes where it takes them, else torch. Its backward pass is an operator too;
where torch keeps a graph of the backward pass (second derivatives, torch.func), gradients go through plain operations.

The operators' names carry a hash of the source that defines them: the package, a teacher and a student from checkpoints
may bring different versions of these files into one process, and an operator of one name can be defined only once.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, D their head dimension, F features,
W head dimension of the values. Inside, every tensor is `[B, Hkv, G or 1, rows, columns]`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .kernels_causal import causal_attention
from .kernels_causal import gradients_with_graph
from .kernels_checks import check_attention
from .kernels_checks import check_attention_results
from .kernels_checks import check_window
from .kernels_checks import check_window_results
from .kernels_cpu import EXP
from .kernels_cpu import HEDGEHOG
from .kernels_cpu import MOST_COLUMNS
from .kernels_cpu import NATIVE_DTYPES
from .kernels_cpu import in_large_pages
from .kernels_cpu import run_attention
from .kernels_cpu import takes
from .kernels_fla import gpu_kernel
from .kernels_inference import IMPLEMENTATIONS as WITHOUT_GRADIENTS
from .kernels_inference import SCHEMAS as SCHEMAS_WITHOUT_GRADIENTS
from .kernels_inference import with_rows
from .kernels_parts import attend
from .kernels_parts import differentiate
from .kernels_torch import Affine
from .kernels_torch import KernelMap
from .kernels_torch import accumulation_dtype
from .kernels_torch import plain_attention
from .kernels_torch import shown
from .kernels_window import plain_window


# Heads are filled up to 16 columns; narrower ones than this (`aft` has 1) are faster in torch.
NARROWEST = 4
SOURCES = ("operators", "inference", "checks", "cpu", "parts", "torch", "causal", "window", "fla")
ATTENTION = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? log_decay, Tensor? state, Tensor? key_weight, "
    "Tensor? key_bias, Tensor? key_norm, Tensor? query_weight, int function, bool is_causal"
)
WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? sink_query, float scaling"
)
SCHEMAS = {
    "attention": f"({ATTENTION}) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_backward": (
        f"(Tensor? grad_output, Tensor? grad_denominator, Tensor? grad_state, {ATTENTION}, Tensor output, "
        "Tensor denominator, bool[] needed) -> Tensor[]"
    ),
    "window_attention": f"({WINDOW}) -> (Tensor, Tensor, Tensor)",
    "window_attention_backward": (
        f"(Tensor? grad_output, Tensor? grad_log_size, {WINDOW}, Tensor output, Tensor log_size) -> Tensor[]"
    ),
}
SCHEMAS.update(SCHEMAS_WITHOUT_GRADIENTS)
Tensors = Sequence["torch.Tensor | None"]


def takes_attention(query, key, value, key_mask, features: int) -> bool:
    """Whether C computes: on a CPU, no sequences by number, nothing empty, no thin heads, no endless rows."""
    if not query.ndim == key.ndim == value.ndim == 4:
        return False
    if key_mask is not None and key_mask.dtype != torch.bool:
        return False
    thinnest, widest = min(query.shape[-1], value.shape[-1]), max(query.shape[-1], value.shape[-1], features)
    if thinnest < NARROWEST or widest > MOST_COLUMNS or not key.numel():
        return False
    return takes(query, key, value, dtypes=NATIVE_DTYPES)


def is_bare_hedgehog(function: int, key_weight: torch.Tensor | None) -> bool:
    """Without a projection, which C does not know."""
    return function == HEDGEHOG and key_weight is None


def _attention(query, key, value, key_mask, log_decay, state, key_weight, key_bias, key_norm, query_weight, *how):
    function = how[0]
    affine = key_weight, key_bias, key_norm, query_weight
    features = check_attention(query, key, value, key_mask, log_decay, state, *affine, *how)
    given = (query, key, value, key_mask, log_decay, state, *affine)
    if not takes_attention(query, key, value, key_mask, features) or is_bare_hedgehog(function, key_weight):
        output, denominator, scale, state = in_torch(*given, *how)
        scale = denominator.new_empty(0) if scale is None else scale
        return tuple(x.contiguous() for x in _laid_out(query, output, denominator, scale, state))
    output, denominator, scale, new_state = _new_outputs(query, key, value, features, function)
    output = in_large_pages(output)
    arguments = _arguments(given, key.shape[1])
    results = (
        _grouped(output.transpose(1, 2), key.shape[1]),
        denominator,
        scale if function >= EXP else None,
        new_state.unsqueeze(2),
    )
    attend((features, *how), (*arguments, *results))
    return output, denominator, scale, new_state


def _new_outputs(query, key, value, features: int, function: int):
    (batch, heads, length, _), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    dtype, is_exp = accumulation_dtype(value), function >= EXP
    output = query.new_empty(batch, length, heads, width)
    denominator = query.new_empty(batch, kv_heads, heads // kv_heads, length, 1, dtype=dtype)
    scale = torch.empty_like(denominator) if is_exp else denominator.new_empty(0)
    return output, denominator, scale, denominator.new_empty(batch, kv_heads, features, width + 1 + is_exp)


def _fake_attention(*given: Any):
    features = check_attention(*given)
    query, key, value, *_ = given
    return _new_outputs(query, key, value, features, given[10])


def in_torch(
    query, key, value, key_mask, log_decay, state, key_weight, key_bias, key_norm, query_weight, function, is_causal,
    *, plain: bool = False,
):  # fmt: skip
    """The operator `attention` in torch: output `[B, Hkv, G, N, W]` in the accumulation dtype, None for no log scale.

    With `plain` in plain operations alone.
    """
    maps = (None, None) if key_weight is None else (Affine(query_weight), Affine(key_weight, key_bias, key_norm))
    feature_map = KernelMap(function, *maps)
    key, value = shown(key, key_mask), shown(value, key_mask)
    query, key = feature_map.features(query, feature_map.query), feature_map.features(key, feature_map.key)
    options: dict[str, Any] = {"log_features": feature_map.log_features, "key_mask": key_mask, "state": state}
    is_packed = key_mask is not None and key_mask.dtype != torch.bool
    if plain or is_packed or not is_causal or 0 in key.shape[:3]:
        return plain_attention(query, key, value, is_causal=is_causal, log_decay=log_decay, **options)
    return causal_attention(
        query, key, value, log_decay=log_decay, gpu_kernel=gpu_kernel(value, query.shape[2]), **options
    )


def _attention_backward(grad_output, grad_denominator, grad_state, *given):
    *arguments, output, denominator, needed = given
    inputs = arguments[:10]
    query, key, value, key_mask, log_decay, _, *affine = inputs
    features = check_attention(*arguments)
    incoming = (grad_output, grad_denominator, grad_state)
    check_attention_results(query, key, value, features, arguments[10], *incoming, output, denominator, needed)
    if not takes_attention(query, key, value, key_mask, features) or is_bare_hedgehog(arguments[10], affine[0]):
        return _in_a_thread(_gradients_in_torch, (grad_output, grad_denominator, grad_state), arguments, needed)
    kv_heads = key.shape[1]
    described = _arguments(inputs, kv_heads)
    # The C code always makes these three.
    grads = [in_large_pages(_gradient_like(tensor)) for tensor in (query, key, value)]
    made = [_grouped(grads[0], kv_heads), *(grad.unsqueeze(2) for grad in grads[1:])]
    # These it makes for every batch member and head.
    wanted = (needed[4], *needed[6:10], False, False, needed[5])
    others = [
        torch.empty(argument.shape, dtype=torch.float32) if need and argument is not None else None
        for argument, need in zip(described[4:], wanted)
    ]
    grad_output = None if grad_output is None else with_rows(grad_output).transpose(1, 2)
    incoming = (
        None if grad_output is None else _grouped(grad_output, kv_heads),
        None if grad_denominator is None else grad_denominator.contiguous(),
        None if grad_state is None else grad_state.contiguous().unsqueeze(2),
    )
    results = (_grouped(output.transpose(1, 2), kv_heads), denominator, None, None)
    differentiate((features, *given[10:12]), (*described, *results, *incoming, *made, *others))
    grad_decay, *grad_affine, _, _, grad_first = others
    grad_affine = [None if grad is None else _shared(grad, x) for grad, x in zip(grad_affine, affine)]
    grad_decay = None if grad_decay is None else grad_decay.sum(0).reshape(log_decay.shape).to(log_decay.dtype)
    grad_first = None if grad_first is None else grad_first.squeeze(2)
    return [_or_nothing(grad, query) for grad in (*grads, None, grad_decay, grad_first, *grad_affine)]


def _fake_attention_backward(grad_output, grad_denominator, grad_state, *given):
    *inputs, _, _, _, _, needed = given
    check_attention(*given[:12])
    others = [x.new_empty(x.shape) if need and x is not None else None for x, need in zip(inputs[3:], needed[3:])]
    return [*(_gradient_like(x) for x in inputs[:3]), *(_or_nothing(grad, inputs[0]) for grad in others)]


def _or_nothing(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An operator cannot return None in a list."""
    return like.new_empty(0) if grad is None else grad


def _gradients_in_torch(incoming: Tensors, arguments: Sequence[Any], needed: Sequence[bool]) -> list[torch.Tensor]:
    inputs = [
        x.detach().requires_grad_(need) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x, need in zip(arguments[:10], (True, True, True, *needed[3:]))  # as C makes them
    ]
    with torch.enable_grad():
        outputs = _laid_out(inputs[0], *in_torch(*inputs, *arguments[10:]))
    grads = _gradients_of(outputs, (incoming[0], incoming[1], None, incoming[2]), inputs)
    return [*grads[:3], *(grad.contiguous() for grad in grads[3:])]


def _laid_out(query, output, denominator, scale, state):
    """As the operator has them."""
    return output.flatten(1, 2).transpose(1, 2).to(query.dtype), denominator, scale, state


def _gradients_of(outputs: Tensors, incoming: Tensors, inputs: Sequence[Any]) -> list[torch.Tensor]:
    pairs = [(y, g) for y, g in zip(outputs, incoming) if y is not None and g is not None and y.requires_grad]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    grads: Any = iter(())
    if pairs and wanted:
        grads = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    found = [next(grads, None) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in inputs]
    made = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
    return [
        (_gradient_like(x).zero_() if grad is None else _gradient_like(x).copy_(grad))
        if need
        else _or_nothing(None, inputs[0])
        for x, grad, need in zip(inputs, found, made)
    ]


def _in_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """In an operator autograd is off for good; a new thread starts without that."""
    if torch.compiler.is_compiling():
        raise RuntimeError("an operator's own code is never traced")
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result()


def _save_attention(ctx, inputs, output):
    ctx.how = inputs[10:]
    ctx.save_for_backward(*inputs[:10], output[0], output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate_attention(ctx, grad_output, grad_denominator, _, grad_state):
    *inputs, output, denominator = ctx.saved_tensors
    if torch.is_grad_enabled():

        def plain(*leaves):
            return _laid_out(leaves[0], *in_torch(*leaves, *ctx.how, plain=True))

        grads = gradients_with_graph(plain, inputs, (grad_output, grad_denominator, None, grad_state))
    else:
        needed = [bool(need) for need in ctx.needs_input_grad[:10]]
        found = OPERATORS.attention_backward(
            grad_output, grad_denominator, grad_state, *inputs, *ctx.how, output, denominator, needed
        )
        grads = [grad if need and x is not None else None for grad, need, x in zip(found, needed, inputs)]
    return *grads, None, None


def _window(query, key, value, visible, sink_key, sink_value, seen, sink_query, scaling):
    given = (query, key, value, visible, sink_key, sink_value, seen, sink_query)
    width = check_window(*given)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        return tuple(x.contiguous() for x in _window_laid_out(*plain_window(*given, scaling)))
    output, size, largest = _new_window_outputs(*given)
    arguments = _window_arguments(scaling, *given)
    results = (_grouped(in_large_pages(output).transpose(1, 2), key.shape[1]), size, largest)
    run_attention("window_forward", (width, sink_key.shape[2], True), (*arguments, *results))
    return output, size, largest


def _takes_window(query, key, value, visible, *sinks) -> bool:
    """Without queries C would leave the gradients of keys unwritten."""
    return bool(query.shape[2]) and takes_attention(query, key, value, visible, 1) and takes(*sinks)


def _window_laid_out(output, size, largest):
    """As the operator has them."""
    return output.flatten(1, 2).transpose(1, 2), size, largest


def _new_window_outputs(query, key, value, *_):
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    dtype = accumulation_dtype(query)
    output = query.new_empty(batch, length, heads, value.shape[-1], dtype=dtype)
    size, largest = (output.new_empty(batch, kv_heads, heads // kv_heads, length, 1) for _ in range(2))
    return output, size, largest


def _fake_window(*given):
    check_window(*given[:8])
    return _new_window_outputs(*given)


def _window_backward(grad_output, grad_size, *given):
    *inputs, scaling, output, size = given
    width = check_window(*inputs)
    query, key, value, visible, sink_key, sink_value, _, sink_query = inputs
    check_window_results(query, key, value, grad_output, grad_size, output, size)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        return _in_a_thread(_window_gradients_in_torch, (grad_output, grad_size), inputs, scaling)
    kv_heads = key.shape[1]
    grads = [in_large_pages(x.new_empty(x.shape)) for x in (query, key, value, sink_key, sink_value)]
    grad_sink_query = None if sink_query is None else sink_query.new_zeros(sink_query.shape)
    grad_output = None if grad_output is None else _grouped(with_rows(grad_output).transpose(1, 2), kv_heads)
    made = (
        _grouped(grads[0], kv_heads),
        *(grad.unsqueeze(2) for grad in grads[1:]),
        None if grad_sink_query is None else _grouped(grad_sink_query, kv_heads),
    )
    arguments = _window_arguments(scaling, *inputs)
    results = (_grouped(output.transpose(1, 2), kv_heads), size, None)
    incoming = (grad_output, None if grad_size is None else grad_size.contiguous())
    run_attention("window_backward", (width, sink_key.shape[2], True), (*arguments, *results, *incoming, *made))
    return [*grads, _or_nothing(grad_sink_query, query)]


def _fake_window_backward(grad_output, grad_size, *given):
    query, key, value, _, sink_key, sink_value, _, sink_query = given[:8]
    check_window(*given[:8])
    grads = [x.new_empty(x.shape) for x in (query, key, value, sink_key, sink_value)]
    return [*grads, query.new_empty(0) if sink_query is None else sink_query.new_empty(sink_query.shape)]


def _window_gradients_in_torch(incoming: Tensors, inputs: Sequence[Any], scaling: float) -> list[torch.Tensor]:
    leaves: Any = [x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    with torch.enable_grad():
        outputs = _window_laid_out(*plain_window(*(*leaves, scaling)))
    grads = _gradients_of(outputs, (*incoming, None), leaves)
    return [grad.contiguous() for grad, x in zip(grads, leaves) if x is None or x.requires_grad]


def _save_window(ctx, inputs, output):
    ctx.scaling = inputs[8]
    ctx.save_for_backward(*inputs[:8], output[0], output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate_window(ctx, grad_output, grad_size, _):
    *inputs, output, size = ctx.saved_tensors
    if torch.is_grad_enabled():

        def plain(*leaves):
            return _window_laid_out(*plain_window(*(*leaves, ctx.scaling)))

        return *gradients_with_graph(plain, inputs, (grad_output, grad_size, None)), None
    found = OPERATORS.window_attention_backward(grad_output, grad_size, *inputs, ctx.scaling, output, size)
    query, key, value, sink_key, sink_value, sink_query = found
    grads = (query, key, value, None, sink_key, sink_value, None, sink_query if inputs[7] is not None else None)
    return *grads, None


def _window_arguments(scaling: float, query, key, value, visible, sink_key, sink_value, seen, sink_query):
    """In five axes each."""
    kv_heads = key.shape[1]
    numbers = (visible[:, None, None, :, None], seen[:, None, None], torch.full((1, 1, 1, 1, 1), scaling))
    visible, seen, scale = (with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    key, value, sink_key, sink_value = (with_rows(x).unsqueeze(2) for x in (key, value, sink_key, sink_value))
    query, sink_query = (None if x is None else _grouped(with_rows(x), kv_heads) for x in (query, sink_query))
    return [query, key, value, visible, sink_key, sink_value, seen, sink_query, scale]


def _arguments(given: Tensors, kv_heads: int) -> list[torch.Tensor | None]:
    """Queries, keys, values, mask, decay, the affine maps of keys and of queries, and the state, in five axes each."""
    query, key, value, mask, log_decay, state, *key_map, query_weight = given
    if query is None or key is None or value is None:
        raise ValueError("queries, keys and values are needed")
    batch, heads = query.shape[:2]
    return [
        _grouped(with_rows(query), kv_heads),
        with_rows(key).unsqueeze(2),
        with_rows(value).unsqueeze(2),
        None if mask is None else mask[:, None, None, :, None].expand(-1, kv_heads, -1, -1, -1),
        None if log_decay is None else log_decay.float()[None, :, None, None, None].expand(batch, -1, -1, -1, -1),
        *(_per_head(x, batch, kv_heads, kv_heads) for x in key_map),
        *(_per_head(x, batch, kv_heads, heads) for x in (query_weight, None, None)),
        None if state is None else state.contiguous().unsqueeze(2),
    ]


def _gradient_like(x: torch.Tensor) -> torch.Tensor:
    """New memory laid out like `x` where its rows are dense, in its own order else: C writes dense rows."""
    grad = torch.empty_like(x)
    return grad if grad.stride(-1) == 1 else x.new_empty(x.shape)


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[B, H, N, X]` -> `[B, Hkv, G, N, X]`."""
    return x.unflatten(1, (kv_heads, -1))


def _per_head(x: torch.Tensor | None, batch: int, kv_heads: int, heads: int) -> torch.Tensor | None:
    """`[heads or 1, rows, columns]` -> `[B, Hkv, G, rows, columns]` in float32."""
    return None if x is None else _grouped(with_rows(x.float()).expand(batch, heads, -1, -1), kv_heads)


def _shared(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Summed over the batch, and over the heads if one `x` serves all."""
    return grad.flatten(1, 2).sum(0).sum_to_size(x.shape).to(x.dtype)


def _namespace() -> str:
    loader: Any = __spec__.loader if __spec__ is not None else None
    here = Path(__file__)
    files = (str(here.with_name(f"kernels_{name}.py")) for name in SOURCES)
    digest = hashlib.sha256(b"".join(loader.get_data(file) for file in files))
    return f"hf_linear_attention_{digest.hexdigest()[:12]}"


def _register() -> Any:
    """The operators' namespace; where another copy of these very files has defined them, its operators."""
    namespace = _namespace()
    operators: Any = getattr(torch.ops, namespace)
    with _LOCK:
        if getattr(operators, "library", None) is not None:
            return operators
        library = torch.library.Library(namespace, "FRAGMENT")
        for name, (function, fake) in IMPLEMENTATIONS.items():
            library.define(name + SCHEMAS[name])
            library.impl(name, function, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        for name, (differentiate, save) in DERIVATIVES.items():
            torch.library.register_autograd(f"{namespace}::{name}", differentiate, setup_context=save, lib=library)
        operators.library = library  # alive as long as the operators
    return operators


IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "attention": (_attention, _fake_attention),
    "attention_backward": (_attention_backward, _fake_attention_backward),
    "window_attention": (_window, _fake_window),
    "window_attention_backward": (_window_backward, _fake_window_backward),
    **WITHOUT_GRADIENTS,
}
DERIVATIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_differentiate_attention, _save_attention),
    "window_attention": (_differentiate_window, _save_window),
}


def operator(name: str) -> Callable[..., Any]:
    """An operator without gradients, or the function behind it where no mode of torch's dispatcher looks on.

    A step of one token takes 20 to 100 us; the dispatcher takes 2 to 6 of them.
    """
    is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return getattr(OPERATORS, name) if is_watched else WITHOUT_GRADIENTS[name][0]


_LOCK = threading.Lock()
OPERATORS = _register()
