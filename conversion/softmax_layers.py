"""`--softmax_layers`: the layers that keep softmax attention, as a list or as `auto:K`.

`auto:K` ranks the layers: for each one, softmax is restored in this layer only, and the K layers that bring the student
nearest the teacher keep softmax. The ranking is by the KL divergence of the model's output, not by the error of the
layer itself: on RULER the latter chose worse than evenly spaced layers (KL-guided hybrid distillation, ICLR 2026).

Without a preset, the layers are ranked on the untrained student. With a preset, they are ranked before its last stage,
on the student that the earlier stages have trained with linear attention in all layers (KL-guided hybrid distillation
also ranks after distillation).
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import softmax_attention
from hf_linear_attention._common.devices import computing_device
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention.configuration_linear_attention import entries_of, parse_layers
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.options import ConversionArguments
from hf_linear_attention.conversion.plan import Plan, make_plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.outputs import run_model


logger = logging.getLogger(__name__)


AUTO = "auto:"
RANKING_TOKENS = 8192
CHOICE = "softmax_layers"  # the name of the choice in conversion_report.json


def is_automatic(arguments: ConversionArguments) -> bool:
    """Whether `--softmax_layers` has the form `auto:K`."""
    return (arguments.softmax_layers or "").startswith(AUTO)


def count_of(arguments: ConversionArguments) -> int:
    """K of `auto:K`; 0 if K is not a number."""
    number = str(arguments.softmax_layers).removeprefix(AUTO)
    return int(number) if number.isascii() and number.isdecimal() else 0


def ranking_file(arguments: ConversionArguments) -> str | None:
    """The file to rank the layers on, or None."""
    return arguments.calibration_file or arguments.train_file


def check_softmax_layers(arguments: ConversionArguments, plan: Plan) -> None:
    """Check that the layers can be ranked, if `--softmax_layers` is `auto:K`.

    Raises:
        UsageError: naming every reason why they cannot.
    """
    if not is_automatic(arguments):
        return
    text, problems = arguments.softmax_layers, []
    if not 1 <= count_of(arguments) < len(plan.layers):
        problems.append(
            f"`--softmax_layers {text}`: K must be from 1 to {len(plan.layers) - 1}, because there are "
            f"{len(plan.layers)} layers to convert"
        )
    if plan.stock_class.main_input_name != "input_ids" or plan.config.is_encoder_decoder:
        problems.append(
            f"`--softmax_layers {text}` ranks the layers of text models other than encoder-decoders, and "
            f"{plan.stock_class.__name__} is not such a model; give a list such as 0,5"
        )
    elif ranking_file(arguments) is None:
        problems.append(
            f"`--softmax_layers {text}` ranks the layers on text; give a `--calibration_file` (or a `--train_file`)"
        )
    if problems:
        raise UsageError(*problems)


def listed_layers(text: str, plan: Plan) -> list[int]:
    """The layers that `text` names.

    Raises:
        UsageError: if it is not a list of layer numbers, or names a layer that is not to be converted.
    """
    try:
        layers = parse_layers(text)
    except ValueError:
        layers = text
    converted = [layer.layer for layer in plan.layers]
    if isinstance(layers, str):
        raise UsageError(f"`--softmax_layers {text}`: give a list such as 0,5 or 2-4, or auto:K")
    if wrong := sorted(set(layers) - set(converted)):
        raise UsageError(
            f"`--softmax_layers {text}`: {wrong} are not among the layers to convert; choose from {converted}"
        )
    return layers


def plan_without(plan: Plan, source: Source, arguments: ConversionArguments, layers: list[int]) -> Plan:
    """The plan in which `layers` stay softmax."""
    left = [layer.layer for layer in plan.layers if layer.layer not in layers]
    settings = _for_layers(plan.settings, left)
    options = arguments.trust_remote_code, arguments.dtype, arguments.positions
    return make_plan(source, settings, *options)


def _for_layers(settings: Any, layers: list[int]) -> Any:
    """The settings of a model of which only `layers` remain converted."""
    entries = [
        {
            **entry,
            "layers": [layer for layer in layers if isinstance(settings, Mapping) or layer in entry["layers"]],
            "softmax_heads": [pair for pair in entry.get("softmax_heads", []) if pair[0] in layers],
        }
        for entry in entries_of(settings)
    ]
    left = [entry for entry in entries if entry["layers"]]
    if not left or isinstance(settings, Mapping):
        return {**entries[0], "layers": layers or "none"}
    return left


def rank(
    model: PreTrainedModel, inputs: RealInputs, arguments: ConversionArguments, teacher: PreTrainedModel | None = None
) -> dict[str, Any]:
    """The choice for the report: `layers`, `ranking` (the largest gain first), `inputs` and `tokens`."""
    logger.info("ranking the layers on %s", inputs.name)
    batches = inputs.batches(RANKING_TOKENS)
    models: list[Any] = [part for part in (model, teacher) if part is not None]
    device = computing_device()
    for part in models:
        part.to(device).eval()
    ranking = rank_layers(model, teacher, batches)
    for part in models:
        part.to("cpu")
    return {
        "layers": sorted(entry.layer for entry in ranking[: count_of(arguments)]),
        "ranking": [vars(entry) for entry in ranking],
        "inputs": inputs.name,
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
    }


def choose_in(
    folder: Path, plan: Plan, source: Source, arguments: ConversionArguments, inputs: RealInputs, teacher: str
) -> None:
    """Restore softmax in the layers of the model in `folder` that gain most from it, unless that was done before."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    if report.get(CHOICE) is not None:
        return
    model: Any = plan.linear_class.from_pretrained(folder)
    original: Any = plan.stock_class.from_pretrained(teacher, dtype=model.dtype)
    choice = rank(model, inputs, arguments, original)
    report |= chosen_report(choice, plan_without(plan, source, arguments, choice["layers"]), report)
    with staging(folder) as copy:
        shutil.copytree(
            folder, copy, ignore=shutil.ignore_patterns("*.safetensors*", "checkpoint-*"), dirs_exist_ok=True
        )
        with_softmax_layers(model, choice["layers"]).save_pretrained(copy)
        (copy / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def chosen_report(choice: Mapping[str, Any], plan: Plan, report: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a report that change when the layers are chosen."""
    return {**plan.to_dict(), CHOICE: dict(choice), "figures": {**report["figures"], **plan.figures}}


def describe_ranking(choice: Mapping[str, Any]) -> list[str]:
    """The ranking for the terminal, one line per layer."""
    kept = set(choice["layers"])
    lines = [f"Softmax restored in one layer at a time, on {choice['tokens']:,} tokens ({choice['inputs']}):"]
    for entry in choice["ranking"]:
        stays = "  stays softmax" if entry["layer"] in kept else ""
        lines.append(
            f"  layer {entry['layer']:<4} divergence {entry['divergence']:.4g}, gain {entry['gain']:.4g}{stays}"
        )
    return lines


@dataclass(frozen=True)
class LayerGain:
    """What one layer gains from softmax.

    Args:
        layer: the number of the layer.
        divergence: the divergence of the student from the teacher with softmax in this layer only.
        gain: how much smaller this divergence is than without softmax in any converted layer.
    """

    layer: int
    divergence: float
    gain: float


@torch.no_grad()
def rank_layers(student: PreTrainedModel, teacher: PreTrainedModel | None, batches: Iterable[Batch]) -> list[LayerGain]:
    """The converted layers of `student`, the layer with the largest gain first.

    Without a teacher, the student with its own softmax attention is the teacher; this is the original model as long as
    only the mechanisms were trained.

    The divergence is KL(teacher || student) of the logits per real token; for a model without logits it is the relative
    squared error of the last hidden state. The cost is one forward pass per layer and batch.
    """
    layers = [module.linear_attention.shape.layer for module in linear_attention_modules(student).values()]
    sums = dict.fromkeys([None, *layers], 0.0)
    tokens = 0.0
    for batch in progress(batches, "ranking"):
        batch = {name: value.to(student.device) for name, value in batch.items()}
        mask = batch["attention_mask"].bool()
        with softmax_attention(student) if teacher is None else nullcontext():
            target = run_model(student if teacher is None else teacher, batch, None)
        tokens += float(mask.sum())
        for layer in sums:
            with nullcontext() if layer is None else softmax_attention(student, [layer]):
                sums[layer] += float(_divergence(run_model(student, batch, None), target, mask))
    means = {layer: total / max(tokens, 1.0) for layer, total in sums.items()}
    gains = [LayerGain(layer, means[layer], means[None] - means[layer]) for layer in layers]
    return sorted(gains, key=lambda entry: -entry.gain)


def _divergence(mine: Any, yours: Any, mask: Tensor) -> Tensor:
    """The divergence, summed over real tokens."""
    if getattr(mine, "logits", None) is None:
        s, t = mine.last_hidden_state.float()[mask], yours.last_hidden_state.float()[mask]
        return ((s - t).square().sum(-1) / t.square().sum(-1).clamp(min=1e-12)).sum()
    if mine.logits.ndim == 2:  # classes of a whole text, weighted by its number of tokens
        log_q, log_p = (x.logits.float().log_softmax(-1) for x in (mine, yours))
        return (F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1) * mask.sum(-1)).sum()
    log_q, log_p = (x.logits[mask].float().log_softmax(-1) for x in (mine, yours))
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def with_softmax_layers(model: PreTrainedModel, layers: Iterable[int]) -> PreTrainedModel:
    """A copy of a converted model in which `layers` have softmax attention again; the other layers do not change.

    Raises:
        ValueError: if one of them was not converted.
    """
    converted = [module.linear_attention.shape.layer for module in linear_attention_modules(model).values()]
    if wrong := sorted(set(layers) - set(converted)):
        raise ValueError(f"Cannot restore softmax in layers {wrong}, which are not converted; choose from {converted}.")
    config = copy.deepcopy(model.config)
    left = [layer for layer in converted if layer not in set(layers)]
    config.linear_attention = _for_layers(config.linear_attention, left)
    with torch.random.fork_rng(devices=[]):
        result: Any = type(model)(config)
    result = result.to(dtype=model.dtype)
    missing, _ = result.load_state_dict(model.state_dict(), strict=False)
    if missing:
        raise RuntimeError(f"the copy lacks {missing}")
    if model.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
    return result.to(model.device).eval()
