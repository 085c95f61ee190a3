"""What a conversion will do, worked out on the meta device: no weight is loaded and nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.heads import Head, Inputs, head_of
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.attention.architectures import attention_modules
from hf_linear_attention.attention.transformers_internals import loaded_names
from hf_linear_attention.configuration_linear_attention import entries_of, mechanisms_of
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.layer_ranges import layers_text, spread
from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.settings import OWN
from hf_linear_attention.model_conversion import convert_config, refuse_converted, refuse_own_code, stock_model_class
from hf_linear_attention.modeling_linear_attention import (
    linear_attention_modules,
    linear_model_class,
    self_attention_modules,
)
from hf_linear_attention.state_size import cache_bytes_per_token, state_bytes
from hf_linear_attention.survey import converted_features, is_bounded
from hf_linear_attention.training.recipe import MECHANISM


MOST_SIZES = 3  # of states that are named one by one
# The settings that the conversion itself adds: their format, and the rotary positions of the layers.
NOT_CHOSEN = ("format_version", "rotary")


@dataclass(frozen=True)
class LayerPlan:
    """One attention layer that becomes linear: the names of its module, classes and mechanism, and its sizes.

    `state_bytes` is for a sequence of any length, None without a state; `cache_bytes_per_token` is what keys and values
    of a token took in the softmax model.
    """

    layer: int
    module: str
    stock_class: str
    linear_class: str
    mechanism: str
    num_heads: int
    state_bytes: int | None
    cache_bytes_per_token: int


@dataclass(frozen=True)
class TensorPlan:
    """One tensor. `source` is its name in the checkpoint (None if new), `target` in the model (None if dropped)."""

    source: str | None
    target: str | None
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(torch.Size(self.shape).numel())


# What models read, by the name of their main input.
INPUTS: dict[str, Inputs] = {
    "input_ids": "text",
    "pixel_values": "images",
    "input_values": "sound",
    "input_features": "sound",
}


@dataclass
class Plan:
    """The whole conversion.

    `model` is the converted model on the meta device. `tied` tensors are shared with a mapped tensor and are not
    stored. `num_bounded` layers keep softmax with a sliding window or chunks of their own.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    stock_class: type[PreTrainedModel]
    num_layers: int
    layers: list[LayerPlan]
    mapped: list[TensorPlan]
    new: list[TensorPlan]
    dropped: list[TensorPlan]
    tied: list[TensorPlan]
    dropped_features: list[str]
    num_bounded: int = 0

    @property
    def stock_form(self) -> str | None:
        """The stock architecture in whose form the layers are converted, or None."""
        return min({entry.get("form", OWN) for entry in entries_of(self.settings)} - {OWN}, default=None)

    @property
    def linear_class(self) -> type[PreTrainedModel]:
        """The class of the converted model."""
        return linear_model_class(self.stock_class)

    @property
    def head(self) -> Head:
        """What the model's head is for."""
        inputs = INPUTS.get(self.stock_class.main_input_name, "text")
        return head_of(self.stock_class.__name__, inputs, bool(self.config.is_encoder_decoder))

    @property
    def settings(self) -> Any:
        """The entries of `config.linear_attention` that are options; a list if layers have different settings."""
        entries = [
            {name: value for name, value in entry.items() if name not in NOT_CHOSEN}
            for entry in entries_of(self.config.linear_attention)
        ]
        return entries[0] if isinstance(self.config.linear_attention, Mapping) else entries

    @property
    def mechanisms(self) -> str:
        """The names of the mechanisms, as part of a sentence."""
        return " and ".join(f"`{name}`" for name in sorted(mechanisms_of(self.config.linear_attention)))

    @property
    def new_base(self) -> list[TensorPlan]:
        """New tensors that do not belong to a mechanism, such as parts of the head that the checkpoint lacks."""
        return [tensor for tensor in self.new if MECHANISM not in str(tensor.target)]

    @property
    def weights(self) -> dict[str, int]:
        """The total and new number of weights, including buffers that define the function (random projections)."""
        new = sum(tensor.numel for tensor in self.new)
        return {"total": sum(tensor.numel for tensor in self.mapped) + new, "new": new}

    @property
    def state_bytes(self) -> int | None:
        """The size of the state of all converted layers per sequence, or None."""
        return sum(layer.state_bytes or 0 for layer in self.layers) or None

    @property
    def state_sizes(self) -> dict[str, int | None]:
        """The size of the state per layer, for each group of layers with the same size: `{"layers 0-3": 2048}`."""
        sizes = dict.fromkeys(layer.state_bytes for layer in self.layers)
        return {layers_text([e.layer for e in self.layers if e.state_bytes == size]): size for size in sizes}

    @property
    def figures(self) -> dict[str, Any]:
        """The figures in conversion_report.json and the model card."""
        sizes = self.state_sizes if len(self.state_sizes) > 1 else {}
        if len(sizes) > MOST_SIZES:
            numbers = [size or 0 for size in sizes.values()]
            sizes = {"the smallest": min(numbers), "the largest": max(numbers)}
        return {
            "layers converted": f"{len(self.layers)} of {self.num_layers}",
            **({"layers that keep a sliding window": self.num_bounded} if self.num_bounded else {}),
            "weights": self.weights["total"],
            "new weights": self.weights["new"],
            "state bytes per sequence": self.state_bytes,
            **{f"state bytes per layer and sequence, {layers}": size for layers, size in sizes.items()},
        }

    def confirm(self, missing: set[str]) -> None:
        """Correct the plan by the names that the loader missed; it may have merged a new tensor from several others."""
        found = [tensor for tensor in self.new_base if tensor.target not in missing]
        self.new = [tensor for tensor in self.new if tensor not in found]
        self.mapped += found

    def to_dict(self) -> dict[str, Any]:
        """The plan as an entry of conversion_report.json."""
        return {
            "model_type": self.config.model_type,
            "stock_class": self.stock_class.__name__,
            "linear_class": self.linear_class.__name__,
            "settings": self.settings,
            "num_layers": self.num_layers,
            "layers": [asdict(layer) for layer in self.layers],
            "state_bytes": self.state_bytes,
            "weights": self.weights,
            "dropped_features": self.dropped_features,
            "tensors": {
                kind: [asdict(tensor) for tensor in getattr(self, kind)]
                for kind in ("mapped", "new", "dropped", "tied")
            },
        }


