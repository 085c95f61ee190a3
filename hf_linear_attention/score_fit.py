"""Scores of exact keys from one pass over some text, in closed form and without gradients.

A key should be kept if an output would change without it. Without a key of weight w and value v, an output o is
(o - w v) / (1 - w): it moves by w / (1 - w) times the distance of v from o. So a score is fitted to the logarithm of
that, with the largest w that the key gets from any query of its heads beyond the window, and the mean value of the row
for o; large ones count more (EMPHASIS). Locret (Huang 2024, arXiv:2410.01805) trains on a maximum, too; KVzap
(arXiv:2601.07891) fits a ridge regression of the hidden state to the logarithm of weights times norms of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .mechanisms.base import MechanismInputs, scaled
from .mechanisms.hybrid import SLOPE_TOKENS
from .mechanisms.window import within_sequences


# Of the mean variance of the hidden state's numbers. On Qwen2.5-Coder-0.5B, where 16,384 tokens are 18 for each weight,
# 1e-1 is best of 1e-3, 1e-2, 1e-1 and 1 (benchmarks/results/real.md).
RIDGE = 1e-1
SMALLEST = -30.0  # logarithms of weights below are as good as this one
REST = 1e-6  # the smallest 1 - w
# Of logarithms above LARGE, what is above counts 1 + EMPHASIS times, because these keys matter most. Nothing trained,
# Qwen2.5-Coder-0.5B has 1.964 nats with weights alone, 1.945 with w and distances, 1.946 with w / (1 - w) and
# distances, and 1.964 with these without emphasis (512 tokens, 353 keys in each layer, two rows, positions 2,048 to
# 4,095; original 1.769); the model of `make demo` knows 63, 85, 98 and 93 % of what stood 256 to 511 tokens back.
LARGE, EMPHASIS = -2.0, 4.0
# That are alive together, but those of 16 queries at least: malloc of glibc gives 32 MB at most without new pages, for
# which blocks of twice as many take half as long again.
LOGITS = 2**23
AGES = 8
LONGEST = 0.5  # of a row


@contextmanager
def hidden_states_as_gates(mechanisms: Iterable[Any]) -> Iterator[None]:
    """Inside, the gates that mechanisms get are the hidden states from which scores are made, `[B, N, E]`."""
    mechanisms = list(mechanisms)
    for mechanism in mechanisms:
        mechanism.gates = scaled
    try:
        yield
    finally:
        for mechanism in mechanisms:
            del mechanism.gates


@contextmanager
def newest_keys(mechanisms: Iterable[Any]) -> Iterator[None]:
    """Inside, the exact keys are the newest ones behind the window, as before scores are fitted."""
    parameters = [x for mechanism in mechanisms for x in (mechanism.score_projection, mechanism.score_slope)]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.fill_(float(parameter.ndim == 1))
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


@dataclass
class ScoreMoments:
    """Sums over keys and ages of one layer, in float64: of features f = (hidden state, age, 1), and of targets y."""

    ff: Tensor  # [E + 2, E + 2]
    fy: Tensor  # [E + 2, Hkv]
    yy: Tensor  # [Hkv]

    @classmethod
    def nothing(cls, mechanism: Any) -> ScoreMoments:
        """Those of no keys."""
        heads, size = mechanism.score_projection.shape
        shapes = ((size + 2, size + 2), (size + 2, heads), (heads,))
        return cls(*(mechanism.score_projection.new_zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, inputs: MechanismInputs, mechanism: Any) -> None:
        """Add the keys of one call of the layer."""
        window, length = mechanism.window_size, inputs.query.shape[2]
        ages = torch.linspace(
            window, max(window, length * LONGEST), AGES, dtype=torch.float32, device=inputs.query.device
        ).long()
        target, counted = log_largest_weights(inputs, ages, mechanism.num_sinks)
        target = target - (-torch.expm1(target)).clamp(min=REST).log()  # w / (1 - w)
        target = target + log_distances(inputs.value, inputs.attention_mask).unsqueeze(-1)
        target = target + EMPHASIS * (target - LARGE).clamp(min=0)
        hidden, y = (
            cast(Tensor, inputs.gates).flatten(0, 1).float(),
            target.permute(0, 2, 3, 1).flatten(0, 1),
        )  # [T, E], [T, A, Hkv]
        number, age = counted.flatten(0, 1).float(), ages.float() / SLOPE_TOKENS
        few = torch.stack((number @ age, number.sum(1)), dim=1)  # [T, 2], the sums of (age, 1)
        y = y * number.unsqueeze(-1)
        size = hidden.shape[1]
        self.ff[:size, :size] += hidden.T @ (hidden * few[:, 1:])
        cross = (hidden.T @ few).double()
        self.ff[:size, size:] += cross
        self.ff[size:, :size] += cross.T
        total, linear = number.sum(0).double(), age.double()
        both = torch.stack((linear, torch.ones_like(linear)))
        self.ff[size:, size:] += both * total @ both.T
        self.fy[:size] += hidden.T @ y.sum(1)
        self.fy[size:] += both @ y.sum(0).double()
        self.yy += y.double().square().sum((0, 1))

    def fit(self, mechanism: Any) -> float | None:
        """Set the scores of the mechanism; returns the share of the variance that they explain, over its heads.

        If no key was behind the window for enough queries to be fair (`log_largest_weights`), scores stay as they are,
        and None is returned.
        """
        if not self.ff[-1, -1]:
            return None
        weight, slope, share = self.solved()
        mechanism.score_projection.copy_(weight)
        mechanism.score_slope.copy_(slope)
        return share.mean().item()

    def solved(self) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of hidden states `[Hkv, E]` and of positions `[Hkv]`, and the share of variance they explain."""
        size, count = self.ff.shape[0] - 2, self.ff[-1, -1]
        ff, fy, yy = self.ff / count, self.fy / count, self.yy / count
        mean_y, variance = fy[-1], ff.diagonal()[:size] - ff[:size, -1].square()
        damped = ff.clone()
        damped.diagonal()[:size] += RIDGE * variance.mean().clamp(min=1e-12)
        weight = torch.linalg.lstsq(damped, fy).solution
        left = (weight * (ff @ weight - 2 * fy)).sum(0) + yy
        return weight[:size].T, -weight[size], 1 - left / (yy - mean_y.square()).clamp(min=1e-12)


