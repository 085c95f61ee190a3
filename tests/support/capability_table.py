"""The table of mechanisms in docs/mechanisms.md, generated from the classes' own capabilities.

    python tests/support/capability_table.py            # prints it
    python tests/support/capability_table.py --write    # puts it where it belongs

A test compares the documentation with it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.registry import MECHANISMS


COLUMNS = {
    "encoders": "bidirectional",
    "decoders": "causal",
    "cross-attention": "cross",
    "constant state": "state",
    "padding": "padding",
    "grouped queries": "gqa",
    "ALiBi, in decoders": "alibi",
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "mechanisms.md"
# A table ends at the first line that does not begin with a bar.
TABLE = re.compile(r"(?m)^\| `--attention`.*\n(^\|.*\n)+")


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


def write() -> None:
    """Replace the table of the page."""
    text, count = TABLE.subn(lambda _: capability_table() + "\n", PAGE.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{PAGE} has {count} tables of this kind; it needs one, which begins with `--attention`")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        sys.stdout.write(capability_table() + "\n")
