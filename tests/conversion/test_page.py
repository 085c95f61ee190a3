"""report.html: what it says, that its texts are inert, that it is well formed and loads nothing."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser

import pytest
from page_reports import CONFIG, REPORT, RUNS

from hf_linear_attention.conversion.page import (
    Axis,
    Line,
    headline,
    line_chart,
    page_of,
    write_page,
)
from hf_linear_attention.conversion.report import published_words


VOID = {"meta", "br", "link", "img", "input", "hr"}
TITLES = [
    "How far it reads", "What it writes", "Which heads are hard", "What the heads forget", "Training",
    "Speed and memory", "What was left out", "All figures of held-out text", "How to repeat it",
]  # fmt: skip


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails at an end tag that closes another element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
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


def page(report=REPORT, runs=RUNS, config=CONFIG, name="my-model") -> Page:
    return Page(page_of(report, runs, config, name))


def without(*names: str) -> dict:
    report = copy.deepcopy(REPORT)
    for name in names:
        *parents, last = name.split(".")
        part = report
        for parent in parents:
            part = part[parent]
        del part[last]
    return report


def titles(shown: Page) -> list[str]:
    return [title for title in TITLES if title in shown.texts]


EMBEDDINGS = {"student": None, "agreement": None}


def quality(**changes) -> dict:
    return {**REPORT["quality"], **changes}


@pytest.mark.parametrize(
    ("changes", "title", "step"),
    [
        (
            {"student_minus_same_bytes": {"mean": -0.01, "standard_error": 0.001}},
            "Good: nearly as good as the original, and better than a window of the same bytes",
            "Next: try it on your own task",
        ),
        (
            {"student_minus_same_bytes": {"mean": -0.001, "standard_error": 0.001}},
            "Usable: nearly as good as the original, but no better than a window of the same bytes, which needs no "
            "training",
            "with --tokens 8k, or take that window (--attention window)",
        ),
        (
            {"student_minus_same_bytes": {"mean": 0.01, "standard_error": 0.001}},
            "Not yet: worse than a window of the same bytes, which needs no training",
            "with --tokens 8k, or take that window",
        ),
        ({"same_bytes": None}, "Good: nearly as good as the original", "Next: try it"),
        ({"same_bytes": None, "student": 1.5}, "Usable: close to the original", "train longer, with --tokens 8k;"),
        ({"same_bytes": None, "student": 1.7}, "Not yet: far from the original", "train longer, with --tokens 8k;"),
        ({**EMBEDDINGS, "cosine": 0.99}, "Good: its embeddings are", "Next: try it"),
        ({**EMBEDDINGS, "cosine": 0.8}, "Not yet: its embeddings", "train longer, with --tokens 8k"),
        (
            {**EMBEDDINGS, "cosine": 0.8, "spearman": 0.83, "spearman_teacher": 0.85},
            "Usable: its embeddings are close to those of the original",
            "longer",
        ),
    ],
)  # fmt: skip
def test_the_headline_says_whether_it_is_good_and_the_page_what_to_do_next(changes, title, step):
    report = {**REPORT, "quality": quality(**changes)}
    shown = page(report)
    assert headline(report, RUNS).startswith(title)
    assert step in shown.text
    assert "train it, with --preset default" in page(report, []).text or title.startswith("Good")


def test_the_figures_and_lengths_are_below_the_headline():
    assert (
        "Its attention alone is faster from 1,024 tokens; it was measured to "
        "2,048 tokens, where the original was trained for 512. Next: "
    ) in page().text
    assert "faster from 1,024 tokens; it reads 512 tokens." in page(without("quality.positions")).text


def test_speed_is_that_of_the_whole_model_or_of_its_attention():
    points = [(128, 2e-3, 1e-3), (512, 4e-3, 6e-3), (1024, 4e-3, 12e-3)]
    curve = [dict(zip(("length", "seconds", "softmax_seconds"), point)) for point in points]
    slow = [{**point, "softmax_seconds": 1e-3} for point in curve]
    for writing, said in ((curve, "writes 3 times as fast at 1,024 tokens"), (slow, "writes no faster up to 1,024")):
        speed = {**REPORT["quality"]["speed"], "model": {"reading": curve, "writing": writing}}
        shown = page({**REPORT, "quality": quality(speed=speed)}).text
        assert "Reads 3 times as fast at 1,024 tokens (faster from 512) and " + said in shown
        assert "the whole model beside its original" in shown
    shown = page().text
    assert "Its attention alone is faster from 1,024 tokens" in shown
    assert "Speed over length" in shown
    assert "4 heads of 8, float32, 1 thread, on the machine that measured this model" in shown
    never = {**REPORT, "quality": quality(speed=None)}
    assert "faster" not in page(never).text
    assert "Speed over length" not in page(never).text
    assert "Speed was not measured; hf-linear-attention compare" in page(never).text


def checked(**outputs: float) -> dict:
    return {"layers": [{}], "checks": {"student_against_teacher": outputs}}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (checked(top1_agreement=0.125), "not trained: same top token 12.5% on short samples"),
        (checked(mean_embedding_cosine=0.5), "cosine of embeddings 0.500 on short"),
        (checked(hidden_state_error=0.25), "error of hidden states 25.0% on short"),
        ({"layers": []}, "No layer was converted"),
        ({"layers": [{}], "checks": None, "quality": None}, "Converted, and not measured"),
    ],
)
def test_the_headline_without_figures_of_a_decoder(report, said):
    assert said in headline(report)


def test_a_trained_model_without_held_out_text_says_what_was_measured_last():
    assert page(without("quality")).text.count("Trained: nats per token 1.5") >= 1
    assert "to imitate its original" in page(without("quality")).text
    labelled = [{**RUNS[0], "metrics": {}, "training": {"tokens": 7, "task_loss_weight": 1.0}}]
    shown = page(without("quality"), labelled).text
    assert "Trained, and not measured" in shown
    assert "trained on 7 tokens." in shown


def test_every_section_is_there_in_order():
    shown = page()
    assert titles(shown) == TITLES
    assert [text for text in shown.texts if text in TITLES] == TITLES
    for said in (
        "hybrid", "in 2 of 2 layers", "trained on 2,000 tokens", "trained length 512", "the model reads 512",
        "position_bias", "dropped.weight", "3 x 4", "hf-linear-attention convert", "--train_file a.jsonl",
        "Loss of stage 1, transfer", "half-life", "139 kB", "512 bytes per token: as much after 271 tokens",
    ):  # fmt: skip
        assert said.lower() in shown.text.lower(), said


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["quality.positions"], {"How far it reads"}),
        (["quality.samples"], {"What it writes"}),
        (["checks", "quality.heads"], {"Which heads are hard", "What the heads forget"}),
        (["dropped_features", "tensors"], {"What was left out"}),
        (["command"], {"How to repeat it"}),
        (
            ["quality"],
            {"How far it reads", "What it writes", "All figures of held-out text"},
        ),
    ],
)
def test_a_section_without_data_is_left_out(names, missing):
    assert set(TITLES) - set(titles(page(without(*names)))) == missing


def test_the_first_different_token_is_marked_and_what_is_the_same_is_not():
    text = page_of(REPORT, RUNS, CONFIG, "m")
    assert '<span class="same"> there was a</span><mark> girl</mark> who' in text
    assert '<span class="same"> there was a</span><mark> boy</mark> named' in text


def test_heads_that_were_not_trained_are_shown_once():
    quality = {**REPORT["quality"], "heads": REPORT["checks"]["heads"]}
    assert page().text.count("Error of the heads, ") == 2
    assert page({**REPORT, "quality": quality}).text.count("Error of the heads, ") == 1


HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}"


def poisoned(value):
    """The same structure with every text replaced, but for keys that the code looks up."""
    if isinstance(value, dict):
        return {name: poisoned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return HOSTILE if isinstance(value, str) else value


def test_every_text_is_inert():
    shown = page(poisoned(REPORT), poisoned(RUNS), poisoned(CONFIG), HOSTILE)
    assert "script" not in shown.tags
    assert "img" not in shown.tags
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert HOSTILE in shown.texts
    assert "49" not in "".join(part for part in shown.texts if "alert" in part)


def test_it_loads_nothing_and_runs_nothing():
    text = page_of(REPORT, RUNS, CONFIG, "m")
    shown = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "use"} & set(shown.tags)
    assert not {"src", "href", "xlink:href", "srcset"} & {name for name, _ in shown.attributes}
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert ("name", "viewport") in shown.attributes


def test_every_plot_has_a_title_a_description_and_a_table():
    text = page_of(REPORT, RUNS, CONFIG, "m")
    plots = re.findall(r'<svg role="img" aria-labelledby="(\S+) (\S+)".*?</svg>', text, re.DOTALL)
    assert len(plots) == 5
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert {name for pair in plots for name in pair} <= set(ids)
    assert text.count("<details>") == len(plots)
    for figure in re.findall(r"<figure>.*?</figure>", text, re.DOTALL):
        assert "<table>" in figure


def test_all_coordinates_are_inside_the_plot():
    text = page_of(REPORT, RUNS, CONFIG, "m")
    found = 0
    for width, height, plot in re.findall(
        r'<svg role="img"[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"(.*?)</svg>', text, re.DOTALL
    ):
        for axis, value in re.findall(r' (c?[xy]|[xy][12])="(-?[\d.]+)"', plot):
            assert 0 <= float(value) <= float(width if "x" in axis else height)
            found += 1
    assert found > 300


def test_it_is_made_again_from_the_files_in_the_folder(tmp_path):
    for name, content in (
        ("conversion_report.json", REPORT), ("training_report.json", {"runs": RUNS}), ("config.json", CONFIG),
    ):  # fmt: skip
        (tmp_path / name).write_text(json.dumps(content))
    path = write_page(tmp_path)
    assert path == tmp_path / "report.html"
    first = path.read_text(encoding="utf-8")
    path.unlink()
    write_page(tmp_path)
    assert path.read_text(encoding="utf-8") == first
    assert f"<title>{tmp_path.name}: Good: nearly as good" in first


def test_ticks_are_round_and_inside():
    assert Axis(0, 1).ticks == [0, 0.5, 1]
    assert Axis(1.3, 2.2).ticks == pytest.approx([1.5, 2.0])
    assert Axis(64, 1024, is_log=True).ticks == [64, 128, 256, 512, 1024]
    assert Axis(5, 5).ticks == [5]
    assert len(Axis(1, 2.0**40, is_log=True).ticks) <= 7


def test_a_point_is_where_its_value_is():
    chart = line_chart("t", "d", [Line("a", [(1, 0), (4, 10), (16, 5)])], ("x", "y"), is_log=True)
    (_, _, points), *_ = chart.lines
    assert [x for x, _ in points] == pytest.approx([chart.left, (chart.left + chart.right) / 2, chart.right])
    assert points[1][1] < points[2][1] < points[0][1]  # y grows downwards
    assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.1)


def test_a_value_above_the_plot_is_in_the_table():
    chart = line_chart("t", "d", [Line("a", [(1, 0), (2, 1)]), Line("b", [(1, 0), (2, 50)])], ("x", "y"), most_y=2)
    assert chart.lines[1][2][1][1] < 0
    assert chart.table["rows"] == [["1", "0", "0"], ["2", "1", "50"]]


def test_a_published_command_has_no_folder_of_the_author():
    options = {
        "model_name_or_path": "/home/me/model",
        "train_file": "/data/secret/a.jsonl",
        "overwrite": True,
        "tokens": "2M",
    }
    assert published_words(options) == [
        "--model_name_or_path", "model", "--train_file", "a.jsonl", "--overwrite", "--tokens", "2M",
    ]  # fmt: skip
