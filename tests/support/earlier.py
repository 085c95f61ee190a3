"""What earlier versions of the code wrote; see tests/fixtures/README.md."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path


FIXTURES = Path(__file__).parents[1] / "fixtures"
FIRST = FIXTURES / "4b9c102"
# Where the first version's unfinished run was started.
PLACE = "/tmp/hf-linear-attention-4b9c102"


def unfinished_run(folder: Path) -> Path:
    """Copy the first version's source, data and unfinished run, as if it had run in `folder`; returns its output."""
    shutil.copytree(FIRST / "run", folder, dirs_exist_ok=True)
    shutil.copytree(FIRST / "source", folder / "source")
    for path in folder.rglob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace(PLACE, str(folder)), encoding="utf-8")
    for sums in folder.rglob("checksums.json"):
        content = {name: _size_and_digest(sums.with_name(name)) for name in json.loads(sums.read_text())}
        sums.write_text(json.dumps(content), encoding="utf-8")
    return folder / "out"


def _size_and_digest(path: Path) -> tuple[int, str]:
    content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()
