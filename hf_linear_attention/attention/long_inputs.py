# SPDX-License-Identifier: Apache-2.0
"""Long inputs of decoders in chunks, so that the memory of a forward pass does not grow with their length.

The states of linear layers make it exact: a chunk continues where the one before it ended, as any split of an input
into several calls does. What still grows is what the caller gets: logits or hidden states of all tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import ModelOutput

from .transformers_internals import CACHE_NAMES, COLLECTED, PER_TOKEN, cache_among, cache_name, is_stateful


# Tokens of a sequence in one pass: many enough for efficient projections, few enough for memory.
CHUNK_SIZE = 4096
# Of all sequences together, where CUDA kernels read them: a pass that continues from a state has more launches, and
# torch's form of exact keys takes memory for each token (4.4 GB for 32,768 tokens and one head, .55 for 4,096).
TOKENS_OF_KERNELS = 32768
# An input of at most so many tokens is one chunk, so that usual inputs are computed as they always were.
LONGEST_UNDIVIDED = 8192
OTHER_TENSORS = ("attention_mask", "logits_to_keep")
OUTPUTS = ("logits", "last_hidden_state")


def divide_long_inputs(model_class: Any, linear_modules: Callable[[Any], Mapping[str, Any]]) -> None:
    """Let the `forward` of a decoder's class compute inputs of more than `LONGEST_UNDIVIDED` tokens in chunks.

    Not divided are passes with gradients, inside torch.compile or torch.export, with labels, packed sequences, masks of
    more than two axes, arguments that this module does not know, and in models with stock recurrent layers, which need
    not continue a state with more than one token. Heads whose outputs are not per token keep their `forward`.
    """
    stock = model_class.stock_class
    is_cached = {"input_ids", "use_cache"} <= set(inspect.signature(stock.forward).parameters)
    is_cached &= cache_name(stock.forward) is not None
    if is_cached and (stock.__name__.endswith("Model") or issubclass(stock, GenerationMixin)):
        model_class.forward = _in_chunks(stock.forward, linear_modules)


def _in_chunks(forward: Callable[..., Any], linear_modules: Callable[[Any], Mapping[str, Any]]) -> Callable[..., Any]:
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        bound = dict(zip(names, args)) | kwargs
        tokens = bound.get("input_ids") if bound.get("input_ids") is not None else bound.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] <= LONGEST_UNDIVIDED:
            return forward(self, *args, **kwargs)
        modules = linear_modules(self).values()
        chunk_size = CHUNK_SIZE
        if tokens.is_cuda and all(x.linear_attention.reads_at_once(self.dtype) for x in modules):
            chunk_size = max(CHUNK_SIZE, TOKENS_OF_KERNELS // max(1, tokens.shape[0]))
        if tokens.shape[1] <= chunk_size:
            return forward(self, *args, **kwargs)
        is_linear = any(module.linear_attention_enabled for module in modules)
        has_backend = any(module.linear_attention_backend for module in modules)  # which divides inputs itself
        if not is_linear or has_backend or is_stateful(self) or not _can_divide(self.config, bound, tokens.shape[1]):
            return forward(self, *args, **kwargs)
        return _divided(functools.partial(forward, self), self.config, bound, tokens.shape[1], chunk_size)

    return wrapper


def _can_divide(config: Any, given: Mapping[str, Any], length: int) -> bool:
    wanted = (given[name] if given.get(name) is not None else getattr(config, name, None) for name in COLLECTED)
    if config.is_encoder_decoder or given.get("labels") is not None or any(wanted):
        return False
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):  # Llama 4 makes packed sequences of them
        return False
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return False
    if isinstance(given.get("logits_to_keep"), Tensor):
        return False
    unknown = [name for name, x in given.items() if isinstance(x, Tensor) and name not in (*PER_TOKEN, *OTHER_TENSORS)]
    shapes = [(given[name].shape, axis) for name, axis in PER_TOKEN.items() if isinstance(given.get(name), Tensor)]
    if unknown or any(shape[axis] != length for shape, axis in shapes):
        return False
    is_packed = positions is not None and bool((positions.diff(dim=-1) < 0).any())
    return not is_packed


def _divided(forward: Callable[..., Any], config: Any, given: Mapping[str, Any], length: int, chunk_size: int) -> Any:
    """The joined outputs of the chunks; `logits_to_keep` keeps the last rows, and 0 keeps all."""
    keep, mask = given.get("logits_to_keep", 0), given.get("attention_mask")
    use_cache = given.get("use_cache")
    use_cache = getattr(config, "use_cache", True) if use_cache is None else use_cache
    returns_dict = given.get("return_dict")
    returns_dict = getattr(config, "return_dict", True) if returns_dict is None else returns_dict
    name_of_cache: Any = next((name for name in CACHE_NAMES if name in given), None) or cache_name(forward)
    cache = cache_among(given.values())
    before = 0 if mask is None else mask.shape[1] - length
    parts: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
    for start in range(0, length, chunk_size):
        end = min(start + chunk_size, length)
        chunk = dict(given) | {name_of_cache: cache, "use_cache": True, "return_dict": True}
        for name, axis in PER_TOKEN.items():
            if isinstance(given.get(name), Tensor):
                chunk[name] = given[name].narrow(axis, start, end - start)
        if mask is not None:
            chunk["attention_mask"] = mask[:, : before + end]
        wanted = min(end - start, max(0, end - (length - keep))) if keep else end - start
        if "logits_to_keep" in given and keep:
            chunk["logits_to_keep"] = max(1, wanted)
        output: ModelOutput = forward(**chunk)
        cache = cache_among(output.values())
        for name in OUTPUTS:
            if wanted and output.get(name) is not None:
                parts[name].append(output[name])
    for name, tensors in parts.items():
        if tensors:
            output[name] = torch.cat(tensors, dim=1)
    if not use_cache:
        output = type(output)(**{name: x for name, x in output.items() if x is not cache})
    return output if returns_dict else output.to_tuple()
