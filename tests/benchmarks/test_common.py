"""The harness: options, times in turns, tables, and results with their pages."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import common


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_an_option_has_the_type_of_its_default_and_quick_only_other_defaults():
    defaults = {"lengths": [1, 2], "rate": 0.5, "name": None, "long": False, "texts": []}
    given = common.parse("", [], {"rate": 0.1}, **defaults)
    assert vars(given).items() >= {**defaults, "quick": False}.items()
    words = ["--quick", "--lengths", "3", "--long", "--name", "x", "--texts", "a", "b"]
    given = common.parse("", words, {"rate": 0.1, "lengths": [7]}, **defaults)
    assert (given.lengths, given.rate, given.name, given.long, given.texts) == ([3], 0.1, "x", True, ["a", "b"])
    assert torch.get_num_threads() == 1


def test_functions_take_turns_and_the_first_round_does_not_count():
    order, now = [], [0.0]

    def call(name, seconds):
        order.append(name)
        now[0] += seconds

    functions = {"a": lambda: call("a", 2.0), "b": lambda: call("b", 1.0)}
    times = common.times_in_turns(functions, 2, lambda: now[0])
    assert order == ["a", "b"] * 3
    assert times == {"a": [2.0, 2.0], "b": [1.0, 1.0]}
    assert len(common.times_in_turns(functions, 9, lambda: now[0], seconds=0)["a"]) == 3
    assert common.medians(times, 1e-3) == {"a": 2000, "b": 1000}
    assert common.median_ratio([1, 2, 9], [1, 1, 1]) == 2  # of the rounds, not of the medians


def test_a_table_has_three_digits_of_a_number():
    found = common.table(["", "a", "b"], [["x", 1234, 0.5], ["y", None, 1234.5], ["z", 9.999e-5, 1.0]])
    assert common.as_markdown(found).splitlines() == [
        "|  | a | b |", "| --- | ---: | ---: |", "| x | 1,234 | 0.500 |", "| y | - | 1,234 |", "| z | 1.0e-04 | 1.00 |",
    ]  # fmt: skip


def test_a_result_is_written_and_the_page_beside_it_renewed(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- some -->\n\nold\n\n<!-- end -->\n\n<!-- other -->\nkept\n<!-- end -->\n")
    given = common.parse("", ["--output_dir", str(tmp_path), "--quick"], {})
    common.save(given, "some", [common.table(["a"], [[1.0]])], more=2)
    result = json.loads((tmp_path / "some.json").read_text())
    assert (result["more"], result["tables"][0]["rows"], result["arguments"]["quick"]) == (2, [[1.0]], True)
    assert {"date", "torch", "processor", "threads", "load"} <= set(result["environment"])
    assert "| 1.00 |" in capsys.readouterr().out
    text = page.read_text()
    assert "`python -m benchmarks.some --quick`" in text
    assert "old" not in text
    assert "kept" in text


def test_a_result_without_kernels_has_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LINEAR_ATTENTION_BACKEND", "torch")
    common.save(common.parse("", ["--output_dir", str(tmp_path)], {}), "some", [])
    assert [path.name for path in tmp_path.iterdir()] == ["some_torch.json"]


def test_the_tables_of_the_pages_are_those_of_the_results():
    """After a change of a result by hand: `with_tables` writes them."""
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    pages = [path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md")]
    for name, result in results.items():
        (text,) = (page for page in pages if f"<!-- {name} -->" in page)
        assert not result["arguments"]["quick"]
        assert common.with_tables(text, name, result) == text, name
