"""What the files of sentence-transformers beside a model say: the prompts of its texts, and how it pools.

`config_sentence_transformers.json` has the prompts, and the module after the transformer in `modules.json` the pooling.
A model without these files has no prompts, and its embedding is the mean of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import read_json


Pooling = Literal["mean", "cls", "max", "lasttoken"]

PROMPTS, MODULES = "config_sentence_transformers.json", "modules.json"
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# The keys of older files, and the names of newer ones; a division by the root of the length changes no cosine.
POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "lasttoken": "lasttoken",
}
NORMALIZE = "Normalize"


@dataclass(frozen=True)
class SentenceFiles:
    """What the files say.

    Args:
        source: the model, for errors.
        prompts: the prompts by name.
        default_prompt_name: the prompt of texts that are neither queries nor documents; None for none.
        pooling: how hidden states become an embedding.
        has_more: whether modules change the embedding after that, other than by its length.
        counts_prompt: whether the tokens of a prompt are pooled too.
    """

    source: str
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pooling: Pooling = "mean"
    has_more: bool = False
    counts_prompt: bool = True

    def prompt(self, option: str, name: str | None, candidates: Sequence[str | None] = ()) -> str:
        """The prompt `name`, which `--option` asks for, or else the first of `candidates` that there is; "" for none.

        Raises:
            UsageError: if there is no prompt of this name, or its tokens are not to be pooled.
        """
        if name is not None and name not in self.prompts:
            known = f"it has {', '.join(sorted(self.prompts))}" if self.prompts else "it has none"
            raise UsageError(f"`--{option} {name}`: {self.source} has no prompt of this name ({PROMPTS}); {known}")
        names = [name] if name is not None else [entry for entry in candidates if entry in self.prompts]
        text = self.prompts[str(names[0])] if names else ""
        if text and not self.counts_prompt:
            raise UsageError(
                f"{self.source} does not pool its prompts (`include_prompt`), as is done here; remove them"
            )
        return text

    def text_prompt(self, name: str | None) -> str:
        """What stands before a text that is neither a query nor a document; `name` is `--prompt_name`."""
        return self.prompt("prompt_name", name, (self.default_prompt_name,))


def sentence_files(source: str) -> SentenceFiles:
    """What the files of a folder or of a name on the Hub say.

    Raises:
        UsageError: if a file is damaged, or the pooling is of a kind that cannot be computed here.
    """
    content = _read(source, PROMPTS, dict) or {}
    prompts = {str(name): str(text) for name, text in (content.get("prompts") or {}).items() if text is not None}
    pooling: Pooling = "mean"
    counts_prompt, others = True, []
    for module in (_read(source, MODULES, list) or [])[1:]:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            settings = _read(source, f"{module['path']}/config.json", dict) or {}
            pooling, counts_prompt = _pooling(source, settings), settings.get("include_prompt", True)
        elif kind != NORMALIZE:
            others.append(kind)
    return SentenceFiles(source, prompts, content.get("default_prompt_name"), pooling, bool(others), counts_prompt)


def _pooling(source: str, settings: dict[str, Any]) -> Pooling:
    named = settings.get("pooling_mode")
    used = [named] if isinstance(named, str) else list(named or ())
    used = used or [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    if len(used) > 1 or not {*used} <= {*POOLINGS}:
        named = ", ".join(map(str, used))
        raise UsageError(
            f"{source} pools by {named} (1_Pooling/config.json); allowed is one of mean, cls, max, lasttoken"
        )
    return POOLINGS[used[0]] if used else "mean"


def _read(source: str, name: str, kind: type) -> Any:
    """The content of a JSON file; None if there is none."""
    path = Path(source) / name
    if not Path(source).is_dir():
        from transformers.utils import cached_file

        found = cached_file(
            source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        if found is None:
            return None
        path = Path(found)
    return read_json(path, kind) if path.is_file() else None
