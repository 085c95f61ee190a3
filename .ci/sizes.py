"""Print how large each part of the project is, beside what sizes.yaml allows; exit code 1 if a part is larger.

python .ci/sizes.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml


ROOT = Path(__file__).resolve().parents[1]


def files_of(patterns: list[str]) -> list[Path]:
    """The files of the project, ignored ones left out, that a pattern of git names."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in dict.fromkeys(names) if (ROOT / name).is_file()]


def size_of(row: dict) -> int:
    """The lines or words of the files of a row."""
    texts = [path.read_text(encoding="utf-8") for path in files_of(row["files"])]
    return sum(len(text.split() if row["unit"] == "words" else text.splitlines()) for text in texts)


def main() -> int:
    """Print the table, and return the exit code."""
    table = yaml.safe_load((ROOT / ".ci" / "sizes.yaml").read_text(encoding="utf-8"))
    sizes = {name: size_of(row) for name, row in table.items()}
    print(f"{'part':<42} {'now':>7} {'at most':>8} {'aim':>7}")
    for name, row in table.items():
        over = "  too large" if sizes[name] > row["most"] else ""
        print(f"{name:<42} {sizes[name]:>7,} {row['most']:>8,} {row['aim']:>7,}{over}")
    larger = [name for name, row in table.items() if sizes[name] > row["most"]]
    if larger:
        print(f"{', '.join(larger)}: take lines out, or raise `most` in .ci/sizes.yaml and say there what for")
    return 1 if larger else 0


if __name__ == "__main__":
    sys.exit(main())
