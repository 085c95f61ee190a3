# SPDX-License-Identifier: Apache-2.0
"""The state of a prompt on disk: read a long prompt once and continue it in any later process.

    cache = model(**prompt, use_cache=True).past_key_values
    model.save_prompt_state(cache, "prompt.safetensors")
    ...
    cache = model.load_prompt_state("prompt.safetensors")
    model.generate(**prompt_and_question, past_key_values=cache)

If every layer is linear, the size of the file does not depend on the length of the prompt; softmax layers add their
keys and values. As with any `past_key_values`, `generate` expects the tokens of the prompt in front of the new ones,
and changes the cache that it gets: load or copy the cache for each continuation. Left-padded prompts must be read with
the same `position_ids` that `generate` uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ..attention.cache import state_layer
from ..attention.transformers_internals import cache_among
from ..configuration_linear_attention import COMMON_SETTINGS, check_format_version
from ..mechanisms.registry import MECHANISMS


METADATA = "prompt_state"
# The version of the file format.
#   1  files without the field `format_version`: no checksum
#   2  with `sha256`, the checksum of the tensors and of all other metadata; `weights` sees 64 numbers per tensor
#   3  `weights` sees every weight; with `tokens` in files of a PromptStore
FORMAT_VERSION = 3
# For each model, the checksums of its tensors by what changes when a tensor does.
_CHECKSUMS: weakref.WeakKeyDictionary[Any, dict[tuple, bytes]] = weakref.WeakKeyDictionary()


def save_prompt_state(model: Any, past_key_values: Cache, path: str | os.PathLike) -> None:
    """Write the prompt in `past_key_values`, and what identifies its model, to a safetensors file.

    The file is written beside `path` and then renamed, so a failure leaves the old file unchanged.

    Raises:
        ValueError: for an empty cache, or one with layers that hold more than a state or keys and values.
        OSError: if the file cannot be written.
    """
    write_prompt_state(model, past_key_values, path)


def write_prompt_state(model: Any, past_key_values: Cache, path: str | os.PathLike, **more: str) -> None:
    """As `save_prompt_state`, with `more` in the metadata of the file."""
    layers = getattr(past_key_values, "layers", [])  # an encoder-decoder cache has no layers of its own
    found = {f"{number}.{name}": tensor for number, layer in enumerate(layers) for name, tensor in _tensors(layer)}
    if not found:
        raise ValueError(
            f"Got a {type(past_key_values).__name__} that holds no token of a decoder; pass the `past_key_values` that "
            "the model returned for the prompt (`use_cache=True`)."
        )
    # safetensors refuses tensors that share memory, so they are cloned.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }
    sizes = {"num_layers": len(layers), "num_tokens": int(past_key_values.get_seq_length())}
    about = {**identity_of(model), **sizes, **more}
    metadata = {METADATA: json.dumps({**about, "sha256": _digest(about, tensors)})}
    path = Path(path)
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
    return read_prompt_state(model, path)[1]


def read_prompt_state(model: Any, path: str | os.PathLike) -> tuple[dict[str, Any], DynamicCache]:
    """The metadata of a prompt state and, as from `load_prompt_state`, its cache."""
    about, tensors = _read(path)
    refuse_others(model, about, path)
    checksum = about.pop("sha256", None)
    if about["format_version"] > 1 and checksum != _digest(about, tensors):
        raise _damaged(path, "its checksum does not match its content")
    made = _layers_of_one_token(model)
    if problem := _size_problem(about, tensors, len(made)):
        raise _damaged(path, problem)
    num_tokens = about["num_tokens"]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in enumerate(made):
        prefix = f"{number}."
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if problem := _layer_problem(named, layer, num_tokens):
            raise _damaged(path, f"in layer {number}, {problem}")
        _fill(cache, number, named, layer, num_tokens)
    return about, cache


def _damaged(path: str | os.PathLike, problem: str) -> ValueError:
    return ValueError(f"Got a damaged prompt state in {str(path)!r}: {problem}. Let the model read the prompt again.")


def _read(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The metadata of a file, with a `format_version`, and its tensors."""
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
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its metadata is not JSON ({error})") from error
    if not isinstance(about, dict):
        raise _damaged(path, "its metadata is not a JSON object")
    return with_format_version(about, path), tensors


def with_format_version(about: dict[str, Any], path: str | os.PathLike) -> dict[str, Any]:
    """The metadata in the file `path` with its `format_version`, which the first version does not name.

    Raises:
        ValueError: if there is no such version, or it is newer than this code.
    """
    about.setdefault("format_version", 1)
    check_format_version(about["format_version"], FORMAT_VERSION, f"the prompt state {str(path)!r}")
    return about


