# SPDX-License-Identifier: Apache-2.0
"""Taking rotary positions back from queries and keys: the option `rope` = `none`.

transformers hands an attention layer `position_embeddings` = (cos, sin), and its `apply_rotary_pos_emb` computes
cos x + sin J x with J^2 = -1. So (cos, -sin) / (cos^2 + sin^2) undoes it, YaRN's factor on both included, whichever
way a family pairs the channels.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


class RotaryPositions:
    """The rotary positions of one stock attention class.

    Raises:
        ValueError: if it has none, or rotates only the last channels of a head (multi-head latent attention).
    """

    def __init__(self, attention_class: type):
        forward = inspect.unwrap(attention_class.forward)
        names = forward.__code__.co_names
        self.apply = forward.__globals__.get("apply_rotary_pos_emb")
        parameters = list(inspect.signature(forward).parameters)
        if (
            "apply_rotary_pos_emb" not in names
            or "position_embeddings" not in parameters
            or "qk_nope_head_dim" in names
        ):
            raise ValueError(
                f"`rope` = `none`, but {attention_class.__name__} has no rotary positions that could be left out; "
                "leave the option away."
            )
        self.place = parameters.index("position_embeddings") - 1  # without self

    def embeddings(self, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each `[B or 1, N, rotated channels]`, among the arguments of the stock attention's forward."""
        return kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[self.place]

    def unrotate(self, query: torch.Tensor, key: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]):
        """`query [B, H, N, D]` and `key [B, Hkv, N, D]` as they were before their first channels were rotated."""
        cos, sin = (x.float() for x in embeddings)
        squared_norm = cos.square() + sin.square()
        rotated = cos.shape[-1]
        parts = [x[..., :rotated].float() for x in (query, key)]
        parts = self.apply(*parts, cos / squared_norm, -sin / squared_norm)
        return [torch.cat((part.to(x.dtype), x[..., rotated:]), dim=-1) for part, x in zip(parts, (query, key))]
