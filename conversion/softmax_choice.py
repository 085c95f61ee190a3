"""`--softmax_layers` and `--softmax_heads`: what keeps softmax attention, as a list, as `every:K` or as `auto:K`.

Layers: for each layer, softmax is restored in this layer only, and the K layers that bring the student nearest the
teacher keep softmax. The ranking is by the KL divergence of the model's output, not by the error of the layer itself:
on RULER the latter chose worse than evenly spaced layers (KL-guided hybrid distillation, ICLR 2026). Without a preset,
the layers are ranked on the untrained student. With a preset, they are ranked before its last stage, on the student
that the earlier stages have trained with linear attention in all layers (that paper also ranks after distillation).

Heads: the heads of the original model are ranked by ablation. In one head at a time, the untrained mechanism replaces
softmax, and the loss rises by what the head contributes. There are two losses: that of random tokens that are repeated
once, where only a model that finds the earlier token can predict the second copy (Elhage 2021, induction heads), and
that of text, if there is a file of it. The K heads with the largest sum of both rises keep softmax.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from hf_linear_attention._common.special_tokens import special_tokens
from hf_linear_attention.attention.softmax_heads import keep_softmax_heads
from hf_linear_attention.configuration_linear_attention import entries_of, max_length_of
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.options import ConversionArguments
from hf_linear_attention.conversion.plan import Plan, make_plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.layer_ranges import parse_layers, with_softmax_heads
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.output_layer import ByRow, Rows


logger = logging.getLogger(__name__)


AUTO, EVERY = "auto:", "every:"
# Which layers of a stock architecture keep softmax if the command does not say it; some engines know no other places.
USUAL_INTERVAL = 4
# The names of the choices in conversion_report.json.
CHOICE, KEPT_HEADS = "softmax_layers", "softmax_heads"
RANKING_TOKENS = 8192  # for layers
TEXT_TOKENS = 2048  # for heads
# The random sequences: long enough that a window does not hold both copies, short enough for every model.
NUM_SEQUENCES, COPY_LENGTH = 8, 96
MAX_LISTED_HEADS = 12


def count_of(option: str | None, form: str = AUTO) -> int | None:
    """K of an option with the value `auto:K`, 0 if K is not a number; None if the value has another form."""
    if not (option or "").startswith(form):
        return None
    number = str(option).removeprefix(form)
    return int(number) if number.isascii() and number.isdecimal() else 0


def ranking_file(arguments: ConversionArguments) -> str | None:
    """The file to rank layers and heads on, or None."""
    return arguments.calibration_file or arguments.train_file


def with_listed(plan: Plan, source: Source, arguments: ConversionArguments) -> Plan:
    """The plan in which the layers and heads that the options list keep softmax; `auto:K` is checked.

    Raises:
        UsageError: if a list or K does not fit the model.
    """
    check_softmax_layers(arguments, plan)
    check_softmax_heads(arguments, plan, source)
    layers, heads = arguments.softmax_layers, arguments.softmax_heads
    if layers is None and plan.stock_form is not None and len(plan.layers) == plan.num_layers:
        layers = f"{EVERY}{USUAL_INTERVAL}"
        logger.info(
            "one layer of %d keeps softmax, as `--softmax_layers every:%d` says", USUAL_INTERVAL, USUAL_INTERVAL
        )
    if layers is not None and count_of(layers) is None:
        plan = plan_without(plan, source, arguments, listed_layers(layers, plan))
    if heads is not None and count_of(heads) is None:
        plan = plan_with_heads(plan, source, arguments, listed_heads(heads))
    return plan


def with_chosen(
    model: PreTrainedModel,
    plan: Plan,
    source: Source,
    arguments: ConversionArguments,
    inputs: RealInputs | None,
    ranks_layers: bool,
) -> tuple[PreTrainedModel, Plan, dict[str, Any]]:
    """Model and plan with softmax in the layers and heads that `auto:K` chooses, and the choices for the report.

    Args:
        inputs: text to rank them on.
        ranks_layers: whether layers are ranked now, and not before the last stage of a training.
    """
    found: dict[str, Any] = {}
    if ranks_layers and count_of(arguments.softmax_layers) is not None:
        found[CHOICE] = rank(model, inputs, arguments)
        plan = plan_without(plan, source, arguments, found[CHOICE]["layers"])
        model = with_softmax_layers(model, found[CHOICE]["layers"])
    if (count := count_of(arguments.softmax_heads)) is not None:
        text = inputs if ranking_file(arguments) else None
        found[KEPT_HEADS] = choose_heads(model, text, count, arguments.seed or 0)
        plan = plan_with_heads(plan, source, arguments, found[KEPT_HEADS]["heads"])
    return model, plan, found


# ---- Layers


def check_softmax_layers(arguments: ConversionArguments, plan: Plan) -> None:
    """Check that the layers can be ranked, if `--softmax_layers` is `auto:K`.

    Raises:
        UsageError: naming every reason why they cannot.
    """
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


def listed_layers(text: str, plan: Plan) -> list[int]:
    """The layers that `text` names.

    Raises:
        UsageError: if it is not a list of layer numbers, or names a layer that is not to be converted.
    """
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


def plan_without(plan: Plan, source: Source, arguments: ConversionArguments, layers: list[int]) -> Plan:
    """The plan in which `layers` stay softmax."""
    left = [layer.layer for layer in plan.layers if layer.layer not in layers]
    return _with_settings(_for_layers(plan.settings, left), source, arguments)


def _with_settings(settings: Any, source: Source, arguments: ConversionArguments) -> Plan:
    options = arguments.trust_remote_code, arguments.dtype, arguments.max_position_embeddings
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
    model: PreTrainedModel,
    inputs: RealInputs | None,
    arguments: ConversionArguments,
    teacher: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """The choice for the report: `layers`, `ranking` (the largest gain first), `inputs` and `tokens`."""
    if inputs is None:
        raise RuntimeError("`check_softmax_layers` should have refused a conversion without text to rank the layers on")
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
    plan = plan_without(plan, source, arguments, choice["layers"])
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


# ---- Heads


def listed_heads(text: str) -> list[list[int]]:
    """`0.3,2.1` -> `[[0, 3], [2, 1]]`.

    Raises:
        UsageError: if the text is not such a list.
    """
    pairs = [part.strip().split(".") for part in text.split(",")]
    if any(len(pair) != 2 or not all(number.isascii() and number.isdecimal() for number in pair) for pair in pairs):
        raise UsageError(f"`--softmax_heads {text}`: give LAYER.HEAD, such as 0.3,2.1, or auto:K")
    return [[int(layer), int(head)] for layer, head in sorted({(pair[0], pair[1]) for pair in pairs})]


def plan_with_heads(plan: Plan, source: Source, arguments: ConversionArguments, heads: list[list[int]]) -> Plan:
    """The plan in which these heads keep softmax attention.

    Raises:
        UsageError: if they cannot.
    """
    try:
        settings = with_softmax_heads(plan.settings, heads)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _with_settings(settings, source, arguments)


def check_softmax_heads(arguments: ConversionArguments, plan: Plan, source: Source) -> None:
    """Check that the heads can be ranked, if `--softmax_heads` is `auto:K`.

    Raises:
        UsageError: if they cannot.
    """
    if (count := count_of(arguments.softmax_heads)) is None:
        return
    option, num_heads = f"`--softmax_heads {arguments.softmax_heads}`", sum(layer.num_heads for layer in plan.layers)
    if not 1 <= count < num_heads:
        raise UsageError(
            f"{option}: K must be from 1 to {num_heads - 1}, because the layers to convert have {num_heads} heads"
        )
    if plan.head.task != "causal_lm":
        raise UsageError(
            f"{option} ranks the heads of causal language models, and {plan.stock_class.__name__} is not one; give a "
            "list such as 0.3,2.1"
        )
    plan_with_heads(plan, source, arguments, [[layer.layer, 0] for layer in plan.layers])


def choose_heads(model: PreTrainedModel, inputs: RealInputs | None, count: int, seed: int = 0) -> dict[str, Any]:
    """Give the `count` heads with the largest scores softmax attention, in place; returns the choice for the report.

    Args:
        model: the converted model with the original weights and untrained mechanisms.
        inputs: text to rank the heads on, besides the random tokens.
        count: K.
        seed: the seed of the random tokens.
    """
    logger.info("ranking the heads on repeated random tokens%s", f" and on {inputs.name}" if inputs else "")
    any_model: Any = model
    any_model.to(computing_device()).eval()
    retrieval = repeated_tokens(model, seed)
    ranking = rank_heads(model, retrieval, inputs.batches(TEXT_TOKENS) if inputs else None)
    any_model.to("cpu")
    heads = sorted([entry["layer"], entry["head"]] for entry in ranking[:count])
    set_softmax_heads(model, heads)
    return {
        "heads": heads,
        "ranking": ranking,
        "inputs": inputs.name if inputs else None,
        "random_tokens": {"sequences": retrieval.shape[0], "length": retrieval.shape[1] // 2},
    }


def set_softmax_heads(model: PreTrainedModel, heads: Sequence[Sequence[int]]) -> None:
    """Give these heads of a converted model softmax attention, in place, in its modules and in its config."""
    model.config.linear_attention = with_softmax_heads(model.config.linear_attention, heads)
    for module in linear_attention_modules(model).values():
        mechanism = module.linear_attention
        keep_softmax_heads(mechanism, [head for layer, head in heads if layer == mechanism.shape.layer])
        mechanism.settings = dict(model.config.settings_of(mechanism.shape.layer))


def repeated_tokens(model: PreTrainedModel, seed: int = 0) -> Tensor:
    """Random tokens, each sequence followed by itself, `[NUM_SEQUENCES, 2 x length]`, without special tokens."""
    longest = max_length_of(model.config)
    length = min(COPY_LENGTH, longest // 2) if longest is not None and longest > 0 else COPY_LENGTH
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    special = torch.tensor([0, *special_tokens(model.config, *names)])
    allowed = torch.arange(model.config.vocab_size)
    allowed = allowed[~torch.isin(allowed, special)]
    generator = torch.Generator().manual_seed(seed)
    once = allowed[torch.randint(len(allowed), (NUM_SEQUENCES, length), generator=generator)]
    return torch.cat((once, once), dim=1)


@torch.no_grad()
def rank_heads(model: PreTrainedModel, retrieval: Tensor, text: Sequence[Batch] | None = None) -> list[dict[str, Any]]:
    """All heads of the converted layers by `layer` and `head`, the one with the largest score first.

    `retrieval` and `text` say by how many nats per predicted token the loss rises on the second copy of random tokens
    and on text (None without one) if the mechanism computes this head alone; `score` is their sum. The model does not
    change. The cost is one forward pass of each sample per head.

    Args:
        model: a converted model with the original weights.
        retrieval: the result of `repeated_tokens`.
        text: padded batches.
    """
    modules = list(linear_attention_modules(model).values())
    by_row = ByRow(model)
    with softmax_attention(model):
        before = _losses(by_row, retrieval, text)
    scores = []
    heads = [(module, head) for module in modules for head in range(module.linear_attention.shape.num_heads)]
    for module, head in progress(heads, "ranking"):
        with _only_one_linear_head(model, module, head):
            found = _losses(by_row, retrieval, text)
        rises = {name: found[name] - before[name] for name in found}
        place = {"layer": module.linear_attention.shape.layer, "head": head}
        scores.append({**place, "text": None, **rises, "score": sum(rises.values())})
    return sorted(scores, key=lambda entry: -entry["score"])


def _losses(by_row: ByRow, retrieval: Tensor, text: Sequence[Batch] | None) -> dict[str, float]:
    """The nats per token on the second copy of the random tokens and, if there is one, on the text."""
    ids = retrieval.to(by_row.model.device)
    second = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) > ids.shape[1] // 2
    losses = {"retrieval": _nats(by_row, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, second)[0]}
    if text is None:
        return losses
    found = []
    for batch in text:
        batch = {name: value.to(by_row.model.device) for name, value in batch.items()}
        found.append(_nats(by_row, batch, batch["attention_mask"].bool()))
    count = sum(number for _, number in found)
    return {**losses, "text": sum(mean * number for mean, number in found) / max(count, 1)}


def _nats(by_row: ByRow, batch: Batch, mask: Tensor) -> tuple[float, int]:
    """The mean nats of the tokens in `mask` whose predecessor is not padding, and their number."""
    predicted = mask[:, 1:] & batch["attention_mask"][:, :-1].bool()
    rows = F.pad(predicted, (0, 1)).flatten().nonzero().squeeze(-1)
    targets = batch["input_ids"].roll(-1, dims=1).flatten()
    nats = by_row.rows(batch).read(
        rows, lambda logits, part: F.cross_entropy(logits.float(), targets[part], reduction="none")
    )
    return nats.sum().item() / max(len(rows), 1), len(rows)


@contextlib.contextmanager
def _only_one_linear_head(model: PreTrainedModel, module: Any, head: int) -> Iterator[None]:
    """A context in which all heads compute softmax, except for one."""
    mechanism = module.linear_attention
    earlier = list(getattr(mechanism, "softmax_heads", ()))
    with softmax_attention(model, [layer for layer in _converted(model) if layer != mechanism.shape.layer]):
        try:
            keep_softmax_heads(mechanism, [other for other in range(mechanism.shape.num_heads) if other != head])
            yield
        finally:
            keep_softmax_heads(mechanism, earlier)


def describe_heads(choice: Mapping[str, Any]) -> list[str]:
    """The ranking of the heads for the terminal: those that keep softmax, and some of the others."""
    kept = [tuple(pair) for pair in choice["heads"]]
    where = "repeated random tokens" + (f" and {choice['inputs']}" if choice["inputs"] else "")
    lines = [f"How much the loss rises if one head at a time computes the mechanism, in nats per token on {where}:"]
    for entry in choice["ranking"][: max(len(kept), MAX_LISTED_HEADS)]:
        stays = "  stays softmax" if (entry["layer"], entry["head"]) in kept else ""
        text = "" if entry["text"] is None else f", text {entry['text']:.4g}"
        lines.append(f"  head {entry['layer']}.{entry['head']:<4} retrieval {entry['retrieval']:.4g}{text}{stays}")
    return lines
