"""Many tokens of `hybrid` by Triton against the mechanism in float64: at once, after others, and with padding."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import EXACT, ROTARY, TOLERANCE, mechanisms, on_cuda, relative, tokens, widened

from hf_linear_attention.kernels import triton_hybrid, triton_prefill
from hf_linear_attention.torch_kernels.blocks import EXP


assert triton_interpreter
# Among them, heads of 64, 80, 96, 128 and 256 columns, alone and in groups.
CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {"heads": (4, 2), "dim": 64}, (140,)),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 30}, {"is_interleaved": True}, (90,)),
    "after others": (EXACT | ROTARY | {"trained_length": 30}, {"heads": (3, 1)}, (4, 11, 80)),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 12}, {"pairs": 5, "dim": 24}, (70,)),
    "without positions": (EXACT | {"trained_length": None}, {"heads": (3, 1), "dim": 96, "pairs": 0}, (70, 75)),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY, {}, (70, 140)),
    "without sinks": (EXACT | ROTARY | {"num_sinks": 0, "trained_length": 12}, {"heads": (2, 2), "dim": 96}, (70,)),
    "many keys": (
        {**EXACT, "window_size": 70, "num_exact_keys": 90} | ROTARY | {"trained_length": 100},
        {},
        (170, 200),
    ),
    "80 columns": (EXACT | ROTARY, {"heads": (4, 2), "dim": 80}, (70,)),
    "256 columns": (EXACT | ROTARY | {"trained_length": 12}, {"dim": 256}, (70,)),
    "groups of chunks": (EXACT | ROTARY | {"trained_length": 4096}, {"dim": 128}, (270,)),
}
PADDED = ("after others", "many keys")
RUNS = [
    (name, dtype, pads)
    for name in CASES
    for dtype in TOLERANCE
    for pads in (False, True)
    if (dtype == torch.float32 and (not pads or name in PADDED)) or (name == "after others" and not pads)
]


def assert_same_state(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        if a is actual[0]:  # sums of exponents, in another order
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def chosen(scores, count: int, length: int) -> tuple[list[int], list[int]]:
    """When each of the keys of a head is displaced, and which key is before each query; one key after the other."""
    leave, gone = [length + 1] * len(scores), [-1] * length
    kept = list(range(count))
    for t in range(length):
        kept.append(count + t)
        worst = min(kept, key=lambda i: (scores[i], -i))
        kept.remove(worst)
        if scores[worst] > float("-inf"):
            leave[worst], gone[t] = t, worst
    return leave, gone


# How scores come: far from the order of the keys and with ties, in it, against it, all equal, and so that at once a key
# is displaced that is much worse than the next one.
ORDERS = {
    "random": lambda n: torch.randint(0, n // 3, (n,)).float(),
    "rising": lambda n: torch.arange(n).float(),
    "falling": lambda n: -torch.arange(n).float(),
    "equal": lambda n: torch.tensor([0.0, -0.0]).repeat(n)[:n],
    "in steps": lambda n: torch.cat((torch.full((n // 2,), -5.0), torch.rand(n - n // 2))),
    "late": lambda n: torch.cat((torch.tensor([-9.0]), 10.0 + torch.rand(40), torch.rand(n)))[:n],
}


@pytest.mark.parametrize(("count", "before"), [(3, 0), (41, 7)])
@pytest.mark.parametrize("order", ORDERS)
def test_the_choice_is_that_of_one_key_after_the_other(order, count, before, monkeypatch):
    """With padding, from places of which half are empty or from nothing, and in several groups of chunks."""
    for name, size in (("GROUP", 1), ("MOST_GROUPS", 2), ("LISTED", 64)):
        monkeypatch.setattr(triton_prefill, name, size)
    length, window = 200, 7
    score = torch.stack([ORDERS[order](before + length), ORDERS["random"](before + length)])
    visible = torch.ones(2, before + length, dtype=torch.bool)
    visible[0, 5:9] = visible[1, :70] = False
    kept_score, kept_age = ORDERS[order](2 * count)[-count:].expand(2, -1), (torch.arange(count) % 2).expand(2, -1)
    new = score.masked_fill(~visible, -torch.inf)
    line = [kept_score.masked_fill(kept_age == 0, -torch.inf) if before else torch.full((2, count), -torch.inf)]
    scores = torch.cat((*line, torch.full((2, window - before), -torch.inf), new), dim=1)[:, : count + length]
    old = [x[:, None, :, None].contiguous() if before else None for x in (kept_score, kept_age.int())]
    score = score[:, None, :, None]
    how = {"before": before, "length": length, "window": window, "count": count, "chunk": 64}
    leave, gone, listed, counts = triton_prefill.choose(score, visible, *old, score.stride()[:3], **how)
    for row, numbers in enumerate(scores.tolist()):
        ends, expected_gone = chosen(numbers, count, length)
        assert gone[row].tolist() == expected_gone
        is_key = [x > -torch.inf for x in numbers]
        assert [x for x, real in zip(leave[row].tolist(), is_key) if real] == [x for x, y in zip(ends, is_key) if y]
        for k in range(listed.shape[1]):
            first, end = min(64 * k, length), min(64 * k + 64, length)
            seen = [i for i in range(count + end) if is_key[i] and ends[i] > max(first, i - count)]
            assert listed[row, k, : counts[row, k]].tolist() == seen


@torch.no_grad()
@pytest.mark.parametrize(("shared", "fits"), [(232_448, True), (101_376, False)])
def test_a_gpu_reads_what_fits_into_its_shared_memory(shared, fits, monkeypatch):
    """Of an H100 and of an RTX 4090: rows of 1,024 bytes; those of 512 fit into both."""
    mechanism, _ = mechanisms(EXACT, torch.float32, dim=256, pairs=0)
    ran = on_cuda(monkeypatch, shared)
    mechanism(tokens(mechanism, 0, 20, torch.float32, dim=256))
    assert bool(ran) == fits
    mechanism.bfloat16()(tokens(mechanism, 0, 20, torch.bfloat16, dim=256))
    assert len(ran) == 1 + fits


def test_a_grid_has_no_more_programs_than_cuda_allows(monkeypatch):
    """65,535 on the second axis: query heads of sequences, or chunks of a line."""
    on_cuda(monkeypatch)

    def takes(batch: int, heads: int, length: int) -> bool:
        of_heads = [torch.empty(batch, n, length, 16, device="meta") for n in (heads, 1, 1)]
        return triton_hybrid.takes(*of_heads, torch.empty(batch, 1, 0, 16), torch.empty(1, 16, 8), EXP)

    assert takes(4369, 15, 1)
    assert not takes(4096, 16, 1)
    assert takes(1, 1, 1 << 20)
    assert not takes(1, 1, (1 << 20) + 1)


@torch.no_grad()
@pytest.mark.parametrize(("shared", "stages"), [(232_448, 2), (101_376, 1)])
def test_exact_keys_from_before_are_loaded_ahead_where_there_is_room(shared, stages, monkeypatch):
    """Of an H100 and of an RTX 4090, with rows of 256 bytes. Those of a first prompt fit into both."""
    mechanism, _ = mechanisms(EXACT | ROTARY, torch.float32, dim=64)
    launched, kernel = [], triton_prefill._outputs

    class Outputs:
        def __getitem__(self, grid):
            def run(*given, num_stages, **others):
                launched.append(num_stages)
                kernel[grid](*given, num_stages=num_stages, **others)

            return run

    monkeypatch.setattr(triton_prefill, "_outputs", Outputs())
    on_cuda(monkeypatch, shared)
    _, state = mechanism(tokens(mechanism, 0, 20, torch.float32, dim=64))
    mechanism(tokens(mechanism, 20, 30, torch.float32, dim=64), state)
    assert launched == [2, stages]


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype", "pads"), RUNS)
def test_tokens_are_those_of_the_mechanism(name, dtype, pads, monkeypatch):
    """Each part after the state of the part before; with padding, the first third of a row in each part."""
    settings, shape, stops = CASES[name]
    monkeypatch.setattr(triton_prefill, "GROUP", 2)
    mechanism, wide = mechanisms(settings, dtype, **shape)
    sizes = {key: shape[key] for key in ("heads", "dim") if key in shape}
    state, start = None, 0
    for stop in stops:
        some = tokens(mechanism, start, stop, dtype, **sizes)
        if pads:
            mask = torch.ones(2, stop - start, dtype=torch.bool)
            mask[0, : (stop - start) // 3] = False
            some = some._replace(attention_mask=mask)
        expected = wide(type(some)(*widened(some)), None if state is None else tuple(widened(state)))[0]
        reference = mechanism(some, state)[1]
        with monkeypatch.context() as patched:
            ran = on_cuda(patched)
            output, state = mechanism(some, state)
        assert ran == ["triton_prefill"]
        error = relative(output, expected)
        assert error < TOLERANCE[dtype]
        assert_same_state(state, reference)
        start = stop
