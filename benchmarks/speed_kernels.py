"""Time and memory of the causal kernel against N, beside what users would take instead (one thread, CPU time).

    python -m benchmarks.speed_kernels

B = 1, 12 heads of 64, float32 (and bfloat16), elu1 included. `C` is the kernel that the installation built, `torch`
the same without it, `sdpa` torch's fused causal softmax, `performer-pytorch` its own causal kernel for CPUs (if
installed), `exp`, `decay` and `hybrid` the other forms of the same kernel, `default` hybrid with the settings of the
preset. All take turns in every round; ratios are medians over rounds. Also the share of the rate of a 1024^2 matrix
product in the same run that the kernel's floor of 4 F D per token and head (forward) or 14 F D (with backward) reaches,
and the peak of new memory in units of a `[B, H, N, D]` tensor, in a process of its own. About three minutes.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.common import (
    Times,
    in_a_process,
    median_ratio,
    medians,
    parse,
    peak_bytes,
    save,
    table,
    times_as_fast,
    times_in_turns,
    write,
)
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.registry import MECHANISMS


HEADS, DIM = 12, 64
OURS, PLAIN_TORCH, SDPA, PERFORMER = "C", "torch", "sdpa", "performer-pytorch"
VARIANTS: dict[str, dict[str, Any]] = {
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": DIM},
    "decay": {"mechanism": "linear", "feature_map": "elu1", "decay": "learned"},
    "hybrid": {"mechanism": "hybrid", "num_features": DIM},
    "default": {"mechanism": "hybrid", "num_features": DIM, "decay": "learned", "rope": "partial"}
    | {"trained_length": 2048, "rope_frequencies": 21},
}
MODES = ("forward", "forward and backward")
Call = Callable[..., torch.Tensor]
# Beyond these lengths one round takes too long, forward and with the backward pass.
LONGEST = {SDPA: (16384, 4096), PERFORMER: (4096, 1024), **dict.fromkeys(VARIANTS, (65536, 16384))}


def mechanism_call(is_causal: bool = True, max_length: int | None = None, **settings: Any) -> Call:
    """A fresh mechanism as `(query, key, value) -> [B, H, N, D]`; gates are computed from the keys."""
    checked = LinearAttentionSettings(settings, is_causal=is_causal, model_type="benchmark", max_length=max_length)
    rotary = Rotary(tuple(10000 ** (-2 * i / DIM) for i in range(DIM // 2))) if "rope" in settings else None
    shape = LayerShape(HEADS, HEADS, DIM, 0, max_length, hidden_size=HEADS * DIM, rotary=rotary)
    mechanism = MECHANISMS[settings["mechanism"]](checked, shape).eval()
    mechanism.reset_parameters()

    def call(query, key, value):
        inputs = MechanismInputs(query, key, value, None, DIM**-0.5, is_causal)
        if mechanism.needs_gates:
            inputs = inputs._replace(gates=mechanism.gates(key.transpose(1, 2).flatten(2)))
        if mechanism.needs_positions:
            inputs = inputs._replace(positions=torch.arange(query.shape[2], dtype=torch.int32)[None])
        return mechanism(inputs)[0].transpose(1, 2)

    return call


def in_torch(call: Call) -> Call:
    """`call` as where the package has no C kernels."""

    def run(*inputs):
        with mock.patch.object(kernels_cpu, "library", return_value=None):
            return call(*inputs)

    return run


def sdpa(query, key, value):
    """torch's fused causal softmax."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def performer_pytorch(query, key, value):
    """The causal kernel of performer-pytorch for CPUs, with elu1."""
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    return causal_linear_attention_noncuda(F.elu(query) + 1, F.elu(key) + 1, value)


def calls() -> dict[str, Call]:
    """Every method, by the name of its column."""
    ours = mechanism_call(mechanism="linear", feature_map="elu1")
    found = {OURS: ours, PLAIN_TORCH: in_torch(ours), SDPA: sdpa}
    if importlib.util.find_spec("performer_pytorch"):
        found[PERFORMER] = performer_pytorch
    return found | {name: mechanism_call(**settings) for name, settings in VARIANTS.items()}


