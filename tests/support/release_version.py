r"""Check, before a release, that its tag, pyproject.toml, CITATION.cff and CHANGELOG.md name one version.

    python tests/support/release_version.py v0.1.0

The first section of CHANGELOG.md has to be that of the version, as in `## 0.1.0 (2026-11-23)`. It imports the standard
library alone, because the release workflow runs it where nothing is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """What keeps `tag` from being released; an empty list if nothing does."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    cited = re.search(r"^version: *(\S+)", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    section = re.search(r"^## *(\S+)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = {
        "pyproject.toml": version,
        "CITATION.cff": cited and cited[1],
        "the first section of CHANGELOG.md": section and section[1],
    }
    return [f"{place} has {name}, and the tag is {tag}" for place, name in found.items() if tag != f"v{name}"]


def main(argv: list[str]) -> int:
    """Print what keeps the tag from being released; returns 1 if anything does, 2 without a tag."""
    if len(argv) != 1:
        sys.stderr.write("usage: release_version.py TAG\n")
        return 2
    found = problems(argv[0])
    sys.stderr.write("".join(f"release_version.py: {problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
