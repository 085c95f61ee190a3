"""Rows read while they are needed: which, in which order, on which process, and after a resumption."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import recipe_of
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.data.inputs import StreamedExamples, packed
from hf_linear_attention.training.data.packing import PackedBlocks


Make = Callable[..., StreamedExamples]


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> Make:
    def streamed(path: Path, task: str = "embedding", **data: Any) -> StreamedExamples:
        return StreamedExamples(recipe_of(task, train_file=str(path), streaming=True, **data), tokenizer, 64)

    return streamed


def texts_of(examples: StreamedExamples, rank: int, world_size: int, count: int, start: int = 0) -> list[list[int]]:
    batches = examples.batches(start, 1, rank, world_size, 0)
    return [batch["input_ids"][0].tolist() for batch in itertools.islice(batches, count)]


def test_two_processes_read_every_row_once(make: Make, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lines = (files / "train.jsonl").read_text(encoding="utf-8").splitlines()
    expected = sorted(tokenizer(json.loads(line)["text"]).input_ids[:64] for line in lines)
    halves = [texts_of(make(files / "train.jsonl"), rank, 2, 30) for rank in (0, 1)]
    assert sorted(halves[0] + halves[1]) == expected
    assert texts_of(make(files / "train.jsonl"), 0, 1, 60) != expected  # shuffled
    again = texts_of(make(files / "train.jsonl"), 1, 2, 50, start=10)
    assert again[:20] == halves[1][10:]
    assert sorted(again[20:]) != sorted(again[:20])  # the next epoch


def test_blocks_are_those_of_data_in_memory() -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, 99, length) for length in (3, 17, 1, 8, 8, 30, 5)]
    for size in (4, 8, 9):
        blocks, whole = list(packed(documents, size)), PackedBlocks(documents, size)
        assert len(blocks) == 72 // size
        for mine, yours in zip(blocks, (whole[index] for index in range(len(blocks))), strict=True):
            assert mine.keys() == yours.keys()
            assert all(mine[name].tolist() == yours[name].tolist() for name in mine)


def test_bad_rows_of_a_stream(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(TrainingError, match="row 1: `text` is None"):
        texts_of(make(tmp_path / "t.jsonl"), 0, 1, 3)
    assert len(texts_of(make(tmp_path / "t.jsonl", on_bad_rows="skip"), 0, 1, 4)) == 4
    assert "skipped 1 bad row(s)" in caplog.text
    with pytest.raises(TrainingError, match="`--text_column_name body` is not a column; the data has text"):
        texts_of(make(tmp_path / "t.jsonl", text_column_name="body"), 0, 1, 1)


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_a_streamed_run_resumes_bit_exactly(
    task: str, finetune, llama: str, masked: str, files: Path, tmp_path: Path, capsys
) -> None:
    model = llama if task == "causal_lm" else masked
    data = ["--train_file", files / "train.jsonl", "--streaming", "--max_length", 32]
    options = ["--model_name_or_path", model, "--task", task, *data, "--learning_rate", "1e-2"]
    steps = ["--max_train_steps", 12, "--checkpointing_steps", 6, "--logging_steps", 1]
    events = finetune(*options, *steps, output_dir=tmp_path / "whole")
    assert events[-1]["loss"] < events[0]["loss"]
    shutil.copytree(tmp_path / "whole" / "checkpoint-6", tmp_path / "parted" / "checkpoint-6")
    finetune(*options, *steps, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "parted")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parted"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    finetune(*options, "--num_train_epochs", 1, output_dir=tmp_path / "refused", expect=2)
    assert (
        "give `--max_train_steps`, and neither `--num_train_epochs` nor `--max_train_tokens`"
        in capsys.readouterr().err.splitlines()[-1]
    )
