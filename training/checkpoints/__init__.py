"""Checkpoints for resuming, and the folder of the finished model.

Checkpoints are the folders `checkpoint-<step>`. They are written under another name and then renamed (`folders.py`), so
they are never incomplete.

    config.json, weights, code, tokenizer and so on    the files of `save_pretrained`: the folder loads with AutoModel
    optimizer.pt                                       the optimizer
    scheduler.bin, scaler.pt, random_states_<n>.pkl    what accelerate saves: schedule, gradient scaler, and the state
                                                       of every random generator of each process
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
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_linear_attention._common import folders
from hf_linear_attention._common.command_line import not_essential
from hf_linear_attention._common.errors import SetupError, TrainingError, UsageError
from hf_linear_attention._common.heads import is_without_head
from hf_linear_attention._common.model_card import HISTORY, REPORT, training_facts, training_history, write_model_card
from hf_linear_attention._common.options import Facts, OnResume
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.training.data.processors import Processor
from hf_linear_attention.training.distributed import (
    is_sharded,
    load_whole,
    shard_optimizer_state,
    whole,
    without_sharding_class,
)
from hf_linear_attention.training.models import ADAPTER, cast, checkpoint_dtype, merged_state_dict
from hf_linear_attention.training.recipe import FACTS, Recipe, RunArguments
from hf_linear_attention.training.tracking import METRICS, plot_metrics


logger = logging.getLogger(__name__)


def save_model(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Save `model` with `save_pretrained`, with adapters merged into a copy of their weights.

    Args:
        weights: those of `whole_weights`.
    """
    with without_sharding_class(model):
        model.save_pretrained(folder, state_dict=_merged(model) if weights is None else weights)


