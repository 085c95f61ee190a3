"""The context of a run: its recipe, processes, models and validation data, and where its figures are written."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.processors import Processor, tokenizer_of
from hf_linear_attention.training.distributed import uses_deepspeed
from hf_linear_attention.training.evaluation.embedding_evaluator import EmbeddingEvaluator
from hf_linear_attention.training.evaluation.evaluator import Evaluator
from hf_linear_attention.training.evaluation.generated import Generation
from hf_linear_attention.training.evaluation.retrieval_figures import RetrievalTest
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.models import WeightAverage
from hf_linear_attention.training.recipe import Recipe, parse_dims
from hf_linear_attention.training.tracking import MetricsFile


logger = logging.getLogger(__name__)


@dataclass
class RunContext:
    """Everything that a run works with; `run.py` builds it."""

    recipe: Recipe
    accelerator: Accelerator
    processor: Processor
    student: PreTrainedModel
    teacher: Teacher | None
    pad_token_id: int
    validation: Stream | None
    metrics: MetricsFile
    average: WeightAverage | None = None
    retrieval: RetrievalTest | None = None
    known: dict[str, float] = field(default_factory=dict)  # figures of the student before training, if already measured

    def final_weights(self) -> AbstractContextManager[None]:
        """Inside, the student has the weights that would be saved as the result: with `--ema_decay`, the average."""
        return self.average.applied() if self.average is not None else nullcontext()

    def evaluate(self, step: int, tokens: int) -> dict[str, float]:
        """Evaluate the student on the validation data, and write the figures to metrics.jsonl and the trackers."""
        if self.validation is None:
            return {}
        figures = self.known if step == 0 and self.known else self._measured(self.validation)
        self.record({"step": step, self.recipe.unit: tokens, **figures})
        logger.info("step %d: %s", step, ", ".join(f"{name} {value:.5g}" for name, value in figures.items()))
        return figures

    def _measured(self, validation: Stream) -> dict[str, float]:
        accelerator = self.accelerator
        plan = EvaluationBatches(
            len(validation),
            self.recipe.optimization.per_device_eval_batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        evaluator = self._evaluator(validation)
        with self.final_weights():
            return evaluator(self.student, loader(validation, plan, self.pad_token_id))

    def _evaluator(self, validation: Stream) -> Evaluator | EmbeddingEvaluator:
        recipe = self.recipe
        if recipe.task.logits is not None:
            return Evaluator(self.accelerator, recipe.model.task, self.teacher, self._generation(), validation.examples)
        if self.teacher is None:
            raise RuntimeError("an embedding model is compared with its teacher, but there is no teacher")
        dims = parse_dims(recipe.task_options.matryoshka_dims)
        return EmbeddingEvaluator(
            self.accelerator,
            self.teacher,
            recipe.pooling,
            dims,
            self.retrieval,
            recipe.optimization.per_device_eval_batch_size,
        )

    def _generation(self) -> Generation | None:
        options = self.recipe.task_options
        if not options.predict_with_generate:
            return None
        is_sharded = self.accelerator.is_fsdp2 or uses_deepspeed(self.accelerator)
        return Generation(tokenizer_of(self.processor), options.generation_max_length, is_sharded)

    def record(self, event: dict[str, Any]) -> None:
        """Write a line to metrics.jsonl, and send it to the trackers."""
        self.metrics.write(event)
        self.accelerator.log({name: value for name, value in event.items() if name != "step"}, step=event["step"])
