"""Time and memory of the causal kernel against N, beside what users would take instead (one thread, CPU time).

    python benchmarks/speed_kernels.py --output_dir outputs/benchmarks
    python benchmarks/speed_kernels.py --sgemm --lengths 4096 --rounds 15
    python benchmarks/speed_kernels.py --threads 2 --lengths 4096 --rounds 15

B = 1, 12 heads of 64, float32 (and bfloat16), elu1 included. `C` is the kernel that the installation built, `torch`
the same without it, `sdpa` torch's fused causal softmax, `performer-pytorch` and `fast-transformers` their
own causal kernels for CPUs (if installed; the latter asks for CUDA, unless only its CPU source is built), `exp`,
`decay` and `hybrid` the other forms of the same kernel, `default` hybrid with the settings of the preset. All take
turns in every round; ratios are medians over rounds. Also the share of the rate of a 1024^2 matrix product in the same
run that the kernel's floor of 4 F D per token and head (forward) or 14 F D (with backward) reaches, and the peak of new
memory in units of a `[B, H, N, D]` tensor, without the incoming gradient, in a process of its own. About three minutes.

`--sgemm` measures only that share, product and kernel in turns, and how much faster bfloat16 is than float32.
`--threads` measures only how much faster several threads are than one, by the clock, so on an idle machine.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.common import argument_parser, interleaved_times, median_ratio, save_results, table, write
from hf_linear_attention import kernels_cpu
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanism import AttentionMechanism, LayerShape, Rotary
from hf_linear_attention.mechanisms import MECHANISMS


HEADS, DIM = 12, 64
OURS, PLAIN_TORCH, SDPA, SINGLE = "C", "torch", "sdpa", "C in float32"
VARIANTS: dict[str, dict[str, Any]] = {
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": DIM},
    "decay": {"mechanism": "linear", "feature_map": "elu1", "decay": "learned"},
    "hybrid": {"mechanism": "hybrid", "num_features": DIM},
    "default": {"mechanism": "hybrid", "num_features": DIM, "decay": "learned", "rope": "partial"}
    | {"trained_length": 2048, "rope_frequencies": 21},
}
Call = Callable[..., torch.Tensor]
# Beyond these lengths one round takes too long.
LONGEST = {
    SDPA: 16384,
    "sdpa, backward": 4096,
    "performer-pytorch": 4096,
    "performer-pytorch, backward": 1024,
    "fast-transformers": 16384,
    **{f"{name}, backward": 16384 for name in ("exp", "decay", "hybrid", "default")},
}


def mechanism_of(is_causal: bool = True, max_length: int | None = None, **settings) -> AttentionMechanism:
    """As in a freshly converted model."""
    checked = LinearAttentionSettings(settings, is_causal=is_causal, model_type="benchmark", max_length=max_length)
    rotary = Rotary(tuple(10000 ** (-2 * i / DIM) for i in range(DIM // 2))) if "rope" in settings else None
    shape = LayerShape(HEADS, HEADS, DIM, 0, max_length, hidden_size=HEADS * DIM, rotary=rotary)
    mechanism = MECHANISMS[settings["mechanism"]](checked, shape).eval()
    mechanism.reset_parameters()
    return mechanism


def mechanism_call(is_causal: bool = True, max_length: int | None = None, **settings) -> Call:
    """`mechanism_of` these settings as `(query, key, value) -> [B, H, N, D]`; gates are computed from the keys."""
    mechanism = mechanism_of(is_causal, max_length, **settings)

    def call(query, key, value):
        options = {"attention_mask": None, "scaling": DIM**-0.5, "is_causal": is_causal, "state": None}
        if mechanism.needs_gates:
            options["gates"] = mechanism.gates(key.transpose(1, 2).flatten(2))
        if mechanism.needs_positions:
            options["positions"] = torch.arange(query.shape[2], dtype=torch.int32)[None]
        return mechanism(query, key, value, **options)[0].transpose(1, 2)

    return call


def in_torch(call: Call) -> Call:
    """`call` as where the package has no C kernels."""

    def run(*inputs):
        with mock.patch.object(kernels_cpu, "library", return_value=None):
            return call(*inputs)

    return run


def sdpa(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def performer_pytorch(query, key, value):
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    return causal_linear_attention_noncuda(F.elu(query) + 1, F.elu(key) + 1, value)


def fast_transformers(query, key, value):
    """What its CausalLinearAttention computes between projections: tokens before heads, its epsilon, its copies."""
    from fast_transformers.causal_product import causal_dot_product

    query, key, value = (x.transpose(1, 2) for x in (F.elu(query) + 1, F.elu(key) + 1, value))
    total = torch.einsum("nlhi,nlhi->nlh", query, key.cumsum(1)) + 1e-6
    product = causal_dot_product(*(x.transpose(1, 2).contiguous() for x in (query, key, value)))
    return (product.transpose(1, 2).contiguous() / total[..., None]).transpose(1, 2)


def calls() -> dict[str, Call]:
    ours = mechanism_call(mechanism="linear", feature_map="elu1")
    found = {OURS: ours, PLAIN_TORCH: in_torch(ours), SDPA: sdpa}
    if importlib.util.find_spec("performer_pytorch"):
        found["performer-pytorch"] = performer_pytorch
    if importlib.util.find_spec("fast_transformers"):
        found["fast-transformers"] = fast_transformers
    return found | {name: mechanism_call(**settings) for name, settings in VARIANTS.items()}


def inputs(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values as models hand them over: heads beside each other in memory."""
    torch.manual_seed(0)
    return [torch.randn(1, length, HEADS, DIM).to(dtype).transpose(1, 2) for _ in range(3)]


