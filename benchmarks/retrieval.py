"""Key-value retrieval with the caches that kvpress compresses: the rivals of `python -m benchmarks.real --pairs`.

    uv venv .venv-kvpress
    uv pip install --python .venv-kvpress torch==2.13.0 kvpress==0.5.5
    .venv-kvpress/bin/python -m benchmarks.retrieval MODEL --pairs 45 --tokens 512

A context is a JSON object of random pairs (Liu et al. 2023, arXiv:2307.03172), and each question asks for the value of
one of its keys. "found" is the share of values of which every token is the most likely one after the true ones before
it. A press reads the whole object with a full cache, which is its peak of memory, and then keeps `--tokens` keys of
each head, before it has seen a question; each question is asked of that cache. kvpress needs an older transformers, so
it has an environment of its own, and this file imports nothing of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


CONTEXTS, ASKED = 2, 10
PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KeyDiffPress", "StreamingLLMPress")


class Question(NamedTuple):
    """The tokens of a question, of its answer, and of what stands behind it."""

    words: list[int]
    value: list[int]
    end: list[int]


class Context(NamedTuple):
    """The tokens of a JSON object, and questions."""

    words: list[int]
    questions: list[Question]


def retrieval(tokenizer: Any, pairs: int) -> list[Context]:
    """Contexts of so many pairs; the keys that are asked for stand evenly in the object."""
    contexts, draw = [], random.Random(0)
    for _ in range(CONTEXTS):
        names = [[str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(pairs)] for _ in range(2)]
        given = dict(zip(*names, strict=True))
        text = f"Find the value of the given key in this JSON object.\n\n{json.dumps(given, indent=0)}\n"
        questions = []
        for key in names[0][:: max(1, pairs // ASKED)][:ASKED]:
            parts = f'\nKey: "{key}"\nValue: "', given[key], '"'
            questions.append(Question(*(tokenizer(x, add_special_tokens=False)["input_ids"] for x in parts)))
        contexts.append(Context(list(tokenizer(text)["input_ids"]), questions))
    return contexts


@torch.no_grad()
def values_found(model: Any, contexts: list[Context], press: Any = None, tokens: int = 0) -> float:
    """The share of values that the model finds behind a cache of `tokens` keys, or a whole one without a press."""
    right = []
    for context in contexts:
        cache, length = DynamicCache(), len(context.words)
        if press is not None:
            press.compression_ratio = max(0.0, 1 - tokens / length)
        with contextlib.nullcontext() if press is None else press(model):
            model.model(torch.tensor([context.words]), past_key_values=cache)
        for question in context.questions:
            ids = torch.tensor([question.words + question.value])
            positions = torch.arange(length, length + ids.shape[1])[None]
            logits = model(ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits
            likely = logits[0, len(question.words) - 1 : -1].argmax(-1)
            right.append(likely.tolist() == question.value)
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=45, help="of each object; each takes about 75 tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="keys of each head that are kept")
    options = parser.parse_args(argv)
    import kvpress

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    contexts = retrieval(AutoTokenizer.from_pretrained(options.model), options.pairs)
    print(f"{len(contexts)} objects of {len(contexts[0].words):,} tokens")
    print(f"whole cache {values_found(model, contexts):.2f}", flush=True)
    for tokens in options.tokens:
        for name in PRESSES:
            found = values_found(model, contexts, getattr(kvpress, name)(), tokens)
            print(f"{name} of {tokens} tokens {found:.2f}", flush=True)


if __name__ == "__main__":
    main()
