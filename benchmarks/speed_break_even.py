"""From which length on each mechanism is faster than torch's fused softmax attention (one thread, CPU time).

    python -m benchmarks.speed_break_even

It times the forward pass of the attention alone, without the projections of a layer: a batch of 1, 12 heads of 64,
float32. The mechanism and softmax take turns; a ratio is the median over rounds of softmax's time over the mechanism's.
About three minutes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common import median_ratio, parse, save, table, times_in_turns
from benchmarks.speed_kernels import inputs, mechanism_call
from hf_linear_attention.mechanisms.registry import MECHANISMS


# The mechanism and its settings, by what the row is called.
ROWS: dict[str, dict[str, Any]] = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear relu": {"mechanism": "linear", "feature_map": "relu"},
    "linear taylor": {"mechanism": "linear", "feature_map": "taylor"},
    "linear exp 128": {"mechanism": "linear", "feature_map": "exp", "num_features": 128},
    "linear hedgehog 128": {"mechanism": "linear", "feature_map": "hedgehog", "num_features": 128},
    "linear t2r 64": {"mechanism": "linear", "feature_map": "t2r", "num_features": 64},
    "linear exp 128 gated": {"mechanism": "linear", "num_features": 128, "decay": "gated", "input_gate": True},
    "gated_delta": {"mechanism": "gated_delta"},
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128},
    "linformer_linear exp 128": {"mechanism": "linformer_linear", "feature_map": "exp", "projection_size": 128},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
    "latent 64": {"mechanism": "latent", "num_latents": 64},
    "aft simple": {"mechanism": "aft", "variant": "simple"},
    "aft local 32": {"mechanism": "aft", "variant": "local", "window_size": 32},
    "aft conv 32": {"mechanism": "aft", "variant": "conv", "window_size": 32},
    "aft full": {"mechanism": "aft", "variant": "full"},
    "hybrid 64 + 4": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4},
    "window 64 + 4": {"mechanism": "window", "window_size": 64, "num_sinks": 4},
    "window 128 + 1": {"mechanism": "window", "window_size": 128, "num_sinks": 1},
}
MODES = {"bidirectional": "encoders", "causal": "decoders"}
# Where softmax is four times as fast, one round will do at the next length.
CLEAR = 0.25


def supports(settings: dict[str, Any], mode: str) -> bool:
    """Whether the mechanism has this form."""
    mechanism = MECHANISMS[settings["mechanism"]]
    return mechanism.supports(mode, mechanism.filled(settings))


def break_even(lengths: list[int], ratios: list[float]) -> int | None:
    """The first length from which softmax is slower at every longer one too, None if at the longest it is not."""
    return next((n for place, n in enumerate(lengths) if min(ratios[place:]) >= 1), None)


@torch.no_grad()
def measure(settings: dict[str, Any], is_causal: bool, lengths: list[int], rounds: int) -> list[float]:
    """Softmax's time over the mechanism's at each length; fewer rounds where they take long."""
    call = mechanism_call(is_causal=is_causal, max_length=max(lengths), **settings)
    ratios: list[float] = []
    for length in lengths:
        tensors = inputs(length)
        functions = {
            "mechanism": lambda tensors=tensors: call(*tensors),
            "softmax": lambda tensors=tensors: F.scaled_dot_product_attention(*tensors, is_causal=is_causal),
        }
        is_slow = length > 2048 or (ratios and ratios[-1] < CLEAR)
        times = times_in_turns(functions, 1 if is_slow else min(rounds, 2) if length > 1024 else rounds)
        ratios.append(median_ratio(times["softmax"], times["mechanism"]))
    return ratios


def main(argv: list[str] | None = None) -> None:
    """Time every row, and print from which length it is faster."""
    quick = {"lengths": [64, 128], "rounds": 1}
    arguments = parse(__doc__, argv, quick, lengths=[128, 256, 512, 1024, 2048, 4096], rounds=3)
    lengths, ratios = arguments.lengths, {}
    for mode in MODES:
        ratios[mode] = {
            name: measure(settings, mode == "causal", lengths, arguments.rounds)
            for name, settings in ROWS.items()
            if supports(settings, mode)
        }
    save(arguments, "speed_break_even", [summary(lengths, ratios)], lengths=lengths, ratios=ratios)


def summary(lengths: list[int], ratios: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """From which length each row is faster, and how many times it is at the longest."""
    header = ["tokens from which it is faster than softmax"]
    for form in MODES.values():
        header += [form, f"times as fast at {lengths[-1]:,}"]
    rows = []
    for name in ROWS:
        row: list[Any] = [name]
        for mode in MODES:
            found = ratios[mode].get(name)
            length = break_even(lengths, found) if found else None
            row += [length or f"> {lengths[-1]:,}", found[-1]] if found else [None, None]
        rows.append(row)
    return table(header, rows)


if __name__ == "__main__":
    main()
