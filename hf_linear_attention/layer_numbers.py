# SPDX-License-Identifier: Apache-2.0
"""Numbers of layers, and values by layer, as people write them; this file imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .mechanisms.options import NAMED_LAYERS


EXAMPLES = "`3`, `0-3` or `4-`"


def parse_layers(text: str) -> str | list[int]:
    """The value of the setting `layers` for a text such as `all`, `full_attention`, `none` or `0,2,4-7`.

    Raises:
        ValueError: if the text has none of these forms.
    """
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
    """`0-3:hybrid,4-:linear` -> `{"0-3": "hybrid", "4-": "linear"}`.

    Raises:
        ValueError: if a part has no range in front of a colon, or two parts have the same range.
    """
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
