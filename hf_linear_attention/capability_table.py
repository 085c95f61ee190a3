"""The README's table of mechanisms, generated from the classes' own capability attributes.

    python -m hf_linear_attention.capability_table

prints it; a test compares the README with it.
"""

from __future__ import annotations

import sys

from .mechanisms import MECHANISMS


COLUMNS = {
    "encoders": "supports_bidirectional",
    "decoders": "supports_causal",
    "constant state": "supports_state",
    "padding": "supports_padding",
    "grouped queries": "supports_gqa",
}


def capability_table() -> str:
    """A Markdown table: one row a mechanism, with its capabilities and its options with their defaults."""
    lines = ["| `--attention` | what | " + " | ".join(COLUMNS) + " | options (default) |"]
    lines.append("|" + " --- |" * (len(COLUMNS) + 3))
    for name, mechanism in MECHANISMS.items():
        what = (mechanism.__doc__ or "").strip().splitlines()[0].rstrip(".")
        marks = ["yes" if getattr(mechanism, attribute) else "no" for attribute in COLUMNS.values()]
        options = ", ".join(
            f"`{option}` ({'by map' if value.default is None else value.default})"
            for option, value in mechanism.options.items()
        )
        lines.append(f"| `{name}` | {what} | " + " | ".join(marks) + f" | {options} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(capability_table() + "\n")
