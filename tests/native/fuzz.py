"""Calls the kernels at random: what fits must be computed as in float64, what does not must be one ValueError.

    python tests/native/fuzz.py --seed 0 --seconds 60
    python tests/native/fuzz.py --library build/_kernels_base.so --seed 7 --calls 1

Call number n of seed s is the first one of seed s + n: a failure prints the seed that makes it again. Every tensor that
reaches C lies between guards, and all new memory is poisoned (tests/support/poison.py).
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch
from kernel_calls import HYBRID_STATE, KEPT, SPECIFICATIONS, Call, Maker, widened
from operators import OPERATORS
from poison import poisoned_allocations

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import window as kernels_window
from hf_linear_attention.kernels.cpu import KernelBackend, takes_attention
from hf_linear_attention.kernels.hybrid_arguments import HybridArguments
from hf_linear_attention.mechanisms.base import Rotary
from hf_linear_attention.positions.rotary import RotaryShift
from hf_linear_attention.torch_kernels import attention as kernels
from hf_linear_attention.torch_kernels import delta as kernels_delta_torch
from hf_linear_attention.torch_kernels.blocks import EMPTY_MAXIMUM, EXP, Affine, KernelMap
from hf_linear_attention.torch_kernels.exact_keys import Kept
from hf_linear_attention.torch_kernels.window import (
    NearKeys,
    SinkKeys,
    exact_part,
    join,
    log_size,
    plain_window,
    slot_attention,
)


# What rounding leaves, with room for sums of both signs; gradients see the rounded outputs, as often as there are rows.
RELATIVE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
ATTENTION = (
    *("query", "key", "value", "key_mask", "log_decay", "state"),
    *("key_weight", "key_bias", "key_norm", "query_weight"),
)
HYBRID = HybridArguments._fields[: HybridArguments._fields.index("function")]
WINDOW = ("query", "key", "value", "visible", "sink_key", "sink_value", "seen", "sink_query")


def map_attention(t, options, constants):
    if "key_weight" in t:
        affine = Affine(t["query_weight"]), Affine(t["key_weight"], t.get("key_bias"), t.get("key_norm"))
    else:
        affine = None, None
    given = {name: t.get(name) for name in ("key_mask", "state", "log_decay")}
    feature_map = KernelMap(options["function"], *affine)
    results = kernels.map_attention(
        feature_map, t["query"], t["key"], t["value"], is_causal=options["is_causal"], **given
    )
    return comparable(constants, options["function"], *results)


def features(t, options, constants):
    given = {name: t.get(name) for name in ("key_mask", "state", "log_decay")}
    log_features = options["function"] == EXP
    output, state = kernels.kernel_attention(
        t["query"], t["key"], t["value"], log_features=log_features, is_causal=options["is_causal"], **given
    )
    return [output, *comparable(constants, options["function"], None, None, None, state)]


def step(t, options, constants):
    how = {"log_features": options["function"] == EXP, "log_decay": t.get("log_decay"), "is_causal": True}
    with torch.set_grad_enabled("is_exact" in constants):
        output, state = kernels.kernel_attention(t["query"], t["key"], t["value"], state=t["state"], **how)
    if "is_exact" not in constants:
        given = t["query"], t["key"], t["value"]
        check_rows([t["state"]], lambda x, rows: kernels.kernel_attention(*given, state=x[0], rows=rows, **how))
    return [output, *comparable(constants, options["function"], None, None, None, state)]


def check_rows(states, step):
    """`step(blocks, rows)` on blocks that stand apart does what it does without rows, and changes nothing else."""
    batch = states[0].shape[0]
    rows, dense = torch.randperm(batch + 2)[:batch], [x.clone(memory_format=torch.contiguous_format) for x in states]
    blocks = [blocks_apart(x.shape, x.dtype, batch + 2) for x in states]
    for x, y in zip(blocks, dense):
        x.index_copy_(0, rows, y)
    expected, actual = step(dense, None), step(blocks, rows)
    if isinstance(expected, tuple):  # functional without rows
        (expected, dense[0]), (actual, _) = expected, actual
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    for x, y in zip(blocks, dense):
        torch.testing.assert_close(x.index_select(0, rows), y, rtol=0, atol=0, equal_nan=True)
        x.index_fill_(0, rows, UNUSED)
        assert (torch.as_strided(x, (x.untyped_storage().size() // x.element_size(),), (1,), 0) == UNUSED).all()


UNUSED = 77


def blocks_apart(shape, dtype, count: int) -> torch.Tensor:
    """A tensor of `count` blocks of the shape `[batch, ...]`, with three numbers between each and the next."""
    size = math.prod(shape[1:])
    return torch.full((count, size + 3), UNUSED, dtype=dtype)[:, :size].view(count, *shape[1:])


def comparable(constants, function, output, denominator, scale, state):
    """Maxima are a matter of convention: sums and denominators as they would stand with those of the reference."""
    if function >= EXP:
        maximum = constants.setdefault("maximum", state[..., -1:].detach())
        difference = (state[..., -1:].double() - maximum.double()).detach()
        state = state[..., :-1].double() * difference.masked_fill(state[..., -2:-1] == 0, 0.0).exp()
        if denominator is not None:
            reference = constants.setdefault("scale", scale.detach())
            difference = (scale.double() - reference.double()).detach()
            is_nothing = denominator == 0  # whose scale, and so whose derivative, means nothing
            denominator = denominator.double() * difference.masked_fill(is_nothing, 0.0).exp()
            denominator = denominator.masked_fill(is_nothing, 0.0)
    return [x for x in (output, denominator, state) if x is not None]


def window(t, options, constants):
    query, key, value, visible, *sinks, seen, _ = (t.get(name) for name in WINDOW)
    near = NearKeys(key, value, visible, 0)
    distance = torch.zeros(seen.shape, dtype=torch.int64)
    results = exact_part(
        query, near, SinkKeys(*sinks, seen, distance), options["scaling"], sink_query=t.get("sink_query")
    )
    return seen_part(*results)


def window_both_ways(t, options, constants):
    """The operator, or in float64 the same keys with padding at both ends."""
    tensors = [t.get(name) for name in WINDOW]
    attend = kernels_window._window_in_torch if "is_exact" in constants else OPERATORS.window_attention
    return seen_part(*attend(*tensors, options["scaling"], options["window"]))


def seen_part(output, size, largest):
    """Without the rows that see nothing, whose size is -1e30."""
    is_seen = largest > EMPTY_MAXIMUM / 2
    return [output, size.masked_fill(~is_seen, 0.0), largest.detach().masked_fill(~is_seen, 0.0)]


def arguments_of(t, options):
    how = (options[name] for name in ("function", "window", "scaling"))
    frequencies, *turns = options["turns"]
    given = HybridArguments(*(t.get(name) for name in HYBRID), *how, *turns, options["number"])
    return given._replace(frequencies=frequencies, is_rate=options["is_rate"])


def hybrid(t, options, constants):
    """The operator, or in float64 what it stands for."""
    given = arguments_of(t, options)
    if "is_exact" in constants:
        output, state, *kept = hybrid_in_float64(given)
    else:
        output, _, _, _, state, *kept = OPERATORS.hybrid(*given)
        kept = kept[: (4 + ("position" in t)) * ("score" in t)]
    return [output, *comparable(constants, options["function"], None, None, None, state), *kept]


def hybrid_in_float64(given):
    """One part after the other, where keys are far when they leave the window or what is kept."""
    (first, num_far), number, query, root = given.ranges, given.num_exact_keys, given.query, given.scaling**0.5
    heads = given.key.shape[1]
    hidden, near = given.shifts[0], near_part(given)
    nothing = Kept.nothing(given.key, given.value, number, given.key_position is not None)
    rows = list(given.kept or [x for x in nothing if x is not None])
    if num_far:
        score = torch.zeros(()) if given.score is None else given.score[:, :, :num_far].detach()
        score = score.expand(*given.key.shape[:2], num_far, 1)
        new = [given.key[:, :, :num_far], given.value[:, :, :num_far], score, torch.zeros(score.shape).int()]
        if given.key_position is not None:
            new.append(given.key_position[:, None, :num_far, None].expand(-1, heads, -1, -1))
        rows = [torch.cat(pair, dim=2) for pair in zip(rows, new)]
    gone, ages, is_gone, seen, kept, kept_age = chosen(rows, given.visible[:, :num_far], number)
    key, value, *_, place = at_places(rows, gone)
    far_query = query if hidden is None else hidden(query, -given.position.long())
    if hidden is not None:
        key = hidden(key, -place[..., 0].long())
    maps = Affine(given.query_weight), Affine(given.key_weight, given.key_bias, given.key_norm)
    feature_map = KernelMap(given.function, *maps)
    exponents = [feature_map.features(root * x, y) for x, y in zip((far_query[:, :, first:], key), maps)]
    log_decay = logarithm(given.log_decay, given.is_rate)
    decay = torch.zeros(heads) if log_decay is None else log_decay
    exponents[1] = exponents[1] + decay[:, None, None] * ages.unsqueeze(3)
    far = (*exponents, value, is_gone[:, 0], log_decay, given.state, *[None] * 4, EXP, True)  # as in all heads
    far, total, scale, state = kernels.in_torch(*far, plain=True)
    half = query.square().sum(dim=-1, keepdim=True) * (given.scaling / 2)
    add = (given.log_scale[:, None, None] - given.norm_weight[:, None, None] * half).unflatten(1, (heads, -1))
    parts = [(far, log_size(total, scale) + add[:, :, :, first:])]
    if number:
        parts.append(part_of_kept(given, rows, seen))
    later = join(tuple(x[:, :, :, first:] for x in near), *parts)
    output = torch.cat((near[0][:, :, :, :first], later[0]), dim=3)
    last = at_places(rows, kept) if number else []
    last[2:4] = [last[2].masked_fill(kept_age.unsqueeze(3) == 0, 0.0), kept_age.unsqueeze(3)] if number else []
    return [output.flatten(1, 2).transpose(1, 2), state, *last]


def logarithm(decay, is_rate):
    return -torch.log1p(decay.exp()) if is_rate and decay is not None else decay


def near_part(given):
    """The part of window and sinks."""
    missing, place, moved = given.window - 1 - given.before, given.position, None
    key, value = (torch.nn.functional.pad(x, (0, 0, missing, 0)) for x in (given.key, given.value))
    if given.shifts[1] is not None and place is not None:
        place = place.long()
        moved = given.shifts[1](given.query, place.clamp(max=given.trained_length - 1) - place)
    visible = torch.nn.functional.pad(given.visible, (missing, 0))
    sinks = given.sink_key, given.sink_value, given.seen, moved
    return plain_window(given.query, key, value, visible, *sinks, given.scaling)[:2]


def at_places(rows, places):
    return [x.gather(2, places.unsqueeze(3).expand(-1, -1, -1, x.shape[3])) for x in rows]


def chosen(rows, real, number):
    """For each key that leaves, the row that is displaced, its age, whether there is one, and what is then kept; the
    rows that are kept in the end, and their ages."""
    score, age = rows[2][..., 0], rows[3][..., 0]
    (batch, heads, total), length = score.shape, real.shape[1]
    gone, ages, seen = score.new_zeros(batch, heads, length).long(), score.new_zeros(batch, heads, length), []
    is_gone, kept, kept_age = torch.zeros(gone.shape).bool(), gone.new_zeros(batch, heads, number), []
    for b, h in itertools.product(range(batch), range(heads)):
        empty = {place for place in range(number) if not age[b, h, place]}
        own = [-math.inf if place in empty else x for place, x in enumerate(score[b, h].tolist())]
        left, held, count = [1 - x for x in age[b, h].tolist()], list(range(number)), 0
        for t in range(length):
            if real[b, t]:
                count += 1
                left[number + t] = count
                held.append(number + t)
                out = max(held, key=lambda place: (-own[place], place))
                held.remove(out)
                if out not in empty:
                    gone[b, h, t], ages[b, h, t], is_gone[b, h, t] = out, count - left[out], True
            seen.append([place in held and place not in empty for place in range(total)])
        kept[b, h] = torch.tensor(held)
        kept_age.append([0 if place in empty else count - left[place] + 1 for place in held])
    seen = torch.tensor(seen, dtype=torch.bool).view(batch, heads, length, total)
    return gone, ages, is_gone, seen, kept, torch.tensor(kept_age, dtype=torch.int32).view(kept.shape)


def part_of_kept(given, rows, seen):
    """The part of the keys `rows` that each query sees."""
    first, trained_length, shift = given.ranges[0], given.trained_length, given.shifts[1]
    query, heads = given.scaling * given.query[:, :, first:], given.key.shape[1]
    logits = query.unflatten(1, (heads, -1)) @ rows[0].unsqueeze(2).mT
    if shift is not None:
        position = given.position[:, first:].long()
        moved = shift(query, trained_length - 1 - position).unflatten(1, (heads, -1))
        distant = moved @ shift(rows[0], -rows[4][..., 0].long()).unsqueeze(2).mT
        position = position[:, None, :, None]
        is_distant = (position >= trained_length) & (position - rows[4].long().mT >= trained_length)
        logits = torch.where(is_distant.unsqueeze(2), distant, logits)
    return part_of_logits(logits, ~seen.unsqueeze(2), rows[1])


def part_of_logits(logits, hidden, value):
    logits = logits.masked_fill(hidden, EMPTY_MAXIMUM)
    size = logits.logsumexp(dim=-1, keepdim=True).masked_fill(hidden.all(dim=-1, keepdim=True), EMPTY_MAXIMUM)
    return logits.softmax(dim=-1).masked_fill(hidden, 0.0) @ value.unsqueeze(2), size


def slots(t, options, constants):
    return [slot_attention(t["query"], t["key"], t["value"], t.get("visible"), options["scaling"])]


def hybrid_step(t, options, constants):
    """The operator, or in float64 what it stands for."""
    names = [name for name in SPECIFICATIONS["hybrid_step"] if name not in (*HYBRID_STATE, "log_scale", "norm_weight")]
    given, state = [t.get(name) for name in names], [t[name] for name in HYBRID_STATE if name in t]
    others = t["log_scale"], t["norm_weight"], *options["turns"], options["function"], options["scaling"]
    if "is_exact" in constants:
        slope = t["slope"] * options["slope_scale"] if "slope" in t else None
        decay = logarithm(t.get("log_decay"), options["is_rate"])
        output, *new = step_in_float64({**t, "slope": slope, "log_decay": decay}, *others)
    else:
        others = *others, options["slope_scale"], options["is_rate"]
        output, *new = OPERATORS.hybrid_step(*given, state, *others)
        written = [x.clone(memory_format=torch.contiguous_format) for x in state]
        again = OPERATORS.hybrid_step_(*given, written, *others, None)
        for functional, in_place in zip((output, *new), (again, *written)):
            torch.testing.assert_close(in_place, functional, rtol=0, atol=0, equal_nan=True)
        check_rows(state, lambda blocks, rows: OPERATORS.hybrid_step_(*given, blocks, *others, rows))
    sums = comparable(constants, EXP, None, None, None, new.pop(0))
    if "score" in t:  # where there is no key, it may be any
        new[2] = new[2].masked_fill(new[3] == 0, 0.0)
    return [output, *sums, *new]


def step_in_float64(t, log_scale, norm_weight, frequencies, first, is_interleaved, trained_length, function, scaling):
    """The output, and the new state."""
    query, key, value, sums, kind = (t[name] for name in ("query", "key", "value", "sums", "kind"))
    frequencies = () if frequencies is None else tuple(frequencies.tolist())
    rotary, position, ordinary = Rotary(frequencies, is_interleaved), t.get("position"), kind[:, :1] == 1
    gone, kept, is_far = kept_and_gone(t, ordinary)
    feature_map = KernelMap(
        function, Affine(t["query_weight"]), Affine(*map(t.get, ("key_weight", "key_bias", "key_norm")))
    )
    far_query, far_key = query, gone[0]
    if first < len(frequencies):
        shift = RotaryShift(rotary, first)
        far_query, far_key = shift(query, -position.long()), shift(far_key, -gone[4][..., 0].long())
    query_exponent = feature_map.features(far_query * scaling**0.5, feature_map.query)
    key_exponent = feature_map.features(far_key * scaling**0.5, feature_map.key)
    kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    decay = torch.zeros(kv_heads).double() if t.get("log_decay") is None else t["log_decay"].double()
    decay = decay[:, None, None]
    leaving = gone[1].masked_fill(~is_far, 0.0)
    faded = torch.cat((sums[..., :-1], sums[..., -1:] + is_far * decay), dim=-1)
    exponent = (key_exponent + decay * gone[3]).masked_fill(~is_far, EMPTY_MAXIMUM)
    value_row = torch.cat((leaving, is_far.double().expand(*leaving.shape[:3], 1)), dim=-1)
    maximum = torch.maximum(faded[..., -1], exponent[:, :, 0])
    weights = (exponent[:, :, 0] - maximum).exp() * is_far[..., 0]
    added = faded[..., :-1] * (faded[..., -1] - maximum).exp()[..., None] + weights[..., None] * value_row
    new_sums = torch.cat((added, maximum[..., None]), dim=-1)
    far_query = query_exponent.unflatten(1, (kv_heads, groups)) + maximum[:, :, None, None]
    scale = far_query.amax(dim=-1, keepdim=True)
    far = (far_query - scale).exp().flatten(2, 3) @ added
    far, total = far.unflatten(2, (groups, 1)).split_with_sizes((value.shape[-1], 1), dim=-1)
    far, far_size = far / total.masked_fill(total == 0, 1.0), log_size(total, scale)
    sinks, near = near_in_torch(t, kept, rotary, trained_length, scaling)
    half = query.square().sum(dim=-1, keepdim=True) * scaling / 2
    add = (log_scale[:, None, None] - norm_weight[:, None, None] * half).unflatten(1, (kv_heads, groups))
    output = join(near[:2], (far, far_size + add))[0].flatten(1, 2).transpose(1, 2)
    kept = [x for name, x in zip(KEPT, kept) if name in t]
    return [output, new_sums, *kept, *sinks]


def kept_and_gone(t, ordinary):
    """Key, value, score, age and position of what goes to the far sums, if anything does, and of what is kept."""
    count, heads = t["kept_key"].shape[2] if "kept_key" in t else 0, t["key"].shape[1]
    oldest = [t[x][:, :, :1] for x in ("window_key", "window_value")]
    nothing = oldest[0].new_zeros(*oldest[0].shape[:2], 1, 1)
    oldest.append(t["window_score"][:, :, :1] if count else nothing)
    place = t["window_position"][:, None, :1, None].expand(-1, heads, -1, -1) if "window_position" in t else nothing
    oldest += [nothing.int(), place]
    older = [t.get(name, x.new_zeros(*x.shape[:2], count, x.shape[3])) for name, x in zip(KEPT, oldest)]
    rows = [torch.cat(pair, dim=2) for pair in zip(older, oldest)]
    out, age, is_gone, _, held, held_age = chosen(rows, ordinary, count)
    gone, kept = at_places(rows, out), at_places(rows, held)
    gone[3], kept[3] = age.unsqueeze(3), held_age.unsqueeze(3)
    return gone, kept, is_gone.unsqueeze(3)


def near_in_torch(t, kept, rotary, trained_length, scaling):
    """The new tensors of window and sinks, and the part of these and of what is kept."""
    query, key, value, num_seen, sink_key = (t[name] for name in ("query", "key", "value", "num_seen", "sink_key"))
    window_key, window_value = (
        torch.cat((t[name], new), dim=2)[:, :, 1:] for name, new in (("window_key", key), ("window_value", value))
    )
    kind = torch.where(num_seen < sink_key.shape[2], 2, 1).to(torch.int8)
    kind = torch.cat((t["kind"], kind), dim=1)[:, 1:]
    place = torch.arange(sink_key.shape[2])
    here = (place == num_seen)[:, None, :, None]
    sink_key, sink_value = torch.where(here, key, sink_key), torch.where(here, value, t["sink_value"])
    # as numbers of 64 bits go round
    num_seen = num_seen + 1
    state = [window_key, window_value, kind, sink_key, sink_value, num_seen]
    position, moved = t.get("position"), None
    if trained_length and rotary.inverse_frequencies:
        last = trained_length - 1
        moved = RotaryShift(rotary)(query, position.long().clamp(max=last) - position)
    if "window_position" in t:
        state.append(torch.cat((t["window_position"], position), dim=1)[:, 1:])
    part = plain_window(
        query, window_key, window_value, kind == 1, sink_key, sink_value, (place < num_seen)[:, None], moved, scaling
    )
    if "score" not in t:
        return state, part
    score = t["score"].mT.unsqueeze(3) + t["slope"][:, None, None] * num_seen[:, None, None].double()
    state.append(torch.cat((t["window_score"], score), dim=2)[:, :, 1:])
    queries = [scaling * x.unflatten(1, (key.shape[1], -1)) for x in (query, query if moved is None else moved)]
    logits = queries[0] @ kept[0].unsqueeze(2).mT
    if moved is not None:
        distant = RotaryShift(rotary)(kept[0], -kept[4][..., 0].long()).unsqueeze(2)
        position = position[:, None, :, None].long()
        is_distant = (position >= trained_length) & (position - kept[4] >= trained_length)
        logits = torch.where(is_distant.unsqueeze(2).mT, queries[1] @ distant.mT, logits)
    is_empty = (kept[3] == 0).unsqueeze(2).mT
    largest = torch.maximum(part[2], logits.masked_fill(is_empty, EMPTY_MAXIMUM).amax(dim=-1, keepdim=True))
    return state, (*join(part[:2], part_of_logits(logits, is_empty, kept[1])), largest)


def delta(t, options, constants):
    given = [t[name] for name in ("query", "key", "value", "log_decay", "beta")]
    how = {"erases": options["erases"], "key_mask": t.get("key_mask")}
    found = list(kernels_delta_torch.gated_delta(*given, state=t.get("state"), **how))
    if not torch.is_grad_enabled():  # a step
        check_rows([t["state"]], lambda x, rows: kernels_delta_torch.gated_delta(*given, state=x[0], rows=rows, **how))
    return found


def elu(t, options, constants):
    if "is_exact" in constants:
        return [torch.where(t["x"] > 0, t["x"] + 1, t["x"].clamp(max=0).exp())]
    return [OPERATORS.elu_plus_one(t["x"])]


ENTRIES = {
    **{"attention": map_attention, "features": features, "step": step, "window": window},
    **{"hybrid": hybrid, "hybrid_step": hybrid_step, "window_both_ways": window_both_ways},
    **{"slots": slots, "elu": elu, "delta": delta, "delta_by_feature": delta},
    **{"delta_step": delta, "delta_step_by_feature": delta},
}
HAVE_GRADIENTS = ("attention", "features", "window", "window_both_ways", "hybrid", "delta", "delta_by_feature")
ONLY_IN_C = ("elu",)


class Fuzzer:
    def __init__(self, library: Any):
        self.library, self.counts = library, Counter()
        self.products = kernels_cpu.usable_products(library.bfloat16_features())
        kernels_cpu.SHORTEST_PART = 20
        self.choose(library)

    def choose(self, library: Any) -> None:
        backend = KernelBackend("torch" if library is None else "c", None, "chosen by the fuzzer")
        kernels_cpu._loaded = lambda: (library, backend)

    def run(self, seed: int) -> str:
        """What is wrong with the call of this seed, or nothing."""
        self.library.set_bfloat16(kernels_cpu.BFLOAT16_PRODUCTS.index(self.products[seed % len(self.products)]))
        maker = Maker(seed)
        call = maker.call()
        threads = maker.random.choice((1, 2, 5, 12))  # more than heads, so that some calls are computed in parts
        torch.get_num_threads = lambda: threads
        torch.manual_seed(seed)
        try:
            problem = self.refused(call) if call.misfit else self.computed(call, maker)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return f"seed {seed}: {problem}\n  {call}" if problem else ""

    def refused(self, call: Call) -> str:
        said = []
        for library in (self.library, None):
            self.choose(library)
            try:
                ENTRIES[call.entry](call.tensors, call.options, {})
                said.append("nothing")
            except ValueError as error:
                said.append(str(error))
            except Exception as error:  # anything else is what we look for
                said.append(f"a {type(error).__name__}: {error}")
        self.choose(self.library)
        self.counts["refused"] += 1
        is_refused = not any(text == "nothing" or text.startswith("a ") for text in said)
        return "" if said[0] == said[1] and is_refused else f"C says {said[0]!r} and torch {said[1]!r}"

    def computed(self, call: Call, maker: Maker) -> str:
        wide = {name: widened(x) for name, x in call.clean.items()}
        constants: dict[str, Any] = {"is_exact": True}  # the reference, which all others are compared with
        exact = values_and_gradients(call, wide, constants)
        del constants["is_exact"]
        self.counts["computed"] += 1
        for library in (self.library, None) if maker.chance(0.15) else (self.library,):
            self.choose(library)
            try:
                with poisoned_allocations(maker.random.choice((0, 24))) as memory:
                    tensors = {
                        name: memory.place(name, x, *layout(maker, x), {call.expanded.get(name)})
                        for name, x in call.tensors.items()
                    }
                    actual = values_and_gradients(call, tensors, constants)
                    memory.check()
            except NotImplementedError:
                if call.entry not in ONLY_IN_C:
                    raise
                self.counts["not for C"] += 1
                return ""
            finally:
                self.choose(self.library)
            if is_beyond_torch(call, library):
                self.counts["beyond torch"] += 1
                continue
            if problem := difference(call, actual, exact):
                return f"{'C' if library else 'torch'}: {problem}"
        return ""


def is_beyond_torch(call: Call, library: Any) -> bool:
    """Whether torch computes exponents with a decay of more than float32 holds: it loses keys beside older ones."""
    if call.entry == "hybrid" and spread_of_keys(call) > 700:
        return True  # e^-700 is the least that float64 holds: the reference loses far keys beside larger ones
    decay = call.clean.get("log_decay")
    if call.options["function"] < EXP or call.entry == "hybrid_step" or decay is None or decay.min() > -60:
        return False
    query, key, value, mask = (call.clean.get(name) for name in ATTENTION[:4])
    return library is None or not takes_attention(query, key, value, mask, 1)


def spread_of_keys(call: Call) -> float:
    """The largest minus the smallest exponent of the far keys' features, over the tokens of a head."""
    t = {name: widened(x) for name, x in call.clean.items()}
    key, hidden = t["key"], arguments_of(t, call.options).shifts[0]
    if hidden is not None:
        key = hidden(key, -t["key_position"].long())
    exponents = key @ t["key_weight"]
    if t.get("key_norm") is not None:
        exponents = exponents - t["key_norm"] * key.square().sum(-1, keepdim=True) * (call.options["scaling"] / 2)
    return (exponents.amax(2) - exponents.amin(2)).max().item()


