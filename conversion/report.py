"""conversion_report.json: what it holds, the tables of its figures, and the text that the command prints; recipe.yaml.

A conversion writes its plan and its checks; an evaluation adds `quality`, the figures of held-out text. Terminal,
report.html and model card print the tables that are made here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from hf_linear_attention import __version__
from hf_linear_attention._common.command_line import PROGRAM, typed_name
from hf_linear_attention._common.model_card import REPORT, format_value, write_model_card
from hf_linear_attention._common.options import OnResume, option_text
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS, max_length_of
from hf_linear_attention.conversion.options import CONVERSION_FACTS, RECIPE, ConversionArguments, Request
from hf_linear_attention.conversion.plan import Plan, state_bytes
from hf_linear_attention.conversion.preset_plan import Training
from hf_linear_attention.conversion.softmax_choice import CHOICE, describe_ranking
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.kernels.cpu import kernel_backend
from hf_linear_attention.layer_ranges import layers_text
from hf_linear_attention.mechanisms.options import MECHANISM_OPTIONS
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


MAX_LISTED = 8

# Figures of `quality` with their names in the tables.
LABELS = {
    "teacher": "nats per token, the original",
    "student": "nats per token",
    "gap": "gap to the original, nats per token",
    "window_alone": "nats per token, untrained window and sinks alone",
    "without_far": "nats per token, all but window and sinks switched off",
    "agreement": "same top token",
    "kl": "KL(original, this model), nats per token",
    "cosine": "cosine of embeddings",
    "cosine_min": "cosine of embeddings, lowest",
    "spearman_teacher": "Spearman's correlation with the pairs' scores, the original",
    "spearman": "Spearman's correlation with the pairs' scores",
}
# The columns of the table by position and distance.
COLUMNS = {
    "targets": "targets",
    "teacher": "original",
    "student": "this model",
    "window_alone": "its window alone",
    "same_bytes": "window of the same bytes",
    "healed": "the same, healed",
    "student_minus_window_alone": "less than its window",
    "student_minus_same_bytes": "less than the same bytes",
    "student_minus_healed": "less than these, healed",
}
GENERATION = {
    "agreement_length": "tokens of greedy agreement, of {greedy}",
    "teacher_on_student": "nats of the original on samples of this model",
    "teacher_on_teacher": "nats of the original on its own samples",
    "repeated_student": "repeated 4-grams in samples of this model",
    "repeated_teacher": "repeated 4-grams in samples of the original",
}
# Figures on the built-in samples, as the command prints them.
CHECKED = {
    "hidden_state_error": "error of hidden states {:.1%}",
    "mean_embedding_cosine": "cosine of embeddings {:.3f}",
    "logits_error": "of logits {:.1%}",
    "kl_to_teacher": "KL {:.3f} nats/token",
    "top1_agreement": "same top token {:.1%}",
}

# The entry of `quality` with earlier evaluations, and what says whether two evaluations read the same text.
EARLIER = "earlier"
SAME_TEXT = ("validation_file", "max_tokens", "max_length", "targets")


# ---- What a conversion writes and prints


def build_report(source: Source, plan: Plan, checks: Mapping[str, Any] | None, **details: Any) -> dict[str, Any]:
    """The content of conversion_report.json. `figures` is the part that the model card shows."""
    counts = {kind: len(getattr(plan, kind)) for kind in ("mapped", "new", "dropped", "tied")}
    outputs = (checks or {}).get("student_against_teacher") or {}
    calibrated = None  # if there is nothing to calibrate
    if (facts := details.get("calibration")) is not None:
        calibrated = f"{facts['tokens']:,} tokens ({facts['inputs']})" if facts["tokens"] else "nothing"
    figures = {
        **plan.figures,
        "calibrated on": calibrated,
        **{name.replace("_", " "): value for name, value in outputs.items() if name != "beyond"},
    }
    if (beyond := outputs.get("beyond")) is not None:
        where = f"tokens {beyond['first']:,} to {beyond['last']:,}"
        figures |= {f"{name.replace('_', ' ')}, {where}": beyond[name] for name in CHECKED if name in beyond}
    return {
        "base_model": source.name,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **details,
        **plan.to_dict(),
        "tensor_counts": counts,
        "checks": dict(checks) if checks else None,
        "figures": figures,
        "max_length": max_length_of(plan.config),
        "backend": kernel_backend()._asdict(),
    }


def published_words(options: Mapping[str, Any]) -> list[str]:
    """The options as one types them, for the report: of an absolute path only the name, as they may be published."""
    words = []
    for name, value in options.items():
        text = option_text(value)
        path = Path(text).expanduser()
        shown = path.name if path.is_absolute() else text
        words += [f"--{name}"] if value is True else [f"--{name}", shown]
    return words


def settings_of(config: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    """The settings of linear attention of a converted model; a stock architecture has them in its report alone."""
    return config.get("linear_attention", report.get("settings"))


def describe(plan: Plan, source: Source) -> str:
    """What the conversion does, in a few lines."""
    entries = plan.settings
    if not isinstance(entries, list):
        entries = [{**entries, "layers": [layer.layer for layer in plan.layers]}]
    tied = f", {len(plan.tied)} tied" if plan.tied else ""
    tensors = f"{len(plan.mapped)} mapped, {len(plan.new)} new, {len(plan.dropped)} dropped{tied}"
    lines = [
        f"{source.name}",
        _line("class", f"{plan.stock_class.__name__} -> {plan.linear_class.__name__}"),
        *(_line("attention", _attention_text(entry, plan.num_layers)) for entry in entries),
        _line("tensors", tensors),
        _line("weights", f"{plan.weights['total']:,}, of which {plan.weights['new']:,} are new"),
    ]
    if plan.state_bytes:
        lines.append(_line("state", _state_text(plan)))
    if plan.dropped:
        lines.append(_line("dropped", _names([tensor.source for tensor in plan.dropped])))
    if plan.new_base:
        lines.append(_line("untrained", f"{_names([t.target for t in plan.new_base])} (not in the checkpoint)"))
    lines += [_line("left out", feature) for feature in plan.dropped_features]
    return "\n".join(lines)


def describe_result(
    plan: Plan, source: Source, output_dir: str, report: Mapping[str, Any], training: Sequence[str] = ()
) -> str:
    """The text at the end of a conversion: the result, how to load it, and what to do next or how it was trained."""
    lines, checks, auto_class = [describe(plan, source)], report["checks"], plan.head.auto_class
    if calibrated := report["figures"]["calibrated on"]:
        lines.append(_line("calibrated", f"on {calibrated}"))
    if checks is not None:
        lines += describe_checks(checks, has_layers=bool(plan.layers))
    stock = report.get("stock")
    if stock is not None:
        found = f"logits differ by at most {stock['difference']:.1e} of their standard deviation"
        lines.append(_line("rewritten", f"as {stock['architecture']}, whose {found}"))
    code = ", trust_remote_code=True" if stock is None else ""
    lines += [
        _line("written to", output_dir),
        "",
        "Load it:",
        f"  from transformers import {auto_class}",
        f'  model = {auto_class}.from_pretrained("{output_dir}"{code})',
    ]
    if (choice := report.get(CHOICE)) is not None:
        lines += ["", *describe_ranking(choice)]
    if training:
        lines += ["", *training]
    elif plan.layers:
        lines += ["", *healing_lines(plan, source, output_dir)]
    return "\n".join(lines)


def describe_checks(checks: Mapping[str, Any], has_layers: bool) -> list[str]:
    """What the comparison with the source has found, by line."""
    tensors, outputs = checks["tensors"], checks["student_against_teacher"]
    padding = outputs.get("padding_difference")
    unmoved = "" if padding is None else f"; padding moves the output by {padding:.1e}"
    left = tensors.get("not_compared", 0)  # reports of an interrupted run of an earlier version lack it
    others = f", {left} not compared (tied to others, or stored merged with them)" if left else ""
    cast = f" after the cast to {' and '.join(tensors['cast_to'])}" if tensors.get("cast_to") else ""
    longest, beyond = outputs.get("longest_sample"), outputs.get("beyond")
    length = "" if longest is None else f" (at most {longest} tokens)"
    lines = [
        _line("checked", f"{tensors['equal']} of {tensors['compared']} base tensors are equal{cast}{others}{unmoved}"),
        _line(
            "untrained" if has_layers else "outputs",
            f"against the original, on each built-in sample alone{length}: {_checked(outputs)}",
        ),
    ]
    if beyond is not None:
        where = f"beyond the windows, on tokens {beyond['first']:,} to {beyond['last']:,} of Python's documentation"
        lines.append(_line("", f"{where}: {_checked(beyond)}"))
    return lines


def _checked(figures: Mapping[str, Any]) -> str:
    return ", ".join(text.format(figures[name]) for name, text in CHECKED.items() if name in figures)


def healing_lines(plan: Plan, source: Source, output_dir: str) -> list[str]:
    """How the model is trained after its conversion, or that there is no recipe for it."""
    if plan.head.task is None:
        return [
            "The new attention is untrained, and training/finetune.py has no task for "
            f"{plan.stock_class.__name__}. Train it with transformers' Trainer (docs/data.md, Heads without a task)."
        ]
    script = Path(__file__).resolve().parents[1] / "training" / "finetune.py"
    command = f"{PROGRAM} finetune" if typed_name("").startswith(PROGRAM) else f"python {script}"
    return [
        "The new attention is untrained. Train it with the original as teacher:",
        f"  {command} --config {Path(str(plan.head.recipe)).stem} \\\n"
        f"    --model_name_or_path {output_dir} --teacher_name_or_path {source.loadable} \\\n"
        f"    --train_file {plan.head.data} --output_dir {output_dir}-healed",
    ]


def _line(label: str, text: str) -> str:
    return f"  {label:<11} {text}"


def _attention_text(settings: Mapping[str, Any], num_layers: int) -> str:
    """The settings of a group of layers; those that every mechanism has only if they differ from their defaults."""
    unused = MECHANISM_OPTIONS[settings["mechanism"]].unused(settings)
    options = {name: value for name, value in settings.items() if name not in ("mechanism", "layers", *unused)}
    chosen = [f"{name}={value}" for name, value in options.items() if value != COMMON_SETTINGS.get(name)]
    mechanism = settings["mechanism"] + (f" ({', '.join(chosen)})" if chosen else "")
    layers = settings["layers"]
    return f"{mechanism} in " + (f"{layers_text(layers)} of {num_layers}" if layers else "no layer")


def _state_text(plan: Plan) -> str:
    sizes = {layers: size for layers, size in plan.state_sizes.items() if size}  # an encoder's layers have none
    if len(sizes) == 1:
        text = f"{next(iter(sizes.values())):,} bytes per layer"
    else:
        text = "bytes per layer: " + "; ".join(f"{size:,} in {layers}" for layers, size in sizes.items())
    others = plan.num_layers - len(plan.layers) if plan.head.task == "causal_lm" else 0
    which = "all" if not others else f"the {len(plan.layers)} converted layers"
    text += f"{',' if len(sizes) == 1 else ';'} {plan.state_bytes:,} in {which}, per sequence of any length"
    if plan.head.task == "causal_lm" and plan.state_bytes:
        cache = sum(layer.cache_bytes_per_token for layer in plan.layers if layer.state_bytes)
        text += f" (the size of a key-value cache of {plan.state_bytes // cache} tokens)"
    if others:
        kinds = {"a sliding window": plan.num_bounded, "a cache that grows": others - plan.num_bounded}
        text += f"; other layers have {' and '.join(f'{kind} ({count})' for kind, count in kinds.items() if count)}"
    return text


def _names(names: list[str | None]) -> str:
    listed = ", ".join(str(name) for name in names[:MAX_LISTED])
    return listed if len(names) <= MAX_LISTED else f"{listed} and {len(names) - MAX_LISTED} more"


# ---- Models that were converted in Python, of which nothing was measured


def write_conversion_files(model: Any, save_directory: str | os.PathLike) -> None:
    """Write what `convert_and_heal` left in the model, or else a report and a card, beside the saved weights.

    A card or report that stands in the folder already is kept.
    """
    folder = Path(save_directory)
    if (files := getattr(model, "conversion_files", None)) is not None:
        for name, content in files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)
        return
    if not (folder / REPORT).exists():
        (folder / REPORT).write_text(json.dumps(report_of(model), indent=2) + "\n", encoding="utf-8")
    if not (folder / "README.md").exists():
        facts = {"base_model": model.converted_from, "settings": model.config.linear_attention, "is_in_python": True}
        write_model_card(folder, facts)


def report_of(model: Any) -> dict[str, Any]:
    """What is known of a model that `convert` made: its settings and sizes; nothing was measured."""
    modules = linear_attention_modules(model)
    tensors = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    sizes = {name: state_bytes(module) for name, module in modules.items()}
    figures = {
        "layers converted": len(modules),
        "weights": sum(tensors.values()),
        "new weights": sum(count for name, count in tensors.items() if ".linear_attention." in name),
        "state bytes per sequence": sum(size or 0 for size in sizes.values()) or None,
    }
    return {
        "base_model": model.converted_from,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model_type": model.config.model_type,
        "linear_class": type(model).__name__,
        "settings": model.config.linear_attention,
        "layers": [{"module": name, "state_bytes": size} for name, size in sizes.items()],
        "checks": None,
        "figures": figures,
    }


# ---- The figures of held-out text


def quality_rows(quality: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under their names."""
    rows = {text: quality[name] for name, text in LABELS.items() if quality.get(name) is not None}
    for entry in quality.get("generation", ()):
        for name, text in GENERATION.items():
            rows[f"{text.format(**entry)}, at length {entry['length']:,}"] = entry[name]
    return rows


