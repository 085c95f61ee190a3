# SPDX-License-Identifier: Apache-2.0
"""Feature maps of queries and keys."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Names of `features.maps`, which was `features` in earlier versions."""
    if name.startswith("_"):
        raise AttributeError(name)
    maps = importlib.import_module(".maps", __name__)
    value = getattr(maps, name)
    warnings.warn(
        f"`{__name__}.{name}` is now `{maps.__name__}.{name}`; the old name goes in the next release.", FutureWarning
    )
    return value
