# SPDX-License-Identifier: Apache-2.0
"""The settings of linear attention, and the `Linear<X>Config` classes, which are made on demand from the stock ones.

`LinearLlamaConfig` is `LlamaConfig` with `model_type = "linear_llama"` and the field `linear_attention`:

    {"mechanism": "linear", "feature_map": "exp", "num_features": 64, "layers": "all"}

If layers have different settings, the field is a list of such dicts, each with the numbers of its `layers`; no layer is
in two of them. `settings_of` returns the settings of one layer.

`linear_attention_classes` has the names of the model's stock classes of attention, and what they are in it (`causal`,
`bidirectional`, `cross`); conversion finds that out.

The model type differs from the stock one, so that nobody loads converted weights into a softmax model unnoticed.
"""

from __future__ import annotations

import copy
import importlib
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from .attention.transformers_internals import is_causal_lm, is_masked_lm, stock_heads
from .extensions import EXTENSIONS, FORMAT_VERSION, PREFIX, installed_package
from .mechanisms.settings import (
    COMMON_SETTINGS,
    DROPPABLE,
    MECHANISM_OPTIONS,
    NAMED_LAYERS,
    REMOVED_SETTINGS,
    MechanismOptions,
    Option,
)


MODELING_MODULE = "modeling_linear_attention"
# The files that the `auto_map` of config.json names.
CODE_FILES = ("configuration_linear_attention.py", "modeling_linear_attention.py")
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0\n"


