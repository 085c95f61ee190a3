"""What mechanisms cost and keep for one model, measured here: the work of `compare`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.model_card import HISTORY
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.calibration_data import data_recipe, real_inputs, texts_of
from hf_linear_attention.conversion.commands import COMPARISON
from hf_linear_attention.conversion.layer_speed import model_speed
from hf_linear_attention.conversion.options import parse_tokens, request_of
from hf_linear_attention.conversion.page import (
    Section,
    bytes_text,
    memory_text,
    rendered,
    speed_chart,
    speed_conditions,
)
from hf_linear_attention.conversion.pipeline import Conversion, calibrated, load_converted, prepare
from hf_linear_attention.conversion.plan import stock_config
from hf_linear_attention.conversion.report import aligned
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.conversion.verification import MOST_TOKENS, TEXTS
from hf_linear_attention.default_settings import direction_of
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.losses.outputs import mean_pooled
from hf_linear_attention.training.presets import load_preset, preset_names, settings_for, stages_of


logger = logging.getLogger(__name__)

HEADER = ["mechanism", "untrained", "trained", "faster here from", "state", "whole preset"]
MEASURES = {"kl": "KL to the original, in nats per token (0 is equal)", "cosine": "cosine to the original's embeddings"}
DEFAULT_TOKENS = 50_000
# What is compared where nothing is named; those that a model does not support are left out.
COMPARED = {
    "causal": ("hybrid", "linear", "gated_delta"),
    "bidirectional": ("window", "linear", "nystrom", "linformer", "hybrid"),
    "encoder_decoder": ("linear", "nystrom", "linformer", "hybrid"),
}
HELD_OUT_TOKENS = 8192
# The steps of each stage whose speed says how long the preset would take. The sentences repeated fill their batches.
TIMED_STEPS, REPEATED = 10, 10
# A text file is read up to this many characters per token that is trained on, and these more.
CHARACTERS, MORE_CHARACTERS = 20, 400_000


@dataclass(frozen=True)
class Comparison:
    """What a comparison needs of the command line and the source; `train_file` and `held_out` are temporary files."""

    source: Source
    common: dict[str, Any]
    direction: str
    tokens: int | None
    folder: Path
    train_file: Path
    held_out: Path | None


def compare_mechanisms(arguments: argparse.Namespace) -> dict[str, Any]:
    """The content of comparison.json."""
    source = open_source(arguments.model_name_or_path, arguments.allow_pickle)
    config = stock_config(source, arguments.trust_remote_code)
    if hasattr(config, "linear_attention"):
        raise UsageError(f"{source.name} is converted already; give the original, with softmax attention")
    direction = direction_of(config)
    names = (arguments.mechanisms or ",".join(COMPARED[direction])).replace(" ", "").split(",")
    tokens = None
    if arguments.train_file is not None:
        tokens = parse_tokens(arguments.tokens) if arguments.tokens is not None else DEFAULT_TOKENS
    names_of_common = ("model_name_or_path", "trust_remote_code", "allow_pickle")
    common = {name: getattr(arguments, name) for name in names_of_common}
    with tempfile.TemporaryDirectory(prefix="hf-linear-attention-compare-") as name:
        files = _text_files(arguments.train_file, tokens, Path(name))
        comparison = Comparison(source, common, direction, tokens, Path(name), *files)
        rows = [compared(comparison, mechanism) for mechanism in dict.fromkeys(names)]
    content = {
        "base_model": source.name,
        "model_type": config.model_type,
        "max_length": max_length_of(config),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "train_file": None if arguments.train_file is None else Path(arguments.train_file).name,
        "mechanisms": rows,
    }
    return {**content, "recommendation": recommendation(content)}


def _text_files(path: str | None, tokens: int | None, folder: Path) -> tuple[Path, Path | None]:
    """A file to train on and one of held-out text; the built-in sentences, on which nothing is trained, without a path.

    Of the texts of a file the last tenth is held out, or of a single text its last tenth.
    """
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    if path is None or tokens is None:
        _write_texts(train, TEXTS * REPEATED)
        return train, None
    from hf_linear_attention.training.data.rows import load_rows  # imports `datasets`

    rows: Any = load_rows(data_recipe("", "embedding", train_file=path).data, "train")
    texts, count, most = [], 0, CHARACTERS * tokens + MORE_CHARACTERS
    for text in texts_of(rows, f"`--train_file` = {path!r}"):
        if count < most:
            texts.append(text[: most - count])
            count += len(texts[-1])
    if count < 100:
        raise UsageError(f"`--train_file` = {path!r} contains {count} characters of text; give a longer file")
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
    last = max(1, len(texts) // 10)
    _write_texts(train, texts[:-last])
    _write_texts(held_out, texts[-last:])
    return train, held_out


def _write_texts(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def compared(comparison: Comparison, mechanism: str) -> dict[str, Any]:
    """The row of one mechanism in comparison.json; only `mechanism` and `refused` if the model does not support it."""
    row: dict[str, Any] = {
        "mechanism": mechanism,
        "refused": None,
        "preset": preset_for(mechanism, comparison.direction),
    }
    attention = {**comparison.common, "attention": mechanism}
    preset = {**attention, "preset": row["preset"], "train_file": comparison.train_file}
    try:
        conversion, row["not_trained"] = prepare(request_of({**preset, "dry_run": True})), None
    except UsageError as error:
        try:
            conversion, row["not_trained"] = prepare(request_of({**attention, "dry_run": True})), str(error)
        except UsageError as refusal:
            return {"mechanism": mechanism, "refused": str(refusal)}
    logger.info("measuring %s", mechanism)
    teacher = _stock_model(conversion)
    model = load_converted(conversion)
    calibrated(conversion, model)
    batches = _batches(conversion, comparison)
    row["settings"] = conversion.plan.settings
    row |= distance(model, teacher, batches) if batches else {"measure": None, "before": None}
    row |= _costs(conversion, model)
    if row["not_trained"] is None:
        options = {**preset, "no_verify": True, "output_dir": comparison.folder / mechanism}
        row |= _trained(comparison, options, teacher, batches)
    return row


def preset_for(mechanism: str, direction: str) -> str:
    """The preset of this name with settings for this mechanism, or else `default`, whose stages train any."""
    for name in ("default", mechanism):
        settings = settings_for(load_preset(name), direction) if name in preset_names() else None
        if settings is not None and settings["mechanism"] == mechanism:
            return name
    return "default"


def _stock_model(conversion: Conversion) -> PreTrainedModel:
    source = conversion.source
    model: Any = conversion.plan.stock_class.from_pretrained(source.loadable, use_safetensors=not source.is_pickled)
    return model.float().eval()


def _batches(conversion: Conversion, comparison: Comparison) -> list[dict[str, torch.Tensor]]:
    """Inputs that are not trained on; none for a model that reads no text."""
    if conversion.plan.stock_class.main_input_name != "input_ids":
        return []
    path = None if comparison.held_out is None else str(comparison.held_out)
    inputs = real_inputs(conversion.source, conversion.plan, path)
    if inputs is None or path is not None:
        return [] if inputs is None else inputs.batches(HELD_OUT_TOKENS)
    ids = [batch["input_ids"] for batch in inputs.batches(HELD_OUT_TOKENS)]  # the built-in sentences, as one text
    text = torch.cat(ids, dim=1)[:, : min(MOST_TOKENS, max_length_of(conversion.plan.config) or MOST_TOKENS)]
    decoder = {"decoder_input_ids": text} if conversion.plan.config.is_encoder_decoder else {}
    return [{"input_ids": text, **decoder}]


@torch.no_grad()
def distance(
    student: PreTrainedModel, teacher: PreTrainedModel, batches: Sequence[dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """`measure` and `before`: KL(original || student) in nats per token, or the cosine of mean-pooled embeddings.

    The original's output is that of the stock model; both models are in float32.
    """
    total, count, measure = 0.0, 0, "cosine"
    pair = [ByRow(model) for model in (student.float().eval(), teacher)]
    for batch in progress(batches, "measuring"):
        batch = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
        mask = batch["attention_mask"]
        (student_output, mine), (teacher_output, yours) = (_outputs(by_row, batch) for by_row in pair)
        if mine is None or yours is None:
            outputs = (student_output, teacher_output)
            a, b = (mean_pooled(output.last_hidden_state.float(), mask) for output in outputs)
            found = F.cosine_similarity(a, b, dim=-1)
        else:
            measure, rows = "kl", mine.all()
            rows = rows[mask.flatten().bool()] if len(rows) == mask.numel() else rows
            found = _divergences(mine, yours, rows)
        total, count = total + found.double().sum().item(), count + found.numel()
    return {"measure": measure, "before": total / max(count, 1)}


def _outputs(by_row: ByRow, batch: dict[str, torch.Tensor]) -> tuple[Any, Rows | None]:
    return by_row.outputs(batch, call=lambda: by_row.model(**batch))


def _divergences(mine: Rows, yours: Rows, rows: torch.Tensor) -> torch.Tensor:
    return mine.read(rows, lambda logits, part: divergence(logits, yours(part)))


def _costs(conversion: Conversion, model: PreTrainedModel) -> dict[str, Any]:
    """The bytes of the state, and the time of one layer."""
    layers = conversion.plan.layers
    dtype = next(conversion.source.read(name).dtype for name in conversion.source.tensors)
    return {
        **model_speed(model, dtype if dtype.is_floating_point else torch.float32),
        "state_bytes": conversion.plan.state_bytes,
        "cache_bytes_per_token": sum(layer.cache_bytes_per_token for layer in layers),
    }


def _trained(
    comparison: Comparison,
    options: dict[str, Any],
    teacher: PreTrainedModel,
    batches: Sequence[dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """The distance `after` the training, if tokens were asked for, and the `minutes` that the whole preset would take.

    Args:
        comparison: what is compared.
        options: those of a conversion with a preset.
        teacher: the original.
        batches: the inputs on which the distance is measured.
    """
    if comparison.tokens is None and importlib.util.find_spec("datasets") is None:  # the extra `train` is not installed
        return {}
    after, stages = None, []
    if comparison.tokens is not None:
        conversion = prepare(request_of({**options, "tokens": comparison.tokens}))
        stages = _run(conversion)
        if batches:
            model: Any = conversion.plan.linear_class.from_pretrained(conversion.output_dir)
            after = distance(model, teacher, batches)["before"]
    if not stages or min(len(curve.get("points", ())) for _, curve in stages) < TIMED_STEPS:
        conversion = prepare(request_of({**options, "overwrite": True}))
        stages = _run(conversion, max_train_steps=TIMED_STEPS)
    tokens = conversion.training.preset.tokens if conversion.training is not None else 0
    seconds = [tokens * share / curve["per_second"] for share, curve in stages if curve.get("per_second")]
    minutes = sum(seconds) / 60 if len(seconds) == len(stages) else None
    return {"after": after, "minutes": minutes, "preset_tokens": tokens}


def _run(conversion: Conversion, **changes: Any) -> list[tuple[float, dict[str, Any]]]:
    """Convert and train, with `changes` of the options of training; each stage's share, and its curve of losses."""
    from hf_linear_attention.conversion.preset_run import run_training  # needs the extra `train`

    training: Any = conversion.training
    training = replace(training, given={**training.given, "logging_steps": 1, **changes})
    run_training(conversion, training)
    runs = json.loads((training.output_dir / HISTORY).read_text(encoding="utf-8"))["runs"]
    stages = stages_of(training.preset, training.given["task"])
    return [(stage.share, run["loss"]) for stage, run in zip(stages, runs, strict=True)]


