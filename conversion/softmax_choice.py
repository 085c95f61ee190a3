"""`--softmax_layers`: the layers that keep softmax attention, as a list, as `every:K` or as `auto:K`.

For `auto:K`, softmax is restored in one layer at a time, and the K layers that bring the student nearest the teacher
keep softmax. The ranking is by the KL divergence of the model's output, not by the error of the layer itself:
on RULER the latter chose worse than evenly spaced layers (KL-guided hybrid distillation, ICLR 2026). Without a preset,
the layers are ranked on the untrained student. With a preset, they are ranked before its last stage, on the student
that the earlier stages have trained with linear attention in all layers (that paper also ranks after distillation).
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import softmax_attention
from hf_linear_attention._common.devices import computing_device
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention.conversion.arguments import ConversionArguments
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.plan import Plan, make_plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.layer_ranges import parse_layers
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.output_layer import ByRow, Rows


logger = logging.getLogger(__name__)


AUTO, EVERY = "auto:", "every:"
# Which layers of a stock architecture keep softmax if the command does not say it; some engines know no other places.
USUAL_INTERVAL = 4
CHOICE = "softmax_layers"  # in conversion_report.json
RANKING_TOKENS = 8192


def count_of(option: str | None, form: str = AUTO) -> int | None:
    """K of an option with the value `auto:K`, 0 if K is not a number; None if the value has another form."""
    if not (option or "").startswith(form):
        return None
    number = str(option).removeprefix(form)
    return int(number) if number.isascii() and number.isdecimal() else 0


def ranking_file(arguments: ConversionArguments) -> str | None:
    """The file to rank layers on, or None."""
    return arguments.calibration_file or arguments.train_file


def with_listed(plan: Plan, source: Source, arguments: ConversionArguments) -> Plan:
    """The plan in which the layers that `--softmax_layers` lists keep softmax; `auto:K` is checked.

    Raises:
        UsageError: if a list or K does not fit the model.
    """
    _check_ranking(arguments, plan)
    layers = arguments.softmax_layers
    if layers is None and plan.stock_form is not None and len(plan.layers) == plan.num_layers:
        layers = f"{EVERY}{USUAL_INTERVAL}"
        logger.info(
            "one layer of %d keeps softmax, as `--softmax_layers every:%d` says", USUAL_INTERVAL, USUAL_INTERVAL
        )
    if layers is not None and count_of(layers) is None:
        plan = plan_without(plan, source, arguments, _listed_layers(layers, plan))
    return plan


def _check_ranking(arguments: ConversionArguments, plan: Plan) -> None:
    """Check that the layers can be ranked, if `--softmax_layers` is `auto:K`."""
    if (count := count_of(arguments.softmax_layers)) is None:
        return
    option, problems = f"`--softmax_layers {arguments.softmax_layers}`", []
    if not 1 <= count < len(plan.layers):
        problems.append(f"{option}: K must be from 1 to {len(plan.layers) - 1}, one less than the layers to convert")
    if plan.stock_class.main_input_name != "input_ids" or plan.config.is_encoder_decoder:
        problems.append(
            f"{option} ranks the layers of text models other than encoder-decoders, and {plan.stock_class.__name__} is "
            "not such a model; give a list such as 0,5"
        )
    elif ranking_file(arguments) is None:
        problems.append(f"{option} ranks the layers on text; give a `--calibration_file` (or a `--train_file`)")
    if problems:
        raise UsageError(*problems)


def _listed_layers(text: str, plan: Plan) -> list[int]:
    """The layers that `text`, a list or `every:K`, names among those to convert."""
    converted = [layer.layer for layer in plan.layers]
    if (interval := count_of(text, EVERY)) is not None:
        found = [layer for layer in converted if interval and layer % interval == interval - 1]
        if not found or len(found) == len(converted):
            raise UsageError(
                f"`--softmax_layers {text}`: K must be from 2 to {max(converted) + 1}, the layers there are"
            )
        return found
    try:
        layers = parse_layers(text)
    except ValueError:
        layers = text
    if isinstance(layers, str):
        raise UsageError(f"`--softmax_layers {text}`: give a list such as 0,5 or 2-4, every:K or auto:K")
    if wrong := sorted(set(layers) - set(converted)):
        raise UsageError(
            f"`--softmax_layers {text}`: {wrong} are not among the layers to convert; choose from {converted}"
        )
    return layers


def plan_without(
    plan: Plan, source: Source, arguments: ConversionArguments, layers: list[int], settings: Any = None
) -> Plan:
    """The plan in which `layers` stay softmax; `settings` are those of the other layers, by default the plan's."""
    left = [layer.layer for layer in plan.layers if layer.layer not in layers]
    changed = _for_layers(settings or plan.settings, left)
    return make_plan(source, changed, arguments.trust_remote_code, arguments.dtype)


def _for_layers(settings: Any, layers: list[int]) -> Any:
    """The settings of a model of which only `layers` remain converted."""
    if isinstance(settings, Mapping):
        return {**settings, "layers": layers or "none"}
    entries = [{**entry, "layers": [n for n in layers if n in entry["layers"]]} for entry in settings]
    return [entry for entry in entries if entry["layers"]] or {**settings[0], "layers": "none"}


