"""Figures of how much of its original a converted model has kept: for a language model, per token on held-out text.

    gap            nats per token of the student above the teacher
    window alone   the student's window and sinks with the weights of the teacher: a `hybrid` without a linear part
    without far    the trained student with its linear part switched off: what that part is worth to it
    agreement      share of tokens whose most likely successor is the teacher's
    kl             KL(teacher || student)

Figures by position show whether a state is useful beyond the window of a `hybrid`, and far beyond the trained length.
Positions count the tokens in a window of text from 0. For the latter, the text is cut into windows that do not overlap;
each holds BOS and as many tokens as fit. So different buckets of positions hold different tokens, and models are
compared within a bucket, token by token.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention._common.logs import progress
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS, entries_of
from hf_linear_attention.mechanisms.window import WindowAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, aligned_labels, loader
from hf_linear_attention.training.data.packing import IGNORED, Documents, Examples, FirstExamples, StreamWindows, Tokens
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.output_layer import ByRow, Rows


# In nats per token. If window and teacher compute the same function, float32 logits differ by less than this.
SMALLEST_GAP = 1e-4
TIMES_TRAINED = 8
# Tokens per batch; a window that is at least this long is a batch of its own.
BATCH_TOKENS = 4096
# The largest number of rows that a table of learned positions has in addition to its positions.
EXTRA_ROWS = 8


@contextlib.contextmanager
def without_far(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside, the `hybrid` layers of a model compute only window and sinks, without their linear part."""
    mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]
    try:
        for mechanism in mechanisms:
            mechanism.uses_far = False
        yield model
    finally:
        for mechanism in mechanisms:
            mechanism.uses_far = True


# The values `[targets]` of every target by their name, in float64, and the position in its window of text.
TokenFigures = dict[str, Tensor]
POSITION = "position"
Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # `config.linear_attention`


def window_settings(settings: Settings, **changes: Any) -> Any:
    """Settings that convert the same layers to `window`, with one entry for each of `settings`.

    Args:
        changes: settings of `window` that replace those in `settings`.
    """
    names = (*COMMON_SETTINGS, *WindowAttention.options)
    own = [
        {"mechanism": "window", **{name: entry[name] for name in names if name in entry}, **changes}
        for entry in entries_of(settings)
    ]
    return own[0] if isinstance(settings, Mapping) else own


def is_hybrid(settings: Settings) -> bool:
    """Whether all converted layers are `hybrid`, which has a window and a linear part."""
    return all(entry["mechanism"] == "hybrid" for entry in entries_of(settings))


@torch.no_grad()
def nats_of(model: PreTrainedModel, batches: Iterable[Batch]) -> Tensor:
    """The nats of every target, `[targets]` in float64, in the order of the batches."""
    by_row, parts = ByRow(model), []
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        parts.append(_nats(by_row, batch).double().cpu())
    return torch.cat(parts)


@torch.no_grad()
def score(teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterable[Batch]) -> TokenFigures:
    """Figures of every token in batches with labels (`training.data`), which are iterated over more than once.

    For a `hybrid`, they include the nats without its linear part, and those of its window alone.
    """
    settings = student.config.linear_attention
    parts: list[dict[str, Tensor]] = []
    by_row, of_teacher = ByRow(student), ByRow(teacher)
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(student.device) for name, value in batch.items()}
        labels = aligned_labels(batch, "causal_lm")
        yours, targets = of_teacher.rows(batch), labels.flatten()

        def look(mine: Tensor, rows: Tensor, yours: Rows = yours, targets: Tensor = targets) -> Tensor:
            pair = [logits.float() for logits in (yours(rows), mine)]
            nats = [F.cross_entropy(logits, targets[rows], reduction="none") for logits in pair]
            same = (pair[0].argmax(-1) == pair[1].argmax(-1)).to(nats[0].dtype)
            return torch.stack([*nats, same, divergence(pair[1], pair[0])], dim=-1)

        scored = labels != IGNORED
        found = by_row.rows(batch).read(scored.flatten().nonzero().squeeze(-1), look)
        row = dict(zip(("teacher", "student", "agreement", "kl"), found.unbind(-1), strict=True))
        if is_hybrid(settings):
            with without_far(student):
                row["without_far"] = _nats(by_row, batch)
        values = {name: value.double().cpu() for name, value in row.items()}
        parts.append({POSITION: scored.nonzero()[:, 1].cpu(), **values})
    figures = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if is_hybrid(settings):
        figures["window_alone"] = nats_of(convert(teacher, settings=window_settings(settings)), batches)
    return figures


def summary(figures: TokenFigures, settings: Settings) -> dict[str, Any]:
    """The means of the figures from `score` for a student with these `settings`."""
    values = {name: value for name, value in figures.items() if name != POSITION}
    result: dict[str, Any] = {name: value.mean().item() for name, value in values.items()}
    result["gap"] = result["student"] - result["teacher"]
    if "window_alone" in values:
        distant = figures[POSITION] >= 4 * max(entry["window_size"] for entry in entries_of(settings))
        result |= _linear_part(result, {name: value[distant].mean().item() for name, value in values.items()})
    return result


