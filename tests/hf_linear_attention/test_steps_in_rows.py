"""A step on rows of a cache: the states of many sequences are blocks of larger tensors, and change where they are."""

from __future__ import annotations

import pytest
import torch
from matrix import KINDS, SCALING, build_mechanism, hidden_states_of, mechanism_of, move, qkv, rows
from operators import OPERATORS

from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.mechanisms.base import MechanismInputs, Rotary


LENGTH, BLOCKS, PLACES, UNUSED = 9, 5, (3, 1), 77
# What the rows of the matrix have not: positions in the state, and what needs positions without that.
WITH_POSITIONS = {
    "hybrid-rope": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "rope": "partial", "rope_frequencies": 1},
    "hybrid-sinks": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "trained_length": 6},
    "hybrid-exact-rope": {"mechanism": "hybrid", "window_size": 2, "num_exact_keys": 3, "num_sinks": 1}
    | {"rope": "partial", "rope_frequencies": 1, "trained_length": 4},
    "linear-rope": {"mechanism": "linear", "feature_map": "exp", "rope": "partial", "rope_frequencies": 1},
    "gated_delta-rope": {"mechanism": "gated_delta", "rope": "partial", "rope_frequencies": 1},
}
# What C computes where the states are.
IN_PLACE = (
    *("hybrid", "hybrid-decay", "hybrid-rope", "hybrid-sinks", "hybrid-exact-keys", "hybrid-exact-rope"),
    *("linear-elu1", "linear-exp", "linear-decay", "performer", "performer-geometry", "gated_delta"),
    "gated_delta-channel",
)


def mechanism_named(name: str):
    if name in WITH_POSITIONS:
        return move(mechanism_of(WITH_POSITIONS[name], rotary=Rotary((1.0, 0.1)), is_causal=True))
    return build_mechanism(name)


# One row of each kind of state, and what C computes.
STEPS = dict.fromkeys((*(row for row in rows(causal=True, state=True) if row in KINDS), *IN_PLACE, *WITH_POSITIONS))


def inputs_of(mechanism, dtype, start: int, stop: int) -> MechanismInputs:
    """Some tokens of two sequences, of which the second is three tokens ahead."""
    inputs = MechanismInputs(*(x[:, :, start:stop] for x in qkv(LENGTH, dtype=dtype)), None, SCALING, True)
    if mechanism.needs_positions:
        positions = torch.arange(start, stop, dtype=torch.int32) + torch.tensor([[0], [3]])
        inputs = mechanism.prepare(inputs._replace(positions=positions.int()))
    if mechanism.needs_gates:
        inputs = inputs._replace(gates=mechanism.gates(hidden_states_of(inputs.key)))
    return inputs


def cache_of(state, places=PLACES):
    """Tensors with the blocks of these states, which stand apart, and the memory that holds them and one block more."""
    memory = [torch.full((BLOCKS + 1, x[0].numel() + 3), UNUSED, dtype=x.dtype) for x in state]
    blocks = [full[:-1, :-3].view(BLOCKS, *x.shape[1:]) for full, x in zip(memory, state)]
    for block, x in zip(blocks, state):
        block.index_copy_(0, torch.tensor(places), x)
    return tuple(blocks), memory


@torch.no_grad()
@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_rows_is_the_step_of_the_states_there_and_changes_nothing_else(name, backend, monkeypatch):
    """And where C computes, no state is copied."""
    mechanism, rows = mechanism_named(name), torch.tensor(PLACES)
    for dtype in (torch.float32, torch.bfloat16):
        _, state = mechanism(inputs_of(mechanism, dtype, 0, LENGTH - 1))
        state, one = tuple(x.contiguous() for x in state), inputs_of(mechanism, dtype, LENGTH - 1, LENGTH)
        blocks, memory = cache_of(state)
        expected, expected_state = mechanism(one, state)
        with monkeypatch.context() as patched:
            if backend == "C" and name in IN_PLACE:
                patched.setattr(torch.Tensor, "index_copy_", None)
            output = mechanism.step_in_rows(one, blocks, rows)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        for block, full, x in zip(blocks, memory, expected_state):
            torch.testing.assert_close(block.index_select(0, rows), x, rtol=0, atol=0)
            block.index_fill_(0, rows, UNUSED)
            assert torch.equal(full, torch.full_like(full, UNUSED))


