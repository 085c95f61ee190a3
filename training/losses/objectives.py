"""The interface of an objective, and the objectives on the student's logits and hidden states."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.training.data.batches import Batch, aligned_labels, count_units, token_weights
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.processors import load_config
from hf_linear_attention.training.losses.divergence import chunked_kl
from hf_linear_attention.training.losses.outputs import Outputs, StudentOutputs, cosines_at, pooled, scored_logits
from hf_linear_attention.training.recipe import Recipe, parse_dims


class Objective(Protocol):
    """One term of the loss.

    With `observes_attention`, the student computes its original softmax attention, and the mechanism of every layer is
    run on the same inputs; with `needs_attention_weights`, that softmax also returns its weights.
    """

    needs_logits: bool
    needs_hidden_states: bool
    needs_teacher: bool
    observes_attention: bool = False
    needs_attention_weights: bool = False

    def units(self, batch: Batch) -> Tensor:
        """Number of units (tokens, sequences) in this batch, a long scalar."""
        ...

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units: a scalar, or one value for each of `student.attention`, whose mean is the term."""
        ...


class TaskLoss(Objective):
    """Cross-entropy with the labels: the next token, the masked tokens, the target, the class, or the answer's ends.

    For `ctc`, that of the text: -log of the probability of all its alignments (Graves et al. 2006).
    """

    needs_logits, needs_hidden_states, needs_teacher = True, False, False

    def __init__(self, recipe: Recipe) -> None:
        self.task = recipe.model.task
        self.blank = special_token(load_config(recipe), "pad_token_id") if self.task == "ctc" else None

    def units(self, batch: Batch) -> Tensor:
        """Number of labels, a long scalar."""
        return (aligned_labels(batch, self.task) != IGNORED).sum()

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of the cross-entropies, in nats."""
        if self.blank is not None:
            return ctc_nats(_logits(student), batch, self.blank)
        logits, labels = _logits(student).flatten(0, -2), aligned_labels(batch, self.task).flatten()
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def ctc_nats(logits: Tensor, batch: Batch, blank: int) -> Tensor:
    """The sum over the recordings of -log p(text) in nats, given the logits [B, N, V] of their frames."""
    labels, frames = batch["labels"], batch["frame_mask"].sum(-1)
    log_p = logits.float().log_softmax(-1).transpose(0, 1)
    counts = (labels != IGNORED).sum(-1)
    return F.ctc_loss(log_p, labels.clamp(min=0), frames, counts, blank=blank, reduction="sum")


class LogitsKL(Objective):
    """KL(teacher || student) of all logits that are not of padding: those of tokens, of classes, ... (`tasks.py`)."""

    needs_logits, needs_hidden_states, needs_teacher = True, False, True

    def __init__(self, recipe: Recipe) -> None:
        self.logits_of = recipe.task.logits
        self.temperature = recipe.objective.temperature

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens or targets, of sequences or images for a classifier, or of ends, a long scalar."""
        return scored_logits(batch, self.logits_of).sum()

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of T^2 KL(teacher || student) at temperature T, in nats."""
        rows = None if teacher is None else teacher.logits
        if rows is None:
            raise RuntimeError("`logits_kl` needs the teacher's logits")
        mask = scored_logits(batch, self.logits_of).flatten()
        return chunked_kl(_logits(student).flatten(0, -2), rows, mask, self.temperature)


class HiddenState(Objective):
    """|student - teacher|^2 / |teacher|^2 of the hidden state of every token, averaged over the compared layers.

    The error is relative because the norm of hidden states differs by orders of magnitude between layers and tokens.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, True, True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens or images, a long scalar."""
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of the relative squared errors."""
        if teacher is None:
            raise RuntimeError("`hidden_state` needs a teacher")
        sums = _error_sums(student.hidden_states, teacher.hidden_states, batch, is_decoder=False)
        sums += _error_sums(student.decoder_states, teacher.decoder_states, batch, is_decoder=True)
        return torch.stack(sums).mean()


class Embedding(Objective):
    """1 - cosine similarity of the embeddings, which are pooled as the files of sentence-transformers say.

    With `--matryoshka_dims`, the mean of those of whole embeddings and of embeddings cut to these dimensions.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, True, True

    def __init__(self, recipe: Recipe) -> None:
        self.pooling = recipe.pooling
        self.dims = parse_dims(recipe.task_options.matryoshka_dims)

    def units(self, batch: Batch) -> Tensor:
        """Number of sequences, a long scalar."""
        return torch.tensor(len(batch["index"]), device=batch["index"].device)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of 1 - cosine similarity."""
        mine, yours = _hidden_pairs(student, teacher)[-1]
        mask = token_weights(batch, mine.shape[1]) > 0
        mine, yours = (pooled(hidden, mask, self.pooling) for hidden in (mine, yours))
        return (1 - cosines_at(mine, yours, self.dims)).mean(0).sum()


def _error_sums(mine: tuple[Tensor, ...], yours: tuple[Tensor, ...], batch: Batch, is_decoder: bool) -> list[Tensor]:
    """The weighted sum of the relative squared errors of every layer of one side of the model."""
    sums = []
    for a, b in zip(mine, yours, strict=True):
        weights = token_weights(batch, a.shape[1], is_decoder)
        mask = weights > 0
        sums.append((_relative_errors(a[mask], b[mask]) * weights[mask]).sum())
    return sums


def _relative_errors(mine: Tensor, yours: Tensor) -> Tensor:
    """The relative squared error [T] of every token in `mine` [T, D]."""
    mine, yours = mine.float(), yours.float()
    return (mine - yours).square().sum(-1) / yours.square().sum(-1).clamp(min=1e-12)


def _logits(student: StudentOutputs) -> Tensor:
    if student.all_logits is None:
        raise RuntimeError("this objective needs a model with logits")
    return student.all_logits


def _hidden_pairs(student: StudentOutputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
    if teacher is None or len(student.hidden_states) != len(teacher.hidden_states):
        raise RuntimeError("student and teacher must return the same number of hidden states")
    return list(zip(student.hidden_states, teacher.hidden_states, strict=True))
