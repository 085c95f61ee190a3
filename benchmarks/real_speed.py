"""Speed of conversions of a real decoder over their original's (one thread, CPU time).

    python -m benchmarks.real_speed --model SRC --students OUT... [--dtype bfloat16] [--prompts 2048 8192]

A prompt is read by the whole model, which returns the logits of its last token. A token is written by the original
behind a cache of random keys, and by a student behind a prompt of as many tokens, or of `FULL` if these are more. A
cell has the median over rounds of the original's time over the student's, and its quartiles.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import parse, save
from benchmarks.models import decoder, forward_pass, random_cache
from benchmarks.speed import Comparison, Methods, by_length, measure
from hf_linear_attention.attention.transformers_internals import cache_among


ORIGINAL = "original"
FULL = 4096  # tokens, which fill the states


def read(models: dict[str, Any], length: int) -> Methods:
    """A prompt, by each model."""
    return {name: forward_pass(model, length) for name, model in models.items()}


@torch.inference_mode()
def written(models: dict[str, Any], length: int) -> Methods:
    """A token, by each model behind a context."""
    prompt = torch.randint(models[ORIGINAL].config.vocab_size, (1, min(length, FULL)))
    caches = {
        name: random_cache(model, length)
        if name == ORIGINAL
        else cache_among(model(prompt, use_cache=True, logits_to_keep=1).values())
        for name, model in models.items()
    }
    return {name: decoder(model, caches[name]) for name, model in models.items()}


def main(argv: list[str] | None = None) -> None:
    """Measure both tables."""
    options = parse(
        __doc__,
        argv,
        {"rounds": 1, "prompts": [64], "contexts": [64]},
        model="",
        students=[""],
        dtype="float32",
        prompts=[2048, 8192],
        contexts=[512, 2048, 8192, 32768],
        rounds=15,
        seconds=120.0,
    )
    folders = {ORIGINAL: options.model} | {Path(folder).name: folder for folder in options.students}
    models = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype, trust_remote_code=True).eval()
        for name, folder in folders.items()
    }
    made = {
        "prompts": Comparison(
            "a prompt of so many tokens", ORIGINAL, by_length(options.prompts, partial(read, models))
        ),
        "contexts": Comparison(
            "a token behind so many", ORIGINAL, by_length(options.contexts, partial(written, models))
        ),
    }
    found = {name: measure(comparison, options.rounds, options.seconds) for name, comparison in made.items()}
    milliseconds = {name: times for name, (_, times) in found.items()}
    save(options, "real_speed", [shown for shown, _ in found.values()], milliseconds=milliseconds)


if __name__ == "__main__":
    main()
