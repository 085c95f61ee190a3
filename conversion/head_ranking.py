"""`--softmax_heads`: the query heads that keep softmax attention, as a list such as 0.3,2.1 or as `auto:K`.

`auto:K` ranks the heads of the original model by ablation: in one head at a time, the untrained mechanism replaces
softmax, and the loss rises by what the head contributes. There are two losses: that of random tokens that are repeated
once, where only a model that finds the earlier token can predict the second copy (Elhage 2021, induction heads), and
that of text, if there is a file of it. The K heads with the largest sum of both rises keep softmax.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import softmax_attention
from hf_linear_attention._common.devices import computing_device
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.special_tokens import special_tokens
from hf_linear_attention.attention.softmax_heads import keep_softmax_heads
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.options import ConversionArguments
from hf_linear_attention.conversion.plan import Plan, make_plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.layer_ranges import with_softmax_heads
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch


logger = logging.getLogger(__name__)


AUTO_HEADS = "auto:"
KEPT_HEADS = "softmax_heads"  # the name of the choice in conversion_report.json
TEXT_TOKENS = 2048
# The random sequences: long enough that a window does not hold both copies, short enough for every model.
NUM_SEQUENCES, COPY_LENGTH = 8, 96
MAX_LISTED_HEADS = 12


@dataclass(frozen=True)
class HeadScore:
    """How much worse the original model is with the mechanism in one head, in nats per predicted token.

    Args:
        layer: the number of the layer.
        head: the number of the query head.
        retrieval: the rise of the loss on the second copy of random tokens.
        text: the rise of the loss on text; None without text.
    """

    layer: int
    head: int
    retrieval: float
    text: float | None = None

    @property
    def score(self) -> float:
        """The sum of both rises."""
        return self.retrieval + (self.text or 0.0)


def chooses_heads(arguments: ConversionArguments) -> bool:
    """Whether `--softmax_heads` has the form `auto:K`."""
    return (arguments.softmax_heads or "").startswith(AUTO_HEADS)


def num_heads_to_keep(arguments: ConversionArguments) -> int:
    """K of `auto:K`; 0 if K is not a number."""
    number = str(arguments.softmax_heads).removeprefix(AUTO_HEADS)
    return int(number) if number.isascii() and number.isdecimal() else 0


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
    options = arguments.trust_remote_code, arguments.dtype, arguments.positions
    return make_plan(source, settings, *options)


def check_softmax_heads(arguments: ConversionArguments, plan: Plan, source: Source) -> None:
    """Check that the heads can be ranked, if `--softmax_heads` is `auto:K`.

    Raises:
        UsageError: if they cannot.
    """
    if not chooses_heads(arguments):
        return
    text = arguments.softmax_heads
    num_heads = sum(layer.num_heads for layer in plan.layers)
    if not 1 <= num_heads_to_keep(arguments) < num_heads:
        raise UsageError(
            f"`--softmax_heads {text}`: K must be from 1 to {num_heads - 1}, because the layers to convert have "
            f"{num_heads} heads"
        )
    if plan.head.task != "causal_lm":
        raise UsageError(
            f"`--softmax_heads {text}` ranks the heads of causal language models, and {plan.stock_class.__name__} is "
            "not one; give a list such as 0.3,2.1"
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
    heads = sorted([entry.layer, entry.head] for entry in ranking[:count])
    set_softmax_heads(model, heads)
    return {
        "heads": heads,
        "ranking": [{**asdict(entry), "score": entry.score} for entry in ranking],
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
def rank_heads(model: PreTrainedModel, retrieval: Tensor, text: Sequence[Batch] | None = None) -> list[HeadScore]:
    """All heads of the converted layers, the one with the largest score first.

    The model does not change. The cost is one forward pass of each sample per head.

    Args:
        model: a converted model with the original weights.
        retrieval: the result of `repeated_tokens`.
        text: padded batches.
    """
    before = _losses(model, None, None, retrieval, text)
    scores = []
    modules = linear_attention_modules(model).values()
    heads = [(module, head) for module in modules for head in range(module.linear_attention.shape.num_heads)]
    for module, head in progress(heads, "ranking"):
        found = _losses(model, module, head, retrieval, text)
        rises = {name: found[name] - before[name] for name in found}
        scores.append(HeadScore(module.linear_attention.shape.layer, head, **rises))
    return sorted(scores, key=lambda entry: -entry.score)


def _losses(
    model: PreTrainedModel, module: Any, head: int | None, retrieval: Tensor, text: Sequence[Batch] | None
) -> dict[str, float]:
    """The nats per token of the original model, in which one head computes the mechanism unless `module` is None."""
    with _only_one_linear_head(model, module, head):
        ids = retrieval.to(model.device)
        length = ids.shape[1] // 2
        logits = model(input_ids=ids, use_cache=False).logits[:, length:-1].float()
        losses = {"retrieval": F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten()).item()}
        if text is not None:
            losses["text"] = _text_loss(model, text)
    return losses


def _text_loss(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        batch = {name: value.to(model.device) for name, value in batch.items()}
        mask = batch["attention_mask"].bool()
        real = mask[:, 1:] & mask[:, :-1]
        logits = model(**batch, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits[real], batch["input_ids"][:, 1:][real], reduction="sum").item()
        count += int(real.sum())
    return total / max(count, 1)


@contextlib.contextmanager
def _only_one_linear_head(model: PreTrainedModel, module: Any, head: int | None) -> Iterator[None]:
    """A context in which all heads compute softmax, except for one."""
    modules = linear_attention_modules(model).values()
    others = [other.linear_attention.shape.layer for other in modules if other is not module]
    with softmax_attention(model, others):
        if module is None:
            yield
            return
        mechanism = module.linear_attention
        earlier = list(getattr(mechanism, "softmax_heads", ()))
        try:
            keep_softmax_heads(mechanism, [other for other in range(mechanism.shape.num_heads) if other != head])
            yield
        finally:
            keep_softmax_heads(mechanism, earlier)


def describe_heads(choice: Mapping[str, Any]) -> list[str]:
    """The ranking for the terminal: the heads that keep softmax, and some of the others."""
    kept = [tuple(pair) for pair in choice["heads"]]
    where = "repeated random tokens" + (f" and {choice['inputs']}" if choice["inputs"] else "")
    lines = [f"The mechanism in one head at a time, rise of the loss in nats per token on {where}:"]
    for entry in choice["ranking"][: max(len(kept), MAX_LISTED_HEADS)]:
        stays = "  stays softmax" if (entry["layer"], entry["head"]) in kept else ""
        text = "" if entry["text"] is None else f", text {entry['text']:.4g}"
        lines.append(f"  head {entry['layer']}.{entry['head']:<4} retrieval {entry['retrieval']:.4g}{text}{stays}")
    return lines
