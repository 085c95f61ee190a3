"""Evaluation of a model with logits on a data set, the same on any number of processes, and the best evaluation.

scikit-learn, scipy, seqeval and jiwer compute scores; this file computes what they lack: means, and the F1 score of the
words of texts as in SQuAD's evaluation. What needs a library that is missing is left out (`tasks.py`).

With `--predict_with_generate`, models also generate texts for the inputs.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from hf_linear_attention.training.losses.outputs import logits_of, run_model, scored_logits
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import RETRIEVAL, TASKS, can_score


GREATER_IS_BETTER = {
    **dict.fromkeys(("nats_per_token", "perplexity", "wer", "cer"), False),
    **dict.fromkeys(("accuracy", "f1", "exact_match", "same_text", "spearman", "cosine", "cosine_min"), True),
    **dict.fromkeys(RETRIEVAL, True),
}


def token_loss(nats: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Nats per token and perplexity, given the summed nats and the number of scored tokens of every text."""
    count = sum(tokens)
    mean = math.fsum(nats) / max(count, 1)
    return {"nats_per_token": mean, "perplexity": math.exp(min(mean, 700.0)), "tokens": count}


def classification(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Accuracy and F1 score of class indices.

    F1 is that of class 1 if there are two classes, otherwise the mean over the classes that occur.
    """
    found: dict[str, float] = {"accuracy": equal_share(predictions, references), "samples": len(references)}
    if can_score("sklearn"):
        from sklearn.metrics import f1_score

        average = "binary" if {*predictions, *references} <= {0, 1} else "macro"
        found["f1"] = float(f1_score(references, predictions, average=average, zero_division=0))
    return found


def equal_share(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """The share of predictions that equal their references."""
    return sum(a == b for a, b in zip(predictions, references, strict=True)) / max(len(references), 1)


def tagging(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Accuracy of the tags of words, and F1 score of the spans that they mark, given the tags of every text.

    With tags such as B-PER and I-PER, a span counts only if its type, beginning and end are right, as in CoNLL-2000's
    evaluation; I-X that continues no X begins a span. A tag without such a beginning, but O, marks its own word.
    """
    mine, yours = ([tag for row in rows for tag in row] for rows in (predictions, references))
    found: dict[str, float] = {"accuracy": equal_share(mine, yours), "words": len(yours)}
    if can_score("seqeval"):
        from seqeval.metrics import f1_score

        spans = ([[_as_span(tag) for tag in row] for row in rows] for rows in (references, predictions))
        found["f1"] = float(f1_score(*spans, zero_division=0))
    return found


def _as_span(tag: str) -> str:
    """The tag as seqeval reads it, which takes the first letter of a tag without a hyphen for its beginning."""
    return tag if tag == "O" or re.match(r"[BIES]-", tag) else f"B-{tag}"


def text_match(
    predictions: Sequence[str], references: Sequence[Sequence[str]], ignores_case: bool = True
) -> dict[str, float]:
    """Share of texts that equal a reference, and mean F1 score of their words. Each text has one reference or more.

    The best reference counts. With `ignores_case`, case, punctuation and the articles a, an, the do not count, as in
    SQuAD's evaluation.
    """
    words = counted_words if ignores_case else str.split
    pairs = [(words(mine), [words(yours) for yours in known]) for mine, known in zip(predictions, references)]
    count = max(len(pairs), 1)
    exact = sum(mine in known for mine, known in pairs)
    f1 = math.fsum(max((word_f1(mine, yours) for yours in known), default=0.0) for mine, known in pairs)
    return {"exact_match": exact / count, "f1": f1 / count, "texts": len(pairs)}


def counted_words(text: str) -> list[str]:
    """The words of a text that count."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def word_f1(mine: Sequence[str], yours: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words `mine`; 1 if there are none in either."""
    if not mine or not yours:
        return float(mine == yours)
    return 2 * (Counter(mine) & Counter(yours)).total() / (len(mine) + len(yours))


def error_rates(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Word error rate and character error rate. Case and punctuation count, white space only separates words."""
    found: dict[str, float] = {"texts": len(references)}
    if references and can_score("jiwer"):
        import jiwer

        mine, yours = ([" ".join(text.split()) for text in texts] for texts in (predictions, references))
        found |= {"wer": jiwer.wer(yours, mine), "cer": jiwer.cer(yours, mine)}
    return found


def spearman(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Spearman's rank correlation, with mean ranks for ties; NaN if predictions or references are constant."""
    if not can_score("scipy"):
        return {}
    from scipy.stats import spearmanr

    constant = min(len({*predictions}), len({*references})) < 2  # scipy would warn
    return {"spearman": math.nan if constant else float(spearmanr(predictions, references).statistic)}


MODEL_INPUTS = ("input_ids", "attention_mask", "input_features", "input_values")
# Number of an example, the text of the model, that of the data, and that of the teacher, if there is one; for
# conversations, which have no text of the data here, whether the answer of each model ended.
Generated = tuple[int, Any, str | None, Any]
LONGEST_ANSWER = 30  # tokens, as in the evaluation of BERT on SQuAD

Figures = tuple[list[Any], list[Any]]
"""Prediction and reference of every example in a batch, in the form that the score expects."""


def token_nats(batch: Batch, outputs: Any, task: str) -> Figures:
    """The summed cross-entropy and the number of scored tokens of every text."""
    labels = aligned_labels(batch, task)
    logits = outputs.logits.float().flatten(0, 1)  # classes in the middle take several times as long
    nats = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none").view(labels.shape)
    return nats.double().sum(-1).tolist(), (labels != IGNORED).sum(-1).tolist()


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


Score = Callable[..., dict[str, float]]
# How the predictions of a task are read from a batch and its outputs, and their score. Other tasks with logits are
# scored by their nats per token, and tasks without by the similarity to the teacher (`embeddings.py`).
SCORES: dict[str, tuple[Callable[[Batch, Any, Mapping[int, str]], Figures], Score]] = {
    "sequence_classification": (_classes, classification),
    "image_classification": (_classes, classification),
    "token_classification": (_tags, tagging),
    "question_answering": (_answers, text_match),
    "ctc": (_frames, error_rates),
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
    found = error_rates(mine, known) if is_speech else text_match(mine, [[text] for text in known], ignores_case=False)
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
    ) -> None:
        """Prepare evaluations.

        Args:
            accelerator: the processes that evaluate together.
            task: the task of the model.
            teacher: the model to compare with.
            generation: how texts are generated; None if none are.
            examples: the examples that are evaluated; they turn spans and frames into texts.
        """
        self.accelerator, self.task, self.teacher, self.generation = accelerator, task, teacher, generation
        self.examples = examples
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
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            with self.accelerator.autocast():
                outputs = run_model(model, batch, None)
                read = SCORES[self.task][0] if self.task in SCORES else None
                figures = token_nats(batch, outputs, self.task) if read is None else read(batch, outputs, names)
            index = batch["index"].tolist()
            rows += zip(index, *figures, strict=True)
            if self.compares:
                agreed += zip(index, *self._agreement(batch, outputs), strict=True)
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
        score = SCORES[self.task][1] if self.task in SCORES else token_loss
        predictions, references = [row[1] for row in rows], [row[2] for row in rows]
        if self.logits in ("spans", "frames"):
            whole: Any = self.examples.examples if isinstance(self.examples, FirstExamples) else self.examples
            predictions, references = whole.texts([row[:2] for row in rows])
        return score(predictions, references)

    def _agreement(self, batch: Batch, outputs: Any) -> tuple[list[int], list[int]]:
        """For every example, how many rows of its logits have their maximum where the teacher's have, of how many."""
        if self.teacher is None:
            raise RuntimeError("there is no teacher to agree with")
        mine, mask = logits_of(outputs, batch), scored_logits(batch, self.logits)
        if mine is None:
            raise RuntimeError("the model has no logits")
        same = (self.teacher.all_logits(batch).argmax(-1) == mine.argmax(-1)) & mask
        shape = len(mask), -1
        return same.reshape(shape).sum(-1).tolist(), mask.reshape(shape).sum(-1).tolist()


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
