# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of stock attention, observed when a model is converted and then stored in its config.

transformers passes `position_embeddings` = (cos, sin) to an attention layer, which computes cos x + sin J x with
J^2 = -1. To find out how J pairs the channels, the layer's own forward runs with (1, 0), (0, 1) and (0, a different
number per column). The frequencies come from the model's own rotary embedding.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .attention.architectures import layer_type, stock_class_of
from .attention.transformers_internals import ROTARY_ARGUMENTS
from .attention_calls import NotObservedError, attention_call, cos_and_sin, rotary_widths
from .configuration_linear_attention import max_length_of


@dataclass(frozen=True)
class RotaryPairing:
    """How a layer rotates the first r channels of queries and keys.

    Args:
        pairing: which channels form a pair: `half` (c and c + r / 2) or `interleaved` (2 c and 2 c + 1).
        angles: the column of cos and sin that rotates channel c: `channel` (c), `half` (c modulo r / 2) or `pair`
            (c // 2).
        channels_per_column: the number of rotated channels per column of cos and sin, 1 or 2.
        direction: 1, or -1 if the pairs turn in the opposite direction, as in nanochat.
    """

    pairing: str
    angles: str
    channels_per_column: int
    direction: int = 1

    def by_channel(self, x: Tensor) -> Tensor:
        """cos or sin `[..., columns]` -> `[..., r]`, one value per rotated channel."""
        num_pairs = x.shape[-1] * self.channels_per_column // 2
        if self.angles == "channel":
            return x
        x = x[..., :num_pairs]
        return torch.cat((x, x), dim=-1) if self.angles == "half" else x.repeat_interleave(2, dim=-1)

    def turned(self, x: Tensor) -> Tensor:
        """J x for `x [..., r]`: every pair (a, b) becomes (-b, a), or (b, -a) in the opposite direction."""
        if self.pairing == "half":
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        else:
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return turned if self.direction == 1 else -turned


# Pairings found so far, by everything in which two layers of one class could differ.
PAIRINGS: dict[tuple, RotaryPairing | str | None] = {}


def rotary_pairing(module: nn.Module) -> RotaryPairing | None:
    """How this attention module pairs the channels; None if it does not rotate them.

    ValueError if it rotates them in a way that `RotaryPairing` cannot describe.
    """
    stock_class = stock_class_of(module)
    key = (stock_class, layer_type(module), _plain_values(module), _plain_values(module.config))
    if key not in PAIRINGS:
        with torch.device("cpu"):  # the model may be built on meta
            PAIRINGS[key] = _observed_pairing(module, stock_class)
    pairing = PAIRINGS[key]
    if isinstance(pairing, str):
        raise ValueError(f"The rotary positions of {stock_class.__name__} {pairing}.")
    return pairing


def _plain_values(owner: Any) -> tuple:
    values = vars(owner).items()
    return tuple(item for item in values if isinstance(item[1], (bool, int, float, str)) and item[0] != "layer_idx")


def _observed_pairing(module: nn.Module, stock_class: type) -> RotaryPairing | str | None:
    """The pairing, None if there is no rotation, or a description of what `RotaryPairing` cannot describe."""
    for width in rotary_widths(module):
        columns = torch.arange(1, width + 1, dtype=torch.long, device="cpu")
        pairs = [cos_and_sin(cos, sin, width) for cos, sin in ((1, 0), (0, 1), (0, columns))]
        try:
            calls = [attention_call(module, stock_class, [pair]) for pair in pairs]
        except NotObservedError:  # cos and sin have another width
            continue
        if None in calls:
            break
        sides = ([getattr(call, side)[0, 0, -1] for call in calls] for side in ("query", "key"))
        found = {_pairing_of(plain, turned, scaled, width) for plain, turned, scaled in sides}
        return found.pop() if len(found) == 1 else "differ between queries and keys"
    return "are not a pair of cos and sin"


