"""Every mechanism against its float64 oracle, and the properties of DESIGN 8 that it can be asked for."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import MAX_STD, MECHANISM_ROWS, build_mechanism, rows
from oracles import ORACLES

from hf_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.mechanisms import bidirectional_window
from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS


CAUSAL = rows(causal=True)
# Every row in every mode it has.
MODES = [(row, True) for row in CAUSAL] + [(row, False) for row in rows(bidirectional=True)]
STDS = (0.5, 1.0, 2.0, 4.0, 8.0)
# Settings around which lengths are tested: one less, as many and one more.
SIZES = ("window_size", "projection_size", "num_landmarks", "num_latents", "conv_kernel_size")
SCALING = 8**-0.5


def lengths(row: str) -> list[int]:
    """One token, a block of the kernels with and without one more, a prime number, and the row's own sizes."""
    sizes = [MECHANISM_ROWS[row][name] for name in SIZES if name in MECHANISM_ROWS[row]]
    return sorted({1, 15, 64, 65, 97}.union(size + more for size in sizes for more in (-1, 0, 1)))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def sample(length: int, std: float, dtype=torch.float32, heads=4, kv_heads=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64) * std
    key = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) * std
    value = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) + 0.5
    return [tensor.to(dtype) for tensor in (query, key, value)]


def run(mechanism, query, key, value, mask=None, is_causal=True, state=None):
    return mechanism.attend(query, key, value, attention_mask=mask, scaling=SCALING, is_causal=is_causal, state=state)


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


def test_every_feature_map_has_a_row():
    filled = [LinearAttentionSettings(settings, max_length=97) for settings in MECHANISM_ROWS.values()]
    for option, maps in (("feature_map", FEATURE_MAPS), ("features", RANDOM_FEATURES)):
        assert {settings[option] for settings in filled if option in settings} == set(maps)


@pytest.mark.parametrize(
    ("row", "is_causal", "std"),
    [(*mode, std) for mode in MODES for std in STDS if std <= MAX_STD.get(mode[0], STDS[-1])],
)
@torch.no_grad()
def test_float32_equals_the_float64_oracle(row, is_causal, std):
    mechanism = build_mechanism(row)
    for length in lengths(row):
        for kind in ("none", "left", "interior"):
            inputs, mask = sample(length, std), padding(kind, length)
            actual, _ = run(mechanism, *inputs, mask=mask, is_causal=is_causal)
            expected = oracle(row, mechanism, *inputs, mask=mask, is_causal=is_causal)
            # float32 rounds an exponent e to e * 6e-8; exponents reach about 200 at std 8, hence 1e-5 there
            assert relative_error(actual, expected) < 1e-5, (length, kind)


@pytest.mark.parametrize(
    "row", [row for row in rows(bidirectional=True) if row.startswith(("hybrid", "window", "performer-mix"))]
)
def test_chunks_of_an_encoder_equal_the_oracle(row, monkeypatch):
    monkeypatch.setattr(bidirectional_window, "QUERIES_AT_ONCE", 2 * 4 * 8 * 16)  # 16 tokens
    monkeypatch.setattr(mechanism_linear, "FEATURES_IN_CACHE", 1)  # 64 tokens
    mechanism = build_mechanism(row, dtype=torch.float64)
    mechanism.trained_length = 40  # of all inputs but the first, so that their far keys weigh less
    for length, kind in ((17, "none"), (97, "left"), (97, "right"), (150, "interior")):
        inputs, mask = sample(length, 2.0, torch.float64), padding(kind, length)
        with torch.no_grad():
            actual, _ = run(mechanism, *inputs, mask=mask, is_causal=False)
            # In float64, what remains is rounding.
            assert relative_error(actual, oracle(row, mechanism, *inputs, mask=mask, is_causal=False)) < 1e-12


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


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_gradcheck_of_inputs_parameters_and_initial_state(row, is_causal):
    mechanism, state = build_mechanism(row, dtype=torch.float64), ()
    inputs = [tensor[:1].requires_grad_() for tensor in sample(13, 1.0, torch.float64)]
    if is_causal:
        _, state = run(mechanism, *[tensor[:1] for tensor in sample(4, 1.0, torch.float64, seed=1)])
        state = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state)
    parameters = tuple(mechanism.parameters())  # changed in place by gradcheck

    def attend(query, key, value, *rest):
        return run(mechanism, query, key, value, is_causal=is_causal, state=rest[: len(state)] or None)[0]

    assert torch.autograd.gradcheck(attend, (*inputs, *state, *parameters), fast_mode=True)


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
@torch.no_grad()
def test_a_prefix_does_not_depend_on_what_follows(row):
    mechanism, (query, key, value) = build_mechanism(row), sample(70, 4.0)
    whole, _ = run(mechanism, query, key, value)
    future = torch.where(torch.arange(70) >= 40, 5.0, 1.0)[:, None]
    changed, _ = run(mechanism, query * future, key * future, value * future)
    assert relative_error(changed[:, :40], whole[:, :40]) < 1e-5
    for length in range(1, 70):
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


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_padding_changes_nothing(row, is_causal):
    """Its place and its content leave real outputs as they were; an empty row gives 0."""
    mechanism, inputs = build_mechanism(row), sample(40, 2.0)
    for kind in ("left", "right", "interior"):
        mask = padding(kind, 40)
        output, _ = run(mechanism, *inputs, mask=mask, is_causal=is_causal)
        hidden = ~mask[:, None, :, None]
        noisy = [tensor.masked_fill(hidden, noise) for tensor, noise in zip(inputs, (-9.0, 7.0, -50.0))]
        assert torch.equal(run(mechanism, *noisy, mask=mask, is_causal=is_causal)[0][mask], output[mask])
        real = [tensor[:1, :, mask[0]] for tensor in inputs]
        assert relative_error(output[0][mask[0]], run(mechanism, *real, is_causal=is_causal)[0][0]) < 1e-6
    empty, _ = run(mechanism, *inputs, mask=padding("empty row", 40), is_causal=is_causal)
    assert torch.equal(empty[0], torch.zeros_like(empty[0]))
    full, _ = run(mechanism, *[tensor[1:] for tensor in inputs], is_causal=is_causal)
    assert relative_error(empty[1:], full) < 1e-6