def _merged(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The weights of a model with its adapters merged; None for a model without adapters."""
    return merged_state_dict(model) if any(ADAPTER in name for name, _ in model.named_parameters()) else None


def whole_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor] | None:
    """The whole weights of a model in shards, with adapters merged, for `save_model`; None for other models.

    All processes call this together. Those without `keep` get None in place of every tensor that was in shards.
    """
    if not is_sharded(model):
        return None
    # Tied parameters are left out: gathered, they would be separate tensors, and saved twice.
    state = _merged(model) or model.state_dict()
    return whole({name: value for name, value in state.items() if name not in model.all_tied_weights_keys}, keep)


class TrainedParameters:
    """The trained parameters alone, for checkpoints: from merged weights, adapters cannot be recovered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The value of every parameter that requires gradients, by name."""
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values in `state` into the parameters of the same names."""
        parameters = dict(self.model.named_parameters())
        load_whole({name: parameters[name] for name in state}, state)


STATE_FILE = "trainer_state.json"
OTHER_CHECKPOINT = "resume from another checkpoint, or remove this one to start the run again"
MODEL_FOLDER = "model"  # the name of the folder in which the finished model is written
# Options say themselves what a change means on resumption (`recipe.py`). Any other fact in a checkpoint must not
# change, except the number of processes, and what was asked for where there was no memory.
NO_OPTION = Facts()
OTHERS = {"world_size": Facts(on_resume=OnResume.WARNED), "asked": Facts(on_resume=OnResume.FREE)}


@dataclass
class TrainingState:
    """The progress of a run.

    `sums` are the sums over all processes since the last log line, and `steps_in_sums` is the number of their steps.
    `best` holds the step and the figures of the best evaluation.
    """

    step: int = 0
    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    steps_in_sums: int = 0
    best: dict[str, Any] = field(default_factory=dict)


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
    if checkpoint.name != f"checkpoint-{state.get('step')}":
        return f"{STATE_FILE} is that of step {state.get('step')}"
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
        run: RunArguments,
    ) -> None:
        self.accelerator, self.scheduler, self.output_dir = accelerator, scheduler, output_dir
        self.recipe, self.save_total_limit, self.keep_best = recipe, run.save_total_limit, run.load_best_model_at_end

    def save(self, state: TrainingState, model: PreTrainedModel, processor: Processor, parts: dict[str, Any]) -> Path:
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
        of_accelerate: Any = str(folder), [], [], [self.scheduler], [], self.accelerator.process_index, 0
        scaler = self.accelerator.scaler
        self._do(lambda: save_accelerator_state(*of_accelerate, scaler), folder, everywhere=True)
        self._do(lambda: self._finish(folder, final, state), folder)
        return final

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
            name = folder.name.removeprefix(folders.INCOMPLETE)
            raise TrainingError(f"{name} could not be written ({problems[0]}); {self.last_good()}")

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
            SetupError: if a changed setting makes it another run.
        """
        content = read_json(checkpoint / STATE_FILE)
        changed = changed_settings(content["recipe"], self.recipe)
        if fixed := changed[OnResume.REFUSED]:
            raise SetupError(
                f"cannot resume from {checkpoint}, because these settings decide the data order or the model: "
                f"{'; '.join(fixed)}; give the old values, or start a new run in another `--output_dir`"
            )
        if watched := changed[OnResume.WARNED]:
            logger.warning("the settings have changed, so the run continues differently: %s", "; ".join(watched))
        state = TrainingState(**content["state"])
        if (other := changed[OnResume.INCOMPARABLE]) and state.best:
            text = "the best evaluation so far (step %d) cannot be compared with later ones (%s), and is forgotten"
            logger.warning(text, state.best["step"], "; ".join(other))
            state.best = {}
        return state

    def restore(self, checkpoint: Path, parts: dict[str, Any]) -> None:
        """Load the state of `parts`, the schedule and the random state. The weights were loaded before.

        Raises:
            UsageError: if a file has another content than this version writes.
        """
        schedule: Any = self.scheduler
        # Of this run, which may differ from those in the files.
        rates = [group["initial_lr"] for group in schedule.optimizer.param_groups]
        with reading(checkpoint, OTHER_CHECKPOINT):
            self._restore(checkpoint, parts)
        schedule.base_lrs = rates
        for group, rate, factor in zip(schedule.optimizer.param_groups, rates, schedule.lr_lambdas, strict=True):
            group.update(initial_lr=rate, lr=rate * factor(schedule.last_epoch))

    def _restore(self, checkpoint: Path, parts: dict[str, Any]) -> None:
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        saved["optimizer"] = shard_optimizer_state(saved["optimizer"], parts["optimizer"])
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        process, scaler = self.accelerator.process_index, self.accelerator.scaler
        if not (checkpoint / f"{RNG_STATE_NAME}_{process}.pkl").is_file():
            logger.warning("%s has no random state of process %d, so dropout will differ", checkpoint, process)
        load_accelerator_state(str(checkpoint), [], [], [self.scheduler], [], process, scaler)


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[OnResume, list[str]]:
    """The facts of the run that resumes that differ from those of a checkpoint, as `name: old -> new`, by meaning.

    Those that are REFUSED make it another run, those that are WARNED of change how it continues, and the INCOMPARABLE
    ones change its evaluations.
    """
    known = {**FACTS, **OTHERS}
    changed = {name: f"{name}: {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]}
    meanings = {name: known.get(name, NO_OPTION).meaning_on_resume(new) for name in changed}
    return {
        meaning: [text for name, text in changed.items() if meaning in meanings[name]]
        for meaning in (OnResume.REFUSED, OnResume.WARNED, OnResume.INCOMPARABLE)
    }


SENTENCE_MODEL_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def save_final(
    recipe: Recipe,
    model: PreTrainedModel,
    processor: Processor,
    training: dict[str, Any],
    metrics: dict[str, float],
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model, code, processor, sidecar files and model card into `output_dir`; every file appears complete.

    Args:
        training: the settings of the training run, for report and card.
        metrics: the figures of the last evaluation.
        weights: see `save_model`.
    """
    folder = folders.incomplete(recipe.output_dir / MODEL_FOLDER)
    folder.mkdir(parents=True)
    with folders.saving(recipe.output_dir):
        save_model(model, folder, weights)
        source = recipe.model
        kept = checkpoint_dtype(source.task, str(source.model_name_or_path), source.trust_remote_code)
        dtype = getattr(torch, recipe.run.dtype or kept)
        if any(parameter.dtype != dtype for parameter in model.parameters()):
            cast(recipe, folder, dtype)
    processor.save_pretrained(folder)
    earlier: list[dict[str, Any]] = []
    with not_essential("what describes the model it was trained from"):
        copy_sidecars(recipe.model.model_name_or_path, folder)
        earlier = training_history(recipe.model.model_name_or_path)
    dataset = recipe.data.dataset_name or Path(recipe.data.train_file or "").name
    this = {"dataset": dataset, "training": training, "metrics": metrics}
    (folder / HISTORY).write_text(json.dumps({"runs": [*earlier, this]}, indent=1) + "\n", encoding="utf-8")
    with not_essential("the plot of the losses"):
        plot_metrics(recipe.output_dir, folder)
    with not_essential("the model card"):
        settings = getattr(model.config, "linear_attention", None)
        facts = {"base_model": recipe.model.model_name_or_path, "settings": settings}
        write_model_card(folder, facts | training_facts([*earlier, this]), name=recipe.output_dir.name)
    _move_into(folder, recipe.output_dir)
    logger.info("saved %s", recipe.output_dir)


def copy_sidecars(source: str, target: Path) -> None:
    """Copy the sidecar files that `source` (a folder or a name on the Hub) has into `target`, which holds a model.

    A classifier that was trained from a sentence-transformers model is no such model, and gets none of their files.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    sentence_files = [*SENTENCE_MODEL_FILES, *_module_files(source)] if is_without_head(config) else []
    for name in [REPORT, *sentence_files]:
        found = _find(source, name)
        if found is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target / name)
    if (report := target / REPORT).is_file():  # its figures of quality are those of the model before this training
        content = json.loads(report.read_text(encoding="utf-8"))
        if content.pop("quality", None) is not None:
            report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _module_files(source: str) -> list[str]:
    """The files of the sentence-transformers modules after the transformer, such as `1_Pooling/config.json`."""
    modules = _find(source, "modules.json")
    if modules is None:
        return []
    paths = [module["path"] for module in json.loads(Path(modules).read_text(encoding="utf-8")) if module["path"]]
    return [f"{path}/{name}" for path in paths for name in ("config.json", "model.safetensors")]


def _find(source: str, name: str) -> str | None:
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def _move_into(folder: Path, target: Path) -> None:
    """Move every file of `folder` into `target`, where it replaces an older one, after its content is on the disk.

    The training report, which marks a stage as finished (`run.run_stages`), is removed first and moved last.
    """
    folders.flush(folder)
    (target / HISTORY).unlink(missing_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path == folder / HISTORY, path)):
        destination = target / path.relative_to(folder)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if path == folder / HISTORY:
            folders.flush_names(target)
        path.replace(destination)
    folders.flush_names(target)
    shutil.rmtree(folder)
