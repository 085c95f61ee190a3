"""Conversion and all stages of a preset as one run, which the same command resumes after it was killed.

OUT.unfinished/request.json   the request; a different request cannot resume this run
OUT.unfinished/converted/     the converted model; complete as soon as it exists
OUT.unfinished/trained/       stages and checkpoints of `training`; the last stage writes into the folder itself
OUT.unfinished/control/       with `--controls healed`, the same two folders for the window of the same bytes
OUT.unfinished/final/         the result, which is moved to OUT; complete as soon as it exists
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_linear_attention._common import folders
from hf_linear_attention._common.command_line import is_first_process
from hf_linear_attention._common.errors import TerminatedError, UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.logs import to_stderr
from hf_linear_attention._common.model_card import HISTORY, REPORT, format_value, training_history
from hf_linear_attention._common.options import OnResume
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.conversion.arguments import CONVERSION_FACTS, RECIPE
from hf_linear_attention.conversion.export.qwen3_5 import finish_stock
from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.output_folder import share_permissions
from hf_linear_attention.conversion.pipeline import Conversion, run, written_plan
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training
from hf_linear_attention.conversion.quality import MEASURED_TASKS, heal_control, measure, record
from hf_linear_attention.conversion.result_text import describe_result
from hf_linear_attention.conversion.softmax_choice import CHOICE, choose_in, count_of
from hf_linear_attention.training.checkpoints import list_checkpoints
from hf_linear_attention.training.distributed import disconnect, first_alone
from hf_linear_attention.training.presets import STAGES, stages_of
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import unit_of
from hf_linear_attention.training.tracking import METRICS, figures_before, units_per_second


logger = logging.getLogger(__name__)


HELD_OUT = {"tokens": "text", "images": "images"}
REQUEST, FINAL, TRAINS = "request.json", "final", "trains"


def run_training(
    conversion: Conversion, training: Training, again: str | None = "the same command resumes the run ({work})"
) -> str:
    """Convert, train, measure and write; returns the text to print.

    Args:
        conversion: the plan.
        training: the preset.
        again: how a run that was stopped is resumed; None if nothing of it is kept.

    Raises:
        UsageError: if there is an unfinished run of another request.
        ConversionError, TrainingError, OSError: if a step failed; the finished steps are kept.
    """
    work, final = training.work, training.work / FINAL
    again = "nothing of the run is kept" if again is None else again.format(work=work)
    _open(conversion, training)
    try:
        if not (work / CONVERTED).is_dir():
            run(replace(conversion, output_dir=work / CONVERTED))
        if first_alone(TRAINS, lambda: not final.is_dir()):
            _train(conversion, training)
            _finish(conversion, training)
    except TerminatedError:
        raise TerminatedError(again) from None
    except BaseException:
        logger.warning("stopped; %s", again)
        raise
    text = _describe(conversion, training)
    if training.output_dir.exists() and not conversion.request.arguments.overwrite:
        raise UsageError(f"{training.output_dir} was written by another process meanwhile; the result is in {final}")
    folders.replace(final, training.output_dir)
    folders.discard(work)
    return text


def take_part(conversion: Conversion, training: Training) -> None:
    """Train with the first process of the launch, in which `run_training` does everything else."""
    if first_alone(TRAINS, bool):
        _train(conversion, training)


def _open(conversion: Conversion, training: Training) -> None:
    """Create the work folder, or check that it belongs to this request."""
    work, request = training.work, _request(conversion, training)
    if work.exists():
        path = work / REQUEST
        if not path.is_file():
            raise UsageError(f"{work} exists and is not from an unfinished run; move it")
        before = read_json(path)
        changed = [
            f"{name}: {before.get(name)} -> {request[name]}" for name in request if request[name] != before.get(name)
        ]
        if not changed:
            logger.info("resuming the run in %s (remove it to start over)", work)
            return
        if not conversion.request.arguments.overwrite:
            raise UsageError(
                f"{work} contains an unfinished run of another request ({'; '.join(changed)}); give the options of "
                "that request to resume it, or `--overwrite` to start over"
            )
        folders.discard(work)
    with staging(work) as folder:
        (folder / REQUEST).write_text(json.dumps(request, indent=1), encoding="utf-8")


def _request(conversion: Conversion, training: Training) -> dict[str, Any]:
    """Everything that decides the result, in the form in which it is read back from JSON."""
    values = asdict(conversion.request.arguments)
    options = {name: values[name] for name, fact in CONVERSION_FACTS.items() if fact.on_resume is not OnResume.FREE}
    named = {name: options[name] for name, fact in CONVERSION_FACTS.items() if fact.is_path and options.get(name)}
    paths = {name: str(Path(path).resolve()) for name, path in named.items()}
    decided = {
        "model_name_or_path": str(conversion.source.folder),
        "tokens": training.given.get("max_train_tokens"),
        "settings": conversion.plan.settings,
        "preset": asdict(training.preset),
    }
    return json.loads(json.dumps({**options, **paths, **decided}))


def _train(conversion: Conversion, training: Training) -> None:
    """Run all stages that are not finished yet."""
    import datasets  # most conversions do without this library, and without the following import

    from hf_linear_attention.training.run import run as run_stage
    from hf_linear_attention.training.run import run_stages

    arguments = conversion.request.arguments

    def run_and_tidy(recipe: Recipe, known: dict[str, float]) -> dict[str, float]:
        is_last = recipe.output_dir == training.work / TRAINED
        if is_last and count_of(arguments.softmax_layers) is not None:
            folder, teacher = Path(recipe.model.model_name_or_path), str(training.given["teacher_name_or_path"])
            choose = functools.partial(choose_in, folder, conversion.plan, conversion.source, arguments)
            first_alone(CHOICE, lambda: choose(conversion.inputs, teacher))
            known = {}  # they were those of the model before the choice
        figures = run_stage(recipe, known)
        if is_first_process():
            for checkpoint in list_checkpoints(recipe.output_dir):  # each is several times as large as the model
                shutil.rmtree(checkpoint)
        return figures

    datasets.disable_progress_bars()  # the only progress bar is that of the training
    with to_stderr("hf_linear_attention.training"):
        run_stages(training.preset, training.given, run_and_tidy)
        if training.heals_control:
            heal_control(conversion.source, training, arguments, run_and_tidy)
    disconnect()


def _finish(conversion: Conversion, training: Training) -> None:
    """Write the trained model with its figures to the folder `final`."""
    arguments, task = conversion.request.arguments, training.given["task"]
    trained = training.work / TRAINED
    with staging(training.work / FINAL) as folder:
        ignored = shutil.ignore_patterns("checkpoint-*", f"{folders.INCOMPLETE}*", STAGES)
        shutil.copytree(trained, folder, ignore=ignored, dirs_exist_ok=True)
        _name_runs(folder, training)
        share_permissions(folder)
        quality = None
        if arguments.validation_file is not None and task in MEASURED_TASKS:
            control = training.work / CONTROL / TRAINED
            quality = measure(folder, conversion.source, task, arguments, control if control.is_dir() else None)
        shutil.copyfile(training.work / CONVERTED / RECIPE, folder / RECIPE)
        if conversion.plan.stock_form is not None:
            finish_stock(folder)
        record(folder, conversion.source, quality, conversion.name)


def _name_runs(folder: Path, training: Training) -> None:
    """Name the stages in the training history, instead of the folders between them, which will be deleted, and keep
    their speed and the figures with which they began."""
    runs = training_history(str(folder))
    stages = stages_of(training.preset, training.given["task"])
    trained = training.work / TRAINED
    for number, (run_, stage) in enumerate(zip(runs, stages, strict=True), 1):
        del run_["training"]["model_name_or_path"]
        place = trained if number == len(stages) else trained / STAGES / f"{number}-{stage.name}"
        run_["per_second"] = units_per_second(place / METRICS)
        run_["before"] = figures_before(place / METRICS, run_["metrics"])
        run_["training"] = {"preset": training.preset.name, "stage": stage.name, **run_["training"]}
    (folder / HISTORY).write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def _describe(conversion: Conversion, training: Training) -> str:
    final = training.work / FINAL
    report = json.loads((final / REPORT).read_text(encoding="utf-8"))
    plan = written_plan(conversion, report)
    task = training.given["task"]
    unit = unit_of(task)
    lines = [f"Trained in {len(training_history(str(final)))} stages:"]
    for run_ in training_history(str(final)):
        before = {name: f" ({format_value(value)} before)" for name, value in run_["before"].items()}
        figures = "".join(f", {name} {format_value(x)}{before.get(name, '')}" for name, x in run_["metrics"].items())
        lines.append(f"  {run_['training']['stage']}: {run_['training'][unit]:,} {unit}{figures}")
    if report["quality"] is not None:
        lines += ["", figures_of(report["quality"]).text()]
    elif conversion.request.arguments.validation_file is None:
        lines.append(
            f"There are no figures after training; give a `--validation_file` of held-out {HELD_OUT[unit]}"
            + (", here or with `hf-linear-attention evaluate`." if task in MEASURED_TASKS else ".")
        )
    return describe_result(plan, conversion.source, str(training.output_dir), report, lines)
