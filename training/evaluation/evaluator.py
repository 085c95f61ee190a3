"""Evaluation of a model with logits on a data set, the same on any number of processes, and the best evaluation.

With `--predict_with_generate`, models also generate texts for the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from hf_linear_attention.training.data.packing import IGNORED, FirstExamples
from hf_linear_attention.training.evaluation.scores import (
    GREATER_IS_BETTER,
    Classification,
    ErrorRates,
    Score,
    Tagging,
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


MODEL_INPUTS = ("input_ids", "attention_mask", "input_features", "input_values")
# Number of an example, the text of the model, that of the data, and that of the teacher, if there is one; for
# conversations, which have no text of the data here, whether the answer of each model ended.
Generated = tuple[int, Any, str | None, Any]
LONGEST_ANSWER = 30  # tokens, as in the evaluation of BERT on SQuAD

Figures = tuple[list[Any], list[Any]]
"""Prediction and reference of every example in a batch, in the form that the score expects."""


def _classes(batch: Batch, outputs: Any, names: Mapping[int, str]) -> Figures:
    return outputs.logits.argmax(-1).tolist(), batch["labels"].tolist()


def _answers(batch: Batch, outputs: Any, names: Mapping[int, str]) -> Figures:
    """The best span of every context: its score, first and last token, and the score of the empty answer (token 0)."""
    starts, ends = (x.double() for x in (outputs.start_logits, outputs.end_logits))
    outside = (batch["context_mask"] == 0).unsqueeze(1)
    length = starts.shape[1]
    is_span = torch.ones(length, length, dtype=torch.bool, device=starts.device).triu().tril(LONGEST_ANSWER - 1)
    scores = (starts.unsqueeze(2) + ends.unsqueeze(1)).masked_fill(~is_span | outside | outside.mT, -torch.inf)
    best, place = scores.flatten(1).max(-1)
    rows = torch.stack([best, place // length, place % length, starts[:, 0] + ends[:, 0]], dim=-1)
    return rows.tolist(), [0] * len(rows)


def _tags(batch: Batch, outputs: Any, names: Mapping[int, str]) -> Figures:
    """The names of the classes of the words of every text."""
    pairs = zip(outputs.logits.argmax(-1).tolist(), batch["labels"].tolist(), strict=True)
    kept = [[(a, b) for a, b in zip(mine, yours, strict=True) if b != IGNORED] for mine, yours in pairs]
    return [[names[a] for a, _ in row] for row in kept], [[names[b] for _, b in row] for row in kept]


def _frames(batch: Batch, outputs: Any, names: Mapping[int, str]) -> Figures:
    """The likeliest token of every frame of every recording."""
    counts = batch["frame_mask"].sum(-1).tolist()
    rows = outputs.logits.argmax(-1).tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)], [0] * len(rows)


# How the predictions of a task are read from a batch and its outputs, and their score. Other tasks with logits are
# scored by their nats per token, and tasks without by the similarity to the teacher (`embeddings.py`).
SCORES: dict[str, tuple[Callable[[Batch, Any, Mapping[int, str]], Figures], type[Score]]] = {
    "sequence_classification": (_classes, Classification),
    "image_classification": (_classes, Classification),
    "token_classification": (_tags, Tagging),
    "question_answering": (_answers, TextMatch),
    "ctc": (_frames, ErrorRates),
}


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
        found = self._tokens(model, **{name: batch[name] for name in MODEL_INPUTS if name in batch})
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


def _generated_figures(rows: list[Generated], is_speech: bool) -> dict[str, float]:
    """The share of texts that equal those of the data, the F1 score of their words, and the share that equal the
    teacher's (`same_text`). For conversations, the shares of answers that end, of the model and of the teacher. For
    speech, error rates instead of the share and the F1 score."""
    if not rows:
        return {}
    _, mine, known, theirs = zip(*rows, strict=True)
    if known[0] is None:
        shares = {"ending_answers": sum(mine) / len(rows)}
        return shares if theirs[0] is None else {**shares, "ending_answers_teacher": sum(theirs) / len(rows)}
    if is_speech:
        found = scored(ErrorRates, mine, known)
    else:
        found = scored(TextMatch, mine, [[text] for text in known], ignores_case=False)
    return found if theirs[0] is None else {**found, "same_text": equal_share(mine, theirs)}


class Evaluator:
    """Runs the model on the examples of this process, and computes the metric of the task over all processes."""

    def __init__(
        self,
        accelerator: Accelerator,
        task: str,
        teacher: Teacher | None,
        generation: Generation | None = None,
        examples: Any = None,
        megabytes: float = MEGABYTES,
    ) -> None:
        """Prepare evaluations.

        Args:
            accelerator: the processes that evaluate together.
            task: the task of the model.
            teacher: the model to compare with.
            generation: how texts are generated; None if none are.
            examples: the examples that are evaluated; they turn spans and frames into texts.
            megabytes: of logits that are alive together, at most.
        """
        self.accelerator, self.task, self.teacher, self.generation = accelerator, task, teacher, generation
        self.examples, self.megabytes = examples, megabytes
        self.logits = TASKS[task].logits
        self.compares = teacher is not None and TASKS[task].compares

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures of the metric, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, Any, Any]] = []
        agreed: list[tuple[int, int, int]] = []
        texts: list[Generated] = []
        names = {int(index): str(name) for index, name in (model.config.id2label or {}).items()}
        by_row = None if self.task in SCORES else ByRow(model, self.megabytes)
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            with self.accelerator.autocast():
                if by_row is None:
                    outputs = run_model(model, batch, None)
                    figures, same = SCORES[self.task][0](batch, outputs, names), self._same(batch, outputs)
                else:
                    figures, same = self._token_figures(by_row, batch)
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
        result = self._result(each_once(gather_object(rows)))
        result |= _generated_figures(each_once(gather_object(texts)), TASKS[self.task].inputs == "sound")
        if self.compares:
            counts = [row[1:] for row in each_once(gather_object(agreed))]
            result["agreement"] = sum(hits for hits, _ in counts) / max(sum(count for _, count in counts), 1)
        return {f"eval_{name}": value for name, value in result.items()}

    def _result(self, rows: list[tuple[int, Any, Any]]) -> dict[str, float]:
        score = SCORES[self.task][1] if self.task in SCORES else TokenLoss
        predictions, references = [row[1] for row in rows], [row[2] for row in rows]
        if self.logits in ("spans", "frames"):
            whole: Any = self.examples.examples if isinstance(self.examples, FirstExamples) else self.examples
            predictions, references = whole.texts([row[:2] for row in rows])
        return scored(score, predictions, references)

    def _same(self, batch: Batch, outputs: Any) -> Tensor | None:
        """Whether each row of the logits has its maximum where the teacher's has; None if they are not compared."""
        if self.teacher is None or not self.compares:
            return None
        mine = logits_of(outputs, batch)
        if mine is None:
            raise RuntimeError("the model has no logits")
        best = mine.argmax(-1)
        theirs = self.teacher.rows(batch)(torch.arange(best.numel(), device=best.device))
        return theirs.argmax(-1).view(best.shape) == best

    def _token_figures(self, by_row: ByRow, batch: Batch) -> tuple[Figures, Tensor | None]:
        """The summed cross-entropy and the number of scored tokens of every text, and what `_same` returns."""
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
