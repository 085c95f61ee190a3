"""Causal linear attention and decoding on a CUDA device, beside flash attention and fla's own kernels, in bfloat16.

    python benchmarks/speed_gpu.py --output_dir outputs/benchmarks

B = 1, 16 heads of 64. `linear elu1` is what a converted model runs, feature map and division included: with the extra
`gpu` on fla-core's kernels, `torch` without; `sdpa` is torch's fused causal softmax, `fla` its own normalised
`chunk_linear_attn` on the same features (only where fla-core is installed). All take turns in every round; ratios are
medians over rounds. Also the share of the memory roofline (q, k, v and the output moved once, at the rate of a copy in
the same run), the peak of new memory, and tokens a second of decoding at several lengths of the context. It needs a
CUDA device and refuses without one.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_decoding import LARGE, decoder, random_cache
from benchmarks.speed_kernels import mechanism_call, sdpa
from benchmarks.speed_models import LINEAR, SOFTMAX, variants
from hf_linear_attention import kernels_operators


HEADS, DIM = 16, 64
OURS, PLAIN_TORCH, SDPA, FLA = "linear elu1", "torch", "sdpa", "fla"
MODES = ("forward", "forward and backward")
DEVICE = "cuda"


def in_torch(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`call` as without the extra `gpu`."""

    def run(*inputs):
        with mock.patch.object(kernels_operators, "gpu_kernel", return_value=None):
            return call(*inputs)

    return run


def fla(query, key, value):
    """fla's own call, whose defaults are another scale and, in its other functions, no normalisation."""
    from fla.ops.linear_attn import chunk_linear_attn

    query, key = F.elu(query) + 1, F.elu(key) + 1
    inputs = (x.transpose(1, 2) for x in (query, key, value))
    return chunk_linear_attn(*inputs, scale=1.0, normalize=True)[0].transpose(1, 2)


def calls() -> dict[str, Callable[..., torch.Tensor]]:
    ours = mechanism_call(mechanism="linear", feature_map="elu1")
    found = {OURS: ours, PLAIN_TORCH: in_torch(ours), SDPA: sdpa}
    return found | ({FLA: fla} if importlib.util.find_spec("fla") else {})


def attend(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor], with_backward: bool) -> None:
    if with_backward:
        output = call(*(tensor.detach().requires_grad_() for tensor in tensors))
        output.backward(torch.ones_like(output))
    else:
        with torch.no_grad():
            call(*tensors)


def seconds_of(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def peak_bytes(call: Callable[[], Any]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def times_in_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds on the device after three rounds in which kernels are compiled and chosen."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 3):
        for name, function in functions.items():
            seconds = seconds_of(function)
            if number >= 3:
                times[name].append(seconds)
    return times


def measure(length: int, with_backward: bool, rounds: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    # As a model hands them over: heads beside tokens in memory.
    shape = (1, length, HEADS, DIM)
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    functions = {name: lambda call=call: attend(call, tensors, with_backward) for name, call in calls().items()}
    times = times_in_turns(functions, rounds)
    target = torch.empty_like(tensors[0])
    copy_seconds = statistics.median(times_in_turns({"copy": lambda: target.copy_(tensors[0])}, rounds)["copy"])
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds": seconds,
        "over it": {
            base: {name: median_ratio(times[base], values) for name, values in times.items()} for base in times
        },
        # four tensors against the two of a copy
        "share of the roofline": {name: 2 * copy_seconds / value for name, value in seconds.items()},
        "peak": {name: peak_bytes(function) for name, function in functions.items()},
    }


@torch.inference_mode()
def measure_decoding(contexts: list[int], rounds: int, device: str) -> dict[str, Any]:
    models = {name: model.to(device) for name, model in variants(LARGE, LINEAR, torch.bfloat16).items()}
    results = {}
    with torch.device(device):
        tokens = torch.zeros(1, 16, dtype=torch.long)
        steps = {
            name: decoder(model, model(tokens, use_cache=True).past_key_values)
            for name, model in models.items()
            if name != SOFTMAX
        }
        for context in contexts:
            steps[SOFTMAX] = decoder(models[SOFTMAX], random_cache(models[SOFTMAX], context))
            times = times_in_turns(steps, rounds)
            results[context] = {name: 1 / statistics.median(values) for name, values in times.items()}
    return results


def report(figures: dict[str, Any]) -> str:
    parts = [figures["device"]]
    for mode in MODES:
        rows = [
            [
                f"{length:,}",
                name,
                f"{1000 * seconds:.3f}",
                f"{result['over it'][SDPA][name]:.2f}x",
                f"{result['over it'][FLA][name]:.2f}x" if FLA in result["over it"] else None,
                f"{100 * result['share of the roofline'][name]:.0f} %" if mode == "forward" else None,
                f"{result['peak'][name] / 1e6:,.0f}",
            ]
            for length, result in figures[mode].items()
            for name, seconds in result["seconds"].items()
        ]
        header = [f"{mode}, tokens", "", "ms", "sdpa / it", "fla / it", "of the roofline", "MB at the peak"]
        parts.append(table(header, rows))
    names = list(next(iter(figures["decoding"].values())))
    rows = [[f"{context:,}", *(f"{r[name]:,.0f}" for name in names)] for context, r in figures["decoding"].items()]
    return "\n\n".join([*parts, table([f"{LARGE}, tokens/s at a context of", *names], rows)])


def plot(plt, figures):
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axis, mode in zip(axes, MODES):
        for name in next(iter(figures[mode].values()))["seconds"]:
            values = [1000 * result["seconds"][name] for result in figures[mode].values()]
            axis.plot(list(figures[mode]), values, marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=mode)
    for name in next(iter(figures[MODES[1]].values()))["peak"]:
        values = [result["peak"][name] / 1e6 for result in figures[MODES[1]].values()]
        axes[2].plot(list(figures[MODES[1]]), values, marker="o", markersize=3, label=name)
    axes[2].set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB at the peak", title=MODES[1])
    axes[2].legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 18)])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; run this where there is one (make bench is for a CPU)")
    if arguments.quick:
        arguments.lengths, arguments.contexts, arguments.rounds = [64, 128], [64], 1
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for mode in MODES:
        figures[mode] = {
            length: measure(length, mode != "forward", arguments.rounds, DEVICE) for length in arguments.lengths
        }
    figures["decoding"] = measure_decoding(arguments.contexts, arguments.rounds, DEVICE)
    write(report(figures))
    save_results(arguments, "speed_gpu", figures, plot)


if __name__ == "__main__":
    main()
