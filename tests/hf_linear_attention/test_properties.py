"""Properties over random shapes, masks, splits and scales, for every row of the mechanism matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from matrix import MAX_STD, MECHANISM_ROWS, build_mechanism, rows
from oracles import ORACLES

from hf_linear_attention.mechanisms.base import MechanismInputs


SCALING = 8**-0.5
CAUSAL, BIDIRECTIONAL = rows(causal=True), rows(bidirectional=True)
# The same examples in every run: CI must not fail by chance.
FIXED = settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def problems(draw):
    """`(mechanism arguments, std, query, key, value, mask, form)`: grouped heads, any length, scale and padding."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, std = draw(st.integers(1, 40)), draw(st.sampled_from([0.1, 1.0, 4.0, 8.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query = torch.randn(2, kv_heads * groups, length, 8, generator=generator) * std
    key, value = (torch.randn(2, kv_heads, length, 8, generator=generator) * scale for scale in (std, 1.0))
    mask = torch.rand(2, length, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    form = draw(st.integers(0, 1))
    return {"num_heads": kv_heads * groups, "num_key_value_heads": kv_heads}, std, query, key, value, mask, form


def is_causal_form(row: str, form: int) -> bool:
    """One of the forms that the row has."""
    forms = [value for value, names in ((True, CAUSAL), (False, BIDIRECTIONAL)) if row in names]
    return forms[form % len(forms)]


def relative_error(actual, expected) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("row", MECHANISM_ROWS)
@FIXED
@given(problem=problems())
def test_equal_to_the_oracle(row, problem):
    heads, std, query, key, value, mask, form = problem
    assume(std <= MAX_STD.get(row, 8.0))
    mechanism, is_causal = build_mechanism(row, **heads), is_causal_form(row, form)
    actual, _ = mechanism(MechanismInputs(query, key, value, mask, SCALING, is_causal))
    compute = ORACLES[MECHANISM_ROWS[row]["mechanism"]]
    seen = mask & mask.any(dim=1, keepdim=True)
    expected = torch.zeros(*mask.shape, *actual.shape[2:], dtype=torch.float64)
    for index in range(2):
        if mask[index].any():
            parts = [x[index : index + 1].double() for x in (query, key, value)]
            expected[index] = compute(mechanism, *parts, mask[index : index + 1], is_causal, SCALING).transpose(1, 2)[0]
    # float32 rounds exponents, which reach a few hundred at std 8
    assert relative_error(actual[seen], expected[seen]) < 1e-5


@pytest.mark.parametrize("row", rows(state=True))
@FIXED
@given(problem=problems(), data=st.data())
def test_any_split_gives_the_same(row, problem, data):
    heads, std, query, key, value, mask, _ = problem
    assume(std <= MAX_STD.get(row, 8.0))
    mechanism = build_mechanism(row, **heads)

    def run(start, stop, state):
        parts = (x[:, :, start:stop] for x in (query, key, value))
        return mechanism(MechanismInputs(*parts, mask[:, start:stop], SCALING, is_causal=True), state)

    length = mask.shape[1]
    whole, _ = run(0, length, None)
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    state, outputs = None, []
    for start, stop in zip([0, *cuts], [*cuts, length]):
        output, state = run(start, stop, state)
        outputs.append(output)
    assert relative_error(torch.cat(outputs, dim=1)[mask], whole[mask]) < 1e-5


@pytest.mark.parametrize("row", MECHANISM_ROWS)
@FIXED
@given(problem=problems(), noise=st.sampled_from([-30.0, 0.0, 1e3]))
def test_what_padding_holds_does_not_matter(row, problem, noise):
    heads, std, query, key, value, mask, form = problem
    assume(std <= MAX_STD.get(row, 8.0))
    mechanism, is_causal = build_mechanism(row, **heads), is_causal_form(row, form)
    outputs = []
    for fill in (None, noise):
        hidden = ~mask[:, None, :, None]
        noisy = (key, value) if fill is None else (key.masked_fill(hidden, fill), value.masked_fill(hidden, fill))
        outputs.append(
            mechanism.attend(query, *noisy, attention_mask=mask, scaling=SCALING, is_causal=is_causal, state=None)[0]
        )
    assert torch.equal(outputs[0][mask], outputs[1][mask])
    assert torch.isfinite(outputs[1]).all()
    empty = ~mask.any(dim=1)
    assert (outputs[0][empty] == 0).all()
