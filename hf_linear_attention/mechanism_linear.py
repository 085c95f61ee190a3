"""`linear`: kernel attention phi(q)·S / phi(q)·Z (Katharopoulos 2020, "Transformers are RNNs")."""

from __future__ import annotations

from typing import ClassVar

from .attention_kernels import kernel_attention
from .attention_mechanism import AttentionMechanism
from .attention_mechanism import Option
from .feature_maps import FEATURE_MAPS


class LinearAttention(AttentionMechanism):
    """Linear attention with a feature map; the state is the sums S and Z, constant in the length."""

    options: ClassVar[dict[str, Option]] = {
        "feature_map": Option(str, "exp", "phi of queries and keys", choices=("elu1", "relu", "exp", "hedgehog")),
        "num_features": Option(int, None, "features per head; by default what the feature map suggests", minimum=1),
    }
    supports_causal = supports_bidirectional = supports_cross = True
    supports_padding = supports_state = supports_gqa = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        feature_map = FEATURE_MAPS[self.feature_map_name(settings)]
        self.feature_map = feature_map(
            shape.num_heads, shape.num_key_value_heads, shape.head_dim, settings["num_features"]
        )

    @classmethod
    def feature_map_name(cls, settings) -> str:
        return settings["feature_map"]

    @classmethod
    def problems(cls, settings, max_length):
        if settings["num_features"] is None:
            return []
        name = cls.feature_map_name(settings)
        feature_map = FEATURE_MAPS[name]
        if not feature_map.has_num_features:
            return [
                f"`num_features` = {settings['num_features']} has no effect with `feature_map` = `{name}`, whose "
                "features are as many as head_dim; leave it out, or choose `exp` or `hedgehog`"
            ]
        problem = feature_map.check_num_features(settings["num_features"])
        return [f"`num_features` = {settings['num_features']} {problem}"] if problem else []

    def reset_parameters(self):
        self.feature_map.reset_parameters(self.generator())

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        output, new_state = kernel_attention(
            self.feature_map.forward_queries(query, scaling),
            self.feature_map.forward_keys(key, scaling),
            value,
            log_features=self.feature_map.log_features,
            is_causal=is_causal,
            key_mask=attention_mask,
            state=state[0] if state else None,
        )
        return output.transpose(1, 2).to(query.dtype), (new_state,)
