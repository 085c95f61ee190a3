"""Every measured figure of README.md and docs/ is that of the results, and is changed by changing them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import yaml


ROOT = Path(__file__).resolve().parents[2]
RESULTS = """# Results

## Speed

The first table, of an idle machine:

| | 512 | 8,192 |
| --- | --- | --- |
| `linear` | 1.30x | **4.69x** |
| `hybrid`, window 64 | 1.01x | 3.60x |

The second table:

| | 512 | 8,192 |
| --- | --- | --- |
| `linear` | 1.20x | 5.02x |
| with backward | | |
| `linear` | 1.10x | 0.98x |

## Quality

Three seeds have 1.4681 1.4581 1.4597, an error of 8.1e-7, and
51,200 bytes.
"""


@pytest.fixture
def quotes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.quotes")


def repository(root: Path, page: str, *listed: dict, results: str = RESULTS, **others) -> Path:
    """A repository of one page, with these quotes."""
    for folder in ("benchmarks", "docs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "README.md").write_text(page)
    (root / "benchmarks" / "RESULTS.md").write_text(results)
    (root / "benchmarks" / "quotes.yaml").write_text(yaml.dump({"README.md": {"quotes": list(listed), **others}}))
    return root


def test_every_figure_is_that_of_the_results(quotes, capsys):
    status = quotes.main()
    assert (capsys.readouterr().out, status) == ("", 0)


def test_pages_whose_every_figure_is_wrong_are_mended(quotes, tmp_path, capsys):
    listed = yaml.safe_load((ROOT / "benchmarks" / "quotes.yaml").read_text(encoding="utf-8"))
    files = {"README.md", "benchmarks/RESULTS.md", "benchmarks/quotes.yaml"} | set(listed)
    files |= {quote.get("file", "README.md") for page in listed.values() for quote in page.get("quotes", [])}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    count = 0
    for page, entries in listed.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for quote in entries.get("quotes", []):
            for place, old, _ in quotes.figures(quote, page, text, ROOT):
                wrong = old.translate(str.maketrans("0123456789", "1234567891"))
                text = text[:place] + wrong + text[place + len(old) :]
                count += 1
        (tmp_path / page).write_text(text, encoding="utf-8")
    assert quotes.main(root=tmp_path) == 1
    assert len(capsys.readouterr().out.splitlines()) == count
    assert quotes.main(write=True, root=tmp_path) == 0
    assert [page for page in listed if (tmp_path / page).read_bytes() != (ROOT / page).read_bytes()] == []


@pytest.mark.parametrize(
    ("page", "quote", "wanted"),
    [
        (
            "9.9 times as\nfast",
            {"text": "{} times as fast", "from": "| `hybrid`, ... | ... | {}x |"},
            "3.6 times as\nfast",
        ),
        (
            "9 and 9.99 x",
            {"text": "{} and {} x", "from": "| `linear` | {}x | {}x |", "under": "The first table"},
            "1 and 4.69 x",
        ),
        (
            "0.12 and .12 x",
            {
                "text": "{} and {} x",
                "from": "| `linear` | ... | {}x |",
                "under": "| with backward |",
                "as": ["a", "a"],
            },
            "0.98 and .98 x",
        ),
        (
            "by 9.99 nats",
            {"text": "by {} nats", "from": "seeds have {} {} {}", "under": "## Quality", "as": "(a + b + c) / 3"},
            "by 1.46 nats",
        ),
        ("at 9.999 x", {"text": "{} x", "from": "| `hybrid`, window 64 | {}x |"}, "at 1.01 x"),
        ("an error of 9e-9", {"text": "of {}", "from": "error of {}, and {} bytes", "as": "a"}, "an error of 8e-7"),
        (
            "51 kB, 999 bytes",
            {"text": "{} kB, {} bytes", "from": "{} bytes", "as": ["a / 1000", "a"]},
            "51 kB, 51,200 bytes",
        ),
    ],
)
def test_a_figure_keeps_its_form(quotes, tmp_path, page, quote, wanted):
    root = repository(tmp_path, page, quote)
    assert quotes.main(root=root) == 1
    assert (root / "README.md").read_text() == page
    assert quotes.main(write=True, root=root) == 0
    assert (root / "README.md").read_text() == wanted
    assert quotes.main(root=root) == 0


def test_a_value_that_changes_in_the_results_changes_the_page(quotes, tmp_path):
    quote = {"text": "{} x", "from": "| `hybrid`, window 64 | ... | {}x |"}
    root = repository(tmp_path, "3.60 x", quote)
    assert quotes.main(root=root) == 0
    root = repository(tmp_path, "3.60 x", quote, results=RESULTS.replace("3.60x", "12.34x"))
    assert quotes.main(write=True, root=root) == 0
    assert (root / "README.md").read_text() == "12.34 x"


def test_a_file_of_figures_is_a_source(quotes, tmp_path):
    names = ["rows.name=aft simple.causal", "rows.name=latent.causal", "list.1"]
    root = repository(
        tmp_path, "from 1 tokens, 2, 3.3", {"text": "from {} tokens, {}, {}", "file": "a.json", "from": names}
    )
    rows = [{"name": "aft simple", "causal": None}, {"name": "latent", "causal": 1024}]
    (root / "a.json").write_text(json.dumps({"longest": 4096, "rows": rows, "list": [1, 0.25]}))
    assert quotes.main(write=True, root=root) == 0
    assert (root / "README.md").read_text() == "from > 4,096 tokens, 1,024, 0.2"


@pytest.mark.parametrize(
    ("page", "quote", "problem"),
    [
        ("1.30 x, 1.30 x", {"text": "{} x", "from": "bytes"}, "README.md has 2 places instead of one for: {} x"),
        ("1.30 x", {"text": "{} times", "from": "bytes"}, "README.md has 0 places instead of one for: {} times"),
        (
            "1.30 x",
            {"text": "{} x", "from": "| `linear` | {}x |"},
            "benchmarks/RESULTS.md has 3 places instead of one for: | `linear` | {}x |",
        ),
        (
            "1.30 x",
            {"text": "{} x", "from": "| `hybrid`, window 64 | {}x | {}x | {}x |"},
            "benchmarks/RESULTS.md has 0 places instead of one for: | `hybrid`, window 64 |",
        ),
        ("1.30 x", {"text": "{} x", "from": "{} bytes", "under": "## None"}, "0 places instead of one for: ## None"),
        ("1.30 x", {"text": "{} x", "from": "seeds have {} {}"}, "2 figures for the 1 of: {} x"),
        ("1.30 x", {"text": "{} x", "from": "{} bytes", "as": "a / b"}, "name 'b' is not defined"),
        ("1.30 x", {"text": "{} x", "from": "a.b", "file": "a.json"}, "nothing is at `b` of: a.b"),
        ("1.30 x", {"text": "{} x", "from": "a", "file": "a.json"}, "no number is at: a"),
    ],
)
def test_a_quote_that_cannot_be_followed_is_named(quotes, tmp_path, capsys, page, quote, problem):
    root = repository(tmp_path, page, quote)
    (root / "a.json").write_text('{"a": {}}')
    assert quotes.main(write=True, root=root) == 1
    assert any(line.startswith("README.md: ") and problem in line for line in capsys.readouterr().out.splitlines())
    assert (root / "README.md").read_text() == page


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("A loss of 1.358 and .5.", ["1.358", ".5"]),
        (
            "It takes 5 to 7 times as long, 12 %\nmore, 139 kB, 3 ms and 17\nminutes.",
            ["5", "7", "12", "139", "3", "17"],
        ),
        ("An error of 1e-6, 3.2e-7.", ["1e-6", "3.2e-7"]),
        ("| 1 | 2,457 | word | 31.8x |\n", ["2,457", "31.8"]),
        ("Faster from 128 tokens.", ["128"]),
        ("With 1.0M of 512 tokens, version 1.1.4, `--rate 5e-4`, [a](b-0.5.md), https://a.b/1.5, 2 x as", ["2"]),
        ("```text\nloss 1.5\n```\n\n| option | default |\n| --- | --- |\n| `a` | 0.5 |\n\n1.5\n", ["1.5"]),
        ("<!-- python table.py -->\n\n| a | 5 |\n| b | 6 |\n\n| a | 7 |\n", ["7"]),
    ],
)
def test_what_looks_measured_needs_a_source(quotes, tmp_path, capsys, page, found):
    root = repository(tmp_path, page)
    assert quotes.main(root=root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" looks measured")[0].split(" ")[-1] for line in lines] == found


def test_what_is_not_measured_is_listed_and_needed(quotes, tmp_path, capsys):
    assert quotes.main(root=repository(tmp_path, "Python\n3.11 is needed.", not_measured=["Python 3.11"])) == 0
    assert quotes.main(root=repository(tmp_path, "Python is needed.", not_measured=["Python 3.11"])) == 1
    assert "nothing needs this entry of `not_measured`: Python 3.11" in capsys.readouterr().out
