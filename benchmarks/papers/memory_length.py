"""Memory of one bidirectional attention layer beyond its inputs and its output, at 8,192 and at 65,536 tokens.

    python -m benchmarks.papers.memory_length
    HF_LINEAR_ATTENTION_BACKEND=torch python -m benchmarks.papers.memory_length --rows "linear, exp" "performer"

Linear attention of an encoder needs two passes over the tokens, sums and outputs, and none of its intermediate results
has to be as long as the input. Every figure is the peak of a process of its own. The last column is the ratio of both
lengths: 1 for memory that is constant in the length, 8 for memory that grows with it. The second command measures some
rows in torch instead of the C kernels.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.common import in_a_process, parse, peak_bytes, save, table, write
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS


HEADS, HEAD_DIM = 12, 32  # of MiniLM
SETTINGS: dict[str, dict[str, Any]] = {
    "linear, exp": {"mechanism": "linear", "feature_map": "exp"},
    "linear, elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "performer": {"mechanism": "performer"},
    "performer, mixing": {"mechanism": "performer", "uniform_mixing": 0.1},
    "hybrid": {"mechanism": "hybrid"},
    "linformer, mean-pool": {"mechanism": "linformer", "projection": "mean-pool"},
    "nystrom": {"mechanism": "nystrom"},
}


@torch.no_grad()
def measure(name: str, tokens: int) -> float:
    """The MiB that one call needs beyond inputs and output."""
    settings = LinearAttentionSettings(SETTINGS[name], max_length=tokens)
    mechanism = MECHANISMS[settings["mechanism"]](settings, LayerShape(HEADS, HEADS, HEAD_DIM, 0, tokens))
    mechanism.reset_parameters()

    def inputs(count: int) -> list[torch.Tensor]:
        # The heads are a view of each token's features, as projections give them.
        return [torch.randn(1, count, HEADS, HEAD_DIM).transpose(1, 2) for _ in range(3)]

    def call(given: list[torch.Tensor]) -> torch.Tensor:
        return mechanism(MechanismInputs(*given, None, HEAD_DIM**-0.5, is_causal=False))[0]

    call(inputs(64))  # loads the library, and makes what is made once
    given = inputs(tokens)
    return (peak_bytes(lambda: call(given)) - given[0].nbytes) / 2**20


def main(argv: list[str] | None = None) -> None:
    """Measure every row at two lengths."""
    defaults = {"rows": list(SETTINGS), "lengths": [8192, 65536], "case": ""}
    arguments = parse(__doc__, argv, {"lengths": [512, 4096]}, **defaults)
    if arguments.case:
        write(json.dumps(measure(*json.loads(arguments.case))))
        return
    rows = []
    for name in arguments.rows:
        found = [in_a_process("benchmarks.papers.memory_length", [name, length]) for length in arguments.lengths]
        rows.append([name, *found, found[-1] / found[0]])
    header = ["MiB beyond inputs and output", *(f"{length:,} tokens" for length in arguments.lengths), "ratio"]
    save(arguments, "memory_length", [table(header, rows)])


if __name__ == "__main__":
    main()
