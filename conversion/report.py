"""A plan and its result as conversion_report.json, and as the short text that the command prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_linear_attention._common.command_line import PROGRAM, typed_name
from hf_linear_attention._common.options import option_text
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS, max_length_of
from hf_linear_attention.conversion.diagnosis import describe_diagnosis
from hf_linear_attention.conversion.head_ranking import KEPT_HEADS, describe_heads
from hf_linear_attention.conversion.plan import Plan, TensorPlan
from hf_linear_attention.conversion.softmax_layers import CHOICE, describe_ranking
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.kernels.cpu import kernel_backend
from hf_linear_attention.layer_ranges import layers_text


MAX_LISTED = 8


def build_report(source: Source, plan: Plan, checks: Mapping[str, Any] | None, **details: Any) -> dict[str, Any]:
    """The content of conversion_report.json. `figures` is the part that the model card shows."""
    counts = {kind: len(getattr(plan, kind)) for kind in ("mapped", "new", "dropped", "tied")}
    outputs = (checks or {}).get("student_against_teacher")
    figures = {
        **plan.figures,
        "calibrated on": _calibration(details.get("calibration")),
        **({name.replace("_", " "): value for name, value in outputs.items()} if outputs else {}),
    }
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


def _calibration(facts: Mapping[str, Any] | None) -> str | None:
    """What the model was calibrated on; None if there is nothing to calibrate."""
    if facts is None:
        return None
    return f"{facts['tokens']:,} tokens ({facts['inputs']})" if facts["tokens"] else "nothing"


def describe(plan: Plan, source: Source) -> str:
    """What the conversion does, in a few lines."""
    lines = [
        f"{source.name}",
        _line("class", f"{plan.stock_class.__name__} -> {plan.linear_class.__name__}"),
        *(_line("attention", text) for text in _attention_lines(plan)),
        *([] if plan.extension is None else [_line("positions", plan.extension.describe())]),
        _line("tensors", _tensor_line(plan)),
        _line("weights", f"{plan.weights['total']:,}, of which {plan.weights['new']:,} are new"),
    ]
    if plan.state_bytes:
        lines.append(_line("state", _state_line(plan)))
    if plan.dropped:
        lines.append(_line("dropped", _names([tensor.source for tensor in plan.dropped])))
    if plan.new_base:
        lines.append(_line("untrained", f"{_names([t.target for t in plan.new_base])} (not in the checkpoint)"))
    lines += [_line("left out", feature) for feature in plan.dropped_features]
    return "\n".join(lines)


def _attention_lines(plan: Plan) -> list[str]:
    """One line for the settings of each group of layers."""
    if not isinstance(plan.settings, list):
        return [_attention_line(plan.settings, [layer.layer for layer in plan.layers], plan.num_layers)]
    return [_attention_line(entry, entry["layers"], plan.num_layers) for entry in plan.settings]


def _attention_line(settings: Mapping[str, Any], layers: Sequence[int], num_layers: int) -> str:
    options = {name: value for name, value in settings.items() if name not in ("mechanism", "layers")}
    # Settings that every mechanism has are shown only if they differ from their defaults.
    shown = {name: value for name, value in options.items() if value != COMMON_SETTINGS.get(name)}
    chosen = ", ".join(f"{name}={value}" for name, value in shown.items())
    mechanism = settings["mechanism"] + (f" ({chosen})" if chosen else "")
    return f"{mechanism} in " + (f"{layers_text(layers)} of {num_layers}" if layers else "no layer")


def describe_tensors(plan: Plan) -> str:
    """All layers and tensors, one per line, as `--dry_run` adds them."""
    lines = [
        f"  layer {layer.layer:<4} {layer.module}: {layer.stock_class} -> {layer.linear_class}, {layer.mechanism}"
        + (f", {layer.state_bytes:,} bytes of state" if layer.state_bytes else "")
        for layer in plan.layers
    ]
    for kind in ("mapped", "tied", "new", "dropped"):
        lines += [
            f"  {kind:<10} {_tensor_name(tensor)} {list(tensor.shape)} {tensor.dtype}" for tensor in getattr(plan, kind)
        ]
    return "\n".join(lines)


def describe_result(
    plan: Plan, source: Source, output_dir: str, report: Mapping[str, Any], training: Sequence[str] = ()
) -> str:
    """The text at the end of a conversion: the result, how to load it, and what to do next or how it was trained."""
    lines, checks = [describe(plan, source)], report["checks"]
    if calibrated := report["figures"]["calibrated on"]:
        lines.append(_line("calibrated", f"on {calibrated}"))
    if checks is not None:
        lines += _check_lines(checks, has_layers=bool(plan.layers))
    lines += [_line("written to", output_dir), "", "Load it:", *_loading_lines(plan, output_dir)]
    if (choice := report.get(CHOICE)) is not None:
        lines += ["", *describe_ranking(choice)]
    if (heads := report.get(KEPT_HEADS)) is not None:
        lines += ["", *describe_heads(heads)]
    if training:
        lines += ["", *training]
    elif plan.layers:
        lines += ["", *_healing_lines(plan, source, output_dir)]
    if report["diagnosis"]:
        lines += ["", describe_diagnosis(report["diagnosis"], plan.mechanisms)]
    return "\n".join(lines)


def _line(label: str, text: str) -> str:
    return f"  {label:<11} {text}"


def _tensor_line(plan: Plan) -> str:
    tied = f", {len(plan.tied)} tied" if plan.tied else ""
    return f"{len(plan.mapped)} mapped, {len(plan.new)} new, {len(plan.dropped)} dropped{tied}"


def _state_line(plan: Plan) -> str:
    sizes = {layers: size for layers, size in plan.state_sizes.items() if size}  # an encoder's layers have none
    if len(sizes) == 1:
        text = f"{next(iter(sizes.values())):,} bytes per layer"
    else:
        text = "bytes per layer: " + "; ".join(f"{size:,} in {layers}" for layers, size in sizes.items())
    text += f"{',' if len(sizes) == 1 else ';'} {plan.state_bytes:,} in all, per sequence of any length"
    if plan.head.task == "causal_lm" and plan.state_bytes:
        cache = sum(layer.cache_bytes_per_token for layer in plan.layers if layer.state_bytes)
        text += f" (the size of a key-value cache of {plan.state_bytes // cache} tokens)"
    if plan.growing_bytes_per_token:
        text += f"; heads with softmax add {plan.growing_bytes_per_token:,} bytes per token"
    return text


def _check_lines(checks: Mapping[str, Any], has_layers: bool) -> list[str]:
    tensors, outputs = checks["tensors"], checks["student_against_teacher"]
    padding = outputs.get("padding_difference")
    unmoved = "" if padding is None else f"; padding moves the output by {padding:.1e}"
    left = tensors.get("not_compared", 0)  # reports of an interrupted run of an earlier version lack it
    others = f", {left} not compared (tied to others, or stored merged with them)" if left else ""
    lines = [_line("checked", f"{tensors['equal']} of {tensors['compared']} base tensors are equal{others}{unmoved}")]
    texts = {
        "hidden_state_error": "error of hidden states {:.1%}",
        "mean_embedding_cosine": "cosine of embeddings {:.3f}",
        "logits_error": "of logits {:.1%}",
        "kl_to_teacher": "KL {:.3f} nats/token",
        "top1_agreement": "same top token {:.1%}",
    }
    found = [text.format(outputs[name]) for name, text in texts.items() if name in outputs]
    label = "untrained" if has_layers else "outputs"
    return [*lines, _line(label, "against the original, on each built-in sample alone: " + ", ".join(found))]


def _loading_lines(plan: Plan, output_dir: str) -> list[str]:
    auto_class = plan.head.auto_class
    return [
        f"  from transformers import {auto_class}",
        f'  model = {auto_class}.from_pretrained("{output_dir}", trust_remote_code=True)',
    ]


def _healing_lines(plan: Plan, source: Source, output_dir: str) -> list[str]:
    """How the model is trained after its conversion, or that there is no recipe for it."""
    if plan.head.task is None:
        return [
            "The new attention is untrained, and training/finetune.py has no task for "
            f"{plan.stock_class.__name__}. Train it with a loop of your own, such as transformers' Trainer."
        ]
    given = f"--model_name_or_path {output_dir} --teacher_name_or_path {source.loadable}"
    length = "" if plan.extension is None else f" --max_length {plan.extension.tokens}"
    data = f"--train_file {plan.head.data} --output_dir {output_dir}-healed{length}"
    sentence = "The new attention is untrained. Train it with the original as teacher:"
    if typed_name("").startswith(PROGRAM):
        recipe = Path(str(plan.head.recipe)).stem
        return [sentence, f"  {PROGRAM} finetune --config {recipe} {given} \\\n    {data}"]
    training = Path(__file__).resolve().parents[1] / "training"
    return [
        sentence,
        f"  accelerate launch --config_file {training / 'launch' / 'one.yaml'} {training / 'finetune.py'} \\\n"
        f"    --config {training / 'configs' / str(plan.head.recipe)} \\\n"
        f"    {given} \\\n"
        f"    {data}",
    ]


def _tensor_name(tensor: TensorPlan) -> str:
    if tensor.source is None or tensor.target is None or tensor.source == tensor.target:
        return str(tensor.target or tensor.source)
    return f"{tensor.source} -> {tensor.target}"


def _names(names: list[str | None]) -> str:
    shown = ", ".join(str(name) for name in names[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more"
