"""The tables of mechanisms and of architectures in docs/, generated from what the package says of itself.

    python tests/support/capability_table.py            # prints them
    python tests/support/capability_table.py --write    # puts them where they belong

A test compares the documentation with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.tested_architectures import ARCHITECTURES, NEED_DROP, REFUSED


COLUMNS = {
    "encoders": "bidirectional",
    "decoders": "causal",
    "cross-attention": "cross",
    "constant state": "state",
    "padding": "padding",
    "grouped queries": "gqa",
    "ALiBi, in decoders": "alibi",
}
# The tasks that imitate an original, by the kind of its architecture.
HEALED_AS = {
    "decoders": ("causal_lm", "sequence_classification"),
    "encoders": ("masked_lm", "embedding", "sequence_classification"),
    "vision": ("image_classification", "image_embedding"),
    "audio": (),
    "encoder-decoders": ("seq2seq_lm",),
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "mechanisms.md"


def capability_table() -> str:
    """A Markdown table: one row a mechanism, with its capabilities."""
    lines = ["| `--attention` | what | " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + " --- |" * (len(COLUMNS) + 2))
    for name, mechanism in MECHANISMS.items():
        what = (mechanism.__doc__ or "").strip().splitlines()[0].rstrip(".")
        marks = [_mark(mechanism, capability) for capability in COLUMNS.values()]
        lines.append(f"| [`{name}`]({page_of(name)}) | {what} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def page_of(name: str) -> str:
    """The place of a mechanism in the documentation."""
    for path in sorted((PAGE.parent / "mechanisms").glob("*.md")):
        if heading := re.search(rf"(?m)^(#+) {name}$", path.read_text(encoding="utf-8")):
            return f"mechanisms/{path.name}" + (f"#{name}" if heading[1] == "##" else "")
    raise LookupError(f"no page of docs/mechanisms has the heading {name}")


def _mark(mechanism: type[AttentionMechanism], capability: str) -> str:
    """`yes`, `no`, or which values of an option lack the capability."""
    if not getattr(mechanism, f"supports_{capability}"):
        return "no"
    defaults = {name: option.default for name, option in mechanism.options.items()}
    lacking = [
        f"`{name} {value}`"
        for name, option in mechanism.options.items()
        for value in option.choices
        if not mechanism.supports(capability, {**defaults, name: value})
    ]
    return "not " + ", ".join(lacking) if lacking else "yes"


def architecture_table() -> str:
    """A Markdown table with a row per kind of architecture, per feature that needs `drop`, and per refusal."""
    lines = ["| architecture | number | healed as | model types |", "| --- | --- | --- | --- |"]
    lines += [_row(kind, len(names), names, HEALED_AS[kind]) for kind, names in ARCHITECTURES.items()]
    lines += [_row(f"with `drop` = `{feature}`", "", names) for feature, names in NEED_DROP.items()]
    lines += [_row(f"refused: {reason}", "", names) for reason, names in REFUSED.items()]
    return "\n".join(lines)


def _row(kind: str, number: int | str, names: Sequence[str], tasks: Sequence[str] = ()) -> str:
    return f"| {kind} | {number} | {', '.join(tasks)} | {', '.join(names)} |"


def write() -> None:
    """Replace the tables of the pages, each of which ends at the first line that does not begin with a bar."""
    for page, table in ((PAGE, capability_table()), (PAGE.with_name("architectures.md"), architecture_table())):
        first = re.escape(table.partition(" | ")[0])
        text, count = re.subn(
            rf"(?m)^{first} .*\n(^\|.*\n)+", lambda _, table=table: f"{table}\n", page.read_text(encoding="utf-8")
        )
        if count != 1:
            sys.exit(f"{page} has {count} tables that begin with {first}; it needs one")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        sys.stdout.write(f"{capability_table()}\n\n{architecture_table()}\n")
