"""What conversion recipes keep of one teacher, at equal tokens: figures, ablations, and the gap against the tokens.

    python benchmarks/conversion_quality.py --teacher SRC --train_file TEXT.jsonl --validation_file HELD_OUT.txt \\
        --recipes default lolcats --tokens 1000000 --seeds 0 1 2

And of an embedding model, from unlabelled sentences, measured on scored pairs (columns sentence1, sentence2, score):

    python benchmarks/conversion_quality.py --task embedding --teacher SRC --train_file SENTENCES.jsonl \\
        --validation_file STSB_DEV.tsv --recipes default performer:preset=default,mechanism=performer

Each recipe is a preset of training/presets. `--settings` are settings of `linear_attention` that all of them share
(such as the window, so that states are equal), as far as they know them; `name:key=value,...` those of one recipe under
a name of its own (`wide:preset=default,num_features=128`; with `mechanism=` they replace the preset's), and
`stage.option=value` there an option of one of its stages (`hot:preset=lolcats,finetune.learning_rate=1e-3`). A finished
run in `--work_dir` is known by its name and not repeated. Every student is measured as `convert_checkpoint.py
--evaluate` does; the bytes are those of the decoding state per sequence. Beside every student stand windows of the same
bytes, untrained and healed with the stages and tokens of its recipe (`--controls`), each made once per size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.calibration_data import PAIR_COLUMNS
from hf_linear_attention.conversion.data_recipes import data_recipe
from hf_linear_attention.conversion.figures import (
    Cached,
    Controls,
    HeldOutText,
    SameBytes,
    better_window,
    language_figures,
    model_state_bytes,
    possible_controls,
    save_window,
)
from hf_linear_attention.conversion.quality import HeldOut, finite, read_text
from hf_linear_attention.conversion.quality import measure as measure_folder
from hf_linear_attention.conversion.report import COLUMNS, comparison
from hf_linear_attention.conversion.request import SIZES
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.conversion.state_budget import with_budget
from hf_linear_attention.mechanisms import MECHANISMS
from hf_linear_attention.training.data.rows import load_rows
from hf_linear_attention.training.evaluation.position_figures import running_text
from hf_linear_attention.training.models import auto_class_of
from hf_linear_attention.training.presets.preset import STAGES, Preset, fit_to, load_preset
from hf_linear_attention.training.presets.stages import run_stages
from hf_linear_attention.training.recipe import DataArguments
from hf_linear_attention.training.recipe_parser import parse
from hf_linear_attention.training.run import run
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


def student_folder(arguments: Namespace, recipe: Recipe, seed: int) -> Path:
    return arguments.work_dir / f"{Path(arguments.teacher).name}-{recipe.name}-{arguments.tokens}-{seed}"


def train(arguments: Namespace, recipe: Recipe, seed: int) -> Path:
    """The trained student's folder; a killed or finished run goes on."""
    folder = student_folder(arguments, recipe, seed)
    converted = folder.with_name(folder.name + "-converted")
    if not (converted / "config.json").is_file():
        teacher, settings = auto_class_of(arguments.task).from_pretrained(arguments.teacher), dict(recipe.settings)
        torch.manual_seed(seed)
        settings = with_budget(settings, type(teacher), teacher.config, torch.float32)
        convert(teacher, **settings).save_pretrained(converted)
        AutoTokenizer.from_pretrained(arguments.teacher).save_pretrained(converted)
    heal(arguments, preset_of(recipe, arguments.task), converted, folder, seed)
    return folder


