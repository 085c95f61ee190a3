"""Every row of the matrix against its float64 oracle, and the properties that it can be asked for."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import MAX_STD, MECHANISM_ROWS, build_mechanism, call_mechanism, rows, supports
from oracles import ORACLES

from hf_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms import window as mechanism_window
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS


CAUSAL = rows(causal=True)
# Every row in every form it has.
MODES = [(row, True) for row in CAUSAL] + [(row, False) for row in rows(bidirectional=True)]
# One row of each kind of state, for what takes long.
STATES = ("aft-conv", "linear-exp", "linear-elu1", "performer", "hybrid", "gated_delta-conv")
# Settings around which lengths are tested: one less, as many and one more.
SIZES = ("window_size", "projection_size", "num_landmarks", "num_latents", "conv_kernel_size")
SCALING = 8**-0.5
# The same examples in every run: CI must not fail by chance.
FIXED = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)).item()


def sample(length: int, std: float, dtype=torch.float32, heads=4, kv_heads=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64) * std
    key = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) * std
    value = torch.randn(batch, kv_heads, length, 8, generator=generator, dtype=torch.float64) + 0.5
    return [tensor.to(dtype) for tensor in (query, key, value)]


def run(mechanism, query, key, value, mask=None, is_causal=True, state=None):
    return call_mechanism(
        mechanism, query, key, value, attention_mask=mask, scaling=SCALING, is_causal=is_causal, state=state
    )


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
    return mask


def oracle(row: str, mechanism, query, key, value, mask=None, is_causal=True):
    """In float64, `[B, N, H, D]`."""
    compute = ORACLES[MECHANISM_ROWS[row]["mechanism"]]
    query, key, value = query.double(), key.double(), value.double()
    return compute(mechanism, query, key, value, mask, is_causal, SCALING).transpose(1, 2)


def test_every_mechanism_and_feature_map_has_a_row_and_an_oracle():
    assert {settings["mechanism"] for settings in MECHANISM_ROWS.values()} == set(MECHANISMS) == set(ORACLES)
    filled = [LinearAttentionSettings(settings, max_length=97) for settings in MECHANISM_ROWS.values()]
    for option, maps in (("feature_map", FEATURE_MAPS), ("features", RANDOM_FEATURES)):
        assert {settings[option] for settings in filled if option in settings} == set(maps)


@st.composite
def problems(draw, max_std: float, longest: int):
    """`(arguments of the mechanism, [query, key, value], mask)`: grouped heads, any length, scale and padding."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, std = (
        draw(st.integers(1, longest)),
        draw(st.sampled_from([s for s in (0.1, 1.0, 4.0, 8.0) if s <= max_std])),
    )
    heads = {"num_heads": kv_heads * groups, "num_key_value_heads": kv_heads}
    inputs = sample(length, std, heads=kv_heads * groups, kv_heads=kv_heads, seed=draw(st.integers(0, 2**31)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return heads, inputs, torch.rand(2, length, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_outputs_are_those_of_the_oracle_whatever_padding_holds(row, is_causal, backend):
    @FIXED
    @given(problem=problems(MAX_STD.get(row, 8.0), 40), noise=st.sampled_from([-30.0, 1e3]))
    def check(problem, noise):
        heads, (query, key, value), mask = problem
        mechanism = build_mechanism(row, **heads)
        actual, _ = run(mechanism, query, key, value, mask, is_causal)
        noisy = [x.masked_fill(~mask[:, None, :, None], noise) for x in (key, value)]
        other, _ = run(mechanism, query, *noisy, mask, is_causal)
        assert torch.equal(actual[mask], other[mask])
        assert torch.isfinite(other).all()
        assert (actual[~mask.any(dim=1)] == 0).all()
        for one, real in enumerate(mask):
            if real.any():
                place = slice(one, one + 1)
                parts = (x[place] for x in (query, key, value))
                expected = oracle(row, mechanism, *parts, mask[place], is_causal)[0][real]
                # float32 rounds an exponent e to e * 6e-8; exponents reach a few hundred at std 8
                assert relative_error(actual[one][real], expected) < 1e-5

    check()


@pytest.mark.parametrize(("row", "is_causal"), MODES)
@torch.no_grad()
def test_lengths_around_blocks_and_sizes(row, is_causal):
    """One token, a block of the kernels with and without one more, a prime number, and the row's own sizes."""
    mechanism, std = build_mechanism(row), min(4.0, MAX_STD.get(row, 4.0))
    sizes = [MECHANISM_ROWS[row][name] for name in SIZES if name in MECHANISM_ROWS[row]]
    for length in {1, 15, 64, 65, 97}.union(size + more for size in sizes for more in (-1, 0, 1)):
        inputs, mask = sample(length, std), padding("left", length)
        actual, _ = run(mechanism, *inputs, mask, is_causal)
        assert relative_error(actual, oracle(row, mechanism, *inputs, mask, is_causal)) < 1e-5, length


@pytest.mark.parametrize(
    "row",
    ["linear-exp", "performer", *(row for row in rows(bidirectional=True) if row.startswith(("hybrid", "window")))],
)
@torch.no_grad()
def test_chunks_of_an_encoder_equal_the_oracle(row, monkeypatch):
    monkeypatch.setattr(mechanism_window, "QUERIES_AT_ONCE", 2 * 4 * 8 * 16)  # 16 tokens
    monkeypatch.setattr(mechanism_linear, "FEATURES_IN_CACHE", 1)  # 64 tokens
    mechanism = build_mechanism(row, dtype=torch.float64)
    mechanism.trained_length = 40  # of all inputs but the first, so that their far keys weigh less
    for length, kind in ((17, "none"), (97, "left"), (97, "right"), (150, "interior")):
        inputs, mask = sample(length, 2.0, torch.float64), padding(kind, length)
        actual, _ = run(mechanism, *inputs, mask=mask, is_causal=False)
        # In float64, what remains is rounding.
        assert relative_error(actual, oracle(row, mechanism, *inputs, mask=mask, is_causal=False)) < 1e-12


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_gradients_equal_those_of_the_oracle(row, is_causal, monkeypatch):
    """In float64, and in float32 by C and by torch."""
    mechanism, std = build_mechanism(row), min(2.0, MAX_STD.get(row, 2.0))
    mask, direction = padding("left", 70), torch.randn(2, 70, 4, 8, dtype=torch.float64)

    def gradients(dtype, attend):
        mechanism.to(dtype)
        inputs = [tensor.requires_grad_() for tensor in sample(70, std, dtype)]
        leaves = inputs + [p for p in mechanism.parameters() if p.requires_grad]
        return torch.autograd.grad((attend(mechanism, *inputs) * direction.to(dtype)).sum(), leaves)

    def ours(mechanism, *inputs):
        return run(mechanism, *inputs, mask=mask, is_causal=is_causal)[0]

    expected = gradients(torch.float64, lambda *given: oracle(row, *given, mask, is_causal))
    most = max(e.norm() for e in expected)
    for a, e in zip(gradients(torch.float64, ours), expected):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)
    for library in (kernels_cpu.library(), None):
        monkeypatch.setattr(kernels_cpu, "library", lambda library=library: library)
        for a, e in zip(gradients(torch.float32, ours), expected):
            # float32 rounds exponents and sums of both signs, most for a number that a whole head shares
            assert (a - e).norm() <= 1e-4 * e.norm() + 1e-5 * most


@pytest.mark.parametrize("row", rows(state=True))
def test_gradcheck_of_inputs_parameters_and_initial_state(row):
    mechanism = build_mechanism(row, dtype=torch.float64)
    inputs = [tensor[:1].requires_grad_() for tensor in sample(13, 1.0, torch.float64)]
    _, state = run(mechanism, *[tensor[:1] for tensor in sample(4, 1.0, torch.float64, seed=1)])
    state = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state)
    parameters = tuple(mechanism.parameters())  # changed in place by gradcheck

    def attend(query, key, value, *rest):
        return run(mechanism, query, key, value, state=rest[: len(state)])[0]

    assert torch.autograd.gradcheck(attend, (*inputs, *state, *parameters), fast_mode=True)


@pytest.mark.parametrize("row", rows(state=True))
@torch.no_grad()
def test_any_split_gives_the_same_and_changes_no_earlier_state(row, backend):
    @FIXED
    @given(problem=problems(MAX_STD.get(row, 8.0), 70), data=st.data())
    def check(problem, data):
        heads, inputs, mask = problem
        mechanism, length = build_mechanism(row, **heads), mask.shape[1]
        whole, _ = run(mechanism, *inputs, mask)
        cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=12))) if length > 1 else []
        state, outputs = None, []
        for start, stop in zip([0, *cuts], [*cuts, length]):
            before, copies = state, [x.clone() for x in state or ()]
            parts = (x[:, :, start:stop] for x in inputs)
            output, state = run(mechanism, *parts, mask[:, start:stop], state=state)
            assert all(torch.equal(a, b) for a, b in zip(before or (), copies))
            assert [x.shape for x in state] == [x.shape for x in before or state]
            outputs.append(output)
        # the same sums in another order of float32
        assert relative_error(torch.cat(outputs, dim=1)[mask], whole[mask]) < 1e-5
        # no tokens change no state
        none, same = run(mechanism, *(x[:, :, :0] for x in inputs), state=state)
        assert none.shape == (2, 0, heads["num_heads"], 8)
        assert all(torch.equal(a, b) for a, b in zip(state, same))

    check()


