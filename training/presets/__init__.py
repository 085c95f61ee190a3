"""Presets: recipes of several stages, which are the files in this folder; `run.run_stages` runs them.

A preset has the settings of the conversion, and the stages for each task. A stage is a set of options of `finetune.py`
and a share of the tokens. Every stage trains the model that the stage before it has written; the last one writes into
`output_dir` itself. `--preset FILE` takes a file of the same form in any other folder.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hf_linear_attention._common.errors import UsageError, one_line
from hf_linear_attention._common.options import kinds_of, typed_options
from hf_linear_attention.training.recipe import FACTS, GROUPS, MECHANISM, TEACHER_WEIGHTS, TRANSFER
from hf_linear_attention.training.tasks import TASKS


if TYPE_CHECKING:
    from torch import nn

FOLDER = Path(__file__).parent
EPOCHS = 6.0  # of images, for all stages together
# Fewer tokens than this for each of the base's parameters are few: they train adapters (`with_few_tokens`).
FEW_TOKENS = 1 / 100
# MiniLM with a window of 128 tokens, 40,000 tokens of training on 65 to 512: a cosine of .9951 to .9784 by length; at
# 5e-5 .9855 to .9694, which is less than without training (1 to .9765).
WINDOW_RATE = 1e-5
STAGES = "stages"  # the folder in output_dir for the models between the stages


@dataclass(frozen=True)
class Stage:
    """One stage: its `share` of the tokens, and the options of `finetune.py` that it sets.

    `with_few_tokens` are the options that replace these where the tokens of all stages are few for the model.
    """

    name: str
    share: float
    options: dict[str, Any]
    with_few_tokens: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A preset; `stages` are by task.

    `settings` are those of `config.linear_attention` for decoders (`causal`), for encoders (`bidirectional`), for
    encoder-decoders (`encoder_decoder`, if they do not get those of encoders), and for models whose cross-attention is
    converted too (`cross_attention`, if the mechanism of the others has no such form).
    """

    name: str
    description: str
    tokens: int
    settings: dict[str, dict[str, Any]]
    stages: dict[str, list[Stage]]


def settings_for(preset: Preset, direction: str) -> dict[str, Any] | None:
    """The settings of a preset for models of a direction; None if it has none."""
    found = preset.settings.get(direction)
    return preset.settings.get("bidirectional") if found is None and direction == "encoder_decoder" else found


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """The preset of this name, or in the file of this name.

    Raises:
        UsageError: if there is none.
    """
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"`--preset {name}`: there is no such preset; choose one of {', '.join(preset_names())}")
    try:
        content = copy.deepcopy(_parsed(path.read_text(encoding="utf-8")))  # stages share options by aliases
        tasks = {task: [_stage(**entry) for entry in entries] for task, entries in content.pop("tasks").items()}
        return Preset(name=name, stages=tasks, **content)
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} is no preset: {one_line(error)}") from error


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def _stage(stage: str, share: float, with_few_tokens: Mapping[str, Any] | None = None, **options: Any) -> Stage:
    few = dict(with_few_tokens or {})
    typed_options({**options, **few}, kinds_of(*GROUPS), f" of the stage {stage}")
    return Stage(stage, share, options, few)  # an unfinished run has recorded the values as the file has them


def stages_of(preset: Preset, task: str) -> list[Stage]:
    """The stages of a preset for a task.

    Raises:
        UsageError: if it has none.
    """
    if task not in preset.stages:
        allowed = ", ".join(preset.stages)
        raise UsageError(f"`--preset {preset.name}` has no stages for `--task {task}`; choose one of {allowed}")
    return preset.stages[task]