@pytest.mark.parametrize("row", [row for row in rows(causal=False) if row != "performer-trig"])
@pytest.mark.parametrize("noise", [torch.inf, torch.nan])
def test_padding_of_encoders_may_hold_what_overflowed(row, noise):
    """Kernel attention shares with softmax that 0 times infinity, in a padded key or value, is not 0."""
    mechanism, inputs, mask = build_mechanism(row), sample(40, 2.0), padding("interior", 40)
    noisy = [tensor.masked_fill(~mask[:, None, :, None], noise) for tensor in inputs]
    output, _ = run(mechanism, *inputs, mask=mask, is_causal=False)
    assert torch.equal(run(mechanism, *noisy, mask=mask, is_causal=False)[0][mask], output[mask])


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_batch_mates_change_nothing(row, is_causal):
    """Not even loud, quiet, padded or empty ones. A loud one may shrink the blocks of the causal form: other sums."""
    mechanism, inputs = build_mechanism(row), [tensor[:1] for tensor in sample(40, 2.0)]
    mates = [torch.cat((x, 20.0 * torch.randn_like(x), torch.zeros_like(x), x.flip(2), x)) for x in inputs]
    mask = torch.ones(5, 40, dtype=torch.bool)
    mask[3, 9:], mask[4] = False, False
    # In float64 nothing hides behind rounding.
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        mechanism, inputs, mates = mechanism.to(dtype), [x.to(dtype) for x in inputs], [x.to(dtype) for x in mates]
        alone, _ = run(mechanism, *inputs, is_causal=is_causal)
        assert relative_error(run(mechanism, *mates, mask=mask, is_causal=is_causal)[0][:1], alone) < bound


@pytest.mark.parametrize("row", rows(cross=True))
@torch.no_grad()
def test_queries_may_come_from_another_sequence(row):
    mechanism, std = build_mechanism(row), min(2.0, MAX_STD.get(row, 2.0))
    for queries, keys in ((1, 23), (40, 1), (15, 65)):
        query, (_, key, value), mask = sample(queries, std)[0], sample(keys, std, seed=1), padding("interior", keys)
        actual, _ = run(mechanism, query, key, value, mask=mask, is_causal=False)
        expected = oracle(row, mechanism, query, key, value, mask=mask, is_causal=False)
        # as above
        assert relative_error(actual, expected) < 1e-5, (queries, keys)


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
@torch.no_grad()
def test_bfloat16_decoding_stays_with_float32_for_8192_tokens(row):
    """Sums in bfloat16 stand still at 256. The state goes through 572 calls here, of 16 tokens and then of one."""
    query, key, value = (tensor[:1].bfloat16() for tensor in sample(8192, 1.0, heads=2, kv_heads=1))
    mechanism = build_mechanism(row, num_heads=2, num_key_value_heads=1)
    expected, _ = run(mechanism, query.float(), key.float(), value.float())
    state, outputs = None, []
    for step in (*range(0, 8128, 16), *range(8128, 8192)):
        part = slice(step, step + (16 if step < 8128 else 1))
        output, state = run(mechanism, *[tensor[:, :, part] for tensor in (query, key, value)], state=state)
        outputs.append(output)
    # bfloat16 rounds the output itself to 4e-3
    assert relative_error(torch.cat(outputs, dim=1)[:, 4096:], expected[:, 4096:]) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("row", "is_causal"), MODES)
@torch.no_grad()
def test_half_precision_stays_with_float32(row, is_causal, dtype):
    mechanism = build_mechanism(row).to(dtype)
    inputs, mask = [tensor.to(dtype) for tensor in sample(97, min(1.0, MAX_STD.get(row, 1.0)))], padding("left", 97)
    actual, _ = run(mechanism, *inputs, mask=mask, is_causal=is_causal)
    expected, _ = run(mechanism.float(), *[tensor.float() for tensor in inputs], mask=mask, is_causal=is_causal)
    assert actual.dtype == dtype
    # one rounding of the output and, for compressed keys and values, one before it: half a unit in the last place each
    assert relative_error(actual, expected) < 1.3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("row", rows(weights=True))
def test_weights_are_those_of_the_output(row):
    is_causal = row in CAUSAL
    mechanism, (query, key, value), mask = build_mechanism(row), sample(12, 1.0), padding("right", 12)
    weights = mechanism.attention_weights(MechanismInputs(query, key, value, mask, SCALING, is_causal))
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
