"""Recall by a copy: its rows, its figure against float64, and no side effects."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from runs import changed
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_linear_attention.training.data.packing import Documents, FirstExamples, StreamWindows
from hf_linear_attention.training.evaluation import recall
from hf_linear_attention.training.evaluation.recall import RecallProbe, recall_rows


STREAM = np.random.default_rng(0).integers(5, 300, 400)


def test_rows_differ_in_the_copy_alone():
    with_copy, without, copied = recall_rows(STREAM, 33, 3, bos_token_id=1)
    assert (with_copy.shape, without.shape, copied) == ((3, 33), (3, 33), 8)
    windows = STREAM[: 12 * 32].reshape(12, 32)
    for row, place in enumerate((0, 4, 8)):
        assert with_copy[row].tolist() == [1, *windows[place, -8:], *windows[place, 8:]]
        assert without[row].tolist() == [1, *windows[place + 1, -8:], *windows[place, 8:]]
    assert len(recall_rows(STREAM, 400, 3, None)[0]) == 0  # there is no second text
    assert len(recall_rows(STREAM, 15, 3, None)[0]) == 0  # of which nothing could be copied


def test_it_is_that_of_a_plain_computation_in_float64(llama_teacher):
    """Tolerance: float32 logits of two layers."""
    model = LlamaForCausalLM.from_pretrained(llama_teacher).train()
    probe = RecallProbe(Documents([STREAM]), 32, positions=64, bos_token_id=1)
    state = torch.get_rng_state()
    found = probe(model, nullcontext)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    model = model.double().eval()

    def nats(rows: torch.Tensor, copied: int) -> float:
        chances = torch.softmax(model(rows).logits, -1)
        places = range(rows.shape[1] - copied + 1, rows.shape[1])
        every = [-chances[row, place - 1, rows[row, place]].log() for row in range(len(rows)) for place in places]
        return torch.stack(every).mean().item()

    for name, length in (("eval_recall", 32), ("eval_recall_x2", 64)):
        with_copy, without, copied = recall_rows(STREAM, length, 8, bos_token_id=1)
        assert len(with_copy) >= 6
        assert found.pop(name) == pytest.approx(1 - nats(with_copy, copied) / nats(without, copied), abs=1e-6)
    assert not found


@pytest.mark.parametrize(("most_tokens", "rows"), [(None, [8, 6]), (1024, [8, 4]), (500, [3, 1]), (255, [1]), (1, [1])])
def test_it_reads_no_more_tokens_than_it_may(most_tokens, rows):
    """Each row is read twice; one at the training length is always read."""
    probe = RecallProbe(Documents([STREAM]), 32, 64, 1, most_tokens)
    assert [len(with_copy) for with_copy, *_ in probe.rows.values()] == rows
    (found,) = RecallProbe(Documents([STREAM]), 32, 32, 1, most_tokens).rows.values()
    assert len(found[0]) == (8 if most_tokens is None else min(8, max(1, most_tokens // 64)))


def test_windows_that_overlap_are_one_text(monkeypatch):
    """`--max_eval_tokens` and the probe both take the first of the held-out windows."""
    monkeypatch.setattr(recall, "MOST_ROWS", 2)
    windows = FirstExamples(FirstExamples(StreamWindows(STREAM, 32, 1), 20), 18)
    (found,) = RecallProbe(windows, 32, positions=32, bos_token_id=1).rows.values()
    assert found[0][0, 9:].tolist() == STREAM[8:31].tolist()
    assert found[0][1, 9:].tolist() == STREAM[8 + 31 * 2 : 31 * 3].tolist()


def test_training_is_not_disturbed(finetune, llama_teacher, files, tmp_path, monkeypatch):
    """With dropout, so that a number drawn by the probe would show; there is no held-out text."""
    model = AutoModelForCausalLM.from_pretrained(llama_teacher)
    model.config.attention_dropout = 0.2
    model.save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(tmp_path / "source")
    words = ["--model_name_or_path", tmp_path / "source", "--task", "causal_lm"]
    words += ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_steps", 2]
    events = finetune(*words, output_dir=tmp_path / "with")
    assert [event["step"] for event in events if {"eval_recall", "eval_recall_x2"} <= event.keys()] == [0, 2]
    monkeypatch.setattr(recall, "MOST_ROWS", 0)
    assert not any("eval_recall" in e for e in finetune(*words, output_dir=tmp_path / "without"))
    assert not changed(tmp_path / "with", tmp_path / "without")
    assert changed(tmp_path / "source", tmp_path / "with")