def heal(arguments: Namespace, preset: Preset, converted: Path, folder: Path, seed: int) -> None:
    """Train the model in `converted` by the stages of a preset into `folder`, or go on with that."""
    is_causal = arguments.task == "causal_lm"
    steps = max(1, arguments.tokens // 10 // arguments.tokens_per_step)
    given = {
        "task": arguments.task,
        "model_name_or_path": str(converted),
        "teacher_name_or_path": arguments.teacher,
        "train_file": arguments.train_file,
        "validation_file": arguments.validation_file if is_causal else None,
        "max_eval_chars": arguments.max_eval_chars if is_causal else None,
        "max_train_tokens": arguments.tokens,
        "max_length": arguments.max_length,
        "per_device_train_batch_size": max(1, arguments.tokens_per_step // arguments.max_length) if is_causal else None,
        "eval_steps": steps if is_causal else None,
        "checkpointing_steps": steps,
        "save_total_limit": 1,
        "seed": seed,
        "output_dir": str(folder),
        "resume_from_checkpoint": "latest",
    }
    run_stages(preset, {name: value for name, value in given.items() if value is not None}, parse, run)


def curve(folder: Path) -> list[tuple[int, float]]:
    """Tokens of all stages so far, and nats per token on the held-out text."""
    points, before = [], 0
    for stage in [*sorted((folder / STAGES).glob("*")), folder]:
        events = [event for event in read_metrics(stage / "metrics.jsonl") if "eval_nats_per_token" in event]
        points += [(before + event["tokens"], event["eval_nats_per_token"]) for event in events]
        before = points[-1][0]
    return points


def minutes(folder: Path) -> float:
    """Of training in all stages, evaluations not counted."""
    total = 0.0
    for stage in [*sorted((folder / STAGES).glob("*")), folder]:
        before = 0
        for event in (event for event in read_metrics(stage / "metrics.jsonl") if "tokens_per_second" in event):
            total += (event["tokens"] - before) / event["tokens_per_second"] / 60
            before = event["tokens"]
    return total


def held_out(arguments: Namespace) -> HeldOutText:
    """Protocol S (training/data/packing.py) over the first `max_eval_chars` characters."""
    files = {"train_file": arguments.train_file, "validation_file": arguments.validation_file}
    sizes = {"max_eval_chars": arguments.max_eval_chars, "max_length": arguments.max_length or None}
    recipe = data_recipe(arguments.teacher, "causal_lm", None, False, **files, **sizes)
    return read_text(recipe, arguments.max_eval_length)


def kept_nats(arguments: Namespace, text: HeldOutText) -> Cached:
    """What `language_figures` calls to keep the nats of untrained windows in `work_dir`, by teacher, text and size."""
    facts = [running_text(text.examples).tobytes(), str(text.max_length).encode()]
    digest = hashlib.sha256(b" ".join([*facts, arguments.teacher.encode()])).hexdigest()[:12]

    def kept(name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        path = arguments.work_dir / "nats" / f"{Path(arguments.teacher).name}-{name}-{digest}.pt"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(compute(), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
        return torch.load(path, weights_only=True)

    return kept


def healed_window(arguments: Namespace, recipe: Recipe, seed: int, teacher: Any, window: SameBytes) -> Any:
    """The window after the stages of a recipe that can train it; a killed or finished run goes on."""
    preset = fit_to(preset_of(recipe), teacher)
    stages = hashlib.sha256(repr(preset.stages).encode()).hexdigest()[:8]
    name = f"{Path(arguments.teacher).name}-{window.name}-{stages}-{arguments.tokens}-{seed}"
    folder = arguments.work_dir / "controls" / name
    converted = folder.with_name(name + "-converted")
    if not converted.is_dir():
        with staging(converted) as unfinished:
            save_window(teacher, window, Path(arguments.teacher), unfinished)
    heal(arguments, preset, converted, folder, seed)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def measure(arguments: Namespace, recipe: Recipe, folder: Path, seed: int) -> dict[str, Any]:
    if arguments.task == "embedding":
        return measure_embeddings(arguments, folder)
    teacher = AutoModelForCausalLM.from_pretrained(arguments.teacher).eval()
    student = AutoModelForCausalLM.from_pretrained(folder).eval()
    text = held_out(arguments)
    kept = kept_nats(arguments, text)
    controls = Controls([], left_out="`--controls none` was given")
    if arguments.controls != "none":
        controls = possible_controls(teacher, student, text)
    if arguments.controls == "healed" and controls.windows:
        window, _ = better_window(teacher, controls.windows, text.batches(), kept)
        controls = dataclasses.replace(controls, healed=healed_window(arguments, recipe, seed, teacher, window))
    figures = language_figures(teacher, student, text, controls, kept)
    trained = student.num_parameters() - teacher.num_parameters()
    return finite({**figures, "state_bytes": model_state_bytes(student), "new_parameters": trained})


def measure_embeddings(arguments: Namespace, folder: Path) -> dict[str, Any]:
    """On the distinct sentences of the pairs, and on the pairs."""
    rows = load_rows(DataArguments(validation_file=arguments.validation_file, **PAIR_COLUMNS), "validation")
    sentences = list(dict.fromkeys([*rows["sentence1"], *rows["sentence2"]]))
    file = arguments.work_dir / "sentences.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences), encoding="utf-8")
    data = HeldOut(str(file), sys.maxsize, False, arguments.validation_file)
    source = open_source(arguments.teacher, False)
    untrained = folder.with_name(folder.name + "-converted")
    return {
        "untrained": measure_folder(untrained, source, "embedding", data),
        **measure_folder(folder, source, "embedding", data),
    }


def report_embeddings(figures: dict[str, Any]) -> str:
    names = ("cosine", "cosine_min", "same_neighbour", "spearman")
    rows = []
    for name, content in figures["recipes"].items():
        runs = content["runs"]
        for label, parts in ((f"{name}, untrained", [part["untrained"] for part in runs]), (name, runs)):
            rows.append([label, *(statistics.mean(part[key] for part in parts) for key in names)])
    first = next(iter(figures["recipes"].values()))["runs"][0]
    header = ["recipe", *(key.replace("_", " ") for key in names)]
    return (
        f"{figures['teacher']}: {figures['tokens']:,} tokens of training, {figures['seeds']} seed(s); Spearman of the "
        f"teacher {first['spearman_teacher']:.4f}\n\n{table(header, rows)}"
    )


NAMES = (
    *("teacher", "window_alone", "same_bytes", "healed", "student", "gap", "gap_closed", "linear_share", "agreement"),
    *("kl", "minutes"),
)


def report(figures: dict[str, Any]) -> str:
    rows, tables = [], []
    for name, content in figures["recipes"].items():
        runs = content["runs"]
        spread = max(run["student"] for run in runs) - min(run["student"] for run in runs)
        sizes = [f"{runs[0][key]:,}" for key in ("state_bytes", "new_parameters")]
        rows.append([name, *(mean_of(runs, key) for key in NAMES), f"{spread:.4f}", *sizes])
        compared = comparison(runs[0])
        notes = "\n".join(compared["notes"])
        tables.append(f"{name}, first seed\n\n{table(compared['header'], compared['rows'])}\n\n{notes}")
    header = ["recipe", *(key.replace("_", " ") for key in NAMES), "spread", "state bytes", "new parameters"]
    return (
        f"{figures['teacher']}: nats per token, {figures['tokens']:,} tokens of training, "
        f"{figures['seeds']} seed(s)\n\n{table(header, rows)}\n\n" + "\n\n".join(tables)
    )


def mean_of(runs: list[dict[str, Any]], key: str) -> float | None:
    """None where one of the runs has no such figure."""
    values = [run.get(key) for run in runs]
    return None if None in values else statistics.mean(values)


def plot(plt, figures):
    if "curves" not in next(iter(figures["recipes"].values())):
        return plot_embeddings(plt, figures)
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for number, (name, content) in enumerate(figures["recipes"].items()):
        for index, points in enumerate(content["curves"]):
            tokens, nats = zip(*points)
            gaps = [value - content["runs"][index]["teacher"] for value in nats]
            axis.plot(tokens, gaps, "o-", markersize=3, color=f"C{number}", alpha=0.8, label=None if index else name)
    first = next(iter(figures["recipes"].values()))["runs"][0]
    for name, style in (("window_alone", ":"), ("same_bytes", "--"), ("healed", "-.")):
        if first.get(name) is not None:
            gap = first[name] - first["teacher"]
            axis.axhline(gap, color="black", linestyle=style, linewidth=1, label=COLUMNS[name])
    axis.set(xlabel="training tokens", ylabel="nats per token above the teacher", title=figures["teacher"])
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def plot_embeddings(plt, figures):
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for name, content in figures["recipes"].items():
        for run_ in content["runs"]:
            axis.plot([run_["untrained"]["cosine"], run_["cosine"]], ["untrained", "trained"], "o-", label=name)
    axis.set(xlabel="mean cosine to the teacher", title=figures["teacher"])
    axis.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--task", choices=sorted(DIRECTIONS), default="causal_lm")
    parser.add_argument("--teacher", required=True, help="folder of the softmax model")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True, help="held-out running text (.txt), or scored pairs")
    parser.add_argument("--recipes", nargs="+", default=["default"], metavar="NAME[:KEY=VALUE,...]")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="of all recipes that know them")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--tokens_per_step", type=int, default=1024)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--max_eval_chars", type=int, default=50_000)
    parser.add_argument("--max_eval_length", type=int, default=16_384, help="longest windows of figures by position")
    parser.add_argument("--controls", choices=("none", "untrained", "healed"), default="healed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/conversion_quality"))
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.tokens_per_step, arguments.max_length, arguments.max_eval_chars = (
            2000,
            128,
            64,
            2000,
        )
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    shared = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in arguments.settings)}
    figures: dict[str, Any] = {
        "teacher": Path(arguments.teacher).name,
        "tokens": arguments.tokens,
        "seeds": len(arguments.seeds),
        "recipes": {},
    }
    is_causal = arguments.task == "causal_lm"
    for recipe in (parse_recipe(text, shared, arguments.task) for text in arguments.recipes):
        folders = [train(arguments, recipe, seed) for seed in arguments.seeds]
        figures["recipes"][recipe.name] = {
            **dataclasses.asdict(recipe),
            "runs": [
                {**measure(arguments, recipe, folder, seed), "minutes": minutes(folder)}
                for folder, seed in zip(folders, arguments.seeds)
            ],
            **({"curves": [curve(folder) for folder in folders]} if is_causal else {}),
        }
        write((report if is_causal else report_embeddings)(figures) + "\n")
    save_results(arguments, "conversion_quality", figures, plot)


if __name__ == "__main__":
    main()
