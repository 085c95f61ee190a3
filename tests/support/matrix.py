"""The matrices that every mechanism and every family must join, and the builders of their tiny random twins."""

from __future__ import annotations

import contextlib

import torch
import transformers

from hf_linear_attention.attention.cache import state_layer
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


# One row a mechanism and feature map: the settings, for head_dim 8.
MECHANISM_ROWS = {
    "aft-simple": {"mechanism": "aft", "variant": "simple"},
    "aft-local": {"mechanism": "aft", "variant": "local", "window_size": 6, "max_length": 8200},
    "aft-conv": {"mechanism": "aft", "variant": "conv", "window_size": 5},
    "aft-full": {"mechanism": "aft", "variant": "full", "position_rank": 0},
    "aft-full-factorised": {"mechanism": "aft", "variant": "full", "position_rank": 4},
    "linear-elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear-relu": {"mechanism": "linear", "feature_map": "relu"},
    "linear-exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 24},
    "linear-decay": {"mechanism": "linear", "feature_map": "exp", "num_features": 12, "decay": "learned"},
    "linear-decay-elu1": {"mechanism": "linear", "feature_map": "elu1", "decay": "learned"},
    "linear-gated": {"mechanism": "linear", "feature_map": "exp", "num_features": 12}
    | {"decay": "gated", "input_gate": True},
    "linear-gated-hedgehog": {"mechanism": "linear", "feature_map": "hedgehog", "decay": "gated"},
    "linear-input-gate": {"mechanism": "linear", "feature_map": "exp", "num_features": 12, "input_gate": True},
    "linear-hedgehog": {"mechanism": "linear", "feature_map": "hedgehog"},
    "performer": {"mechanism": "performer", "num_features": 20, "seed": 3},
    "performer-iid": {"mechanism": "performer", "num_features": 20, "orthogonal": False},
    **{
        f"performer-{features}": {"mechanism": "performer", "num_features": 20, "features": features}
        for features in ("cosh", "trig", "relu", "favor++")
    },
    "performer-geometry": {"mechanism": "performer", "num_features": 20, "geometry": "learned"},
    "performer-geometry-decay": {"mechanism": "performer", "num_features": 20, "geometry": "learned"}
    | {"decay": "learned"},
    "performer-geometry-favor++": {"mechanism": "performer", "num_features": 20, "features": "favor++"}
    | {"geometry": "learned"},
    "performer-decay": {"mechanism": "performer", "num_features": 20, "features": "cosh", "decay": "learned"},
    "hybrid": {"mechanism": "hybrid", "window_size": 8, "num_sinks": 3, "num_features": 12},
    "hybrid-decay": {"mechanism": "hybrid", "window_size": 3, "num_sinks": 1, "num_features": 12, "decay": "learned"},
    "hybrid-no-sinks": {"mechanism": "hybrid", "window_size": 5, "num_sinks": 0, "feature_map": "hedgehog"},
    "hybrid-exact-keys": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1, "num_features": 12}
    | {"num_exact_keys": 5, "decay": "learned"},
    "gated_delta": {"mechanism": "gated_delta"},
    "gated_delta-features": {"mechanism": "gated_delta", "num_features": 12, "decay": "none"},
    "gated_delta-channel": {"mechanism": "gated_delta", "num_features": 6, "decay": "channel"},
    "gated_delta-no-erasing": {"mechanism": "gated_delta", "erase": False},
    "gated_delta-conv": {"mechanism": "gated_delta", "conv_size": 3},
    "gated_delta-qwen3_5": {"mechanism": "gated_delta", "form": "qwen3_5"},
    "window": {"mechanism": "window", "window_size": 6, "num_sinks": 2},
    "window-alibi": {"mechanism": "window", "window_size": 5, "num_sinks": 0},
    "linear-alibi": {"mechanism": "linear", "feature_map": "elu1"},
    "performer-alibi": {"mechanism": "performer", "num_features": 20},
    "hybrid-alibi": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 12},
    "hybrid-alibi-decay": {"mechanism": "hybrid", "window_size": 4, "num_features": 12, "decay": "learned"},
    **{
        f"linformer-{sharing}": {"mechanism": "linformer", "projection_size": 8, "projection_sharing": sharing}
        for sharing in ("none", "key-value", "layerwise")
    },
    "linformer-headwise": {"mechanism": "linformer", "projection_size": 8},
    **{
        f"linformer-{projection}": {"mechanism": "linformer", "projection_size": 9, "projection": projection}
        for projection in ("mean-pool", "stretched", "conv")
    },
    **{
        f"linformer-{kind}-none": {"mechanism": "linformer", "projection_size": size, "projection": kind}
        | {"projection_sharing": "none"}
        for kind, size in (("stretched", 7), ("conv", 9))
    },
    "linformer-random": {"mechanism": "linformer", "projection_size": 9, "projection": "random", "seed": 4},
    "linformer_linear-exp": {"mechanism": "linformer_linear", "projection_size": 8, "projection_sharing": "none"},
    "linformer_linear-elu1": {"mechanism": "linformer_linear", "projection_size": 8, "feature_map": "elu1"},
    "linformer_linear-layerwise": {"mechanism": "linformer_linear", "projection_size": 9, "feature_map": "hedgehog"}
    | {"projection_sharing": "layerwise"},
    "latent": {"mechanism": "latent", "num_latents": 9, "seed": 2},
    "nystrom": {"mechanism": "nystrom", "num_landmarks": 8},
    "nystrom-conv": {"mechanism": "nystrom", "num_landmarks": 20, "conv_kernel_size": 5},
}