def make_plan(
    source: Source,
    settings: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    trust_remote_code: bool = False,
    dtype: str = "auto",
) -> Plan:
    """Work out the conversion of a checkpoint.

    Args:
        settings: `mechanism`, `layers` and the options given, or a list of these for layers with different settings.
        dtype: the dtype of the result; `auto` is that of the checkpoint.

    Raises:
        UsageError: if the checkpoint cannot be converted, or not with these settings.
    """
    stock = stock_config(source, trust_remote_code)
    _refuse_quantized(source, stock)
    kept_dtype = _dtype_of(dtype, source)
    with reading(source.config_file):
        refuse_converted(stock)
        stock_class = stock_model_class(stock)
    with reading(source.config_file, names_ours=False):
        config = convert_config(stock, settings, model_class=stock_class, dtype=kept_dtype)
        with torch.device("meta"):
            model = linear_model_class(stock_class)(config)
    converted = linear_attention_modules(model)
    tensors = _tensor_plans(source, model)
    attention = self_attention_modules(model)
    names = list(attention)
    if any(entry["cross_attention"] for entry in entries_of(config.linear_attention)):
        names += attention_modules(model, cross=True)
    return Plan(
        model=model,
        config=config,
        stock_class=stock_class,
        num_layers=len(names),
        layers=sorted(
            (_layer_plan(names.index(name), name, module, kept_dtype) for name, module in converted.items()),
            key=lambda layer: layer.layer,
        ),
        dropped_features=_dropped_features(model, {names.index(name): module for name, module in converted.items()}),
        **tensors,
        num_bounded=sum(is_bounded(x) for x in attention.values() if x not in set(converted.values())),
    )


