"""Recall of softmax teachers and of their conversions: accuracy against bytes of state, and against the length.

    OMP_NUM_THREADS=1 python benchmarks/recall.py

Tiny Llamas are trained until they answer 99 % of a task (recall_tasks.py): multi-query associative recall, copying
after a gap, a needle. Each is converted by every form of FORMS with a state of each of the `--shares` of the bytes of
its keys and values at the trained length, and healed with the stages of a preset on `--tokens` tokens of the same task.
The form `window` is the control: an exact window of the same bytes, untrained and healed in the same way. The columns
by length have the largest share. Beyond the trained length the same state is a smaller share of the keys and values,
and `mqar` asks for more pairs. What is finished in `--work_dir` is not made again: a second run starts with the
conversions. Minutes are those of the processor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import argument_parser, save_results, table, write
from benchmarks.recall_tasks import TASKS, accuracy, new_teacher, tokenizer, train_teacher, write_documents
from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.figures import model_state_bytes
from hf_linear_attention.conversion.request import SIZES
from hf_linear_attention.conversion.state_budget import with_budget
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms import MECHANISMS
from hf_linear_attention.modeling_linear_attention import linear_model_class
from hf_linear_attention.training.presets.preset import (
    Preset,
    fit_to,
    load_preset,
    model_without_weights,
    preset_names,
)
from hf_linear_attention.training.presets.stages import run_stages
from hf_linear_attention.training.recipe_parser import parse
from hf_linear_attention.training.run import run


@dataclass(frozen=True)
class Form:
    """How a teacher is converted, and by which preset's stages it is healed.

    Attributes:
        settings: those of `linear_attention` without the size; empty for those of the preset.
        size: the option that is made as large as the bytes allow; None where there is none.
        window_share: the share of the bytes that goes to the window of `hybrid`, before `size` gets the others.
    """

    settings: Mapping[str, Any]
    size: str | None = "num_features"
    window_share: float = 0.0
    preset: str = "default"

    @property
    def is_available(self) -> bool:
        return self.preset in preset_names() and self.settings.get("mechanism", "window") in MECHANISMS


WINDOW = "window"
# What the default preset gives to keys that are far away.
FAR = {"decay": "learned", "rope": "partial"}
FORMS = {
    WINDOW: Form({"mechanism": "window", "num_sinks": 0}, "window_size"),
    "linear exp": Form({"mechanism": "linear", "feature_map": "exp", **FAR}),
    "linear hedgehog": Form({"mechanism": "linear", "feature_map": "hedgehog"}),
    "performer": Form({"mechanism": "performer"}),
    "aft simple": Form({"mechanism": "aft"}, None),
    "hybrid, 1/4 window": Form({"mechanism": "hybrid", "num_sinks": 0, **FAR}, window_share=1 / 4),
    "preset default": Form({}),
    "preset linear": Form({}, preset="linear"),
    "gated_delta": Form({"mechanism": "gated_delta"}),
    "preset gated_delta": Form({}, preset="gated_delta"),
}
# Answers that an accuracy counts at least, and the most documents for them: a needle has one answer.
ANSWERS, MOST_DOCUMENTS = 1024, 256
LEAST_DOCUMENTS = 16
# The goal: this share of the teacher's accuracy with half of the bytes of its keys and values.
GOAL, HALF = 0.95, 1 / 2
# The least accuracy of a teacher that can be asked to pass it on.
CAN_RECALL = 0.99


def bytes_of(teacher: Any, settings: Mapping[str, Any]) -> int:
    """Of the decoding state of all layers."""
    with torch.device("meta"):
        return model_state_bytes(linear_model_class(type(teacher))(convert_config(teacher.config, **settings)))


def cache_bytes(teacher: Any) -> int:
    """Of all keys and values at the trained length, in float32."""
    config = teacher.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return config.max_position_embeddings * per_token


def largest(teacher: Any, settings: Mapping[str, Any], option: str, budget: float) -> dict[str, Any] | None:
    """The settings with the largest even value of `option` whose state takes at most `budget` bytes, if there is one.

    The state has to be linear in it. Even, because the features of `hedgehog` come in pairs.
    """
    two, four = (bytes_of(teacher, {**settings, option: value}) for value in (2, 4))
    value = 2 + 2 * int((budget - two) // (four - two))
    return {**settings, option: value} if value >= 2 else None


def sized(teacher: Any, form: Form, budget: int) -> dict[str, Any] | None:
    """The settings of a form for a state of at most `budget` bytes; None if it has none so small."""
    settings = dict(form.settings) or dict(load_preset(form.preset).settings["causal"])
    if not form.settings and settings["mechanism"] == "hybrid":
        settings = {name: value for name, value in settings.items() if name not in SIZES} | {"state_bytes": budget}
        return with_budget(settings, type(teacher), teacher.config, torch.float32)
    if form.window_share:
        window = largest(teacher, FORMS[WINDOW].settings, "window_size", form.window_share * budget)
        if window is None:
            return None
        settings["window_size"] = window["window_size"]
    if form.size is None:
        return settings if bytes_of(teacher, settings) <= budget else None
    return largest(teacher, settings, form.size, budget)


def teacher_folder(arguments: Namespace, task: str, seed: int) -> Path:
    """The folder of the trained teacher, which is made if it is not there."""
    sizes = (arguments.length, arguments.width, arguments.layers, arguments.heads)
    folder = arguments.work_dir / f"{task}-{'x'.join(map(str, sizes))}-{seed}" / "teacher"
    if not folder.is_dir():
        torch.manual_seed(seed)
        model = new_teacher(*sizes)
        facts = train_teacher(model, task, seed, arguments.teacher_steps)
        with staging(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer().save_pretrained(unfinished)
            (unfinished / "training.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def healing(arguments: Namespace, form: Form) -> Preset:
    """The preset's stages with the learning rate of all parameters given, if it is."""
    preset = load_preset(form.preset)
    stages = preset.stages["causal_lm"]
    if arguments.learning_rate is not None:
        options = {**stages[-1].options, "learning_rate": arguments.learning_rate}
        stages = [*stages[:-1], dataclasses.replace(stages[-1], options=options)]
    return dataclasses.replace(preset, stages={"causal_lm": stages})


