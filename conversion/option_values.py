"""The values of options in their forms on a command line: numbers, lists, values by layer, numbers of tokens."""

from __future__ import annotations

from typing import Any

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.configuration_linear_attention import parse_layers
from hf_linear_attention.layer_ranges import parse_by_layer
from hf_linear_attention.mechanisms.registry import MECHANISMS


def layers_value(text: str) -> str | list[int]:
    """The value of `--layers`."""
    try:
        return parse_layers(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def attention_value(text: str) -> str | dict[str, str]:
    """The value of `--attention`: a mechanism, or mechanisms by layer."""
    by_layer = _by_layer_value("attention", text) if ":" in text else {}
    if unknown := sorted({*(by_layer.values() if by_layer else [text])} - set(MECHANISMS)):
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"`--attention {text}`: {names} must be one of {', '.join(sorted(MECHANISMS))}")
    return by_layer or text


def _by_layer_value(name: str, text: str) -> dict[str, str]:
    try:
        return parse_by_layer(text)
    except ValueError as error:
        raise UsageError(f"`--{name} {text}`: {error}") from error


def option_value(name: str, text: Any) -> Any:
    """The value of a mechanism's option: `128`, one per layer such as `128,96,64`, or by layer such as `0-3:64,4-:16`.

    Raises:
        UsageError: if the text has none of these forms, or a number is not of the type of the option.
    """
    options = [mechanism.options[name] for mechanism in MECHANISMS.values() if name in mechanism.options]
    kind, is_per_layer = options[0].kind, any(entry.is_per_layer for entry in options)
    if kind is bool:
        return text
    try:
        if ":" in text:
            return {layers: kind(value) for layers, value in _by_layer_value(name, text).items()}
        return [kind(part) for part in text.split(",")] if is_per_layer and "," in text else kind(text)
    except ValueError as error:
        number = {int: "a whole number", float: "a number"}[kind]
        several = ", or one per layer such as 128,96,64" if is_per_layer else ""
        raise UsageError(
            f"`--{name} {text}`: give {number}{several}, or values by layer such as 0-3:64,4-:16"
        ) from error


def parse_tokens(text: str) -> int:
    """The number in a text such as `2000000`, `500k`, `2M` or `1.5B`.

    Raises:
        UsageError: if the text is not such a number above 0.
    """
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower())
    try:
        tokens = round(float(text[:-1]) * factor) if factor else int(text)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise UsageError(f"`--tokens {text}`: give a number above 0, such as 2000000, 500k or 2M")
    return tokens
