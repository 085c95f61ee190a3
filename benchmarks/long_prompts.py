"""Memory and time of reading a long prompt, against its length.

    python -m benchmarks.long_prompts --model_name_or_path OUT --lengths 8192 131072 1000000

Every row is a process of its own that loads the converted decoder, reads random tokens in one call of the model, as
`generate` does before its first token, and asks for the logits of the last one. Memory is the peak of the process
beyond what it had after loading and one short call. Decoders read more than 8,192 tokens in chunks
(`long_inputs.py`), so it should not grow; `whole` switches that off. Without a model, a random Llama of 5 layers.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import in_a_process, parse, peak_bytes, save, table, write
from hf_linear_attention import convert
from hf_linear_attention.attention import long_inputs


def load(name: str | None) -> Any:
    """The model in a folder, or a random one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    return convert(LlamaForCausalLM(config), mechanism="hybrid")


@torch.no_grad()
def measure(name: str | None, mode: str, length: int) -> list[float]:
    """MiB beyond the loaded model, and CPU microseconds a token."""
    model = load(name)
    if mode == "whole":
        long_inputs.LONGEST_UNDIVIDED = length
    ids = torch.randint(5, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    model(ids[:, :256], logits_to_keep=1)
    start = time.process_time()
    peak = peak_bytes(lambda: model(ids, logits_to_keep=1))
    return [peak / 2**20, (time.process_time() - start) / length * 1e6]


def main(argv: list[str] | None = None) -> None:
    """Measure every length in chunks, and the shorter ones whole."""
    quick = {"lengths": [512, 9000], "longest_whole": 512}
    defaults = {"model_name_or_path": None, "lengths": [8192, 65536, 262144, 1000000], "longest_whole": 65536}
    arguments = parse(__doc__, argv, quick, **defaults, case="")
    if arguments.case:
        write(json.dumps(measure(*json.loads(arguments.case))))
        return
    cases = [("in chunks", length) for length in arguments.lengths]
    cases += [("whole", length) for length in arguments.lengths if length <= arguments.longest_whole]
    name = arguments.model_name_or_path
    rows = [[*case, *in_a_process("benchmarks.long_prompts", [name, *case])] for case in cases]
    save(arguments, "long_prompts", [table(["", "tokens", "memory, MiB", "CPU us a token"], rows)])


if __name__ == "__main__":
    main()
