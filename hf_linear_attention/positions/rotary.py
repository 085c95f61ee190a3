# SPDX-License-Identifier: Apache-2.0
"""Positions in linear attention: which rotary frequencies a feature map sees, and decay with distance.

A feature map that sees rotary phases learns the phases that occur within the trained length. A frequency that makes a
full turn within that length takes every phase; a slower one takes new phases beyond it. The option `rope` = `partial`
therefore leaves the fast frequencies in queries and keys and undoes the rotation of the slow ones.

The decay is that of ALiBi, with fixed slopes, or a learned one (the option `decay` of causal mechanisms).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..mechanisms.base import LayerShape, MechanismInputs, Rotary
from ..torch_kernels.blocks import is_eager


# The initial half-life, in tokens, if the trained length is unknown.
INITIAL_HALF_LIFE = 2000


class RotaryShift:
    """Moves queries or keys by a number of positions, in the rotary frequencies from the index `first` on.

    The move is a pure rotation: a factor on cos and sin (YaRN) remains in the queries or keys.
    """

    def __init__(self, rotary: Rotary, first: int = 0, like: RotaryShift | None = None) -> None:
        self.rotary, self.first = rotary, first
        self._tables: list[Tensor] = [] if like is None else like._tables  # one for all shifts of a layer

    def frequencies(self, like: Tensor) -> Tensor:
        """Those that move, in float32 on the device of `like`.

        They are made once: a copy from the host would be a step of every layer that no CUDA graph may have.
        """
        kept = self._tables[0] if self._tables else None
        if kept is None or kept.device != like.device:
            with torch.inference_mode(False):  # else no later training may save them
                kept = torch.as_tensor(self.rotary.inverse_frequencies, dtype=torch.float32, device=like.device)
            if is_eager(like):
                self._tables[:] = [kept]
        return kept[self.first :]

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """`x [B, heads, N, D]` moved by `tokens` positions (integers `[B, N]` or `[B, heads, N]`, positive: right)."""
        half, first = len(self.rotary.inverse_frequencies), self.first
        if first >= half:
            return x
        frequencies = self.frequencies(x)
        tokens = tokens if tokens.ndim == 3 else tokens.unsqueeze(1)
        angle = tokens.unsqueeze(-1).to(frequencies.dtype) * frequencies  # [B, 1 or heads, N, frequencies]
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        if self.rotary.is_interleaved:
            kept, pairs, rest = x.tensor_split((2 * first, 2 * half), dim=-1)
            a, b = pairs.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
            moved = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
            return torch.cat((kept, moved.to(x.dtype), rest), dim=-1)
        kept, a, kept_too, b, rest = x.tensor_split((first, half, half + first, 2 * half), dim=-1)
        moved, moved_too = (a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype)
        return torch.cat((kept, moved, kept_too, moved_too, rest), dim=-1)


def needs_rotary(settings: Mapping[str, Any]) -> bool:
    """Whether a mechanism with these settings has to know how its layers rotate queries and keys."""
    clamps = bool(settings.get("num_sinks") or settings.get("num_exact_keys"))
    return (clamps and settings.get("trained_length") is not None) or settings.get("rope", "before_map") != "before_map"


def rotary_of(settings: Mapping[str, Any]) -> dict[int, Rotary]:
    """How each layer in the setting `rotary` rotates queries and keys."""
    return {
        layer: Rotary(tuple(entry["inverse_frequencies"]), entry["pairing"] == "interleaved")
        for entry in settings["rotary"]
        for layer in entry["layers"]
    }


def rotary_shift(
    settings: Mapping[str, Any], shape: LayerShape, frequencies: int | None, like: RotaryShift | None = None
) -> RotaryShift | None:
    """The shift of the frequencies that the feature map must not see; None with `rope` = `before_map`."""
    if settings["rope"] == "before_map" or shape.rotary is None:
        return None
    return RotaryShift(shape.rotary, 0 if settings["rope"] == "none" else frequencies or 0, like)


def without_hidden(shift: RotaryShift | None, inputs: MechanismInputs) -> tuple[Tensor, Tensor]:
    """Queries and keys `[B, heads, N, D]` with the rotary frequencies of `shift` taken back."""
    query, key, positions = inputs.query, inputs.key, inputs.positions
    if shift is None or positions is None:
        return query, key
    return shift(query, -positions), shift(key, -positions)


class AlibiDecay(nn.Module):
    """`log_decay [Hkv]` = -slopes (ALiBi, Press 2022): exp(q·k - slope (i - j)) is exp(q·k) decayed once per token."""

    log_decay: Tensor

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.slopes = slopes
        self.register_buffer("log_decay", torch.empty(len(slopes)))

    def reset_parameters(self) -> None:
        """Fill in the slopes."""
        init.copy_(self.log_decay, -torch.tensor(self.slopes, dtype=torch.float32, device="cpu"))

    def forward(self) -> Tensor:
        """The logarithm of the decay per token, `[Hkv]`."""
        return self.log_decay


class LearnedDecay(nn.Module):
    """`log_decay [Hkv]` = -softplus(rate), below 0: `kernel_attention` multiplies weights by its exp per token."""

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.slopes = slopes
        self.rate = nn.Parameter(torch.empty(len(slopes)))

    def reset_parameters(self) -> None:
        """Choose the rates that give the initial slopes."""
        rates = [math.log(math.expm1(slope)) for slope in self.slopes]
        init.copy_(self.rate, torch.tensor(rates, dtype=torch.float32, device="cpu"))

    def forward(self) -> Tensor:
        """The logarithm of the decay per token, `[Hkv]`."""
        return -F.softplus(self.rate.float() if self.rate.dtype != torch.float64 else self.rate)


def decay_of(settings: Mapping[str, Any], shape: LayerShape) -> LearnedDecay | AlibiDecay | None:
    """The decay per head that the setting `decay` asks for, or else the model's own (ALiBi), or None."""
    if settings.get("decay") == "learned":  # from the slopes of ALiBi, or else a half-life of the trained length
        half_life = settings.get("trained_length") or INITIAL_HALF_LIFE
        return LearnedDecay(shape.alibi_slopes or (math.log(2) / half_life,) * shape.num_key_value_heads)
    return None if settings.get("decay") == "gated" else alibi_of(shape)


def alibi_of(shape: LayerShape) -> AlibiDecay | None:
    """The decay of a model with ALiBi, or None."""
    return None if shape.alibi_slopes is None else AlibiDecay(shape.alibi_slopes)
