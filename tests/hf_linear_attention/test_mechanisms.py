"""Every row of the matrix against its float64 oracle, and the properties that it can be asked for."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from matrix import (
    MAX_STD,
    MECHANISM_ROWS,
    PATHS,
    attend,
    build_mechanism,
    forms,
    padding,
    qkv,
    relative_error,
    rows,
    supports,
)
from oracles import ORACLES, exact

from hf_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms import aft as mechanism_aft
from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms import window as mechanism_window
from hf_linear_attention.mechanisms.registry import MECHANISMS


# Every row in every form it has.
MODES = [(row, is_causal) for is_causal in (True, False) for row in MECHANISM_ROWS if is_causal in forms(row)]
MODES_OF_PATHS = [mode for mode in MODES if mode[0] in PATHS]
# One row of each kind of state, for what takes long.
STATES = ("aft-conv", "linear-exp", "linear-elu1", "linear-gated", "performer", "hybrid", "gated_delta-conv", "window")
# Settings around which lengths are tested: one less, as many and one more.
SIZES = ("window_size", "projection_size", "num_landmarks", "num_latents", "conv_kernel_size")


def test_every_mechanism_and_feature_map_has_a_row_and_an_oracle():
    assert {settings["mechanism"] for settings in MECHANISM_ROWS.values()} == set(MECHANISMS) == set(ORACLES)
    filled = [LinearAttentionSettings(settings, max_length=97) for settings in MECHANISM_ROWS.values()]
    for option, maps in (("feature_map", FEATURE_MAPS), ("features", RANDOM_FEATURES)):
        assert {settings[option] for settings in filled if option in settings} == set(maps)


def problems(row: str, lengths):
    """`(mechanism, [query, key, value], mask)` for every length, in turn with other heads, scales and padding."""
    turns = zip(
        lengths,
        itertools.cycle([(4, 2), (3, 3), (6, 2), (1, 1)]),
        itertools.cycle([1.0, 8.0, 4.0, 0.1, 8.0]),
        itertools.cycle([0.8, 0.3, 1.0]),
    )
    for length, heads, std, share in turns:
        inputs = qkv(length, heads=heads, std=min(std, MAX_STD.get(row, std)), seed=length)
        mechanism = build_mechanism(row, num_heads=heads[0], num_key_value_heads=heads[1])
        yield mechanism, inputs, torch.rand(2, length, generator=torch.Generator().manual_seed(length)) < share


@pytest.mark.parametrize(("row", "is_causal"), MODES)
@torch.no_grad()
def test_outputs_are_those_of_the_oracle_whatever_padding_holds(row, is_causal, backend):
    """One token, a block of the kernels with and without one more, a prime number, and the row's own sizes."""
    sizes = [MECHANISM_ROWS[row][name] for name in SIZES if name in MECHANISM_ROWS[row]]
    lengths = sorted({1, 15, 64, 65, 97}.union(size + more for size in sizes for more in (-1, 0, 1)))
    for mechanism, (query, key, value), mask in problems(row, lengths):
        actual, _ = attend(mechanism, query, key, value, mask, is_causal=is_causal)
        noisy = [x.masked_fill(~mask[:, None, :, None], 1e3) for x in (key, value)]
        other, _ = attend(mechanism, query, *noisy, mask, is_causal=is_causal)
        assert torch.equal(actual[mask], other[mask]), mask.shape
        assert torch.isfinite(other).all()
        assert (actual[~mask.any(dim=1)] == 0).all()
        for one, real in enumerate(mask):
            if real.any():
                place = slice(one, one + 1)
                parts = (x[place] for x in (query, key, value))
                expected = exact(row, mechanism, *parts, mask[place], is_causal)[0][real]
                # float32 rounds an exponent e to e * 6e-8; exponents reach a few hundred at std 8
                assert relative_error(actual[one][real], expected) < 1e-5, mask.shape


@pytest.mark.parametrize(
    "row",
    [
        *("aft-simple", "aft-conv", "linear-exp", "linear-elu1", "performer"),
        *(row for row in rows(bidirectional=True) if row.startswith(("hybrid", "window"))),
    ],
)
@torch.no_grad()
def test_chunks_of_an_encoder_equal_the_oracle(row, monkeypatch):
    monkeypatch.setattr(mechanism_window, "QUERIES_AT_ONCE", 2 * 4 * 8 * 16)  # 16 tokens
    monkeypatch.setattr(mechanism_linear, "FEATURES_IN_CACHE", 1)  # 64 tokens
    monkeypatch.setattr(mechanism_aft, "PART_ELEMENTS", 1)
    mechanism = build_mechanism(row, dtype=torch.float64)
    mechanism.trained_length = 40  # of all inputs but the first, so that their far keys weigh less
    for length, kind in ((17, "none"), (97, "left"), (97, "right"), (150, "interior")):
        inputs, mask = qkv(length, std=2.0, dtype=torch.float64), padding(length, kind)
        actual, _ = attend(mechanism, *inputs, mask, is_causal=False)
        # In float64, what remains is rounding.
        assert relative_error(actual, exact(row, mechanism, *inputs, mask, is_causal=False)) < 1e-12


