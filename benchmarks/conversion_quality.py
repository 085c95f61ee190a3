"""What conversion recipes keep of one teacher, at equal tokens: figures, ablations, and the gap against the tokens.

    python -m benchmarks.conversion_quality --teacher SRC --train_file TEXT.jsonl --validation_file HELD_OUT.txt \\
        --recipes default linear --tokens 1000000 --seeds 0 1 2

And of an embedding model, from unlabelled sentences, measured on scored pairs (columns sentence1, sentence2, score):

    python -m benchmarks.conversion_quality --task embedding --teacher SRC --train_file SENTENCES.jsonl \\
        --validation_file STSB_DEV.tsv --recipes default performer:preset=default,mechanism=performer

Each recipe is a preset of training/presets, or with `name:preset=FILE` a file such as those of
benchmarks/papers/recipes. `--settings` are settings of `linear_attention` that all of them share
(such as the window, so that states are equal), as far as they know them; `name:key=value,...` those of one recipe under
a name of its own (`wide:preset=default,num_features=128`; with `mechanism=` they replace the preset's), and
`stage.option=value` there an option of one of its stages (`hot:preset=default,distil.learning_rate=1e-3`). A finished
run in `--work_dir` is known by its name and not repeated. Every student is measured as `hf-linear-attention convert`
does, which also trains the window of the same bytes (`--controls none` or `untrained` leave that out); the bytes are
those of the decoding state per sequence.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import statistics
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer

from benchmarks.common import Table, save, table
from benchmarks.common import parse as parse_arguments
from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.calibration_data import PAIR_COLUMNS
from hf_linear_attention.conversion.options import SIZES, EvaluationArguments
from hf_linear_attention.conversion.plan import with_budget
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training
from hf_linear_attention.conversion.quality import heal_control, model_state_bytes
from hf_linear_attention.conversion.quality import measure as measure_folder
from hf_linear_attention.conversion.report import comparison
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.training.data.rows import load_rows
from hf_linear_attention.training.models import auto_class_of
from hf_linear_attention.training.presets import STAGES, Preset, load_preset
from hf_linear_attention.training.recipe import DataArguments
from hf_linear_attention.training.run import run, run_stages
from hf_linear_attention.training.tracking import read_metrics


@dataclass(frozen=True)
class Recipe:
    """A preset with settings, and options of its stages (`stage.option`), that win over the preset's own."""

    name: str
    preset: str
    settings: dict[str, Any]
    options: dict[str, Any]


DIRECTIONS = {"causal_lm": "causal", "embedding": "bidirectional"}


def parse_recipe(text: str, shared: dict[str, Any], task: str = "causal_lm") -> Recipe:
    """`default` or `name:preset=default,num_features=128,distil.learning_rate=1e-4`."""
    name, _, rest = text.partition(":")
    own = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in rest.split(",")) if key}
    preset = own.pop("preset", name)
    options = {key: own.pop(key) for key in list(own) if "." in key}
    base = {} if "mechanism" in own else load_preset(preset).settings[DIRECTIONS[task]]
    known = {"mechanism", *MECHANISMS[{**base, **own}["mechanism"]].options}
    known |= {"state_bytes"} & {*base}
    given = {**{key: value for key, value in shared.items() if key in known}, **own}
    replaced = SIZES if "state_bytes" in given else ("state_bytes",) if {*SIZES} & {*given} else ()
    settings = {key: value for key, value in base.items() if key not in replaced}
    return Recipe(name, preset, {**settings, **given}, options)


def preset_of(recipe: Recipe, task: str = "causal_lm") -> Preset:
    """Its preset with the recipe's options in the stages.

    Raises:
        ValueError: if an option names no stage.
    """
    preset = load_preset(recipe.preset)
    stages = {stage.name: stage for stage in preset.stages[task]}
    for key, value in recipe.options.items():
        stage, _, option = key.partition(".")
        if stage not in stages:
            raise ValueError(f"`{key}` of recipe {recipe.name}: `{recipe.preset}` has the stages {', '.join(stages)}")
        field = {"share": value} if option == "share" else {"options": {**stages[stage].options, option: value}}
        stages[stage] = dataclasses.replace(stages[stage], **field)
    return dataclasses.replace(preset, stages={task: list(stages.values())})


def held_out(arguments: Namespace) -> Path:
    """A file of the first characters of the held-out text, which is written here."""
    file = arguments.work_dir / "held_out.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = Path(arguments.validation_file).read_text(encoding="utf-8")
    file.write_text(text[: arguments.max_eval_chars], encoding="utf-8")
    return file


