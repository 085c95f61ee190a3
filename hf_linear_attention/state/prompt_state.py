# SPDX-License-Identifier: Apache-2.0
"""The state of a prompt on disk: read a long prompt once and continue it in any later process.

    cache = model(**prompt, use_cache=True).past_key_values
    model.save_prompt_state(cache, "prompt.safetensors")
    cache = model.load_prompt_state("prompt.safetensors")
    model.generate(**prompt_and_question, past_key_values=cache)

If every layer is linear, the size of the file does not depend on the length of the prompt. As with any
`past_key_values`, `generate` expects the tokens of the prompt in front of the new ones, and changes the cache that it
gets: load or copy it for each continuation. Left-padded prompts must be read with the `position_ids` of `generate`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..attention.cache import state_layer
from ..attention.transformers_internals import cache_among
from ..configuration_linear_attention import check_format_version
from ..modeling_linear_attention import linear_attention_modules


METADATA = "prompt_state"
FORMAT_VERSION = 1
# Layers with softmax, and their tensors.
STOCK, SOFTMAX = (DynamicLayer, DynamicSlidingWindowLayer), ("keys", "values")


@torch.no_grad()
def save_prompt_state(model: Any, past_key_values: Cache, path: str | os.PathLike) -> None:
    """Write the prompt in `past_key_values`, and what identifies its model, to a safetensors file.

    The file is written beside `path` and then renamed, so a failure leaves the old file unchanged.

    Raises:
        ValueError: for an empty cache, or one with layers that hold more than a state or keys and values.
        OSError: if the file cannot be written.
    """
    identity = identity_of(model)
    layers = getattr(past_key_values, "layers", [])  # an encoder-decoder cache has no layers of its own
    for module in linear_attention_modules(model).values():
        layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
        if getattr(layer, "pending", None) is not None:  # after a rollback
            module.absorb_pending(layer)
    found = {f"{number}.{name}": tensor for number, layer in enumerate(layers) for name, tensor in _tensors(layer)}
    if not found:
        raise ValueError(
            f"Got a {type(past_key_values).__name__} that holds no token of a decoder; pass the `past_key_values` that "
            "the model returned for the prompt (`use_cache=True`)."
        )
    # safetensors refuses tensors that share memory, so they are cloned.
    tensors = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in found.items()}
    about = {**identity, "num_tokens": int(past_key_values.get_seq_length())}
    metadata, path = {METADATA: json.dumps({**about, "sha256": _digest(about, tensors)})}, Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder; create it before `save_prompt_state` writes into it.")
    # A file in a temporary folder, unlike a temporary file, gets the usual permissions.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        try:
            save_file(tensors, written, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{path} could not be written: {error}") from error
        os.replace(written, path)


def load_prompt_state(model: Any, path: str | os.PathLike) -> DynamicCache:
    """Restore the `past_key_values` of a saved prompt on the devices of `model`.

    The model first reads one token; every tensor of the file must match one in the resulting cache.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is not a prompt state, is damaged, comes from a newer version of this code, or belongs
            to another model, other settings or other weights.
    """
    about, tensors = _read(path)
    ours = {name: (about.get(name), value) for name, value in identity_of(model).items()}
    differing = [f"`{name}` is {its!r}, the model's is {own!r}" for name, (its, own) in ours.items() if its != own]
    if differing:
        raise ValueError(
            f"Got a prompt state of another model in {str(path)!r}: {'; '.join(differing)}. Load the model with which "
            "it was saved, or let this model read the prompt again."
        )
    if about.pop("sha256", None) != _digest(about, tensors):
        raise _damaged(path, "its checksum does not match its content")
    made = _layers_of_one_token(model)
    if problem := _problem(about.get("num_tokens"), tensors, made):
        raise _damaged(path, problem)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in enumerate(made):
        named = [tensors[f"{number}.{name}"] for name, _ in _tensors(layer)]
        _fill(cache, number, named, layer, about["num_tokens"])
    return cache


def _damaged(path: str | os.PathLike, problem: str) -> ValueError:
    return ValueError(f"Got a damaged prompt state in {str(path)!r}: {problem}. Let the model read the prompt again.")


def _read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of a file and its tensors."""
    if os.path.exists(path) and not os.path.isfile(path):  # a folder, or a pipe, for which one would wait
        raise ValueError(f"Got {str(path)!r}, which is not a file; pass a file from `save_prompt_state`.")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        raise _damaged(path, f"it is not a complete safetensors file ({error})") from error
    if text is None:
        raise ValueError(f"Got {str(path)!r}, which is not a prompt state; pass a file from `save_prompt_state`.")
    try:
        if not isinstance(about := json.loads(text), dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its metadata is not JSON ({error})") from error
    check_format_version(about.get("format_version"), FORMAT_VERSION, f"the prompt state {str(path)!r}")
    return about, tensors


def _digest(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


@torch.no_grad()
def _layers_of_one_token(model: Any) -> list[Any]:
    """The cache layers after one token; only the model knows the names, sizes and dtypes of their tensors."""
    training = [module for module in model.modules() if module.training]
    model.eval()  # in training mode, random projections may be redrawn and gradient checkpointing disables the cache
    try:
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True)
    finally:
        for module in training:
            module.training = True
    cache: Any = cache_among(output.values())
    return cache.layers


def _problem(num_tokens: Any, tensors: dict[str, Tensor], made: list[Any]) -> str | None:
    """What is wrong with the tensors, compared with the layers `made` of one token, or None."""
    if type(num_tokens) is not int or not 1 <= num_tokens <= torch.iinfo(torch.int64).max:
        return f"`num_tokens` is {num_tokens!r}, but must be an integer above 0"
    expected = {f"{n}.{name}": (tensor, layer) for n, layer in enumerate(made) for name, tensor in _tensors(layer)}
    if set(tensors) != set(expected):
        differing = (expected.keys() - tensors, tensors.keys() - expected)
        lacking, strange = (", ".join(sorted(names)) for names in differing)
        return f"it lacks {lacking or 'no tensor'}, and this model makes no {strange or 'other one'}"
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors.values()}
    if len(rows) != 1 or not min(rows):
        return f"its tensors have {sorted(rows)} rows, but must all have the same number of rows"
    for name, tensor in tensors.items():
        one, layer = expected[name]
        sizes, dtype = [(size, size) for size in one.shape[1:]], one.dtype
        if name.endswith(SOFTMAX):  # of the window, if there is one, at least what the next token sees
            least = min(num_tokens, layer.sliding_window - 1) if getattr(layer, "is_sliding", False) else num_tokens
            sizes[1] = least, num_tokens
        fits = [low <= size <= high for size, (low, high) in zip(tensor.shape[1:], sizes)]
        if tensor.ndim != one.ndim or not all(fits) or tensor.dtype != dtype:
            wanted = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in sizes)
            made_here = f"[{tensor.shape[0]}, {wanted}] in {dtype}"
            return f"`{name}` is {list(tensor.shape)} in {tensor.dtype}; this model makes {made_here}"
        # Token counts and window markers, from which the kernels compute addresses.
        if dtype in (torch.int8, torch.int64) and tensor.numel():
            high = num_tokens if dtype == torch.int64 else torch.iinfo(torch.int8).max
            if tensor.min() < 0 or tensor.max() > high:
                return f"`{name}` holds {tensor.min().item()} to {tensor.max().item()}, but must hold 0 to {high}"
    return None


