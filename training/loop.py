"""The training loop: accumulate, step, log, evaluate, save. The same gradients on one process and on many."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.arguments import Recipe
from training.batches import Batch, EvaluationBatches, Stream, TrainBatches, loader
from training.checkpointing import Checkpointer, TrainingState
from training.errors import TrainingError
from training.evaluation import Evaluator
from training.logs import MetricsFile
from training.objectives import Objective
from training.teacher import Teacher


logger = logging.getLogger(__name__)


@dataclass
class Parts:
    """What a run is made of; `run.py` builds it."""

    recipe: Recipe
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    student: PreTrainedModel
    teacher: Teacher | None
    pad_token_id: int
    validation: Stream | None
    metrics: MetricsFile

    def evaluate(self, step: int, tokens: int) -> dict[str, float]:
        """Figures on the validation data, also written to metrics.jsonl."""
        if self.validation is None:
            return {}
        accelerator = self.accelerator
        plan = EvaluationBatches(
            len(self.validation),
            self.recipe.optimization.per_device_eval_batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )
        evaluator = Evaluator(accelerator, self.recipe.model.task, self.teacher)
        figures = evaluator(self.student, loader(self.validation, plan, self.pad_token_id))
        self.metrics.write({"step": step, "tokens": tokens, **figures})
        logger.info("step %d: %s", step, ", ".join(f"{name} {value:.5g}" for name, value in figures.items()))
        return figures


@dataclass
class TrainingPlan:
    """How far to train, and with what."""

    stream: Stream
    total_steps: int
    optimizer: AcceleratedOptimizer
    scheduler: LambdaLR
    module: torch.nn.Module  # StudentWithObjectives, wrapped by accelerate
    objectives: dict[str, tuple[float, Objective]]
    checkpointer: Checkpointer


class TrainingLoop:
    """Runs `plan` from `state` on; a step is one optimizer step."""

    def __init__(self, parts: Parts, plan: TrainingPlan, state: TrainingState) -> None:
        self.parts, self.plan, self.state = parts, plan, state
        self.accelerator, self.run = parts.accelerator, parts.recipe.run
        self.objectives = plan.objectives
        self.sums: dict[str, Tensor] = {}
        self.rates: dict[bool, float] = {}  # of the last step: in the mechanism or not -> learning rate
        self.started, self.tokens_at_start = time.perf_counter(), state.tokens

    @property
    def stateful(self) -> dict[str, Any]:
        """What a checkpoint holds besides weights and random state."""
        found = {"optimizer": self.plan.optimizer, "scheduler": self.plan.scheduler}
        return found if self.accelerator.scaler is None else {**found, "scaler": self.accelerator.scaler}

    def train(self) -> dict[str, float]:
        """Train to the end; returns the figures of the last evaluation."""
        figures = self.parts.evaluate(0, 0) if self.state.step == 0 else {}
        self.parts.student.train()
        self._restart_clock()
        quiet = not self.accelerator.is_main_process
        with tqdm(total=self.plan.total_steps, initial=self.state.step, disable=quiet, desc="training") as progress:
            for window in self._windows():
                self._step([self._to_device(batch) for batch in window])
                progress.update()
                figures = self._after_step(progress) or figures
        return figures

    def _windows(self) -> Iterator[list[Batch]]:
        """The batches of one optimizer step at a time, for this process."""
        plan = self.parts.recipe.optimization
        positions = TrainBatches(
            self.state.step,
            self.plan.total_steps,
            plan.per_device_train_batch_size,
            plan.gradient_accumulation_steps,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        window: list[Batch] = []
        for batch in loader(self.plan.stream, positions, self.parts.pad_token_id):
            window.append(batch)
            if len(window) == plan.gradient_accumulation_steps:
                yield window
                window = []

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.accelerator.device, non_blocking=True) for name, value in batch.items()}

    def _step(self, window: list[Batch]) -> None:
        """One optimizer step over the accumulated batches `window` of every process."""
        counts = self._global_counts(window)
        # DistributedDataParallel averages gradients over processes; the loss is a sum over them
        scales = {name: self.accelerator.num_processes / counts[name].clamp(min=1) for name in self.objectives}
        for number, batch in enumerate(window, 1):
            last = number == len(window)
            with nullcontext() if last else self.accelerator.no_sync(self.plan.module):
                targets = self.parts.teacher(batch) if self._uses_teacher() and self.parts.teacher else None
                loss, parts = self.plan.module(batch, targets, scales)
                self.accelerator.backward(loss)
            self._add({name: value / self.accelerator.num_processes for name, value in parts.items()})
        self._update()
        self.state.step += 1
        self.state.tokens += int(counts["tokens"])
        self.state.steps_in_sums += 1

    def _uses_teacher(self) -> bool:
        return any(objective.needs_teacher for _, objective in self.objectives.values())

    def _global_counts(self, window: list[Batch]) -> dict[str, Tensor]:
        """Tokens, and units of every objective, in the whole step."""
        rows = [
            torch.stack([batch["attention_mask"].sum(), *(o.units(batch) for _, o in self.objectives.values())])
            for batch in window
        ]
        total = self.accelerator.reduce(torch.stack(rows).sum(0), reduction="sum")
        return dict(zip(["tokens", *self.objectives], total, strict=True))

    def _update(self) -> None:
        limit = self.parts.recipe.optimization.max_grad_norm
        parameters = [parameter for parameter in self.plan.module.parameters() if parameter.requires_grad]
        norm = self.accelerator.clip_grad_norm_(parameters, limit if limit else math.inf)
        self._add({"grad_norm": norm.detach() / self.accelerator.num_processes})
        self.rates = {group["mechanism"]: group["lr"] for group in self.plan.optimizer.param_groups}
        self.plan.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.plan.scheduler.step()
        self.plan.optimizer.zero_grad()

    def _add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value

    def _collect(self) -> None:
        """Move this process's sums into the global ones in `state`."""
        names = sorted(self.sums)
        if names:
            total = self.accelerator.reduce(torch.stack([self.sums[name].float() for name in names]), reduction="sum")
            for name, value in zip(names, total.tolist(), strict=True):
                self.state.sums[name] = self.state.sums.get(name, 0.0) + value
        self.sums = {}

    def _after_step(self, progress: Any) -> dict[str, float]:
        step, run, last = self.state.step, self.run, self.state.step == self.plan.total_steps
        if step % run.logging_steps == 0 or last:
            self._log(progress)
        pause = time.perf_counter()
        figures = self.parts.evaluate(step, self.state.tokens) if last or _due(step, run.eval_steps) else {}
        if _due(step, run.checkpointing_steps):
            self._collect()
            self.plan.checkpointer.save(self.state, self.parts.student, self.parts.tokenizer, self.stateful)
        self.started += time.perf_counter() - pause  # neither is training time
        return figures

    def _log(self, progress: Any) -> None:
        self._collect()
        means = {name: value / self.state.steps_in_sums for name, value in self.state.sums.items()}
        norm = means.pop("grad_norm")
        loss = sum(self.objectives[name][0] * value for name, value in means.items())
        event = {
            "step": self.state.step,
            "tokens": self.state.tokens,
            "loss": loss,
            **means,
            "grad_norm": norm,
            "learning_rate": self.rates.get(False, self.rates.get(True)),
            **({"mechanism_learning_rate": self.rates[True]} if len(self.rates) > 1 else {}),
            "tokens_per_second": (self.state.tokens - self.tokens_at_start) / (time.perf_counter() - self.started),
        }
        self.parts.metrics.write(event)
        progress.set_postfix(loss=f"{loss:.4g}")
        self.state.sums, self.state.steps_in_sums = {}, 0
        self._restart_clock()
        if not math.isfinite(loss):
            raise TrainingError(f"the loss is {loss} at step {self.state.step}; lower --learning_rate")

    def _restart_clock(self) -> None:
        self.started, self.tokens_at_start = time.perf_counter(), self.state.tokens


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
