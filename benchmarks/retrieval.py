"""What a model finds again in a long context, and what it finds in the caches that kvpress compresses.

    uv venv .venv-kvpress
    uv pip install --python .venv-kvpress torch==2.13.0 kvpress==0.5.5
    .venv-kvpress/bin/python -m benchmarks.retrieval MODEL --tasks pairs multikey --tokens 512

Each task hides values in a context of `--length` tokens and asks for them, one after the other:

    pairs         a JSON object of random pairs (Liu et al. 2023, arXiv:2307.03172), ten of which are asked for
    single_noise  one number in sentences that repeat; this and the rest are those of RULER (Hsieh et al. 2024,
    single_prose  arXiv:2404.06654): niah_single_1, the same in Python's documentation (niah_single_2),
    multikey      four numbers in it, each under its own key (niah_multikey_1), and
    chain         the five variables that got one value from each other, in sentences that repeat (vt)

"found" is the share of values of which every token is the most likely one after the true ones before it. A press reads
the whole context with a full cache, which is its peak of memory, and then keeps `--tokens` keys of each head, before it
has seen a question; each question is asked of that cache. kvpress needs an older transformers, so it has an environment
of its own, and this file imports nothing of ours: `python -m benchmarks.real --tasks` asks the same of our models.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import re
import string
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


NOISE = ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"]
PROSE = [f"{line}\n" for name in sorted(topics) for line in topics[name].splitlines() if len(line) > 40]
KEYS = sorted({word for line in PROSE for word in re.findall(r"\b[a-z]{7,}\b", line)})
PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KeyDiffPress", "StreamingLLMPress")


class Question(NamedTuple):
    """The tokens of a question, of its answer, and of what stands behind it."""

    words: list[int]
    value: list[int]
    end: list[int]


class Context(NamedTuple):
    """The tokens of a text, and questions about it."""

    words: list[int]
    questions: list[Question]


def pairs(tokenizer: Any, length: int) -> Iterable[Context]:
    """Objects of random pairs; the keys that are asked for stand evenly in them."""
    draw = random.Random(0)
    for _ in range(2):
        names = ([str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(2)] for _ in itertools.count())
        given, text = dict[str, str](), ""
        while len(words := tokenizer(text)["input_ids"]) < length:
            given |= [next(names)]
            text = f"Find the value of the given key in this JSON object.\n\n{json.dumps(given, indent=0)}\n"
        asked = [*given][:: max(1, len(given) // 10)][:10]
        yield Context(words, [asking(tokenizer, f'\nKey: "{key}"\nValue: "', given[key], '"') for key in asked])


def needles(tokenizer: Any, length: int, haystack: Sequence[str], keys: int, contexts: int) -> Iterable[Context]:
    """Texts with a number for each of some keys; all numbers of all texts together stand evenly."""
    draw = random.Random(0)
    for number in range(contexts):
        values = {key: str(draw.randrange(10**6, 10**7)) for key in draw.sample(KEYS, keys)}
        lines = [f"One of the special magic numbers for {key} is: {value}.\n" for key, value in values.items()]
        places = [(line + (number + draw.random()) / contexts) / keys for line in range(keys)]
        intent = "A special magic number is hidden within the following text. Memorize it: it will be asked for.\n"
        question = "\nThe special magic number for {} mentioned in the provided text is: "
        questions = [asking(tokenizer, question.format(key), value, "\n") for key, value in values.items()]
        yield Context(hidden(tokenizer, intent, haystack, lines, places, length), questions)


def chain(tokenizer: Any, length: int) -> Iterable[Context]:
    """Texts in which a value is handed from variable to variable; all of them are asked for at once."""
    draw = random.Random(0)
    for _ in range(4):
        names = ["".join(draw.sample(string.ascii_uppercase, 5)) for _ in range(5)]
        value = str(draw.randrange(10**4, 10**5))
        sources = [value, *(f"VAR {name}" for name in names)]
        lines = [f"VAR {name} = {source}\n" for name, source in zip(names, sources, strict=False)]
        places = [(line + draw.random()) / len(lines) for line in range(len(lines))]
        intent = "Memorize and track the variables that are assigned in the following text.\n"
        question = f"\nThe five variables that are assigned the value {value} in the text above are:"
        asked = asking(tokenizer, question, f" {' '.join(names)}", "\n")
        yield Context(hidden(tokenizer, intent, NOISE, lines, places, length), [asked])


def hidden(
    tokenizer: Any, intent: str, haystack: Sequence[str], lines: Sequence[str], places: Sequence[float], length: int
) -> list[int]:
    """The tokens of a text of a haystack's lines, with others at these places (0 the first, 1 the last)."""
    text, left = list[str](), length - len(tokenizer("".join([intent, *lines]))["input_ids"])
    for line in itertools.cycle(haystack):
        left -= len(tokenizer(line, add_special_tokens=False)["input_ids"])
        if left < 0:
            break
        text.append(line)
    for line, place in sorted(zip(lines, places, strict=True), key=lambda pair: -pair[1]):
        text.insert(int(place * len(text)), line)
    return list(tokenizer("".join([intent, *text]))["input_ids"])


