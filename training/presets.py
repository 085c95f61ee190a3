"""Recipes of several stages by name: `training/preset_files/<name>.yaml`, and running one so that a killed run goes on.

A preset has a version, the settings that it converts to, and the stages of each task; a stage is a set of options of
`finetune.py` and a share of the tokens. Every stage trains what the one before it has written; the last one writes into
`output_dir` itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel

from training.arguments import Recipe
from training.checkpointing import HISTORY, clean, latest_checkpoint
from training.errors import UsageError
from training.export import training_history
from training.layer_transfer import TransferLayers
from training.models import MECHANISM, empty_model
from training.validation import TEACHER_WEIGHTS, TRANSFER_OPTIONS, TRANSFER_WEIGHTS


logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "preset_files"
BLOCK_SIZE = "layers_per_block"
STAGES = "stages"  # inside output_dir: the models between the stages


@dataclass(frozen=True)
class Stage:
    """`share` of the tokens, and the options of `finetune.py` that this stage sets."""

    name: str
    share: float
    options: dict[str, Any]


@dataclass(frozen=True)
class Preset:
    """`settings`: of `config.linear_attention`, for decoders (`causal`) and encoders (`bidirectional`)."""

    name: str
    version: int
    description: str
    tokens: int
    settings: dict[str, dict[str, Any]]
    stages: dict[str, list[Stage]]


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        UsageError: if there is none.
    """
    if name not in preset_names():
        raise UsageError([f"`--preset {name}`: allowed is one of {', '.join(preset_names())}"])
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    tasks = {task: [_stage(**entry) for entry in entries] for task, entries in content.pop("tasks").items()}
    return Preset(name=name, stages=tasks, **content)


def _stage(stage: str, share: float, **options: Any) -> Stage:
    return Stage(stage, share, options)


def stages_of(preset: Preset, task: str) -> list[Stage]:
    """Its stages for a task.

    Raises:
        UsageError: if it has none.
    """
    if task not in preset.stages:
        allowed = ", ".join(preset.stages)
        raise UsageError([f"`--preset {preset.name}` has no stages for `--task {task}`; allowed is one of {allowed}"])
    return preset.stages[task]


def stage_words(stage: Stage, given: dict[str, Any], tokens: int) -> list[str]:
    """The command line of one stage: its own options, over which those in `given` win."""
    options = {**stage.options, "max_train_tokens": max(1, round(tokens * stage.share)), **given}
    trainable, is_embedding = stage.options.get("trainable", "all"), given.get("task") == "embedding"
    unused = {"mechanism": {"learning_rate"}, "adapter": {"mechanism_learning_rate"}, "all": set()}[trainable]
    if not is_transfer(stage):
        unused = unused | TRANSFER_OPTIONS
    if not is_embedding and not any(stage.options.get(name) for name in TEACHER_WEIGHTS):
        unused = unused | {"teacher_name_or_path"}
    options = {name: value for name, value in options.items() if name not in unused}
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def is_transfer(stage: Stage) -> bool:
    return any(stage.options.get(name) for name in TRANSFER_WEIGHTS)


def in_blocks(stages: list[Stage], converted: list[int], size: int) -> list[Stage]:
    """The stages, those of attention transfer once for every `size` layers; each block gets the tokens of its stage."""
    blocks = [converted[first : first + size] for first in range(0, len(converted), size)]
    return [part for stage in stages for part in (_of_blocks(stage, blocks) if is_transfer(stage) else [stage])]


def _of_blocks(stage: Stage, blocks: list[list[int]]) -> list[Stage]:
    return [
        Stage(
            f"{stage.name}-{block[0]}-{block[-1]}",
            stage.share,
            {**stage.options, "transfer_layers": ",".join(map(str, block))},
        )
        for block in blocks
    ]


def fit_to(preset: Preset, model: nn.Module) -> Preset:
    """The preset for a model: without attention transfer, whose tokens go to the other stages, where the mechanism has
    no parameters that could learn from it (`nystrom`, `performer`)."""
    if any(MECHANISM in name for name, _ in model.named_parameters()):
        return preset
    stages = {task: _without_transfer(stages) for task, stages in preset.stages.items()}
    return replace(preset, stages=stages)


def _without_transfer(stages: list[Stage]) -> list[Stage]:
    kept = [stage for stage in stages if not is_transfer(stage)]
    total = sum(stage.share for stage in kept)
    return [replace(stage, share=stage.share / total) for stage in kept]


def _empty_model(given: dict[str, Any]) -> PreTrainedModel:
    return empty_model(given["task"], str(given["model_name_or_path"]), bool(given.get("trust_remote_code")))


def run_stages(
    preset: Preset, given: dict[str, Any], parse: Callable[[Sequence[str]], Recipe], run: Callable[[Recipe], Any]
) -> dict[str, float]:
    """Run every stage that is not finished yet; returns the figures of the last one.

    Args:
        given: options of `finetune.py` that hold for all stages; `max_train_tokens` is shared out between them.
        parse, run: `command_line.parse` and `run.run`.
    """
    is_resumed = given.get("resume_from_checkpoint") is not None
    figures: dict[str, float] = {}
    preset = fit_to(preset, _empty_model(given))
    lines = command_lines(preset, given)
    if not is_resumed and is_main_process():  # a later resumption must not take an older run's stages for this one's
        for _, folder, _ in lines:
            clean(folder, everything=True)
    for number, (stage, folder, words) in enumerate(lines, 1):
        if is_resumed and (folder / HISTORY).is_file():  # written with the finished model
            continue
        if is_resumed and latest_checkpoint(folder) is not None:
            words = [*words, "--resume_from_checkpoint=latest"]
        elif folder.exists():  # the last one holds the others' folders; one without a checkpoint starts again
            words = [*words, "--overwrite_output_dir=true"]
        place = f"stage {number} of {len(lines)}"
        logger.info("%s, %s, of preset %s (version %d)", place, stage.name, preset.name, preset.version)
        figures = run(parse(words))
        AcceleratorState._reset_state(reset_partial_state=True)  # the next stage's processes connect anew
    return figures or training_history(given["output_dir"])[-1]["metrics"]


def is_main_process() -> bool:
    """Before there is an accelerator to ask."""
    return os.environ.get("RANK", "0") == "0"


def command_lines(preset: Preset, given: dict[str, Any]) -> list[tuple[Stage, Path, list[str]]]:
    """Each stage with its folder and its command line; a stage's model is the folder of the one before it."""
    own = ("max_train_tokens", "output_dir", "model_name_or_path", "resume_from_checkpoint", "overwrite_output_dir")
    shared = {name: value for name, value in given.items() if name not in (*own, BLOCK_SIZE)}
    tokens, output = given.get("max_train_tokens") or preset.tokens, Path(given["output_dir"])
    stages, model, lines = stages_of(preset, given["task"]), given["model_name_or_path"], []
    if (size := given.get(BLOCK_SIZE)) is not None:
        stages = in_blocks(stages, TransferLayers(_empty_model(given)).learning, size)
    for number, stage in enumerate(stages, 1):
        folder = output if number == len(stages) else output / STAGES / f"{number}-{stage.name}"
        words = stage_words(stage, shared, tokens)
        lines.append((stage, folder, [*words, f"--model_name_or_path={model}", f"--output_dir={folder}"]))
        model = folder
    return lines
