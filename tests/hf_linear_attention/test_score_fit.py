"""The scores of exact keys that are fitted without gradients (`score_fit.py`), against least squares in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import stock_model
from recipes import padded_batch
from torch import Tensor

from hf_linear_attention import calibrate, convert, score_fit
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


WINDOW, SINKS = 5, 2
HYBRID = {"mechanism": "hybrid", "window_size": WINDOW, "num_sinks": SINKS, "num_features": 8, "num_exact_keys": 3}


def model_and_observed(batch: dict[str, Tensor]) -> tuple[Any, list[ObservedAttention], list[Tensor]]:
    """A converted model, its softmax attention, and the inputs of its attention layers."""
    torch.manual_seed(0)
    model, seen, hidden = convert(stock_model("llama"), **HYBRID).eval(), [], []
    model.set_attn_implementation("eager")  # which returns the weights of softmax

    def note(module: Any, arguments: Any, keywords: dict[str, Tensor]) -> None:
        hidden.append(keywords["hidden_states"])

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in linear_attention_modules(model).values()]
    with observe_attention(model, seen.append), torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return model, seen, hidden


def test_it_is_the_ridge_regression_of_how_far_outputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_fit, "LOGITS", 1)  # several blocks of queries
    batch = padded_batch([40, 17, 33])
    model, seen, hidden = model_and_observed(batch)
    solved, explained = score_fit.ScoreMoments.solved, list[Tensor]()

    def noted(moments: score_fit.ScoreMoments) -> Any:
        result = solved(moments)
        explained.append(result[-1])
        return result

    monkeypatch.setattr(score_fit.ScoreMoments, "solved", noted)
    assert calibrate(model, [batch]) == 40 + 17 + 33
    length = batch["input_ids"].shape[1]
    ages = torch.linspace(WINDOW, length * score_fit.LONGEST, score_fit.AGES).long().tolist()
    for layer, (one, states) in enumerate(zip(seen, hidden, strict=True)):
        features, targets = [], []
        for row, mask in enumerate(batch["attention_mask"].bool()):
            assert one.softmax_weights is not None
            weights = one.softmax_weights.double()[row][:, mask][:, :, mask].unflatten(0, (2, -1))
            value, number = one.inputs.value.double()[row][:, mask], int(mask.sum())
            distance = (value - value.mean(1, keepdim=True)).norm(dim=-1)
            distance = distance / distance.log().mean(1, keepdim=True).exp()
            for key in range(SINKS, number):
                for age in ages:
                    if number - key - age >= length // 4:
                        largest = weights[:, :, key + age :, key].amax((1, 2)).log().clamp(min=score_fit.SMALLEST)
                        odds = largest - (1 - largest.exp()).clamp(min=score_fit.REST).log()
                        state = states[row, mask][key].double() / states.shape[-1] ** 0.5
                        features.append(torch.cat((state, torch.tensor([age / 64, 1.0], dtype=torch.float64))))
                        moved = odds + distance[:, key].log()
                        targets.append(moved + score_fit.EMPHASIS * (moved - score_fit.LARGE).clamp(min=0))
        x, y = torch.stack(features), torch.stack(targets)
        damping = score_fit.RIDGE * x[:, :-2].var(0, correction=0).mean()
        rows = torch.cat((x / len(x) ** 0.5, torch.eye(x.shape[1])[:-2].double() * damping**0.5))
        wanted = torch.linalg.lstsq(rows, torch.cat((y / len(y) ** 0.5, y.new_zeros(len(rows) - len(y), 2)))).solution
        mechanism = model.model.layers[layer].self_attn.linear_attention
        # float32 logits and products; the damped system has a condition of some thousands
        torch.testing.assert_close(mechanism.score_projection.double(), wanted[:-2].T, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(mechanism.score_slope.double(), -wanted[-2], rtol=1e-2, atol=1e-2)
        share = 1 - (y - x @ wanted).square().mean(0) / y.var(0, correction=0)
        torch.testing.assert_close(explained[layer], share, rtol=1e-3, atol=1e-3)
        assert (share > 0.3).all()


def test_without_a_far_key_scores_stay_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = convert(stock_model("llama"), **HYBRID)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibrate(model, [padded_batch([WINDOW, 3])])
    assert "longer than the window" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_packed_documents_do_not_see_each_other() -> None:
    alone = padded_batch([24, 24])
    model, seen, _ = model_and_observed(alone)
    ids = alone["input_ids"].reshape(1, -1)
    places = torch.arange(24).repeat(2)[None]
    packed: list[ObservedAttention] = []
    with observe_attention(model, packed.append), torch.no_grad():
        model(input_ids=ids, position_ids=places, use_cache=False)
    ages = torch.tensor([5, 9])
    for together, apart in zip(packed, seen, strict=True):
        found, _ = score_fit.log_largest_weights(together.inputs, ages, SINKS)
        wanted, _ = score_fit.log_largest_weights(apart.inputs, ages, SINKS)
        torch.testing.assert_close(found.unflatten(2, (2, 24))[0].transpose(0, 1), wanted, rtol=1e-4, atol=1e-4)