def comparison(quality: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table of nats per token by position and distance: `header`, `rows` (texts) and `notes`; None without one."""
    if "positions" not in quality:
        return None
    positions, recall = quality["positions"], quality["recall"]
    entries = [("whole text, inside the length", quality)]
    entries += [(f"positions {part['from']:,} to {part['to'] - 1:,}", part) for part in positions["buckets"]]
    entries += [
        (f"recall, {part['from']:,} to {part['to'] - 1:,} tokens back", part) for part in recall.get("buckets", ())
    ]
    names = [name for name in COLUMNS if any(part.get(name) is not None for _, part in entries)]
    rows = [[text, *(_cell(part.get(name)) for name in names)] for text, part in entries]
    header = ["nats per token", *(COLUMNS[name] for name in names)]
    return {"header": header, "rows": rows, "notes": _notes(quality)}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):  # a difference that is less than 0 is a gain
        error = value["standard_error"]
        return "-" if value["mean"] is None else f"{-value['mean']:z.3f}" + ("" if error is None else f" ± {error:.3f}")
    return f"{value:.4f}" if isinstance(value, float) else format_value(value)


def _notes(quality: Mapping[str, Any]) -> list[str]:
    control, positions, recall = quality["control"], quality["positions"], quality["recall"]
    notes = [
        f"By position in windows of {positions['length']:,} tokens ({positions['windows']:,} of them), which end with "
        f"{positions['ended_by']}; the trained length is {positions['trained_length']:,}. ± is a standard error of the "
        "paired difference."
    ]
    if "window_size" in control:
        notes.append(
            f"The window of the same bytes has {control['window_size']:,} tokens and {control['num_sinks']} sinks "
            f"({control['state_bytes']:,} bytes), the better of windows with and without sinks."
        )
    elif control.get("left_out"):
        notes.append(f"There is no window of the same bytes: {control['left_out']}.")
    if "left_out" in recall:
        notes.append(f"There are no figures of recall: {recall['left_out']}.")
        return notes
    counted = f" ({quality['train_file']})" if quality.get("train_file") else ""
    notes.append(
        f"Recall is measured on tokens that end a sequence of four which the context already had, and which the "
        f"training text{counted} has 20 times at most."
    )
    return notes


def data_notes(quality: Mapping[str, Any]) -> list[str]:
    """What the figures of pairs were measured on."""
    return [f"Pairs with scores: {quality['pairs_file']}."] if quality.get("pairs_file") else []


def describe_quality(quality: Mapping[str, Any]) -> str:
    """The figures for the terminal."""
    rows = quality_rows(quality)
    width = max(map(len, rows))
    lines = [f"On {quality['validation_file']} (about {quality['max_tokens']:,} tokens at most):"]
    lines += [f"  {name:<{width}}  {format_value(value)}" for name, value in rows.items()]
    if notes := data_notes(quality):
        lines += ["", *(f"  {note}" for note in notes)]
    if (table := comparison(quality)) is not None:
        lines += ["", *(f"  {line}" for line in aligned(table)), "", *(f"  {note}" for note in table["notes"])]
    return "\n".join(lines)


def aligned(table: Mapping[str, Any]) -> list[str]:
    """The lines of a table for the terminal, all columns but the first on the right."""
    cells = [table["header"], *table["rows"]]
    first, *widths = (max(map(len, column)) for column in zip(*cells))
    return [
        "  ".join([f"{row[0]:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths))])
        for row in cells
    ]


def with_earlier(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures `now`, and those of `before` that `now` lacks, where both are `quality` in conversion_report.json.

    On the same text they are put together. An evaluation of another text stays as a whole under `earlier` if it has
    figures that are not there now.
    """
    result = dict(now)
    records = [before, *before.get(EARLIER, ())] if before else []
    others = []
    for record in records:
        record = {name: value for name, value in record.items() if name != EARLIER}
        if all(record.get(name) == now.get(name) for name in SAME_TEXT):
            result = _filled(result, record)
        else:
            others.append(record)
    left = [record for record in others if _named_figures(record) - _named_figures(result)]
    return {**result, EARLIER: left} if left else result


def _filled(now: Any, before: Any) -> Any:
    """`now` with what only `before` has; of lists, only buckets with the same edges are put together."""
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        if now.get("left_out") and not before.get("left_out"):
            return before
        return {name: _filled(now.get(name), before.get(name)) for name in {**now, **before}}
    if _edges(now) and _edges(now) == _edges(before):
        return [_filled(*parts) for parts in zip(now, before, strict=True)]
    return before if now is None else now


def _edges(value: Any) -> list[tuple[Any, ...]]:
    if not isinstance(value, Sequence) or not all(isinstance(part, Mapping) and "from" in part for part in value):
        return []
    return [(part["from"], part["to"], part.get("targets")) for part in value]


def _named_figures(quality: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The names of all figures in the tables."""
    table = comparison(quality) or {"header": [], "rows": []}
    cells = {(row[0], name) for row in table["rows"] for name, cell in zip(table["header"], row) if cell != "-"}
    return {*((name,) for name in quality_rows(quality)), *cells}


# ---- recipe.yaml: one file beside the weights, from which `--config recipe.yaml` makes the same weights again
#
# It holds every option that decides the weights: what was given, and the settings of the attention that follow from the
# model and the preset. Consent (`--trust_remote_code`), the place of the result and what only measures are left out.

# The options about these decide no weight.
LEFT_OUT = ("measuring",)
NOT_OF_A_RECIPE = ("output_dir", "no_verify", "list_architectures", "state_bytes")


def write_recipe(folder: Path, request: Request, plan: Plan, training: Training | None) -> None:
    """Write recipe.yaml into a folder.

    Args:
        plan: the plan before layers with softmax are chosen automatically, which the recipe does again.
        training: the preset; None without one.
    """
    versions = f"{PROGRAM} {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [f"# Made with {versions}."]
    lines.append(f"# The same weights again: {PROGRAM} convert --config {RECIPE} --output_dir OUT")
    text = yaml.safe_dump(recipe_options(request, plan, training), sort_keys=False, allow_unicode=True)
    (folder / RECIPE).write_text("\n".join([*lines, text]), encoding="utf-8")


def recipe_options(request: Request, plan: Plan, training: Training | None) -> dict[str, Any]:
    """The options of `convert` that make the same weights."""
    values = {
        entry.name: getattr(request.arguments, entry.name)
        for entry in fields(ConversionArguments)
        if _decides(entry.name) and getattr(request.arguments, entry.name) not in (None, False)
    }
    if training is not None and "max_train_tokens" in training.given:
        values["tokens"] = training.given["max_train_tokens"]
    settings = plan.settings
    if isinstance(settings, Mapping):
        values["attention"] = settings["mechanism"]
    else:  # layers differ: their options as they were given; the rest follows from these
        settings = request.given
    known = {"mechanism", *COMMON_SETTINGS, *CONVERSION_FACTS}
    options = {name: _text(value) for name, value in settings.items() if name not in known and value is not None}
    return {**values, **options}


def _decides(name: str) -> bool:
    fact = CONVERSION_FACTS[name]
    return fact.on_resume is not OnResume.FREE and fact.group not in LEFT_OUT and name not in NOT_OF_A_RECIPE


def _text(value: Any) -> Any:
    """A value by layer as one types it, `0-3:64,4-:16`; others unchanged."""
    if isinstance(value, Mapping):
        return ",".join(f"{layers}:{part}" for layers, part in value.items())
    return list(value) if isinstance(value, (list, tuple)) else value