def spread_over_layers(settings: Mapping[str, Any], source: Source, trust_remote_code: bool = False) -> Any:
    """Settings without values by layer (`layer_ranges.py`), for the model that `make_plan` would convert.

    Raises:
        UsageError: if the values do not fit the layers, or the checkpoint cannot be converted.
    """
    stock = stock_config(source, trust_remote_code)
    with reading(source.config_file, names_ours=False):
        return spread(settings, stock_model_class(stock), stock)


def stock_config(source: Source, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of the source.

    Raises:
        UsageError: if there is none that transformers can read, or the model has code of its own.
    """
    content = read_json(source.config_file)
    kind = content.get("model_type")
    if content.get("auto_map") and not trust_remote_code and kind not in CONFIG_MAPPING:
        raise UsageError(
            f"{source.config_file}: transformers {transformers.__version__} has no `{kind}`, whose code is in the "
            "checkpoint, and a converted checkpoint would not have it; only models of transformers are converted"
        )
    with reading(source.config_file):
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
        refuse_own_code(type(config))
    return config


def _refuse_quantized(source: Source, config: PreTrainedConfig) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise UsageError(
            f"by {source.config_file}, the model is quantized ({method}); convert the full-precision original and "
            "quantize the result"
        )


def _layer_plan(layer: int, name: str, module: nn.Module, dtype: torch.dtype) -> LayerPlan:
    mechanism = cast(AttentionMechanism, module.linear_attention)
    shape, kind = mechanism.shape, mechanism.settings["mechanism"]
    names = cast(type, module.stock_class).__name__, type(module).__name__, kind
    sizes = state_bytes(module, dtype), cache_bytes_per_token(module, dtype)
    return LayerPlan(layer, name, *names, shape.num_heads, *sizes)


def _dtype_of(dtype: str, source: Source) -> torch.dtype:
    if dtype == "auto":
        floating = [info.dtype for info in source.tensors.values() if "float" in info.dtype]
        dtype = max(set(floating), key=floating.count, default="float32")
    return getattr(torch, dtype)


def _tensor_plans(source: Source, model: PreTrainedModel) -> dict[str, list[TensorPlan]]:
    expected = model.state_dict()
    targets = loaded_names(source.tensors, model, expected)
    _refuse_other_shapes(source, targets, {name: tensor.shape for name, tensor in expected.items()})
    mapped: list[TensorPlan] = []
    dropped: list[TensorPlan] = []
    for name, info in source.tensors.items():
        target = targets[name][0] if targets[name][0] in expected else None
        (dropped if target is None else mapped).append(TensorPlan(name, target, info.shape, info.dtype))
    filled = {tensor.target for tensor in mapped}
    ties = model.all_tied_weights_keys
    tied: list[TensorPlan] = []
    new: list[TensorPlan] = []
    for name, tensor in expected.items():
        if name not in filled:
            kind = tied if ties.get(name) in filled or name in {ties.get(other) for other in filled} else new
            kind.append(TensorPlan(None, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    return {"mapped": mapped, "new": new, "dropped": dropped, "tied": tied}


def _refuse_other_shapes(source: Source, targets: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    wrong = [
        f"`{name}` is {list(source.tensors[name].shape)} in the file, {list(shapes[target])} by config.json"
        for name, (target, converter) in targets.items()
        if converter is None and target in shapes and shapes[target] != source.tensors[name].shape
    ]
    if wrong:
        more = [f"and {len(wrong) - 3} more"] if len(wrong) > 3 else []
        raise UsageError(f"{source.name} does not fit its config.json: " + "; ".join(wrong[:3] + more))


def _dropped_features(model: PreTrainedModel, converted: Mapping[int, nn.Module]) -> list[str]:
    """Features of the stock attention that the converted layers lack (as the setting `drop` allows)."""
    features = []
    for feature, texts in converted_features(model, converted).items():
        for text, layers in texts.items():
            places = "" if len(layers) == len(converted) else f" (layers {', '.join(map(str, layers))})"
            features.append(f"{feature}: {text}{places}")
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    dropout = next((getattr(model.config, name) for name in names if getattr(model.config, name, 0.0)), 0.0)
    if dropout and converted:
        features.append(f"attention dropout of {dropout} (in training only)")
    return features