def rank(
    model: PreTrainedModel,
    inputs: RealInputs | None,
    arguments: ConversionArguments,
    teacher: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """The choice for the report: `layers`, `ranking` (the largest gain first), `inputs` and `tokens`."""
    if inputs is None:
        raise RuntimeError("`with_listed` should have refused a conversion without text to rank the layers on")
    logger.info("ranking the layers on %s", inputs.name)
    batches = inputs.batches(RANKING_TOKENS)
    models: list[Any] = [part for part in (model, teacher) if part is not None]
    for part in models:
        part.to(computing_device()).eval()
    ranking = rank_layers(model, teacher, batches)
    for part in models:
        part.to("cpu")
    return {
        "layers": sorted(entry["layer"] for entry in ranking[: count_of(arguments.softmax_layers)]),
        "ranking": ranking,
        "inputs": inputs.name,
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
    }


def choose_in(
    folder: Path, plan: Plan, source: Source, arguments: ConversionArguments, inputs: RealInputs | None, teacher: str
) -> None:
    """Restore softmax in the layers of the model in `folder` that gain most from it, unless that was done before."""
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    if report.get(CHOICE) is not None:
        return
    model: Any = plan.linear_class.from_pretrained(folder)
    choice = rank(model, inputs, arguments, plan.stock_class.from_pretrained(teacher, dtype=model.dtype))
    plan = plan_without(plan, source, arguments, choice["layers"], report["settings"])
    report |= {**plan.to_dict(), CHOICE: choice, "figures": {**report["figures"], **plan.figures}}
    with staging(folder) as result:
        ignored = shutil.ignore_patterns("*.safetensors*", "checkpoint-*")
        shutil.copytree(folder, result, ignore=ignored, dirs_exist_ok=True)
        with_softmax_layers(model, choice["layers"]).save_pretrained(result)
        (result / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def describe_ranking(choice: Mapping[str, Any]) -> list[str]:
    """The ranking of the layers for the terminal, one line per layer."""
    lines = [f"Each layer in turn computed softmax again, on {choice['tokens']:,} tokens ({choice['inputs']}):"]
    for entry in choice["ranking"]:
        stays = "  stays softmax" if entry["layer"] in choice["layers"] else ""
        lines.append(
            f"  layer {entry['layer']:<4} divergence {entry['divergence']:.4g}, gain {entry['gain']:.4g}{stays}"
        )
    return lines


@torch.no_grad()
def rank_layers(
    student: PreTrainedModel, teacher: PreTrainedModel | None, batches: Iterable[Batch]
) -> list[dict[str, Any]]:
    """What each converted layer of `student` gains from softmax, the largest gain first.

    `divergence` is that of the student from the teacher with softmax in this `layer` only, and `gain` how much smaller
    it is than without softmax in any converted layer.

    Without a teacher, the student with its own softmax attention is the teacher; this is the original model as long as
    only the mechanisms were trained.

    The divergence is KL(teacher || student) of the logits per real token; for a model without logits it is the relative
    squared error of the last hidden state. The cost is one forward pass per layer and batch.
    """
    layers = _converted(student)
    sums = dict.fromkeys([None, *layers], 0.0)
    tokens, by_row = 0.0, ByRow(student)
    of_teacher = by_row if teacher is None else ByRow(teacher)
    for batch in progress(batches, "ranking"):
        batch = {name: value.to(student.device) for name, value in batch.items()}
        mask = batch["attention_mask"].bool()
        with softmax_attention(student) if teacher is None else nullcontext():
            target = of_teacher.outputs(batch)
        tokens += float(mask.sum())
        for layer in sums:
            with nullcontext() if layer is None else softmax_attention(student, [layer]):
                sums[layer] += float(_divergence(by_row.outputs(batch), target, mask))
    means = {layer: total / max(tokens, 1.0) for layer, total in sums.items()}
    gains = [{"layer": n, "divergence": means[n], "gain": means[None] - means[n]} for n in layers]
    return sorted(gains, key=lambda entry: -entry["gain"])


def _converted(model: PreTrainedModel) -> list[int]:
    return [module.linear_attention.shape.layer for module in linear_attention_modules(model).values()]


def _divergence(student: tuple[Any, Rows | None], teacher: tuple[Any, Rows | None], mask: Tensor) -> Tensor:
    """The divergence of the student's outputs and logits from the teacher's, summed over real tokens."""
    mine, yours = student[1], teacher[1]
    if mine is None or yours is None:
        s, t = (outputs.last_hidden_state.float()[mask] for outputs in (student[0], teacher[0]))
        return ((s - t).square().sum(-1) / t.square().sum(-1).clamp(min=1e-12)).sum()
    # Classes of a whole text are weighted by its number of tokens.
    weights = mask.sum(-1) if len(mine.inputs) == len(mask) else mask.flatten()
    rows = weights.nonzero().squeeze(-1)
    return (mine.read(rows, lambda logits, part: divergence(logits, yours(part))) * weights[rows]).sum()


def with_softmax_layers(model: PreTrainedModel, layers: Iterable[int]) -> PreTrainedModel:
    """A copy of a converted model in which `layers` have softmax attention again; the other layers do not change.

    Raises:
        ValueError: if one of them was not converted.
    """
    converted = _converted(model)
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
