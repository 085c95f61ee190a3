"""The training loop: it accumulates gradients, steps, logs, evaluates and saves.

The gradients do not depend on the number of processes.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from hf_linear_attention._common.errors import TerminatedError, TrainingError
from hf_linear_attention.training.checkpoints import TrainedParameters, TrainingState
from hf_linear_attention.training.context import RunContext
from hf_linear_attention.training.data.batches import Batch, count_units
from hf_linear_attention.training.distributed import engine_of, zero_backward, zero_step
from hf_linear_attention.training.evaluation.evaluator import Selection
from hf_linear_attention.training.losses.combined_loss import LOSS, layer_name, weighted_sum
from hf_linear_attention.training.training_plan import TrainingPlan


logger = logging.getLogger(__name__)


class TrainingLoop:
    """Runs `plan`, starting at `state`; a step is one optimizer step."""

    def __init__(self, context: RunContext, plan: TrainingPlan, state: TrainingState) -> None:
        self.context, self.plan, self.state = context, plan, state
        self.accelerator, self.run = context.accelerator, context.recipe.run
        self.engine = engine_of(self.accelerator)
        self.objectives, self.selection, self.termination = plan.objectives, Selection(context.recipe), Termination()
        self.is_terminated = False
        self.sums: dict[str, Tensor] = {}
        self.rates: dict[bool, float] = {}  # learning rates of the last step; True is the key of the mechanism's rate
        self.started, self.tokens_at_start = time.perf_counter(), state.tokens

    @property
    def stateful(self) -> dict[str, Any]:
        """The objects whose state a checkpoint holds besides what accelerate saves, by name."""
        found: dict[str, Any] = {} if self.engine is not None else {"optimizer": self.plan.optimizer}
        if self.context.recipe.model.trains_beside:
            found["trained"] = TrainedParameters(self.context.student)
        if self.plan.transfer.patience is not None:
            found["transfer"] = self.plan.transfer
        if self.context.average is not None:
            found["average"] = self.context.average
        return found

    def train(self) -> dict[str, float]:
        """Train to the end, and return the figures of the last evaluation."""
        figures = self.context.evaluate(0, 0) if self.state.step == 0 else {}
        self.context.student.train()
        self._restart_clock()
        quiet = not self.accelerator.is_main_process
        progress = tqdm(total=self.plan.total_steps, initial=self.state.step, disable=quiet, desc="training")
        with progress, self.termination:
            for window in self._windows():
                self._step([self._to_device(batch) for batch in window])
                progress.update()
                figures = self._after_step(progress) or figures
                if self.selection.is_over(self.state):
                    count = self.state.evaluations_since_best
                    logger.info("training stops early, because the last %d evaluations brought no improvement", count)
                    break
                if self.plan.transfer.is_over:
                    logger.info("training stops early, because no layer improves any more")
                    break
        return figures

    def _windows(self) -> Iterator[list[Batch]]:
        """The batches of this process, in lists for one optimizer step each."""
        size = self.context.recipe.optimization.gradient_accumulation_steps
        window: list[Batch] = []
        for batch in self.plan.inputs.batches(self.state.step, self.plan.total_steps):
            window.append(batch)
            if len(window) == size:
                yield window
                window = []

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.accelerator.device, non_blocking=True) for name, value in batch.items()}

    def _step(self, window: list[Batch]) -> None:
        """Make one optimizer step with the batches `window` of every process."""
        counts = self._global_counts(window)
        # DistributedDataParallel averages gradients over the processes, but the loss is a sum over them.
        scales = {name: self.accelerator.num_processes / counts[name].clamp(min=1) for name in self.objectives}
        losses: list[Tensor] = []
        for number, batch in enumerate(window, 1):
            last = number == len(window)
            synchronization = nullcontext() if last else self.accelerator.no_sync(self.plan.synchronized)
            with synchronization, self.plan.window_dropout.drawn(self.state.step):
                teacher = self.plan.cached or self.context.teacher
                targets = teacher(batch) if self._uses_teacher() and teacher else None
                loss, figures = self.plan.module(batch, targets, scales)
                self._backward(loss, last)
            losses.append(loss.detach())
            self._add({name: value / self.accelerator.num_processes for name, value in figures.items()})
        norm = self._clip()
        self._refuse_what_is_not_finite(window, torch.stack(losses), norm)
        self._update(norm)
        self.state.step += 1
        self.state.tokens += int(counts["tokens"])
        self.state.steps_in_sums += 1
        self.is_terminated = bool(counts["terminated"])

    def _backward(self, loss: Tensor, last: bool) -> None:
        if self.engine is None:
            self.accelerator.backward(loss)
        else:
            zero_backward(self.engine, loss, last)

    def _uses_teacher(self) -> bool:
        return any(objective.needs_teacher for _, objective in self.objectives.values())

    def _global_counts(self, window: list[Batch]) -> dict[str, Tensor]:
        """Numbers of tokens, of units of every objective, and of processes that received SIGTERM, in the whole step."""
        rows = [
            torch.stack([count_units(batch), *(o.units(batch) for _, o in self.objectives.values())])
            for batch in window
        ]
        mine = torch.cat([torch.stack(rows).sum(0), rows[0].new_tensor([self.termination.requested])])
        total = self.accelerator.reduce(mine, reduction="sum")
        return dict(zip(["tokens", *self.objectives, "terminated"], total, strict=True))

    def _clip(self) -> Tensor:
        """Clip the gradients (DeepSpeed also steps), and return their norm before that, the same on all processes."""
        if self.engine is not None:
            return zero_step(self.engine).to(self.accelerator.device)
        limit = self.context.recipe.optimization.max_grad_norm
        parameters = [parameter for parameter in self.plan.module.parameters() if parameter.requires_grad]
        norm = self.accelerator.clip_grad_norm_(parameters, limit if limit else math.inf)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _refuse_what_is_not_finite(self, window: list[Batch], losses: Tensor, norm: Tensor) -> None:
        """Raise an error before a loss or gradient that is not finite reaches the weights.

        Gradients are not checked if there is a gradient scaler, which skips steps with infinite gradients by itself.
        """
        is_bad = ~losses.isfinite()
        wrong = is_bad.any() | (~norm.isfinite() if self.accelerator.scaler is None else False)
        if not self.accelerator.reduce(wrong.long(), reduction="sum"):
            return
        mine = [index for batch, bad in zip(window, is_bad) for index in batch["index"].tolist() if bad]
        everything = [index for batch in window for index in batch["index"].tolist()]
        found = gather_object([mine]), gather_object([everything])
        examples = sorted({index for part in (found[0] if any(found[0]) else found[1]) for index in part})
        what = "loss" if any(found[0]) else "gradient"
        raise TrainingError(
            f"the {what} of step {self.state.step + 1} is not finite (training examples {examples}); "
            f"nothing was overwritten, and {self.plan.checkpointer.last_good()}; lower `--learning_rate` or check the "
            "data"
        )

    def _update(self, norm: Tensor) -> None:
        self._add({"grad_norm": norm.detach() / self.accelerator.num_processes})
        self.rates = {group["mechanism"]: group["lr"] for group in self.plan.optimizer.param_groups}
        self.plan.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.plan.scheduler.step()
            if self.context.average is not None:
                self.context.average.update()
        self.plan.optimizer.zero_grad()

    def _add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=value.device)) + value

    def _collect(self) -> None:
        """Add the sums of all processes to those in `state`, and reset them."""
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
        last = last or self.plan.transfer.is_over
        pause = time.perf_counter()
        figures = self.context.evaluate(step, self.state.tokens) if last or _due(step, run.eval_steps) else {}
        is_best = bool(figures) and self.selection.note(self.state, figures)
        if _due(step, run.checkpointing_steps) or self.is_terminated or (is_best and run.load_best_model_at_end):
            self._save()
        self.started += time.perf_counter() - pause  # evaluating and saving are not training time
        return figures

    def _save(self) -> None:
        self._collect()
        saved = self.plan.checkpointer.save(self.state, self.context.student, self.context.processor, self.stateful)
        if self.is_terminated:
            raise TerminatedError(f"{saved} was written; `--resume_from_checkpoint latest` resumes from it")

    def _log(self, progress: Any) -> None:
        self._collect()
        means = {name: value / self.state.steps_in_sums for name, value in self.state.sums.items()}
        norm, loss = means.pop("grad_norm"), means.pop(LOSS)
        unit = self.context.recipe.unit
        event = {
            "step": self.state.step,
            unit: self.state.tokens,
            LOSS: loss,
            **means,
            "grad_norm": norm,
            "learning_rate": self.rates.get(False, self.rates.get(True)),
            **({"mechanism_learning_rate": self.rates[True]} if len(self.rates) > 1 else {}),
            f"{unit}_per_second": (self.state.tokens - self.tokens_at_start) / (time.perf_counter() - self.started),
        }
        self.context.record(event)
        speed = f"{unit}_per_second"
        progress.set_postfix({LOSS: f"{loss:.4g}", speed: f"{event[speed]:,.0f}"})
        self._note_layers(means)
        self.state.sums, self.state.steps_in_sums = {}, 0
        self._restart_clock()

    def _note_layers(self, means: dict[str, float]) -> None:
        errors = {
            layer: weighted_sum(self.objectives, {name: means[layer_name(name, layer)] for name in self.objectives})
            for layer in self.plan.transfer.learning
            if any(objective.observes_attention for _, objective in self.objectives.values())
        }
        self.plan.transfer.note(errors)

    def _restart_clock(self) -> None:
        self.started, self.tokens_at_start = time.perf_counter(), self.state.tokens


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class Termination:
    """Inside `with`, SIGTERM only sets `requested`; after it, SIGTERM has its earlier effect again."""

    requested = False

    def __enter__(self) -> Termination:
        self._is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
        if self._is_main:
            self._previous: Any = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._previous)
