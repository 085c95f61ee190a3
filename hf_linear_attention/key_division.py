"""How many exact keys each layer gets, of as many as all layers have in common: `divide_exact_keys`.

Layers differ far more than scores do: in Qwen2.5-Coder-0.5B with 353 exact keys in each, the errors of the layers'
outputs range from .1 to 28 %. So keys move from layers that need few to those that need many, by what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention_observation import ObservedAttention, observe_batches
from .configuration_linear_attention import entries_of, num_attention_layers
from .modeling_linear_attention import linear_attention_modules


# The numbers of keys that are tried, over the mean number; a layer gets at most the last.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
TOKENS = 4096  # on which errors are measured, in whole rows


@torch.no_grad()
def divide_exact_keys(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """Divide the exact keys of the layers anew between them, in place; the sum stays, and so do the bytes of the state.

    Each layer computes its output with several numbers of keys, in the second half of the rows, from the inputs that it
    has in the original model. The division has the smallest sum of the squared errors, each over the squared norm of
    the original output, among those on the lower convex hulls of the errors. So scores should be fitted before
    (`calibrate`).

    Args:
        batches: as in `calibrate`, of which the first with some thousand tokens together are read.

    Returns:
        The number of exact keys of each layer, 0 for layers without; empty where fewer than two layers have any.
    """
    modules = [m for m in linear_attention_modules(model).values() if getattr(m.linear_attention, "num_exact_keys", 0)]
    if len({module.linear_attention.shape.layer for module in modules}) < 2:
        return []
    before = [module.linear_attention.num_exact_keys for module in modules]
    mean = sum(before) / len(before)
    counts = sorted({max(1, round(share * mean)) for share in SHARES})
    numbers = divided(_errors(model, modules, batches, counts), counts, sum(before))
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


def divided(errors: Sequence[Sequence[float]], counts: Sequence[int], total: int) -> list[int]:
    """Numbers with the sum `total`, at most the last of `counts` each, for which the sum of the errors is smallest.

    Keys that lower no error are divided evenly, such as all where rows were too short for a key to be far.

    Args:
        errors: of each layer with each of `counts`, which rise; between these they are as on their lower convex hull.
        total: at least the first of `counts` for each layer, and at most the last.
    """
    steps = []
    for layer, row in enumerate(errors):
        hull = _lower_hull(list(zip(counts, row, strict=True)))
        for (fewer, more_error), (more, less_error) in pairwise(hull):
            steps.append(((less_error - more_error) / (more - fewer), layer, more - fewer))
    result = [counts[0]] * len(errors)
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


def _lower_hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    return hull


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _errors(
    model: PreTrainedModel, modules: Sequence[Any], batches: Iterable[Mapping[str, Any]], counts: Sequence[int]
) -> list[list[float]]:
    sums = {module: torch.zeros(len(counts) + 1, dtype=torch.float64, device="cpu") for module in modules}

    def add(seen: ObservedAttention) -> None:
        if seen.module not in sums:
            return
        mechanism, mask = seen.module.linear_attention, seen.inputs.key_mask
        original = _second_half(seen.softmax_output, mask)
        number = mechanism.num_exact_keys
        for place, count in enumerate(counts):
            mechanism.num_exact_keys = count
            output = _second_half(seen.module._attend(seen.inputs, None), mask)
            sums[seen.module][place] += (output - original).square().sum().item()
        mechanism.num_exact_keys = number
        sums[seen.module][-1] += original.square().sum().item()

    observe_batches(model, add, _first(batches))
    return [(found[:-1] / found[-1].clamp(min=1e-30)).tolist() for found in sums.values()]


def _first(batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    seen = 0
    for batch in batches:
        if seen >= TOKENS:
            return
        seen += batch["input_ids"].numel()
        yield batch


def _second_half(output: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        output = output.masked_fill((mask == 0)[:, :, None, None], 0)
    return output[:, output.shape[1] // 2 :].float()
