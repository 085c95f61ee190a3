# SPDX-License-Identifier: Apache-2.0
"""Softmax attention in some query heads of a linear layer: the setting `softmax_heads`, a list of (layer, head).

    head   0 1 | 2 3        with heads 2 and 3 in one key/value group, and head 3 kept:
           S Z | S Z        every head has the constant state of the mechanism
               |   keys     and this group also keeps its keys and values, which grow with the length

The output of the chosen heads is exact softmax attention to all keys, and that of the others is the mechanism's. The
chosen heads see the rotary positions that the setting `rope` hides from the others. The mechanism keeps its parameters
and their names, so a head can be given softmax attention after training, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from ..mechanisms.base import AttentionMechanism, MechanismInputs, State
from ..torch_kernels.blocks import with_dtype


class KeptKeys(NamedTuple):
    """The keys of G key/value groups, from the first token on."""

    key: torch.Tensor  # [B, G, T, D]
    value: torch.Tensor  # [B, G, T, D]
    mask: torch.Tensor | None  # bool [B, T], False at padding; None if all keys are real


NUM_KEPT = len(KeptKeys._fields)
SIGNATURE = " with softmax heads "


class SoftmaxHeads(AttentionMechanism):
    """Mixed in before a mechanism; `softmax_heads` are its query heads that compute softmax attention.

    The state is that of the mechanism, followed by `KeptKeys`.
    """

    num_growing = NUM_KEPT
    mechanism_class: ClassVar[type[AttentionMechanism]]
    softmax_heads: tuple[int, ...] = ()

    @property
    def softmax_groups(self) -> list[int]:
        """The key/value heads that the softmax heads read."""
        size = self.shape.num_heads // self.shape.num_key_value_heads
        return sorted({head // size for head in self.softmax_heads})

    def prepare(self, inputs: MechanismInputs) -> MechanismInputs:
        """Change nothing yet, because the softmax heads see all rotary positions; see `_of_mechanism`."""
        return inputs

    def _of_mechanism(self, inputs: MechanismInputs) -> MechanismInputs:
        """What the mechanism sees, without the rotary frequencies that are hidden from it."""
        return super().prepare(inputs) if self.needs_positions else inputs

    def calibrate(self, inputs: MechanismInputs) -> None:
        """Fit constants to what the mechanism sees."""
        super().calibrate(self._of_mechanism(inputs))

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[torch.Tensor, State | None]:
        """The output of the mechanism, in which the softmax heads are replaced; see `AttentionMechanism.forward`."""
        output, new = super().forward(self._of_mechanism(inputs), None if state is None else state[:-NUM_KEPT])
        kept: Any = self._extended(inputs, state)
        if self.softmax_heads:
            size = self.shape.num_heads // self.shape.num_key_value_heads
            groups = self.softmax_groups
            places = [groups.index(head // size) for head in self.softmax_heads]
            exact = exact_attention(
                inputs.query[:, list(self.softmax_heads)],
                kept.key[:, places],
                kept.value[:, places],
                kept.mask,
                inputs.scaling,
            )
            heads = torch.tensor(self.softmax_heads, dtype=torch.long, device=output.device)
            output = output.index_copy(2, heads, exact.transpose(1, 2).to(output.dtype))
        return output, None if new is None else (*new, *kept)

    def absorb(self, inputs: MechanismInputs, state: State | None = None) -> State | None:
        """The state after these keys, without an output."""
        if self.mechanism_class.absorb is AttentionMechanism.absorb:  # it calls `forward`
            return super().absorb(inputs, state)
        own = super().absorb(self._of_mechanism(inputs), None if state is None else state[:-NUM_KEPT])
        kept: Any = self._extended(inputs, state)
        return None if own is None else (*own, *kept)

    def _extended(self, inputs: MechanismInputs, state: State | None) -> KeptKeys:
        """The kept keys of `state`, followed by the new ones."""
        if inputs.is_packed:
            raise NotImplementedError(
                "Heads with softmax attention (`softmax_heads`) do not support packed sequences inside a graph "
                "(torch.compile, torch.export); put each sequence into its own row of the batch."
            )
        groups, mask = self.softmax_groups, inputs.attention_mask
        key, value = inputs.key[:, groups], inputs.value[:, groups]
        if state is None:
            return KeptKeys(key, value, mask)
        old = KeptKeys(*state[-NUM_KEPT:])
        if old.mask is not None or mask is not None:
            masks = (
                torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if given is None else given
                for x, given in ((old.key, old.mask), (key, mask))
            )
            mask = torch.cat(tuple(masks), dim=1)
        return KeptKeys(torch.cat((old.key, key), dim=2), torch.cat((old.value, value), dim=2), mask)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickle writes: the class of the mechanism, from which this class is made again, and the attributes."""
        return (_empty, (self.mechanism_class,), *object.__reduce_ex__(self, 2)[2:])


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Causal softmax attention of the newest N tokens, `[B, h, N, D]`; 0 for a query that sees no key.

    Under autocast, rotary positions leave queries and keys in float32 beside values in bfloat16.

    Args:
        query: `[B, h, N, D]`.
        key, value: `[B, h, T, D]`, of which the last N are those of the queries.
        mask: bool `[B, T]`, False at padding, or None.
        scaling: the factor of q·k.
    """
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = (with_dtype(x, wide) for x in (query, key, value))
    new, total = query.shape[2], key.shape[2]
    if mask is None and new in (1, total):
        return F.scaled_dot_product_attention(query, key, value, is_causal=new > 1, scale=scaling)
    place = torch.arange(total, dtype=torch.long, device=query.device)
    visible = (place <= place[total - new :, None])[None, None]
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    visible = visible & mask[:, None, None]
    sees = visible.any(dim=-1, keepdim=True)  # softmax over no key at all would be NaN
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible | ~sees, scale=scaling)
    return output * sees


_CLASSES: dict[type, Any] = {}


def _class_of(mechanism_class: type[AttentionMechanism]) -> Any:
    if mechanism_class not in _CLASSES:
        name = f"{mechanism_class.__name__}WithSoftmaxHeads"
        about = {"__module__": __name__, "__doc__": mechanism_class.__doc__, "mechanism_class": mechanism_class}
        _CLASSES[mechanism_class] = type(name, (SoftmaxHeads, mechanism_class), about)
    return _CLASSES[mechanism_class]


def _empty(mechanism_class: type[AttentionMechanism]) -> Any:
    made = _class_of(mechanism_class)
    return made.__new__(made)


def keep_softmax_heads(mechanism: Any, heads: Sequence[int]) -> Any:
    """Give these query heads of a mechanism softmax attention and no others, in place; returns the mechanism.

    Raises:
        ValueError: if the mechanism has no such head.
    """
    shape = mechanism.shape
    if heads and shape.alibi_slopes is not None:
        raise ValueError(
            "`softmax_heads` is not possible in a model with ALiBi, whose biases these heads would lack; leave it out."
        )
    if beyond := [head for head in heads if head >= shape.num_heads]:
        raise ValueError(
            f"`softmax_heads` names the heads {beyond} of layer {shape.layer}, which has heads 0 to "
            f"{shape.num_heads - 1}."
        )
    plain = getattr(mechanism, "mechanism_class", type(mechanism))
    mechanism.__class__ = _class_of(plain) if heads else plain
    mechanism.softmax_heads = tuple(sorted(heads))
    signature = mechanism.signature.partition(SIGNATURE)[0]
    mechanism.signature = f"{signature}{SIGNATURE}{sorted(heads)}" if heads else signature
    return mechanism
