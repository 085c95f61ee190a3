"""Evaluation of a model with logits on a data set, the same on any number of processes, and the best evaluation.

With `--predict_with_generate`, models also generate texts for the inputs.
"""

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
from hf_linear_attention.training.evaluation.scores import (
    GREATER_IS_BETTER,
    Classification,
    TextMatch,
    TokenLoss,
    equal_share,
    scored,
)
from hf_linear_attention.training.losses.output_layer import MEGABYTES, ByRow
from hf_linear_attention.training.losses.outputs import logits_of, run_model, scored_logits
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import TASKS


# Number of an example, the text of the model, that of the data, and that of the teacher, if there is one; for
# conversations, which have no text of the data here, whether the answer of each model ended.
Generated = tuple[int, Any, str | None, Any]

Figures = tuple[list[Any], list[Any]]
"""Prediction and reference of every example in a batch, in the form that the score expects."""


class Generation:
    """Generates greedily, at most `max_length` tokens for each text, and decodes."""

    def __init__(self, processor: Any, max_length: int, is_sharded: bool = False) -> None:
        self.processor, self.max_length, self.is_sharded = processor, max_length, is_sharded

    @torch.no_grad()
    def _tokens(self, model: Any, **inputs: Any) -> Tensor:
        # The processes that share a sharded model must make as many forward passes as the slowest.
        more = {"synced_gpus": True} if self.is_sharded else {}
        return model.generate(**inputs, max_new_tokens=self.max_length, do_sample=False, num_beams=1, **more)

    def texts(self, model: Any, batch: Batch) -> list[str]:
        """The texts that the model generates for the inputs of `batch`."""
        found = self._tokens(model, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return self.processor.batch_decode(found, skip_special_tokens=True)

    def ends(self, model: Any, batch: Batch) -> list[bool]:
        """Whether the answer that the model gives to the last message of every conversation ends."""
        stop = model.generation_config.eos_token_id
        stop = self.processor.eos_token_id if stop is None else stop
        ends = []
        for ids, length in zip(batch["input_ids"], batch["prompt_length"].tolist(), strict=True):
            prompt = ids[:length].unsqueeze(0)  # one by one, so that nothing is padded on the left
            found = self._tokens(model, inputs=prompt, attention_mask=torch.ones_like(prompt), eos_token_id=stop)
            ends.append(bool({*found[0, length:].tolist()} & {*(stop if isinstance(stop, list) else [stop])}))
        return ends

    def __call__(self, model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch) -> list[Generated]:
        """The texts of both models and of the data for a batch, or whether the answers of both models end."""
        if "prompt_length" in batch:
            mine = self.ends(model, batch)
            others: list[Any] = [None] * len(mine) if teacher is None else self.ends(teacher, batch)
            return list(zip(batch["index"].tolist(), mine, [None] * len(mine), others, strict=True))
        labels = [[token for token in row if token != IGNORED] for row in batch["labels"].tolist()]
        known = self.processor.batch_decode(labels, skip_special_tokens=True)
        theirs = [None] * len(known) if teacher is None else self.texts(teacher, batch)
        return list(zip(batch["index"].tolist(), self.texts(model, batch), known, theirs, strict=True))


def _generated_figures(rows: list[Generated]) -> dict[str, float]:
    """The share of texts that equal those of the data, the F1 score of their words, and the share that equal the
    teacher's (`same_text`). For conversations, the shares of answers that end, of the model and of the teacher."""
    if not rows:
        return {}
    _, mine, known, theirs = zip(*rows, strict=True)
    if known[0] is None:
        shares = {"ending_answers": sum(mine) / len(rows)}
        return shares if theirs[0] is None else {**shares, "ending_answers_teacher": sum(theirs) / len(rows)}
    found = scored(TextMatch, mine, known)
    return found if theirs[0] is None else {**found, "same_text": equal_share(mine, theirs)}


class Evaluator:
    """Runs the model on the examples of this process, and computes the metric of the task over all processes."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: str,
        teacher: Teacher | None,
        generation: Generation | None = None,
        megabytes: float = MEGABYTES,
    ) -> None:
        """Prepare evaluations.

        Args:
            accelerator: the processes that evaluate together.
            task: the task of the model.
            teacher: the model to compare with.
            generation: how texts are generated; None if none are.
            megabytes: of logits that are alive together, at most.
        """
        self.accelerator, self.task, self.teacher, self.generation = accelerator, task, teacher, generation
        self.megabytes, self.logits = megabytes, TASKS[task].logits
        self.compares = teacher is not None and TASKS[task].compares

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures of the metric, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, Any, Any]] = []
        agreed: list[tuple[int, int, int]] = []
        texts: list[Generated] = []
        by_row = None if self.logits == "inputs" else ByRow(model, self.megabytes)
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
            if self.generation is not None:
                teacher = None if self.teacher is None else self.teacher.model
                texts += self.generation(model, teacher, batch)
        model.train(was_training)
        found = each_once(gather_object(rows))
        score = Classification if by_row is None else TokenLoss
        result = scored(score, [row[1] for row in found], [row[2] for row in found])
        result |= _generated_figures(each_once(gather_object(texts)))
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
    """Compares evaluations by `--metric_for_best_model`, or by default by the main figure of the task."""

    def __init__(self, recipe: Recipe) -> None:
        name = (recipe.run.metric_for_best_model or recipe.task.figures[0]).removeprefix("eval_")
        self.name, self.sign = f"eval_{name}", 1 if GREATER_IS_BETTER[name] else -1

    def note(self, state: TrainingState, figures: dict[str, float]) -> bool:
        """Record the evaluation of this step in `state`, and return whether it is the best so far."""
        if self.name not in figures:  # its library is missing, and nobody asked for the best model (`recipe_parser.py`)
            return False
        best = state.best.get("figures")
        if best is not None and not self.sign * figures[self.name] > self.sign * best[self.name]:
            return False
        state.best = {"step": state.step, "figures": figures}
        return True
