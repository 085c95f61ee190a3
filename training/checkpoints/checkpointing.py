"""The folders `checkpoint-<step>`, written under another name and then renamed (`folders.py`), so never incomplete.

    config.json, weights, code, tokenizer and so on    the files of `save_pretrained`: the folder loads with AutoModel
    optimizer.pt                                       the optimizer, and the average of the weights if there is one
    scheduler.bin, scaler.pt, random_states_<n>.pkl    what accelerate saves: schedule, gradient scaler, and the state
                                                       of every random generator of each process
    deepspeed/                                         with DeepSpeed, the part of the optimizer of each process
    trainer_state.json                                 step, tokens, running sums, best evaluation, and the recipe
    checksums.json                                     size and SHA-256 of each of these files

The position in the data needs no file, because the number of the step determines it (`batches.py`).

`Accelerator.save_state` itself is not used, only the function in it that writes the files of accelerate. With FSDP2, it
would write weights that no AutoModel loads and an optimizer that only FSDP2 reads. If one process could not write, the
others would wait for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import RNG_STATE_NAME, gather_object
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from hf_linear_attention._common import folders
from hf_linear_attention._common.errors import SetupError, TrainingError, UsageError
from hf_linear_attention._common.model_card import HISTORY
from hf_linear_attention._common.options import Facts, OnResume
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.training.arguments import DEFAULTS, FACTS
from hf_linear_attention.training.checkpoints.weights import save_model, whole_weights
from hf_linear_attention.training.data.inputs import CONTENT
from hf_linear_attention.training.data.processors import Processor
from hf_linear_attention.training.distributed import zero
from hf_linear_attention.training.distributed.sharding import shard_optimizer_state, whole
from hf_linear_attention.training.tracking import METRICS


logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
MODEL_FOLDER = "model"  # the name of the folder in which the finished model is written
# Options say themselves what a change means on resumption (`arguments.py`). Any other fact in a checkpoint must not
# change, except the number of processes, as long as no process has its own part of the optimizer.
NO_OPTION = Facts()
WORLD_SIZE = Facts(on_resume=lambda values: OnResume.REFUSED if values.get("zero_stage") else OnResume.WARNED)


@dataclass
class TrainingState:
    """The progress of a run.

    `sums` are the sums over all processes since the last log line, and `steps_in_sums` is the number of their steps.
    `best` holds the step and the figures of the best evaluation; `evaluations_since_best` counts those after it.
    """

    step: int = 0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    steps_in_sums: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    evaluations_since_best: int = 0


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None if there is none. It is not read."""
    found = list_checkpoints(output_dir)
    return found[-1] if found else None


def newest_intact_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint whose files all match their checksums, or None; damaged ones are reported in warnings."""
    for checkpoint in reversed(list_checkpoints(output_dir)):
        damage = damage_of(checkpoint)
        if damage is None:
            return checkpoint
        logger.warning("%s is damaged (%s), so the checkpoint before it is used", checkpoint, damage)
    return None


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    if (damage := folders.find_damage(checkpoint, (STATE_FILE, "optimizer.pt"))) is not None:
        return damage
    try:
        content = read_json(checkpoint / STATE_FILE)
    except UsageError as error:
        return str(error)
    state, recipe = content.get("state"), content.get("recipe")
    if not isinstance(state, dict) or not isinstance(recipe, dict):
        return f"{STATE_FILE} has no `state` or no `recipe`"
    known = {entry.name: getattr(TrainingState(), entry.name) for entry in dataclasses.fields(TrainingState)}
    wrong = [name for name, value in state.items() if name not in known or type(value) is not type(known[name])]
    counts = [state.get(name) for name, value in known.items() if isinstance(value, int)]
    if wrong or not all(type(count) is int and count >= 0 for count in counts):
        return f"`state` in {STATE_FILE} is not the progress of a run"
    if checkpoint.name != f"checkpoint-{state['step']}":
        return f"{STATE_FILE} is that of step {state['step']}"
    return None


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints in `output_dir`, oldest first."""
    folders = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    complete = [path for path in folders if (path / STATE_FILE).is_file()]
    return sorted(complete, key=lambda path: int(path.name.split("-")[1]))


