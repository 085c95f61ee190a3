"""The table of planted errors is whole. The errors themselves are planted by `run.py`, by hand and in `.ci/run`."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest


FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
spec = importlib.util.spec_from_file_location("planted_run", FOLDER / "run.py")
assert spec is not None
assert spec.loader is not None
planted = sys.modules["planted_run"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planted)
ERRORS = planted.read_table()
KEYS = {"id", "area", "breaks", "seen", "file", "function", "old", "new", "killed_by", "today", "survives_today"}


@pytest.mark.parametrize("row", ERRORS, ids=lambda row: row["id"])
def test_an_error_has_one_place_and_tests(row) -> None:
    assert KEYS - {"function", "today", "survives_today"} <= row.keys() <= KEYS
    place = planted.find_place(row)
    text = place.path.read_text()
    changed = text[: place.start] + row["new"] + text[place.stop :]
    assert changed != text
    if place.path.suffix == ".py":  # an error that no import survives would prove nothing
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    for node in row["killed_by"]:
        file, _, name = node.partition("::")
        assert (ROOT / file).exists(), f"there is no {file}"
        assert not name or f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text()


def test_there_are_enough_and_each_once() -> None:
    assert len(ERRORS) >= 80
    assert [name for name, count in Counter(row["id"] for row in ERRORS).items() if count > 1] == []
