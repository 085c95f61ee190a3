"""What far keys learn in attention transfer: their share (`far_share`), and the scores of keys that stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import stock_model
from recipes import padded_batch, recipe_of
from reference import kept_keys, repeat_heads
from torch import Tensor

from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.training.losses import objectives as far_share
from hf_linear_attention.training.losses.objectives import (
    OBJECTIVES,
    StudentWithObjectives,
    build_objectives,
    share_divergence,
)


WINDOW, SINKS = 5, 2
HYBRID = {"mechanism": "hybrid", "window_size": WINDOW, "num_sinks": SINKS, "num_features": 8}
ONLY = {f"{name}_weight": 0.0 for name in OBJECTIVES} | {"far_share_weight": 1.0, "attention_transfer_weight": 1.0}


def observed(model: Any, batch: dict[str, Tensor]) -> list[ObservedAttention]:
    seen: list[ObservedAttention] = []
    model.set_attn_implementation("eager")  # which returns the weights of softmax
    with observe_attention(model, seen.append):
        model(**batch)
    return seen


def scores_of(seen: ObservedAttention, row: int, real: Tensor) -> Tensor:
    """The scores `[1, Hkv, N]` of the real keys of a row."""
    assert seen.inputs.gates is not None
    slope, place = seen.module.linear_attention.score_slope.detach()[:, None], torch.arange(1, int(real.sum()) + 1)
    return seen.inputs.gates[row : row + 1, real].detach().transpose(1, 2) + slope * place / 64


def with_scores(model: Any) -> Any:
    """The model with scores that differ from key to key."""
    for name, parameter in model.named_parameters():
        if "score_" in name:
            torch.nn.init.normal_(parameter)
    return model


def oracle(seen: ObservedAttention, mask: Tensor, tolerance: float) -> Tensor:
    """The sum over tokens of the divergence, averaged over heads, from both matrices of weights, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    own = seen.module._attend_with_weights(seen.inputs, None)[1]
    matrices = [weights.double() for weights in (seen.softmax_weights, own)]
    for row, real in enumerate(mask.bool()):
        yours, mine = (matrix[row][:, real][:, :, real] for matrix in matrices)
        place = torch.arange(int(real.sum()))
        far = (place[:, None] - place >= WINDOW) & (place >= SINKS)
        if count := seen.module.linear_attention.num_exact_keys:
            far = far & ~repeat_heads(kept_keys(scores_of(seen, row, real), WINDOW, SINKS, count), len(yours))[0]
        asks = far.any(-1).any(0) if far.dim() == 3 else far.any(-1)  # every head has as many far keys
        t, s = ((matrix * far).sum(-1)[:, asks].logit() for matrix in (yours, mine))
        s = torch.where((s - t).abs() < tolerance, t, s - tolerance * (s - t).sign())
        t, s = t.sigmoid(), s.sigmoid()
        divergence = t * (t / s).log() + (1 - t) * ((1 - t) / (1 - s)).log()
        total = total + divergence.sum() / yours.shape[0]
    return total


@pytest.mark.parametrize(
    ("settings", "lengths", "tolerance"),
    [
        ({}, [4, 30, 9], 0.0),
        ({"decay": "learned", "rope": "partial"}, [40, 17, 23], 0.5),
        ({"feature_map": "hedgehog"}, [23, 23], 0.0),
        ({"num_exact_keys": 3}, [40, 17, 23], 0.0),
    ],
)
def test_the_share_is_that_of_the_weights(settings, lengths, tolerance, monkeypatch):
    monkeypatch.setattr(far_share, "TOLERANCE", tolerance)
    torch.manual_seed(0)
    model = with_scores(convert(stock_model("llama"), **HYBRID, **settings)).eval()
    batch = padded_batch(lengths)
    objective = far_share.FarShare(recipe_of(task="causal_lm"))
    total = 0.0
    for seen in observed(model, batch):
        found = far_share._layer_total(seen, batch["attention_mask"].float())
        total += found.item()
        # Both sum float32 weights of at most 40 keys, in another order.
        expected = oracle(seen, batch["attention_mask"], tolerance)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)
    assert total > 0
    assert objective.units(batch) == sum(lengths)


