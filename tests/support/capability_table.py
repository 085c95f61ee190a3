"""The documentation's tables of mechanisms, generated from the classes' own capabilities and options.

    python tests/support/capability_table.py            # prints the table of capabilities
    python tests/support/capability_table.py --write    # puts every table where it belongs, below docs/

A test compares the documentation with them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.options import Option
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
DOCS = Path(__file__).resolve().parents[2] / "docs"
# A table ends at the first line that does not begin with a bar.
CAPABILITIES = re.compile(r"(?m)^\| `--attention`.*\n(^\|.*\n)+")
OPTIONS = re.compile(r"(?m)^\| option \|.*\n(^\|.*\n)+")


def capability_table() -> str:
    """A Markdown table: one row a mechanism, with its capabilities."""
    lines = ["| `--attention` | what | " + " | ".join(COLUMNS) + " |"]
    lines.append("|" + " --- |" * (len(COLUMNS) + 2))
    for name, mechanism in MECHANISMS.items():
        what = (mechanism.__doc__ or "").strip().splitlines()[0].rstrip(".")
        marks = [_mark(mechanism, capability) for capability in COLUMNS.values()]
        lines.append(f"| [`{name}`](mechanisms/{name}.md) | {what} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def options_table(name: str) -> str:
    """A Markdown table of the options of a mechanism, each with its default, its values and its help."""
    lines = ["| option | default | values | what it is |", "| --- | --- | --- | --- |"]
    for option, entry in MECHANISMS[name].options.items():
        default = "automatic" if entry.default is None else f"`{_text(entry.default)}`"
        lines.append(f"| `{option}` | {default} | {_values(entry)} | {entry.help} |")
    return "\n".join(lines)


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.kind is bool:
        return "`true`, `false`"
    least = "" if option.minimum is None else f", at least {option.minimum}"
    below = "" if option.below is None else f", below {option.below}"
    several = "; or one per layer" if option.is_per_layer else ""
    return {int: "a whole number", float: "a number"}.get(option.kind, "a text") + least + below + several


def _text(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


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
    """Replace the tables of the documentation."""
    replace(DOCS / "mechanisms.md", CAPABILITIES, capability_table())
    for name in MECHANISMS:
        replace(DOCS / "mechanisms" / f"{name}.md", OPTIONS, options_table(name))


def replace(page: Path, pattern: re.Pattern[str], table: str) -> None:
    """Put `table` in the place of the one table of a page that the pattern finds."""
    text, count = pattern.subn(lambda _: table + "\n", page.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{page} has {count} tables of this kind; it needs one, which begins as `{table.splitlines()[0]}`")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        sys.stdout.write(capability_table() + "\n")
