"""Speed on a CPU against what users would take instead (one thread, CPU time).

    python -m benchmarks.speed

Every column of a table is one case, in which all methods take turns with a rival, for `--seconds`, but at least three
rounds. The first row has the rival's CPU milliseconds. A cell below has the median over rounds of the rival's
time over the method's, its quartiles, and its aim if that is not 1; `missed` stands where the median is below the aim.
`--tables` measures some of the tables.

Attention alone has 12 heads of 64 and a batch of 1, the gated delta rule 16 heads of 128; models have random weights.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import StaticCache

from benchmarks import rivals
from benchmarks.common import Table, medians, parse, save, table, times_in_turns, write
from benchmarks.models import (
    DEFAULT,
    LARGE,
    LINEAR,
    QUICK,
    SOFTMAX,
    decoder,
    forward_pass,
    steps_of,
    training_step,
    variants,
    without_attention,
)
from hf_linear_attention.attention.transformers_internals import cache_argument
from hf_linear_attention.default_settings import DEFAULTS


Methods = Mapping[str, Callable[[], Any]]


class Comparison(NamedTuple):
    """A table: `cases` make the methods of each column, with the rival; `aims` are by row, one for each column."""

    title: str
    rival: str
    cases: Mapping[str, Callable[[], Methods]]
    aims: Mapping[str, Sequence[float | None]] = {}


def cell(rival: Sequence[float], mine: Sequence[float], aim: float | None) -> str:
    """The median of the rival's time over mine, its quartiles, and the aim; None for another rival."""
    ratios = [theirs / own for theirs, own in zip(rival, mine, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    median = statistics.median(ratios)
    wanted = "" if aim in (None, 1) else f", aim {aim:g}"
    wanted += " missed" if aim is not None and round(median, 2) < aim else ""
    return f"{median:#.3g} ({low:#.3g}-{high:#.3g}){wanted}"


def measure(comparison: Comparison, rounds: int, seconds: float) -> tuple[Table, dict[str, Any]]:
    """The table, and the median milliseconds by column and method."""
    found: dict[str, dict[str, list[float]]] = {}
    for column, made in comparison.cases.items():
        found[column] = times_in_turns(made(), rounds, seconds=seconds)
        write(f"{comparison.title}, {column}")
    names = dict.fromkeys(name for times in found.values() for name in times if name != comparison.rival)
    milliseconds = {column: medians(times, 1e-3) for column, times in found.items()}
    rows: list[list[Any]] = [
        [f"{comparison.rival}, CPU ms", *(times[comparison.rival] for times in milliseconds.values())]
    ]
    for name in names:
        aims = comparison.aims.get(name, [1] * len(found))
        pairs = [
            (times[comparison.rival], times.get(name), aim) for times, aim in zip(found.values(), aims, strict=True)
        ]
        rows.append([name, *(None if mine is None else cell(rival, mine, aim) for rival, mine, aim in pairs)])
    return table([comparison.title, *found], rows), milliseconds


SDPA, TRANSFORMERS = "sdpa", "transformers"
COPY, LEFT_OUT = f"{SOFTMAX}, a copy", "default, attention left out"
# The bytes of 136 tokens with heads of 64, the default of decoders of all sizes up to commit 5ffc229.
SMALL_STATE: dict[str, Any] = {
    "mechanism": "hybrid",
    "window_size": 16,
    "num_sinks": 4,
    "num_exact_keys": 48,
    "num_features": 64,
    "decay": "learned",
    "rope": "partial",
}
ENCODERS: dict[str, dict[str, Any]] = {
    "window 128 + 1 (default)": DEFAULTS["bidirectional"],
    "linear elu1": LINEAR["linear elu1"],
    "linear exp": LINEAR["linear exp"],
    "hybrid 64 + 1": DEFAULTS["encoder_decoder"],
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128},
    "linformer_linear exp 128": {"mechanism": "linformer_linear", "feature_map": "exp", "projection_size": 128},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
    "latent 64": {"mechanism": "latent", "num_latents": 64},
    "aft simple": {"mechanism": "aft", "variant": "simple"},
    "aft full": {"mechanism": "aft", "variant": "full"},
}
DECODERS: dict[str, dict[str, Any]] = {
    "hybrid, exact keys (default)": SMALL_STATE,
    "window 64 + 4": {"mechanism": "window", "window_size": 64, "num_sinks": 4},
    "hybrid 64 + 4": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4},
    "linear elu1": LINEAR["linear elu1"],
    "linear exp": LINEAR["linear exp"],
    "linear exp, gated": {**LINEAR["linear exp"], "decay": "gated", "input_gate": True},
    "gated_delta": {"mechanism": "gated_delta"},
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "aft local 32": {"mechanism": "aft", "variant": "local", "window_size": 32},
}
# Beyond these lengths a round takes too long.
LONGEST = {"aft full": 1024, "aft local 32": 512, "performer-pytorch": 512}


