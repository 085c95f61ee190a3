"""Evaluation of a model with logits on a data set, the same on any number of processes, and the best evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.checkpoints import TrainingState
from hf_linear_attention.training.data.batches import Batch, aligned_labels
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.evaluation.scores import GREATER_IS_BETTER, Classification, TokenLoss, scored
from hf_linear_attention.training.losses.output_layer import ByRow
from hf_linear_attention.training.losses.outputs import logits_of, run_model, scored_logits
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import TASKS


Figures = tuple[list[Any], list[Any]]
"""Prediction and reference of every example in a batch, in the form that the score expects."""


class Evaluator:
    """Runs the model on the examples of this process, and computes the metric of the task over all processes."""

    def __init__(self, accelerator: Accelerator, task: str, teacher: Teacher | None) -> None:
        """Prepare evaluations by the processes of `accelerator`, in which models are compared with `teacher`."""
        self.accelerator, self.task, self.teacher = accelerator, task, teacher
        self.logits = TASKS[task].logits
        self.compares = teacher is not None and TASKS[task].compares

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures of the metric, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, Any, Any]] = []
        agreed: list[tuple[int, int, int]] = []
        by_row = None if self.logits == "inputs" else ByRow(model)
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            with self.accelerator.autocast():
                figures, same = (
                    self._class_figures(model, batch) if by_row is None else self._token_figures(by_row, batch)
                )
            index = batch["index"].tolist()
            rows += zip(index, *figures, strict=True)
            if same is not None:
                mask = scored_logits(batch, self.logits)
                shape = len(mask), -1
                agreed += zip(
                    index, (same & mask).view(shape).sum(-1).tolist(), mask.view(shape).sum(-1).tolist(), strict=True
                )
        model.train(was_training)
        found = each_once(gather_object(rows))
        score = Classification if by_row is None else TokenLoss
        result = scored(score, [row[1] for row in found], [row[2] for row in found])
        if self.compares:
            counts = [row[1:] for row in each_once(gather_object(agreed))]
            result["agreement"] = sum(hits for hits, _ in counts) / max(sum(count for _, count in counts), 1)
        return {f"eval_{name}": value for name, value in result.items()}

    def _class_figures(self, model: PreTrainedModel, batch: Batch) -> tuple[Figures, Tensor | None]:
        """The class of every input by the model and by the data, and whether the teacher gives the same one; None if
        they are not compared."""
        logits = logits_of(run_model(model, batch, None))
        if logits is None:
            raise RuntimeError("the model has no logits")
        mine, same = logits.argmax(-1), None
        if self.teacher is not None and self.compares:
            same = self.teacher.rows(batch)(torch.arange(len(mine), device=mine.device)).argmax(-1) == mine
        return (mine.tolist(), batch["labels"].tolist()), same

    def _token_figures(self, by_row: ByRow, batch: Batch) -> tuple[Figures, Tensor | None]:
        """The summed cross-entropy and the number of scored tokens of every text, and whether the teacher predicts the
        same in each row of the logits; None if they are not compared."""
        labels = aligned_labels(batch, self.task)
        nats, same = torch.zeros(labels.shape, device=labels.device), torch.zeros_like(labels, dtype=torch.bool)
        teacher = self.teacher.rows(batch) if self.teacher is not None and self.compares else None
        rows = (labels != IGNORED).flatten()
        rows = rows if teacher is None else rows | scored_logits(batch, self.logits).flatten()

        def read(logits: Tensor, part: Tensor) -> None:
            kept = labels.flatten()[part]
            nats.view(-1)[part] = F.cross_entropy(logits.float(), kept, ignore_index=IGNORED, reduction="none")
            if teacher is not None:
                same.view(-1)[part] = logits.argmax(-1) == teacher(part).argmax(-1)

        by_row.run(lambda logits: logits.each(rows.nonzero().squeeze(-1), read), batch)
        figures = nats.double().sum(-1).tolist(), (labels != IGNORED).sum(-1).tolist()
        return figures, None if teacher is None else same


def each_once(rows: list[Any]) -> list[Any]:
    """One row per example, sorted by the number of the example, so that sums do not depend on the number of processes.

    If several processes have an example (`batches.EvaluationBatches`), the row of the first process is used.
    """
    found = {row[0]: row for row in reversed(rows)}
    return [found[number] for number in sorted(found)]


class Selection:
    """Compares evaluations by the main figure of the task."""

    def __init__(self, recipe: Recipe) -> None:
        name = recipe.task.figure
        self.name, self.sign = f"eval_{name}", 1 if GREATER_IS_BETTER[name] else -1

    def note(self, state: TrainingState, figures: dict[str, float]) -> bool:
        """Record the evaluation of this step in `state`, and return whether it is the best so far."""
        if self.name not in figures:
            return False
        best = state.best.get("figures")
        if best is not None and not self.sign * figures[self.name] > self.sign * best[self.name]:
            return False
        state.best = {"step": state.step, "figures": figures}
        return True
