"""The tables of RESULTS.md are those of benchmarks/results/, and so is what conversions quote."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ("RESULTS.md", "figures", "results")


@pytest.fixture
def tables(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.tables")


@pytest.fixture
def copied(tables, tmp_path, monkeypatch):
    """The tables of a copy, which a test may write."""
    for name in WRITTEN:
        source, copy = ROOT / "benchmarks" / name, tmp_path / "benchmarks" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    monkeypatch.setattr(tables, "MEASURED", Path(shutil.copy(tables.MEASURED, tmp_path)))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "benchmarks" / "figures")
    return tables


def test_the_tables_are_those_of_the_results(tables, capsys):
    status = tables.main()
    assert (capsys.readouterr().out, status) == ("", 0)


def test_every_result_has_its_tables(tables):
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    shown = {"_".join(filter(None, match.groups()[:2])) for match in tables.BLOCK.finditer(text)}
    assert shown == {path.stem for path in tables.RESULTS.glob("*.json")}


def test_a_table_that_differs_is_named_and_written_again(copied, capsys):
    page = copied.ROOT / "benchmarks" / "RESULTS.md"
    text = page.read_text(encoding="utf-8")
    match = next(match for match in copied.BLOCK.finditer(text) if match[1] == "speed_decoding")
    page.write_text(text.replace(match[3], match[3].replace("Llama 125M", "Llama 7B")), encoding="utf-8")
    plot = copied.FIGURES / "speed_decoding.png"
    plot.unlink()
    assert copied.main() == 1
    assert capsys.readouterr().out == "benchmarks/RESULTS.md is not what benchmarks/results/ has: run `make figures`\n"
    assert copied.main(write=True) == 0
    assert page.read_text(encoding="utf-8") == text
    assert plot.stat().st_size > 10_000


def test_a_changed_result_changes_its_table_and_what_conversions_quote(copied, capsys):
    result = copied.stored("speed_break_even")
    result["causal"]["linear elu1"] = [0.5] * len(result["lengths"])
    (copied.RESULTS / "speed_break_even.json").write_text(json.dumps(result), encoding="utf-8")
    assert copied.main() == 1
    assert capsys.readouterr().out.count("run `make figures`") == 2
    assert copied.main(write=True) == 0
    assert copied.main() == 0
    quoted = json.loads(copied.MEASURED.read_text(encoding="utf-8"))["rows"]
    assert next(row for row in quoted if row["name"] == "linear elu1")["causal"] is None


def test_a_quick_run_is_not_quoted(copied):
    result, before = copied.stored("speed_break_even"), copied.MEASURED.read_text(encoding="utf-8")
    result["arguments"]["quick"] = True
    (copied.RESULTS / "speed_break_even.json").write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"speed_break_even\.json is of a run with --quick"):
        copied.main(write=True)
    assert copied.MEASURED.read_text(encoding="utf-8") == before


def test_a_missing_result_is_named(copied):
    (copied.RESULTS / "speed_delta.json").unlink()
    with pytest.raises(SystemExit, match=r"no .*speed_delta\.json"):
        copied.main()
