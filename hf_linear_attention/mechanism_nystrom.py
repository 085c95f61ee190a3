"""`nystrom`: softmax attention through landmarks (Xiong 2021, "Nystromformer", equations 11 to 15).

softmax(s Q Kl^T)  pinv(softmax(s Ql Kl^T))  softmax(s Ql K^T) V        Ql, Kl: M segment means of Q and K

     N x M       x        M x M           x        M x N

The pseudo-inverse is a few steps of an iteration, and not to convergence: on the attention of a real MiniLM the exact
one is 5 to 1000 times worse, its small singular values are noise.
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
from .segment_means import real_first
from .segment_means import segment_mean_weights
from .segment_means import take
from .segment_means import way_back


class NystromAttention(AttentionMechanism):
    """Softmax attention through `num_landmarks` segment means of queries and keys (Nystromformer).

    Landmarks are means over the real tokens of each row, so neither padding nor batch mates change anything. A row of
    at most `num_landmarks` tokens is exact: its landmarks are its tokens, where A pinv(A) A = A. The weights of longer
    rows may be negative, and need not sum to 1.
    """

    options: ClassVar[dict[str, Option]] = {
        "num_landmarks": Option(int, 64, "M, the segment means of queries and keys", minimum=1),
        "pinv_iterations": Option(int, 6, "steps towards the pseudo-inverse", minimum=1),
        "conv_kernel_size": Option(
            int, 0, "tokens under a convolution of the values that is added, an odd number, or 0 for none", minimum=0
        ),
    }
    supports_bidirectional = supports_padding = supports_gqa = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.num_landmarks, self.pinv_iterations = settings["num_landmarks"], settings["pinv_iterations"]
        width = settings["conv_kernel_size"]
        self.conv_weight = nn.Parameter(torch.empty(shape.num_heads, 1, width, 1)) if width else None

    @classmethod
    def problems(cls, settings, max_length):
        width = settings["conv_kernel_size"]
        if width and width % 2 == 0:
            return [f"`conv_kernel_size` = {width} must be odd, to be centred on its token, or 0 for no convolution"]
        return []

    def reset_parameters(self):
        if self.conv_weight is not None:
            init.zeros_(self.conv_weight)  # a converted model starts without it

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        dtype, mask = accumulation_dtype(query), attention_mask
        query_, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if mask is not None:  # pads may hold anything, and 0 times infinity is not 0
            key, value = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (key, value))
        if key.shape[2] <= self.num_landmarks:
            output = attend(query_, key, value, mask, scaling)
        else:
            output = self._through_landmarks(query_, key, value, mask, scaling, groups)
        if self.conv_weight is not None:
            output = output + self._convolve(value.repeat_interleave(groups, dim=1), mask, self.conv_weight)
        if mask is not None:
            output = output.masked_fill(~mask[:, None, :, None], 0.0)
        return output.transpose(1, 2).to(query.dtype), None

    def _through_landmarks(self, query, key, value, mask, scaling, groups):
        batch, length = key.shape[0], key.shape[2]
        real = mask if mask is not None else torch.ones(1, length, dtype=torch.bool, device=key.device)
        means = segment_mean_weights(real, self.num_landmarks, query.dtype).unsqueeze(1)
        real_query = query if mask is None else query.masked_fill(~mask[:, None, :, None], 0.0)
        query_landmarks, key_landmarks = means @ real_query, means @ key  # [B, H, M, D], [B, Hkv, M, D]
        occupied = (means.squeeze(1).sum(dim=2) > 0).expand(batch, -1)  # [B, M]
        # Grouped queries: the landmarks of a group are rows of one product with their key/value head.
        rows = query_landmarks.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, Hkv, G M, D]
        gathered = attend(rows, key, value, mask, scaling).unflatten(2, (groups, -1)).flatten(1, 2)  # [B, H, M, D]
        key_landmarks = key_landmarks.repeat_interleave(groups, dim=1)
        mixing = landmark_weights(query_landmarks, key_landmarks, occupied, scaling)
        summaries = iterative_pinv(mixing, self.pinv_iterations) @ gathered
        if mask is None:
            return attend(query, key_landmarks, summaries, None, scaling)
        tokens = (means @ value).repeat_interleave(groups, dim=1)
        is_short = (mask.sum(dim=1) <= self.num_landmarks)[:, None, None, None]
        return attend(query, key_landmarks, torch.where(is_short, tokens, summaries), occupied, scaling)

    def _convolve(self, value: torch.Tensor, mask: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """One kernel per head along the real tokens; `[B, H, N, D]`, arbitrary at padding."""
        weight = weight.to(value.dtype)
        padding = (weight.shape[2] // 2, 0)
        if mask is None:
            return F.conv2d(value, weight, padding=padding, groups=self.shape.num_heads)
        places = real_first(mask)
        together = F.conv2d(take(value, places), weight, padding=padding, groups=self.shape.num_heads)
        return take(together, way_back(places))


def attend(query, key, value, mask: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """softmax(scaling q k^T) v for `key, value [B, Hkv, S, D]` and `mask [B, S]`; arbitrary for a row without a key."""
    groups = query.shape[1] // key.shape[1]
    if mask is not None:
        mask = (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def landmark_weights(query, key, occupied: torch.Tensor, scaling: float) -> torch.Tensor:
    """softmax(scaling Ql Kl^T) `[B, H, M, M]` with rows and columns of 0 for landmarks that stand for no token."""
    logits = scaling * query @ key.transpose(-1, -2)
    logits = logits.masked_fill(~occupied[:, None, None, :], torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1) * (occupied[:, None, :, None] & occupied[:, None, None, :])


def iterative_pinv(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Approximate pseudo-inverse of each `[..., M, M]` (Razavi 2014; Nystromformer, equation 15).

    Starts from A^T / (|A|_1 |A|_inf) of each matrix by itself; the common implementations take the maximum over the
    whole batch, so that an output depends on the other samples.
    """
    size = matrix.abs()
    norms = size.sum(dim=-2).amax(dim=-1) * size.sum(dim=-1).amax(dim=-1)
    inverse = matrix.transpose(-1, -2) / torch.where(norms > 0, norms, 1.0)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = 0.25 * inverse @ (13 * identity - product @ inner)
    return inverse
