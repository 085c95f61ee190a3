"""`--state_bytes`: a budget of bytes split between an exact window, sinks and the features of the linear part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_linear_attention._common.errors import UsageError


# The share of the linear part. Measured (benchmarks/RESULTS.md, "Where the bytes go"): at 76.9 kB stories260k has
# 1.3705 nats per token with 67 % of the bytes there, 1.360 with 40 %, 1.357 with 20 % and 1.361 with 12 %.
LINEAR_SHARE = 1 / 6
# Features come in whole vectors of the widest processors, in float32.
VECTOR = 16
NUM_SINKS = 4
# Of each size; features of `hedgehog` come in pairs.
LEAST = {"window_size": 1, "num_sinks": 0, "num_features": 2}


def split_budget(
    num_bytes: int, settings: Mapping[str, Any], bytes_of: Callable[[Mapping[str, Any]], int]
) -> dict[str, Any]:
    """The settings with the sizes that `num_bytes` of state for all layers together allow; given ones stay.

    The linear part gets a sixth of the bytes, in whole vectors of 16 features and one at least; 4 sinks; the rest is
    the window. A mechanism without a linear part (`window`) gives it nothing.

    Args:
        settings: of `linear_attention`, with `mechanism`.
        bytes_of: the bytes of the decoding state of all converted layers, for settings. It grows by the same number
            with each place of the window, each sink and each feature.

    Raises:
        UsageError: if the mechanism has no sizes to choose, or the budget holds no window.
    """
    mechanism = settings["mechanism"]
    if mechanism not in ("hybrid", "window"):
        raise UsageError(
            f"`--state_bytes` splits bytes between a window and a linear part, and `{mechanism}` has no window; use "
            "`--attention hybrid`, or give `--num_features`"
        )
    sizes = [name for name in LEAST if name != "num_features" or mechanism == "hybrid"]
    least = {**settings, **{name: settings.get(name) or LEAST[name] for name in sizes}}
    base = bytes_of(least)
    step = {name: bytes_of({**least, name: least[name] + 2}) - base for name in sizes}
    chosen = dict(least)
    if mechanism == "hybrid" and settings.get("num_features") is None:
        vectors = round(num_bytes * LINEAR_SHARE / (step["num_features"] / 2 * VECTOR))
        chosen["num_features"] = VECTOR * max(1, vectors)
    if settings.get("num_sinks") is None:
        chosen["num_sinks"] = NUM_SINKS
    if settings.get("window_size") is None:
        left = num_bytes - bytes_of(chosen)
        chosen["window_size"] = 1 + int(left // (step["window_size"] / 2))
    needed = bytes_of(chosen)
    if chosen["window_size"] < 1 or needed > num_bytes:
        smallest = bytes_of({**chosen, "window_size": settings.get("window_size") or 1})
        features = f", {chosen['num_features']} features" if "num_features" in chosen else ""
        raise UsageError(
            f"`--state_bytes {num_bytes}` is less than the {max(needed, smallest):,} bytes that "
            f"{chosen['num_sinks']} sinks{features} and a window take; give more bytes or smaller sizes"
        )
    return chosen