def _tensors(layer: Any) -> list[tuple[str, Tensor]]:
    """The tensors of one layer, with their names."""
    if getattr(layer, "holds_linear_state", False) and not layer.has_other_states:
        return [(f"state.{place}", tensor) for place, tensor in enumerate(layer.state or ())]
    if type(layer) in STOCK:
        return [(name, getattr(layer, name)) for name in SOFTMAX] if layer.is_initialized else []
    if type(layer).__name__ == "DummyLayer":  # shares the keys of another layer; transformers 5.16 lacks the class
        return []
    raise ValueError(
        f"Got a cache with a {type(layer).__name__}, which cannot be saved. A prompt state holds linear layers and the "
        "softmax layers of a `DynamicCache`, but no recurrent layers of the stock model."
    )


def _fill(cache: DynamicCache, number: int, tensors: list[Tensor], made: Any, num_tokens: int) -> None:
    """Put the tensors of one layer into the cache, on the devices of those of the layer `made`."""
    tensors = [tensor.to(own.device) for tensor, (_, own) in zip(tensors, _tensors(made))]
    layer: Any = cache.layers[number] if type(made) in STOCK else None
    if layer is not None and tensors:
        layer.lazy_initialization(*tensors)
        layer.keys, layer.values = tensors
        if layer.is_sliding:
            layer.cumulative_length = num_tokens
    elif tensors:
        layer = state_layer(cache, number)
        layer.restore(tuple(tensors), num_tokens)
        layer.signature, layer.layout = made.signature, made.layout


def identity_of(model: Any) -> dict[str, Any]:
    """The properties of the converted model (else TypeError) on which a state depends."""
    if getattr(getattr(model, "config", None), "linear_attention", None) is None:
        raise TypeError(f"Got a {type(model).__name__}, which is not converted; pass a model that `convert` returns.")
    weights = hashlib.sha256()  # of every parameter and persistent buffer, which costs .7 CPU seconds per GiB
    for entry in model.state_dict().values():
        for tensor in _plain_tensors(entry):
            weights.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            weights.update(_bytes_of(tensor))
    return {
        "model_type": model.config.model_type,
        "linear_attention": json.loads(json.dumps(model.config.linear_attention)),
        "dtype": str(model.dtype),
        "weights": weights.hexdigest(),
        "format_version": FORMAT_VERSION,
    }


def _plain_tensors(entry: Any) -> Iterator[Tensor]:
    """The tensors inside a quantised weight, without tensors on the meta device, which accelerate offloaded to disk."""
    if hasattr(entry, "__tensor_flatten__"):
        for name in entry.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(entry, name))
    elif isinstance(entry, Tensor) and not entry.is_meta:
        yield entry
