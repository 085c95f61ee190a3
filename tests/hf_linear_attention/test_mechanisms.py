"""Every mechanism against its float64 oracle, and the properties of DESIGN 8 that it can be asked for."""

from __future__ import annotations

import pytest
import torch
from matrix import MAX_STD, MECHANISM_ROWS, build_mechanism, rows
from oracles import ORACLES

from hf_linear_attention import reference
from hf_linear_attention.mechanisms import MECHANISMS


CAUSAL = rows(causal=True)
# Every row in every mode it has.
MODES = [(row, True) for row in CAUSAL] + [(row, False) for row in rows(bidirectional=True)]
LENGTHS = (1, 15, 64, 65, 97)
SCALING = 8**-0.5


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def sample(length: int, std: float, dtype=torch.float32, heads=4, kv_heads=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64) * std
    key = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) * std
    value = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) + 0.5
    return [tensor.to(dtype) for tensor in (query, key, value)]


def run(mechanism, query, key, value, mask=None, is_causal=True, state=None):
    return mechanism(query, key, value, attention_mask=mask, scaling=SCALING, is_causal=is_causal, state=state)


def padding(kind: str, length: int) -> torch.Tensor | None:
    mask = torch.ones(2, length, dtype=torch.bool)
    if kind == "none":
        return None
    if kind == "left":
        mask[0, : length // 3] = False
    elif kind == "right":
        mask[0, length - length // 3 :] = False
    elif kind == "interior":
        mask[0, length // 4 : length // 2] = False
    elif kind == "empty row":
        mask[0] = False
    return mask


def oracle(row: str, mechanism, query, key, value, mask=None, is_causal=True):
    """In float64, `[B, N, H, D]`."""
    compute = ORACLES[MECHANISM_ROWS[row]["mechanism"]]
    query, key, value = query.double(), key.double(), value.double()
    return compute(mechanism, query, key, value, mask, is_causal, SCALING).transpose(1, 2)


def test_every_mechanism_has_a_row_and_an_oracle():
    assert {settings["mechanism"] for settings in MECHANISM_ROWS.values()} == set(MECHANISMS) == set(ORACLES)


@pytest.mark.parametrize(
    ("row", "is_causal", "std"),
    [(*mode, std) for mode in MODES for std in (0.5, 2.0, 8.0) if std <= MAX_STD.get(mode[0], 8.0)],
)
def test_float32_equals_the_float64_oracle(row, is_causal, std):
    for length in LENGTHS:
        for kind in ("none", "left", "interior"):
            mechanism, inputs, mask = build_mechanism(row), sample(length, std), padding(kind, length)
            actual, _ = run(mechanism, *inputs, mask=mask, is_causal=is_causal)
            expected = oracle(row, mechanism, *inputs, mask=mask, is_causal=is_causal)
            # float32 rounds an exponent e to e * 6e-8; exponents reach about 200 at std 8, hence 1e-5 there
            assert relative_error(actual, expected) < 1e-5, (length, kind)


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_gradients_equal_those_of_the_oracle(row, is_causal):
    mechanism, inputs, mask = (
        build_mechanism(row, dtype=torch.float64),
        sample(70, 2.0, torch.float64),
        padding("left", 70),
    )
    inputs = [tensor.requires_grad_() for tensor in inputs]
    leaves = inputs + [p for p in mechanism.parameters() if p.requires_grad]
    direction = torch.randn(2, 70, 4, 8, dtype=torch.float64)
    actual = torch.autograd.grad((run(mechanism, *inputs, mask=mask, is_causal=is_causal)[0] * direction).sum(), leaves)
    expected = oracle(row, mechanism, *inputs, mask=mask, is_causal=is_causal)
    expected = torch.autograd.grad((expected * direction).sum(), leaves)
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("row", CAUSAL)
def test_gradcheck_through_the_initial_state(row):
    mechanism = build_mechanism(row, dtype=torch.float64)
    inputs = [tensor[:1].requires_grad_() for tensor in sample(5, 1.0, torch.float64)]
    _, state = run(mechanism, *[tensor[:1] for tensor in sample(4, 1.0, torch.float64, seed=1)])
    state = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state)
    assert torch.autograd.gradcheck(lambda q, k, v, *s: run(mechanism, q, k, v, state=s)[0], (*inputs, *state))


@pytest.mark.parametrize(
    ("row", "std"),
    [(row, std) for row in rows(state=True) for std in (1.0, 8.0) if std <= MAX_STD.get(row, 8.0)],
)
def test_parallel_equals_chunked_equals_recurrent(row, std):
    mechanism, (query, key, value), mask = build_mechanism(row), sample(67, std), padding("left", 67)
    whole, final = run(mechanism, query, key, value, mask=mask)
    for sizes in ([1] * 67, [33, 34], [66, 1], [1, 64, 2]):
        state, outputs, start = None, [], 0
        for size in sizes:
            part = slice(start, start + size)
            output, state = run(
                mechanism, query[:, :, part], key[:, :, part], value[:, :, part], mask=mask[:, part], state=state
            )
            outputs.append(output)
            start += size
        # the same sums in another order of float32
        assert relative_error(torch.cat(outputs, dim=1), whole) < 1e-5
    assert final[0].dtype == torch.float32


@pytest.mark.parametrize("row", CAUSAL)
def test_a_prefix_does_not_depend_on_what_follows(row):
    mechanism, (query, key, value) = build_mechanism(row), sample(70, 4.0)
    whole, _ = run(mechanism, query, key, value)
    changed_key = key.clone()
    changed_key[:, :, 40:] *= 5.0
    changed, _ = run(mechanism, query, changed_key, value)
    assert relative_error(changed[:, :40], whole[:, :40]) < 1e-5
    for length in (1, 2, 39, 64, 69):
        prefix, _ = run(mechanism, *[tensor[:, :, :length] for tensor in (query, key, value)])
        assert relative_error(prefix, whole[:, :length]) < 1e-5


@pytest.mark.parametrize(("row", "is_causal"), [mode for mode in MODES if mode[0] in rows(constants=True)])
def test_constant_values_come_out_unchanged(row, is_causal):
    for kind in ("none", "left", "interior", "right"):
        query, key, value = sample(65, 8.0)
        mask = padding(kind, 65)
        output, _ = run(build_mechanism(row), query, key, torch.ones_like(value), mask=mask, is_causal=is_causal)
        seen = torch.ones(2, 65, dtype=torch.bool) if mask is None else mask
        torch.testing.assert_close(output[seen], torch.ones_like(output[seen]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_padding_changes_nothing(row):
    """Its place, its content and the other rows of the batch leave real outputs as they were; an empty row gives 0."""
    is_causal = row in CAUSAL
    mechanism, (query, key, value) = build_mechanism(row), sample(40, 2.0)
    for kind in ("left", "right", "interior"):
        mask = padding(kind, 40)
        output, _ = run(mechanism, query, key, value, mask=mask, is_causal=is_causal)
        noisy_key, noisy_value = key.clone(), value.clone()
        noisy_key[:, :, :][~mask[:, None].expand(-1, 2, -1)] = 7.0
        noisy_value[~mask[:, None].expand(-1, 2, -1)] = -50.0
        noisy, _ = run(mechanism, query, noisy_key, noisy_value, mask=mask, is_causal=is_causal)
        assert torch.equal(noisy[mask], output[mask])
        real = [tensor[:1, :, mask[0]] for tensor in (query, key, value)]
        alone, _ = run(mechanism, *real, is_causal=is_causal)
        assert relative_error(output[0][mask[0]], alone[0]) < 2e-6
    empty, _ = run(mechanism, query, key, value, mask=padding("empty row", 40), is_causal=is_causal)
    assert torch.equal(empty[0], torch.zeros_like(empty[0]))
    full, _ = run(mechanism, query[1:], key[1:], value[1:], is_causal=is_causal)
    assert relative_error(empty[1:], full) < 2e-6


@pytest.mark.parametrize("row", rows(state=True))
def test_state_is_not_changed_in_place_and_does_not_grow(row):
    mechanism = build_mechanism(row)
    _, state = run(mechanism, *sample(10, 1.0))
    copies = [tensor.clone() for tensor in state]
    first, later = run(mechanism, *sample(9, 1.0, seed=1), state=state)
    again, _ = run(mechanism, *sample(9, 1.0, seed=1), state=state)
    assert torch.equal(first, again)
    assert all(torch.equal(a, b) for a, b in zip(copies, state))
    assert [tensor.shape for tensor in later] == [tensor.shape for tensor in state]


@pytest.mark.parametrize("row", rows(state=True))
def test_bfloat16_decoding_stays_with_float32_for_8192_tokens(row):
    query, key, value = (tensor[:1].bfloat16() for tensor in sample(8192, 1.0, heads=2, kv_heads=1))
    mechanism = build_mechanism(row, num_heads=2, num_key_value_heads=1)
    expected, _ = run(mechanism, query.float(), key.float(), value.float())
    prompt = [tensor[:, :, :8000] for tensor in (query, key, value)]
    _, state = run(mechanism, *prompt)
    outputs = []
    for step in range(8000, 8192):
        output, state = run(mechanism, *[tensor[:, :, step : step + 1] for tensor in (query, key, value)], state=state)
        outputs.append(output)
    # bfloat16 rounds the output itself to 4e-3
    assert relative_error(torch.cat(outputs, dim=1), expected[:, 8000:]) < 1e-2


@pytest.mark.parametrize("row", rows(weights=True))
def test_weights_are_those_of_the_output(row):
    is_causal = row in CAUSAL
    mechanism, (query, key, value), mask = build_mechanism(row), sample(12, 1.0), padding("right", 12)
    weights = mechanism.attention_weights(query, key, attention_mask=mask, scaling=SCALING, is_causal=is_causal)
    output, _ = run(mechanism, query, key, value, mask=mask, is_causal=is_causal)
    torch.testing.assert_close(weights @ reference.repeat_heads(value, 4), output.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_initialisation_is_the_same_in_every_process_and_survives_saving(row):
    first, second = build_mechanism(row), build_mechanism(row)
    second.load_state_dict(first.state_dict())
    inputs = sample(20, 1.0)
    is_causal = row in CAUSAL
    assert torch.equal(run(first, *inputs, is_causal=is_causal)[0], run(second, *inputs, is_causal=is_causal)[0])
    torch.manual_seed(123)
    first.reset_parameters()
    torch.manual_seed(321)
    second.reset_parameters()
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)