# One row of each kind of state and of features, for what takes long.
KINDS = (
    *("aft-local", "aft-full-factorised", "linear-elu1", "linear-decay", "linear-gated", "performer"),
    *("performer-cosh", "performer-trig", "hybrid", "hybrid-decay", "gated_delta-channel", "window"),
    *("linformer-headwise", "linformer-stretched", "linformer_linear-exp", "latent", "nystrom-conv"),
)
# One row of each code path in a mechanism, its features and its parameters, for what does not depend on the others.
PATHS = (
    *(*KINDS, "linear-hedgehog", "linear-input-gate", "performer-geometry-favor++", "hybrid-exact-keys"),
    *("hybrid-alibi-decay", "gated_delta-conv", "gated_delta-qwen3_5", "linformer-none", "linformer-random"),
    *("linformer_linear-layerwise", "aft-simple"),
)
# The scaling of queries with head_dim 8.
SCALING = 8**-0.5

# Rows that serve a model with ALiBi, which none of transformers' encoders has.
ALIBI_ROWS = {"linear-alibi", "performer-alibi", "hybrid-alibi", "hybrid-alibi-decay", "window-alibi"}

# Rows that are ill-conditioned as functions beyond this standard deviation of q and k: no arithmetic can help there.
MAX_STD = {
    "performer-trig": 0.5  # weights of both signs: denominators come close to 0
}


def rows(**capabilities: bool) -> list[str]:
    """The ids of the rows that have, or lack, these capabilities: `rows(causal=True)`."""
    return [
        name
        for name in MECHANISM_ROWS
        if all(supports(name, capability) == value for capability, value in capabilities.items())
    ]


def forms(row: str) -> list[bool]:
    """`is_causal` of the forms that a row has, the causal one first."""
    return [is_causal for is_causal, name in ((True, "causal"), (False, "bidirectional")) if supports(row, name)]


def supports(row: str, capability: str) -> bool:
    settings = MECHANISM_ROWS[row]
    if row in ALIBI_ROWS and capability in ("bidirectional", "cross"):
        return False
    filled = LinearAttentionSettings(settings, max_length=97)
    return MECHANISMS[settings["mechanism"]].supports(capability, filled)


def build_mechanism(row: str, num_heads=4, num_key_value_heads=2, head_dim=8, max_length=97, dtype=torch.float32):
    """An initialised mechanism whose learned parameters are moved off their starting values.

    If it needs gates, it computes them itself, from keys in place of hidden states.
    """
    settings = MECHANISM_ROWS[row]
    slopes = tuple(0.5**head for head in range(1, num_key_value_heads + 1)) if row in ALIBI_ROWS else None
    hidden_size = num_key_value_heads * head_dim
    shape = LayerShape(num_heads, num_key_value_heads, head_dim, 0, max_length, slopes, hidden_size=hidden_size)
    mechanism = MECHANISMS[settings["mechanism"]](LinearAttentionSettings(settings, max_length=max_length), shape)
    mechanism.reset_parameters()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            size = parameter.abs().mean()  # those that start at 0 must move too, or they are not tested
            parameter += 0.1 * torch.where(size > 0, size, 1.0) * torch.randn_like(parameter)
        if settings.get("num_exact_keys"):  # all scores of the last heads are equal
            mechanism.score_projection[1:], mechanism.score_slope[1:] = 0, 0
    if mechanism.needs_gates:
        mechanism.register_forward_pre_hook(add_gates)
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, num_heads, 32, head_dim, generator=generator)
    key = torch.randn(1, num_key_value_heads, 32, head_dim, generator=generator)
    mechanism.calibrate(MechanismInputs(query, key, key, None, head_dim**-0.5, is_causal=False))
    return mechanism.to(dtype)


def hidden_states_of(key):
    """What takes the place of hidden states `[B, N, E]`: keys `[B, Hkv, N, D]`, which every token has."""
    return key.transpose(1, 2).flatten(2)