# ---- The table, the recommendation and the page


def supported(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of the mechanisms that the model supports."""
    return [row for row in content["mechanisms"] if row["refused"] is None]


def table_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `header` and `rows` of the mechanisms that the model supports."""
    rows = []
    for row in supported(content):
        minutes, figures = row.get("minutes"), (row["before"], row.get("after"))
        cells = [
            *("-" if figure is None else f"{figure:.4f}" for figure in figures),
            speed_text(row, content["max_length"]),
            "-" if row["state_bytes"] is None else bytes_text(row["state_bytes"]),
            "-" if minutes is None else f"{minutes:,.1f} min for {row['preset_tokens']:,} tokens",
        ]
        rows.append([row["mechanism"], *cells])
    return {"header": HEADER, "rows": rows}


def speed_text(row: Mapping[str, Any], max_length: int | None) -> str:
    """From which length the mechanism is faster here, against the longest input of the model."""
    faster, curve = row["faster_from"], row["curve"]
    if not curve:
        return "-"
    if faster is None:
        longest = curve[-1]["length"]
        if max_length is not None and max_length <= longest:
            return f"never within its {max_length:,} positions"
        return f"not up to {longest:,} tokens"
    if max_length is not None and faster > max_length:
        return f"never within its {max_length:,} positions ({faster:,} tokens)"
    return f"{faster:,} tokens"


def recommendation(content: Mapping[str, Any]) -> str:
    """One sentence: the mechanism nearest to the original, after the training if there was one, and what it costs."""
    rows = supported(content)
    when = "after" if any(row.get("after") is not None for row in rows) else "before"
    known = [row for row in rows if row.get(when) is not None]
    if not known:
        return "There is nothing to recommend: no mechanism could be measured on text."
    ranked = sorted(known, key=lambda row: row[when] if row["measure"] == "kl" else -row[when])
    best = ranked[0]
    name = "KL" if best["measure"] == "kl" else "cosine"
    trained = f"after {content['tokens']:,} tokens" if when == "after" else "without training"
    others = "".join(f", `{row['mechanism']}` {row[when]:.3g}" for row in ranked[1:3])
    faster = speed_text(best, content["max_length"])
    speed = "it is faster than softmax here from " + faster if faster[0].isdigit() else f"faster here {faster}"
    cost = best.get("minutes")
    minutes = "" if cost is None else f"; its whole preset takes about {cost:,.1f} minutes here"
    found = f"{name} {best[when]:.3g}{others}"
    return f"Take `{best['mechanism']}`: {trained} it is nearest to the original ({found}); {speed}{minutes}."


def describe_comparison(content: Mapping[str, Any]) -> str:
    """The comparison for the terminal."""
    return "\n".join(
        [*_notes(content), "", *aligned(table_of(content)), "", *_refusals(content), content["recommendation"]]
    )


def _notes(content: Mapping[str, Any]) -> list[str]:
    """What was measured, and on what."""
    rows, name = supported(content), Path(content["base_model"]).name
    if not rows:
        return [name]
    measure = next((MEASURES[row["measure"]] for row in rows if row["measure"]), "no text could be read")
    file = content["train_file"]
    text = "the built-in sentences as one text" if file is None else f"the last tenth of {file}"
    tokens = "" if content["tokens"] is None else f", trained on {content['tokens']:,} tokens"
    return [
        f"{name}: {measure}, on {text}{tokens}.",
        f"Speed: {speed_conditions({**rows[0], 'threads': content['threads']})}, measured now.",
    ]


def _refusals(content: Mapping[str, Any]) -> list[str]:
    refused = [f"`{row['mechanism']}` is refused: {row['refused']}" for row in content["mechanisms"] if row["refused"]]
    rows = [row for row in supported(content) if row["not_trained"]]
    return [*refused, *(f"`{row['mechanism']}` is not trained: {row['not_trained']}" for row in rows)]


def comparison_page(content: Mapping[str, Any]) -> str:
    """report.html of a comparison."""
    rows, notes = supported(content), [*_notes(content), *_refusals(content)]
    parts = [Section("One row per mechanism", tables=[table_of(content)], notes=notes)] if rows else []
    if (chart := speed_chart({row["mechanism"]: row["curve"] for row in rows}, content["max_length"])) is not None:
        parts.append(Section("Speed here", figures=[chart]))
    if kept := [row for row in rows if row["state_bytes"]]:
        texts = [f"{row['mechanism']}: {memory_text(row['cache_bytes_per_token'], row['state_bytes'])}" for row in kept]
        parts.append(Section("Memory", texts))
    footer = [f"All figures are in {COMPARISON}; this page loads nothing and runs no script."]
    title, _, reason = content["recommendation"].replace("`", "").partition(": ")
    lead = [f"{reason[:1].upper()}{reason[1:]}", *([] if rows else notes)]
    return rendered(Path(content["base_model"]).name, title, lead, [], parts, footer)
