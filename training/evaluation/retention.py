"""Figures of how much of its original a converted model has kept: for a language model, per token on held-out text.

    gap            nats per token of the student above the teacher
    window alone   the student's window and sinks with the weights of the teacher: a `hybrid` without a linear part
    without far    the trained student with its linear part switched off: what that part is worth to it
    agreement      share of tokens whose most likely successor is the teacher's
    kl             KL(teacher || student)

For an embedding model, the figures are per text.

Positions count the tokens in a window of text from 0. Figures by position show whether a state is useful beyond the
window of a `hybrid`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention._common.logs import progress
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS, entries_of
from hf_linear_attention.mechanism_window import WindowAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch, aligned_labels
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.sentence_files import Pooling
from hf_linear_attention.training.evaluation.metrics import pair_similarity
from hf_linear_attention.training.losses.outputs import pooled, run_model
from hf_linear_attention.training.losses.teacher import TeacherWindows


# In nats per token. If window and teacher compute the same function, float32 logits differ by less than this.
SMALLEST_GAP = 1e-4


@dataclass
class TokenFigures:
    """Figures of tokens, collected over batches: the position of every token, and named values of it."""

    position: list[Tensor] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, scored: Tensor, **figures: Tensor) -> None:
        """Append the tokens of a batch for which `scored`, bool [B, N], is true; every figure is [B, N]."""
        self.position.append(scored.nonzero()[:, 1].cpu())
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value[scored].double().cpu())

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def column(self, name: str) -> Tensor:
        """The values of one figure for all tokens, `[tokens]` in float64."""
        return torch.cat(self.values[name])

    def means(self, first: int = 0, last: int | None = None) -> dict[str, float]:
        """The mean of every figure over the tokens at the positions `first` to `last - 1`."""
        position = torch.cat(self.position)
        chosen = (position >= first) & (position < (math.inf if last is None else last))
        return {name: self.column(name)[chosen].mean().item() for name in self.values}

    def by_position(self) -> list[dict[str, Any]]:
        """The means of every figure over ranges of positions that end at powers of two."""
        longest = int(torch.cat(self.position).max()) + 1
        edges = [0, *(2**power for power in range(4, math.ceil(math.log2(longest)))), longest]
        return [{"from": a, "to": b, **self.means(a, b)} for a, b in itertools.pairwise(edges) if a < b]


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
    """The nats of every target, `[targets]` in float64, in the order of `TokenFigures`."""
    parts = []
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        labels = aligned_labels(batch, "causal_lm")
        nats = _nats(run_model(model, batch, None).logits.float(), labels)
        parts.append(nats[labels != IGNORED].double().cpu())
    return torch.cat(parts)


@torch.no_grad()
def score(teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterable[Batch]) -> TokenFigures:
    """Figures of every token in batches with labels (`training.data`), which are iterated over more than once.

    For a `hybrid`, they include the nats without its linear part, and those of its window alone.
    """
    settings = student.config.linear_attention
    figures = TokenFigures()
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(student.device) for name, value in batch.items()}
        labels = aligned_labels(batch, "causal_lm")
        yours, mine = (run_model(model, batch, None).logits.float() for model in (teacher, student))
        row: dict[str, Tensor] = {
            "teacher": _nats(yours, labels),
            "student": _nats(mine, labels),
            "agreement": (yours.argmax(-1) == mine.argmax(-1)).double(),
            "kl": F.kl_div(mine.log_softmax(-1), yours.log_softmax(-1), log_target=True, reduction="none").sum(-1),
        }
        if is_hybrid(settings):
            with without_far(student):
                row["without_far"] = _nats(run_model(student, batch, None).logits.float(), labels)
        figures.add(labels != IGNORED, **row)
    if is_hybrid(settings):
        figures.values["window_alone"] = [nats_of(convert(teacher, settings=window_settings(settings)), batches)]
    return figures


def compare(teacher: PreTrainedModel, student: PreTrainedModel, batches: Sequence[Batch]) -> dict[str, Any]:
    """Figures that compare a causal language model with its teacher on batches with labels (`training.data`)."""
    return summary(score(teacher, student, batches), student.config.linear_attention)


def summary(figures: TokenFigures, settings: Settings) -> dict[str, Any]:
    """The means of the figures from `score` for a student with these `settings`."""
    result: dict[str, Any] = {**figures.means(), "by_position": figures.by_position()}
    result["gap"] = result["student"] - result["teacher"]
    if "window_alone" in figures:
        longest = max(entry["window_size"] for entry in entries_of(settings))
        result |= _linear_part(result, figures.means(4 * longest))
    return result


def _nats(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


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


@torch.no_grad()
def embed(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    pooling: Pooling = "mean",
    windows: TeacherWindows | None = None,
) -> Tensor:
    """The normalised embeddings `[texts, D]` of all texts, in the order of the batches.

    Args:
        windows: the windows in which the model reads texts that are longer than its positions.
    """

    def states(batch: Batch) -> tuple[Tensor]:
        return (run_model(model, batch, None).last_hidden_state,)

    rows = []
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        is_long = windows is not None and batch["input_ids"].shape[1] > windows.size
        hidden = windows.hidden_states(states, batch) if windows is not None and is_long else states(batch)
        rows.append(pooled(hidden[0], batch["attention_mask"], pooling))
    return F.normalize(torch.cat(rows), dim=-1)


def compare_pairs(mine: Tensor, yours: Tensor, scores: Sequence[float]) -> dict[str, float]:
    """Spearman's correlation between the similarities of pairs of texts and their scores, for both models.

    Args:
        mine: the embeddings `[texts, D]` of the student; the texts of a pair follow each other.
        yours: those of the teacher.
        scores: one score per pair.
    """
    found = {"spearman": mine, "spearman_teacher": yours}
    return {name: pair_similarity(embeddings, scores) for name, embeddings in found.items()}


def compare_embeddings(mine: Tensor, yours: Tensor) -> dict[str, float]:
    """Figures that compare the embeddings `[texts, D]` of student and teacher for the same texts.

    `same_neighbour` is the share of texts whose nearest other text is the same for both.
    """
    mine, yours = (F.normalize(embeddings, dim=-1) for embeddings in (mine, yours))
    cosine = (mine * yours).sum(-1)
    nearest = [(x @ x.T).fill_diagonal_(-math.inf).argmax(-1) for x in (mine, yours)]
    return {
        "cosine": cosine.mean().item(),
        "cosine_min": cosine.min().item(),
        "same_neighbour": (nearest[0] == nearest[1]).double().mean().item(),
    }