def alone(forms: Mapping[str, dict[str, Any]], is_causal: bool, length: int, with_backward: bool = False) -> Methods:
    """Attention by itself; what computes causal attention for others stands beside ours."""
    calls: dict[str, rivals.Call] = {SDPA: partial(rivals.sdpa, is_causal=is_causal)}
    calls |= {
        name: rivals.mechanism_call(is_causal, length, **settings)
        for name, settings in forms.items()
        if length <= LONGEST.get(name, length)
    }
    if is_causal:
        calls["linear elu1 in torch"] = rivals.in_torch(calls["linear elu1"])
        calls |= rivals.performer_pytorch() if length <= LONGEST["performer-pytorch"] else {}
    tensors = rivals.attention_inputs(length)
    gradient = torch.ones_like(tensors[0]) if with_backward else None
    return {name: partial(rivals.attend, call, tensors, gradient) for name, call in calls.items()}


def delta(rule: str, length: int, with_backward: bool = False) -> Methods:
    """The gated delta rule; a rule of one token continues a state."""
    calls = {TRANSFORMERS: rivals.transformers_delta(rule), "C": rivals.our_delta}
    calls["torch"] = rivals.in_torch(rivals.our_delta)
    tensors = rivals.delta_inputs(length)
    gradient = torch.ones_like(tensors[2]) if with_backward else None
    state = torch.randn(1, rivals.DELTA_HEADS, rivals.DELTA_DIM, rivals.DELTA_DIM) if length == 1 else None
    outputs = {name: lambda *x, call=call: call(*x, state=state)[0] for name, call in calls.items()}
    return {name: partial(rivals.attend, call, tensors, gradient) for name, call in outputs.items()}


def whole(
    call_of: Callable[[Any, int], Any], name: str, settings: dict[str, Any], length: int, controls: bool = False
) -> Methods:
    """A call of a whole model; as `controls` a copy, whose weights lie elsewhere in memory, and layers alone."""
    models = variants(name, settings)
    if controls:
        models |= {COPY: copy.deepcopy(models[SOFTMAX]), LEFT_OUT: without_attention(models["default"])}
    return {key: call_of(model, length) for key, model in models.items()}


def steps(name: str, context: int) -> Methods:
    """One token of a whole model behind a context."""
    models = variants(name, DEFAULT | LINEAR)
    return steps_of(models | {LEFT_OUT: without_attention(models["default"])}, context)


def in_both_types(call_of: Callable[[Any, str, int], Any], name: str, form: str, length: int) -> Methods:
    """A call of a whole model, in float32 and in bfloat16."""
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        made[str(dtype).removeprefix("torch.")] = call_of(variants(name, DEFAULT, dtype), form, length)
    return made


def compiled(name: str, context: int) -> Methods:
    """Eager and compiled steps, each with a static cache."""
    made = {}
    for key, model in variants(name, DEFAULT).items():
        for form, forward in (("eager", model), ("compiled", torch.compile(model, fullgraph=True))):
            cache = StaticCache(config=model.config, max_cache_len=context)
            with torch.inference_mode():
                model(torch.zeros(1, 1, dtype=torch.long), **cache_argument(model, cache))  # which makes its tensors
            made[f"{key}, {form}"] = step = decoder(forward, cache)
            step()  # which compiles it
    return made


def by_length(lengths: Sequence[int], make: Callable[..., Methods], label: str = "", **more: Any) -> dict[str, Any]:
    """A case for every length."""
    return {f"{label}{length:,}": partial(make, length=length, **more) for length in lengths}


def tables_of_attention(size: Callable[[int], int]) -> dict[str, Comparison]:
    """Attention by itself; `size` says how long what should have so many tokens is."""
    short, long = [size(512), size(1024), size(8192)], [size(512), size(2048), size(8192)]
    encoders, decoders = partial(alone, ENCODERS, False), partial(alone, DECODERS, True)
    chunks, one = partial(delta, "torch_chunk_gated_delta_rule"), partial(delta, "torch_recurrent_gated_delta_rule")
    backward = {"label": "with backward, ", "with_backward": True}
    return {
        "encoders": Comparison(
            "attention of encoders, tokens",
            SDPA,
            by_length(short, encoders) | by_length([size(512), size(2048)], encoders, **backward),
            {"window 128 + 1 (default)": [1, 1.5, 5, 1, 1]},
        ),
        "decoders": Comparison(
            "attention of decoders, tokens",
            SDPA,
            by_length(long, decoders) | by_length(long[:2], decoders, **backward),
            {"performer-pytorch": [None] * 5},
        ),
        "delta": Comparison(
            "gated delta rule, tokens",
            TRANSFORMERS,
            by_length([size(256), size(1024)], chunks)
            | by_length([size(256), size(1024)], chunks, **backward)
            | {"a step": partial(one, 1)},
        ),
    }