def asking(tokenizer: Any, *parts: str) -> Question:
    """A question of its words, its answer and what stands behind that."""
    return Question(*(tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts))


TASKS: dict[str, Callable[[Any, int], Iterable[Context]]] = {
    "pairs": pairs,
    "single_noise": lambda tokenizer, length: needles(tokenizer, length, NOISE, 1, 4),
    "single_prose": lambda tokenizer, length: needles(tokenizer, length, PROSE, 1, 4),
    "multikey": lambda tokenizer, length: needles(tokenizer, length, PROSE, 4, 3),
    "chain": chain,
}


@torch.no_grad()
def caches_of(model: Any, words: list[int], presses: Mapping[str, Any]) -> dict[str, DynamicCache]:
    """The whole cache of a context, and what each press leaves of it: all from one prefill, which no press changes."""
    whole, found = DynamicCache(), {name: DynamicCache() for name in presses}

    def compress(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
        layer = whole.layers[module.layer_idx]
        for name, press in presses.items():
            kept = press.compress(module, given["hidden_states"], layer.keys, layer.values, output[1], given)
            found[name].update(*kept, module.layer_idx)

    attentions = [layer.self_attn for layer in model.model.layers]
    for attention in attentions:
        attention.rotary_emb = model.model.rotary_emb  # which presses look for there
    hooks = [attention.register_forward_hook(compress, with_kwargs=True) for attention in attentions]
    for press in presses.values():
        press.post_init_from_model(model)
    try:
        model.model(torch.tensor([words]), past_key_values=whole)
    finally:
        for hook in hooks:
            hook.remove()
    return {"whole cache": whole, **found}


@torch.no_grad()
def answers(model: Any, cache: DynamicCache, context: Context) -> list[bool]:
    """Whether the model finds the value of each question behind a cache."""
    right, length = [], len(context.words)
    for question in context.questions:
        ids = torch.tensor([question.words + question.value])
        positions = torch.arange(length, length + ids.shape[1])[None]
        logits = model(ids, past_key_values=copy.deepcopy(cache), position_ids=positions).logits
        likely = logits[0, len(question.words) - 1 : -1].argmax(-1)
        right.append(likely.tolist() == question.value)
    return right


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a context")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="keys of each head that are kept")
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=PRESSES)
    options = parser.parse_args(argv)
    import kvpress

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for task in options.tasks:
        found: dict[str, list[bool]] = {}
        for context in TASKS[task](tokenizer, options.length):
            presses: dict[str, Any] = {}
            for tokens, name in itertools.product(options.tokens, options.presses):
                ratio = max(0.0, 1 - tokens / len(context.words))
                presses[f"{name} of {tokens} tokens"] = getattr(kvpress, name)(compression_ratio=ratio)
            for name, cache in caches_of(model, context.words, presses).items():
                found.setdefault(name, []).extend(answers(model, cache, context))
        for name, right in found.items():
            print(f"{task}, {name} {sum(right) / len(right):.2f}", flush=True)


if __name__ == "__main__":
    main()
