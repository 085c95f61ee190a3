"""Recall against bytes: forms and mixtures of forms under one budget, each paired with its memory switched off.

    python -m benchmarks.papers.recall_bytes --text_teacher SRC --train_file TEXT.jsonl --validation_file HELD_OUT.txt

Tiny Llamas, or models of another `--model_type`, are trained until they answer 99 % of a task (recall_tasks.py):
multi-query associative recall, or copying after a gap. Students are healed with the stages of a preset on `--tokens`
tokens of the task. Text, which is left out without `--text_teacher`, is healed on `--text_tokens` as the preset says.
What is finished in `--work_dir` is not made again.

A form has every one of the `--shares` of the bytes of the teacher's keys and values at the trained length. If a layer
keeps softmax (the first one), its keys and values count in full.

Off: `hybrid` computes window and sinks only, and in every other mechanism a token sees nothing but itself. What keeps
softmax keeps it. The difference is that of the same answers.

Every task has its teachers and students for each of the `--seeds`, and text for the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import parse as parse_arguments
from benchmarks.common import save, table, write
from benchmarks.papers.recall_tasks import (
    TASKS,
    Documents,
    is_right,
    new_teacher,
    tokenizer,
    train_teacher,
    write_documents,
)
from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.arguments import EvaluationArguments
from hf_linear_attention.conversion.quality import HeldOutText, held_out_text, model_state_bytes
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.mechanisms.hybrid import HybridAttention
from hf_linear_attention.model_conversion import convert_config
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class
from hf_linear_attention.training.evaluation import retention
from hf_linear_attention.training.presets import Preset, fit_to, load_preset, model_without_weights
from hf_linear_attention.training.run import run, run_stages


@dataclass(frozen=True)
class Form:
    """How a teacher is converted, and by which preset's stages it is healed.

    Attributes:
        settings: those of `linear_attention` without the size.
        size: the option that is made as large as the bytes allow.
        parts: other sizes, each with its share of the bytes that those before it leave, and what it is a multiple of.
    """

    settings: Mapping[str, Any]
    size: str = "num_features"
    parts: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    preset: str = "default"


WINDOW = "window"
# What the default preset gives to keys that are far away.
FAR = {"decay": "learned", "rope": "partial"}
SINKS = {"mechanism": "hybrid", "num_sinks": 4, **FAR}
# Without a window, healed at the rates of the presets that have none.
LINEAR = Form({"mechanism": "linear", "feature_map": "exp", **FAR}, preset="linear")
DELTA = Form({"mechanism": "gated_delta", "rope": "partial"}, preset="gated_delta")
EXACT = Form({**SINKS, "num_sinks": 0}, "num_exact_keys", {"window_size": (1 / 8, 2), "num_features": (0.18, 2)})
ALONE: dict[str, Form] = {
    "sinks, window, exact keys": Form(
        SINKS, "num_exact_keys", {"num_features": (1 / 6, 16), "window_size": (1 / 5, 1)}
    ),
    WINDOW: Form({"mechanism": "window", "num_sinks": 0}, "window_size"),
    "linear exp": LINEAR,
    "gated_delta": DELTA,
    "window, features": Form(SINKS, "window_size", {"num_features": (1 / 6, 16)}),
    "window, exact keys": EXACT,
}
KEPT_LAYER = "kept layer, linear exp"
TEXT = "text"
# Answers that an accuracy counts at least, and the most and least documents for them.
ANSWERS, MOST_DOCUMENTS, LEAST_DOCUMENTS = 1024, 256, 16


def bytes_of(teacher: Any, settings: Mapping[str, Any]) -> int:
    """Of the decoding state of all layers, with the keys and values of layers with softmax at the trained length."""
    config = teacher.config
    with torch.device("meta"):
        model = linear_model_class(type(teacher))(convert_config(config, **settings))
    kept = 1 - len(linear_attention_modules(model)) / config.num_hidden_layers
    return model_state_bytes(model) + round(kept * cache_bytes(teacher))


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
    settings = {**form.settings, **{option: multiple for option, (_, multiple) in form.parts.items()}}
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
    run_stages(fit_to(preset, model_without_weights(given), given["max_train_tokens"]), given, run)
    return folder


def asked(arguments: Namespace, task: str) -> Documents:
    """The documents of the trained length that all models are asked."""
    _, counts = TASKS[task](1, arguments.length, torch.Generator())
    size = min(arguments.documents, max(LEAST_DOCUMENTS, ANSWERS // int(counts.sum())))
    return TASKS[task](size, arguments.length, torch.Generator().manual_seed(10_000))


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


def all_forms(arguments: Namespace, num_layers: int) -> dict[str, Form]:
    """Those of `--forms`; one of them keeps softmax in the first layer."""
    kept = dataclasses.replace(LINEAR, settings={**LINEAR.settings, "layers": list(range(1, num_layers))})
    return {name: form for name, form in {**ALONE, KEPT_LAYER: kept}.items() if name in arguments.forms}


def of_each_token(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a causal mechanism, in which every token of an input is a sequence of its own."""

    def alone(self: Any, inputs: Any, state: Any = None) -> Any:
        batch, length = inputs.query.shape[0], inputs.query.shape[2]
        by_head = {name: getattr(inputs, name).transpose(1, 2).flatten(0, 1) for name in ("query", "key", "value")}
        tokens = {name: x.unsqueeze(2) for name, x in by_head.items()}
        for name in ("positions", "gates"):
            if (x := getattr(inputs, name)) is not None:
                tokens[name] = x.flatten(0, 1).unsqueeze(1)
        output, _ = forward(self, inputs._replace(attention_mask=None, **tokens), None)
        return output.squeeze(1).unflatten(0, (batch, length)), None

    return alone


