"""`performer`: FAVOR+, positive orthogonal random features of the softmax kernel (Choromanski 2020)."""

from __future__ import annotations

from typing import ClassVar

from .attention_mechanism import Option
from .mechanism_linear import LinearAttention


class PerformerAttention(LinearAttention):
    """Linear attention whose features estimate exp(q·k) without bias and without training."""

    options: ClassVar[dict[str, Option]] = {
        "num_features": Option(int, None, "random features per head; by default 4 x head_dim", minimum=1),
        "seed": Option(int, 0, "seed of the random projection", minimum=0),
    }

    @classmethod
    def feature_map_name(cls, settings):
        return "favor"
