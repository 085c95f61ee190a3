"""Command lines and YAML files become recipes: the parser, defaults that depend on other options, and every impossible
combination of options. One `UsageError` names every problem.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.command_line import Parser, given_options, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import file_above
from hf_linear_attention._common.options import (
    built,
    kinds_of,
    option,
    out_of_bounds,
    typed_options,
    without_needs,
    without_task,
)
from hf_linear_attention.training.data.file_checks import (
    SUFFIXES,
    column_instead,
    file_problems,
    folder_files,
    option_problems,
    wanted_columns,
)
from hf_linear_attention.training.presets import Preset, Stage, load_preset, preset_names, stage_runs
from hf_linear_attention.training.recipe import FACTS, GROUPS, REMOVED, TEACHER_WEIGHTS, TRANSFER, Recipe
from hf_linear_attention.training.tracking import tracker_problems


WEIGHTS = (TRANSFER, "task_loss_weight", *TEACHER_WEIGHTS)


def fill_defaults(recipe: Recipe) -> None:
    """Set what was not given to the defaults for the task and the teacher: columns and objective weights, in place."""
    has_teacher = recipe.model.teacher_name_or_path is not None
    embedding = recipe.task.logits is None
    if "text_column_name" not in recipe.given:
        recipe.data.text_column_name = recipe.task.text_column
    if "text_pair_column_name" not in recipe.given:
        recipe.data.text_pair_column_name = recipe.task.pair_column
    is_transfer = recipe.objective.attention_transfer_weight > 0
    suggested = {
        "task_loss_weight": not has_teacher and not embedding and not is_transfer,
        "logits_kl_weight": has_teacher and not embedding and not is_transfer,
        "hidden_state_weight": has_teacher and embedding and not is_transfer,
        "embedding_weight": has_teacher and embedding and not is_transfer,
    }
    for name, use in suggested.items():
        if getattr(recipe.objective, name) is None:
            setattr(recipe.objective, name, float(use))


def find_problems(recipe: Recipe) -> list[str]:
    """One sentence per problem, with the option and its value, what is allowed, and what to do."""
    checks = (
        _checkpoints,
        _files,
        _data_folder,
        _columns,
        _objectives,
        _adapters,
        _schedule,
        _folder,
        tracker_problems,
        _modes,
    )
    values, given = recipe.flat(), recipe.given
    return [
        *out_of_bounds(FACTS, values),
        *without_needs(FACTS, values, given),
        *without_task(FACTS, given, recipe.model.task),
        *(problem for check in checks for problem in check(recipe)),
    ]


def _checkpoints(recipe: Recipe) -> Iterator[str]:
    """Check the files of the models before anything is written. The stages of a preset write some of them later."""
    model = recipe.model
    for path in (model.model_name_or_path, model.teacher_name_or_path):
        if path is not None and os.path.isdir(path):
            try:
                check_checkpoint(Path(path))
            except UsageError as error:
                yield str(error)


def _files(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    for name in ("train_file", "validation_file"):
        path = getattr(data, name)
        if path is None:
            continue
        if Path(path).suffix == ".txt" and not recipe.task.reads_running_text:
            kinds = ", ".join("*" + kind for kind in SUFFIXES[1:])
            yield f"`--{name} {path}`: a .txt has no columns, which `--task {recipe.model.task}` needs; use {kinds}"
        else:
            columns = wanted_columns(recipe, name.removesuffix("_file"))
            yield from option_problems(name, path, columns, column_instead(recipe))
    if data.dataset_name is not None and data.train_file is not None:
        yield "`--dataset_name` and `--train_file` exclude each other; give only one of them"
    if not recipe.has_training and data.validation_file is None:
        yield "there is no data: give `--train_file` or `--dataset_name` to train, or `--validation_file` to evaluate"


def _data_folder(recipe: Recipe) -> Iterator[str]:
    """Check the files of `--dataset_name FOLDER`, which are otherwise read only when the models are."""
    if recipe.task.inputs == "images":
        return
    for split in ("train", "validation"):
        columns = wanted_columns(recipe, split)
        try:
            files = folder_files(recipe.data, split)
        except UsageError as error:
            yield str(error)
            return
        for path in files:
            if Path(path).suffix in SUFFIXES:
                yield from file_problems(path, columns, column_instead(recipe))


def _columns(recipe: Recipe) -> Iterator[str]:
    given, task, data = recipe.given, recipe.model.task, recipe.data
    only_txt = all(path is None or path.endswith(".txt") for path in (data.train_file, data.validation_file))
    if "text_column_name" in given and only_txt and data.dataset_name is None:
        yield "`--text_column_name` has no effect on .txt files; drop it"
    if task == "embedding" and "label_column_name" in given and data.text_pair_column_name is None:
        yield "`--label_column_name` needs `--text_pair_column_name` with `--task embedding`; give both or neither"


def _objectives(recipe: Recipe) -> Iterator[str]:
    weights, task = recipe.objective, recipe.model.task
    teacher = recipe.model.teacher_name_or_path
    if recipe.task.logits is None:
        if teacher is None:
            yield f"`--task {task}` needs a teacher; give `--teacher_name_or_path`"
        for name in ("task_loss_weight", "logits_kl_weight"):
            if getattr(weights, name):
                yield f"`--{name} {getattr(weights, name)}`: an embedding model has no logits; set it to 0"
    if not recipe.has_training:
        return
    used = [name for name in TEACHER_WEIGHTS if getattr(weights, name)]
    if not any(getattr(weights, name) for name in WEIGHTS):
        names = ", ".join(f"`--{name}`" for name in WEIGHTS)
        yield f"there is nothing to learn from, because every weight is 0; set one of {names} above 0"
    elif weights.attention_transfer_weight:
        yield from _transfer(recipe, [name for name in WEIGHTS[1:] if getattr(weights, name)])
    elif teacher is not None and not used and recipe.task.logits is not None:
        names = ", ".join(f"`--{name}`" for name in TEACHER_WEIGHTS)
        yield f"`--teacher_name_or_path {teacher}` is not used; set one of {names} above 0, or drop the teacher"


def _transfer(recipe: Recipe, others: list[str]) -> Iterator[str]:
    """In attention transfer, the student computes softmax attention: other objectives could learn nothing from it."""
    weight = f"`--{TRANSFER} {recipe.objective.attention_transfer_weight}`"
    for name in others:
        yield f"{weight} and `--{name}` exclude each other; train twice, with the transfer first"
    if recipe.model.trainable != "mechanism":
        yield f"{weight} trains only the mechanisms; add `--trainable mechanism`"
    if recipe.model.teacher_name_or_path is not None and recipe.task.logits is not None:
        yield f"{weight} makes the model its own teacher; drop `--teacher_name_or_path`"


def _adapters(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.use_peft:
        if importlib.util.find_spec("peft") is None:
            yield "`--use_peft` needs peft; install it with `pip install 'peft>=0.19'`"
        if model.trainable == "mechanism":
            yield "`--use_peft` and `--trainable mechanism` exclude each other; use `--trainable all` or `adapter`"
    elif model.trainable == "adapter":
        yield "`--trainable adapter` needs `--use_peft`; give it too"


def _schedule(recipe: Recipe) -> Iterator[str]:
    plan = recipe.optimization
    if plan.lr_scheduler_type == "constant" and plan.warmup_ratio:
        yield "`--lr_scheduler_type constant` has no warmup; use `constant_with_warmup`, or drop the warmup"
    if recipe.model.trainable == "adapter" and "mechanism_learning_rate" in recipe.given:
        yield "`--mechanism_learning_rate` has no effect with `--trainable adapter`; drop it"
    if recipe.model.trainable == "mechanism" and {"learning_rate", "mechanism_learning_rate"} <= recipe.given:
        yield "`--learning_rate` has no effect with `--trainable mechanism` and `--mechanism_learning_rate`; drop it"


def _folder(recipe: Recipe) -> Iterator[str]:
    run, path = recipe.run, recipe.output_dir
    resume = run.resume_from_checkpoint
    if resume is not None and run.overwrite_output_dir:
        yield "`--resume_from_checkpoint` and `--overwrite_output_dir` exclude each other; give only one of them"
    if resume not in (None, "latest") and not (Path(str(resume)) / "trainer_state.json").is_file():
        yield f"`--resume_from_checkpoint {resume}` is no checkpoint; give `latest` or a checkpoint-<step> folder"
    for name in ("model_name_or_path", "teacher_name_or_path"):
        model = getattr(recipe.model, name)
        if model is not None and Path(model).is_dir() and Path(model).resolve() in path.resolve().parents:
            yield f"`--output_dir {path}` is inside of `--{name} {model}`; choose another folder"
    if (file := file_above(path)) is not None:
        yield f"`--output_dir {path}`: {file} is a file; choose another folder"
    if path.exists() and not path.is_dir():
        yield f"`--output_dir {path}` is a file; give the path of a folder"
    elif path.is_dir() and any(path.iterdir()) and resume is None and not run.overwrite_output_dir:
        yield (
            f"`--output_dir {path}` is not empty; give another folder, `--resume_from_checkpoint latest`, or "
            "`--overwrite_output_dir`"
        )


def _modes(recipe: Recipe) -> Iterator[str]:
    if recipe.has_training:
        return
    for name in sorted(name for name in recipe.given & FACTS.keys() if not FACTS[name].for_evaluation):
        yield f"`--{name}` has no effect without training data; give `--train_file`, or drop it"
    if recipe.model.teacher_name_or_path is not None and not recipe.task.compares:
        yield f"`--teacher_name_or_path` is not used if `--task {recipe.model.task}` is only evaluated; drop it"


# `--config` may name these files without their path.
CONFIGS = Path(__file__).with_name("configs")


@dataclass
class PresetArguments:
    """Options that choose a preset and how its stages are run."""

    preset: str | None = option(
        f"Preset of several training stages ({', '.join(preset_names())}), which share max_train_tokens.", None
    )


def build_parser(description: str | None = None) -> Parser:
    """The parser of every option of `training/finetune.py`; `description` is printed by `--help`."""
    return Parser(
        [*GROUPS, PresetArguments],
        prog=typed_name("python training/finetune.py"),
        usage="%(prog)s --task TASK --model_name_or_path MODEL --output_dir OUT [options]",
        description=description,
        removed=REMOVED,
    )


def parse_options(argv: Sequence[str], description: str | None = None) -> Recipe | tuple[Preset, dict[str, Any]]:
    """What `argv` describes: one recipe, or a preset and the options given with it.

    Raises:
        UsageError: if the options cannot work; it names all problems (of the first stage that has any).
    """
    parser, groups = build_parser(description), [*GROUPS, PresetArguments]
    given = given_options(parser, groups, argv, CONFIGS)
    if (name := given.pop("preset", None)) is not None:
        preset = load_preset(name)
        check_stages(preset, given)
        return preset, given
    return make_recipe(given)


def make_recipe(options: Mapping[str, Any]) -> Recipe:
    """The recipe with these options, and with defaults for all others.

    Raises:
        UsageError: if the options cannot work; it names all problems.
    """
    values = typed_options(options, kinds_of(*GROUPS), removed=REMOVED)
    recipe = Recipe(*built(GROUPS, values))
    recipe.given = frozenset(values)
    fill_defaults(recipe)
    if problems := find_problems(recipe):
        raise UsageError(*problems)
    return recipe


def check_stages(preset: Preset, given: dict[str, Any]) -> None:
    """Check the options of every stage before any work.

    Args:
        preset: the preset.
        given: options for all stages, which become values of their types in place.

    Raises:
        UsageError: if the options cannot work; it names all problems of the first stage that has any.
    """
    given |= typed_options(given, kinds_of(*GROUPS, PresetArguments), removed=REMOVED)
    built(GROUPS, given)  # refuses what is missing
    runs = stage_runs(preset, given)
    if unused := _unused(given, runs):
        place = f"has no effect in any stage of `--preset {preset.name}`; drop it"
        raise UsageError(*(f"`--{entry}` {place}" for entry in unused))
    # What is in the folder of a stage now may be of an older run, and is checked when the next stage begins.
    *before, last = [{**options, "model_name_or_path": given["model_name_or_path"]} for _, options in runs]
    for options in before:
        make_recipe({**options, "overwrite_output_dir": True})
    about_folder = {"resume_from_checkpoint", "overwrite_output_dir"} & given.keys()
    make_recipe({**last, **{name: given[name] for name in about_folder}})


def _unused(given: Mapping[str, Any], runs: Sequence[tuple[Stage, Mapping[str, Any]]]) -> list[str]:
    """The given options that no stage uses. A teacher may be given even if no stage learns from it."""
    taken = {name for _, options in runs for name in options} | {"teacher_name_or_path"}
    taken |= {name for name, fact in FACTS.items() if fact.is_per_stage}
    return [name for name, value in given.items() if value is not None and name not in taken]