def _digest(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
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


def _size_problem(about: dict[str, Any], tensors: dict[str, torch.Tensor], num_layers: int) -> str | None:
    """What is wrong with the numbers of layers, tokens and rows, or None."""
    for name, most in (("num_layers", num_layers), ("num_tokens", torch.iinfo(torch.int64).max)):
        value = about.get(name)
        if type(value) is not int or not 1 <= value <= most:
            return f"`{name}` is {value!r}, but must be an integer from 1 to {most}"
    places = {f"{number}." for number in range(about["num_layers"])}
    if strange := sorted(name for name in tensors if name[: name.find(".") + 1] not in places):
        return f"it has tensors that belong to no layer of this model, {', '.join(strange)}"
    rows = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors.values()}
    if len(rows) != 1 or not min(rows):
        return f"its tensors have {sorted(rows)} rows, but must all have the same number of rows"
    return None


def _layer_problem(named: dict[str, torch.Tensor], layer: Any, num_tokens: int) -> str | None:
    """What is wrong with the tensors of one layer, compared with the model's own cache of one token, or None."""
    expected = _expected(layer, num_tokens)
    choices = [set(choice) for choice in _choices(layer)]
    if set(named) not in choices:
        allowed = " or ".join(", ".join(sorted(choice)) or "none" for choice in choices)
        return f"the tensors are {', '.join(sorted(named)) or 'none'}; this model makes {allowed}"
    for name, tensor in named.items():
        sizes, dtype = expected[name]
        fits = [low <= size <= high for size, (low, high) in zip(tensor.shape[1:], sizes)]
        if tensor.ndim != len(sizes) + 1 or not all(fits) or tensor.dtype != dtype:
            wanted = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in sizes)
            return (
                f"`{name}` is {list(tensor.shape)} in {tensor.dtype}; this model makes [{tensor.shape[0]}, {wanted}] "
                f"in {dtype}"
            )
        # Token counts and window markers, from which the kernels compute addresses.
        if tensor.dtype in (torch.int8, torch.int64) and tensor.numel():
            high = num_tokens if tensor.dtype == torch.int64 else torch.iinfo(torch.int8).max
            if tensor.min() < 0 or tensor.max() > high:
                return f"`{name}` holds {tensor.min().item()} to {tensor.max().item()}, but must hold 0 to {high}"
    lengths = {tensor.shape[2 if tensor.ndim == 4 else 1] for name, tensor in named.items() if "pending" in name}
    if len(lengths) > 1 or (lengths and "state.0" not in named and lengths != {num_tokens}):
        return f"the tensors `pending` hold {sorted(lengths)} of {num_tokens} tokens"
    return None


def _choices(layer: Any) -> list[list[str]]:
    """The possible sets of tensor names of a layer; after a rollback some have `pending` tokens, or only those."""
    if not getattr(layer, "holds_linear_state", False):
        return [[name for name, _ in _tensors(layer)]]
    state = [f"state.{place}" for place, tensor in enumerate(layer.state) if tensor is not None]
    pending = [f"pending.{place}" for place in range(4)]
    beside = {"pending.4": layer.gate_layout, "pending.5": layer.query_layout}
    always = [name for name, layout in beside.items() if layout is not None]
    after_rollback = [[*pending[:count], *always] for count in (2, 3, 4)]
    return [state, *([*state, *names] for names in after_rollback), *after_rollback]


def _expected(layer: Any, num_tokens: int) -> dict[str, tuple[list[tuple[int, int]], torch.dtype]]:
    """For each name, the (smallest, largest) size of every axis but the rows, and the dtype."""
    if not getattr(layer, "holds_linear_state", False):
        least = min(num_tokens, layer.sliding_window - 1) if getattr(layer, "is_sliding", False) else num_tokens
        return {
            name: ([_only(tensor.shape[1]), (least, num_tokens), _only(tensor.shape[3])], tensor.dtype)
            for name, tensor in _tensors(layer)
        }
    num_heads, key_size, value_size, key_dtype, value_dtype = layer.layout
    tokens = (1, num_tokens)
    gate_size, gate_dtype = layer.gate_layout or (0, torch.float32)
    num_queries, query_size, query_dtype = layer.query_layout or (0, 0, key_dtype)
    expected = {
        "pending.0": ([_only(num_heads), tokens, _only(key_size)], key_dtype),
        "pending.1": ([_only(num_heads), tokens, _only(value_size)], value_dtype),
        "pending.2": ([tokens], torch.bool),
        "pending.3": ([tokens], torch.int32),
        "pending.4": ([tokens, _only(gate_size)], gate_dtype),
        "pending.5": ([_only(num_queries), tokens, _only(query_size)], query_dtype),
    }
    for place, tensor in enumerate(layer.state):
        if tensor is not None:
            expected[f"state.{place}"] = ([_only(size) for size in tensor.shape[1:]], tensor.dtype)
    return expected


def _only(size: int) -> tuple[int, int]:
    return size, size


