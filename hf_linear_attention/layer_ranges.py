# SPDX-License-Identifier: Apache-2.0
"""Settings that differ by layer, in the short form that people write.

    convert(model, mechanism={"0-3": "hybrid", "4-": "linear"}, window_size={"0-1": 64, "2-3": 16}, num_features=32)

A value by layer is a dict from ranges of layers to values: `3` is one layer, `0-3` includes both ends, and `4-` extends
to the last layer. The command line has the same words (`--attention 0-3:hybrid,4-:linear`). Each converted layer is in
exactly one range, and a value that is not by layer is for all layers whose mechanism has this option. `layers` still
decides which layers are converted.

`config.linear_attention` never has this form; it has the list of settings that `entries_by_layer` returns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .mechanisms.settings import COMMON_SETTINGS, MECHANISM_OPTIONS, NAMED_LAYERS


if TYPE_CHECKING:  # this file is read for `--help` too, which needs no models
    from transformers import PreTrainedConfig


EXAMPLES = "`3`, `0-3` or `4-`"


def spread(settings: Mapping[str, Any], stock_class: type, config: PreTrainedConfig) -> Any:
    """The settings of a stock model without values by layer: a dict, or a list with one dict for each group of layers.

    The model of `stock_class` is built on the meta device to count its attention layers. ValueError if it has none that
    could be converted, or as in `entries_by_layer`.
    """
    if not is_by_layer(settings):
        return dict(settings)
    import torch

    from .configuration_linear_attention import LinearAttentionSettings
    from .modeling_linear_attention import converted_layers, self_attention_modules

    with torch.device("meta"):
        modules = list(self_attention_modules(stock_class(copy.deepcopy(config))).values())
    layers = settings.get("layers", COMMON_SETTINGS["layers"])
    LinearAttentionSettings({"layers": layers}, num_layers=len(modules))  # refuses values that `layers` cannot have
    return entries_by_layer(settings, converted_layers({"layers": layers}, modules), len(modules))


def entries_by_layer(settings: Mapping[str, Any], converted: Sequence[int], num_layers: int) -> Any:
    """The settings of each group of equal layers; a single dict if all `converted` layers have the same settings.

    Raises:
        ValueError: naming every range that overlaps another one, is incomplete, or contains no converted layer; every
            unknown mechanism; and every option that no mechanism of these layers has.
    """
    from .configuration_linear_attention import unknown_mechanism

    place = _Place(converted, num_layers)
    mechanisms = place.values("mechanism", settings.get("mechanism", "linear"), converted)
    unknown = (name for name in mechanisms.values() if not isinstance(name, str) or name not in MECHANISM_OPTIONS)
    place.problems += list(dict.fromkeys(map(unknown_mechanism, unknown)))
    if not place.problems:
        common = _common_settings(settings, place)
        options: dict[int, dict[str, Any]] = {layer: {} for layer in converted}
        for name, value in settings.items():
            if name not in common and name not in ("mechanism", "layers"):
                _add_option(options, name, value, mechanisms, place)
    if place.problems:
        listed = "\n".join(f"  - {problem}" for problem in place.problems)
        raise ValueError(f"Invalid settings by layer:\n{listed}")
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for layer in converted:
        own = {"mechanism": mechanisms[layer], **common, **options[layer]}
        same = next((layers for other, layers in groups if other == own), None)
        if same is None:
            groups.append((own, same := []))
        same.append(layer)
    if len(groups) == 1:
        return {**groups[0][0], "layers": settings.get("layers", COMMON_SETTINGS["layers"])}
    return [{**own, "layers": layers} for own, layers in groups]


def _common_settings(settings: Mapping[str, Any], place: _Place) -> dict[str, Any]:
    """The settings that every mechanism has, other than `layers`."""
    shared = {*COMMON_SETTINGS, "format_version"} - {"layers"}
    common = {name: value for name, value in settings.items() if name in shared}
    place.problems += [
        f"`{name}` cannot differ by layer; give one value for all layers, or a list of settings"
        for name, value in {**common, "layers": settings.get("layers")}.items()
        if isinstance(value, Mapping)
    ]
    if common.get("cross_attention"):
        place.problems.append(
            "`cross_attention` = true is not possible together with values by layer, because cross-attention is in no "
            "range; give a list of settings, and `cross_attention` in one of them"
        )
    return common


def _add_option(
    options: Mapping[int, dict[str, Any]], name: str, value: Any, mechanisms: Mapping[int, str], place: _Place
) -> None:
    """Add an option to the settings of the layers whose mechanism has it."""
    able = [layer for layer in mechanisms if name in MECHANISM_OPTIONS[mechanisms[layer]].options]
    if not able:
        names = ", ".join(f"`{mechanism}`" for mechanism in sorted(set(mechanisms.values())))
        place.problems.append(f"`{name}` is not an option of {names}; leave it out")
        return
    lacking: dict[str, list[int]] = {}
    for layer, own in place.values(name, value, able).items():
        if layer in able:
            options[layer][name] = own
        else:
            lacking.setdefault(mechanisms[layer], []).append(layer)
    place.problems += [
        f"`{name}` has a value for {layers_text(sorted(layers))}, but is not an option of `{mechanism}`"
        for mechanism, layers in lacking.items()
    ]


class _Place:
    """The layers that values by layer are for, and what is wrong with these values.

    `problems` has one sentence for each problem so far.
    """

    def __init__(self, converted: Sequence[int], num_layers: int) -> None:
        self.converted, self.num_layers = converted, num_layers
        self.problems: list[str] = []

    def values(self, name: str, value: Any, needed: Sequence[int]) -> dict[int, Any]:
        """The value of each layer in `needed`, and of the other converted layers that a range names."""
        if not isinstance(value, Mapping):
            return dict.fromkeys(needed, value)
        found: dict[int, Any] = {}
        twice: set[int] = set()
        before = len(self.problems)
        for text, own in value.items():
            inside = [layer for layer in self._layers(name, text) if layer in self.converted]
            twice |= found.keys() & set(inside)
            found |= dict.fromkeys(inside, own)
        if twice:
            self.problems.append(f"`{name}` names {layers_text(sorted(twice))} more than once; keep each in one range")
        missing = [layer for layer in needed if layer not in found]
        if missing and len(self.problems) == before:  # else the wrong range may be meant for these layers
            softmax = ", or leave these layers softmax with `layers`" if name == "mechanism" else ""
            self.problems.append(f"`{name}` has no value for {layers_text(missing)}; add one{softmax}")
        return found

    def _layers(self, name: str, text: Any) -> range:
        """The layers of a range; none if something is wrong with it."""
        match = re.fullmatch(r"\s*([0-9]+)\s*(?:(-)\s*([0-9]+)?)?\s*", text) if isinstance(text, str) else None
        if match is None:
            self.problems.append(f"`{name}` has a value for the layers {text!r}; give layers as text, like {EXAMPLES}")
            return range(0)
        first = int(match[1])
        last = int(match[3]) if match[3] else self.num_layers - 1 if match[2] else first
        if max(first, last) >= self.num_layers:
            self.problems.append(
                f"`{name}` names the layers {text}, but the model has layers 0 to {self.num_layers - 1}"
            )
        elif last < first:
            self.problems.append(f"`{name}` names the layers {text}; this range runs backwards")
        elif not any(first <= layer <= last for layer in self.converted):
            self.problems.append(f"`{name}` names the layers {text}, none of which is converted (`layers`)")
        else:
            return range(first, last + 1)
        return range(0)


def parse_layers(text: str) -> str | list[int]:
    """The setting `layers` for `all`, `full_attention`, `none` or a text as `0,2,4-7`; ValueError for another form."""
    if text in NAMED_LAYERS:
        return text
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            names = ", ".join(f"`{name}`" for name in NAMED_LAYERS)
            raise ValueError(f"`layers` = {text!r}; it must be {names} or a list such as `0,2,4-7`")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < 10_000:  # no model has more, and the numbers are listed here
            raise ValueError(f"`layers` = {text!r}; the range {part.strip()} runs backwards or beyond layer 9999")
        layers.update(range(first, last + 1))
    return sorted(layers)


def is_by_layer(settings: Mapping[str, Any]) -> bool:
    """Whether any of these settings has a value by layer."""
    return any(isinstance(value, Mapping) for value in settings.values())


def parse_by_layer(text: str) -> dict[str, str]:
    """`0-3:hybrid,4-:linear` -> `{"0-3": "hybrid", "4-": "linear"}`; ValueError without a range, or with one twice."""
    values: dict[str, str] = {}
    for part in text.split(","):
        layers, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or not layers or not value:
            raise ValueError(f"{part.strip()!r} is not of the form LAYERS:VALUE, where LAYERS is like {EXAMPLES}")
        if layers in values:
            raise ValueError(f"the layers {layers} are given twice")
        values[layers] = value
    return values


def ranges_of(layers: Iterable[int]) -> str:
    """`[0, 2, 4, 5, 6]` -> `0, 2, 4-6`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def layers_text(layers: Collection[int]) -> str:
    """`[0, 2, 4, 5, 6]` -> `layers 0, 2, 4-6`."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges_of(layers)}"