def inputs(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values as models hand them over: heads beside each other in memory."""
    torch.manual_seed(0)
    return [torch.randn(1, length, HEADS, DIM).to(dtype).transpose(1, 2) for _ in range(3)]


def attend(call: Call, tensors: list[torch.Tensor], gradient: torch.Tensor | None = None) -> None:
    """One call, with the gradients of the inputs if that of the output is given."""
    if gradient is not None:
        call(*(tensor.detach().requires_grad_() for tensor in tensors)).backward(gradient)
    else:
        with torch.no_grad():
            call(*tensors)


def measure(methods: dict[str, Call], length: int, with_backward: bool, rounds: int) -> Times:
    """The times of the methods that are fast enough for this length, and of a matrix product."""
    tensors, matrix, rounds = inputs(length), torch.randn(1024, 1024), rounds if length <= 4096 else 2
    gradient = torch.ones_like(tensors[0]) if with_backward else None
    chosen = {n: call for n, call in methods.items() if length <= LONGEST.get(n, (length, length))[with_backward]}
    functions = {n: functools.partial(attend, call, tensors, gradient) for n, call in chosen.items()}
    # Not in turns with the others: whoever followed it would find nothing of its own in the cache.
    return times_in_turns(functions, rounds) | times_in_turns({"sgemm": lambda: matrix @ matrix}, rounds)


def share_of_sgemm(times: Times, name: str, length: int, with_backward: bool) -> float:
    """The rate of the kernel's floor over that of the matrix product."""
    floor = (14 if with_backward else 4) * DIM * DIM * HEADS * length
    return times_as_fast(times, "sgemm")[name] * floor / (2 * 1024**3)


def row(methods: dict[str, Call], length: int, with_backward: bool, rounds: int) -> list[Any]:
    """Milliseconds of each method, and the ratios."""
    times = measure(methods, length, with_backward, rounds)
    found = medians(times, 1e-3)
    faster = median_ratio(times[SDPA], times[OURS]) if SDPA in times else None
    return [length, *(found.get(name) for name in methods), faster, share_of_sgemm(times, OURS, length, with_backward)]


def half_row(length: int, rounds: int) -> list[Any]:
    """The forward pass in bfloat16, in turns with softmax and with float32."""
    ours, half, single = calls()[OURS], inputs(length, torch.bfloat16), inputs(length)
    functions = {OURS: lambda: attend(ours, half), "float32": lambda: attend(ours, single)}
    if length <= LONGEST[SDPA][0]:
        functions[SDPA] = lambda: attend(sdpa, half)
    times = times_in_turns(functions, rounds if length <= 4096 else 2)
    faster = {name: median_ratio(values, times[OURS]) for name, values in times.items()}
    return [length, statistics.median(times[OURS]) * 1e3, faster.get(SDPA), faster["float32"]]


def peak_tensors(name: str, length: int, mode: str) -> float:
    """New memory of one call at its peak, outputs included, in tensors `[B, H, N, D]`."""
    call, tensors = calls()[name], inputs(length)
    gradient = None if mode == "forward" else torch.ones_like(tensors[0])
    attend(call, inputs(128), gradient if gradient is None else gradient[:, :, :128])  # what only the first call takes
    return peak_bytes(lambda: attend(call, tensors, gradient)) / tensors[0].nbytes


def main(argv: list[str] | None = None) -> None:
    """Time the kernels, and measure their memory."""
    quick = {"lengths": [64, 128], "peak_lengths": [256], "rounds": 1}
    lengths = [128, 256, 512, 1024, 4096, 16384, 65536]
    defaults = {"lengths": lengths, "peak_lengths": [16384, 65536], "rounds": 5, "case": ""}
    arguments = parse(__doc__, argv, quick, **defaults)
    if arguments.case:
        write(json.dumps(peak_tensors(*json.loads(arguments.case))))
        return
    methods, tables = calls(), []
    for mode in MODES:
        rows = [row(methods, length, mode != "forward", arguments.rounds) for length in arguments.lengths]
        tables.append(table([f"{mode}, CPU ms", *methods, "sdpa / C", "C, of sgemm"], rows))
    rows = [half_row(length, arguments.rounds) for length in arguments.lengths]
    tables.append(table(["forward, bfloat16", "C, CPU ms", "sdpa / C", "C in float32 / C"], rows))
    module = "benchmarks.speed_kernels"
    rows = [
        [f"{name}, {mode}", *(in_a_process(module, [name, length, mode]) for length in arguments.peak_lengths)]
        for name in (OURS, PLAIN_TORCH)
        for mode in MODES
    ]
    header = ["peak of new memory, in [B, H, N, D] tensors, outputs included", *map(str, arguments.peak_lengths)]
    save(arguments, "speed_kernels", [*tables, table(header, rows)])


if __name__ == "__main__":
    main()