def train(arguments: Namespace, recipe: Recipe, seed: int) -> Training:
    """Convert and train a student; a killed or finished run goes on."""
    steps = max(1, arguments.tokens // 10 // arguments.tokens_per_step)
    given = {
        "task": arguments.task,
        "teacher_name_or_path": arguments.teacher,
        "train_file": arguments.train_file,
        "max_train_tokens": arguments.tokens,
        "max_length": arguments.max_length,
        "checkpointing_steps": steps,
        "save_total_limit": 1,
        "seed": seed,
        "resume_from_checkpoint": "latest",
    }
    if arguments.task == "causal_lm":
        given |= {
            "validation_file": str(held_out(arguments)),
            "per_device_train_batch_size": max(1, arguments.tokens_per_step // arguments.max_length),
            "eval_steps": steps,
        }
    teacher = auto_class_of(arguments.task).from_pretrained(arguments.teacher)
    name = f"{Path(arguments.teacher).name}-{recipe.name}-{arguments.tokens}-{seed}"
    preset = preset_of(recipe, arguments.task)  # `run_stages` fits it to the student
    training = Training(preset, given, arguments.work_dir / name)
    converted = training.work / CONVERTED
    if not converted.is_dir():
        torch.manual_seed(seed)
        settings = with_budget(recipe.settings, type(teacher), teacher.config, torch.float32)
        converted.parent.mkdir(parents=True, exist_ok=True)
        with staging(converted) as folder:
            convert(teacher, **settings).save_pretrained(folder)
            AutoTokenizer.from_pretrained(arguments.teacher).save_pretrained(folder)
    folders = {"model_name_or_path": str(converted), "output_dir": str(training.work / TRAINED)}
    run_stages(preset, {**given, **folders}, run)
    return training


def curve_and_minutes(folder: Path) -> tuple[list[tuple[int, float]], float]:
    """Nats per token on the held-out text by the tokens of all stages so far; minutes of training."""
    points, before, minutes = [], 0, 0.0
    for stage in [*sorted((folder / STAGES).glob("*")), folder]:
        last = 0
        for event in read_metrics(stage / "metrics.jsonl"):
            if "eval_nats_per_token" in event:
                points.append((before + event["tokens"], event["eval_nats_per_token"]))
            if "tokens_per_second" in event:
                minutes += (event["tokens"] - last) / event["tokens_per_second"] / 60
                last = event["tokens"]
        before += last
    return points, minutes


def measure(arguments: Namespace, training: Training) -> dict[str, Any]:
    """The figures of a student, and of the window of its bytes or of the untrained model."""
    source, work = open_source(arguments.teacher, False), training.work
    if arguments.task == "embedding":
        rows = load_rows(DataArguments(validation_file=arguments.validation_file, **PAIR_COLUMNS), "validation")
        sentences = dict.fromkeys([*rows["sentence1"], *rows["sentence2"]])
        file = arguments.work_dir / "held_out.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences), encoding="utf-8")
        files = {"validation_file": str(file), "pairs_file": arguments.validation_file}
        data = EvaluationArguments(model_name_or_path="", max_eval_tokens=sys.maxsize, **files)
        untrained = measure_folder(work / CONVERTED, source, arguments.task, data)
        return {"untrained": untrained, **measure_folder(work / TRAINED, source, arguments.task, data)}
    lengths = {"max_eval_tokens": sys.maxsize, "max_eval_length": arguments.max_eval_length}
    files = {"validation_file": str(held_out(arguments)), "controls": arguments.controls}
    data = EvaluationArguments(model_name_or_path="", **lengths, **files)
    if arguments.controls == "healed":
        heal_control(source, training, data, run)
    healed = work / CONTROL / TRAINED
    figures = measure_folder(work / TRAINED, source, arguments.task, data, healed if healed.is_dir() else None)
    student = auto_class_of(arguments.task).from_pretrained(work / TRAINED)
    return {**figures, "state_bytes": model_state_bytes(student)}


# The columns of a recipe, of language models and of embeddings.
NAMES = {
    "causal_lm": [
        *("teacher", "window_alone", "same_bytes", "healed", "student", "gap", "gap_closed", "linear_share"),
        *("agreement", "kl", "minutes", "state_bytes"),
    ],
    "embedding": ["cosine", "cosine_min", "same_neighbour", "spearman", "spearman_teacher"],
}


def mean_of(runs: list[dict[str, Any]], key: str) -> float | None:
    """None where one of the runs has no such figure."""
    values = [run.get(key) for run in runs]
    return None if None in values else float(statistics.mean(values))


def tables(recipes: dict[str, Any], task: str) -> list[Table]:
    """The means over seeds of all recipes, and the figures of the first seed of each language model."""
    rows, details = [], []
    for name, content in recipes.items():
        runs = content["runs"]
        if task == "embedding":
            rows.append([f"{name}, untrained", *(mean_of([run["untrained"] for run in runs], n) for n in NAMES[task])])
        else:
            compared = comparison(runs[0])
            details.append(table([f"{name}, first seed", *compared["header"][1:]], compared["rows"]))
        rows.append([name, *(mean_of(runs, key) for key in NAMES[task])])
    return [table(["recipe", *(key.replace("_", " ") for key in NAMES[task])], rows), *details]


def main(argv: list[str] | None = None) -> None:
    """Train and measure the students of every recipe."""
    quick = {"tokens": 2000, "tokens_per_step": 128, "max_length": 64, "max_eval_chars": 2000}
    files = {
        "teacher": None,
        "train_file": None,
        "validation_file": None,
        "work_dir": Path("outputs/conversion_quality"),
    }
    chosen = {"task": "causal_lm", "recipes": ["default"], "settings": [], "controls": "healed", "seeds": [0]}
    sizes = {"tokens": 1_000_000, "tokens_per_step": 1024, "max_length": 512}
    evaluation = {"max_eval_chars": 50_000, "max_eval_length": 16_384}
    arguments = parse_arguments(__doc__, argv, quick, **files, **chosen, **sizes, **evaluation)
    logging.basicConfig(level=logging.WARNING)
    shared = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in arguments.settings)}
    found: dict[str, Any] = {}
    for recipe in (parse_recipe(text, shared, arguments.task) for text in arguments.recipes):
        runs, curves = [], []
        for seed in arguments.seeds:
            training = train(arguments, recipe, seed)
            points, minutes = curve_and_minutes(training.work / TRAINED)
            runs.append({**measure(arguments, training), "minutes": minutes})
            curves.append(points)
        found[recipe.name] = {**dataclasses.asdict(recipe), "runs": runs, "curves": curves}
    save(arguments, "conversion_quality", tables(found, arguments.task), recipes=found)


if __name__ == "__main__":
    main()