def _pairing_of(plain: Tensor, turned: Tensor, scaled: Tensor, width: int) -> RotaryPairing | str | None:
    """The pairing that one head `[D]` shows with (cos, sin) = (1, 0), (0, 1) and (0, column number from 1)."""
    is_rotated = ~torch.isclose(turned, plain, rtol=1e-5)  # a norm after the rotation causes rounding
    rotated = int(is_rotated.sum())
    if not rotated:
        return None
    if not is_rotated[:rotated].all() or rotated not in (width, 2 * width):
        return "are not in the first channels of a head"
    channel = torch.arange(rotated, dtype=torch.long, device="cpu")
    columns = (scaled / turned)[:rotated]
    columns = (columns / columns.min()).round().long() - 1
    layouts = {"channel": channel, "half": channel % (rotated // 2), "pair": channel // 2}
    for pairing, (angles, layout), direction in itertools.product(("half", "interleaved"), layouts.items(), (1, -1)):
        found = RotaryPairing(pairing, angles, rotated // width, direction)
        if torch.allclose(found.turned(plain[:rotated]), turned[:rotated]) and torch.equal(columns, layout):
            return found
    return "pair the channels in an unknown way"


def observed_rotary(model: PreTrainedModel, modules: Mapping[int, nn.Module]) -> list[dict[str, Any]]:
    """The setting `rotary` for these attention modules, by layer: one entry for all layers with equal positions.

    ValueError for rotary positions that `positions.RotaryShift` cannot move, or that change with the input.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers: dict[tuple[str, tuple[float, ...]], list[int]] = {}
    for layer, module in modules.items():
        try:
            found = _rotary_of(model, names[id(module)], module)
        except (AttributeError, LookupError, RuntimeError, TypeError) as error:  # of an untested stock embedding
            name = stock_class_of(module).__name__
            raise ValueError(f"the rotary positions of {name} cannot be computed alone: {error!r}") from error
        if found is not None:
            layers.setdefault(found, []).append(layer)
    return [
        {"layers": numbers, "pairing": pairing, "inverse_frequencies": list(frequencies)}
        for (pairing, frequencies), numbers in layers.items()
    ]


def _rotary_of(model: PreTrainedModel, name: str, module: Any) -> tuple[str, tuple[float, ...]] | None:
    """The pairing and the radians per token for each pair of channels; None for a layer without rotary positions."""
    takes_positions = "position_embeddings" in inspect.signature(stock_class_of(module).forward).parameters
    pairing = rotary_pairing(module) if takes_positions else None
    if pairing is None:
        return None
    embedding = _embedding_of(model, name)
    far = 8 * (max_length_of(module.config) or 0)
    with torch.device("cpu"):  # the model may be built on meta
        angles, norms = _angles_and_norms(embedding, module, pairing, [0, 1])
        long_angles, long_norms = _angles_and_norms(embedding, module, pairing, [0, 1, far])
        if not (torch.equal(angles, long_angles) and torch.equal(norms, long_norms)):
            raise ValueError(
                f"the rotary frequencies of {stock_class_of(module).__name__} change with the length of the input "
                "(`dynamic`, `longrope`); use `rope` = `before_map`."
            )
        frequencies = _as_stored(angles, embedding) * pairing.direction
        return pairing.pairing, tuple(frequencies.tolist())


def _as_stored(angles: Tensor, embedding: nn.Module) -> Tensor:
    """The frequencies as the embedding stores them: those from angles have a rounding error that positions multiply."""
    for stored in _on_cpu(embedding).buffers():
        if stored.shape == angles.shape and torch.allclose(stored, angles, rtol=1e-5, atol=0):
            return stored
    return angles


def _embedding_of(model: PreTrainedModel, name: str) -> nn.Module:
    """The rotary embedding in the smallest part of the model that contains the attention of this name."""
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        children = model.get_submodule(".".join(parts[:depth])).children()
        found = [child for child in children if "rotary" in type(child).__name__.lower()]
        if len(found) == 1 and set(inspect.signature(found[0].forward).parameters) >= ROTARY_ARGUMENTS:
            return found[0]
    raise ValueError(f"{type(model).__name__} has no rotary embedding of token positions for `{name}`.")


def _angles_and_norms(
    embedding: nn.Module, module: nn.Module, pairing: RotaryPairing, positions: list[int]
) -> tuple[Tensor, Tensor]:
    """The angle and the length of (cos, sin) for each pair of channels at position 1."""
    embedding = _on_cpu(embedding)
    takes_type = "layer_type" in inspect.signature(embedding.forward).parameters
    arguments = {"layer_type": layer_type(module)} if takes_type else {}
    ids = torch.tensor([positions], dtype=torch.long, device="cpu")
    like = torch.zeros(1, dtype=torch.float32, device="cpu")
    cos, sin = (pairing.by_channel(x)[0, 1] for x in embedding(like, ids, **arguments))
    cos, sin = (x[: x.shape[0] // 2] if pairing.pairing == "half" else x[::2] for x in (cos, sin))
    return torch.atan2(sin, cos), torch.hypot(cos, sin)


def _on_cpu(embedding: nn.Module) -> nn.Module:
    """A float32 copy on the CPU, also of an embedding on meta; some embeddings store frequencies of the last input."""
    if not any(buffer.is_meta for buffer in embedding.buffers()):
        return copy.deepcopy(embedding).to("cpu", torch.float32)
    with torch.device("cpu"):
        try:
            return type(embedding)(config=embedding.config).to(torch.float32)
        except (AttributeError, TypeError):
            raise ValueError(f"{type(embedding).__name__} cannot be built from its config alone.") from None
