"""Figures of single heads: how far each is from its softmax attention, and after how many tokens it forgets.

`head_figures` are measured in every conversion, on one built-in input. `diagnose` (`--spectrum`) also computes the
spectrum of figure 1 in Linformer (Wang 2020): the share of the k largest singular values in the sum of all singular
values of a softmax attention matrix P `[N, N]`. If it is near 1, a mechanism of rank k can imitate the head.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import progress
from hf_linear_attention.attention.transformers_internals import attention_implementation
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.samples import built_in_text, samples_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.positions.rotary import LearnedDecay
from hf_linear_attention.training.losses.objectives import relative_head_error


logger = logging.getLogger(__name__)


MOST_TOKENS = 512
RANKS = (32, 64, 128, 256)
# Each window costs a singular value decomposition per head; more than three hardly change the second decimal.
NUM_WINDOWS = 3


@torch.no_grad()
def head_figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """The `inputs` in words, and `layers`: of each the `error` and, with a learned decay, the `half_life` of its heads.

    An error is |mechanism - softmax| / |softmax| of a head's output, on the same queries, keys and values; it is left
    out where attention cannot be observed (ALiBi families). Half-lives are in tokens, of the heads of keys and values.

    Returns:
        None for an encoder-decoder, in which two layers have the same number, or if there is nothing to report.
    """
    if model.config.is_encoder_decoder:
        return None
    inputs, name = one_input(model, tokenizer)
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = inputs.unsqueeze(1)
    layers: dict[int, dict[str, Any]] = {}
    for module in linear_attention_modules(model).values():
        mechanism: Any = module.linear_attention
        layers[mechanism.shape.layer] = {"layer": mechanism.shape.layer}
        if isinstance(decay := getattr(mechanism, "decay", None), LearnedDecay):
            layers[mechanism.shape.layer]["half_life"] = [math.log(2) / -rate for rate in decay().tolist()]

    def look(seen: ObservedAttention) -> None:
        errors = _errors(seen)
        if torch.isfinite(errors).all():
            layers[seen.module.linear_attention.shape.layer]["error"] = errors.tolist()

    with contextlib.suppress(NotImplementedError), observe_attention(model, look):
        model(**{model.main_input_name: inputs.to(model.device)})
    found = [layer for _, layer in sorted(layers.items()) if len(layer) > 1]
    return {"inputs": name, "layers": found} if found else None


def _errors(seen: ObservedAttention) -> torch.Tensor:
    """`[H]`: the errors of the heads on inputs without padding, relative to the output of softmax attention."""
    mask = torch.ones(seen.softmax_output.shape[:2], dtype=torch.bool, device=seen.softmax_output.device)
    return relative_head_error(seen, mask).sqrt().mean(0)


def one_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[torch.Tensor, str]:
    """One input without padding, and its name: all built-in sentences together, so that it is longer than a window."""
    samples = samples_of(model, tokenizer)
    if model.main_input_name != "input_ids":
        name = "a random image" if model.main_input_name == "pixel_values" else "random sound"
        return samples[0].to(model.dtype), name
    ids = torch.cat(samples, dim=1)[:, : min(MOST_TOKENS, (max_length_of(model.config) or MOST_TOKENS) * 3 // 4)]
    name = "random tokens" if built_in_text(model.config, tokenizer) is None else "the built-in sentences"
    return ids, f"{name} ({ids.shape[1]} tokens)"


@dataclass(frozen=True)
class LayerDiagnosis:
    """Means over the inputs, for each of the H heads of one layer.

    Args:
        layer: the number of the layer.
        shares: `[H, N]`, the shares of the largest 1, 2, ... N singular values in the sum of all.
        errors: `[H]`, the error of the mechanism's output relative to the output of softmax attention, on the same
            queries, keys and values (Frobenius norms).
    """

    layer: int
    shares: torch.Tensor
    errors: torch.Tensor


@torch.no_grad()
def diagnose(model: PreTrainedModel, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[LayerDiagnosis]:
    """Diagnose every converted layer on inputs of the original model.

    The attention matrices of only one layer at a time are in memory.

    Args:
        inputs: keyword arguments of the base model; all inputs have the same length and no padding.

    Raises:
        NotImplementedError: for a model whose attention cannot be observed (ALiBi families).
    """
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def look(seen: ObservedAttention) -> None:
        if seen.softmax_weights is None:
            raise NotImplementedError(
                f"{type(seen.module).stock_class.__name__} does not compute a matrix of attention weights."
            )
        layer = seen.module.linear_attention.shape.layer
        found.setdefault(layer, []).append((cumulative_shares(seen.softmax_weights).mean(0), _errors(seen)))

    with _eager(model), observe_attention(model, look):
        for batch in progress(inputs, "diagnosing"):
            model.base_model(**{name: value.to(model.device) for name, value in batch.items()})
    means = {layer: [torch.stack(part).mean(dim=0) for part in zip(*parts)] for layer, parts in found.items()}
    return [LayerDiagnosis(layer, shares, errors) for layer, (shares, errors) in means.items()]


def cumulative_shares(weights: torch.Tensor) -> torch.Tensor:
    """`[..., N, S]` -> `[..., min(N, S)]`: sums of the largest singular values, relative to the sum of all."""
    values = torch.linalg.svdvals(weights.float())
    return values.cumsum(dim=-1) / values.sum(dim=-1, keepdim=True)


@contextlib.contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the stock code of softmax layers computes the matrix of attention weights."""
    before = attention_implementation(model.config)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def diagnose_on(model: PreTrainedModel, inputs: RealInputs) -> dict[str, Any]:
    """The entry of conversion_report.json: the inputs, the `ranks` below their `length`, and the figures per layer.

    Raises:
        UsageError: if the attention of this model cannot be observed.
    """
    windows = inputs.windows(NUM_WINDOWS)
    logger.info("diagnosing on %s", inputs.name)
    try:
        layers = diagnose(model, windows)
    except NotImplementedError as error:
        raise UsageError(f"`--spectrum`: {error}") from error
    length = layers[0].shares.shape[-1]
    ranks = [rank for rank in RANKS if rank < length]
    return {
        "inputs": inputs.name,
        "num_inputs": len(windows),
        "length": length,
        "ranks": ranks,
        "layers": [
            {
                "layer": found.layer,
                "spectrum": {str(rank): found.shares[:, rank - 1].tolist() for rank in ranks},
                "error": found.errors.tolist(),
            }
            for found in layers
        ],
    }


