"""The special tokens that a config names: one token, a list of them (Llama 3.1), or -1 or nothing for none."""

from __future__ import annotations

from typing import Any


def special_token(config: Any, *names: str) -> int:
    """The first token of the fields `names` of a config, such as `eos_token_id`, or token 0 if none is set."""
    values = [getattr(config, name, None) for name in names]
    listed = [token for value in values for token in (value if isinstance(value, (list, tuple)) else [value])]
    return next((token for token in listed if token is not None and token >= 0), 0)
