# SPDX-License-Identifier: Apache-2.0
"""What the package adds to the models of a checkpoint; the code in a checkpoint, which has none of it, asks here."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any


PACKAGE = "hf_linear_attention"
PREFIX = "linear_"  # of our model types
# The version of the settings' format; it is raised when older code would misread new settings.
#   1  the format since the first release, whose settings did not have the field `format_version` yet
FORMAT_VERSION = 1
# Functions by name, which the package registers when it is imported (its `__init__.py`).
EXTENSIONS: dict[str, Callable[..., Any]] = {}


def extension(name: str, purpose: str) -> Callable[..., Any]:
    """The function of the package that is registered under this name; ImportError if the package is missing."""
    if name not in EXTENSIONS:
        raise ImportError(f"{purpose}; install hf-linear-attention, and `import {PACKAGE}` before loading the model.")
    return EXTENSIONS[name]


@functools.cache
def installed_package() -> str | None:
    """The name of the installed package if this file belongs to a checkpoint whose settings it reads; None otherwise.

    A package that is too old is named in a warning.
    """
    if __name__.partition(".")[0] == PACKAGE:
        return None
    try:
        package = importlib.import_module(PACKAGE)
        newest = importlib.import_module(f"{PACKAGE}.configuration_linear_attention").FORMAT_VERSION
    except ImportError:
        return None
    if newest >= FORMAT_VERSION:
        return PACKAGE
    if getattr(package, "is_known_to_be_older", False):  # transformers may run this file several times
        return None
    package.is_known_to_be_older = True
    warnings.warn(
        f"This checkpoint has settings of version {FORMAT_VERSION}, and the installed {PACKAGE} {package.__version__} "
        f"reads versions up to {newest}. The code in the checkpoint runs instead, without C and CUDA kernels; upgrade "
        "the package to use them."
    )
    return None