def describe_diagnosis(diagnosis: Mapping[str, Any], mechanisms: str) -> str:
    """The table that the command prints, with means over heads and the error of the worst head.

    `mechanisms` is `Plan.mechanisms`.
    """
    count, ranks = diagnosis["num_inputs"], diagnosis["ranks"]
    rows = [
        [
            *(statistics.fmean(layer["spectrum"][str(rank)]) for rank in ranks),
            statistics.fmean(layer["error"]),
            max(layer["error"]),
        ]
        for layer in diagnosis["layers"]
    ]
    *means, worst = zip(*rows)
    lines = [
        f"Attention on {count} input{'s' * (count > 1)} of {diagnosis['length']} tokens ({diagnosis['inputs']}), "
        "mean over heads: the share of the",
        f"largest singular values in their sum, and the error of the heads' outputs with untrained {mechanisms}",
        "",
        _row("layer", [*(f"largest {rank}" for rank in ranks), "error", "worst head"]),
        *(_row(str(layer["layer"]), [f"{x:.2f}" for x in row]) for layer, row in zip(diagnosis["layers"], rows)),
        _row("all", [f"{x:.2f}" for x in (*map(statistics.fmean, means), max(worst))]),
    ]
    return "\n".join(lines)


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<5}" + "".join(f"{cell:>13}" for cell in cells)