class LinearAttentionSettings(dict):
    """One entry of `config.linear_attention`, checked and with all defaults filled in; elsewhere it is a plain dict.

    Args:
        settings: `mechanism`, the options of the mechanism, and `COMMON_SETTINGS`: `layers`, the self-attention layers
            to convert (`all`, `none`, `full_attention` for the layers of that type in `config.layer_types`, or a list
            of layer numbers); `drop`, the features of the stock attention that may be lost (see `DROPPABLE`);
            `cross_attention`, whether to convert the cross-attention too; and `rotary`, the rotary positions found
            during conversion. Missing settings take their defaults. `format_version` is not an option: it is the
            format in which the settings were saved (1 if missing), and becomes `FORMAT_VERSION`.
        model_type: the stock model type, for error messages.
        is_causal: whether the model attends causally; None skips that check.
        num_layers: the number of attention layers, to check `layers`; None skips that check.
        max_length: the longest input that the architecture accepts, or None.
        is_saved: whether the settings come from a config.json. Earlier versions saved options that have no effect;
            such options are accepted.

    Raises:
        ValueError: naming every unknown option, impossible value and impossible combination at once; or if a newer
            version of this code wrote the settings.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        model_type: str = "",
        is_causal: bool | None = None,
        num_layers: int | None = None,
        max_length: int | None = None,
        is_saved: bool = False,
    ) -> None:
        given = {"mechanism": "linear", **copy.deepcopy(COMMON_SETTINGS), **(settings or {})}
        check_format_version(given.pop("format_version", 1), FORMAT_VERSION, "these `linear_attention` settings")
        mechanism = MECHANISM_OPTIONS.get(given["mechanism"]) if isinstance(given["mechanism"], str) else None
        if mechanism is None:
            raise SettingsError([unknown_mechanism(given["mechanism"])])
        for name, value in REMOVED_SETTINGS.items():
            if name in given and name not in mechanism.options and given[name] == value:
                del given[name]
        filled = mechanism.filled(given)
        problems = _option_problems(given, filled, mechanism.options, num_layers)
        problems += _layer_problems(given["layers"], num_layers) + _drop_problems(given["drop"])
        problems += _cross_attention_problems(given["cross_attention"], mechanism, given["mechanism"], filled)
        if not problems:
            problems += mechanism.problems(filled, max_length)
            problems += [] if is_saved else _unused_problems(filled, mechanism)
        capability = "causal" if is_causal else "bidirectional"
        if is_causal is not None and (obstacle := mechanism.obstacle(capability, filled)):
            able = _names(name for name, other in MECHANISM_OPTIONS.items() if getattr(other, f"supports_{capability}"))
            problems.append(
                f"`mechanism` = `{given['mechanism']}` {obstacle}, which `{model_type}` needs; use one of {able}"
            )
        if problems:
            raise SettingsError(problems)
        common = {name: given[name] for name in COMMON_SETTINGS}
        super().__init__(mechanism=given["mechanism"], **filled, **common, format_version=FORMAT_VERSION)


def default_entry() -> dict[str, Any]:
    """The settings of a config that was given none: the defaults of `linear`, or of a mechanism that is there.

    transformers before 5.20 builds such a config of every class that it loads, to compare the loaded one with it. The
    code in a checkpoint has only the checkpoint's own mechanisms, whose defaults need not fit the defaults of the
    model type: they are checked when a model is built.
    """
    name = "linear" if "linear" in MECHANISM_OPTIONS else next(iter(MECHANISM_OPTIONS))
    filled = MECHANISM_OPTIONS[name].filled({})
    return {"mechanism": name, **filled, **copy.deepcopy(COMMON_SETTINGS), "format_version": FORMAT_VERSION}


def entries_of(settings: Any) -> list[Any]:
    """`config.linear_attention` as a list; it has one entry if all converted layers share their settings."""
    return [settings] if settings is None or isinstance(settings, Mapping) else list(settings)


def exact_tokens(settings: Any) -> list[int]:
    """The numbers of tokens to which layers attend exactly in window, sinks and exact keys, for each of the settings.

    Settings without a window have none.
    """
    found = []
    for entry in entries_of(settings):
        if (entry or {}).get("window_size"):
            keys = entry.get("num_exact_keys") or 0
            listed = [keys[n] for n in _numbers(entry, len(keys))] if isinstance(keys, (list, tuple)) else [keys]
            found += [entry["window_size"] + (entry.get("num_sinks") or 0) + number for number in listed]
    return found


def _numbers(entry: Mapping[str, Any], num_layers: int) -> Sequence[int]:
    layers = entry.get("layers")
    return layers if isinstance(layers, (list, tuple)) else range(num_layers)


def checked_settings(settings: Any, **checks: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """Check settings, or each entry of a list of settings, and return them as plain dicts with defaults filled in.

    `checks` are the further arguments of `LinearAttentionSettings`. ValueError as there; and if an entry of a list does
    not give its layers by number, or shares a layer with another entry.
    """
    if not isinstance(settings, (list, tuple)):
        return dict(LinearAttentionSettings(settings, **checks))
    if problems := _entry_problems(settings):
        raise SettingsError(problems)
    filled = []
    for entry in settings:
        try:
            filled.append(dict(LinearAttentionSettings(entry, **checks)))
        except SettingsError as error:
            problems += [f"{problem} (in the settings of layers {entry['layers']})" for problem in error.problems]
    if problems:
        raise SettingsError(problems)
    return filled


def _entry_problems(entries: Sequence[Any]) -> list[str]:
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        return ["a list of settings must contain one dict for each group of layers"]
    problems: list[str] = []
    owners: dict[int, int] = {}
    crossed: list[int] = []
    for number, entry in enumerate(entries):
        layers = entry.get("layers")
        if not isinstance(layers, (list, tuple)):
            problems.append(f"`layers` = {layers!r} in entry {number} of the list; give its layers by their numbers")
            continue
        for layer in dict.fromkeys(layers):
            if layer in owners:
                problems.append(
                    f"the entries {owners[layer]} and {number} both name layer {layer} in `layers`; keep it in one"
                )
            owners.setdefault(layer, number)
        crossed += [number] if entry.get("cross_attention") else []
    if len(crossed) > 1:
        problems.append(f"`cross_attention` = true in the entries {crossed}; set it in one entry only")
    return problems


def check_format_version(version: Any, newest: int, what: str) -> None:
    """Raise ValueError for a version that this code cannot read; `what` names the settings or file."""
    if type(version) is not int or version < 1:
        raise ValueError(f"Got `format_version` = {version!r} in {what}; it must be a whole number of at least 1.")
    if version > newest:
        raise ValueError(
            f"Got {what} in format version {version}, but this code reads versions up to {newest}. Upgrade "
            "hf_linear_attention, or load the checkpoint with its own code (`trust_remote_code=True`)."
        )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


class SettingsError(ValueError):
    """Settings that are impossible; `problems` has one sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("Invalid `linear_attention` settings:\n" + "\n".join(f"  - {text}" for text in problems))
        self.problems = problems


