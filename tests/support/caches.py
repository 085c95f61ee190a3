"""The cache of a decoder among arguments and outputs, by the name that the installed transformers has for it."""

from __future__ import annotations

import transformers
from packaging.version import Version


NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def past(cache):
    """The keyword argument by which a model, or `generate`, continues this cache."""
    return {NAME: cache}


def cache_of(output):
    """The cache that a model returned, or None."""
    return output.get(NAME)