def stage_options(stage: Stage, given: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The options of one stage, some of which those in `given` replace.

    The amount of images is given in epochs, which the stages share as they share `tokens` of text.
    """
    task = TASKS[given["task"]]
    options = {**stage.options, "max_train_tokens": max(1, round(tokens * stage.share)), **given}
    if task.inputs != "text":
        del options["max_train_tokens"]
        if "max_train_steps" not in given:
            options["num_train_epochs"] = given.get("num_train_epochs", EPOCHS) * stage.share
    trainable, is_embedding = stage.options.get("trainable", "all"), task.logits is None
    unused = {"mechanism": {"learning_rate"}, "adapter": {"mechanism_learning_rate"}, "all": set()}[trainable]
    if not any(stage.options.get(name) for name in TEACHER_WEIGHTS):
        unused = unused | (set() if is_embedding else {"teacher_name_or_path"})
    return {name: value for name, value in options.items() if name not in unused and value is not None}


def model_without_weights(given: Mapping[str, Any]) -> nn.Module:
    """The model that the first stage trains, on the meta device."""
    # This is imported here, because no other option needs a model before the run.
    from hf_linear_attention.training.models import empty_model

    return empty_model(given["task"], str(given["model_name_or_path"]), bool(given.get("trust_remote_code")))


def stage_runs(preset: Preset, given: Mapping[str, Any]) -> list[tuple[Stage, dict[str, Any]]]:
    """Each stage with its options; its model is in the folder of the stage before it."""
    shared = {name: value for name, value in given.items() if name in FACTS and not FACTS[name].is_per_stage}
    tokens, output = given.get("max_train_tokens") or preset.tokens, Path(given["output_dir"])
    stages, model, runs = stages_of(preset, given["task"]), given["model_name_or_path"], []
    for number, stage in enumerate(stages, 1):
        folder = output if number == len(stages) else output / STAGES / f"{number}-{stage.name}"
        options = stage_options(stage, shared, tokens)
        runs.append((stage, {**options, "model_name_or_path": str(model), "output_dir": str(folder)}))
        model = folder
    return runs


def fit_to(preset: Preset, model: nn.Module, tokens: int | None = None) -> Preset:
    """The preset for a model and a number of tokens, by default that of the preset.

    If the mechanism has no parameters (`nystrom`, `performer`, `window`), the stages that train only the mechanism are
    left out, and their tokens go to the other stages. If no near and far keys have a common denominator, stages do not
    compare their shares. Embedding models with a window begin so near their original that they get `WINDOW_RATE`.
    Where there are few tokens for the model, stages have the options that they name for this, and the far keys of a
    `hybrid`, which weigh nothing at first, are not trained alone: 30,000 tokens made Qwen2.5-Coder-0.5B worse by that.
    """
    # This imports transformers' models, which `--help` does without.
    from hf_linear_attention.configuration_linear_attention import mechanisms_of
    from hf_linear_attention.training.losses.objectives import has_far_share

    stages = preset.stages
    if (tokens or preset.tokens) < FEW_TOKENS * _base_parameters(model):
        stages = {task: _with_few_tokens(entry, has_far_share(model)) for task, entry in stages.items()}
    if not has_far_share(model):
        stages = {task: [_without(stage, "far_share_weight") for stage in entry] for task, entry in stages.items()}
    if not any(MECHANISM in name for name, _ in model.named_parameters()):
        stages = {task: _without_mechanism(entry) for task, entry in stages.items()}
    config: Any = getattr(model, "config", None)
    if "embedding" in stages and mechanisms_of(getattr(config, "linear_attention", [])) == {"window"}:
        slower = [replace(x, options={**x.options, "learning_rate": WINDOW_RATE}) for x in stages["embedding"]]
        stages = {**stages, "embedding": slower}
    return replace(preset, stages=stages)


def _base_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for name, parameter in model.named_parameters() if MECHANISM not in name)


def _with_few_tokens(stages: list[Stage], is_hybrid: bool) -> list[Stage]:
    if not any(stage.with_few_tokens for stage in stages):
        return stages
    changed = [replace(stage, options=stage.options | stage.with_few_tokens) for stage in stages]
    return _without_mechanism(changed) if is_hybrid else changed


def _without(stage: Stage, option: str) -> Stage:
    return replace(stage, options={name: value for name, value in stage.options.items() if name != option})


def _without_mechanism(stages: list[Stage]) -> list[Stage]:
    kept = [
        stage for stage in stages if not stage.options.get(TRANSFER) and stage.options.get("trainable") != "mechanism"
    ]
    total = sum(stage.share for stage in kept)
    return [replace(stage, share=stage.share / total) for stage in kept]
