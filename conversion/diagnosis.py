"""How hard the attention of each head is to replace: its spectrum, and the error of the untrained mechanism.

The spectrum is that of figure 1 in Linformer (Wang 2020): the share of the k largest singular values in the sum of all
singular values of a softmax attention matrix P `[N, N]`. If it is near 1, a mechanism of rank k can imitate the head.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import progress
from hf_linear_attention.attention.transformers_internals import attention_implementation
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.training.losses.attention_transfer import relative_head_error


logger = logging.getLogger(__name__)


RANKS = (32, 64, 128, 256)
# Each window costs a singular value decomposition per head; more than three hardly change the second decimal.
NUM_WINDOWS = 3


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
        mask = torch.ones(seen.softmax_output.shape[:2], dtype=torch.bool, device=seen.softmax_output.device)
        errors = relative_head_error(seen, mask).sqrt()
        layer = seen.module.linear_attention.shape.layer
        found.setdefault(layer, []).append((cumulative_shares(seen.softmax_weights).mean(0), errors.mean(0)))

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
    columns = [[statistics.fmean(layer["spectrum"][str(rank)]) for layer in diagnosis["layers"]] for rank in ranks]
    columns.append([statistics.fmean(layer["error"]) for layer in diagnosis["layers"]])
    worst = [max(layer["error"]) for layer in diagnosis["layers"]]
    lines = [
        f"Attention on {count} input{'s' * (count > 1)} of {diagnosis['length']} tokens ({diagnosis['inputs']}), "
        "mean over heads: the share of the",
        f"largest singular values in their sum, and the error of the heads' outputs with untrained {mechanisms}",
        "",
        _row("layer", [*(f"largest {rank}" for rank in ranks), "error", "worst head"]),
    ]
    for number, layer in enumerate(diagnosis["layers"]):
        lines.append(_row(str(layer["layer"]), [f"{column[number]:.2f}" for column in (*columns, worst)]))
    means = [*map(statistics.fmean, columns), max(worst)]
    return "\n".join([*lines, _row("all", [f"{mean:.2f}" for mean in means])])


def _row(label: str, cells: Sequence[str]) -> str:
    return f"  {label:<5}" + "".join(f"{cell:>13}" for cell in cells)
