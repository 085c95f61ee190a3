"""What `convert` prints: the plan, and at the end also the checks, how the model is loaded and how it is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_linear_attention._common.command_line import PROGRAM, typed_name
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS, max_length_of
from hf_linear_attention.conversion.calibration_data import keeps_exact_keys
from hf_linear_attention.conversion.plan import MOST_SIZES, Plan
from hf_linear_attention.conversion.softmax_choice import CHOICE, describe_ranking
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.layer_ranges import layers_text
from hf_linear_attention.mechanisms.settings import MECHANISM_OPTIONS


MAX_LISTED = 8
# Figures on the built-in samples, as the command prints them.
CHECKED = {
    "hidden_state_error": "error of hidden states {:.1%}",
    "mean_embedding_cosine": "cosine of embeddings {:.3f}",
    "logits_error": "of logits {:.1%}",
    "kl_to_teacher": "KL {:.3f} nats/token",
    "top1_agreement": "same top token {:.1%}",
    "kl_with_newest_keys": "KL {:.3f} before scores were fitted",
}


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
        is_fitted = bool((report["calibration"] or {}).get("tokens")) and keeps_exact_keys(plan)
        lines += ["", *healing_lines(plan, source, output_dir, is_fitted)]
    return "\n".join(lines)


def describe_checks(checks: Mapping[str, Any], has_layers: bool) -> list[str]:
    """What the comparison with the source has found, by line."""
    tensors, outputs = checks["tensors"], checks["student_against_teacher"]
    padding = outputs.get("padding_difference")
    unmoved = "" if padding is None else f"; padding moves the output by {padding:.1e}"
    left = tensors["not_compared"]
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
        where = f"on tokens {beyond['first']:,} to {beyond['last']:,} of the end of Python's documentation"
        lines.append(_line("", f"beyond the windows, {where}: {_checked(beyond)}"))
    return lines


def _checked(figures: Mapping[str, Any]) -> str:
    return ", ".join(text.format(figures[name]) for name, text in CHECKED.items() if name in figures)


def healing_lines(plan: Plan, source: Source, output_dir: str, is_fitted: bool = False) -> list[str]:
    """How the model is trained after its conversion, or that there is no recipe for it."""
    if plan.head.task is None:
        return [
            "The new attention is untrained, and training/finetune.py has no task for "
            f"{plan.stock_class.__name__}. Train it with a loop of your own, such as transformers' Trainer."
        ]
    script = Path(__file__).resolve().parents[1] / "training" / "finetune.py"
    command = f"{PROGRAM} finetune" if typed_name("").startswith(PROGRAM) else f"python {script}"
    untrained = "The new attention is untrained. Train it with the original as teacher:"
    return [
        "Its scores are fitted. To bring it nearer to the original:" if is_fitted else untrained,
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
    chosen = [f"{name}={_short(value)}" for name, value in options.items() if value != COMMON_SETTINGS.get(name)]
    mechanism = settings["mechanism"] + (f" ({', '.join(chosen)})" if chosen else "")
    layers = settings["layers"]
    return f"{mechanism} in " + (f"{layers_text(layers)} of {num_layers}" if layers else "no layer")


def _short(value: Any) -> Any:
    """Of a list with one value for all layers, that value, which is the same setting."""
    return value[0] if isinstance(value, list) and len(value) > 1 and all(x == value[0] for x in value) else value


def _state_text(plan: Plan) -> str:
    sizes = {layers: size for layers, size in plan.state_sizes.items() if size}  # an encoder's layers have none
    if len(sizes) == 1:
        text = f"{next(iter(sizes.values())):,} bytes per layer"
    elif len(sizes) > MOST_SIZES:
        text = f"{min(sizes.values()):,} to {max(sizes.values()):,} bytes per layer"
    else:
        text = "bytes per layer: " + "; ".join(f"{size:,} in {layers}" for layers, size in sizes.items())
    others = plan.num_layers - len(plan.layers) if plan.head.task == "causal_lm" else 0
    which = "all" if not others else f"the {len(plan.layers)} converted layers"
    text += (
        f"{';' if 1 < len(sizes) <= MOST_SIZES else ','} {plan.state_bytes:,} in {which}, per sequence of any length"
    )
    if plan.head.task == "causal_lm" and plan.state_bytes:
        cache = sum(layer.cache_bytes_per_token for layer in plan.layers if layer.state_bytes)
        lengths = sorted({1024, 8192, max_length_of(plan.config) or 32768})
        sizes_of = {length: cache * length for length in lengths}
        shares = ", ".join(
            f"{plan.state_bytes / size:.2g} times that of {length:,} ({size / 1e6:,.3g} MB)"
            for length, size in sizes_of.items()
        )
        text += f" (the size of a key-value cache of {plan.state_bytes // cache:,} tokens: {shares})"
    if others:
        kinds = {"a sliding window": plan.num_bounded, "a cache that grows": others - plan.num_bounded}
        text += f"; other layers have {' and '.join(f'{kind} ({count})' for kind, count in kinds.items() if count)}"
    return text


def _names(names: list[str | None]) -> str:
    listed = ", ".join(str(name) for name in names[:MAX_LISTED])
    return listed if len(names) <= MAX_LISTED else f"{listed} and {len(names) - MAX_LISTED} more"
