"""Recall of softmax teachers and of their conversions: accuracy against bytes of state, and against the length.

    python -m benchmarks.papers.recall

Tiny Llamas, or models of another `--model_type`, are trained until they answer 99 % of a task (recall_tasks.py):
multi-query associative recall, copying after a gap, a needle. Each is converted by every form of FORMS with a state of
each of the `--shares` of the bytes of its keys and values at the trained length, and healed with the stages of a preset
on `--tokens` tokens of the same task. The form `window` is the control: an exact window of the same bytes, untrained
and healed in the same way. Beyond the trained length the same state is a smaller share of the keys and values, and
`mqar` asks for more pairs. What is finished in `--work_dir` is not made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import parse as parse_arguments
from benchmarks.common import save, table, write
from benchmarks.papers.recall_tasks import (
    TASKS,
    Documents,
    accuracy,
    new_teacher,
    tokenizer,
    train_teacher,
    write_documents,
)
from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.options import SIZES
from hf_linear_attention.conversion.plan import with_budget
from hf_linear_attention.conversion.quality import model_state_bytes
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class
from hf_linear_attention.training.presets import (
    Preset,
    fit_to,
    load_preset,
    model_without_weights,
    preset_names,
)
from hf_linear_attention.training.run import run, run_stages


@dataclass(frozen=True)
class Form:
    """How a teacher is converted, and by which preset's stages it is healed.

    Attributes:
        settings: those of `linear_attention` without the size; empty for those of the preset.
        size: the option that is made as large as the bytes allow; None where there is none.
        parts: other sizes, each with its share of the bytes that those before it leave, and what it is a multiple of.
    """

    settings: Mapping[str, Any]
    size: str | None = "num_features"
    parts: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    preset: str = "default"

    @property
    def is_available(self) -> bool:
        """Whether the package has its mechanism and its preset."""
        return self.preset in preset_names() and self.settings.get("mechanism", "window") in MECHANISMS


WINDOW = "window"
# What the default preset gives to keys that are far away.
FAR = {"decay": "learned", "rope": "partial"}
HYBRID = {"mechanism": "hybrid", "num_sinks": 0, **FAR}
FORMS = {
    WINDOW: Form({"mechanism": "window", "num_sinks": 0}, "window_size"),
    "linear exp": Form({"mechanism": "linear", "feature_map": "exp", **FAR}),
    "linear hedgehog": Form({"mechanism": "linear", "feature_map": "hedgehog"}),
    "performer": Form({"mechanism": "performer"}),
    "aft simple": Form({"mechanism": "aft"}, None),
    "hybrid, 1/4 window": Form(HYBRID, parts={"window_size": (1 / 4, 2)}),
    "hybrid, exact keys": Form(HYBRID, "num_exact_keys", {"window_size": (1 / 8, 2), "num_features": (0.18, 2)}),
    "preset default": Form({}),
    "preset linear": Form({}, preset="linear"),
    "gated_delta": Form({"mechanism": "gated_delta"}),
    "preset gated_delta": Form({}, preset="gated_delta"),
    "preset qwen3_5": Form({}, None, preset="qwen3_5"),
}
# Answers that an accuracy counts at least, and the most documents for them: a needle has one answer.
ANSWERS, MOST_DOCUMENTS = 1024, 256
LEAST_DOCUMENTS = 16


def bytes_of(teacher: Any, settings: Mapping[str, Any]) -> int:
    """Of the decoding state of all layers, with the keys and values of kept heads and layers at the trained length."""
    config = teacher.config
    with torch.device("meta"):
        model = linear_model_class(type(teacher))(convert_config(config, **settings))
    kept = 1 - len(linear_attention_modules(model)) / config.num_hidden_layers
    return model_state_bytes(model, config.max_position_embeddings) + round(kept * cache_bytes(teacher))


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
        try:
            return with_budget(settings, type(teacher), teacher.config, torch.float32)
        except UsageError:  # it needs more bytes
            return None
    settings |= {option: multiple for option, (_, multiple) in form.parts.items()}
    if form.size is None:
        return settings if bytes_of(teacher, settings) <= budget else None
    for option, (share, multiple) in form.parts.items():
        one, two = (bytes_of(teacher, {**settings, form.size: 2, option: n * multiple}) for n in (1, 2))
        settings[option] = multiple * max(1, round(share * (budget - 2 * one + two) / (two - one)))
    return largest(teacher, settings, form.size, budget)


def teacher_folder(arguments: Namespace, task: str, seed: int) -> Path:
    """The folder of the trained teacher, which is made if it is not there."""
    sizes = (arguments.length, arguments.width, arguments.layers, arguments.heads)
    kind = "" if arguments.model_type == "llama" else f"-{arguments.model_type}"
    folder = arguments.work_dir / f"{task}{kind}-{'x'.join(map(str, sizes))}-{seed}" / "teacher"
    if not folder.is_dir():
        torch.manual_seed(seed)
        model = new_teacher(arguments.model_type, *sizes)
        facts = train_teacher(model, task, seed, arguments.teacher_steps)
        with staging(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer().save_pretrained(unfinished)
            (unfinished / "training.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def healing(arguments: Namespace, form: Form) -> Preset:
    """The preset's stages, with the given learning rate of all parameters in the last one if there is one."""
    preset = load_preset(form.preset)
    if arguments.learning_rate is None:
        return preset
    stages = preset.stages["causal_lm"]
    options = {**stages[-1].options, "learning_rate": arguments.learning_rate}
    last = dataclasses.replace(stages[-1], options=options)
    return dataclasses.replace(preset, stages={"causal_lm": [*stages[:-1], last]})