@contextlib.contextmanager
def memory_off(model: Any) -> Iterator[None]:
    """Inside, a converted model has no state but window and sinks of `hybrid`, and what keeps softmax."""
    mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]
    plain = {type(mechanism) for mechanism in mechanisms} - {HybridAttention}
    with contextlib.ExitStack() as stack, retention.without_far(model):
        for kind in plain:
            stack.enter_context(mock.patch.object(kind, "forward", of_each_token(kind.forward)))
        yield


def paired(figures: Callable[[Any], dict[str, Tensor]], folder: Path) -> dict[str, dict[str, float]]:
    """By name the mean of a student's figures, with its memory `off`, and the difference with its standard error.

    Args:
        figures: those of a model by name, one per document or target; kept on disk.
    """
    path = folder / "recall_bytes.json"
    if not path.is_file():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        own = figures(model)
        with memory_off(model):
            off = figures(model)
        found = {}
        for name, values in own.items():
            difference = retention.paired_difference(values, off[name])
            found[name] = {"own": values.mean().item(), "off": off[name].mean().item(), "difference": difference}
        path.write_text(json.dumps(found), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def run_forms(
    arguments: Namespace,
    seed: int,
    folder: Path,
    data: Path,
    figures: Callable[[Any], dict[str, Tensor]],
) -> dict[str, Any]:
    """The figures of a teacher and of all its students, by share, form and seed."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    whole, rows = cache_bytes(teacher), []
    forms = all_forms(arguments, teacher.config.num_hidden_layers)
    for name, form in forms.items():
        for share in arguments.shares:
            settings = sized(teacher, form, int(share * whole))
            if settings is None:
                continue
            converted = converted_folder(folder, teacher, settings, seed)
            healed = heal(arguments, form, folder, converted, data, seed)
            found = paired(figures, healed)
            size = bytes_of(teacher, settings)
            row = {"form": name, "share": share, "seed": seed, "settings": settings, "state_bytes": size}
            rows.append(row | {"figures": found})
            write(f"{folder.parent.name}, {share:.3g}, {name}: {found}")
    teacher_figures = {name: values.mean().item() for name, values in figures(teacher).items()}
    return {"teacher": teacher_figures, "cache_bytes": whole, "rows": rows}


def run_task(arguments: Namespace, task: str) -> dict[str, Any]:
    """The share of right answers to a task; that of the teacher is the mean over the seeds."""
    documents = asked(arguments, task)

    def figures(model: Any) -> dict[str, Tensor]:
        return {task: 100 * is_right(model, documents).double().mean(1)}

    found = []
    for seed in arguments.seeds:
        folder = teacher_folder(arguments, task, seed)
        data = training_file(arguments, folder, task, seed)
        found.append(run_forms(arguments, seed, folder, data, figures))
    teacher = {task: statistics.fmean(each["teacher"][task] for each in found)}
    return {**found[0], "teacher": teacher, "rows": [row for each in found for row in each["rows"]]}


def run_text(arguments: Namespace) -> dict[str, Any]:
    """The nats per token of held-out text."""
    folder = arguments.work_dir / TEXT / "teacher"
    if not folder.is_dir():
        with staging(folder) as unfinished:
            shutil.copytree(arguments.text_teacher, unfinished, dirs_exist_ok=True)
    data = EvaluationArguments(
        model_name_or_path="",
        max_eval_tokens=arguments.text_eval_tokens,
        validation_file=arguments.validation_file,
    )
    text: HeldOutText = held_out_text(folder, open_source(str(folder)), data)[1]

    def figures(model: Any) -> dict[str, Tensor]:
        return {"nats": retention.nats_of(model, text.batches())}

    own = {"tokens": arguments.text_tokens, "tokens_per_step": 1024, "length": text.max_length, "learning_rate": None}
    arguments = Namespace(**{**vars(arguments), **own})
    return run_forms(arguments, arguments.seeds[0], folder, Path(arguments.train_file), figures)


def fraction(share: float) -> str:
    """`1/16`, for tables and pictures."""
    return str(Fraction(share).limit_denominator(1000))


def tables_of(arguments: Namespace, name: str, found: dict[str, Any]) -> list[Any]:
    """One table for every figure of a task: by form and share its own of every seed / the mean of off."""
    made = []
    for key, teacher in found["teacher"].items():
        digits = 3 if name == TEXT else 0
        lines: list[list[Any]] = [[f"softmax teacher: {teacher:.{digits}f}", *[None] * len(arguments.shares)]]
        for form in arguments.forms:
            cells: list[str | None] = []
            for share in arguments.shares:
                rows = [row["figures"][key] for row in found["rows"] if (row["form"], row["share"]) == (form, share)]
                own = " ".join(f"{row['own']:.{digits}f}" for row in rows)
                cells.append(f"{own}/{statistics.fmean(row['off'] for row in rows):.{digits}f}" if rows else None)
            lines.append([form, *cells])
        made.append(table([f"{key}, own/off", *map(fraction, arguments.shares)], lines))
    return made


def main(argv: list[str] | None = None) -> None:
    """Measure all forms on all tasks."""
    quick = {"length": 33, "width": 32, "teacher_steps": 20, "documents": 16, "tokens": 528, "tokens_per_step": 132}
    quick |= {"shares": [3 / 4], "text_tokens": 1200, "text_eval_tokens": 1000}
    sizes = {"length": 129, "width": 64, "layers": 2, "heads": 2, "documents": MOST_DOCUMENTS}
    training = {"tokens": 262_144, "tokens_per_step": 512, "learning_rate": 1e-3, "teacher_steps": 1500, "seeds": [0]}
    text = {"text_teacher": None, "train_file": None, "validation_file": None}
    text |= {"text_tokens": 100_000, "text_eval_tokens": 24_000}
    chosen = {"model_type": "llama", "tasks": ["mqar", "copying"], "forms": [*ALONE, KEPT_LAYER]}
    chosen |= {"shares": [1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4], "work_dir": Path("outputs/recall")}
    arguments = parse_arguments(__doc__, argv, quick, **sizes, **training, **text, **chosen)
    logging.basicConfig(level=logging.WARNING)
    found = {name: run_task(arguments, name) for name in arguments.tasks}
    if arguments.text_teacher is not None:
        found[TEXT] = run_text(arguments)
    save(
        arguments,
        "recall_bytes",
        [made for name in found for made in tables_of(arguments, name, found[name])],
        tasks=found,
    )


if __name__ == "__main__":
    main()