def _option_problems(
    given: Mapping[str, Any], filled: Mapping[str, Any], options: Mapping[str, Option], num_layers: int | None
) -> list[str]:
    problems = [
        f"`{name}` is not an option of `mechanism` = `{given['mechanism']}`, whose options are {_names(options)}"
        f"{taken_elsewhere(name, given[name])}"
        for name in given
        if name not in options and name not in ("mechanism", *COMMON_SETTINGS)
    ]
    for name, value in filled.items():
        is_list = options[name].is_per_layer and isinstance(value, (list, tuple))
        if problem := options[name].problem(value):
            problems.append(f"`{name}` = {value!r} {problem}{taken_elsewhere(name, value)}")
        elif is_list and len(value) != (num_layers or len(value)):
            problems.append(
                f"`{name}` has {len(value)} values, but the model has {num_layers} layers; give one value per layer"
            )
    return problems


def _unused_problems(filled: Mapping[str, Any], mechanism: type[MechanismOptions]) -> list[str]:
    unused = mechanism.unused(filled)
    return [
        f"`{name}` = `{filled[name]}` has no effect with {unused[name]}; leave it out"
        for name, option in mechanism.options.items()
        if name in unused and filled[name] != option.default
    ]


def _layer_problems(layers: Any, num_layers: int | None) -> list[str]:
    if isinstance(layers, str) and layers in NAMED_LAYERS:
        return []
    if not isinstance(layers, (list, tuple)) or any(type(layer) is not int or layer < 0 for layer in layers):
        return [f"`layers` = {layers!r}; it must be {_names(NAMED_LAYERS)} or a list of layer numbers counted from 0"]
    if num_layers is None or all(layer < num_layers for layer in layers):
        return []
    beyond = [layer for layer in layers if layer >= num_layers]
    return [f"`layers` names {beyond[:9]}, but the model has layers 0 to {num_layers - 1}"]


def _drop_problems(drop: Any) -> list[str]:
    if isinstance(drop, (list, tuple)) and all(feature in DROPPABLE for feature in drop):
        return []
    return [f"`drop` = {drop!r}; it must be a list with any of {_names(DROPPABLE)}"]


def _cross_attention_problems(
    wanted: Any, mechanism: type[MechanismOptions], name: str, filled: Mapping[str, Any]
) -> list[str]:
    if not isinstance(wanted, bool):
        return [f"`cross_attention` = {wanted!r}; it must be true or false"]
    if wanted and (obstacle := mechanism.obstacle("cross", filled)):
        return [f"`cross_attention` = true, but `mechanism` = `{name}` {obstacle}; leave cross-attention softmax"]
    return []


def mechanisms_of(settings: Any) -> set[str]:
    """The names of the mechanisms in these `linear_attention` settings, which are one dict or a list of dicts."""
    return {entry["mechanism"] for entry in entries_of(settings)}


def unknown_mechanism(name: object) -> str:
    """The error message for a mechanism that is not in the registry."""
    known = ", ".join(f"`{name}`" for name in sorted(MECHANISM_OPTIONS))
    if "checkpoint_code" in EXTENSIONS:
        return f"`mechanism` = {name!r}; it must be one of {known}"
    return (
        f"`mechanism` = {name!r}, but this checkpoint contains the code of {known} only; install hf-linear-attention, "
        "which has every mechanism, and `import hf_linear_attention` before loading"
    )


def taken_elsewhere(name: str, value: object) -> str:
    """The end of an error message about an option: a mechanism that takes this value of it, if there is one."""
    able = [
        key for key, kind in MECHANISM_OPTIONS.items() if name in kind.options and not kind.options[name].problem(value)
    ]
    other = "linear" if "linear" in able or not able else able[0]
    return f"; for it, set `mechanism` to `{other}` (`--attention {other}`)" if able else ""


def own_code(config: PreTrainedConfig) -> dict[str, str]:
    """`{file: text}` of the code that this file belongs to, in a checkpoint."""
    return {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in CODE_FILES}