def attend(call: Call, tensors, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        with torch.no_grad():
            call(*tensors)
        return
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    call(*tensors).backward(gradient)


def cpu_times(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """As `interleaved_times`, in CPU seconds: a shared machine's other work does not count."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if number:
                times[name].append(time.process_time() - start)
    return times


def matrix_product_rate(rounds: int = 5) -> float:
    """Multiply-adds per CPU second, times two, of a 1024 x 1024 product in float32."""
    matrix = torch.randn(1024, 1024)
    seconds = cpu_times({"product": lambda: matrix @ matrix}, rounds)["product"]
    return 2 * 1024**3 / statistics.median(seconds)


def measure(
    length: int, with_backward: bool, rounds: int, methods: dict[str, Call], dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    tensors = inputs(length, dtype)
    gradient = torch.ones_like(tensors[0]) if with_backward else None

    def is_short_enough(name: str) -> bool:
        limits = (LONGEST.get(name, length), LONGEST.get(f"{name}, backward", length) if with_backward else length)
        return length <= min(limits)

    chosen = {name: call for name, call in methods.items() if is_short_enough(name)}
    times = cpu_times(
        {name: lambda call=call: attend(call, tensors, gradient) for name, call in chosen.items()}, rounds
    )
    flops = (14 if with_backward else 4) * DIM * DIM * HEADS * length
    seconds = {name: statistics.median(values) for name, values in times.items()}
    rate = matrix_product_rate()
    ours = [name for name in (OURS, PLAIN_TORCH) if name in times]
    over = {f"over {our}": {name: median_ratio(values, times[our]) for name, values in times.items()} for our in ours}
    shares = {name: flops / seconds[name] / rate for name in ours}
    return {"seconds": seconds, **over, "share of sgemm": shares, "sgemm": rate}


def measure_half(length: int, rounds: int) -> dict[str, Any]:
    """The forward pass in bfloat16, in turns with that in float32."""
    ours, single = calls()[OURS], inputs(length)
    methods = {OURS: ours, SDPA: sdpa, SINGLE: lambda *_: ours(*single)}
    return measure(length, False, rounds, methods, torch.bfloat16)


def shares_of_sgemm(lengths: list[int], rounds: int) -> str:
    """Per length and direction: share of a matrix product's rate in float32, and float32's time over bfloat16's."""
    call, matrix, rows = mechanism_call(mechanism="linear", feature_map="elu1"), torch.randn(1024, 1024), []
    for length in lengths:
        tensors = {dtype: inputs(length, dtype) for dtype in (torch.float32, torch.bfloat16)}
        for mode, floor in (("forward", 4), ("forward and backward", 14)):
            functions: dict[str, Callable[[], Any]] = {"sgemm": lambda: matrix @ matrix}
            for dtype, given in tensors.items():
                gradient = None if mode == "forward" else torch.ones_like(given[0])
                functions[str(dtype)] = lambda given=given, gradient=gradient: attend(call, given, gradient)
            product, single, half = cpu_times(functions, rounds).values()
            share = median_ratio(product, single) * floor * DIM * DIM * HEADS * length / (2 * 1024**3)
            rate = 2 * 1024**3 / statistics.median(product) / 1e9
            rows.append([length, mode, f"{rate:.0f}", f"{100 * share:.0f} %", ratio_text(median_ratio(single, half))])
    return table(["N", "", "sgemm, GFLOP/s", "of sgemm", "float32 / bfloat16"], rows)


def speedups_of_threads(threads: int, lengths: list[int], rounds: int) -> str:
    """Seconds by the clock of one thread over those of `threads`, for a batch of 1 and of 8."""
    call, rows = mechanism_call(mechanism="linear", feature_map="elu1"), []

    def run(count: int, tensors: list[torch.Tensor], gradient: torch.Tensor | None) -> None:
        torch.set_num_threads(count)
        attend(call, tensors, gradient)

    for length, batch in itertools.product(lengths, (1, 8)):
        tensors = [x.expand(batch, -1, -1, -1).clone() for x in inputs(length)]
        for mode in ("forward", "forward and backward"):
            gradient = None if mode == "forward" else torch.ones_like(tensors[0])
            functions = {str(count): functools.partial(run, count, tensors, gradient) for count in (1, threads)}
            one, many = interleaved_times(functions, rounds).values()
            rows.append([length, batch, mode, ratio_text(median_ratio(one, many))])
    return table(["N", "batch", "", f"1 thread / {threads}"], rows)


def peak_tensors(name: str, length: int, with_backward: bool) -> float:
    """New memory of one call at its peak, outputs included, in tensors `[B, H, N, D]`; in a process of its own."""
    command = [sys.executable, __file__, "--peak_of", name, "--lengths", str(length)]
    result = subprocess.run(
        command + ["--with_backward"] * with_backward, capture_output=True, text=True, check=True, timeout=600
    )
    return float(result.stdout.split()[-1])


def print_peak(name: str, length: int, with_backward: bool) -> None:
    call, tensors = calls()[name], inputs(length)
    gradient = torch.ones_like(tensors[0]) if with_backward else None
    short = None if gradient is None else gradient[:, :, :128]
    attend(call, [tensor[:, :, :128] for tensor in tensors], short)  # what only the first call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is forgotten
    before = resident_bytes("VmRSS")
    attend(call, tensors, gradient)
    peak = resident_bytes("VmHWM") - before
    write(str(peak / (tensors[0].numel() * tensors[0].element_size())))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def report(figures: dict[str, Any]) -> str:
    parts = []
    for mode in ("forward", "forward and backward"):
        rows = []
        names = list(next(iter(figures[mode].values()))["seconds"])
        for length, result in figures[mode].items():
            rows.append(
                [
                    f"{int(length):,}",
                    *(_milliseconds(result["seconds"].get(name)) for name in names),
                    *(ratio_text(result[f"over {name}"].get(SDPA)) for name in (OURS, PLAIN_TORCH)),
                    *(f"{100 * result['share of sgemm'][name]:.0f} %" for name in (OURS, PLAIN_TORCH)),
                ]
            )
        header = ["sdpa / C", "sdpa / torch", "C, of sgemm", "torch, of sgemm"]
        parts.append(table([f"{mode}, CPU ms", *names, *header], rows))
    header = ["forward, bfloat16, CPU ms", OURS, SDPA, "sdpa / C", f"{SINGLE} / {OURS}"]
    parts.append(table(header, _half_rows(figures)))
    rows = [[name, *values] for name, values in figures["peak"].items()]
    header = ["peak of new memory, in [B, H, N, D] tensors, outputs included"]
    parts.append(table([*header, *(f"{length:,}" for length in figures["peak lengths"])], rows))
    return "\n\n".join(parts)


def _half_rows(figures: dict[str, Any]) -> list[list[Any]]:
    return [
        [
            f"{int(n):,}",
            *(_milliseconds(result["seconds"].get(name)) for name in (OURS, SDPA)),
            ratio_text(result["over C"].get(SDPA)),
            f"{result['over C'][SINGLE]:.2f}x",
        ]
        for n, result in figures["bfloat16"].items()
    ]


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f}"


def ratio_text(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}x"


def plot(plt, figures):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axis, mode in zip(axes, ("forward", "forward and backward")):
        for name in next(iter(figures[mode].values()))["seconds"]:
            points = [(int(n), result["seconds"].get(name)) for n, result in figures[mode].items()]
            points = [(n, value) for n, value in points if value is not None]
            axis.plot(*zip(*points), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=mode)
    axes[0].set_ylabel("CPU seconds, one thread")
    axes[1].legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak_lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--peak_of", choices=tuple(calls()), help="print the peak memory of this one and nothing else")
    parser.add_argument("--with_backward", action="store_true", help="of --peak_of")
    parser.add_argument("--sgemm", action="store_true", help="measure only the share of a matrix product's rate")
    parser.add_argument("--threads", type=int, help="measure only what so many threads are faster than one")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.peak_of:
        print_peak(arguments.peak_of, arguments.lengths[0], arguments.with_backward)
        return
    if arguments.quick:
        arguments.lengths, arguments.peak_lengths, arguments.rounds = [64, 128], [], 1
    if arguments.sgemm:
        write(shares_of_sgemm(arguments.lengths, arguments.rounds))
        return
    if arguments.threads:
        write(speedups_of_threads(arguments.threads, arguments.lengths, arguments.rounds))
        return
    methods, figures = calls(), {"peak lengths": arguments.peak_lengths}
    for mode in ("forward", "forward and backward"):
        figures[mode] = {
            str(length): measure(length, mode != "forward", arguments.rounds if length <= 4096 else 2, methods)
            for length in arguments.lengths
        }
    figures["bfloat16"] = {str(n): measure_half(n, arguments.rounds if n <= 4096 else 2) for n in arguments.lengths}
    figures["peak"] = {
        f"{name}, {mode}": [round(peak_tensors(name, n, mode != "forward"), 2) for n in arguments.peak_lengths]
        for name in (OURS, PLAIN_TORCH)
        for mode in ("forward", "forward and backward")
    }
    write(report(figures))
    save_results(arguments, "speed_kernels", figures, plot)


if __name__ == "__main__":
    main()
