"""Memory and time of reading a long prompt, against its length.

    python benchmarks/long_prompts.py --model_name_or_path OUT --lengths 8192 131072 1000000

Every row is a process of its own that loads the converted decoder, reads random tokens in one call of the model, as
`generate` does before its first token, and asks for the logits of the last one. Memory is the peak of the process
(VmHWM) beyond what it had after loading and one short call. Decoders read more than 8,192 tokens in chunks
(`long_inputs.py`), so it should not grow; `whole` switches that off. Without a model, a random Llama of 5 layers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import argument_parser, save_results, table, write
from benchmarks.speed_kernels import resident_bytes
from hf_linear_attention import convert, long_inputs


MEGABYTE = 2**20
MODES = ("in chunks", "whole")


def load(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    return convert(LlamaForCausalLM(config), mechanism="hybrid")


@torch.no_grad()
def measure(name: str | None, mode: str, length: int) -> dict[str, float]:
    """Bytes beyond those of the loaded model, and CPU seconds."""
    torch.set_num_threads(1)
    model = load(name)
    if mode == "whole":
        long_inputs.LONGEST_UNDIVIDED = length
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    model(ids[:, :256], logits_to_keep=1)
    before, start = resident_bytes("VmRSS"), time.process_time()
    model(ids, logits_to_keep=1)
    return {"bytes": resident_bytes("VmHWM") - before, "seconds": time.process_time() - start}


def in_a_process(name: str | None, mode: str, length: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--case", json.dumps([name, mode, length])]
    found = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def report(figures: dict[str, Any]) -> str:
    cells = [
        [mode, f"{int(length):,}", f"{row['bytes'] / MEGABYTE:.0f}", f"{row['seconds'] / int(length) * 1e6:.1f}"]
        for mode, found in figures["rows"].items()
        for length, row in found.items()
    ]
    return table(["", "tokens", "memory, MiB", "CPU us a token"], cells)


def plot(plt: Any, figures: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for mode, rows in figures["rows"].items():
        axis.plot([int(n) for n in rows], [row["bytes"] / MEGABYTE for row in rows.values()], "o-", label=mode)
    axis.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="memory beyond the model, MiB")
    axis.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model_name_or_path", help="a converted decoder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 65536, 262144, 1000000])
    parser.add_argument("--longest_whole", type=int, default=65536, help="the longest prompt that is read whole too")
    parser.add_argument("--case", help="what one process measures, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.case is not None:
        write(json.dumps(measure(*json.loads(arguments.case))))
        return
    if arguments.quick:
        arguments.lengths, arguments.longest_whole = [512, 9000], 512
    rows: dict[str, dict[str, Any]] = {mode: {} for mode in MODES}
    for length in arguments.lengths:
        for mode in MODES[: 1 + (length <= arguments.longest_whole)]:
            rows[mode][str(length)] = in_a_process(arguments.model_name_or_path, mode, length)
    figures = {"rows": rows}
    write(report(figures))
    save_results(arguments, "long_prompts", figures, plot)


if __name__ == "__main__":
    main()
