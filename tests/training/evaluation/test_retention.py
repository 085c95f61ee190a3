"""The figures of conversion quality against independent forms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.training.data.batches import pad
from hf_linear_attention.training.evaluation.retention import compare, without_far


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


def test_an_equal_model_has_no_gap(teacher) -> None:
    figures = compare(teacher, convert(teacher, mechanism="linear", layers="none"), batches())
    assert figures["gap"] == 0
    assert figures["agreement"] == 1
    assert "gap_closed" not in figures