def test_some_queries_stand_for_all(monkeypatch):
    """With one query of two, the mean over these counts for every token of the row."""
    model = convert(stock_model("llama"), **HYBRID).eval()
    batch = padded_batch([40])
    seen = observed(model, batch)[0]
    weights = batch["attention_mask"].float()
    monkeypatch.setattr(far_share, "MOST_QUERIES", 20)
    found = far_share._layer_total(seen, weights)
    monkeypatch.setattr(far_share, "MOST_QUERIES", 40)
    sample = far_share.SampledQueries.of(seen)
    target = far_share.softmax_log_odds(sample)[:, :, ::2]
    expected = share_divergence(target, seen.far_log_odds[:, :, ::2]).mean() * 40
    torch.testing.assert_close(found, expected)


def test_the_gradient_does_not_vanish():
    """d/ds of the divergence is the difference of the shares, also where one of them is e^-88."""
    odds = torch.tensor([-90.0, -90.0, 90.0, 3.0], requires_grad=True)
    target = torch.tensor([20.0, -90.0, -20.0, float("-inf")])
    divergence = share_divergence(target, odds)
    divergence.sum().backward()
    torch.testing.assert_close(divergence.detach(), torch.tensor([88.0, 0.0, 88.0, 0.0]))
    torch.testing.assert_close(odds.grad, torch.tensor([-1.0, 0.0, 1.0, 0.0]))


def test_layers_of_other_mechanisms_contribute_nothing(monkeypatch):
    model = convert(stock_model("llama"), **HYBRID | {"mechanism": {"0": "linear", "1-": "hybrid"}}).eval()
    batch = padded_batch([40])
    monkeypatch.setattr(far_share, "TOLERANCE", 0.0)
    totals = [far_share._layer_total(seen, batch["attention_mask"].float()) for seen in observed(model, batch)]
    assert totals[0] == 0 < totals[1]
    objectives = build_objectives(recipe_of(task="causal_lm", **ONLY))
    with pytest.raises(UsageError, match=r"`--far_share_weight` needs layers of `hybrid`"):
        StudentWithObjectives(convert(stock_model("llama"), mechanism="linear"), objectives, None)


def score_oracle(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """For each row, the mean cross-entropy of what softmax gives to keys behind the window, times its tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row, real in enumerate(mask.bool()):
        weights = seen.softmax_weights.double()[row][:, real][:, :, real]  # type: ignore[union-attr]
        scores = repeat_heads(scores_of(seen, row, real).double(), len(weights))[0]
        place, terms, mass = torch.arange(int(real.sum())), 0.0, 0.0
        for query in place[WINDOW + SINKS :]:
            behind = slice(SINKS, int(query) - WINDOW + 1)
            terms = terms - (weights[:, query, behind] * scores[:, behind].log_softmax(-1)).sum(-1)
            mass = mass + weights[:, query, behind].sum(-1)
        # Query heads that share keys weigh as they attend to them.
        shared = (x.unflatten(0, (2, -1)).sum(1) if isinstance(x, Tensor) else torch.zeros(2) for x in (terms, mass))
        terms, mass = shared
        total = total + (terms / mass.clamp(min=1e-9)).mean() * real.sum()
    return total


def test_scores_learn_the_softmax_weights_behind_the_window():
    torch.manual_seed(0)
    model = with_scores(convert(stock_model("llama"), **HYBRID, num_exact_keys=3)).eval()
    batch = padded_batch([40, 17, 23])
    for seen in observed(model, batch):
        found = far_share.score_error(seen, batch["attention_mask"].float())
        # float32 logits of a few units
        torch.testing.assert_close(found.double(), score_oracle(seen, batch["attention_mask"]), rtol=1e-4, atol=1e-5)


def test_transfer_trains_the_scores_and_its_value_is_the_error_of_the_outputs():
    model = with_scores(convert(stock_model("llama"), **HYBRID, num_exact_keys=3)).eval()
    batch = padded_batch([40, 33])
    parameters = [p.requires_grad_() for name, p in model.named_parameters() if "score_" in name]
    seen = observed(model, batch)
    objective = far_share.AttentionTransfer(recipe_of(task="causal_lm", attention_transfer_weight=1.0))
    total = objective.total(batch, far_share.StudentOutputs(attention=tuple(seen)), None)
    expected = [far_share.relative_head_error(one, batch["attention_mask"].bool()).mean(1) for one in seen]
    torch.testing.assert_close(total, torch.stack(expected) @ batch["attention_mask"].sum(1).float())
    found = torch.autograd.grad(total.sum(), parameters, retain_graph=True)
    wanted = torch.autograd.grad(
        sum(far_share.score_error(one, batch["attention_mask"].float()) for one in seen), parameters
    )
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0