def log_distances(value: Tensor, mask: Tensor | None) -> Tensor:
    """The logarithm of the distance of each value `[B, Hkv, N, D]` from the mean value of its row, `[B, Hkv, N]`.

    The mean of the logarithms of a row is 0: distances are over their geometric mean.
    """
    value = value.float()
    real = torch.ones_like(value[:, 0, :, 0]) if mask is None else (mask > 0).float()
    share = (real / real.sum(1, keepdim=True).clamp(min=1)).unsqueeze(1)
    distance = (value - (share.unsqueeze(-1) * value).sum(2, keepdim=True)).norm(dim=-1).clamp(min=1e-12).log()
    return distance - (share * distance).sum(2, keepdim=True)


def log_largest_weights(inputs: MechanismInputs, ages: Tensor, num_sinks: int) -> tuple[Tensor, Tensor]:
    """The logarithm of the largest softmax weight that each key gets at and after each age, and which are fair.

    Args:
        ages: `[A]`, distances of query and key in tokens.

    Returns:
        `[B, Hkv, N, A]`, over all queries of the heads that share the key; and bool `[B, N, A]`: those of no sinks that
        at least a quarter as many queries see as the row has tokens, because fewer queries look for less.
    """
    query, key, mask = inputs.query, inputs.key.float(), inputs.attention_mask
    (batch, heads, length), groups = key.shape[:3], query.shape[1] // key.shape[1]
    numbers = torch.ones(batch, length, dtype=torch.long, device=key.device) if mask is None else mask.long()
    place = (within_sequences(numbers)[0] if inputs.is_packed else numbers.cumsum(1)) - 1
    # Never falls, and differs by as much as `place` does within a sequence.
    at = torch.arange(length, dtype=torch.long, device=key.device).expand(batch, -1) if inputs.is_packed else place
    largest = key.new_full((batch, heads, len(ages), length), SMALLEST)
    step = max(16, LOGITS // max(1, query.shape[:3].numel()))
    for first in range(0, length, step):
        end = min(first + step, length)  # no query of these sees a later key
        rows = slice(first, end)
        queries = query[:, :, rows].float().unflatten(1, (heads, groups)) * inputs.scaling
        logits = (queries.flatten(2, 3) @ key[:, :, :end].transpose(-1, -2)).unflatten(2, (groups, -1))
        hidden = numbers[:, rows, None] != numbers[:, None, :end]
        hidden |= (numbers == 0)[:, rows, None]
        later = torch.ones(end - first, end - first, dtype=torch.bool, device=key.device).triu(1)
        hidden[:, :, rows].logical_or_(later)
        logits.masked_fill_(hidden[:, None, None], torch.finfo(key.dtype).min)
        best = logits.log_softmax(dim=-1).amax(dim=2)  # [B, Hkv, C, N]
        best.masked_fill_(hidden[:, None], SMALLEST)
        of_all = best.amax(dim=2)
        for number, age in enumerate(ages.tolist()):
            # The keys up to `old` are of this age for all queries of the block, and those from `young` on for none.
            old = int((at[:, :end] <= at[:, first, None] - age).sum(1).min())
            young = int((at[:, :end] <= at[:, end - 1, None] - age).sum(1).max())
            is_younger = at[:, rows, None] - at[:, None, old:young] < age
            between = best[..., old:young].masked_fill(is_younger[:, None], SMALLEST).amax(dim=2)
            new = torch.cat((of_all[..., :old], between), dim=-1)
            torch.maximum(largest[:, :, number, :young], new, out=largest[:, :, number, :young])
    together = (numbers.unsqueeze(-1) == numbers.unsqueeze(-2)).sum(-1) if inputs.is_packed else numbers.sum(1, True)
    seen = (together - place).unsqueeze(-1) - ages
    fair = (seen >= max(1, length // 4)) & ((numbers > 0) & (place >= num_sinks)).unsqueeze(-1)
    return largest.transpose(2, 3), fair
