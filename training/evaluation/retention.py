"""How much of the original a converted language model has kept, token by token on held-out text.

    gap            nats per token of the student above the teacher
    window alone   window and sinks with the weights of the teacher: what a `hybrid` costs without a linear part
    without far    the trained student with its linear part switched off: what that part is worth to it
    agreement      share of tokens whose most likely successor is the teacher's
    kl             KL(teacher || student)

And what a converted embedding model has kept, text by text.

Positions count the tokens of a window of text from 0; figures by position tell whether a state holds beyond its window.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch, aligned_labels
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.evaluation.metrics import pair_similarity
from hf_linear_attention.training.losses.outputs import mean_pooled, run_model


# Nats per token; what float32 logits differ by when window and teacher compute the same function is below.
SMALLEST_GAP = 1e-4


@dataclass
class TokenFigures:
    """Concatenated over batches: position, and one figure per token and name."""

    position: list[Tensor] = field(default_factory=list)
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, scored: Tensor, **figures: Tensor) -> None:
        """`scored` bool [B, N]; every figure [B, N]."""
        self.position.append(scored.nonzero()[:, 1].cpu())
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value[scored].double().cpu())

    def means(self, first: int = 0, last: int | None = None) -> dict[str, float]:
        """Mean of every figure over the tokens at the positions first .. last - 1."""
        position = torch.cat(self.position)
        chosen = (position >= first) & (position < (math.inf if last is None else last))
        return {name: torch.cat(parts)[chosen].mean().item() for name, parts in self.values.items()}

    def by_position(self) -> list[dict[str, Any]]:
        """Means between powers of two."""
        longest = int(torch.cat(self.position).max()) + 1
        edges = [0, *(2**power for power in range(4, math.ceil(math.log2(longest)))), longest]
        return [{"from": a, "to": b, **self.means(a, b)} for a, b in itertools.pairwise(edges) if a < b]


@contextlib.contextmanager
def without_far(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside, the `hybrid` layers of a model have no linear part: window and sinks alone."""
    mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]
    try:
        for mechanism in mechanisms:
            mechanism.uses_far = False
        yield model
    finally:
        for mechanism in mechanisms:
            mechanism.uses_far = True


@torch.no_grad()
def compare(teacher: PreTrainedModel, student: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, Any]:
    """Figures of a causal language model against its teacher on batches with labels (`training.data`)."""
    settings = student.config.linear_attention
    entries = entries_of(settings)
    is_hybrid = all(entry["mechanism"] == "hybrid" for entry in entries)
    start = convert(teacher, settings=settings) if is_hybrid else None
    figures = TokenFigures()
    for batch in batches:
        batch = {name: value.to(student.device) for name, value in batch.items()}
        labels = aligned_labels(batch, "causal_lm")
        yours, mine = (run_model(model, batch, None).logits.float() for model in (teacher, student))
        row: dict[str, Tensor] = {
            "teacher": _nats(yours, labels),
            "student": _nats(mine, labels),
            "agreement": (yours.argmax(-1) == mine.argmax(-1)).double(),
            "kl": F.kl_div(mine.log_softmax(-1), yours.log_softmax(-1), log_target=True, reduction="none").sum(-1),
        }
        if start is not None:
            for name, model in (("window_alone", start), ("without_far", student)):
                with without_far(model):
                    row[name] = _nats(run_model(model, batch, None).logits.float(), labels)
        figures.add(labels != IGNORED, **row)
    result: dict[str, Any] = {**figures.means(), "by_position": figures.by_position()}
    result["gap"] = result["student"] - result["teacher"]
    if is_hybrid:
        result |= _linear_part(result, figures.means(4 * max(entry["window_size"] for entry in entries)))
    return result


def _nats(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


def _linear_part(whole: dict[str, Any], distant: dict[str, float]) -> dict[str, float]:
    """`gap_closed`: of the window alone. `linear_share`: the part of that gap, beyond 4 windows, that switching the
    linear part off would open again. NaN where the window alone leaves no gap, as one longer than the texts does."""
    gap, far_gap = (means["window_alone"] - means["teacher"] for means in (whole, distant))
    return {
        "gap_closed": 1 - whole["gap"] / gap if gap > SMALLEST_GAP else math.nan,
        "linear_share": (distant["without_far"] - distant["student"]) / far_gap if far_gap > SMALLEST_GAP else math.nan,
    }


@torch.no_grad()
def embed(model: PreTrainedModel, batches: Iterable[Batch]) -> Tensor:
    """Mean-pooled, normalised embeddings `[texts, D]` in the order of the batches."""
    rows = [
        mean_pooled(run_model(model, batch, None).last_hidden_state, batch["attention_mask"])
        for batch in ({name: value.to(model.device) for name, value in batch.items()} for batch in batches)
    ]
    return F.normalize(torch.cat(rows), dim=-1)


def compare_pairs(student: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[Batch]) -> dict[str, float]:
    """Spearman's correlation of both models with the scores of pairs of texts (one after the other, score in both)."""
    scores = torch.cat([batch["labels"] for batch in batches]).tolist()[::2]
    found = {"spearman": student, "spearman_teacher": teacher}
    return {name: pair_similarity(embed(model, batches), scores) for name, model in found.items()}


def compare_embeddings(mine: Tensor, yours: Tensor) -> dict[str, float]:
    """Of the student's and the teacher's normalised embeddings `[texts, D]` of the same texts.

    `same_neighbour`: share of texts whose nearest other text is the same for both.
    """
    cosine = (mine * yours).sum(-1)
    nearest = [(x @ x.T).fill_diagonal_(-math.inf).argmax(-1) for x in (mine, yours)]
    return {
        "cosine": cosine.mean().item(),
        "cosine_min": cosine.min().item(),
        "same_neighbour": (nearest[0] == nearest[1]).double().mean().item(),
    }
