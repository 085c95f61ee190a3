"""Nats by position against a loop over windows, and where the windows end."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)

from hf_linear_attention import convert
from hf_linear_attention.training.data.packing import Documents, FirstExamples, StreamWindows
from hf_linear_attention.training.evaluation.position_figures import (
    SeparateWindows,
    batches_of,
    bucket_edges,
    longest_window,
    most_positions,
    position_buckets,
    running_text,
    target_positions,
)
from hf_linear_attention.training.evaluation.retention import nats_of


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
STREAM = np.random.default_rng(0).integers(5, 300, 150)


@torch.no_grad()
@pytest.mark.parametrize("bos", [1, None])
def test_buckets_are_those_of_a_loop_over_windows(llama_teacher: str, bos: int | None) -> None:
    teacher = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    student = convert(teacher, mechanism="window", window_size=6)
    models = {"teacher": teacher, "student": student}
    batches = batches_of(SeparateWindows(STREAM, 40, bos), 40, 0)
    nats = {name: nats_of(model, batches) for name, model in models.items()}
    edges = [0, 4, 16, 40]
    found = position_buckets(target_positions(batches), nats, edges, [("student", "teacher"), ("student", "absent")])

    expected: list[tuple[int, dict[str, float]]] = []  # position of every target, and its nats by model
    body = 39 if bos == 1 else 40
    for start in range(0, 150 - body + 1, body):
        ids = torch.tensor([([] if bos is None else [bos]) + STREAM[start : start + body].tolist()])
        logits = {name: model(ids).logits[0].log_softmax(-1) for name, model in models.items()}
        for place in range(39):
            expected.append((place, {name: -logits[name][place, ids[0, place + 1]].item() for name in models}))
    assert len(expected) == 3 * 39
    for bucket, first, end in zip(found, edges[:-1], edges[1:], strict=True):
        part = [values for place, values in expected if first <= place < end]
        assert (bucket["from"], bucket["to"], bucket["targets"]) == (first, end, len(part))
        for name in models:
            assert bucket[name] == pytest.approx(statistics.mean(values[name] for values in part), rel=1e-5)
        differences = [values["student"] - values["teacher"] for values in part]
        pair = bucket["student_minus_teacher"]
        assert pair["mean"] == pytest.approx(statistics.mean(differences), abs=1e-5)
        error = statistics.stdev(differences) / math.sqrt(len(part))
        assert pair["standard_error"] == pytest.approx(error, rel=1e-4, abs=1e-6)
        assert "student_minus_absent" not in bucket


def test_full_windows_alone_and_every_token_once() -> None:
    windows = SeparateWindows(STREAM, 41, 1)
    assert len(windows) == 3
    assert windows.lengths.tolist() == [40, 40, 40]
    tokens = np.concatenate([windows[index]["input_ids"][1:] for index in range(3)])
    assert (tokens == STREAM[:120]).all()
    assert all(windows[index]["input_ids"][0] == 1 and windows[index]["labels"][0] == -100 for index in range(3))


def test_the_length_is_the_least_of_what_ends_it() -> None:
    assert longest_window(512, 100_000, 16_384, None) == (4096, "8 times the trained length")
    assert longest_window(512, 3000, 16_384, None) == (3000, "the text")
    assert longest_window(4096, 100_000, 16_384, None) == (16_384, "`--max_eval_length`")
    assert longest_window(512, 100_000, 16_384, 1024) == (1024, "the last position that the model has")


def test_edges_are_powers_of_two_times_the_trained_length() -> None:
    assert bucket_edges(512, 4096) == [0, 64, 128, 256, 512, 1024, 2048, 4096]
    assert bucket_edges(100, 350) == [0, 12, 25, 50, 100, 200, 350]
    assert bucket_edges(512, 100) == [0, 64, 100]


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (LlamaConfig(hidden_size=32, intermediate_size=64, max_position_embeddings=64, **SIZES), False),
        (GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=64), True),
        (OPTConfig(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, max_position_embeddings=64, **SIZES), True),
        (GPTJConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=8, n_positions=64, vocab_size=100), True),
        (BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64), False),
    ],
)
def test_a_table_of_positions_ends_where_it_ends(config, ends: bool) -> None:
    """Also where other tensors have as many rows: the vocabulary, or a projection."""
    model = AutoModelForCausalLM.from_config(config).eval()
    assert most_positions(model) == (64 if ends else None)
    if ends:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, 65), 5))


def test_the_text_that_examples_are_cut_from() -> None:
    examples = StreamWindows(STREAM, 40, 1)
    assert (running_text(examples) == STREAM).all()
    first = FirstExamples(examples, 2)
    assert (running_text(first) == STREAM[: first.lengths.sum()]).all()
    documents = Documents([STREAM[:10], STREAM[50:53]], "tokens")
    assert (running_text(documents) == np.concatenate([STREAM[:10], STREAM[50:53]])).all()


def test_one_target_has_no_standard_error() -> None:
    nats = {"student": torch.tensor([1.0, 2.0]), "teacher": torch.tensor([0.5, 1.0])}
    first, second = position_buckets(torch.tensor([0, 9]), nats, [0, 5, 10], [("student", "teacher")])
    assert first["student_minus_teacher"]["mean"] == 0.5
    assert math.isnan(first["student_minus_teacher"]["standard_error"])
    assert second["student"] == 2.0
