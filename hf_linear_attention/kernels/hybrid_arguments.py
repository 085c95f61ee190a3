# SPDX-License-Identifier: Apache-2.0
"""Attention of `hybrid` to window, sinks, exact and far keys in one sum: the arguments of its operator.

They are the tensors of a mechanism as they are, whatever computes: torch, C or Triton.

           sinks           far, some exact            window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i

Axes: B batch, H query heads, Hkv key/value heads, N queries, L rows of keys, D head_dim, F features, W head dimension
of the values, s sinks, w tokens of a window, M exact keys, R rotary frequencies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..mechanisms.hybrid_step import logarithm_of, shifts_of
from ..positions.rotary import RotaryShift
from ..torch_kernels.blocks import EXP, accumulated


class HybridArguments(NamedTuple):
    """The arguments of the operator `hybrid`: tensors, then numbers.

    `key` has N rows, one for each query, or `window` rows more, of tokens before the first query; only then can there
    be a `state` of still older tokens. `visible` is False where a key belongs neither to the window nor to the keys
    behind it. A far key weighs exp(log_scale - norm_weight scaling |q|^2 / 2) phi(q)·phi(k), all others exp(scaling
    q·k). The map phi is one for inputs scaled by sqrt(scaling).

    Rotary embedding has turned the pairs of columns of queries and keys by `frequencies` and their positions. The
    feature map does not see the turns from pair `first_turned` on; if there are any, keys need positions. From
    `trained_length` on (0: never) sinks and exact keys are compared as far away as at most there.

    With `num_exact_keys` = M above 0, of the keys that have left the window the M with the largest `score` are exact
    (see `exact_keys`), and only the others are far. The tensors of `Kept` come with a `state`.

    With `spans`, rows hold packed sequences, without padding between the tokens of one. Nothing comes before, and there
    are exact keys, but no sinks; the state in the end is undefined.
    """

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, Hkv, L, D]
    value: Tensor  # [B, Hkv, L, W]
    visible: Tensor  # [B, L] bool
    sink_key: Tensor  # [B, Hkv, s, D]
    sink_value: Tensor  # [B, Hkv, s, W]
    seen: Tensor  # [B, N, s] bool
    log_decay: Tensor | None  # [Hkv]; with `is_rate` it is -softplus of this
    state: Tensor | None  # [B, Hkv, F, W + 2]
    key_weight: Tensor  # [Hkv, D, columns], see `torch_kernels.blocks.KernelMap`
    key_bias: Tensor | None
    key_norm: Tensor | None
    query_weight: Tensor
    log_scale: Tensor  # [H]
    norm_weight: Tensor  # [H]
    kept_key: Tensor | None = None  # [B, Hkv, M, D], see `Kept` for these
    kept_value: Tensor | None = None
    kept_score: Tensor | None = None
    kept_age: Tensor | None = None
    kept_position: Tensor | None = None
    score: Tensor | None = None  # [B, Hkv, L, 1] float32
    position: Tensor | None = None  # [B, N] int32
    key_position: Tensor | None = None  # [B, L] int32
    frequencies: Tensor | None = None  # [R] float32
    spans: Tensor | None = None  # [2, B, N] int32, where the sequence of each token begins, and where it ends
    function: int = EXP
    window: int = 1
    scaling: float = 1.0
    first_turned: int = 0
    is_interleaved: bool = False
    trained_length: int = 0
    num_exact_keys: int = 0
    is_rate: bool = False

    @property
    def pairs(self) -> int:
        """The number of pairs of columns that are turned."""
        return 0 if self.frequencies is None else self.frequencies.numel()

    @property
    def before(self) -> int:
        """The number of keys before the first query."""
        return self.key.shape[2] - self.query.shape[2]

    @property
    def ranges(self) -> tuple[int, int]:
        """The first query that some key has left, and the number of keys that leave the window of some query."""
        length = self.query.shape[2]
        first = min(self.window - self.before, length)
        return first, length - first

    def far(self) -> tuple[Any, ...]:
        """The arguments of the operator `attention` for the keys that leave the window, and the queries behind them."""
        first, num_far = self.ranges
        key, value, mask = self.key[:, :, :num_far], self.value[:, :, :num_far], self.visible[:, :num_far]
        affine = self.key_weight, self.key_bias, self.key_norm, self.query_weight
        return self.query[:, :, first:], key, value, mask, self.log_decay, self.state, *affine, self.function, True

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors of `Kept`, without what is None."""
        return tuple(x for x in self[15:20] if x is not None)

    @property
    def shifts(self) -> tuple[RotaryShift | None, RotaryShift | None]:
        """What takes back the turns that the map does not see, and what moves to within the trained length."""
        return shifts_of(self.frequencies, self.first_turned, self.is_interleaved, self.trained_length)

    def scaled(self) -> HybridArguments:
        """The same with a map for inputs as they are, and with the decay itself."""
        root, norm = self.scaling**0.5, None if self.key_norm is None else accumulated(self.key_norm) * self.scaling
        key_weight, query_weight = (accumulated(x) * root for x in (self.key_weight, self.query_weight))
        decay = logarithm_of(self.log_decay, self.is_rate)
        return self._replace(
            key_weight=key_weight, key_norm=norm, query_weight=query_weight, log_decay=decay, is_rate=False
        )
