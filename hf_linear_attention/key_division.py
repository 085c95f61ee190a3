"""How many exact keys each layer gets, of as many as all layers have in common: `divide_exact_keys`.

Layers differ far more than scores do: in Qwen2.5-Coder-0.5B with 353 exact keys in each, the errors of the layers'
outputs range from .1 to 28 %, and what an error costs differs, too. So keys move from layers that need few to those
that need many, by the Fisher information of the model's outputs: with a gradient g, of the loss of tokens sampled from
these outputs, a change d of a layer's output raises their divergence from the original's by the mean of (g d)^2 / 2. In
that model, its logarithm has a correlation of .96 with the measured divergence, that of the errors alone .79.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_observation import ObservedAttention, forward_arguments, observe_attention
from .configuration_linear_attention import entries_of, num_attention_layers
from .modeling_linear_attention import linear_attention_modules


# The numbers of keys that are tried, over the mean number; a layer gets at most the last.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
TOKENS = 4096  # on which costs are measured, in whole rows
# Tokens of a row for an exact key, at least, as many as the default state has at the trained length: a state that holds
# much of a row says little of longer ones.
SCARCITY = 16
LOGITS = 2**26  # that are alive together: 441 tokens of the 0.5B are sampled from a row


def divide_exact_keys(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """Divide the exact keys of the layers anew between them, in place; the sum stays, and so do the bytes of the state.

    Each layer computes its output with several numbers of keys, in the second half of the rows, from the inputs that it
    has in the original model, during a backward pass through that. The division has the smallest sum of what these
    changes cost, among those on the lower convex hulls of the costs. So scores should be fitted before (`calibrate`).
    Activations of layers are recomputed, and no gradient of a weight is computed.

    Args:
        batches: as in `calibrate`, of which the first with some thousand tokens together are read.

    Returns:
        The number of exact keys of each layer, 0 for layers without; empty where fewer than two layers have any.
    """
    modules = [m for m in linear_attention_modules(model).values() if getattr(m.linear_attention, "num_exact_keys", 0)]
    if len({module.linear_attention.shape.layer for module in modules}) < 2:
        return []
    before = [module.linear_attention.num_exact_keys for module in modules]
    rows = _first(batches)
    total = min(sum(before), len(before) * max((row["input_ids"].shape[1] for row in rows), default=0) // SCARCITY)
    total = max(total, len(before))
    counts = sorted({max(1, round(share * total / len(before))) for share in SHARES})
    numbers = scaled(divided(_costs(model, modules, rows, counts), counts, total), sum(before))
    mechanisms = [module.linear_attention for module in modules]
    layers = [mechanism.shape.layer for mechanism in mechanisms]
    result = [0] * max(1 + max(layers), num_attention_layers(model.config) or 0)
    for layer, number in zip(layers, numbers, strict=True):
        result[layer] = number
    if numbers == before:
        return result
    for mechanism, number in zip(mechanisms, numbers, strict=True):
        mechanism.set_settings({**mechanism.settings, "num_exact_keys": result})
        mechanism.num_exact_keys = number
    for settings in entries_of(model.config.linear_attention):
        if settings.get("num_exact_keys"):
            settings["num_exact_keys"] = result
    return result


def divided(costs: Sequence[Sequence[float]], counts: Sequence[int], total: int) -> list[int]:
    """Numbers with the sum `total`, at most the last of `counts` each, for which the sum of the costs is smallest.

    Keys that lower no cost are divided evenly, such as all where rows were too short for a key to be far.

    Args:
        costs: of each layer with each of `counts`, which rise; between these they are as on their lower convex hull.
        total: at least the first of `counts` for each layer, and at most the last.
    """
    steps = []
    for layer, row in enumerate(costs):
        hull = _lower_hull(list(zip(counts, row, strict=True)))
        for (fewer, higher), (more, lower) in pairwise(hull):
            steps.append(((lower - higher) / (more - fewer), layer, more - fewer))
    result = [counts[0]] * len(costs)
    left = total - sum(result)
    for slope, layer, number in sorted(steps):  # the slopes of a hull rise
        taken = min(number, left) if slope < 0 else 0
        result[layer] += taken
        left -= taken
    while left:
        open_layers = [layer for layer, number in enumerate(result) if number < counts[-1]]
        for place, layer in enumerate(open_layers):
            taken = min(-(-left // (len(open_layers) - place)), counts[-1] - result[layer])
            result[layer] += taken
            left -= taken
    return result


def scaled(numbers: Sequence[int], total: int) -> list[int]:
    """Whole numbers with the sum `total`, in the proportions of `numbers`."""
    ends = [0, *accumulate(numbers)]
    return [total * end // ends[-1] - total * begin // ends[-1] for begin, end in pairwise(ends)]


def _lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _costs(
    model: PreTrainedModel, modules: Sequence[Any], batches: Iterable[Mapping[str, Any]], counts: Sequence[int]
) -> list[list[float]]:
    sums = {module: torch.zeros(len(counts), dtype=torch.float64, device="cpu") for module in modules}
    calls: dict[Any, list[ObservedAttention]] = defaultdict(list)  # whose gradients come next
    going_back = False

    def observe(seen: ObservedAttention) -> None:
        if seen.module not in sums:
            return
        if going_back or seen.module not in recomputed:
            calls[seen.module].append(seen)
        if not going_back:
            seen.softmax_output.register_hook(partial(add, seen.module))

    @torch.no_grad()
    def add(module: Any, gradient: Tensor) -> None:
        seen = calls[module].pop()
        mechanism, mask = module.linear_attention, seen.inputs.key_mask
        original, gradient = _second_half(seen.softmax_output, mask), _second_half(gradient, mask)
        number = mechanism.num_exact_keys
        try:
            for place, count in enumerate(counts):
                mechanism.num_exact_keys = count
                change = _second_half(module._attend(seen.inputs, None), mask) - original
                sums[module][place] += (gradient * change).sum((-2, -1)).square().sum().item() / 2
        finally:  # without memory for a row, shorter ones are tried
            mechanism.num_exact_keys = number

    with _recomputed_layers(model) as recomputed, observe_attention(model, observe), torch.enable_grad():
        for batch in batches:
            with _embeddings(model, recomputed) as embeddings:
                loss = _sampled_loss(model, batch)
            going_back = True
            torch.autograd.grad(loss, embeddings, allow_unused=True)
            going_back = False
    return [found.tolist() for found in sums.values()]


@contextmanager
def _recomputed_layers(model: PreTrainedModel) -> Iterator[set[Any]]:
    """Inside, layers keep their inputs alone for the backward pass; yields the modules of these layers."""
    layers: list[Any] = []
    inside: set[Any] = set()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer not in inside:
            layers.append(layer)
            inside |= set(layer.modules())
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield inside
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


@contextmanager
def _embeddings(model: PreTrainedModel, recomputed: set[Any]) -> Iterator[list[Tensor]]:
    """Inside, embeddings require gradients, though no weight may; yields them as they are computed."""
    found: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _, __, output: found.append(output.requires_grad_()))
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module not in recomputed
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _sampled_loss(model: PreTrainedModel, batch: Mapping[str, Any]) -> Tensor:
    """The negative logarithm of the probability of what is sampled from the model's outputs.

    A model without logits of tokens has Gaussian outputs, whose means are the last hidden states.
    """
    given = forward_arguments(model, batch)
    generator = torch.Generator(model.device).manual_seed(0)
    head = model.get_output_embeddings()
    if head is None:
        outputs = model.base_model(**given)[0].float()
        return (
            outputs * torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        ).sum()
    part = "decoder_" if "decoder_input_ids" in given else ""
    ids, mask = given[f"{part}input_ids"], given.get(f"{part}attention_mask")
    number = max(1, LOGITS // head.weight.shape[0] // len(ids))
    later = torch.arange(ids.shape[1] // 2, ids.shape[1], dtype=torch.long, device=model.device)
    places = later[torch.randperm(len(later), generator=generator, dtype=torch.long, device=model.device)[:number]]
    if kept := "logits_to_keep" in signature(model.forward).parameters:
        given["logits_to_keep"] = places
    logits = model(**given).logits
    likelihoods = (logits if kept else logits[:, places]).float().log_softmax(-1)
    drawn = likelihoods.detach().exp().flatten(0, 1).multinomial(1, generator=generator)
    losses = -likelihoods.flatten(0, 1).gather(1, drawn).view(len(logits), -1)
    return (losses if mask is None else losses * mask[:, places]).sum()


def _first(batches: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for batch in batches:
        if sum(row["input_ids"].numel() for row in found) >= TOKENS:
            break
        found.append(batch)
    return found


def _second_half(output: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        output = output.masked_fill((mask == 0)[:, :, None, None], 0)
    return output[:, output.shape[1] // 2 :].float()