def tables_of_models(
    size: Callable[[int], int], large: str = LARGE, small: str = "Llama 15M", encoder: str = "MiniLM"
) -> dict[str, Comparison]:
    """Whole models: two decoders and an encoder."""
    reading, training, forms = partial(whole, forward_pass), partial(whole, training_step), DEFAULT | LINEAR
    more = {name: ENCODERS[name] for name in ("hybrid 64 + 1", "linformer 128", "nystrom 64")}
    more["linformer 128"] = {**more["linformer 128"], "projection": "mean-pool"}  # for any length
    texts, contexts = [size(n) for n in (64, 128, 256, 512, 2048, 8192)], [size(512), size(4096), size(32768)]
    read_text = partial(reading, name=encoder, settings=forms | more)
    part = f"{large}, 2 of 12 layers" if large == LARGE else large
    prefill = by_length([size(512), size(2048)], reading, f"{large}, ", name=large, settings=forms)
    prefill |= by_length([size(8192)], reading, f"{part}, ", name=part, settings=forms)
    prefill |= by_length([size(32768)], reading, f"{part}, ", name=part, settings=DEFAULT)
    trained = by_length([size(512), size(2048)], training, f"{encoder}, ", name=encoder, settings=forms)
    trained |= by_length([size(512), size(1024)], training, f"{large}, ", name=large, settings=DEFAULT)
    decoding = {f"{name}, {n:,}": partial(steps, name, n) for name in (small, large) for n in contexts}
    return {
        "minilm": Comparison(
            f"{encoder}, tokens of a text",
            SOFTMAX,
            by_length(texts[:4], read_text, controls=True) | by_length(texts[4:], read_text),
            {"default": [1, 1, 1, 1, 1.3, 1], COPY: [None] * 6, LEFT_OUT: [None] * 6},
        ),
        "prefill": Comparison("prefill, tokens", SOFTMAX, prefill),
        "steps": Comparison(
            "a step, tokens of context",
            SOFTMAX,
            decoding,
            {"default": [1, 1, 1, 1.1, 1, 1], LEFT_OUT: [None] * 6},
        ),
        "compiled": Comparison(
            f"a step of {small}, static cache of {size(512)} tokens",
            f"{SOFTMAX}, eager",
            {"a step": partial(compiled, small, size(512))},
        ),
        "training": Comparison("a training step, tokens", SOFTMAX, trained),
    }


def tables_of_bfloat16(
    size: Callable[[int], int], large: str = LARGE, encoder: str = "MiniLM", **_: str
) -> dict[str, Comparison]:
    """Whole models in bfloat16 over float32: converted by default, and the originals, whose products are torch's."""

    def read(models: Any, form: str, length: int) -> Callable[[], Any]:
        return forward_pass(models[form], length)

    def step(models: Any, form: str, context: int) -> Callable[[], Any]:
        return steps_of(models, context)[form]

    found = {}
    for form, aim in (("default", 1.6), (SOFTMAX, None)):
        texts = [size(64), size(512), size(2048)]
        cases = by_length(texts, partial(in_both_types, read, encoder, form), f"{encoder}, ")
        cases |= by_length(texts[1:], partial(in_both_types, read, large, form), f"{large}, ")
        cases |= by_length([size(512)], partial(in_both_types, step, large, form), f"{large}, a step at ")
        aims = {"bfloat16": [aim] * 5 + [None if aim is None else 1]}
        found[f"{form}_in_bfloat16"] = Comparison(f"bfloat16, {form}", "float32", cases, aims)
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure all tables, or some."""
    names = [*tables_of_attention(int), *tables_of_models(int), *tables_of_bfloat16(int)]
    arguments = parse(__doc__, argv, {"rounds": 1}, tables=names, rounds=25, seconds=5.0)
    unknown = set(arguments.tables) - set(names)
    if unknown:
        raise SystemExit(f"--tables: {', '.join(sorted(unknown))}; allowed are {', '.join(names)}")
    size, models = ((lambda n: 128 + n // 64), QUICK) if arguments.quick else (int, {})
    made = tables_of_attention(size) | tables_of_models(size, **models) | tables_of_bfloat16(size, **models)
    found = {name: measure(made[name], arguments.rounds, arguments.seconds) for name in arguments.tables}
    save(
        arguments,
        "speed",
        [shown for shown, _ in found.values()],
        milliseconds={name: times for name, (_, times) in found.items()},
    )


if __name__ == "__main__":
    main()