def _nats(by_row: ByRow, batch: Batch) -> Tensor:
    """The nats of every target of a batch, `[targets]`."""
    labels = aligned_labels(batch, "causal_lm").flatten()
    rows = (labels != IGNORED).nonzero().squeeze(-1)
    return by_row.rows(batch).read(
        rows, lambda logits, part: F.cross_entropy(logits.float(), labels[part], reduction="none")
    )


def _linear_part(whole: dict[str, Any], distant: dict[str, float]) -> dict[str, float]:
    """What the linear part contributes.

    `gap_closed` is the share of the gap between window alone and teacher that the student has closed. `linear_share` is
    the share of that gap, beyond 4 windows, that would open again without the linear part. Both are NaN if the window
    alone leaves no gap, such as one that is longer than the texts.
    """
    gap, far_gap = (means["window_alone"] - means["teacher"] for means in (whole, distant))
    return {
        "gap_closed": 1 - whole["gap"] / gap if gap > SMALLEST_GAP else math.nan,
        "linear_share": (distant["without_far"] - distant["student"]) / far_gap if far_gap > SMALLEST_GAP else math.nan,
    }


def separate_windows(stream: Tokens, length: int, bos_token_id: int | None) -> Documents:
    """`stream` cut into full windows of `length` tokens, including the BOS, that do not overlap; the rest is unused."""
    body = length - (bos_token_id is not None)
    parts = [stream[start : start + body] for start in range(0, len(stream) - body + 1, body)]
    if bos_token_id is None:
        return Documents(parts, "tokens")
    inputs, labels = ([np.concatenate([[first], part]) for part in parts] for first in (bos_token_id, IGNORED))
    return Documents(inputs, labels)


def running_text(examples: Examples) -> Tokens:
    """The tokens from which examples of held-out text were cut; separate documents are joined."""
    shown = len(examples)
    whole = examples.examples if isinstance(examples, FirstExamples) else examples
    if isinstance(whole, StreamWindows):
        return whole.stream[: int(whole.scored_to[shown - 1])]
    return np.concatenate([examples[index]["input_ids"] for index in range(shown)])


def longest_window(
    trained_length: int, num_tokens: int, max_eval_length: int, positions: int | None
) -> tuple[int, str]:
    """The length of the windows, including the BOS, and what limits it.

    Args:
        positions: the largest number of positions of the models, or None (see `most_positions`).
    """
    ends = {
        f"{TIMES_TRAINED} times the trained length": TIMES_TRAINED * trained_length,
        "the text": num_tokens,
        "`--max_eval_length`": max_eval_length,
        **({"the last position that the model has": positions} if positions is not None else {}),
    }
    reason = min(ends, key=lambda name: ends[name])
    return ends[reason], reason


def most_positions(model: PreTrainedModel) -> int | None:
    """The number of positions of a model with a table of them; None if they are computed, such as rotary ones."""
    known, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    if known is None:
        return None
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [buffer for buffer in model.buffers() if buffer.ndim == 2]
    return known if any(0 <= len(table) - known <= EXTRA_ROWS for table in tables) else None


def batches_of(examples: Examples, max_length: int, padding: int) -> list[Batch]:
    """All examples, which have up to `max_length` tokens, as batches."""
    plan = EvaluationBatches(len(examples), max(1, BATCH_TOKENS // max_length), 0, 1)
    return list(loader(Stream(examples, 0, shuffle=False), plan, padding))


def bucket_edges(trained_length: int, length: int) -> list[int]:
    """The edges of the buckets: 0, an eighth of the trained length and its doubles, and the length of the windows."""
    inside = [trained_length // 8, trained_length // 4, trained_length // 2]
    beyond = [trained_length * 2**power for power in range(TIMES_TRAINED.bit_length())]
    return sorted({0, *(edge for edge in (*inside, *beyond) if 0 < edge < length), length})


def target_positions(batches: list[Batch]) -> Tensor:
    """For every target, the position from which it is predicted, in the order of `nats_of`."""
    return torch.cat([(batch["labels"][:, 1:] != IGNORED).nonzero()[:, 1] for batch in batches])


def position_buckets(
    position: Tensor, nats: Mapping[str, Tensor], edges: list[int], pairs: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The means of `nats` between the edges, by model.

    Args:
        position: the position of every target, `[targets]`.
        nats: those of every target by model, `[targets]` each.
        pairs: models whose mean difference on the same targets is given with its standard error, if both are in `nats`.
    """
    buckets = []
    for first, end in itertools.pairwise(edges):
        chosen = (position >= first) & (position < end)
        part = {name: value[chosen] for name, value in nats.items()}
        means = {name: value.mean().item() for name, value in part.items()}
        bucket: dict[str, Any] = {"from": first, "to": end, "targets": int(chosen.sum()), **means}
        for mine, other in pairs:
            if mine in part and other in part:
                bucket[f"{mine}_minus_{other}"] = paired_difference(part[mine], part[other])
        buckets.append(bucket)
    return buckets


def paired_difference(mine: Tensor, other: Tensor) -> dict[str, float]:
    """The mean of `mine - other`, `[targets]` each, and its standard error, which is NaN for fewer than two targets."""
    difference = mine - other
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return {"mean": difference.mean().item(), "standard_error": error}