def _tensors(layer: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one layer, with their names."""
    if getattr(layer, "holds_linear_state", False) and not layer.has_other_states:
        # After a rollback the state is the one before the removed tokens, and `pending` is yet to be added to it.
        state = layer.state if layer.pending is None else layer.state_at_crop
        parts = {"state": state or (), "pending": layer.pending or ()}
        return [
            (f"{name}.{place}", tensor)
            for name, part in parts.items()
            for place, tensor in enumerate(part)
            if tensor is not None
        ]
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return [("keys", layer.keys), ("values", layer.values)] if layer.is_initialized else []
    if type(layer).__name__ == "DummyLayer":  # shares the keys of another layer; transformers 5.16 lacks the class
        return []
    raise ValueError(
        f"Got a cache with a {type(layer).__name__}, which cannot be saved. A prompt state holds linear layers and the "
        "softmax layers of a `DynamicCache`, but no recurrent layers of the stock model."
    )


def _fill(cache: DynamicCache, number: int, named: dict[str, torch.Tensor], made: Any, num_tokens: int) -> None:
    """Put the tensors of one layer into the cache, on the device of the layer `made`."""
    if "keys" in named:
        layer: Any = cache.layers[number]
        keys, values = (named[name].to(made.keys.device) for name in ("keys", "values"))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if layer.is_sliding:
            layer.cumulative_length = num_tokens
    elif named:
        layer = state_layer(cache, number)
        parts = {name: tensor.to(made.state[0].device) for name, tensor in named.items()}
        layer.restore(_part(parts, "state"), _part(parts, "pending"), num_tokens)
        layer.signature, layer.layout = made.signature, made.layout


def _part(named: dict[str, torch.Tensor], part: str) -> tuple[torch.Tensor | None, ...]:
    """The tensors of a part in their places; None in a place whose tensor is missing."""
    places = [int(name.split(".")[1]) for name in named if name.startswith(f"{part}.")]
    return tuple(named.get(f"{part}.{place}") for place in range(max(places, default=-1) + 1))


def identity_of(model: Any, format_version: int = FORMAT_VERSION) -> dict[str, Any]:
    """The properties of the model on which a state depends, as files of this version hold them.

    Raises:
        TypeError: for what is not a converted model.
    """
    if getattr(getattr(model, "config", None), "linear_attention", None) is None:
        raise TypeError(f"Got a {type(model).__name__}, which is not converted; pass a model that `convert` returns.")
    return {
        "model_type": model.config.model_type,
        "linear_attention": json.loads(json.dumps(model.config.linear_attention)),
        "dtype": str(model.dtype),
        "weights": _fingerprint(model) if format_version > 2 else _sampled_fingerprint(model),
        "format_version": format_version,
    }


def _fingerprint(model: Any) -> str:
    """A hash of every parameter and persistent buffer, which costs .7 CPU seconds per GiB of weights.

    A tensor is hashed once, and again after it has changed: when torch counted an operation in place, when it has
    other memory, or when one of 64 numbers of it is another. So one weight that is changed through `.data`, which
    torch does not count, is seen by the next process, and may be missed by one that has hashed the tensor before.
    """
    digest, known, found = hashlib.sha256(), _CHECKSUMS.get(model, {}), {}
    for tensor in _weights(model):
        version = None if tensor.is_inference() else tensor._version
        key = (tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride(), _sample(tensor))
        if key not in found:
            about = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
            found[key] = known.get(key) or hashlib.sha256(about + hashlib.sha256(_bytes_of(tensor)).digest()).digest()
        digest.update(found[key])
    _CHECKSUMS[model] = found
    return digest.hexdigest()


def _sampled_fingerprint(model: Any) -> str:
    digest = hashlib.sha256()
    for tensor in _weights(model):
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> bytes:
    """About 64 numbers of a tensor."""
    sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)]
    return sample.cpu().double().numpy().tobytes()  # in this order: Apple GPUs lack float64


def _weights(model: Any) -> Iterator[torch.Tensor]:
    for entry in model.state_dict().values():
        yield from _plain_tensors(entry)


def _plain_tensors(entry: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a quantised weight, without tensors on the meta device, which accelerate offloaded to disk."""
    if hasattr(entry, "__tensor_flatten__"):
        for name in entry.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(entry, name))
    elif isinstance(entry, torch.Tensor) and not entry.is_meta:
        yield entry


def _with_defaults(settings: Any) -> Any:
    """The settings in a file, of one mechanism or a list; older files lack the options that did not exist yet."""
    if isinstance(settings, list):
        return [_with_defaults(entry) for entry in settings]
    mechanism = MECHANISMS.get(str(settings.get("mechanism"))) if isinstance(settings, dict) else None
    if mechanism is None:
        return settings
    defaults = {name: option.default for name, option in mechanism.options.items()}
    return {**COMMON_SETTINGS, **defaults, "format_version": 1, **settings}


def refuse_others(model: Any, about: dict[str, Any], path: str | os.PathLike) -> None:
    """Refuse the `identity_of` another model, which stands in the file `path` with its `format_version`.

    Raises:
        ValueError: naming every difference.
    """
    ours = identity_of(model, about["format_version"])
    theirs = {name: about.get(name) for name in ours}
    theirs["linear_attention"] = _with_defaults(theirs["linear_attention"])
    differing = [
        f"`{name}` is {theirs[name]!r}, the model's is {value!r}"
        for name, value in ours.items()
        if theirs[name] != value
    ]
    if differing:
        raise ValueError(
            f"Got a prompt state of another model in {str(path)!r}: {'; '.join(differing)}. Load the model with which "
            "it was saved, or let this model read the prompt again."
        )