@pytest.mark.parametrize(("row", "is_causal"), [mode for mode in MODES if mode[0] in rows(constants=True)])
def test_constant_values_come_out_unchanged(row, is_causal):
    query, key, value = sample(65, 8.0)
    mask = padding("interior", 65)
    output, _ = run(build_mechanism(row), query, key, torch.ones_like(value), mask=mask, is_causal=is_causal)
    torch.testing.assert_close(output[mask], torch.ones_like(output[mask]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", rows(bidirectional=True))
def test_padding_of_encoders_may_hold_what_overflowed(row):
    """Kernel attention shares with softmax that 0 times infinity, in a padded key or value, is not 0.

    A row of padding alone has finite gradients, too.
    """
    mechanism, inputs, mask = build_mechanism(row), sample(40, min(2.0, MAX_STD.get(row, 2.0))), padding("interior", 40)
    if row not in CAUSAL and row != "performer-trig":
        noisy = [tensor.masked_fill(~mask[:, None, :, None], torch.nan) for tensor in inputs]
        expected, _ = run(mechanism, *inputs, mask=mask, is_causal=False)
        assert torch.equal(run(mechanism, *noisy, mask=mask, is_causal=False)[0][mask], expected[mask])
    mask[0], leaves = False, [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(run(mechanism, *leaves, mask=mask, is_causal=False)[0].sum(), leaves)
    assert all(grad.isfinite().all() and not grad[0].any() for grad in grads)


@pytest.mark.parametrize(("row", "is_causal"), MODES)
@torch.no_grad()
def test_batch_mates_change_nothing(row, is_causal):
    """Not even loud, quiet, padded or empty ones. In float64 nothing hides behind rounding."""
    mechanism, inputs = build_mechanism(row, dtype=torch.float64), sample(40, 2.0, torch.float64, batch=1)
    mates = [torch.cat((x, 20.0 * torch.randn_like(x), torch.zeros_like(x), x.flip(2), x)) for x in inputs]
    mask = torch.ones(5, 40, dtype=torch.bool)
    mask[3, 9:], mask[4] = False, False
    alone, _ = run(mechanism, *inputs, is_causal=is_causal)
    assert relative_error(run(mechanism, *mates, mask=mask, is_causal=is_causal)[0][:1], alone) < 1e-12


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


@pytest.mark.parametrize("row", STATES)
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
    actual, state = run(mechanism, *inputs, mask=mask, is_causal=is_causal)
    if is_causal and supports(row, "state"):
        sums = dtype if row.startswith("window") else torch.float32  # which keeps keys, and no sums
        token, following = run(mechanism, *(x[:, :, :1] for x in inputs), state=state)
        assert (token.dtype, state[0].dtype, following[0].dtype) == (dtype, sums, sums)
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
def test_initialisation_is_the_same_in_every_process(row):
    first, second = build_mechanism(row), build_mechanism(row)
    for seed, mechanism in ((123, first), (321, second)):
        torch.manual_seed(seed)
        mechanism.reset_parameters()
    for a, b in zip(first.state_dict().values(), second.state_dict().values()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_empty_batches_and_sequences_and_tensors_without_memory(row):
    """Nothing comes out of nothing, and tensors on the meta device have the shapes of others."""
    mechanism = build_mechanism(row)
    for is_causal in (causal for other, causal in MODES if other == row):
        for size in ((0, 7), (2, 0), (0, 1)):
            mask = torch.ones(size, dtype=torch.bool)
            inputs = [torch.randn(size[0], heads, size[1], 8, requires_grad=True) for heads in (4, 2, 2)]
            output, _ = run(mechanism, *inputs, mask, is_causal)
            assert output.shape == (*size, 4, 8)
            wanted = [*inputs, *mechanism.parameters()]
            for x, grad in zip(wanted, torch.autograd.grad(output.sum(), wanted, allow_unused=True)):
                assert grad is None or (grad.shape == x.shape and not grad.any())
        mask, inputs = padding("left", 19).to("meta"), [x.to("meta") for x in sample(19, 1.0)]
        output, state = run(build_mechanism(row).to("meta"), *inputs, mask, is_causal)
        assert output.shape == (2, 19, 4, 8)
        if is_causal and supports(row, "state"):
            _, real = run(mechanism, *sample(19, 1.0))
            assert [(x.shape, x.dtype) for x in state] == [(x.shape, x.dtype) for x in real]
