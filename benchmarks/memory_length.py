"""Memory of one bidirectional attention layer beyond its inputs and its output, at 8,192 and at 65,536 tokens.

    python benchmarks/memory_length.py
    HF_LINEAR_ATTENTION_BACKEND=torch python benchmarks/memory_length.py --rows "linear, exp" "performer"

Linear attention of an encoder needs two passes over the tokens, sums and outputs, and none of its intermediate results
has to be as long as the input. Every row is a process of its own, which reads its peak from the kernel (VmHWM). Beyond
means that peak, less the memory before the call and the output that the call returns. The last column is the ratio of
both lengths: 1 for memory that is constant in the length, 8 for memory that grows with it. The second command measures
some rows in torch instead of the C kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanism import LayerShape
from hf_linear_attention.mechanisms import MECHANISMS


HEADS, HEAD_DIM = 12, 32  # of MiniLM
MEGABYTE = 2**20
SETTINGS: dict[str, dict[str, Any]] = {
    "linear, exp": {"mechanism": "linear", "feature_map": "exp"},
    "linear, elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "performer": {"mechanism": "performer"},
    "performer, mixing": {"mechanism": "performer", "uniform_mixing": 0.1},
    "hybrid": {"mechanism": "hybrid"},
    "linformer, mean-pool": {"mechanism": "linformer", "projection": "mean-pool"},
    "nystrom": {"mechanism": "nystrom"},
}


def peak(name: str) -> int:
    """The field of this process in bytes: VmHWM, the largest resident memory so far, or VmRSS, that of now."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


@torch.no_grad()
def measure(name: str, tokens: int) -> int:
    """The bytes that one call needs beyond inputs and output."""
    settings = LinearAttentionSettings(SETTINGS[name], max_length=tokens)
    mechanism = MECHANISMS[settings["mechanism"]](settings, LayerShape(HEADS, HEADS, HEAD_DIM, 0, tokens))
    mechanism.reset_parameters()
    generator = torch.Generator().manual_seed(0)

    def inputs(count: int) -> tuple[torch.Tensor, ...]:
        # The heads are a view of each token's features, as projections give them.
        parts = (torch.randn(1, count, HEADS, HEAD_DIM, generator=generator) for _ in range(3))
        return tuple(part.transpose(1, 2) for part in parts)

    def call(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return mechanism(*given, attention_mask=None, is_causal=False, scaling=HEAD_DIM**-0.5, state=None)[0]

    call(inputs(64))  # loads the library, and makes what is made once
    given = inputs(tokens)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = peak("VmRSS")
    output = call(given)
    return peak("VmHWM") - before - output.nbytes


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case is not None:
        write(str(measure(arguments.case, arguments.tokens)))
        return
    sizes = (512, 4096) if arguments.quick else (8192, 65536)
    figures: dict[str, Any] = {"megabytes": {}}
    for name in arguments.rows:
        found = []
        for tokens in sizes:
            command = [sys.executable, __file__, "--case", name, "--tokens", str(tokens)]
            found.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / MEGABYTE)
        figures["megabytes"][name] = dict(zip(map(str, sizes), found, strict=True))
    rows = [
        (name, *(f"{size:.1f}" for size in found.values()), f"{found[str(sizes[1])] / found[str(sizes[0])]:.2f}")
        for name, found in figures["megabytes"].items()
    ]
    write(table(("MiB beyond inputs and output", *(f"{size:,} tokens" for size in sizes), "ratio"), rows))
    save_results(arguments, "memory_length", figures, plot)


def plot(plt: Any, figures: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, found in figures["megabytes"].items():
        axis.plot([int(size) for size in found], list(found.values()), marker="o", label=name)
    axis.set_xlabel("tokens")
    axis.set_ylabel("MiB beyond inputs and output")
    axis.legend()
    return figure


if __name__ == "__main__":
    main()
