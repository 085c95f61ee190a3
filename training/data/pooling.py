"""How a sentence-transformers model pools, as its files say: `modules.json` and the config of the module `Pooling`.

The embedding of a model without these files is the mean of the hidden states.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import read_json


Pooling = Literal["mean", "cls", "max", "lasttoken"]

# A division by the root of the length changes no cosine.
POOLINGS: dict[str, Pooling] = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len": "mean", "lasttoken": "lasttoken",
}  # fmt: skip


def pooling_of(source: str) -> Pooling:
    """How the model of a folder or of a name on the Hub pools.

    Raises:
        UsageError: if a file is damaged, or the pooling is of a kind that cannot be computed here.
    """
    for module in _read(source, "modules.json", list) or []:
        if str(module.get("type", "")).rsplit(".", 1)[-1] == "Pooling":
            return _pooling(source, _read(source, f"{module['path']}/config.json", dict) or {})
    return "mean"


def _pooling(source: str, settings: dict[str, Any]) -> Pooling:
    named = settings.get("pooling_mode")
    used = [named] if isinstance(named, str) else list(named or ())
    used = used or [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    # `pooling_mode_mean_tokens` is a key of older files, and `mean_tokens` or `mean` a value of newer ones.
    modes = [re.sub("^pooling_mode_|_tokens?$", "", name) for name in used]
    if len(modes) > 1 or not {*modes} <= {*POOLINGS}:
        named = ", ".join(map(str, used))
        raise UsageError(
            f"{source} pools by {named} (1_Pooling/config.json); allowed is one of mean, cls, max, lasttoken"
        )
    return POOLINGS[modes[0]] if modes else "mean"


def _read(source: str, name: str, kind: type) -> Any:
    """The content of a JSON file; None if there is none."""
    from transformers.utils import cached_file

    found = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else read_json(Path(found), kind)
