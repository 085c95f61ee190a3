"""A run's models and evaluation, and its training loop: it accumulates gradients, steps, logs, evaluates and saves.

The gradients do not depend on the number of processes, nor on how a step is divided into batches (`objectives.py`).
So the loop counts the units of all batches of a step before the first backward pass, which `Accelerator.accumulate`
cannot do: it sees one batch at a time, and divides each loss by their number.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, get_scheduler

from hf_linear_attention._common.devices import SHORTEST_ROW
from hf_linear_attention._common.errors import TerminatedError, TrainingError, is_out_of_memory, one_line
from hf_linear_attention.training.checkpoints import Checkpointer, TrainedParameters, TrainingState
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, TrainInputs, count_units, loader
from hf_linear_attention.training.data.packing import Blocks
from hf_linear_attention.training.data.processors import Processor, mean_exact_tokens
from hf_linear_attention.training.evaluation.embeddings import EmbeddingEvaluator
from hf_linear_attention.training.evaluation.evaluator import Evaluator, Selection
from hf_linear_attention.training.evaluation.recall import RecallProbe
from hf_linear_attention.training.losses.objectives import LOSS, Objective, StudentWithObjectives
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.models import parameter_groups
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import MetricsFile


logger = logging.getLogger(__name__)


class OutOfMemoryError(TrainingError):
    """`cause` says that there is no memory for the first step: for `rows` rows at once, of `length` tokens.

    `length` is None if rows may not be shorter: they are no parts of a long text, or would be no longer than what stays
    exact, so that nothing would be learnt of far keys.
    """

    def __init__(self, cause: Exception, rows: int, length: int | None) -> None:
        super().__init__(one_line(cause))
        self.cause, self.rows, self.length = cause, rows, length


Objectives = dict[str, tuple[float, Objective]]
"""Objectives with their weights, by name."""


@dataclass
class RunContext:
    """What a run works with, and how its student is evaluated; `run.py` builds it."""

    recipe: Recipe
    accelerator: Accelerator
    processor: Processor
    student: PreTrainedModel
    teacher: Teacher | None
    pad_token_id: int
    validation: Stream | None
    metrics: MetricsFile
    recall: RecallProbe | None = None
    known: dict[str, float] = field(default_factory=dict)  # figures of the student before training, if already measured
    eval_rows: int = field(init=False)  # those of one forward pass; fewer than the recipe's where there is no memory

    def __post_init__(self) -> None:
        """Begin evaluations with as many rows as the recipe says."""
        self.eval_rows = self.recipe.optimization.per_device_eval_batch_size

    def evaluate(self, step: int, tokens: int) -> dict[str, float]:
        """Evaluate the student, and write the figures to metrics.jsonl and the trackers."""
        figures = self.known if step == 0 and self.known else self._measured()
        if figures:
            self.record({"step": step, self.recipe.unit: tokens, **figures})
            logger.info("step %d: %s", step, ", ".join(f"{name} {value:.5g}" for name, value in figures.items()))
        return figures

    def _measured(self) -> dict[str, float]:
        """The figures of the validation data, if there is any, and recall."""
        figures = {} if self.validation is None else self._validated(self.validation)
        return figures | (self.recall(self.student, self.accelerator.autocast) if self.recall is not None else {})

    def _validated(self, validation: Stream) -> dict[str, float]:
        accelerator, mode = self.accelerator, self.student.training
        place = accelerator.process_index, accelerator.num_processes
        while True:
            plan = EvaluationBatches(len(validation), self.eval_rows, *place)
            try:
                return self._evaluator()(self.student, loader(validation, plan, self.pad_token_id))
            except (RuntimeError, MemoryError) as error:
                if self.eval_rows == 1 or accelerator.num_processes > 1 or not is_out_of_memory(error):
                    raise
            self.student.train(mode)
            before, self.eval_rows = self.eval_rows, self.eval_rows // 2
            text = "there is no memory to evaluate %d rows at once; evaluations take %d now, with the same result"
            logger.warning(text, before, self.eval_rows)

    def _evaluator(self) -> Evaluator | EmbeddingEvaluator:
        recipe = self.recipe
        if recipe.task.logits is not None:
            return Evaluator(self.accelerator, recipe.model.task, self.teacher)
        if self.teacher is None:
            raise RuntimeError("an embedding model is compared with its teacher, but there is no teacher")
        return EmbeddingEvaluator(self.accelerator, self.teacher, recipe.pooling)

    def record(self, event: dict[str, Any]) -> None:
        """Write a line to metrics.jsonl, and send it to the trackers."""
        self.metrics.write(event)
        self.accelerator.log({name: value for name, value in event.items() if name != "step"}, step=event["step"])


class TrainingLoop:
    """Trains the student of `context`; a step is one optimizer step.

    It freezes, wraps or shards the parameters of the student as the recipe and the launch file say.
    """

    def __init__(self, context: RunContext, inputs: TrainInputs, objectives: Objectives) -> None:
        self.context, self.accelerator, self.run = context, context.accelerator, context.recipe.run
        self.inputs, self.objectives = inputs, objectives
        self.selection, self.termination = Selection(context.recipe), threading.Event()
        self.total_steps = inputs.total_steps()
        inputs.warn_of_repetition(self.total_steps)
        self._prepare()
        self.state, self.is_terminated = TrainingState(), False
        self.sums: dict[str, Tensor] = {}
        self.rates: dict[bool, float] = {}  # learning rates of the last step; True is the key of the mechanism's rate
        self._restart_clock()

    def _prepare(self) -> None:
        """Make optimizer, schedule and losses, wrapped by accelerate."""
        context, recipe, accelerator = self.context, self.context.recipe, self.accelerator
        optimization, student = recipe.optimization, context.student
        # In one pass over each parameter; by default torch takes a dozen on a CPU.
        is_fused = accelerator.device.type == "cpu"
        optimizer = torch.optim.AdamW(parameter_groups(student, recipe), fused=is_fused or None)
        warmup = math.ceil(optimization.warmup_ratio * self.total_steps)
        # The scheduler is not prepared, because accelerate would advance it once per process.
        self.scheduler = get_scheduler(optimization.lr_scheduler_type, optimizer, warmup, self.total_steps)
        layers = hidden_layers_of(recipe, self.objectives)
        module = StudentWithObjectives(student, self.objectives, layers)
        if accelerator.scaler is not None:
            module.gradient_scale = accelerator.scaler.get_scale
        # The student needs no device placement, because it is on its device already.
        wrapped, self.optimizer = accelerator.prepare(
            student if accelerator.is_fsdp2 else module, optimizer, device_placement=[False, True]
        )
        self.synchronized = wrapped
        # FSDP2 shards the student in place, inside `module`.
        self.module = module if accelerator.is_fsdp2 else wrapped
        facts = recipe.facts() | {
            "metric_for_best_model": self.selection.name,
            **self.inputs.facts(),
            "world_size": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
        }
        self.checkpointer = Checkpointer(accelerator, self.scheduler, recipe.output_dir, facts, recipe.run)

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, whose weights the student has already."""
        self.state = self.checkpointer.read_state(checkpoint)
        self.checkpointer.restore(checkpoint, self.stateful)
        logger.info("resuming from %s: step %d of %d", checkpoint, self.state.step, self.total_steps)

    @property
    def stateful(self) -> dict[str, Any]:
        """The objects whose state a checkpoint holds besides what accelerate saves, by name."""
        found: dict[str, Any] = {"optimizer": self.optimizer}
        if self.context.recipe.model.use_peft:
            found["trained"] = TrainedParameters(self.context.student)
        return found

    def train(self) -> dict[str, float]:
        """Train to the end, and return the figures of the last evaluation."""
        figures = self.context.evaluate(0, 0) if self.state.step == 0 else {}
        self.context.student.train()
        self._restart_clock()
        first = self.state.step
        quiet = not self.accelerator.is_main_process
        progress = tqdm(total=self.total_steps, initial=self.state.step, disable=quiet, desc="training")
        with progress, sigterm_sets(self.termination), without_denormal_numbers():
            for window in self._windows():
                with nullcontext() if self.state.step > first else self._first_step():
                    self._step([self._to_device(batch) for batch in window])
                progress.update()
                figures = self._after_step(progress) or figures
        return figures

    @contextmanager
    def _first_step(self) -> Iterator[None]:
        """A context in which a lack of memory raises `OutOfMemoryError`."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            examples, plan = self.inputs.source.examples, self.inputs.recipe.optimization
            length = examples.block_size if isinstance(examples, Blocks) else 0
            least = max(SHORTEST_ROW, 1 + mean_exact_tokens(self.context.student.config))
            rows = plan.per_device_train_batch_size
            raise OutOfMemoryError(error, rows, length if length // 2 >= least else None) from error

    def _windows(self) -> Iterator[list[Batch]]:
        """The batches of this process, in lists for one optimizer step each."""
        size = self.context.recipe.optimization.gradient_accumulation_steps
        window: list[Batch] = []
        for batch in self.inputs.batches(self.state.step, self.total_steps):
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
        teacher = self.context.teacher if any(o.needs_teacher for _, o in self.objectives.values()) else None
        for number, batch in enumerate(window, 1):
            with nullcontext() if number == len(window) else self.accelerator.no_sync(self.synchronized):
                targets = teacher(batch) if teacher else None
                loss, figures = self.module(batch, targets, scales)
                self.accelerator.backward(loss)
            losses.append(loss.detach())
            self._add({name: value / self.accelerator.num_processes for name, value in figures.items()})
        norm = self._clip()
        self._refuse_what_is_not_finite(window, torch.stack(losses), norm)
        self._update(norm)
        self.state.step += 1
        self.state.tokens += int(counts["tokens"])
        self.state.steps_in_sums += 1
        self.is_terminated = bool(counts["terminated"])

    def _global_counts(self, window: list[Batch]) -> dict[str, Tensor]:
        """Numbers of tokens, of units of every objective, and of processes that received SIGTERM, in the whole step."""
        rows = [
            torch.stack([count_units(batch), *(o.units(batch) for _, o in self.objectives.values())])
            for batch in window
        ]
        mine = torch.cat([torch.stack(rows).sum(0), rows[0].new_tensor([self.termination.is_set()])])
        total = self.accelerator.reduce(mine, reduction="sum")
        return dict(zip(["tokens", *self.objectives, "terminated"], total, strict=True))

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their norm before that, the same on all processes."""
        limit = self.context.recipe.optimization.max_grad_norm
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
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
            f"nothing was overwritten, and {self.checkpointer.last_good()}; lower `--learning_rate` or check the "
            "data"
        )

    def _update(self, norm: Tensor) -> None:
        self._add({"grad_norm": norm.detach() / self.accelerator.num_processes})
        self.rates = {group["mechanism"]: group["lr"] for group in self.optimizer.param_groups}
        self.optimizer.step()
        if not self.accelerator.optimizer_step_was_skipped:
            self.scheduler.step()
        self.optimizer.zero_grad()

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
        step, run, last = self.state.step, self.run, self.state.step == self.total_steps
        if step % run.logging_steps == 0 or last:
            self._log(progress)
        pause = time.perf_counter()
        figures = self.context.evaluate(step, self.state.tokens) if last or _due(step, run.eval_steps) else {}
        is_best = bool(figures) and self.selection.note(self.state, figures)
        if _due(step, run.checkpointing_steps) or self.is_terminated or (is_best and run.load_best_model_at_end):
            self._save()
        self.started += time.perf_counter() - pause  # evaluating and saving are not training time
        return figures

    def _save(self) -> None:
        self._collect()
        saved = self.checkpointer.save(self.state, self.context.student, self.context.processor, self.stateful)
        if self.is_terminated:
            raise TerminatedError(f"{saved} was written; `--resume_from_checkpoint latest` resumes from it")

    def _log(self, progress: Any) -> None:
        self._collect()
        means = {name: value / self.state.steps_in_sums for name, value in self.state.sums.items()}
        norm, loss = means.pop("grad_norm"), means.pop(LOSS)
        unit = self.context.recipe.unit
        speed = f"{unit}_per_second"
        event = {
            "step": self.state.step,
            unit: self.state.tokens,
            LOSS: loss,
            **means,
            "grad_norm": norm,
            "learning_rate": self.rates.get(False, self.rates.get(True)),
            **({"mechanism_learning_rate": self.rates[True]} if len(self.rates) > 1 else {}),
            speed: (self.state.tokens - self.tokens_at_start) / (time.perf_counter() - self.started),
        }
        self.context.record(event)
        progress.set_postfix({LOSS: f"{loss:.4g}", speed: f"{event[speed]:,.0f}"})
        self.state.sums, self.state.steps_in_sums = {}, 0
        self._restart_clock()

    def _restart_clock(self) -> None:
        self.started, self.tokens_at_start = time.perf_counter(), self.state.tokens


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


@contextmanager
def sigterm_sets(event: threading.Event) -> Iterator[None]:
    """Inside, SIGTERM only sets `event`; afterwards, it has its earlier effect again."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def without_denormal_numbers() -> Iterator[None]:
    """Inside, the CPU computes with 0 in place of numbers below 1.2e-38, with which products are many times as slow.

    The gradients of keys of which a query sees almost nothing are such numbers.
    """
    are_flushed = bool(torch.tensor(1e-40, dtype=torch.float32) * 1 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(are_flushed)


def hidden_layers_of(recipe: Recipe, objectives: Objectives) -> str | None:
    """Which hidden states the models must return: "last", "all" or None for none."""
    if not any(objective.needs_hidden_states for _, objective in objectives.values()):
        return None
    return "all" if recipe.task.inputs == "images" else "last"
