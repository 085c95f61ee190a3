"""The figures of conversion quality against loops over windows."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.training.data.batches import pad
from hf_linear_attention.training.data.packing import Documents, FirstExamples, StreamWindows
from hf_linear_attention.training.evaluation.retention import (
    batches_of,
    longest_window,
    most_positions,
    nats_of,
    position_buckets,
    running_text,
    score,
    separate_windows,
    summary,
    target_positions,
    without_far,
)


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
STREAM = np.random.default_rng(0).integers(5, 300, 150)


@pytest.fixture
def teacher(llama_teacher):
    return LlamaForCausalLM.from_pretrained(llama_teacher).eval()


def batches() -> list[dict[str, torch.Tensor]]:
    """Two texts of 60 and 33 tokens; the first 10 of the second are context, not scored."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 300, (length,), generator=generator).numpy() for length in (60, 33)]
    labels = [rows[0].copy(), rows[1].copy()]
    labels[1][:10] = -100
    return [pad([{"input_ids": x, "labels": y, "index": i} for i, (x, y) in enumerate(zip(rows, labels))], 0)]


def nats(model, batch) -> float:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, batch["labels"][:, 1:]).item()


@torch.no_grad()
@pytest.mark.parametrize("feature_map", ["exp", "hedgehog"])
def test_an_untrained_hybrid_is_no_worse_than_its_window_alone(teacher, feature_map):
    """The starting scale of the linear part bounds what it can spoil: no calibration is needed for that."""
    student = convert(teacher, mechanism="hybrid", window_size=8, feature_map=feature_map)
    ids = torch.randint(5, 300, (8, 100), generator=torch.Generator().manual_seed(0))

    def divergence() -> float:
        mine, yours = (model(ids).logits.log_softmax(-1) for model in (student, teacher))
        return F.kl_div(mine, yours, log_target=True, reduction="none").sum(-1).mean().item()

    with without_far(student):
        alone = divergence()
    assert 0 < divergence() < alone


def test_a_language_model_against_its_teacher(teacher):
    settings = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 8}
    student = convert(teacher, **settings)
    with torch.no_grad():
        student.lm_head.weight *= 1.1  # trained: not the weights of the window alone
    figures = summary(score(teacher, student, batches()), student.config.linear_attention)
    (batch,) = batches()
    assert figures["teacher"] == pytest.approx(nats(teacher, batch), rel=1e-5)
    assert figures["student"] == pytest.approx(nats(student, batch), rel=1e-5)
    assert figures["gap"] == pytest.approx(figures["student"] - figures["teacher"])
    with without_far(student):
        assert figures["without_far"] == pytest.approx(nats(student, batch), rel=1e-5)
    assert figures["student"] == pytest.approx(nats(student, batch), rel=1e-5)  # switched on again
    with without_far(convert(teacher, **settings)) as start:
        alone = nats(start, batch)
    assert figures["window_alone"] == pytest.approx(alone, rel=1e-5)
    # a difference of float32 means
    assert figures["gap_closed"] == pytest.approx((alone - figures["student"]) / (alone - figures["teacher"]), rel=1e-3)
    p, q = (m(batch["input_ids"], attention_mask=batch["attention_mask"]).logits for m in (teacher, student))
    scored = F.pad(batch["labels"][:, 1:], (0, 1), value=-100) != -100
    assert figures["agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1))[scored].double().mean().item())
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)[scored].mean()
    assert figures["kl"] == pytest.approx(kl.item(), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("bos", [1, None])
def test_buckets_are_those_of_a_loop_over_windows(llama_teacher, bos):
    teacher = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    student = convert(teacher, mechanism="window", window_size=6)
    models = {"teacher": teacher, "student": student}
    batches = batches_of(separate_windows(STREAM, 40, bos), 40, 0)
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


def test_the_length_is_the_least_of_what_ends_it():
    assert longest_window(512, 100_000, 16_384, None) == (4096, "8 times the trained length")
    assert longest_window(512, 3000, 16_384, None) == (3000, "the text")
    assert longest_window(4096, 100_000, 16_384, None) == (16_384, "`--max_eval_length`")
    assert longest_window(512, 100_000, 16_384, 1024) == (1024, "the last position that the model has")


@pytest.mark.parametrize(
    ("kind", "sizes", "ends"),
    [
        ("llama", {"intermediate_size": 64}, False),
        ("gpt2", {}, True),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 64}, True),
        ("gptj", {"rotary_dim": 8}, True),
        ("bloom", {}, False),
    ],
)
def test_a_table_of_positions_ends_where_it_ends(kind, sizes, ends):
    """Also where other tensors have as many rows: the vocabulary, or a projection."""
    config = AutoConfig.for_model(kind, hidden_size=32, max_position_embeddings=64, **SIZES, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert most_positions(model) == (64 if ends else None)
    if ends:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, 65), 5))


def test_the_text_that_examples_are_cut_from():
    examples = StreamWindows(STREAM, 40, 1)
    assert (running_text(examples) == STREAM).all()
    first = FirstExamples(examples, 2)
    assert (running_text(first) == STREAM[: first.lengths.sum()]).all()
    documents = Documents([STREAM[:10], STREAM[50:53]], "tokens")
    assert (running_text(documents) == np.concatenate([STREAM[:10], STREAM[50:53]])).all()