def training_file(arguments: Namespace, teacher: Path, task: str, seed: int) -> Path:
    """The documents of a task that students are healed on, written if they are not there."""
    data = teacher.with_name(f"{task}-{arguments.tokens}.jsonl")
    if not data.is_file():
        write_documents(data.with_suffix(".tmp"), TASKS[task], arguments.length, arguments.tokens, seed + 1)
        data.with_suffix(".tmp").replace(data)
    return data


def heal(arguments: Namespace, form: Form, teacher: Path, converted: Path, data: Path, seed: int) -> Path:
    """The folder of the healed student; a run that was killed goes on where it was."""
    preset = healing(arguments, form)
    facts = repr((preset.stages, arguments.tokens, arguments.tokens_per_step))
    folder = converted.with_name(f"{converted.name}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}")
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
    run_stages(fit_to(preset, model_without_weights(given)), given, run)
    return folder


def asked(arguments: Namespace, task: str, times: int = 1) -> Documents:
    """The documents of so many times the trained length that all models are asked."""
    length = (arguments.length - 1) * times + 1
    _, counts = TASKS[task](1, length, torch.Generator())
    size = min(arguments.documents, max(LEAST_DOCUMENTS, ANSWERS // int(counts.sum())))
    return TASKS[task](size, length, torch.Generator().manual_seed(10_000))


def by_length(arguments: Namespace, folder: Path, task: str) -> list[float]:
    """The accuracy on documents of `arguments.lengths` times the trained length, alike for all models; kept on disk."""
    found = []
    for times in arguments.lengths:
        documents = asked(arguments, task, times)
        length, digest = documents[0].shape[1], hashlib.sha256(documents[0].numpy().tobytes()).hexdigest()[:8]
        path = folder / f"accuracy-{length}-{digest}.json"
        if not path.is_file():
            model = AutoModelForCausalLM.from_pretrained(folder)
            path.write_text(json.dumps(accuracy(model, documents)), encoding="utf-8")
        found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


def converted_folder(folder: Path, teacher: Any, settings: Mapping[str, Any], seed: int) -> Path:
    """The folder of the untrained student, beside that of its teacher; it is made if it is not there."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    converted = folder.with_name(f"{settings['mechanism']}-{digest}")
    if not converted.is_dir():
        torch.manual_seed(seed)
        with staging(converted) as unfinished:
            convert(teacher, **settings).save_pretrained(unfinished)
            AutoTokenizer.from_pretrained(folder).save_pretrained(unfinished)
    return converted


def measure(arguments: Namespace, name: str, share: float, task: str, seed: int) -> dict[str, Any] | None:
    """One form with one share of the bytes: converted, healed, and its accuracies before and after."""
    folder, form = teacher_folder(arguments, task, seed), FORMS[name]
    teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
    settings = sized(teacher, form, int(share * cache_bytes(teacher)))
    if settings is None:
        return None
    converted = converted_folder(folder, teacher, settings, seed)
    healed = heal(arguments, form, folder, converted, training_file(arguments, folder, task, seed), seed)
    return {
        "form": name,
        "share": share,
        "seed": seed,
        "state_bytes": bytes_of(teacher, settings),
        "settings": settings,
        "untrained": by_length(arguments, converted, task) if name == WINDOW else None,
        "healed": by_length(arguments, healed, task),
    }


def run_task(arguments: Namespace, task: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The facts of the teachers and of all forms."""
    teachers, rows = [], []
    for seed in arguments.seeds:
        folder = teacher_folder(arguments, task, seed)
        teachers.append({"seed": seed, "accuracy": by_length(arguments, folder, task)})
        write(f"{task}, seed {seed}: teacher {teachers[-1]['accuracy']}")
        for share in arguments.shares:
            for name in arguments.forms:
                row = measure(arguments, name, share, task, seed)
                if row is not None:
                    rows.append(row)
                    write(f"{task}, seed {seed}, {share:.3g}, {name}: {row['healed']}")
    return teachers, rows


def means(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The percent of answers right by length, means over seeds."""
    return [100 * statistics.fmean(values) for values in zip(*(row[key] for row in rows))]


def task_table(arguments: Namespace, task: str, teachers: list[Any], rows: list[Any]) -> dict[str, Any]:
    """The accuracy by length, of the teacher and of every form with each share of the bytes."""
    lines: list[list[Any]] = [["softmax teacher", None, *means(teachers, "accuracy")]]
    for share in arguments.shares:
        for form in arguments.forms:
            found = [row for row in rows if (row["form"], row["share"]) == (form, share)]
            if found and form == WINDOW:
                lines.append([f"{WINDOW}, untrained", share, *means(found, "untrained")])
            if found:
                lines.append([form, share, *means(found, "healed")])
    return table([f"{task}, percent right", "of the bytes", *(f"x{times}" for times in arguments.lengths)], lines)


def main(argv: list[str] | None = None) -> None:
    """Train the teachers, convert and heal them, and measure all."""
    known = [name for name, form in FORMS.items() if form.is_available]
    quick = {"length": 33, "width": 32, "teacher_steps": 20, "documents": LEAST_DOCUMENTS, "tokens": 528}
    quick |= {"tokens_per_step": 132, "shares": [1 / 2], "lengths": [1, 2]}
    sizes = {"length": 129, "width": 64, "layers": 2, "heads": 2, "documents": MOST_DOCUMENTS}
    training = {"tokens": 262_144, "tokens_per_step": 2048, "learning_rate": 1e-3, "teacher_steps": 1500, "seeds": [0]}
    chosen = {
        "model_type": "llama",
        "tasks": list(TASKS),
        "forms": known,
        "shares": [1 / 8, 1 / 4, 1 / 2],
        "lengths": [1, 2, 4, 8],
    }
    arguments = parse_arguments(__doc__, argv, quick, **sizes, **training, **chosen, work_dir=Path("outputs/recall"))
    logging.basicConfig(level=logging.WARNING)
    tables, figures = [], {}
    for task in arguments.tasks:
        teachers, rows = run_task(arguments, task)
        tables.append(task_table(arguments, task, teachers, rows))
        figures[task] = {"teachers": teachers, "rows": rows}
    save(arguments, "recall", tables, tasks=figures)


if __name__ == "__main__":
    main()
