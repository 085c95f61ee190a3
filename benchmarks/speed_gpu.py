"""Causal linear attention and decoding on a CUDA device, beside flash attention and fla's own kernels, in bfloat16.

    python -m benchmarks.speed_gpu

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
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.common import Table, Times, medians, parse, save, table, times_as_fast
from benchmarks.models import LARGE, LINEAR, steps_of, variants
from benchmarks.rivals import attend, mechanism_call, sdpa
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


HEADS, DIM = 16, 64
OURS, PLAIN_TORCH, SDPA, FLA = "linear elu1", "torch", "sdpa", "fla"
DEVICE = "cuda"
MODES = ("forward", "forward and backward")


def in_torch(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`call` as without the extra `gpu`."""

    def run(*inputs):
        with mock.patch.dict(IMPLEMENTATIONS, gpu_kernel=lambda *_: None):
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


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def peak_bytes(call: Callable[[], Any]) -> int:
    """New memory of one call on the device."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def device_times(functions: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Seconds on the device after three rounds in which kernels are compiled and chosen."""
    times: Times = {name: [] for name in functions}
    for number in range(rounds + 3):
        for name, function in functions.items():
            seconds = seconds_of(function)
            if number >= 3:
                times[name].append(seconds)
    return times


def rows_of(length: int, with_backward: bool, rounds: int) -> list[list[Any]]:
    """A row for each method: its time, the others' over it, its share of the roofline, and its peak of memory."""
    torch.manual_seed(0)
    # As a model hands them over: heads beside tokens in memory.
    shape = (1, length, HEADS, DIM)
    tensors = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    gradient = torch.ones_like(tensors[0]) if with_backward else None
    functions = {name: partial(attend, call, tensors, gradient) for name, call in calls().items()}
    times, target = device_times(functions, rounds), torch.empty_like(tensors[0])
    copy = statistics.median(device_times({"copy": lambda: target.copy_(tensors[0])}, rounds)["copy"])
    over = [times_as_fast(times, rival) if rival in times else {} for rival in (SDPA, FLA)]
    rows = []
    for name, seconds in medians(times).items():
        # Four tensors are moved, against the two of a copy.
        roofline = None if with_backward else 2 * copy / seconds
        ratios = (ratio.get(name) for ratio in over)
        rows.append([f"{length:,}", name, 1000 * seconds, *ratios, roofline, peak_bytes(functions[name]) / 1e6])
    return rows


@torch.inference_mode()
def decoding(contexts: list[int], rounds: int) -> Table:
    """Tokens a second behind contexts of several lengths."""
    models = {name: model.to(DEVICE) for name, model in variants(LARGE, LINEAR, torch.bfloat16).items()}
    rows = []
    with torch.device(DEVICE):
        for context in contexts:
            found = medians(device_times(steps_of(models, context), rounds))
            rows.append([f"{context:,}", *(1 / found[name] for name in models)])
    return table([f"{LARGE}, tokens/s at a context of", *models], rows)


def main(argv: list[str] | None = None) -> None:
    """Time the kernels and the steps of a whole model."""
    quick = {"lengths": [64, 128], "contexts": [64], "rounds": 1}
    defaults = {"lengths": [2**n for n in range(10, 18)], "contexts": [1024, 32768, 131072], "rounds": 20}
    arguments = parse(__doc__, argv, quick, **defaults)
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; run this where there is one (make bench is for a CPU)")
    tables = []
    for mode in MODES:
        header = [f"{mode}, tokens", "", "ms", "sdpa / it", "fla / it", "of the roofline", "MB at the peak"]
        rows = [row for n in arguments.lengths for row in rows_of(n, mode != "forward", arguments.rounds)]
        tables.append(table(header, rows))
    tables.append(decoding(arguments.contexts, arguments.rounds))
    save(arguments, "speed_gpu", tables, device=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