def clear_output(output_dir: Path, everything: bool) -> None:
    """Remove incomplete folders, and with `everything` also the checkpoints, metrics and report of an earlier run."""
    folders.clean(output_dir, rf"checkpoint-\d+|{MODEL_FOLDER}")
    if everything:
        for path in list_checkpoints(output_dir):
            folders.discard(path)
        for name in (METRICS, HISTORY):
            (output_dir / name).unlink(missing_ok=True)


class Checkpointer:
    """Saves and restores everything that determines how a run continues."""

    def __init__(
        self,
        accelerator: Accelerator,
        scheduler: LRScheduler,
        output_dir: Path,
        recipe: dict[str, Any],
        save_total_limit: int | None,
        keep_best: bool,
    ) -> None:
        self.accelerator, self.scheduler, self.output_dir = accelerator, scheduler, output_dir
        self.recipe, self.save_total_limit, self.keep_best = recipe, save_total_limit, keep_best

    def save(
        self,
        state: TrainingState,
        model: PreTrainedModel,
        processor: Processor,
        parts: dict[str, Any],
    ) -> Path:
        """Write `checkpoint-<step>` and return its path. All processes call this together.

        Args:
            parts: objects with a `state_dict`, by name.

        Raises:
            TrainingError: on all processes, if one of them cannot write; earlier checkpoints are kept.
        """
        final = self.output_dir / f"checkpoint-{state.step}"
        folder, keep = folders.incomplete(final), self.accelerator.is_main_process
        weights = whole_weights(model, keep)
        states = whole({name: part.state_dict() for name, part in parts.items()}, keep)

        def write() -> None:
            folder.mkdir(parents=True)
            save_model(model, folder, weights)
            processor.save_pretrained(folder)
            folders.save_tensors(states, folder / "optimizer.pt")
            text = json.dumps({"state": dataclasses.asdict(state), "recipe": self.recipe}, indent=1)
            (folder / STATE_FILE).write_text(text, encoding="utf-8")

        self._do(write, folder)
        self._do(lambda: self._save_of_accelerate(folder), folder, everywhere=True)
        if (engine := zero.engine_of(self.accelerator)) is not None:
            self._do(lambda: zero.save_states(engine, folder), folder, everywhere=True)
        self._do(lambda: self._finish(folder, final, state), folder)
        return final

    def _save_of_accelerate(self, folder: Path) -> None:
        process, scaler = self.accelerator.process_index, self.accelerator.scaler
        save_accelerator_state(str(folder), [], [], [self.scheduler], [], process, 0, scaler)

    def _do(self, action: Callable[[], None], folder: Path, everywhere: bool = False) -> None:
        """Run `action` on the main process, or with `everywhere` on all processes.

        Raises:
            TrainingError: on all processes, if one of them cannot write a file; `folder` is removed.
        """
        problem = None
        if everywhere or self.accelerator.is_main_process:
            try:
                action()
            except (OSError, SafetensorError, RuntimeError) as error:  # torch's writer raises RuntimeError
                problem = str(error).splitlines()[0]
        problems = [found for found in gather_object([problem]) if found is not None]
        if problems:
            if self.accelerator.is_main_process:
                shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(
                f"{folder.name.removeprefix(folders.INCOMPLETE)} could not be written ({problems[0]}); "
                f"{self.last_good()}"
            )

    def last_good(self) -> str:
        """A clause for an error message that names the checkpoint from which the run can be resumed."""
        last = latest_checkpoint(self.output_dir)
        if last is None:
            return "there is no checkpoint to resume from"
        return f"the last good checkpoint is {last}; `--resume_from_checkpoint latest` resumes from it"

    def _finish(self, folder: Path, final: Path, state: TrainingState) -> None:
        """Rename `folder` to `final`, then remove the oldest checkpoints beyond the limit, but never the best one."""
        folders.commit(folder, final)
        if self.save_total_limit is not None:
            for path in list_checkpoints(self.output_dir)[: -self.save_total_limit]:
                if not (self.keep_best and path.name == f"checkpoint-{state.best.get('step')}"):
                    folders.discard(path)

    def read_state(self, checkpoint: Path) -> TrainingState:
        """The progress of a checkpoint. Its best evaluation is dropped if later ones cannot be compared with it.

        Raises:
            TrainingError: if it is a checkpoint of another run.
        """
        content = read_json(checkpoint / STATE_FILE)
        changed = compare_recipes(content["recipe"], self.recipe, checkpoint)
        state = TrainingState(**content["state"])
        if changed.evaluation and state.best:
            logger.warning(
                "the best evaluation so far (step %d) cannot be compared with later ones (%s): the best is chosen "
                "among the later ones, and patience is counted from here",
                *(state.best["step"], "; ".join(changed.evaluation)),
            )
            state.best, state.evaluations_since_best = {}, 0
        return state

    def restore(self, checkpoint: Path, parts: dict[str, Any]) -> None:
        """Load the state of `parts`, the schedule and the random state. The weights were loaded before."""
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        if (engine := zero.engine_of(self.accelerator)) is not None:
            zero.load_states(engine, checkpoint)
        else:
            saved["optimizer"] = shard_optimizer_state(saved["optimizer"], parts["optimizer"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        process, scaler = self.accelerator.process_index, self.accelerator.scaler
        if not (checkpoint / f"{RNG_STATE_NAME}_{process}.pkl").is_file():
            logger.warning(
                "%s has no random state of process %d, because there are more processes than before; dropout will "
                "differ from that of the uninterrupted run",
                *(checkpoint, process),
            )
        load_accelerator_state(str(checkpoint), [], [], [self.scheduler], [], process, scaler)


@dataclass(frozen=True)
class ChangedSettings:
    """The facts that differ from those of a checkpoint, each as `name: old -> new`.

    Those in `fixed` make it another run, those in `watched` change how the run continues, and those in `evaluation`
    make its evaluations incomparable.
    """

    fixed: list[str]
    watched: list[str]
    evaluation: list[str]


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> ChangedSettings:
    """The differences between the recipe `old` of a checkpoint and the recipe `new` of the run that resumes from it."""
    known = {**FACTS, "world_size": WORLD_SIZE}
    # A version that did not know an option did what its default does.
    before = {**{name: default for name, default in DEFAULTS.items() if name not in old}, **old}
    changed = {name: f"{name}: {before.get(name)} -> {new[name]}" for name in new if before.get(name) != new[name]}
    if old.get(CONTENT) is None:  # the checkpoint is from a version that did not record it
        changed.pop(CONTENT, None)
    meanings = {name: known.get(name, NO_OPTION).meaning_on_resume(new) for name in changed}
    return ChangedSettings(
        *(
            [text for name, text in changed.items() if meaning in meanings[name]]
            for meaning in (OnResume.REFUSED, OnResume.WARNED, OnResume.INCOMPARABLE)
        )
    )


def compare_recipes(old: dict[str, Any], new: dict[str, Any], checkpoint: Path) -> ChangedSettings:
    """Refuse to resume what would be another run, and warn if the run will continue differently.

    Raises:
        SetupError: if a difference makes it another run.
    """
    changed = changed_settings(old, new)
    if changed.fixed:
        raise SetupError(
            f"cannot resume from {checkpoint}, because these settings decide the data order or the model: "
            f"{'; '.join(changed.fixed)}; give the old values, or start a new run in another `--output_dir`"
        )
    if changed.watched:
        text = "; ".join(changed.watched)
        logger.warning("the settings have changed, so the run continues differently than without a break: %s", text)
    return changed
