# SPDX-License-Identifier: Apache-2.0
"""The registry: every mechanism by the name that `config.linear_attention["mechanism"]` uses."""

from __future__ import annotations

from .mechanism import AttentionMechanism
from .mechanism_aft import AftAttention
from .mechanism_hybrid import HybridAttention
from .mechanism_latent import LatentAttention
from .mechanism_linear import LinearAttention
from .mechanism_linformer import LinformerAttention
from .mechanism_linformer_linear import LinformerLinearAttention
from .mechanism_nystrom import NystromAttention
from .mechanism_performer import PerformerAttention
from .mechanism_window import WindowAttention


MECHANISMS: dict[str, type[AttentionMechanism]] = {
    "aft": AftAttention,
    "hybrid": HybridAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "linformer_linear": LinformerLinearAttention,
    "nystrom": NystromAttention,
    "performer": PerformerAttention,
    "window": WindowAttention,
}