@pytest.mark.parametrize(("row", "is_causal"), MODES)
def test_gradients_equal_those_of_the_oracle(row, is_causal, monkeypatch):
    """In float64, and in float32 by C and by torch."""
    monkeypatch.setattr(mechanism_linear, "TOKENS_PER_PART", 30)  # of long inputs with gates
    mechanism, std = build_mechanism(row), min(2.0, MAX_STD.get(row, 2.0))
    mask, direction = padding(70), torch.randn(2, 70, 4, 8, dtype=torch.float64)

    def gradients(dtype, compute):
        mechanism.to(dtype)
        inputs = [tensor.requires_grad_() for tensor in qkv(70, std=std, dtype=dtype)]
        leaves = inputs + [p for p in mechanism.parameters() if p.requires_grad]
        return torch.autograd.grad(
            (compute(mechanism, *inputs, mask) * direction.to(dtype)).sum(), leaves, materialize_grads=True
        )

    def ours(*given):
        return attend(*given, is_causal=is_causal)[0]

    expected = gradients(torch.float64, lambda *given: exact(row, *given, is_causal))
    most = max(e.norm() for e in expected)
    for a, e in zip(gradients(torch.float64, ours), expected):
        torch.testing.assert_close(a, e, rtol=1e-8, atol=1e-9)
    for library in (kernels_cpu.library(), None):
        monkeypatch.setattr(kernels_cpu, "library", lambda library=library: library)
        for a, e in zip(gradients(torch.float32, ours), expected):
            # float32 rounds exponents and sums of both signs, most for a number that a whole head shares
            assert (a - e).norm() <= 1e-4 * e.norm() + 1e-5 * most


@pytest.mark.parametrize("row", STATES)
def test_gradcheck_of_inputs_parameters_and_initial_state(row):
    mechanism = build_mechanism(row, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in qkv(13, batch=1, dtype=torch.float64)]
    _, state = attend(mechanism, *qkv(4, batch=1, dtype=torch.float64, seed=1))
    state = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in state)
    parameters = tuple(mechanism.parameters())  # changed in place by gradcheck

    def run(query, key, value, *rest):
        return attend(mechanism, query, key, value, state=rest[: len(state)])[0]

    assert torch.autograd.gradcheck(run, (*inputs, *state, *parameters), fast_mode=True)


@pytest.mark.parametrize("row", rows(state=True))
@torch.no_grad()
def test_any_split_gives_the_same_and_changes_no_earlier_state(row, backend):
    for mechanism, inputs, mask in problems(row, (19, 40, 70)):
        length, state, outputs = mask.shape[1], None, []
        whole, _ = attend(mechanism, *inputs, mask)
        # every token by itself, and then any parts
        cuts = range(1, 19) if length == 19 else sorted(torch.randperm(length - 1)[:8].add(1).tolist())
        for start, stop in itertools.pairwise([0, *cuts, length]):
            before, copies = state, [x.clone() for x in state or ()]
            parts = (x[:, :, start:stop] for x in inputs)
            output, state = attend(mechanism, *parts, mask[:, start:stop], state)
            assert all(torch.equal(a, b) for a, b in zip(before or (), copies))
            assert [x.shape for x in state] == [x.shape for x in before or state]
            outputs.append(output)
        # the same sums in another order of float32
        assert relative_error(torch.cat(outputs, dim=1)[mask], whole[mask]) < 1e-5
        # no tokens change no state
        none, same = attend(mechanism, *(x[:, :, :0] for x in inputs), state=state)
        assert none.shape == (2, 0, *whole.shape[2:])
        assert all(torch.equal(a, b) for a, b in zip(state, same))


