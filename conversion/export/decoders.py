"""What the converted decoders have in common that stock architectures can hold: layers like those of Llama."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.layer_ranges import ranges_of


# The settings that mean the same in every decoder like Llama.
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "pad_token_id", "bos_token_id",
    "eos_token_id", "rope_parameters", "use_cache",
)  # fmt: skip


def same_fields(config: Any) -> dict[str, Any]:
    """The settings of a converted model that its stock form shares."""
    fields = config.to_dict()
    return {name: fields[name] for name in SAME if name in fields}


def linear_layers(config: Any) -> list[int]:
    """The numbers of the converted layers."""
    found: set[int] = set()
    for entry in entries_of(config.linear_attention):
        layers = entry["layers"]
        if layers == "full_attention":
            layers = [number for number, name in enumerate(config.layer_types) if name == layers]
        found |= set(range(config.num_hidden_layers) if layers == "all" else () if layers == "none" else layers)
    return sorted(found)


def softmax_layers(config: Any) -> list[int]:
    """The numbers of the layers that keep softmax."""
    return sorted(set(range(config.num_hidden_layers)) - set(linear_layers(config)))


def obstacles(config: Any, sources: Collection[str], kept: Collection[int]) -> list[str]:
    """Why an architecture cannot hold the layers of this converted model beside its attention.

    Args:
        config: of the converted model.
        sources: the stock model types whose layers the architecture has.
        kept: the layers that keep softmax.
    """
    source, problems = config.stock_model_type, []
    if source not in sources:
        allowed = ", ".join(f"`{name}`" for name in sources)
        return [f"a `{source}` model has other layers; only those of {allowed} can be rewritten"]
    if config.hidden_act != "silu":
        problems.append(
            f"`hidden_act` = `{config.hidden_act}` is not possible: linear layers have the same, which must be `silu`"
        )
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windowed = [layer for layer in kept if (types[layer] == "sliding_attention" if types else window)]
    if windowed and window < config.max_position_embeddings:
        problems.append(
            f"`sliding_window` = {window} in the softmax layers {ranges_of(windowed)} is not possible; convert them too"
        )
    return problems
