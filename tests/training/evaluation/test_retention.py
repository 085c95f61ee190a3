"""The figures of conversion quality against loops over windows, and against searches that look everywhere.

Then what models write, against full passes without a cache and against `generate`.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
from hf_linear_attention.training.data.batches import pad
from hf_linear_attention.training.data.packing import Documents, FirstExamples, StreamWindows
from hf_linear_attention.training.evaluation import retention
from hf_linear_attention.training.evaluation.retention import (
    agreement_length,
    batches_of,
    compare,
    continued,
    drawn,
    generation_figures,
    longest_window,
    most_positions,
    nats_of,
    nats_of_samples,
    position_buckets,
    recall_buckets,
    recall_distances,
    repeated_share,
    repeats,
    running_text,
    separate_windows,
    target_positions,
    without_far,
)


SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
STREAM = np.random.default_rng(0).integers(5, 300, 150)
RANDOM = np.random.default_rng(0)
# Few tokens, so that 4-grams come again.
HELD_OUT = RANDOM.integers(3, 6, 300)
TRAINING = [RANDOM.integers(3, 6, length) for length in (700, 3, 0, 900)]


@pytest.fixture
def teacher(llama_teacher: str) -> LlamaForCausalLM:
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
def test_an_untrained_hybrid_is_no_worse_than_its_window_alone(teacher, feature_map: str) -> None:
    """The starting scale of the linear part bounds what it can spoil: no calibration is needed for that."""
    student = convert(teacher, mechanism="hybrid", window_size=8, feature_map=feature_map)
    ids = torch.randint(5, 300, (8, 100), generator=torch.Generator().manual_seed(0))

    def divergence() -> float:
        mine, yours = (model(ids).logits.log_softmax(-1) for model in (student, teacher))
        return F.kl_div(mine, yours, log_target=True, reduction="none").sum(-1).mean().item()

    with without_far(student):
        alone = divergence()
    assert 0 < divergence() < alone


def test_a_language_model_against_its_teacher(teacher) -> None:
    settings = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 8}
    student = convert(teacher, **settings)
    with torch.no_grad():
        student.lm_head.weight *= 1.1  # trained: not the weights of the window alone
    figures = compare(teacher, student, batches())
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
    parts = figures["by_position"]
    assert [(part["from"], part["to"]) for part in parts] == [(0, 16), (16, 32), (32, 59)]
    counts = [int(scored[:, part["from"] : part["to"]].sum()) for part in parts]
    total = sum(count * part["student"] for count, part in zip(counts, parts))
    assert figures["student"] == pytest.approx(total / sum(counts))


@torch.no_grad()
@pytest.mark.parametrize("bos", [1, None])
def test_buckets_are_those_of_a_loop_over_windows(llama_teacher: str, bos: int | None) -> None:
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


def test_full_windows_alone_and_every_token_once() -> None:
    windows = separate_windows(STREAM, 41, 1)
    assert len(windows) == 3
    tokens = np.concatenate([windows[index]["input_ids"][1:] for index in range(3)])
    assert (tokens == STREAM[:120]).all()
    assert all(windows[index]["input_ids"][0] == 1 and windows[index]["labels"][0] == -100 for index in range(3))


def test_the_length_is_the_least_of_what_ends_it() -> None:
    assert longest_window(512, 100_000, 16_384, None) == (4096, "8 times the trained length")
    assert longest_window(512, 3000, 16_384, None) == (3000, "the text")
    assert longest_window(4096, 100_000, 16_384, None) == (16_384, "`--max_eval_length`")
    assert longest_window(512, 100_000, 16_384, 1024) == (1024, "the last position that the model has")


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


def test_distances_are_those_of_a_naive_search() -> None:
    examples = StreamWindows(HELD_OUT, 64, 1)
    found = recall_distances(repeats(examples), TRAINING)
    expected = []
    for index in range(len(examples)):
        ids, labels = (examples[index][name].tolist() for name in ("input_ids", "labels"))
        for end in range(1, len(ids)):
            if labels[end] == -100:
                continue
            gram = ids[max(0, end - 3) : end + 1]
            before = [other for other in range(3, end) if ids[other - 3 : other + 1] == gram]
            count = sum(document[start : start + 4].tolist() == gram for document in TRAINING for start in range(900))
            is_rare_repeat = len(gram) == 4 and before and count <= 20
            expected.append(end - before[-1] if is_rare_repeat else 0)
    assert found.tolist() == expected
    assert len(expected) == len(HELD_OUT)
    assert 20 < sum(distance > 0 for distance in expected) < 250  # some repeats are not rare, some targets none


def test_the_share_of_the_gap_needs_targets_and_a_gap(monkeypatch) -> None:
    distance = torch.tensor([0, 60, 60, 130, 127, 130])
    nats = {
        "teacher": torch.tensor([9.0, 1.0, 1.0, 2.0, 1.0, 2.0]),
        "student": torch.tensor([9.0, 1.5, 2.5, 2.5, 2.0, 2.5]),
        "same_bytes": torch.tensor([9.0, 3.0, 3.0, 2.0, 3.0, 2.0]),
    }
    first, second = recall_buckets(distance, nats, [56, 128, 256], "same_bytes")
    assert (first["targets"], second["targets"]) == (3, 2)
    assert first["student"] == pytest.approx(2.0)
    assert first["closed"] is second["closed"] is None  # few targets
    monkeypatch.setattr(retention, "FEWEST_TARGETS", 2)
    first, second = recall_buckets(distance, nats, [56, 128, 256], "same_bytes")
    assert first["closed"] == pytest.approx(0.5)
    assert second["closed"] is None  # no gap
    (empty,) = recall_buckets(distance, nats, [256, 512], "same_bytes")
    assert empty["targets"] == 0
    assert math.isnan(empty["student"])
    (alone,) = recall_buckets(distance, {"teacher": nats["teacher"]}, [56, 128], "same_bytes")
    assert "closed" not in alone


LONG = np.random.default_rng(0).integers(5, 300, 400)
PROMPTS = torch.from_numpy(np.stack([LONG[:20], LONG[50:70], LONG[90:110]]))


@pytest.fixture
def student(teacher):
    return convert(teacher, mechanism="hybrid", window_size=4, num_sinks=2, num_features=8)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def test_greedy_is_what_generate_writes(teacher, student) -> None:
    for model in (teacher, student):
        model.generation_config.eos_token_id = None
        expected = model.generate(PROMPTS, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(continued(model, PROMPTS, 12, greedy), expected[:, 20:])


@torch.no_grad()
def test_agreement_ends_with_the_first_difference(teacher, student) -> None:
    mine, yours = (continued(model, PROMPTS, 12, greedy).tolist() for model in (student, teacher))
    lengths = []
    for row, other in zip(mine, yours, strict=True):
        same = [a == b for a, b in zip(row, other)]
        lengths.append(same.index(False) if False in same else 12)
    assert agreement_length(teacher, PROMPTS, torch.tensor(mine)) == pytest.approx(sum(lengths) / 3)
    assert agreement_length(teacher, PROMPTS, torch.tensor(yours)) == 12
    changed = torch.tensor(yours)
    changed[:, 5] = (changed[:, 5] + 1) % 300
    assert agreement_length(teacher, PROMPTS, changed) == 5


@torch.no_grad()
def test_draws_follow_softmax_and_are_the_same_for_equal_models(teacher) -> None:
    copy = convert(teacher, mechanism="linear", layers="none")
    samples = continued(teacher, PROMPTS, 10, drawn(0))
    assert torch.equal(continued(copy, PROMPTS, 10, drawn(0)), samples)
    assert not torch.equal(continued(teacher, PROMPTS, 10, drawn(1)), samples)
    logits, draw = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3), drawn(0)
    shares = draw(logits).bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.015, rtol=0)  # 4 standard errors


@torch.no_grad()
def test_nats_of_samples_are_those_of_the_teacher_alone(teacher) -> None:
    samples = continued(teacher, PROMPTS, 10, drawn(0))
    whole = torch.cat((torch.full((3, 1), 1), PROMPTS, samples), dim=1)
    logits = teacher(whole).logits.log_softmax(-1)
    expected = -logits[:, 20:-1].gather(-1, samples.unsqueeze(-1)).mean().item()
    prompts = whole[:, :21]
    assert nats_of_samples(teacher, prompts, samples, 1, 64) == pytest.approx(expected, rel=1e-5)
    # longer than the trained length: by windows of it, so that no position is beyond it
    seen = []
    handle = teacher.model.register_forward_pre_hook(
        lambda _, __, keywords: seen.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    shorter = nats_of_samples(teacher, prompts, samples, 1, 16)
    handle.remove()
    assert max(seen) == 16
    assert shorter != pytest.approx(expected, rel=1e-5)


def test_repeated_grams() -> None:
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0
    # 1234 2341 3412 4123 1234 2341: two of six came before
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4, 1]]) == pytest.approx(2 / 6)
    assert repeated_share([[7] * 8, [1, 2, 3, 4]]) == pytest.approx((4 / 5) / 2)


@torch.no_grad()
def test_lengths_and_an_equal_model(teacher, student) -> None:
    rows = generation_figures(teacher, student, LONG, 1, 32, 10_000)
    assert [(row["length"], row["sampled"]) for row in rows] == [(32, 16), (128, 64)]
    rows = generation_figures(teacher, student, LONG, 1, 32, 60)
    assert [row["length"] for row in rows] == [32, 60]
    equal = convert(teacher, mechanism="linear", layers="none")
    (row,) = generation_figures(teacher, equal, LONG, None, 32, 32)
    assert row["agreement_length"] == row["greedy"] == 16
    assert row["teacher_on_student"] == row["teacher_on_teacher"]
    assert row["repeated_student"] == row["repeated_teacher"]
