"""The README's table of mechanisms, generated from the classes' own capability attributes.

    python tests/support/capability_table.py

prints it; a test compares the README with it.
"""

from __future__ import annotations

import sys

from hf_linear_attention.mechanism import AttentionMechanism
from hf_linear_attention.mechanisms import MECHANISMS


COLUMNS = {
    "encoders": "bidirectional",
    "decoders": "causal",
    "cross-attention": "cross",
    "constant state": "state",
    "padding": "padding",
    "grouped queries": "gqa",
    "ALiBi": "alibi",
}


def capability_table() -> str:
    """A Markdown table: one row a mechanism, with its capabilities and its options with their defaults."""
    lines = ["| `--attention` | what | " + " | ".join(COLUMNS) + " | options (default) |"]
    lines.append("|" + " --- |" * (len(COLUMNS) + 3))
    for name, mechanism in MECHANISMS.items():
        what = (mechanism.__doc__ or "").strip().splitlines()[0].rstrip(".")
        marks = [_mark(mechanism, capability) for capability in COLUMNS.values()]
        options = ", ".join(
            f"`{option}` ({'automatic' if value.default is None else value.default})"
            for option, value in mechanism.options.items()
        )
        lines.append(f"| `{name}` | {what} | " + " | ".join(marks) + f" | {options} |")
    return "\n".join(lines)


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


if __name__ == "__main__":
    sys.stdout.write(capability_table() + "\n")
