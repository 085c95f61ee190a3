"""Attention transfer to E and F of `linformer`: the objective and its gradients against the formula in float64."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import stock_model
from recipes import padded_batch, recipe_of
from torch import Tensor

from hf_linear_attention import convert
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.training.losses.combined_loss import OBJECTIVES, StudentWithObjectives, build_objectives
from hf_linear_attention.training.losses.objectives import relative_head_error


SLOTS = 7
# One token, fewer than slots, as many, one more, odd and prime lengths, and the longest input of the model.
LENGTHS = [1, 4, 7, 8, 23, 37, 64]
NAMES = ("key_projection", "value_projection")


def student(**settings: object):
    model = convert(stock_model("bert"), mechanism="linformer", projection_size=SLOTS, **settings).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_projection" in name:
                parameter += 0.01 * torch.randn_like(parameter)  # more would empty every slot of a row of one token
    return model


def matrix(kind: str, parameter: Tensor, length: int) -> tuple[Tensor, dict[str, object]]:
    """E or F `[heads, slots, length]` of one row, and what the oracle rescales it by."""
    if kind == "stretched":
        return reference.stretched(parameter, length), {}
    return parameter[..., :length], {"max_length": parameter.shape[-1], "full": parameter.abs().sum(-1)}


def oracle(kind: str, seen: ObservedAttention, leaves: list[Tensor], mask: Tensor) -> Tensor:
    """The mean over heads of the relative squared error, summed over the tokens of the batch, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, real in enumerate(mask.bool()):
        query, key, value = (x[row : row + 1, :, real].double() for x in seen.inputs[:3])
        (compress, rescale), (gather, other) = (matrix(kind, leaf, int(real.sum())) for leaf in leaves)
        if rescale:
            rescale = {**rescale, "full": [rescale["full"], other["full"]]}
        output = reference.linformer(query, key, value, compress, gather, seen.inputs.scaling, **rescale)
        target = seen.softmax_output[row : row + 1, real].double().transpose(1, 2)
        error = (output - target).square().sum((2, 3)) / target.square().sum((2, 3))
        total = total + error.mean() * real.sum()
    return total


@pytest.mark.parametrize(
    ("kind", "sharing"), [("learned", "none"), ("stretched", "headwise"), ("learned", "key-value")]
)
def test_gradients_of_e_and_f_are_those_of_the_formula(kind: str, sharing: str) -> None:
    model = student(projection=kind, projection_sharing=sharing)
    batch = padded_batch(LENGTHS)
    weights = {f"{name}_weight": float(name == "attention_transfer") for name in OBJECTIVES}
    module = StudentWithObjectives(model, build_objectives(recipe_of("masked_lm", **weights)), None)
    loss, _ = module(batch, None, {"attention_transfer": torch.tensor(1.0)})
    loss.backward()
    seen: list[ObservedAttention] = []
    with observe_attention(model, seen.append), torch.no_grad():
        model(**batch)
    losses = []
    for call in seen:
        mechanism = call.module.linear_attention
        parameters = [parameter for name in NAMES if (parameter := getattr(mechanism, name)) is not None]
        leaves = [parameter.detach().double().requires_grad_() for parameter in parameters]
        losses.append(oracle(kind, call, leaves * (3 - len(leaves)), batch["attention_mask"]) / len(seen))
        for parameter, expected in zip(parameters, torch.autograd.grad(losses[-1], leaves)):
            assert expected.abs().max() > 1e-4
            # float32 sums over up to 64 tokens, divided by outputs that may be small
            torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max())
    torch.testing.assert_close(loss.double(), torch.stack(losses).sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("length", [1, 7])
def test_rows_that_fit_in_the_slots_have_no_error_and_teach_nothing(length: int) -> None:
    """`stretched` is exact there; the means of `learned` are not, because its segments are those of the full length."""
    errors = {}
    for kind in ("learned", "stretched"):
        model, seen = student(projection=kind), []
        with observe_attention(model, seen.append):
            model(**padded_batch([length]))
        errors[kind] = torch.stack([relative_head_error(call, torch.ones(1, length).bool()) for call in seen])
    assert errors["stretched"].max() < 1e-10  # squares of float32 roundings
    if length > 1:
        assert errors["learned"].mean() > 1e-3
    (gradient,) = torch.autograd.grad(errors["stretched"].sum(), seen[0].module.linear_attention.key_projection)
    assert not gradient.any()