def heal(arguments: Namespace, form: Form, teacher: Path, converted: Path, task: str, seed: int) -> Path:
    """The folder of the healed student; a run that was killed goes on where it was."""
    preset = healing(arguments, form)
    facts = repr((preset.stages, arguments.tokens, arguments.tokens_per_step))
    folder = converted.with_name(f"{converted.name}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}")
    data = teacher.with_name(f"{task}-{arguments.tokens}.jsonl")
    if not data.is_file():
        write_documents(data.with_suffix(".tmp"), task, arguments.length, arguments.tokens, seed + 1)
        data.with_suffix(".tmp").replace(data)
    steps = max(1, arguments.tokens // arguments.tokens_per_step)
    given = {
        "task": "causal_lm",
        "model_name_or_path": str(converted),
        "teacher_name_or_path": str(teacher),
        "train_file": str(data),
        "max_train_tokens": arguments.tokens,
        "max_length": arguments.length,
        "per_device_train_batch_size": max(1, arguments.tokens_per_step // arguments.length),
        "checkpointing_steps": steps,
        "save_total_limit": 1,
        "seed": seed,
        "output_dir": str(folder),
        "resume_from_checkpoint": "latest",
    }
    run_stages(fit_to(preset, model_without_weights(given)), given, parse, run)
    return folder


def by_length(arguments: Namespace, folder: Path, task: str) -> list[float]:
    """The accuracy on documents of `arguments.lengths` times the trained length, alike for all models; kept on disk."""
    found = []
    for times in arguments.lengths:
        length = (arguments.length - 1) * times + 1
        _, counts = TASKS[task](1, length, torch.Generator())
        size = min(arguments.documents, max(LEAST_DOCUMENTS, ANSWERS // int(counts.sum())))
        documents = TASKS[task](size, length, torch.Generator().manual_seed(10_000))
        digest = hashlib.sha256(documents[0].numpy().tobytes()).hexdigest()[:8]
        path = folder / f"accuracy-{length}-{digest}.json"
        if not path.is_file():
            model = AutoModelForCausalLM.from_pretrained(folder)
            path.write_text(json.dumps(accuracy(model, documents)), encoding="utf-8")
        found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def measure(arguments: Namespace, name: str, share: float, task: str, seed: int) -> dict[str, Any] | None:
    """One form with one share of the bytes: converted, healed, and its accuracies before and after."""
    folder, form = teacher_folder(arguments, task, seed), FORMS[name]
    teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
    settings = sized(teacher, form, int(share * cache_bytes(teacher)))
    if settings is None:
        return None
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    converted = folder.with_name(f"{settings['mechanism']}-{digest}")
    if not converted.is_dir():
        torch.manual_seed(seed)
        with staging(converted) as unfinished:
            convert(teacher, **settings).save_pretrained(unfinished)
            tokenizer().save_pretrained(unfinished)
    healed = heal(arguments, form, folder, converted, task, seed)
    return {
        "form": name,
        "share": share,
        "seed": seed,
        "state_bytes": bytes_of(teacher, settings),
        "settings": settings,
        "untrained": by_length(arguments, converted, task) if name == WINDOW else None,
        "healed": by_length(arguments, healed, task),
    }


def run_task(arguments: Namespace, task: str) -> dict[str, Any]:
    teachers, rows = [], []
    for seed in arguments.seeds:
        folder = teacher_folder(arguments, task, seed)
        teacher = AutoModelForCausalLM.from_pretrained(folder)
        facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        teachers.append({"seed": seed, "accuracy": by_length(arguments, folder, task), **facts})
        write(f"{task}, seed {seed}: teacher {teachers[-1]['accuracy']} in {facts['minutes']:.1f} minutes")
        for share in arguments.shares:
            for name in arguments.forms:
                start = time.process_time()
                row = measure(arguments, name, share, task, seed)
                if row is not None:
                    rows.append(row)
                    minutes = (time.process_time() - start) / 60  # hardly any where it was finished before
                    write(f"{task}, seed {seed}, {share:.3g}, {name}: {row['healed']} in {minutes:.2f} minutes")
    return {"cache_bytes": cache_bytes(teacher), "teachers": teachers, "rows": rows}


def mean_at(rows: Sequence[Mapping[str, Any]], key: str, at: int) -> float | None:
    """Over seeds; None where there is no row."""
    return statistics.mean(row[key][at] for row in rows) if rows else None


def percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}"


def of(content: Mapping[str, Any], form: str, share: float) -> list[dict[str, Any]]:
    return [row for row in content["rows"] if (row["form"], row["share"]) == (form, share)]


def report(figures: Mapping[str, Any]) -> str:
    parts = []
    for task, content in figures["tasks"].items():
        shares, forms = figures["shares"], figures["forms"]
        header = ["", *(f"{share:.3g} of the bytes" for share in shares), *(f"x{n}" for n in figures["lengths"])]
        teacher = [mean_at(content["teachers"], "accuracy", at) for at in range(len(figures["lengths"]))]
        lines = [["softmax teacher", *[None] * len(shares), *map(percent, teacher)]]
        labels = [(f"{WINDOW}, untrained", WINDOW, "untrained")] if WINDOW in forms else []
        for label, form, key in [*labels, *((form, form, "healed") for form in forms)]:
            found = [of(content, form, share) for share in shares]
            first = [percent(mean_at(rows, key, 0)) for rows in found]
            lengths = [percent(mean_at(found[-1], key, at)) for at in range(len(figures["lengths"]))]
            lines.append([label, *first, *lengths])
        parts.append(
            f"{task}: percent of answers right; {content['cache_bytes']:,} bytes of keys and values at "
            f"{figures['length']} tokens; by length with {shares[-1]:.3g} of them\n\n{table(header, lines)}"
        )
    return "\n\n".join([*parts, conclusion(figures)])


def conclusion(figures: Mapping[str, Any]) -> str:
    """Which forms reach the goal, for every task whose teacher can recall."""
    lines = []
    for task, content in figures["tasks"].items():
        teacher = mean_at(content["teachers"], "accuracy", 0) or 0
        means = {form: mean_at(of(content, form, HALF), "healed", 0) or 0 for form in figures["forms"]}
        reached = "; ".join(form for form, value in means.items() if value >= GOAL * teacher) or "none"
        lines.append(f"{task}: {reached if teacher >= CAN_RECALL else 'the teacher itself cannot recall'}")
    return f"{GOAL:.0%} of the teacher's accuracy with half of the bytes:\n" + "\n".join(lines)


def plot(plt, figures):
    figure, axes = plt.subplots(2, len(figures["tasks"]), figsize=(14, 8), layout="constrained", squeeze=False)
    for (above, below), (task, content) in zip(axes.T, figures["tasks"].items()):
        labels = [(f"{WINDOW}, untrained", WINDOW, "untrained", "k^:")] if WINDOW in figures["forms"] else []
        for number, form in enumerate(figures["forms"]):
            labels.append((form, form, "healed", "ks--" if form == WINDOW else f"C{number}o-"))
        for label, form, key, style in labels:
            found = [(share, of(content, form, share)) for share in figures["shares"]]
            points = [
                (statistics.mean(row["state_bytes"] for row in rows) / content["cache_bytes"], mean_at(rows, key, 0))
                for _, rows in found
                if rows
            ]
            above.plot(*zip(*points), style, markersize=3, label=label)
            last = [mean_at(found[-1][1], key, at) for at in range(len(figures["lengths"]))]
            below.plot(figures["lengths"], last, style, markersize=3)
        teacher = [mean_at(content["teachers"], "accuracy", at) for at in range(len(figures["lengths"]))]
        above.axhline(teacher[0], color="grey", linewidth=1, label="softmax teacher")
        below.plot(figures["lengths"], teacher, color="grey", linewidth=1)
        above.set(title=task, xlabel="bytes of state / keys and values", ylabel="answers right", ylim=(0, 1.02))
        below.set(xlabel="length / trained length", ylabel="answers right", ylim=(0, 1.02), xscale="log")
        below.set_xticks(figures["lengths"], [str(times) for times in figures["lengths"]], minor=False)
        below.minorticks_off()
    axes[0][0].legend(fontsize=7)
    return figure


def main(argv: list[str] | None = None) -> None:
    known = [name for name, form in FORMS.items() if form.is_available]
    parser = argument_parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--forms", nargs="+", choices=known, default=known)
    parser.add_argument("--shares", type=float, nargs="+", default=[1 / 8, 1 / 4, HALF])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 4, 8], help="times the trained length")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--tokens_per_step", type=int, default=2048)
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="of all parameters, in the last stage")
    parser.add_argument("--length", type=int, default=129, help="tokens of a document on which the teacher is trained")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--teacher_steps", type=int, default=1500, help="the most; training ends when it can recall")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work_dir", type=Path, default=Path("outputs/recall"))
    arguments = parser.parse_args(argv)
    arguments.documents = MOST_DOCUMENTS
    if arguments.quick:
        arguments.length, arguments.width, arguments.teacher_steps, arguments.documents = 33, 32, 20, LEAST_DOCUMENTS
        arguments.tokens, arguments.tokens_per_step = 528, 132
        arguments.shares, arguments.lengths = arguments.shares[-1:], arguments.lengths[:2]
    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()
    figures: dict[str, Any] = {
        **{key: getattr(arguments, key) for key in ("length", "lengths", "shares", "forms", "tokens", "seeds")},
        "tasks": {},
    }
    for task in arguments.tasks:
        figures["tasks"][task] = run_task(arguments, task)
        write(f"\n{report(figures)}\n")
    save_results(arguments, "recall", figures, plot)


if __name__ == "__main__":
    main()
