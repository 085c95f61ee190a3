"""report.html: what it says, that its texts are inert, that it is well formed and loads nothing."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from page_reports import CONFIG, QUALITY, REPORT, RUNS

from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.page import headline, next_step, page_of, write_page


VOID = {"meta", "br", "link", "img", "input", "hr"}
TITLES = ["Figures on held-out text", "Speed", "Layers", "Which heads are hard", "How to repeat it"]


class Parsed(HTMLParser):
    """Elements, attributes and texts of a page; fails at an end tag that closes another element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(report=REPORT, runs=RUNS, config=CONFIG, name="my-model") -> Parsed:
    return Parsed(page_of(report, runs, config, name))


EMBEDDINGS = {"student": None}


def difference(mean: float) -> dict:
    return {"student_minus_same_bytes": {"mean": mean, "standard_error": 0.001}}


@pytest.mark.parametrize(
    ("changes", "title", "step"),
    [
        (difference(-0.01), "Good: nearly as good as the original, and better than a window", "try it"),
        (difference(-0.001), "Usable: nearly as good as the original, but no better", "0.008M, or take that window"),
        (difference(0.01), "Not yet: worse than a window of the same bytes", "0.008M, or take that window"),
        ({"same_bytes": None}, "Good: nearly as good as the original", "try it"),
        ({"same_bytes": None, "student": 1.5}, "Usable: close to the original", "with --tokens 0.008M."),
        ({"same_bytes": None, "student": 1.7}, "Not yet: far from the original", "with --tokens 0.008M."),
        ({**EMBEDDINGS, "cosine": 0.99}, "Good: its embeddings are", "try it"),
        ({**EMBEDDINGS, "cosine": 0.8}, "Not yet: its embeddings", "train longer"),
        ({**EMBEDDINGS, "cosine": 0.8, "spearman": 0.83, "spearman_teacher": 0.85}, "Usable: its embeddings", "longer"),
    ],
)  # fmt: skip
def test_the_headline_says_whether_it_is_good_and_what_to_do_next(changes, title, step):
    figures = figures_of({**QUALITY, **changes})
    assert headline(REPORT, RUNS, figures).startswith(title)
    assert step in next_step(REPORT, RUNS, figures)


def checked(**outputs: object) -> dict:
    return {"layers": [{}], "checks": {"student_against_teacher": outputs}}


@pytest.mark.parametrize(
    ("report", "runs", "said"),
    [
        (checked(top1_agreement=0.125), [], "not trained: same top token 12.5% on short samples"),
        (checked(top1_agreement=1.0, beyond={"top1_agreement": 0.5}), [], "same top token 50.0% beyond the windows"),
        (checked(hidden_state_error=0.25), [], "error of hidden states 25.0% on short"),
        ({"layers": []}, [], "No layer was converted"),
        ({"layers": [{}], "checks": None}, [], "Converted, and not measured"),
        ({"layers": [{}]}, RUNS, "Trained: nats per token 1.5"),
        ({"layers": [{}]}, [{"metrics": {}}], "Trained, and not measured"),
    ],
)
def test_the_headline_without_figures_of_held_out_text(report, runs, said):
    assert said in headline(report, runs, None)


def test_every_section_is_there_in_order_and_left_out_without_data():
    shown = page()
    assert [text for text in shown.texts if text in TITLES] == TITLES
    for said in (
        "in 2 of 2 layers", "trained on 2,000 tokens", "The original reads 512 tokens", "position_bias",
        "dropped.weight", "--train_file a.jsonl", "recall of copied text 0.29", "1,024 3.00 -", "139,000 bytes",
        "271 tokens", "torch 2.13.0",
    ):  # fmt: skip
        assert said in shown.text, said
    for name, missing in (("quality", {TITLES[0], "Speed"}), ("command", {TITLES[-1]})):
        less = {key: value for key, value in REPORT.items() if key != name}
        assert set(TITLES) - set(page(less).texts) == missing
    same = {**REPORT, "quality": {**QUALITY, "heads": REPORT["checks"]["heads"]}}
    assert [text.count("Error of the heads, ") for text in (shown.text, page(same).text)] == [2, 1]


def test_without_matplotlib_there_are_tables_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = page()
    assert "svg" not in shown.tags
    assert "positions 512 to 2,047" in shown.texts


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}$\\bad$"


def poisoned(value):
    """The same structure with every text replaced, but for keys that the code looks up."""
    if isinstance(value, dict):
        return {name: poisoned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_every_text_is_inert_and_nothing_is_loaded_or_run():
    shown = page(poisoned(REPORT), poisoned(RUNS), poisoned(CONFIG), HOSTILE)
    assert HOSTILE in shown.texts
    assert "49" not in "".join(part for part in shown.texts if "alert" in part)
    assert not {"script", "link", "img", "iframe", "object"} & set(shown.tags)
    for name, value in shown.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "srcset")
        assert not name.endswith("href") or value.startswith("#")
    text = page_of(REPORT, RUNS, CONFIG, "m")
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text


def test_the_plot_has_a_name_and_no_two_elements_one_id():
    text = page_of(REPORT, RUNS, CONFIG, "m")
    (figure,) = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert figure.startswith('<figure role="img" aria-label=')
    assert all(name in figure for name in ("original", "this model", "window of the same bytes", "trained length 512"))
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_it_is_made_again_from_the_files_in_the_folder(tmp_path):
    for name, content in (
        ("conversion_report.json", REPORT), ("training_report.json", {"runs": RUNS}), ("config.json", CONFIG),
    ):  # fmt: skip
        (tmp_path / name).write_text(json.dumps(content))
    first = write_page(tmp_path).read_text(encoding="utf-8")
    assert write_page(tmp_path) == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == first
    assert f"<title>{tmp_path.name}: Good: nearly as good" in first
