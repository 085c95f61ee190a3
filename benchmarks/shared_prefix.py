"""The time to the first token of a prompt whose beginning a `PromptStore` holds (one thread, CPU time).

    python -m benchmarks.shared_prefix

Llama 15M with random weights, converted with the default settings: a question of 32 tokens behind a prefix that an
earlier prompt had, with the prefix read again and with its state from the folder. The state is read from its file every
time, checked, and the store is opened anew as another process would. About a minute.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import medians, parse, save, table, times_as_fast, times_in_turns
from benchmarks.speed_models import MODELS
from hf_linear_attention import PromptStore, convert


QUESTION = 32
AGAIN, STORED = "the prefix read again, CPU ms", "its state from the folder, CPU ms"


def row(model: Any, length: int, rounds: int) -> list[Any]:
    """Milliseconds to the first token behind a prefix of `length` tokens, their ratio, and the bytes of its state."""
    torch.manual_seed(length)
    prefix = torch.randint(3, 32000, (1, length))
    prompts = [torch.cat([prefix, torch.randint(3, 32000, (1, QUESTION))], dim=1) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        PromptStore(model, folder, boundary=length).read(prompts[0])

        def first_token(cache: Any = None) -> torch.Tensor:
            return model.generate(prompts[1], past_key_values=cache, max_new_tokens=1, do_sample=False)

        def stored() -> torch.Tensor:
            return first_token(PromptStore(model, folder, boundary=length).read(prompts[1]))

        if not torch.equal(first_token(), stored()):
            raise SystemExit("the stored state gives another token")
        times = times_in_turns({AGAIN: first_token, STORED: stored}, rounds)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return [length, *medians(times, 1e-3).values(), times_as_fast(times, AGAIN)[STORED], size]


def main(argv: list[str] | None = None) -> None:
    """Time the first token behind prefixes of several lengths."""
    quick = {"lengths": [64, 128], "rounds": 1}
    arguments = parse(__doc__, argv, quick, lengths=[1024, 8192, 32768], rounds=5)
    torch.manual_seed(0)
    model = convert(MODELS["Llama 15M"]().eval())
    header = ["tokens of the prefix", AGAIN, STORED, "times sooner", "bytes of the state"]
    rows = [row(model, length, arguments.rounds) for length in arguments.lengths]
    save(arguments, "shared_prefix", [table(header, rows)])


if __name__ == "__main__":
    main()
