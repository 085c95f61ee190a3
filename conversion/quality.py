"""How much of the original a converted model has kept on held-out text, by the figures of `training/retention.py`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.heads import head_of
from hf_linear_attention._common.model_card import (
    REPORT,
    format_value,
    training_facts,
    training_history,
    write_model_card,
)
from hf_linear_attention.conversion.calibration_data import PAIR_COLUMNS, check_pairs_file, check_text_file, data_recipe
from hf_linear_attention.conversion.request import CONVERSION_FACTS, ConversionArguments, Request, changed_options
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.training.data.batches import EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.processors import load_tokenizer, pad_token_id
from hf_linear_attention.training.models import load_student, load_teacher


logger = logging.getLogger(__name__)


TASKS = ("causal_lm", "embedding")
LABELS = {
    "teacher": "nats per token, the original",
    "student": "nats per token",
    "gap": "gap to the original, nats per token",
    "window_alone": "nats per token, untrained window and sinks alone",
    "without_far": "nats per token, linear part switched off",
    "gap_closed": "gap of the window alone that is closed",
    "linear_share": "that gap beyond 4 windows, share of the linear part",
    "agreement": "same top token",
    "kl": "KL(original, this model), nats per token",
    "cosine": "cosine of embeddings",
    "cosine_min": "cosine of embeddings, lowest",
    "same_neighbour": "same nearest neighbour",
    "spearman_teacher": "Spearman's correlation with the pairs' scores, the original",
    "spearman": "Spearman's correlation with the pairs' scores",
}


@dataclass(frozen=True)
class HeldOut:
    """A validation file and how much of it to use; for embedding models, scored pairs of texts."""

    path: str
    max_tokens: int
    trust_remote_code: bool
    pairs: str | None = None


def held_out(arguments: ConversionArguments) -> HeldOut | None:
    if arguments.validation_file is None:
        return None
    return HeldOut(
        arguments.validation_file, arguments.max_eval_tokens, arguments.trust_remote_code, arguments.pairs_file
    )


def evaluate(request: Request) -> str:
    """`--evaluate`: measure the model in `--output_dir`; returns the text to print.

    Raises:
        UsageError: if there is no converted model that could be measured.
    """
    arguments = request.arguments
    known = {name for name, fact in CONVERSION_FACTS.items() if fact.for_evaluation}
    # of the settings given, `mechanism` is the option `attention`
    if unused := sorted((changed_options(arguments) | set(request.given)) - known - {"mechanism"}):
        raise UsageError(
            "`--evaluate` measures the model in `--output_dir` as it is; leave out "
            + ", ".join(f"`--{name}`" for name in unused)
        )
    data = held_out(arguments)
    if data is None or arguments.output_dir is None:
        raise UsageError("`--evaluate` needs the converted model in `--output_dir`, and a `--validation_file`")
    check_text_file("validation_file", data.path)
    if data.pairs is not None:
        check_pairs_file(data.pairs)
    folder = Path(arguments.output_dir).expanduser().resolve()
    task = _task_of(folder)
    if data.pairs is not None and task != "embedding":
        raise UsageError(f"`--pairs_file` is for embedding models; {folder.name} is for {task}: leave it out")
    source = open_source(arguments.model_name_or_path, arguments.allow_pickle)
    quality = measure(folder, source, task, data)
    record(folder, source, quality, folder.name)
    return describe_quality(quality)


def _task_of(folder: Path) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "linear_attention" not in config:
        raise UsageError(f"`--output_dir` = {str(folder)!r} holds no converted model; convert first, then `--evaluate`")
    name = (config.get("architectures") or [""])[0]
    task = head_of(name, is_vision="patch_size" in config).task
    if task not in TASKS:
        raise UsageError(f"`--evaluate` has figures for {', '.join(TASKS)}, and {name} is none of these")
    return str(task)


def measure(folder: Path, source: Source, task: str, data: HeldOut) -> dict[str, Any]:
    """The figures of `training.retention` for the model in `folder`, None where one means nothing for it.

    Everything is computed in float32, from the weights as they lie there.
    """
    # Here and not at the top: it imports `datasets`, which most conversions do without.
    from hf_linear_attention.training.evaluation.retention import compare, compare_embeddings, compare_pairs, embed

    files = {"validation_file": data.path, "max_eval_tokens": data.max_tokens}
    recipe, batches = _recipe_and_batches(folder, source, task, data.trust_remote_code, files)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    student: Any = load_student(recipe, str(folder), None)
    teacher: Any = load_teacher(recipe, student, False)
    student, teacher = (model.to(device).eval() for model in (student, teacher))
    logger.info("measuring on %s", data.path)
    if task == "causal_lm":
        figures = compare(teacher, student, batches)
    else:
        figures = compare_embeddings(*(embed(model, batches) for model in (student, teacher)))
        if data.pairs is not None:
            files = {"validation_file": data.pairs, **PAIR_COLUMNS}
            _, batches = _recipe_and_batches(folder, source, task, data.trust_remote_code, files)
            figures |= compare_pairs(student, teacher, batches)
    return {"validation_file": Path(data.path).name, "max_tokens": data.max_tokens, **_finite(figures)}


def _recipe_and_batches(folder: Path, source: Source, task: str, trust_remote_code: bool, files: dict[str, Any]):
    from hf_linear_attention.training.data.splits import load_data  # imports `datasets`

    recipe = data_recipe(str(folder), task, source.loadable, trust_remote_code, **files)
    tokenizer = load_tokenizer(recipe)
    examples: Any = load_data(recipe, tokenizer).validation
    plan = EvaluationBatches(len(examples), recipe.optimization.per_device_eval_batch_size, 0, 1)
    batches = loader(Stream(examples, recipe.run.seed, shuffle=False), plan, pad_token_id(tokenizer))
    return recipe, tqdm(batches, desc="measuring")


def _finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record(folder: Path, source: Source, quality: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Write the figures into conversion_report.json and the model card of `folder`; returns the report."""
    path = folder / REPORT
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"base_model": source.name}
    report["quality"] = quality
    written = path.with_name(f"{REPORT}.tmp")  # a kill must not cost the report
    written.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {"metrics": {}, **training_facts(training_history(str(folder)))}
    facts["metrics"] = {**facts["metrics"], **quality_rows(quality or {})}
    facts |= {"base_model": source.name, "settings": config["linear_attention"]}
    write_model_card(folder, facts, name=name)
    return report


def quality_rows(quality: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under their names, as model card and terminal show them."""
    rows = {text: quality[name] for name, text in LABELS.items() if quality.get(name) is not None}
    for part in quality.get("by_position", ()):
        if part["student"] is not None:
            rows[f"gap at positions {part['from']} to {part['to'] - 1}"] = part["student"] - part["teacher"]
    return rows


def describe_quality(quality: Mapping[str, Any]) -> str:
    rows = quality_rows(quality)
    width = max(map(len, rows))
    lines = [f"On {quality['validation_file']} (about {quality['max_tokens']:,} tokens at most):"]
    return "\n".join([*lines, *(f"  {name:<{width}}  {format_value(value)}" for name, value in rows.items())])
