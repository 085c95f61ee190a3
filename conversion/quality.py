"""How much of the original a converted model has kept on held-out text, by the figures of `training/evaluation`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.devices import computing_device
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.heads import head_of_config
from hf_linear_attention._common.model_card import (
    REPORT,
    training_facts,
    training_history,
    write_model_card,
)
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.conversion.calibration_data import PAIR_COLUMNS, check_pairs_file, check_text_file, data_recipe
from hf_linear_attention.conversion.layer_speed import model_speed, whole_model_speed
from hf_linear_attention.conversion.options import ConversionArguments, EvaluationArguments
from hf_linear_attention.conversion.page import write_page
from hf_linear_attention.conversion.preset_plan import check_embedding_options, check_task_options
from hf_linear_attention.conversion.report import EARLIER, comparison, describe_quality, quality_rows, with_earlier
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.conversion.verification import head_figures
from hf_linear_attention.extensions import PREFIX
from hf_linear_attention.training.data.packing import PackedBlocks
from hf_linear_attention.training.data.processors import load_tokenizer, pad_token_id
from hf_linear_attention.training.models import load_student, load_teacher
from hf_linear_attention.training.tasks import MESSAGES


logger = logging.getLogger(__name__)


MEASURED_TASKS = ("causal_lm", "embedding")


@dataclass(frozen=True)
class HeldOut:
    """A validation file and how much of it to use; for embedding models, scored pairs of texts; for language models the
    longest windows, the file that was trained on and whether there are controls; for embedding models, further options
    of `training` that only they have."""

    path: str
    max_tokens: int
    trust_remote_code: bool
    pairs: str | None = None
    max_length: int = 16_384
    train_file: str | None = None
    controls: str = "untrained"
    of_embeddings: Mapping[str, Any] = field(default_factory=dict)


def held_out(arguments: ConversionArguments | EvaluationArguments) -> HeldOut | None:
    """The held-out data that the options name, or None without `--validation_file`."""
    if arguments.validation_file is None:
        return None
    return HeldOut(
        arguments.validation_file,
        arguments.max_eval_tokens,
        arguments.trust_remote_code,
        arguments.pairs_file,
        arguments.max_eval_length,
        arguments.train_file,
        arguments.controls,
        arguments.of_embeddings,
    )


def evaluate(arguments: EvaluationArguments) -> str:
    """Measure a converted model, and write the figures into its folder; returns the text to print.

    Raises:
        UsageError: if there is no converted model that could be measured.
    """
    data = held_out(arguments)
    if data is None:
        raise UsageError("`--validation_file` is missing; name a file of held-out text")
    check_text_file("validation_file", data.path, instead=MESSAGES)
    if data.pairs is not None:
        check_pairs_file(data.pairs)
    if data.train_file is not None:
        check_text_file("train_file", data.train_file, instead=MESSAGES)
    if data.controls == "healed":
        raise UsageError("`--controls healed` trains a window as `convert --preset` does; this command trains nothing")
    folder = Path(arguments.model_name_or_path).expanduser().resolve()
    task = _task_of(folder)
    if data.pairs is not None and task != "embedding":
        raise UsageError(f"`--pairs_file` is for embedding models; {folder.name} is for {task}: leave it out")
    check_task_options(arguments, task)
    source = open_source(str(arguments.teacher_name_or_path), arguments.allow_pickle, "teacher_name_or_path")
    _check_original(source, folder, task)
    if task == "embedding":
        check_embedding_options(arguments, folder, read_json(folder / "config.json"))
    quality = measure(folder, source, task, data)
    before = read_json(folder / REPORT).get("quality") if (folder / REPORT).is_file() else None
    together = with_earlier(quality, before)
    record(folder, source, together, folder.name)
    kept = (
        [] if together == quality else ["Figures of earlier evaluations that were not measured now stay in the report."]
    )
    return "\n\n".join([describe_quality(quality), *kept])


def _task_of(folder: Path) -> str:
    path = folder / "config.json"
    if folder.is_dir():
        check_checkpoint(folder)
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "linear_attention" not in config:
        raise UsageError(f"`--model_name_or_path` = {str(folder)!r} holds no converted model; convert first")
    name = (config.get("architectures") or [""])[0]
    task = head_of_config(config).task
    if task not in MEASURED_TASKS:
        raise UsageError(f"There are figures for {', '.join(MEASURED_TASKS)}, and {name} is none of these")
    return str(task)


def _check_original(source: Source, folder: Path, task: str) -> None:
    original, ours = read_json(source.config_file), read_json(folder / "config.json")
    kind, own = original.get("model_type"), str(ours.get("model_type")).removeprefix(PREFIX)
    given = f"`--teacher_name_or_path` = {source.name!r}"
    if "linear_attention" in original:
        raise UsageError(f"{given} is converted itself; give the original, with softmax attention")
    if task == "causal_lm" and kind != own:  # an embedding model may be compared with another one
        raise UsageError(f"{given} is a `{kind}`, but the converted model was made from a `{own}`; give its original")


def measure(folder: Path, source: Source, task: str, data: HeldOut, healed: Path | None = None) -> dict[str, Any]:
    """The figures of `training.evaluation` for the model in `folder`, None where one means nothing for it.

    Everything is computed in float32, from the weights as they lie there.

    Args:
        healed: the folder of the trained control of a language model.
    """
    logger.info("measuring on %s", data.path)
    measured = _measure_language if task == "causal_lm" else _measure_embeddings
    with torch.no_grad():
        figures = measured(folder, source, data, *((healed,) if task == "causal_lm" else ()))
    named = {"train_file": data.train_file, "pairs_file": data.pairs}
    names = {name: Path(path).name for name, path in named.items() if path is not None}
    return {"validation_file": Path(data.path).name, "max_tokens": data.max_tokens, **names, **finite(figures)}


def _measure_language(folder: Path, source: Source, data: HeldOut, healed: Path | None) -> dict[str, Any]:
    # Here and not at the top: it imports `datasets`, which most conversions do without.
    from hf_linear_attention.conversion.figures import Controls, continuations, language_figures, possible_controls
    from hf_linear_attention.training.evaluation.retention import most_positions, running_text

    recipe, text = held_out_text(folder, source, data)
    student, teacher = load_models(recipe, folder)
    controls = Controls([], left_out="`--controls none` was given")
    if data.controls != "none":
        controls = possible_controls(teacher, student, text)
    if healed is not None and controls.windows:
        controls = replace(controls, healed=load_student(recipe, str(healed), None).to(student.device).eval())
    figures = language_figures(teacher, student, text, controls)
    if controls.healed is not None:
        figures["control"]["healed_tokens"] = sum(run["training"]["tokens"] for run in training_history(str(healed)))
    tokenizer, longest = load_tokenizer(recipe), most_positions(teacher) or text.max_length
    stream = running_text(text.examples)
    samples = continuations(teacher, student, stream, text.bos_token_id, tokenizer, longest)
    return {**figures, "samples": samples, **_costs_and_heads(student, teacher, tokenizer, writes=True)}


def held_out_text(folder: Path, source: Source, data: HeldOut) -> tuple[Any, Any]:
    """The recipe of `training` that reads it for the model in `folder`, and the text as `language_figures` takes it."""
    files = {"validation_file": data.path, "max_eval_tokens": data.max_tokens, "train_file": data.train_file}
    recipe = data_recipe(str(folder), "causal_lm", source.loadable, data.trust_remote_code, **files)
    return recipe, read_text(recipe, data.max_length)


def read_text(recipe: Any, max_eval_length: int) -> Any:
    """The validation and training files of a recipe, as `language_figures` takes them."""
    from hf_linear_attention.conversion.figures import HeldOutText
    from hf_linear_attention.training.data.processors import load_config, sequence_length
    from hf_linear_attention.training.data.splits import load_data

    tokenizer = load_tokenizer(recipe)
    splits: Any = load_data(recipe, tokenizer)
    training = None if splits.train is None else _documents(splits.train)
    length = sequence_length(recipe, tokenizer, load_config(recipe))
    return HeldOutText(
        splits.validation, length, tokenizer.bos_token_id, pad_token_id(tokenizer), max_eval_length, training
    )


def _documents(examples: Any) -> Any:
    """The tokens of every document; those of packed ones are in one stream."""
    if isinstance(examples, PackedBlocks):
        return np.split(examples.stream, examples.documents[1:])
    return examples.columns["input_ids"]


def load_models(recipe: Any, folder: Path) -> tuple[Any, Any]:
    """Student and teacher, ready to be measured."""
    device = computing_device()
    student: Any = load_student(recipe, str(folder), None)
    teacher: Any = load_teacher(recipe, student, False)
    return student.to(device).eval(), teacher.to(device).eval()


def _measure_embeddings(folder: Path, source: Source, data: HeldOut) -> dict[str, Any]:
    from hf_linear_attention.conversion.figures import embedding_figures

    texts = {"validation_file": data.path, "max_eval_tokens": data.max_tokens}
    pairs = None if data.pairs is None else {"validation_file": data.pairs, **PAIR_COLUMNS}
    recipes = [
        data_recipe(str(folder), "embedding", source.loadable, data.trust_remote_code, **files, **data.of_embeddings)
        for files in (texts, pairs)
        if files is not None
    ]
    student, teacher = load_models(recipes[0], folder)
    tokenizer = load_tokenizer(recipes[0])
    figures = embedding_figures(student, teacher, *recipes)
    return {**figures, **_costs_and_heads(student, teacher, tokenizer, writes=False)}


def _costs_and_heads(student: Any, teacher: Any, tokenizer: Any, writes: bool) -> dict[str, Any]:
    """The errors of the heads and, on a CPU, the times of a layer and of the whole model."""
    from hf_linear_attention.training.evaluation.retention import most_positions

    speed = None
    if student.device.type == "cpu":
        logger.info("timing both models")
        whole = whole_model_speed(student, teacher, most_positions(teacher), writes)
        speed = {**model_speed(student, torch.float32), "model": whole}
    return {"heads": head_figures(student, tokenizer), "speed": speed}


def finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record(folder: Path, source: Source, quality: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Write the figures into conversion_report.json, report.html and the model card of `folder`; returns the report."""
    path = folder / REPORT
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"base_model": source.name}
    report["quality"] = quality
    written = path.with_name(f"{REPORT}.tmp")  # a kill must not cost the report
    written.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {"metrics": {}, **training_facts(training_history(str(folder)))}
    facts["metrics"] = {**facts["metrics"], **quality_rows(quality or {})}
    records = [quality or {}, *(quality or {}).get(EARLIER, ())]
    for earlier in records[1:]:
        rows = quality_rows(earlier).items()
        facts["metrics"] |= {f"{text}, on {earlier['validation_file']}": value for text, value in rows}
    facts |= {"comparisons": [table for entry in records if (table := comparison(entry)) is not None]}
    facts |= {"base_model": source.name, "settings": config["linear_attention"]}
    write_model_card(folder, facts, name=name)
    write_page(folder, name)
    return report