def mechanism_of(settings, *, heads=(4, 2), head_dim=8, layer=0, max_length=None, rotary=None, is_causal=None):
    """A mechanism of these settings at its start; `is_causal` checks that it has this form."""
    filled = LinearAttentionSettings(settings, max_length=max_length, is_causal=is_causal, model_type="test")
    shape = LayerShape(*heads, head_dim, layer, max_length, rotary=rotary, hidden_size=heads[1] * head_dim)
    mechanism = MECHANISMS[filled["mechanism"]](filled, shape).eval()
    mechanism.reset_parameters()
    return mechanism


def move(mechanism, scale: float = 0.3):
    """Move every parameter away from where it starts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return mechanism


def qkv(length: int, *, heads=(4, 2), dim=8, batch=2, std=1.0, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """Queries, keys and values `[batch, heads, length, dim]`, queries and keys with standard deviation `std`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((batch, number, length, dim) for number in (heads[0], heads[1], heads[1]))
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    return [(x * scale).to(dtype) for x, scale in zip(inputs, (std, std, 1.0))]


def attend(mechanism, query, key, value, mask=None, state=None, *, scaling=SCALING, is_causal=True, **inputs):
    """Output and state of a mechanism, from inputs that are given one by one, by the names in `MechanismInputs`."""
    return mechanism(MechanismInputs(query, key, value, mask, scaling, is_causal, **inputs), state)


def padding(length: int, kind: str = "left") -> torch.Tensor | None:
    """A mask of two rows, the first of which has padding on the left, on the right, in the interior, or none."""
    mask = torch.ones(2, length, dtype=torch.bool)
    places = {"left": (0, length // 3), "right": (length - length // 3, length), "interior": (length // 4, length // 2)}
    if kind == "none":
        return None
    mask[0, slice(*places[kind])] = False
    return mask


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference by the norm of what is expected, infinite where a number is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6)).item()


def add_gates(mechanism, args):
    inputs, *state = args
    if inputs.gates is None:
        inputs = inputs._replace(gates=mechanism.gates(hidden_states_of(inputs.key)))
    return inputs, *state


_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_TEXT = {"vocab_size": 64, **_SIZES, "intermediate_size": 48}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# A wide initialisation: at the usual 0.02 the attention of an untrained model is uniform and proves nothing.
_WIDE = {"initializer_range": 0.3, **_ENDS}
_LONG = {"max_position_embeddings": 64}

# One row a family: the stock config class and its tiny sizes.
FAMILY_ROWS = {
    "bert": ("BertConfig", {**_TEXT, **_LONG, **_WIDE}),
    "roberta": ("RobertaConfig", {**_TEXT, **_WIDE, "max_position_embeddings": 80}),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, **_LONG, **_WIDE},
    ),
    "vit": (
        "ViTConfig",
        {**_SIZES, "intermediate_size": 48, "image_size": 12, "patch_size": 2, "initializer_range": 0.3},
    ),
    "gpt2": ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **_WIDE}),
    "gpt_neox": ("GPTNeoXConfig", {**_TEXT, **_LONG, **_WIDE}),
    "opt": (
        "OPTConfig",
        {"vocab_size": 64, **_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, **_LONG, **_ENDS},
    ),
    "llama": ("LlamaConfig", {**_TEXT, **_LONG, **_WIDE, "num_key_value_heads": 2}),
    "mistral": ("MistralConfig", {**_TEXT, **_LONG, **_WIDE, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {**_TEXT, **_LONG, **_WIDE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {**_TEXT, **_LONG, **_WIDE, "num_key_value_heads": 2, "head_dim": 16}),
    "phi3": (
        "Phi3Config",
        {**_TEXT, **_LONG, **_WIDE, "num_key_value_heads": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
}
ENCODERS = ("bert", "roberta", "distilbert", "vit")
DECODERS = tuple(name for name in FAMILY_ROWS if name not in ENCODERS)


def stock_config(family: str, **changes):
    name, fields = FAMILY_ROWS[family]
    return getattr(transformers, name)(**{**fields, **changes})


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """A context with another default dtype of torch."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stock_model(family: str, auto_class: str | None = None, **changes):
    """A random stock twin in evaluation mode, by default with the language modelling head (vision: the base)."""
    auto_class = auto_class or {"vit": "AutoModel"}.get(
        family, "AutoModelForCausalLM" if family in DECODERS else "AutoModelForMaskedLM"
    )
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(stock_config(family, **changes)).eval()


def sample_inputs(family: str, batch: int = 2, length: int = 13) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)}
    return {"input_ids": torch.randint(3, 64, (batch, length), generator=generator)}


def recording_cache(model):
    """A cache of the states of every converted layer, which can go back to what it held before its last tokens."""
    cache = transformers.DynamicCache(config=model.config)
    for module in linear_attention_modules(model).values():
        state_layer(cache, module.layer_idx)
    cache.activate_past_recording()
    return cache
