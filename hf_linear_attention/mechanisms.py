"""The registry: every mechanism by the name that `config.linear_attention["mechanism"]` uses."""

from __future__ import annotations

from .attention_mechanism import AttentionMechanism
from .mechanism_hybrid import HybridAttention
from .mechanism_linear import LinearAttention
from .mechanism_linformer import LinformerAttention
from .mechanism_performer import PerformerAttention


MECHANISMS: dict[str, type[AttentionMechanism]] = {
    "hybrid": HybridAttention,
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
}