def code_in(folder: str | os.PathLike) -> dict[str, str | None]:
    """`{file: text}` of the code of the checkpoint in `folder`, by its imports; None for a file that is not there."""
    found: dict[str, str | None] = {}
    waiting = list(CODE_FILES)
    while waiting:
        name = waiting.pop()
        if name not in found:
            path = Path(folder, name)
            text = found[name] = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
            waiting += [f"{module}.py" for module in re.findall(r"(?m)^\s*from\s+\.(\w+)\s+import", text or "")]
    return found


def write_code(folder: str | os.PathLike, code: Mapping[str, str]) -> None:
    """Write the files of a checkpoint's code into `folder`.

    Files of an earlier checkpoint in `folder` that its code imports are removed if they are ours, that is, if they
    start with our licence line.
    """
    earlier = code_in(folder)
    os.makedirs(folder, exist_ok=True)
    for name, text in code.items():
        Path(folder, name).write_text(text, encoding="utf-8")
    for name, old in earlier.items():
        if name not in code and old is not None and old.startswith(LICENCE_LINE):
            Path(folder, name).unlink()


class LinearAttentionConfigMixin:
    """The base that `Linear<X>Config` has before `<X>Config`."""

    def settings_of(self, layer: int) -> dict[str, Any] | None:
        """The settings for a self-attention layer, counted from 0; None if a list of settings does not name the layer.

        If all layers share their settings, these are returned for layers outside of `layers` too.
        """
        if isinstance(self.linear_attention, Mapping):
            return self.linear_attention
        return next((entry for entry in self.linear_attention if layer in entry["layers"]), None)

    def to_dict(self) -> dict[str, Any]:
        """The fields of the config, as in transformers."""
        # PEFT asks for this dict before it looks up which modules of a model type its adapters (LoRA) change.
        share_peft_targets(self.stock_model_type)
        return super().to_dict()

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Save config.json and, in the same folder, the code that a model with this config needs."""
        if not os.path.isfile(save_directory):  # the stock method refuses a file
            write_code(save_directory, EXTENSIONS.get("checkpoint_code", own_code)(self))
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Record nothing for the classes made in this file, because `save_pretrained` writes their code."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.linear_attention is not None:
            self.linear_attention = checked_settings(
                self.linear_attention,
                model_type=self.stock_model_type,
                # The attention modules of an encoder-decoder differ; each is checked when the model is built.
                is_causal=None if self.is_encoder_decoder else is_causal_config(self, self.stock_model_type),
                num_layers=num_attention_layers(self),
                max_length=max_length_of(self),
                is_saved=self.transformers_version is not None,
            )
        else:
            self.linear_attention = default_entry()
        # With this, every saved config (also in a Trainer checkpoint) names the class of every head.
        if getattr(self, "auto_map", None) is None:
            self.auto_map = auto_map(self.stock_model_type)
        self._register_once()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the models of this class in a process that gets a config by pickle, too."""
        self.__dict__.update(state)
        self._register_once()

    def _register_once(self) -> None:
        if not type(self).__dict__.get("_has_instances", False):
            type(self)._has_instances = True
            if "first_instance" in EXTENSIONS:
                EXTENSIONS["first_instance"](type(self))


def share_peft_targets(model_type: str) -> None:
    """Tell PEFT, if it is imported, to adapt the same modules in `linear_<x>` as in `<x>`."""
    constants = sys.modules.get("peft.utils.constants")
    for name, targets in vars(constants).items() if constants else ():
        if name.endswith("MODULES_MAPPING") and model_type in targets:
            targets.setdefault(PREFIX + model_type, targets[model_type])


def num_attention_layers(config: PreTrainedConfig) -> int | None:
    """The number of self-attention modules; None if the config does not tell (encoder-decoders and composites)."""
    if config.is_encoder_decoder:
        return None
    if (groups := getattr(config, "num_hidden_groups", None)) is not None:  # ALBERT's layers share their modules
        return groups * config.inner_group_num
    return getattr(config, "num_hidden_layers", None)


