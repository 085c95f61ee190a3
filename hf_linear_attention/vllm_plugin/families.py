# SPDX-License-Identifier: Apache-2.0
"""Which families vLLM's Transformers backend runs as transformers does, with the texts of many requests in one row."""

from __future__ import annotations

import sys
from typing import Any


def counts_after_padding(model: Any) -> bool:
    """Whether the positions of this encoder begin after the number of its padding token, as in RoBERTa."""
    function, stock = "create_position_ids_from_input_ids", type(model).stock_class
    owners = [sys.modules[stock.__module__], *map(type, model.modules())]
    return any(hasattr(owner, function) for owner in owners)