@pytest.mark.parametrize("row", [row for row in PATHS if supports(row, "bidirectional")])
def test_padding_of_encoders_may_hold_what_overflowed(row):
    """Kernel attention shares with softmax that 0 times infinity, in a padded key or value, is not 0.

    A row of padding alone has finite gradients, too.
    """
    inputs = qkv(40, std=min(2.0, MAX_STD.get(row, 2.0)))
    mechanism, mask = build_mechanism(row), padding(40, "interior")
    if not supports(row, "causal"):
        noisy = [tensor.masked_fill(~mask[:, None, :, None], torch.nan) for tensor in inputs]
        expected, _ = attend(mechanism, *inputs, mask, is_causal=False)
        if row != "performer-trig":
            assert torch.equal(attend(mechanism, *noisy, mask, is_causal=False)[0][mask], expected[mask])
    mask[0], leaves = False, [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(attend(mechanism, *leaves, mask, is_causal=False)[0].sum(), leaves)
    assert all(grad.isfinite().all() and not grad[0].any() for grad in grads)


@pytest.mark.parametrize("row", rows(cross=True))
@torch.no_grad()
def test_queries_may_come_from_another_sequence(row):
    mechanism, std = build_mechanism(row), min(2.0, MAX_STD.get(row, 2.0))
    for queries, keys in ((1, 23), (40, 1), (15, 65)):
        query, (_, key, value), mask = qkv(queries, std=std)[0], qkv(keys, std=std, seed=1), padding(keys, "interior")
        actual, _ = attend(mechanism, query, key, value, mask, is_causal=False)
        # as above
        assert relative_error(actual, exact(row, mechanism, query, key, value, mask, False)) < 1e-5, (queries, keys)


@pytest.mark.parametrize("row", ["linear-exp", "hybrid", "gated_delta-conv"])
@torch.no_grad()
def test_bfloat16_decoding_stays_with_float32_for_8192_tokens(row):
    """Sums in bfloat16 stand still at 256. The state goes through 572 calls here, of 16 tokens and then of one."""
    inputs = [x.bfloat16() for x in qkv(8192, heads=(2, 1), batch=1)]
    mechanism = build_mechanism(row, num_heads=2, num_key_value_heads=1)
    expected, _ = attend(mechanism, *(x.float() for x in inputs))
    state, outputs = None, []
    for step in (*range(0, 8128, 16), *range(8128, 8192)):
        part = slice(step, step + (16 if step < 8128 else 1))
        output, state = attend(mechanism, *(x[:, :, part] for x in inputs), state=state)
        outputs.append(output)
    # bfloat16 rounds the output itself to 4e-3
    assert relative_error(torch.cat(outputs, dim=1)[:, 4096:], expected[:, 4096:]) < 1e-2


@pytest.mark.parametrize(("row", "is_causal"), MODES_OF_PATHS)
@torch.no_grad()
def test_half_precision_stays_with_float32(row, is_causal):
    for dtype in (torch.bfloat16, torch.float16):
        mechanism = build_mechanism(row).to(dtype)
        inputs, mask = qkv(97, std=min(1.0, MAX_STD.get(row, 1.0)), dtype=dtype), padding(97)
        actual, state = attend(mechanism, *inputs, mask, is_causal=is_causal)
        if is_causal and supports(row, "state"):
            sums = dtype if row.startswith("window") else torch.float32  # which keeps keys, and no sums
            token, following = attend(mechanism, *(x[:, :, :1] for x in inputs), state=state)
            assert (token.dtype, state[0].dtype, following[0].dtype) == (dtype, sums, sums)
        expected, _ = attend(mechanism.float(), *(x.float() for x in inputs), mask, is_causal=is_causal)
        assert actual.dtype == dtype
        # one rounding of the output and, for compressed keys and values, one before it: half a unit in the last place
        assert relative_error(actual, expected) < 1.3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("row", [row for row in PATHS if supports(row, "weights")])
def test_weights_are_those_of_the_output(row):
    is_causal = supports(row, "causal")
    mechanism, (query, key, value), mask = build_mechanism(row), qkv(12), padding(12, "right")
    identity = torch.eye(12).expand(*key.shape[:2], -1, -1)
    weights = attend(mechanism, query, key, identity, mask, is_causal=is_causal)[0].transpose(1, 2)
    output, _ = attend(mechanism, query, key, value, mask, is_causal=is_causal)
    torch.testing.assert_close(weights @ reference.repeat_heads(value, 4), output.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("row", PATHS)
def test_starts_empty_inputs_and_tensors_without_memory(row):
    """A start is the same in every process, nothing comes of nothing, and the meta device has the shapes of others."""
    mechanism, other = build_mechanism(row), build_mechanism(row)
    for is_causal in forms(row):
        for size in ((0, 7), (2, 0), (0, 1)):
            inputs = [x.requires_grad_() for x in qkv(size[1], batch=size[0])]
            output, _ = attend(mechanism, *inputs, torch.ones(size, dtype=torch.bool), is_causal=is_causal)
            assert output.shape == (*size, 4, 8)
            wanted = [*inputs, *(x for x in mechanism.parameters() if x.requires_grad)]
            for x, grad in zip(wanted, torch.autograd.grad(output.sum(), wanted, allow_unused=True)):
                assert grad is None or (grad.shape == x.shape and not grad.any())
        inputs = [x.to("meta") for x in qkv(19)]
        output, state = attend(build_mechanism(row).to("meta"), *inputs, padding(19).to("meta"), is_causal=is_causal)
        assert output.shape == (2, 19, 4, 8)
        if is_causal and supports(row, "state"):
            _, real = attend(mechanism, *qkv(19))
            assert [(x.shape, x.dtype) for x in state] == [(x.shape, x.dtype) for x in real]
    for seed, each in ((123, mechanism), (321, other)):
        torch.manual_seed(seed)
        each.reset_parameters()
    assert all(map(torch.equal, mechanism.state_dict().values(), other.state_dict().values()))