def is_causal_config(config: PreTrainedConfig, model_type: str) -> bool:
    """Whether the self-attention of a model with this config is causal."""
    if (is_causal := getattr(config, "is_causal", None)) is not None:
        return bool(is_causal)
    if is_masked_lm(model_type):  # BERT and similar models can be either
        return bool(getattr(config, "is_decoder", False))
    return is_causal_lm(model_type)


def can_generate(config: PreTrainedConfig) -> bool:
    """Whether models with this `Linear<X>Config` may generate text, which pure encoders cannot."""
    is_composite = config.get_text_config(decoder=True) is not config
    return config.is_encoder_decoder or is_composite or is_causal_config(config, config.stock_model_type)


def max_length_of(config: PreTrainedConfig) -> int | None:
    """The longest input in tokens, or in patches and special tokens, if the architecture has a limit, or None."""
    for name in ("max_position_embeddings", "max_source_positions"):
        if (length := getattr(config, name, None)) is not None:
            return length
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    image, patch = ((size, size) if isinstance(size, int) else size for size in sizes)
    if not image or not patch:
        return None
    extra = ("num_register_tokens", "num_registers", "num_detection_tokens")
    before = getattr(config, "num_cls_tokens", 1) + sum(getattr(config, name, 0) for name in extra)
    before += "deit" in config.model_type  # DeiT's distillation token
    return math.prod(side // part for side, part in zip(image, patch)) + before


def model_heads(model_type: str) -> dict[str, str]:
    """`{auto class: stock model class}` for every head that transformers has for a stock model type."""
    family = CONFIG_MAPPING_NAMES[model_type].removesuffix("Config")
    heads = [(name, stock) for name, stock in stock_heads(model_type) if stock]
    return {name: stock for name, stock in heads if stock.startswith(family) or _is_head_of(model_type, stock)}


def _is_head_of(model_type: str, stock: str) -> bool:
    """Whether a class with another name takes this config (`Gemma3ForCausalLM` that of `gemma3_text`).

    Other heads wrap this model type in a composite with its own config. To ask the class imports its file.
    """
    config_class = getattr(getattr(transformers, stock, None), "config_class", None)
    return config_class is not None and config_class.model_type == model_type


def auto_map(model_type: str) -> dict[str, str]:
    """The `auto_map` of config.json: the class of the shipped code for each Auto class."""
    entries = {"AutoConfig": f"configuration_linear_attention.Linear{CONFIG_MAPPING[model_type].__name__}"}
    for auto_class, stock in model_heads(model_type).items():
        entries[auto_class] = f"{MODELING_MODULE}.Linear{stock}"
    return entries


def linear_config_class(model_type: str) -> type:
    """The `Linear<X>Config` for a stock model type such as `llama`; ValueError if transformers does not have it."""
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"Unknown model type `{model_type}`; `hf_linear_attention.supported_model_types()` lists those tested."
        )
    return _make_config_class(CONFIG_MAPPING[model_type])


def _make_config_class(stock: type) -> type:
    name = f"Linear{stock.__name__}"
    if name not in globals():
        namespace = {
            "__module__": __name__,
            "__qualname__": name,
            "__doc__": f"`{stock.__name__}` with linear attention.",
            "__annotations__": {"linear_attention": dict | list | None, "linear_attention_classes": dict | None},
            "linear_attention": None,
            "linear_attention_classes": None,
            "model_type": PREFIX + stock.model_type,
            "stock_model_type": stock.model_type,
        }
        globals()[name] = type(name, (LinearAttentionConfigMixin, stock), namespace)
    return globals()[name]


def __getattr__(name: str) -> type:
    """`LinearLlamaConfig` and similar classes, made on first access (also by pickle and by `auto_map`)."""
    match = re.fullmatch(r"Linear(\w+Config)", name)
    stock = getattr(transformers, match[1], None) if match else None
    if stock is None and match:  # transformers does not export the config of every part of a composite
        stock = next((CONFIG_MAPPING[kind] for kind, cls in CONFIG_MAPPING_NAMES.items() if cls == match[1]), None)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (package := installed_package()) is not None:
        return getattr(importlib.import_module(f"{package}.configuration_linear_attention"), name)
    return _make_config_class(stock)
