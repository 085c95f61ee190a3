"""What mechanisms cost and keep for one model: `compare` converts it with each, trains it, and does as `evaluate`."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.heads import head_of_config
from hf_linear_attention._common.model_card import training_history
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.arguments import EvaluationArguments, parse_tokens, request_of
from hf_linear_attention.conversion.calibration_data import data_recipe, texts_of
from hf_linear_attention.conversion.model_speed import first_faster
from hf_linear_attention.conversion.pipeline import Conversion, prepare, run
from hf_linear_attention.conversion.plan import stock_config
from hf_linear_attention.conversion.preset_run import run_training
from hf_linear_attention.conversion.quality import MEASURED_TASKS, measure
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.conversion.verification import MOST_TOKENS, TEXTS
from hf_linear_attention.default_settings import direction_of
from hf_linear_attention.training.data.rows import load_rows
from hf_linear_attention.training.presets import load_preset, preset_names, settings_for, stages_of


logger = logging.getLogger(__name__)

HEADER = ["mechanism", "untrained", "trained", "faster here from", "state", "whole preset"]
# The figure of each task: its name in the report, and in words.
MEASURES = {
    "causal_lm": ("kl", "KL to the original, in nats per token (0 is equal)"),
    "embedding": ("cosine", "cosine to the original's embeddings"),
}
# What is compared where nothing is named; those that a model does not support are left out.
COMPARED = {
    "causal": ("hybrid", "linear", "gated_delta"),
    "bidirectional": ("window", "linear", "nystrom", "linformer", "hybrid"),
}
TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
DEFAULT_TOKENS, HELD_OUT_TOKENS = "50k", 8192
CHARACTERS, MORE_CHARACTERS = 20, 400_000  # that are read of a file per token that is trained on, and these more


def compare_mechanisms(arguments: argparse.Namespace) -> dict[str, Any]:
    """The content of comparison.json.

    Raises:
        UsageError: for a model that is converted already, or for which `evaluate` has no figures.
    """
    source = open_source(arguments.model_name_or_path, arguments.allow_pickle)
    config = stock_config(source, arguments.trust_remote_code)
    if hasattr(config, "linear_attention"):
        raise UsageError(f"{source.name} is converted already; give the original, with softmax attention")
    task = head_of_config(config.to_dict()).task
    if task not in MEASURED_TASKS:
        raise UsageError(f"{source.name}: there are figures for {', '.join(MEASURED_TASKS)}, and its task is {task}")
    names = arguments.mechanisms.replace(" ", "").split(",") if arguments.mechanisms else COMPARED[direction_of(config)]
    tokens = None if arguments.train_file is None else parse_tokens(arguments.tokens or DEFAULT_TOKENS)
    with tempfile.TemporaryDirectory(prefix="hf-linear-attention-compare-") as folder:
        data = EvaluationArguments(
            model_name_or_path=source.name,
            validation_file=str(Path(folder, HELD_OUT)),
            max_eval_tokens=HELD_OUT_TOKENS,
            max_eval_length=MOST_TOKENS,
            controls="none",
            trust_remote_code=arguments.trust_remote_code,
            allow_pickle=arguments.allow_pickle,
        )
        for name, texts in zip((TRAIN, HELD_OUT), _texts(arguments.train_file, tokens, task)):
            lines = (json.dumps({"text": text}) + "\n" for text in texts)
            Path(folder, name).write_text("".join(lines), encoding="utf-8")
        rows = [compared(source, task, name, tokens, data, Path(folder)) for name in dict.fromkeys(names)]
    content = {
        "base_model": source.name,
        "measure": MEASURES[task][0],
        "max_length": max_length_of(config),
        "tokens": tokens,
        "text": "the built-in sentences" if tokens is None else f"the last tenth of {Path(arguments.train_file).name}",
        "mechanisms": rows,
    }
    return {**content, "recommendation": recommendation(content)}


def _texts(path: str | None, tokens: int | None, task: str) -> tuple[Sequence[str], Sequence[str]]:
    """Texts to train on, and the last tenth, which is held out; both are the built-in sentences without a file."""
    if path is None or tokens is None:
        texts: Sequence[str] = TEXTS if task == "embedding" else [" ".join(TEXTS)]
        return texts, texts
    rows: Any = load_rows(data_recipe("", "embedding", train_file=path).data, "train")
    texts, rest = [], CHARACTERS * tokens + MORE_CHARACTERS
    for text in texts_of(rows, f"`--train_file` = {path!r}"):
        if rest > 0:
            texts.append(text[:rest])
            rest -= len(text)
    if (count := sum(map(len, texts))) < 100:
        raise UsageError(f"`--train_file` = {path!r} contains {count} characters of text; give a longer file")
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        texts = [texts[0][:cut], texts[0][cut:]]
    last = max(1, len(texts) // 10)
    return texts[:-last], texts[-last:]


def compared(
    source: Source, task: str, mechanism: str, tokens: int | None, data: EvaluationArguments, folder: Path
) -> dict[str, Any]:
    """The row of one mechanism in comparison.json; only `mechanism` and `refused` if the model does not support it.

    `tokens` are trained on, of the file in `folder`, where the converted models are written; with None, none are.
    """
    preset = preset_for(mechanism, direction_of(stock_config(source, data.trust_remote_code)))
    options = {"model_name_or_path": data.model_name_or_path, "trust_remote_code": data.trust_remote_code}
    options |= {"allow_pickle": data.allow_pickle, "attention": mechanism, "preset": preset, "no_verify": True}
    options |= {"train_file": str(folder / TRAIN), "output_dir": folder / mechanism}
    try:
        conversion = prepare(request_of(options if tokens is None else {**options, "tokens": tokens}))
    except UsageError as error:
        return {"mechanism": mechanism, "refused": str(error)}
    logger.info("measuring %s", mechanism)
    untrained = folder / f"{mechanism}-untrained"
    run(replace(conversion, output_dir=untrained, training=None))
    quality = measure(untrained, source, task, data)
    figure, plan = MEASURES[task][0], conversion.plan
    row = {"mechanism": mechanism, "refused": None, "preset": preset, "settings": plan.settings}
    row |= {"state_bytes": plan.state_bytes, "untrained": quality[figure], "trained": None, "minutes": None}
    if tokens is not None:
        row["minutes"] = _train(conversion, prepare(request_of(options)))
        row["trained"] = measure(folder / mechanism, source, task, data)[figure]
    curve = ((quality["speed"] or {}).get("model") or {}).get("reading", [])
    return {**row, "reading": curve, "faster_from": first_faster(curve)}


def preset_for(mechanism: str, direction: str) -> str:
    """The preset of this name with settings for this mechanism, or else `default`, whose stages train any."""
    for name in ("default", mechanism):
        settings = settings_for(load_preset(name), direction) if name in preset_names() else None
        if settings is not None and settings["mechanism"] == mechanism:
            return name
    return "default"


def _train(conversion: Conversion, whole: Conversion) -> float | None:
    """Convert and train; returns the minutes that the `whole` preset would take at this speed, None if not known."""
    training: Any = conversion.training
    run_training(conversion, replace(training, given={**training.given, "logging_steps": 1}))
    tokens = whole.training.preset.tokens if whole.training is not None else 0
    stages = stages_of(training.preset, training.given["task"])
    runs = training_history(str(training.output_dir))
    speeds: list[tuple[float, Any]] = [
        (stage.share, run_.get("per_second")) for stage, run_ in zip(stages, runs, strict=True)
    ]
    if not all(speed for _, speed in speeds):
        return None
    return sum(tokens * share / speed for share, speed in speeds) / 60


def _speed_text(row: Mapping[str, Any], max_length: int | None) -> str:
    """From which length the model is faster here than its original, against the longest input of the model."""
    if not row["reading"]:
        return "-"
    faster, longest = row["faster_from"], row["reading"][-1]["length"]
    if max_length is not None and (max_length <= longest if faster is None else faster > max_length):
        return f"never within its {max_length:,} positions"
    return f"not up to {longest:,} tokens" if faster is None else f"{faster:,} tokens"


def recommendation(content: Mapping[str, Any]) -> str:
    """One sentence: the mechanism nearest to the original, after the training if there was one, and what it costs."""
    when, name = "untrained" if content["tokens"] is None else "trained", content["measure"]
    rows = [row for row in content["mechanisms"] if row["refused"] is None and row[when] is not None]
    if not rows:
        return "There is nothing to recommend: no mechanism could be measured."
    best, *others = sorted(rows, key=lambda row: row[when] if name == "kl" else -row[when])
    figures = "".join(f", `{row['mechanism']}` {row[when]:.3g}" for row in others[:2])
    trained = "without training" if content["tokens"] is None else f"after {content['tokens']:,} tokens"
    near = f"{trained} it is nearest to the original ({name} {best[when]:.3g}{figures})"
    return f"Take `{best['mechanism']}`: {near}; faster here: {_speed_text(best, content['max_length'])}."


def describe_comparison(content: Mapping[str, Any]) -> str:
    """The comparison for the terminal: a table, what was refused, and the recommendation."""
    table = [HEADER]
    for row in content["mechanisms"]:
        if row["refused"] is None:
            figures = ["-" if row[when] is None else f"{row[when]:.4f}" for when in HEADER[1:3]]
            state = "-" if row["state_bytes"] is None else f"{row['state_bytes']:,} bytes"
            minutes = "-" if row["minutes"] is None else f"{row['minutes']:,.1f} min"
            table.append([row["mechanism"], *figures, _speed_text(row, content["max_length"]), state, minutes])
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    refused = [f"`{row['mechanism']}` is refused: {row['refused']}" for row in content["mechanisms"] if row["refused"]]
    words = next(words for name, words in MEASURES.values() if name == content["measure"])
    title = f"{Path(content['base_model']).name}: {words}, on {content['text']}."
    return "\n".join([title, "", *lines, "", *refused, content["recommendation"]])
