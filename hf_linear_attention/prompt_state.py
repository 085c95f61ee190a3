"""The state of a prompt on disk: read a long prompt once, continue it in any later process.

    cache = model(**prompt, use_cache=True).past_key_values
    model.save_prompt_state(cache, "prompt.safetensors")
    ...
    cache = model.load_prompt_state("prompt.safetensors")
    model.generate(**prompt_and_question, past_key_values=cache)

The size of the file does not depend on the length of the prompt where every layer is linear; layers that stayed
softmax add their keys and values. As with any `past_key_values`, `generate` takes the tokens of the prompt once more in
front of the new ones, and changes the cache it was given: load it again, or copy it, for another continuation.
Left-padded prompts are read with the `position_ids` that `generate` counts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .cache_linear_attention import state_layer


METADATA = "prompt_state"


def save_prompt_state(model, past_key_values, path: str | os.PathLike) -> None:
    """Write what `past_key_values` holds of a prompt, with what tells its model from others, as a safetensors file.

    Raises:
        ValueError: for an empty cache, or one with layers that hold more than a state or keys and values.
    """
    layers = getattr(past_key_values, "layers", [])  # a cache of encoder and decoder has none of its own
    found = {f"{number}.{name}": tensor for number, layer in enumerate(layers) for name, tensor in _tensors(layer)}
    if not found:
        raise ValueError(
            f"Got a {type(past_key_values).__name__} that holds no token of a decoder; pass the `past_key_values` that "
            "the model returned for the prompt (`use_cache=True`)."
        )
    about = {**_about(model), "num_layers": len(layers), "num_tokens": int(past_key_values.get_seq_length())}
    # Cloned, because safetensors refuses tensors that share their memory.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }
    save_file(tensors, path, metadata={METADATA: json.dumps(about)})


def load_prompt_state(model, path: str | os.PathLike) -> DynamicCache:
    """`past_key_values` as they were when the prompt was saved, on the devices of `model`.

    Raises:
        ValueError: if the file is no prompt state, or one of another model, other settings or other weights.
    """
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
        _refuse_others(model, about, path)
        tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(about["num_layers"])]
        devices = {m.layer_idx: next(m.parameters()).device for m in model.modules() if _has_place(m)}
        for key in file.keys():  # noqa: SIM118, it is no dict
            number, _, name = key.partition(".")
            tensors[int(number)][name] = file.get_tensor(key).to(devices.get(int(number), model.device))
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, named in enumerate(tensors):
        _fill(cache, number, named, about["num_tokens"])
    return cache


def _has_place(module: Any) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int) and next(module.parameters(), None) is not None


def _tensors(layer) -> list[tuple[str, torch.Tensor]]:
    """What one layer holds, by name."""
    if getattr(layer, "holds_linear_state", False) and not layer.has_other_states:
        # after a rollback the state is that of before, and the tokens that stayed are still to be added to it
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
    if type(layer).__name__ == "DummyLayer":  # shares the keys of another; transformers 5.16 has no such class
        return []
    raise ValueError(
        f"Got a cache with a {type(layer).__name__}, which cannot be saved; of softmax layers a prompt state takes "
        "those of a `DynamicCache`, and nothing recurrent of the model's own."
    )


def _fill(cache: DynamicCache, number: int, named: dict[str, torch.Tensor], num_tokens: int) -> None:
    """Put the tensors of one layer where they came from."""
    if "keys" in named:
        layer: Any = cache.layers[number]
        layer.lazy_initialization(named["keys"], named["values"])
        layer.keys, layer.values = named["keys"], named["values"]
        if layer.is_sliding:
            layer.cumulative_length = num_tokens
    elif named:
        state_layer(cache, number).restore(_part(named, "state"), _part(named, "pending"), num_tokens)


def _part(named: dict[str, torch.Tensor], part: str) -> tuple[torch.Tensor, ...]:
    count = sum(name.startswith(f"{part}.") for name in named)
    return tuple(named[f"{part}.{place}"] for place in range(count))


def _about(model) -> dict[str, Any]:
    """What a state depends on besides the prompt."""
    return {
        "model_type": model.config.model_type,
        "linear_attention": json.loads(json.dumps(model.config.linear_attention)),
        "dtype": str(model.dtype),
        "weights": _fingerprint(model),
    }


def _fingerprint(model) -> str:
    """Of up to about 64 numbers of every parameter and buffer: a step of training changes it, reading it is quick."""
    digest = hashlib.sha256()
    for entry in model.state_dict().values():
        for tensor in _plain_tensors(entry):
            sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)]
            digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


def _plain_tensors(entry: Any) -> Iterator[torch.Tensor]:
    """Quantised weights are several tensors in one; on the meta device are those that accelerate offloaded to disk."""
    if hasattr(entry, "__tensor_flatten__"):
        for name in entry.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(entry, name))
    elif isinstance(entry, torch.Tensor) and not entry.is_meta:
        yield entry


def _refuse_others(model, about: dict[str, Any], path) -> None:
    if not about:
        raise ValueError(f"Got {str(path)!r}, which is no prompt state; `save_prompt_state` writes them.")
    pairs = {name: (about[name], value) for name, value in _about(model).items() if about[name] != value}
    if pairs:
        differing = [f"`{name}` is {its!r}, the model's {ours!r}" for name, (its, ours) in pairs.items()]
        raise ValueError(
            f"Got a prompt state of another model in {str(path)!r}: {'; '.join(differing)}. Load the model that it was "
            "saved with, or let this one read the prompt again."
        )
