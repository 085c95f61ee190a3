# SPDX-License-Identifier: Apache-2.0
"""`hybrid`: linear attention to far keys, exact softmax to a sliding window and to sink tokens.

    o_i = ( sum_exact exp(scaling q_i·k_j) v_j + c_i sum_far phi(q_i)·phi(k_j) v_j ) / ( the same with v = 1 )

           sinks           far                        window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s
           exact      S, Z, m (constant)         exact

c_i = exp(b - a scaling |q_i|^2 / 2), with b and a learned per head: constants of the query do not cancel here.

With `num_exact_keys` = M, the M keys behind the window with the largest scores stay exact, and only the others are far
keys (exact_keys.py). The score of the key at position p is w·h + r p / 64, of the hidden state h of its token. So a
head may keep what is worth it, or what is recent, as a longer window would: at the start w is 0 and r is 1. `calibrate`
fits w and r to the largest softmax weights of keys behind the window (score_fit.py).

In an encoder the window extends w - 1 tokens to either side, far keys are before and after it, and the first s tokens
are global: they also attend to every key exactly (Longformer 2020, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..features.maps import FEATURE_MAPS, half_squared_norm
from ..positions.rotary import LearnedDecay, decay_of, rotary_shift
from ..torch_kernels.attention import makes_features, map_attention, state_after
from ..torch_kernels.blocks import EXP, KernelMap, accumulated, is_on_cuda, with_dtype
from ..torch_kernels.exact_keys import Kept, Leaving, attend_to_kept
from ..torch_kernels.implementations import implemented
from ..torch_kernels.window import Part, join, joined_output, log_size
from .base import LayerShape, MechanismInputs, State, hidden_size_of, scaled
from .hybrid_step import StepArguments, hybrid_step
from .settings import HybridOptions
from .window import Line, WindowAttention, WindowState


# The unit of positions in scores, so that the slope is of the size of w.
SLOPE_TOKENS = 64


class HybridAttention(HybridOptions, WindowAttention):
    """Linear attention to far keys, exact softmax to a sliding window and to sink (global) tokens, in one sum.

    The state consists of the sums S, Z and m of the tokens that have left the window (`[B, Hkv, F, D + 2]`, float32),
    and the state of the window. If the feature map does not see all rotary frequencies, the positions of the window
    are kept as well, and the rotation of the other frequencies is undone when a key leaves the window.
    """

    has_sums = True

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape) -> None:
        super().__init__(settings, shape)
        self.shift = rotary_shift(settings, shape, self.layer_setting("rope_frequencies"), self.rotation)
        self.needs_positions = self.needs_positions or self.shift is not None
        sizes = (shape.num_heads, shape.num_key_value_heads, shape.head_dim, settings["num_features"])
        self.feature_map: Any = FEATURE_MAPS[settings["feature_map"]](*sizes)
        self.mix = JointMix(shape.num_heads)
        decay = decay_of(settings, shape)
        self.decay = decay if isinstance(decay, LearnedDecay) else None
        self.keeps_positions = self.shift is not None
        self.num_exact_keys = self.layer_setting("num_exact_keys")
        self.score_projection: nn.Parameter | None = None
        self.score_slope: nn.Parameter | None = None
        if self.num_exact_keys:
            self._add_exact_keys(shape)
        # For the kernels: how many rotary frequencies the map sees, whether pairs are interleaved, the trained length.
        rotary = shape.rotary if self.needs_positions else None
        pairs = 0 if rotary is None else len(rotary.inverse_frequencies)
        first = pairs if self.shift is None else min(self.shift.first, pairs)
        self.is_turned = pairs > 0
        self.turns = first, rotary is not None and rotary.is_interleaved, self.trained_length or 0
        self.joins_at_once = True  # False: the operators of the parts run one by one, so that `mix` sees them
        self.uses_far = True  # False leaves window and sinks only, to measure what the far keys contribute

    def _add_exact_keys(self, shape: LayerShape) -> None:
        # They only choose, so no loss has a gradient for them; `calibrate` fits them.
        heads, size = shape.num_key_value_heads, hidden_size_of(shape)
        self.score_projection = nn.Parameter(torch.empty(heads, size), requires_grad=False)
        self.score_slope = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.needs_gates = True
        # Of a key farther away than the trained length, the logit is that at this distance, as with sinks.
        self.to_kept = self.rotation if self.trained_length else None
        self.keeps_positions = self.keeps_positions or self.to_kept is not None
        self.needs_positions = self.needs_positions or self.keeps_positions

    def reset_parameters(self) -> None:
        """Initialise the feature map, the parameters that mix near and far keys, and the decay."""
        super().reset_parameters()
        self.feature_map.reset_parameters(self.generator())
        self.mix.reset_parameters(self.feature_map)
        if self.decay is not None:
            self.decay.reset_parameters()
        if self.score_projection is not None and self.score_slope is not None:
            init.zeros_(self.score_projection)
            init.ones_(self.score_slope)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The scores `[B, N, Hkv]` of the keys, without what their positions add."""
        weight = cast(Tensor, self.score_projection)
        found = implemented("scores_on_cuda", hidden_states, weight) if is_on_cuda(hidden_states) else None
        if found is not None:
            return found
        hidden = scaled(hidden_states)
        return F.linear(hidden, with_dtype(weight, hidden.dtype))

    def attend_packed(self, inputs: MechanismInputs) -> Tensor | None:
        """On CUDA, in as many launches as one sequence; see `AttentionMechanism.attend_packed`."""
        (query, key, value, numbers, *_), sinks = inputs, self.num_sinks
        count, no_sinks = self.num_exact_keys + sinks, (key[:, :, :0], value[:, :, :0])
        if numbers is None or not count or not inputs.is_causal or 0 < self.turns[2] < self.window_size + sinks:
            return None
        if not is_on_cuda(query) or not self._is_one_kernel(query, key, value, visible := numbers > 0, no_sinks[0]):
            return None
        spans, position = implemented("spans_of", numbers)
        if inputs.positions is not None:
            inputs = inputs._replace(positions=with_dtype(inputs.positions, torch.int32))
        score, is_sink = self.scores(inputs, position + 1), position < sinks
        line = Line(key, value, visible, *implemented("sinks_as_exact_keys", key, score, inputs.positions, is_sink))
        given = inputs, line, no_sinks, is_sink.new_empty(*numbers.shape, 0), None, count, spans
        return self._in_one_kernel(*given)[0].transpose(1, 2)

    def _step_in_rows(self, inputs: MechanismInputs, states: State) -> Tensor | None:
        if self.num_exact_keys and inputs.gates is None:
            return None
        found = self._step(inputs, states)
        return None if found is None else found[0]

    def _step(self, inputs: MechanismInputs, state: State) -> tuple[Tensor, State] | None:
        """`_attend_causally` for one token in few operations, because at this size the overhead of each dominates."""
        if self.alibi is not None or not self.uses_far or torch.is_grad_enabled():
            return None
        query, old, maps, turned = inputs.query, self.read(state), self.feature_map, self.is_turned
        # Under autocast, rotary positions make queries and keys float32, whereas values remain bfloat16.
        key, value = with_dtype(inputs.key, old.key.dtype), with_dtype(inputs.value, old.value.dtype)
        has_kernel = implemented("takes_hybrid_step", query, key, value, old, maps.key_projection, maps.kernel_function)
        if not has_kernel and inputs.rows is not None:
            return None
        has_scores, decay = self.score_slope is not None and inputs.gates is not None, self.decay
        arguments = (
            *(query, key, value, *((inputs.gates, self.score_slope) if has_scores else (None, None))),
            *(inputs.positions if turned else None, *maps.affine_parameters(), None if decay is None else decay.rate),
            *(list(state), self.mix.far_log_scale, self.mix.query_norm_weight),
            *(cast(Any, self.rotation).frequencies(query) if turned else None, *self.turns),
            *(maps.kernel_function, inputs.scaling, 1 / SLOPE_TOKENS, True),
        )
        given = StepArguments._make(arguments)
        if not has_kernel:
            output, new = hybrid_step(given)
            return with_dtype(output, query.dtype), tuple(new)
        return implemented("hybrid_step", given, inputs.in_place, inputs.rows)

    def parts_behind(
        self, inputs: MechanismInputs, line: Line, mask: Tensor, sums: Tensor | None = None
    ) -> tuple[list[Part], Tensor | None]:
        """One part for the far keys, and then one for the exact ones; see `WindowAttention.parts_behind`."""
        if self.num_exact_keys:
            return self._parts_with_exact_keys(inputs, line, mask, sums)
        key = line.key
        if self.shift is not None:
            key = self.shift(accumulated(key), -cast(Tensor, line.position))
        part, sums = self._far_part(inputs, key, line.value, mask, sums)
        return [part], sums

    def _far_part(
        self,
        inputs: MechanismInputs,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        sums: Tensor | None,
        age: Tensor | None = None,
    ) -> tuple[Part, Tensor]:
        """The part of far keys, which the feature map sees as they are, and the sums after them.

        `age [B, Hkv, N, 1]` says for how many tokens a key has faded when it comes.
        """
        decay, scaling, query = self.decay or self.alibi, inputs.scaling, accumulated(inputs.query)
        if self.shift is not None:
            query = self.shift(query, -cast(Tensor, inputs.positions))
        log_decay = None if decay is None else decay()
        options: dict[str, Any] = {"is_causal": True, "state": sums, "log_decay": log_decay}
        fuses = age is None and makes_features(query, key, value, mask, self.feature_map.num_features)
        kernel_map = self.feature_map.kernel_map(scaling) if fuses else None
        if kernel_map is None:
            query, key = self.feature_map.forward_queries(query, scaling), self.feature_map.forward_keys(key, scaling)
        if age is not None and log_decay is not None:
            key = key + log_decay.to(key.dtype)[:, None, None] * age
        scale: Any  # not None, because the features are given as logarithms
        kernel_map = kernel_map or KernelMap(EXP)
        output, denominator, scale, sums = map_attention(kernel_map, query, key, value, key_mask=mask, **options)
        output = output.transpose(1, 2).unflatten(1, denominator.shape[1:3])
        if self.alibi is not None:  # the sums count the decay from the end of the window
            scale = scale + self.window_size * self.alibi().to(scale.dtype)[:, None, None, None]
        return (output, log_size(denominator, scale)), cast(Tensor, sums)

    def read(self, state: State) -> WindowState:
        """The state from its tensors; with exact keys, `sums` are those of the far keys and then `Kept`."""
        if not self.num_exact_keys:
            return super().read(state)
        count = len(Kept._fields) + self.keeps_positions
        return WindowState(state[:count], *state[count:-1])._replace(score=state[-1])

    def scores(self, inputs: MechanismInputs, position: Tensor | None) -> Tensor | None:
        """In float32, so that any split of an input compares the same numbers; see `WindowAttention.scores`."""
        if self.score_slope is None or position is None:
            return None
        own, place = cast(Tensor, inputs.gates).float().transpose(1, 2), position.float().unsqueeze(1)
        if place.device.type == "cuda" and self.score_slope.dtype != torch.float64:  # in one launch
            return torch.addcmul(own, self.score_slope[:, None], place, value=1 / SLOPE_TOKENS).unsqueeze(-1)
        return (own + self.score_slope.float()[:, None] * (place / SLOPE_TOKENS)).unsqueeze(-1)

    def _parts_with_exact_keys(
        self, inputs: MechanismInputs, line: Line, mask: Tensor, sums: Any
    ) -> tuple[list[Part], Any]:
        """`parts_behind` with those that the exact keys displace in place of those that leave the window."""
        numbers = inputs.attention_mask if inputs.is_packed else None
        far_sums, *old = sums or (None,)
        tokens = Leaving(
            *(inputs.query, line.key, line.value, cast(Tensor, line.score), mask > 0),
            *(inputs.positions, line.position, numbers),
        )
        turned = self.shift, self.to_kept, self.trained_length or 0
        part, gone, last = attend_to_kept(tokens, old, self.num_exact_keys, inputs.scaling, *turned)
        far = gone.is_there if numbers is None else torch.where(gone.is_there, numbers, -numbers)
        far_part, far_sums = self._far_part(inputs, gone.key, gone.value, far, far_sums, gone.age)
        return [far_part, part], (far_sums, *(x for x in last if x is not None))

    def sums_behind(self, inputs: MechanismInputs, line: Line, mask: Tensor, sums: Tensor | None) -> Tensor | None:
        """The sums of `parts_behind` alone."""
        if self.decay or self.alibi:  # a decay depends on the order of the keys
            return super().sums_behind(inputs, line, mask, sums)
        key = line.key if self.shift is None else self.shift(accumulated(line.key), -cast(Tensor, line.position))

        def features_of(keys: Tensor, _: Tensor | None) -> Tensor:
            return self.feature_map.forward_keys(keys, inputs.scaling)

        return state_after(features_of, accumulated(key), line.value, mask, sums, log_features=True, size=key.shape[2])

    def _at_once(
        self, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor, sums: Any
    ) -> tuple[Tensor, Any] | None:
        if not self._is_one_kernel(inputs.query, line.key, line.value, line.kind, sinks[0]):
            return None
        count = 0 if line.score is None else self.num_exact_keys
        output, new = self._in_one_kernel(inputs, line, sinks, seen, sums, count)
        return output, new if count else new[0]

    def _is_one_kernel(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sink_key: Tensor) -> bool:
        """Whether one kernel computes all parts of these tensors."""
        if self.alibi is not None or not self.uses_far or not self.joins_at_once:
            return False
        of_map = self.feature_map.key_projection, self.feature_map.kernel_function
        return bool(implemented("takes_hybrid", query, key, value, visible, sink_key, *of_map))

    def _in_one_kernel(
        self, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor, sums: Any, count: int,
        spans: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """The output `[B, H, N, W]` and the sums, with those of `Kept` if `count` exact keys are kept."""
        query, maps, mix = inputs.query, self.feature_map, self.mix
        old, *kept = sums if isinstance(sums, tuple) else (sums,)
        given = (  # `HybridArguments` of the kernels
            *(query, line.key, line.value, line.kind, *sinks, seen, None if self.decay is None else self.decay.rate),
            *(old, *maps.affine_parameters(), mix.far_log_scale, mix.query_norm_weight),
            *(*kept, *[None] * (5 - len(kept)), line.score, inputs.positions if self.is_turned else None),
            *(line.position, cast(Any, self.rotation).frequencies(query) if self.is_turned else None, spans),
            *(maps.kernel_function, self.window_size, inputs.scaling, *self.turns, count, True),
        )
        return implemented("hybrid", given)

    def reads_at_once(self, dtype: torch.dtype) -> bool:
        """Whether one kernel on CUDA reads long inputs; see `AttentionMechanism.reads_at_once`."""
        sizes, weight = self.shape, self.feature_map.key_projection
        of_query, of_key = (1, sizes.num_heads, 1, sizes.head_dim), (1, sizes.num_key_value_heads, 1, sizes.head_dim)
        query, key = (weight.new_empty(shape, dtype=dtype) for shape in (of_query, of_key))
        return self._is_one_kernel(query, key, key, key[:, 0, :, 0], key.expand(-1, -1, self.num_sinks, -1))

    def _joined(self, exact: Part, behind: list[Part], inputs: MechanismInputs) -> Tensor:
        if not self.uses_far:
            return exact[0]
        if self.num_exact_keys:
            exact, behind = join(exact, behind[-1]), behind[:-1]
        norm = half_squared_norm(inputs.query, inputs.scaling).unflatten(1, (exact[0].shape[1], -1))
        return self.mix(exact, behind, norm)


class JointMix(nn.Module):
    """One denominator: far keys weigh exp(b - a scaling |q|^2 / 2) phi(q)·phi(k), near keys exp(scaling q·k).

    b and a are learned per head. Both kinds of keys share one log-sum-exp, so the far part need not learn the
    normaliser of the softmax. `near` is the part of the near keys, and `far` holds one or more parts of far keys;
    `half_query_norm` is scaling |q|^2 / 2, `[B, Hkv, G, N, 1]`.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.far_log_scale = nn.Parameter(torch.empty(num_heads))
        self.query_norm_weight = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self, feature_map: Any) -> None:
        """Start with b = -log F and a = 1."""
        # These are the norm terms of the softmax kernel's random features, and the mean over F features. With c, the
        # initial scale of W, the expected weight of a far key starts at exp(scaling q·k) times
        # exp((c^2 - 1) |q + k|^2 / 2), which is at most 1.
        init.constant_(self.far_log_scale, -math.log(feature_map.num_features))
        init.ones_(self.query_norm_weight)
        if isinstance(norm_weight := getattr(feature_map, "key_norm_weight", None), torch.Tensor):
            init.ones_(norm_weight)

    def forward(self, near: Part, far: Sequence[Part], half_query_norm: torch.Tensor) -> torch.Tensor:
        """Join the parts by their log sizes: the output `[B, Hkv, G, N, D]`."""
        exponent = self._far_exponent(near, half_query_norm)
        return joined_output(near, *((output, size + exponent) for output, size in far))

    def _far_exponent(self, near: Part, half_query_norm: torch.Tensor) -> torch.Tensor:
        """b - a scaling |q|^2 / 2, `[B, Hkv, G, N, 1]`."""
        parameters = (with_dtype(p, near[0].dtype) for p in (self.far_log_scale, self.query_norm_weight))
        log_scale, norm_weight = (p.view(near[0].shape[1], -1, 1, 1) for p in parameters)
        return torch.addcmul(log_scale, norm_weight, half_query_norm, value=-1)

    def log_odds(self, near: Part, far: Sequence[Part], half_query_norm: torch.Tensor) -> torch.Tensor:
        """The logarithm of the weight of all far keys over that of all near keys, `[B, Hkv, G, N, 1]`."""
        sizes = torch.stack([size for _, size in far]).logsumexp(0)
        return sizes + self._far_exponent(near, half_query_norm) - near[1]
