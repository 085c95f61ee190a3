"""`linformer`: keys and values compressed along the length by learned E and F (Wang 2020, equation 7).

softmax(scaling q (E K)^T) (F V)        E, F: [k, n]        K, V: [n, D] per head

          n positions                        slot s starts as the mean of its segment of
E =  [ k/n k/n  0   0   0   0  ]   k slots   positions; random E is unusable on pretrained
     [  0   0  k/n k/n  0   0  ]             weights (relative error 3.5 and more)
     [  0   0   0   0  k/n k/n ]
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_kernels import accumulation_dtype
from .attention_mechanism import AttentionMechanism
from .attention_mechanism import Option


class LinformerAttention(AttentionMechanism):
    """Softmax attention to `projection_size` compressed keys. Encoders only: every slot mixes all positions.

    Inputs shorter than `max_length` use the first columns of E and F. A slot is rescaled by the share of its absolute
    weight that falls on real tokens (so a partly filled segment stays a mean), and takes no part in the softmax when
    less than half of one token's share of E does. Padding is compacted away first, so it may lie anywhere.
    """

    options: ClassVar[dict[str, Option]] = {
        "projection_size": Option(int, 128, "k, the number of compressed keys and values", minimum=1),
        "projection_sharing": Option(
            str,
            "headwise",
            "what shares E and F: none, headwise (the heads of a layer), key-value (E = F too), layerwise (all layers)",
            choices=("none", "headwise", "key-value", "layerwise"),
        ),
        "max_length": Option(int, None, "n, the longest input; by default the model's own limit", minimum=1),
    }
    supports_bidirectional = supports_padding = supports_gqa = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.max_length = settings["max_length"] or shape.max_length
        matrices = shape.num_key_value_heads if settings["projection_sharing"] == "none" else 1
        size = (matrices, settings["projection_size"], self.max_length)
        self.key_projection = nn.Parameter(torch.empty(size))
        shares_values = settings["projection_sharing"] in ("key-value", "layerwise")
        self.value_projection = None if shares_values else nn.Parameter(torch.empty(size))

    @classmethod
    def problems(cls, settings, max_length):
        length = settings["max_length"] or max_length
        if length is None:
            return ["`max_length` is needed: the architecture sets no limit of its own; give the longest input"]
        if settings["projection_size"] > length:
            return [f"`projection_size` = {settings['projection_size']} is larger than the longest input, {length}"]
        return []

    def share_with(self, first):
        if self.settings["projection_sharing"] == "layerwise":
            del self.key_projection
            # Not registered: a parameter registered in two modules cannot be saved.
            object.__setattr__(self, "_first", first)

    @property
    def _projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.__dict__.get("_first", self)
        return owner.key_projection, owner.key_projection if owner.value_projection is None else owner.value_projection

    def reset_parameters(self):
        for projection in self.parameters(recurse=False):
            init.copy_(projection, mean_pool_matrix(*projection.shape[1:]).expand_as(projection))

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        if key.shape[2] > self.max_length:
            raise ValueError(
                f"Got {key.shape[2]} positions, but this Linformer was built for at most `max_length` = "
                f"{self.max_length}; shorten the input or convert again with a larger `--max_length`."
            )
        if attention_mask is not None:
            key, value, attention_mask = compact(key, value, attention_mask)
        key_projection, value_projection = self._projections
        key, empty = compress(key, key_projection, attention_mask)
        value, _ = compress(value, value_projection, attention_mask)
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            attn_mask=~(empty.repeat_interleave(groups, dim=1) if empty.shape[1] > 1 else empty).unsqueeze(2),
            scale=scaling,
        )
        if attention_mask is not None:  # a row with every slot empty
            output = output.masked_fill(~attention_mask.any(dim=1)[:, None, None, None], 0.0)
        return output.transpose(1, 2), None


def mean_pool_matrix(slots: int, length: int) -> torch.Tensor:
    """`[slots, length]`: slot s averages positions floor(s length / slots) .. floor((s + 1) length / slots)."""
    owner = (torch.arange(length) * slots) // length
    pool = F.one_hot(owner, slots).T.float()
    return pool / pool.sum(dim=1, keepdim=True).clamp(min=1)


def compact(key, value, mask):
    """Move the real tokens to the front, in order: Linformer's columns count tokens and not padding."""
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    index = order[:, None, :, None]
    return key.take_along_dim(index, dim=2), value.take_along_dim(index, dim=2), mask.gather(1, order)


def compress(x: torch.Tensor, projection: torch.Tensor, mask: torch.Tensor | None):
    """`x [B, Hkv, n, D]`, `projection [1 or Hkv, k, max_length]` -> `([B, Hkv, k, D], empty [B or 1, 1 or Hkv, k])`."""
    length, (slots, max_length) = x.shape[2], projection.shape[1:]
    weights = projection.abs().to(accumulation_dtype(x))
    total = weights.sum(dim=2)
    if mask is None:
        mass = weights[..., :length].sum(dim=2).unsqueeze(0)
    else:
        mass = torch.einsum("hkn,bn->bhk", weights[..., :length], mask.to(weights.dtype))
        x = x.masked_fill(~mask[:, None, :, None], 0.0)
    least = total * (0.5 * slots / max_length)
    rescale = (total / torch.maximum(mass, least)).to(x.dtype)
    return (projection[..., :length].to(x.dtype) @ x) * rescale.unsqueeze(-1), mass <= least