def layout(maker: Maker, x: torch.Tensor):
    """A random order of the axes in memory, steps, and sometimes the order that models have."""
    if x.ndim == 4 and maker.chance(0.4):
        return (0, 2, 1, 3), None
    order = list(range(x.ndim))
    if maker.chance(0.4):
        maker.random.shuffle(order)
    steps = [maker.random.choice((1, 1, 1, 2, 3)) for _ in order] if maker.chance(0.3) else None
    return order, steps


def values_and_gradients(call: Call, tensors, constants) -> list[torch.Tensor]:
    """Outputs, and the gradients of a loss that is the same for every dtype and backend."""
    if call.entry not in HAVE_GRADIENTS:
        with torch.no_grad():
            return ENTRIES[call.entry](tensors, call.options, constants)
    leaves = {name: x.detach().requires_grad_(name in call.wanted) for name, x in tensors.items()}
    outputs = ENTRIES[call.entry](leaves, call.options, constants)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        direction = torch.randn(output.shape, generator=generator).to(output.dtype)
        if output.requires_grad:
            loss = loss + (output * direction).sum().double()
    wanted = [leaves[name] for name in call.wanted]
    grads = [torch.zeros_like(x) for x in wanted]  # where nothing is computed
    if wanted and loss.requires_grad:
        grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    # the maximum is a constant
    log_features = call.options["function"] >= EXP
    return outputs + [g[..., :-1] if n == "state" and log_features else g for n, g in zip(call.wanted, grads)]


