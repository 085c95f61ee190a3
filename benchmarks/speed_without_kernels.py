"""What a checkpoint takes where only torch and transformers are installed: no C kernels, against softmax (one thread).

    python -m benchmarks.speed_without_kernels

Ratios of sdpa's CPU time over ours, medians over rounds in which all take turns: the causal kernel forward and with
backward (12 heads of 64, feature map included), the prefill of a Llama of 15M parameters with random weights, and its
decoding of one token after a context. Above 1 we are faster. About two minutes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from benchmarks.common import parse, save, table, times_as_fast, times_in_turns
from benchmarks.speed_decoding import SMALL, decoder, random_cache, steps_of
from benchmarks.speed_kernels import DIM, SDPA, measure, mechanism_call, sdpa
from benchmarks.speed_models import SOFTMAX, forward_pass, variants
from hf_linear_attention.kernels import cpu as kernels_cpu


FORMS: dict[str, dict[str, Any]] = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp": {"mechanism": "linear", "feature_map": "exp", "num_features": DIM},
    "hybrid": {"mechanism": "hybrid", "num_features": DIM},
}


def kernel_ratios(length: int, with_backward: bool, rounds: int) -> dict[str, float]:
    """Softmax's time over that of each form; with backward, softmax is not timed beyond 4,096 tokens."""
    calls = {name: mechanism_call(**settings) for name, settings in FORMS.items()}
    times = measure({**calls, SDPA: sdpa}, length, with_backward, rounds)
    return times_as_fast(times, SDPA) if SDPA in times else {}


@torch.inference_mode()
def model_ratios(length: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Softmax's time over ours: prefill of `length` tokens, and a token after as many."""
    models = variants(SMALL, FORMS)
    prefill = times_in_turns({name: forward_pass(model, length) for name, model in models.items()}, rounds)
    steps = steps_of(models) | {SOFTMAX: decoder(models[SOFTMAX], random_cache(models[SOFTMAX], length))}
    return times_as_fast(prefill, SOFTMAX), times_as_fast(times_in_turns(steps, 5 * rounds), SOFTMAX)


def main(argv: list[str] | None = None) -> None:
    """Time all forms at every length."""
    quick = {"lengths": [64, 128], "rounds": 1}
    arguments = parse(__doc__, argv, quick, lengths=[512, 1024, 2048, 4096, 8192], rounds=2)
    rows: dict[tuple[str, str], list[Any]] = {}
    with mock.patch.object(kernels_cpu, "library", return_value=None):
        for length in arguments.lengths:
            prefill, token = model_ratios(length, arguments.rounds)
            modes = {
                "kernel, forward": kernel_ratios(length, False, arguments.rounds),
                "kernel, forward and backward": kernel_ratios(length, True, arguments.rounds),
                f"{SMALL}, prefill": prefill,
                f"{SMALL}, one token": token,
            }
            for mode, ratios in modes.items():
                for name in FORMS:
                    rows.setdefault((mode, name), []).append(ratios.get(name))
    header = [f"{SDPA} / ours, computed in torch", *map(str, arguments.lengths)]
    found = [[f"{mode}: {name}", *ratios] for (mode, name), ratios in rows.items()]
    save(arguments, "speed_without_kernels", [table(header, found)])


if __name__ == "__main__":
    main()