@torch.no_grad()
@pytest.mark.parametrize("name", ["hybrid-exact-rope", "linear-exp", "gated_delta", "window"])
def test_what_does_not_fit_is_refused_before_a_state_changes(name, backend):
    mechanism = mechanism_named(name)
    one = inputs_of(mechanism, torch.float32, LENGTH - 1, LENGTH)
    blocks, memory = cache_of(mechanism(inputs_of(mechanism, torch.float32, 0, LENGTH - 1))[1])
    before = [x.clone() for x in memory]
    for number in (-1, BLOCKS, 2**62):
        with pytest.raises(IndexError):
            mechanism.step_in_rows(one, blocks, torch.tensor([1, number]))
    for wrong in (torch.tensor([1]), torch.tensor([[1, 3]]), torch.tensor([1, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"`rows` is torch.int\d\d \[.*\]; it must be int64 \[2\]"):
            mechanism.step_in_rows(one, blocks, wrong)
    with pytest.raises(ValueError, match="one token per sequence and no mask"):
        mechanism.step_in_rows(inputs_of(mechanism, torch.float32, 0, 2), blocks, torch.tensor(PLACES))
    assert all(torch.equal(x, y) for x, y in zip(memory, before))


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
@pytest.mark.parametrize("name", ["hybrid", "linear-exp", "gated_delta"])
def test_the_operators_take_only_blocks_of_the_right_form(name):
    mechanism = mechanism_named(name)
    one, rows = inputs_of(mechanism, torch.float32, LENGTH - 1, LENGTH), torch.tensor(PLACES)
    blocks, _ = cache_of(mechanism(inputs_of(mechanism, torch.float32, 0, LENGTH - 1))[1])
    first, *others = blocks
    mechanism.step_in_rows(one, blocks, rows)  # which makes nothing else right
    for problem, wrong in {
        "strides .* dense": first.mT.contiguous().mT,
        "strides .* dense, with none": first[:1].expand(first.shape),
        "it must have": first[..., :-1].contiguous(),
        r"torch\.float64": first.double(),
    }.items():
        with pytest.raises(ValueError, match=problem):
            mechanism.step_in_rows(one, (wrong, *others), rows)


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
def test_the_operators_check_the_rows_themselves():
    query, key, state = torch.rand(2, 4, 1, 8), torch.rand(2, 2, 1, 8), torch.rand(BLOCKS, 2, 8, 9)
    gate = torch.rand(2, 2, 1)
    for wrong in (torch.tensor([1]), torch.tensor([1, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match="`rows`"):
            OPERATORS.attention_step_(query, key, key, state, None, False, wrong)
        with pytest.raises(ValueError, match="`rows`"):
            OPERATORS.gated_delta_step_(query, key, key, -gate, gate, state[..., 1:].contiguous(), True, wrong)
    with pytest.raises(IndexError, match=r"`rows` = \[1, 5\] has a number that is none of the 5 blocks"):
        OPERATORS.attention_step_(query, key, key, state, None, False, torch.tensor([1, BLOCKS]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["hybrid-rope", "linear-exp", "gated_delta", "window"])
def test_a_step_in_rows_beside_the_cpu_waits_for_nothing(name):
    """As on a GPU, tensors on `meta` are eager and not for C; they have no values to branch on or to wait for."""
    mechanism = mechanism_named(name)
    one = inputs_of(mechanism, torch.bfloat16, LENGTH - 1, LENGTH)
    states, _ = cache_of(mechanism(inputs_of(mechanism, torch.bfloat16, 0, LENGTH - 1))[1])
    one = MechanismInputs(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in one))
    states, places = tuple(x.to("meta") for x in states), torch.tensor(PLACES, device="meta")
    output = mechanism.to("meta").step_in_rows(one, states, places)
    assert (output.device.type, output.dtype, output.shape) == ("meta", torch.bfloat16, (2, 1, 4, 8))
    with pytest.raises(RuntimeError, match="meta"):
        bool(states[0].any())


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["hybrid-rope", "linear-exp", "gated_delta"])
def test_a_cuda_graph_of_a_step_in_rows_is_the_step(name):
    mechanism = mechanism_named(name)
    state = mechanism(inputs_of(mechanism, torch.float32, 0, LENGTH - 1))[1]
    one = inputs_of(mechanism, torch.float32, LENGTH - 1, LENGTH)
    mechanism, one = mechanism.cuda(), MechanismInputs(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in one))
    start, places = tuple(x.cuda() for x in cache_of(state)[0]), torch.tensor(PLACES, device="cuda")
    expected_states, states = (tuple(x.clone() for x in start) for _ in range(2))
    expected = mechanism.step_in_rows(one, expected_states, places)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what only a first call does must not be captured
        mechanism.step_in_rows(one, states, places)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        output = mechanism.step_in_rows(one, states, places)
    for x, y in zip(states, start):
        x.copy_(y)
    graph.replay()
    for found, wanted in zip((output, *states), (expected, *expected_states)):
        torch.testing.assert_close(found, wanted)