def difference(call: Call, actual, exact) -> str:
    """The first output or gradient that is not the one of float64 up to rounding."""
    size = largest_exponent(call)
    worst = max((x.dtype for x in call.tensors.values() if x is not None and x.dtype in RELATIVE), key=RELATIVE.get)
    most = max((e.double().norm().item() for e in exact), default=0.0)
    for number, (a, e) in enumerate(zip(actual, exact)):
        if a.shape != e.shape:
            return f"result {number} has the shape {tuple(a.shape)}, not {tuple(e.shape)}"
        if not a.isfinite().all() and e.isfinite().all():
            return f"result {number} is not finite"
        # a weight is the exponential of a number that rounds in proportion to its size
        relative = RELATIVE[worst] + size * torch.finfo(torch.float32).eps * 4
        error = (a.double() - e.double()).norm().item()
        if not error <= relative * (e.double().norm().item() + (0.3 if worst.itemsize > 2 else 4) * most + 1e-2):
            return f"result {number} is {error:.3g} off, of {e.double().norm().item():.3g} (allowed {relative:.1g})"
    return "" if len(actual) == len(exact) else f"{len(actual)} results, not {len(exact)}"


def largest_exponent(call: Call) -> float:
    """Of the sizes of all factors of an exponent."""
    sizes = {name: x.double().abs().max().item() for name, x in call.clean.items() if x is not None and x.numel()}
    root = max(1, call.clean.get("query", torch.ones(1)).shape[-1]) ** 0.5
    return sizes.get("query", 0) + root * sizes.get("query", 0) * sizes.get("key", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    parser.add_argument("--calls", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most so long")
    parser.add_argument("--library", type=Path, help="instead of the one that fits this processor")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    given = parser.parse_args()
    library = kernels_cpu.library() if given.library is None else kernels_cpu.load(given.library)
    if library is None:
        raise SystemExit(f"There are no C kernels to call: {kernels_cpu.kernel_backend().reason}")
    torch.set_num_threads(1)
    fuzzer, begin, failures, number = Fuzzer(library), time.monotonic(), [], 0
    while number < given.calls and time.monotonic() - begin < given.seconds and len(failures) < given.failures:
        problem = fuzzer.run(given.seed + number)
        failures += [problem] if problem else []
        number += 1
    for problem in failures:
        print(problem, file=sys.stderr)
    seconds = time.monotonic() - begin
    print(f"{number} calls in {seconds:.0f} s, {dict(fuzzer.counts)}, {len(failures)} failures, seed {given.seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
