"""What report.html shows of two models: greedy continuations of held-out text, or the nearest texts by embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.packing import Tokens
from hf_linear_attention.training.evaluation.generation_figures import continued


NUM_SHOWN = 3
PROMPT, WRITTEN = 64, 48  # tokens
MOST_CHARACTERS = 240


def shown_continuations(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    stream: Tokens,
    bos_token_id: int | None,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> list[dict[str, Any]]:
    """Three continuations of prompts that are spread evenly over the text: the end of the `prompt`, what is the `same`
    in both, and for `original` and `student` the `first` different token and the `rest`.

    Args:
        stream: the tokens of the text.
        longest: the most tokens that the models read.
    """
    length = min(PROMPT, longest // 2, len(stream) // NUM_SHOWN)
    if length < 2:
        return []
    body = length - (bos_token_id is not None)
    starts = [round(number * (len(stream) - body) / NUM_SHOWN) for number in range(NUM_SHOWN)]
    rows = [[*([] if bos_token_id is None else [bos_token_id]), *stream[start : start + body]] for start in starts]
    prompts = torch.tensor(rows, device=student.device)
    count = min(WRITTEN, longest - length)
    yours, mine = (continued(model, prompts, count, _likeliest).tolist() for model in (teacher, student))
    texts = [row[length - body :] for row in rows]  # without the BOS
    return [_shown(tokenizer, *parts) for parts in zip(texts, yours, mine, strict=True)]


def _likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _shown(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], yours: Sequence[int], mine: Sequence[int]
) -> dict[str, Any]:
    pairs = enumerate(zip(yours, mine, strict=True))
    same = next((place for place, (a, b) in pairs if a != b), len(yours))

    def text_of(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    def part(tokens: Sequence[int], first: int, last: int) -> str:
        """The text that these tokens add to what stands before them, which decides about spaces."""
        start, end = (text_of([*prompt, *tokens[:place]]) for place in (first, last))
        return end[len(start) :] if end.startswith(start) else text_of(tokens[first:last])

    sides = {
        name: {"first": part(tokens, same, same + 1), "rest": part(tokens, same + 1, len(tokens))}
        for name, tokens in (("original", yours), ("student", mine))
    }
    return {"prompt": text_of(prompt)[-MOST_CHARACTERS:], "same": part(mine, 0, same), **sides}


def shown_neighbours(
    mine: Tensor, yours: Tensor, batches: Iterable[Batch], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]]:
    """Three texts that are spread evenly over all of them, each with its nearest other text by the original and by this
    model.

    Args:
        mine: the normalised embeddings of this model, `[texts, D]` in the order of the batches.
        yours: those of the original.
    """
    if len(mine) < NUM_SHOWN:
        return []
    chosen = torch.tensor([number * len(mine) // NUM_SHOWN for number in range(NUM_SHOWN)], device=mine.device)
    nearest = [(x[chosen] @ x.T).scatter(1, chosen[:, None], -math.inf).argmax(-1).tolist() for x in (yours, mine)]
    texts = [
        tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)[:MOST_CHARACTERS]
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [
        {"text": texts[text], "original": texts[original], "student": texts[student]}
        for text, original, student in zip(chosen.tolist(), *nearest, strict=True)
    ]
