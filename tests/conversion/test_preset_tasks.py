"""`--preset` for every task whose rows are not plain text: conversion, calibration and training read them alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from checkpoints import evaluate, run, save_twin, tiny_tokenizer
from task_twins import TWINS
from transformers import AutoTokenizer

from hf_linear_attention.training.tasks import TASKS, unit_of


DROPPED = {"seq2seq_lm": ("--drop", "position_bias")}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [part for topic in sorted(topics) for part in topics[topic].split("\n\n") if len(part) > 20][:40]


def command_of(folder: Path, *more: Any) -> list[Any]:
    words = ["--model_name_or_path", folder / "original", "--output_dir", folder / "out", "--no_verify"]
    return [*words, "--preset", "default", "--train_file", folder / "train.jsonl", *more]


@pytest.mark.parametrize("task", ["seq2seq_lm", "image_embedding"])
def test_rows_of_a_task_calibrate_train_and_evaluate(task: str, texts: list[str], tmp_path: Path) -> None:
    """FAVOR++ has constants to fit and nothing to transfer, so that one stage is left."""
    TWINS[task](tmp_path, texts, tiny_tokenizer())
    unit = unit_of(task)
    length = ("--tokens", 600) if unit == "tokens" else ("--epochs", 1)
    settings = ("--attention", "performer", "--features", "favor++", "--num_features", 8, *DROPPED.get(task, ()))
    files = ("--calibration_file", tmp_path / "train.jsonl", "--validation_file", tmp_path / "valid.jsonl")
    code, text, err = run(*command_of(tmp_path, *settings, *files, *length))
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["calibration"]["inputs"] == "train.jsonl"
    assert report["calibration"]["tokens"] > 24  # more than one of every row
    (stage,) = json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"]
    assert stage["training"]["preset"].startswith("default")
    figure = stage["metrics"][f"eval_{TASKS[task].figure}"]
    assert re.search(rf"distil: [\d,]+ {unit}, .*eval_{TASKS[task].figure} {figure:.4g}", text)
    assert f"trained on {stage['training'][unit]:,} {unit}" in (tmp_path / "out" / "report.html").read_text()


def test_the_amount_is_counted_as_the_task_counts_it(texts: list[str], tmp_path: Path) -> None:
    TWINS["image_embedding"](tmp_path, texts, tiny_tokenizer())
    code, text, err = run(*command_of(tmp_path, "--epochs", 3, "--dry_run", "--attention", "hybrid"))
    assert code == 0, err
    assert "stage 1 of 2  transfer: 1.5 epochs; " in text
    files = ("--validation_file", tmp_path / "valid.jsonl")
    for name, value in (("--tokens", "2k"), ("--max_eval_tokens", 9)):
        code, _, err = run(*command_of(tmp_path, *files, name, value, "--dry_run"))
        assert code == 2
        assert f"`{name}` is only for causal_lm, " in err
        assert "but the task of this model is image_embedding" in err


def test_rows_without_the_columns_of_the_task_are_refused(texts: list[str], tmp_path: Path) -> None:
    TWINS["seq2seq_lm"](tmp_path, texts, tiny_tokenizer())
    (tmp_path / "other.jsonl").write_text('{"question": "a", "target": "b"}\n')
    settings = ("--attention", "performer", "--features", "favor++", "--num_features", 8, *DROPPED["seq2seq_lm"])
    code, _, err = run(*command_of(tmp_path, *settings, "--calibration_file", tmp_path / "other.jsonl", "--dry_run"))
    assert code == 2
    assert "`--calibration_file`: `--text_column_name source` is not a column of" in err
    command = command_of(tmp_path, "--dry_run", *DROPPED["seq2seq_lm"])
    command[command.index("--train_file") + 1] = tmp_path / "other.jsonl"
    code, _, err = run(*command)
    assert (code, err.count("\n")) == (2, 1)
    assert "`--text_column_name source` is not a column of" in err


@pytest.mark.long
def test_conversations_are_learned_and_measured(tmp_path: Path) -> None:
    """The answers are scored, and the figures of a language model are those of conversations too."""
    save_twin(tmp_path / "original", "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "original")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "original")
    for split, count in (("train", 12), ("valid", 3)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"What follows {n}?"},
                    {"role": "assistant", "content": f"{n + 1} does, and then {n + 2}."},
                ]
            }
            for n in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--tokens", "500", "--window_size", 4, "--num_features", 8)
    code, text, err = run(*command_of(tmp_path, *more))
    assert code == 0, err
    assert "give a `--validation_file` of held-out text, here or with" in text
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    command = ["--model_name_or_path", tmp_path / "original", "--output_dir", tmp_path / "out"]
    command += ["--validation_file", tmp_path / "valid.jsonl"]
    code, text, err = evaluate(*command, "--controls", "none", "--max_eval_length", 48)
    assert code == 0, err
    teacher = json.loads((tmp_path / "out" / "conversion_report.json").read_text())["quality"]["teacher"]
    assert re.search(rf"nats per token, the original +{teacher:.4g}\n", text)
