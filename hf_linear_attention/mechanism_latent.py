# SPDX-License-Identifier: Apache-2.0
"""`latent`: keys and values gathered into L learned latents and read back from them, O(N L).

    C = softmax(s Lambda K^T)  [L, S]     the latents attend to the inputs (Perceiver 2021, section 3.1)
    o = softmax(s Q (C K)^T) (C V)        the inputs attend to what the latents gathered (Set Transformer 2019,
                                          equations 9 and 10: ISAB, H = MAB(I, X), X' = MAB(X, H))

    S inputs --C--> L latents --> N queries

The blocks of those papers are reduced to their two attentions, and the layer's own projections serve both: the latents'
inputs are C X, so their keys are (C X) W_k = C K and their values C V. Both steps are convex combinations, hence so is
every output.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .kernels_torch import accumulated
from .mechanism import AttentionMechanism
from .mechanism import Option
from .kernels_slots import slot_attention


class LatentAttention(AttentionMechanism):
    """Softmax attention to `num_latents` summaries, gathered per head by learned latent queries (Perceiver).

    Every output is a convex combination of values. Not for causal models: a latent sees all positions.
    """

    options: ClassVar[dict[str, Option]] = {
        "num_latents": Option(int, 64, "L, the learned latent queries per head of the keys", minimum=1),
        "seed": Option(int, 0, "seed of the latents' initialisation", minimum=0),
    }
    supports_bidirectional = supports_cross = supports_padding = supports_gqa = supports_constants = True
    # Relative head error on MiniLM (n = 512) with 64 latents: about 0.72, 0.68, 0.63, 0.76 for 0.5, 1, 2, 4. Small
    # latents all gather the mean of the values; large ones a single token each.
    initial_std: ClassVar[float] = 2.0

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.latents = nn.Parameter(torch.empty(shape.num_key_value_heads, settings["num_latents"], shape.head_dim))

    def reset_parameters(self):
        size = self.latents.shape
        init.copy_(self.latents, self.initial_std * torch.randn(size, generator=self.generator()))

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        queries, key, value = accumulated(query), accumulated(key), accumulated(value)
        latents = self.latents.to(key.dtype).expand(key.shape[0], -1, -1, -1)
        mask = None if attention_mask is None else attention_mask.unsqueeze(1)
        keys, values = (slot_attention(latents, key, x, mask, scaling) for x in (key, value))  # [B, Hkv, L, D]
        output = slot_attention(queries, keys, values, None, scaling)
        return output.transpose(1, 2).to(query.dtype), None
