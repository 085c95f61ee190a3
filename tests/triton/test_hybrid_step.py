"""One decoding step of `hybrid` by Triton against the mechanism in float64, in place and not."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import EXACT, ROTARY, TOLERANCE, mechanisms, on_cuda, relative, tokens, widened

from hf_linear_attention.kernels import triton_scores


assert triton_interpreter
BLOCKS, ROWS, UNUSED = 5, (3, 1), 77


# Among them, heads of 64, 80, 96, 128 and 256 columns, alone and in groups.
CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {"heads": (4, 2), "dim": 64}),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 12}, {"is_interleaved": True}),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 12}, {"pairs": 5, "dim": 24}),
    "without positions": (EXACT | {"trained_length": None}, {"heads": (3, 1), "dim": 96, "pairs": 0}),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY, {}),
    "without sinks": (EXACT | ROTARY | {"num_sinks": 0, "trained_length": 12}, {"heads": (2, 2), "dim": 128}),
    "many splits": ({**EXACT, "window_size": 70, "num_exact_keys": 150} | ROTARY | {"trained_length": 100}, {}),
    "80 columns": (EXACT | ROTARY, {"heads": (4, 2), "dim": 80}),
    "256 columns": (EXACT | ROTARY | {"trained_length": 12}, {"dim": 256}),
}
HALVES = ("beyond the trained length", "many splits")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, x) for name in CASES for x in TOLERANCE if x == torch.float32 or name in HALVES]
)
def test_a_step_is_that_of_the_mechanism(name, dtype, monkeypatch):
    """In place by rows, from states with empty places, with sinks in the window, and where keys are displaced."""
    settings, shape = CASES[name]
    mechanism, wide = mechanisms(settings, dtype, **shape)
    sizes = {key: shape[key] for key in ("heads", "dim") if key in shape}
    for length in (230,) if name == "many splits" else (2, 14):
        state = mechanism(tokens(mechanism, 0, length, dtype, **sizes))[1]
        rows = torch.tensor(ROWS)
        blocks = tuple(torch.full((BLOCKS, *x.shape[1:]), UNUSED, dtype=x.dtype) for x in state)
        for block, x in zip(blocks, state):
            block[rows] = x
        one = tokens(mechanism, length, length + 1, dtype, **sizes)
        expected = wide(type(one)(*widened(one)), tuple(widened(state)))[0]
        expected_state = mechanism(one, state)[1]
        with monkeypatch.context() as patched:
            ran = on_cuda(patched)
            output = mechanism.step_in_rows(one, blocks, rows)
        assert ran == ["triton_step"]
        assert relative(output, expected) < TOLERANCE[dtype]
        for block, x in zip(blocks, expected_state):
            if x.dtype == torch.float32 and block is blocks[0]:  # sums of exponents, in another order
                torch.testing.assert_close(block[rows], x, rtol=3e-5, atol=1e-5)
            else:
                torch.testing.assert_close(block[rows], x, rtol=0, atol=0)
            assert (block[[0, 2, 4]] == UNUSED).all()


@torch.no_grad()
def test_numbers_of_blocks_may_have_a_stride(monkeypatch):
    mechanism, _ = mechanisms(CASES["beyond the trained length"][0], torch.float32)
    state = mechanism(tokens(mechanism, 0, 14, torch.float32))[1]
    rows = torch.tensor([3, 2, 1, 4])[::2]
    blocks = tuple(torch.full((BLOCKS, *x.shape[1:]), UNUSED, dtype=x.dtype).index_copy(0, rows, x) for x in state)
    one = tokens(mechanism, 14, 15, torch.float32)
    expected = mechanism(one, state)[0]
    ran = on_cuda(monkeypatch)
    assert relative(mechanism.step_in_rows(one, blocks, rows), expected) < TOLERANCE[torch.float32]
    assert ran == ["triton_step"]
    assert all((x[2] == UNUSED).all() for x in blocks)


@torch.no_grad()
def test_positions_of_all_sequences_may_be_one_number(monkeypatch):
    """As models pass them: int64, and one row for the whole batch; the state's are int32."""
    mechanism, _ = mechanisms(CASES["beyond the trained length"][0], torch.float32)
    old = mechanism(tokens(mechanism, 0, 14, torch.float32))[1]
    one = tokens(mechanism, 14, 15, torch.float32)._replace(positions=torch.tensor([[14]]).expand(2, -1))
    expected, expected_state = mechanism(one, old)
    ran = on_cuda(monkeypatch)
    output, state = mechanism(one, old)
    assert ran == ["triton_step"]
    for actual, x in zip((output, *state), (expected, *expected_state)):
        torch.testing.assert_close(actual, x, rtol=3e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
def test_scores_are_those_of_the_mechanism_and_of_each_token_alone(dtypes, monkeypatch):
    mechanism, _ = mechanisms(EXACT, torch.float32, heads=(6, 3))
    mechanism.score_projection = torch.nn.Parameter(torch.randn(3, 300).to(dtypes[1]), requires_grad=False)
    hidden = torch.randn(2, 21, 600).to(dtypes[0])[:, :, ::2]
    weight = mechanism.score_projection.double()
    expected = hidden.double() @ weight.T / 300**0.5
    calls = []
    run = triton_scores.run
    monkeypatch.setattr(triton_scores, "run", lambda *given: calls.append(1) or run(*given))
    on_cuda(monkeypatch)
    found = mechanism.gates(hidden)
    assert found.dtype == torch.float32
    assert relative(found, expected) < 1e-6
    assert torch.equal(mechanism.gates(hidden[:1, 13:14]), found[:1, 13:14])
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["beyond the trained length", "without exact keys"])
def test_without_in_place_the_old_state_stays(name, monkeypatch):
    settings, shape = CASES[name]
    mechanism, _ = mechanisms(settings, torch.float32, **shape)
    old = mechanism(tokens(mechanism, 0, 14, torch.float32))[1]
    one, before = tokens(mechanism, 14, 15, torch.float32), tuple(x.clone() for x in old)
    expected, expected_state = mechanism(one, old)
    ran = on_cuda(monkeypatch)
    output, state = mechanism(one, old)
    assert ran == ["triton_step"]
    assert all(torch.equal(x, y) for x, y in zip(old, before))
    for actual, x in zip((output, *state), (expected, *expected_state)):
        torch.testing.assert_close(actual, x, rtol=3e-5, atol=1e-5)
