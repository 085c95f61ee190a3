# SPDX-License-Identifier: Apache-2.0
"""The options of every mechanism, and what it can do with them; this file imports neither torch nor transformers.

The class of a mechanism derives from its options, so that `LinearAttention.obstacle` is `LinearOptions.obstacle`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple


# Above this an input takes seconds or gigabytes, however short it is: features, landmarks and the like per head, and
# exact keys.
MOST_FEATURES = MOST_KEYS = 2**17
NAMED_LAYERS = ("all", "full_attention", "none")  # the texts that the setting `layers` may be
# Features of stock attention that a state of constant size cannot represent: the values of the setting `drop`.
DROPPABLE = ("attention_sinks", "position_bias", "sliding_window", "softcap")
# The settings that every mechanism has, with their defaults.
COMMON_SETTINGS: dict[str, Any] = {
    "layers": "all", "drop": [], "cross_attention": False, "rotary": None,
}  # fmt: skip
# Settings that checkpoints may have though they are options no more, each with the value that changed nothing.
REMOVED_SETTINGS: dict[str, Any] = {
    "uniform_mixing": 0,
    "pinv_iterations": 6,
    "activation": "silu",
    "softmax_heads": [],
    "far": "linear",
    "normalization": "joint",
}
LARGEST = 2**40  # of any whole number: sizes above are beyond every memory, and then beyond the integers of torch


@dataclass(frozen=True)
class Option:
    """An option of a mechanism: a key of `config.linear_attention` and a flag `--<name>` of the conversion script."""

    kind: type
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: int | float | None = None
    maximum: int = LARGEST
    is_per_layer: bool = False  # whether a list with one value per attention layer is allowed too
    needs: Mapping[str, Container[Any]] = field(default_factory=dict)  # values of other options; else it has no effect

    def problem(self, value: Any) -> str | None:
        """What is wrong with this value, as a predicate, or None."""
        if self.is_per_layer and isinstance(value, (list, tuple)):
            problems = [(layer, self._problem(entry)) for layer, entry in enumerate(value)]
            return next((f"{problem} (layer {layer})" for layer, problem in problems if problem), None)
        return self._problem(value)

    def _problem(self, value: Any) -> str | None:
        if value is None and self.default is None:
            return None
        allowed: Any = (int, float) if self.kind is float else self.kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and self.kind is not bool):
            return f"must be of type {self.kind.__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.choices and value not in self.choices:
            return "must be one of " + ", ".join(f"`{choice}`" for choice in self.choices)
        if self.kind is int and value > self.maximum:
            return f"must be at most {self.maximum:,}; choose a smaller number"
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum}"
        return None


class MechanismOptions:
    """Base class of the options of a mechanism, and of what it can do with them; its subclass is a base of its module.

    The attributes `supports_<capability>` say what the mechanism can do. If some settings can do less, the class
    overrides `obstacle`, which every caller asks. `weights`: there is one matrix of weights per head. `state`: the
    causal form decodes from a state of constant size. `alibi`: ALiBi is honoured exactly.
    """

    options: ClassVar[dict[str, Option]] = {}
    supports_causal: ClassVar[bool] = False
    supports_bidirectional: ClassVar[bool] = False
    supports_cross: ClassVar[bool] = False
    supports_padding: ClassVar[bool] = False
    supports_state: ClassVar[bool] = False
    supports_gqa: ClassVar[bool] = False
    supports_weights: ClassVar[bool] = True
    supports_alibi: ClassVar[bool] = False

    @classmethod
    def filled(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every option, with defaults for those that `settings` lacks."""
        return {name: settings.get(name, option.default) for name, option in cls.options.items()}

    @classmethod
    def unused(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """The options that have no effect with the other ones, as `{option: the setting that disables it}`."""
        unused: dict[str, str] = {}
        for name, option in cls.options.items():
            for other, values in option.needs.items():
                if other in cls.options and settings[other] not in values:
                    unused.setdefault(name, f"`{other}` = `{settings[other]}`")
        return unused

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """Every invalid combination of options in `settings`, each as one sentence."""
        return []

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """Why these settings lack a capability, as the predicate of a sentence, or None if they have it."""
        return None if getattr(cls, f"supports_{capability}") else f"has no {capability} form"

    @classmethod
    def supports(cls, capability: str, settings: Mapping[str, Any]) -> bool:
        """Whether the mechanism with these settings has the capability `supports_<capability>`."""
        return cls.obstacle(capability, settings) is None

    @classmethod
    def needs_calibration(cls, settings: Mapping[str, Any]) -> bool:
        """Whether `calibrate` has constants to fit, so that a conversion must provide real queries and keys."""
        return False


DECAY_OPTION = Option(
    str,
    "none",
    "learned: with every token, the weight of a key shrinks by a factor learned per head; decoders only",
    choices=("none", "learned"),
)

TRAINED_LENGTH_OPTION = Option(
    int,
    None,
    "the input length, in tokens, that the softmax model was trained on (by default from its config): sinks appear no "
    "farther away than this, `rope` = `partial` keeps the frequencies that make a full turn within it, and `decay` = "
    "`learned` or `gated` starts with this half-life; in encoders with `hybrid`, the far keys of a longer input weigh "
    "together as much as those of an input of this length",
    minimum=1,
)

ROPE_OPTIONS: dict[str, Option] = {
    "rope": Option(
        str,
        "before_map",
        "which rotary frequencies the feature map sees; before_map: all; partial: those that make a full turn within "
        "the trained length; none: none of them (window and sinks of `hybrid` always use all)",
        choices=("before_map", "partial", "none"),
    ),
    "rope_frequencies": Option(
        int,
        None,
        "the number of rotary frequencies, the fastest first, that the feature map sees with `rope` = `partial`; by "
        "default those whose wavelength is at most the trained length",
        minimum=0,
        is_per_layer=True,
        needs={"rope": ("partial",)},
    ),
    "trained_length": TRAINED_LENGTH_OPTION,
}
GATED_DECAY_OPTION = replace(
    DECAY_OPTION,
    choices=("none", "learned", "gated"),
    help="what the weight of a key shrinks by with every token after it; learned: a factor per head; gated: a factor "
    "per head that follows from the hidden state of that token, for `feature_map` = `exp` or `hedgehog`; decoders only",
)

INPUT_GATE_OPTION = Option(
    bool,
    False,
    "weigh every key by a factor that follows from the hidden state of its token, for `feature_map` = `exp` or "
    "`hedgehog`",
)


class FeatureMapTraits(NamedTuple):
    """What the options have to know of a feature map."""

    log_features: bool  # whether it returns the logarithms of features
    has_num_features: bool  # whether the user may choose `num_features`; otherwise it follows from head_dim
    multiple: int = 1  # `num_features` is a multiple of this

    def problem(self, num_features: int) -> str | None:
        """The reason why this number of features is not allowed, as a predicate, or None if it is allowed."""
        if num_features % self.multiple == 0:
            return None
        return f"must be a multiple of {self.multiple}, the number of features that one row of the map gives"


FEATURE_MAP_TRAITS = {
    "elu1": FeatureMapTraits(False, False),
    "relu": FeatureMapTraits(False, False),
    "exp": FeatureMapTraits(True, True),
    "hedgehog": FeatureMapTraits(True, True, 2),
}
RANDOM_FEATURE_TRAITS = {
    "exp": FeatureMapTraits(True, True),
    "cosh": FeatureMapTraits(True, True, 2),
    "trig": FeatureMapTraits(False, True, 2),
    "relu": FeatureMapTraits(False, True),
    "favor++": FeatureMapTraits(True, True),
}


class LinearOptions(MechanismOptions):
    """The options of `linear`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "feature_map": Option(str, "exp", "phi of queries and keys", choices=tuple(FEATURE_MAP_TRAITS)),
        "num_features": Option(
            int, None, "features per head; by default what the feature map suggests", minimum=1, maximum=MOST_FEATURES
        ),
        "decay": GATED_DECAY_OPTION,
        "input_gate": INPUT_GATE_OPTION,
        **ROPE_OPTIONS,
    }
    supports_causal = supports_bidirectional = supports_cross = supports_padding = supports_state = True
    supports_gqa = supports_alibi = True

    @classmethod
    def traits(cls, settings: Mapping[str, Any]) -> FeatureMapTraits:
        """The traits of the feature map that `settings` name."""
        return FEATURE_MAP_TRAITS[settings["feature_map"]]

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """A learned decay is for causal attention only."""
        if capability in ("bidirectional", "cross") and settings.get("decay") in ("learned", "gated"):
            return f"with `decay` = `{settings['decay']}` has no {capability} form"
        if capability == "cross" and settings.get("input_gate"):
            return "with `input_gate` has no cross form"
        return super().obstacle(capability, settings)

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """`num_features` must suit the feature map, and gates need one whose features are exponents."""
        feature_map = cls.traits(settings)
        if not feature_map.log_features and (settings.get("decay") == "gated" or settings.get("input_gate")):
            what = "`decay` = `gated`" if settings.get("decay") == "gated" else "`input_gate`"
            allowed = " or ".join(f"`{name}`" for name, other in FEATURE_MAP_TRAITS.items() if other.log_features)
            return [f"{what} is impossible with `feature_map` = `{settings['feature_map']}`; choose {allowed}"]
        if settings["num_features"] is None:
            return []
        if not feature_map.has_num_features:
            sized = " or ".join(f"`{name}`" for name, other in FEATURE_MAP_TRAITS.items() if other.has_num_features)
            return [
                f"`num_features` = {settings['num_features']} has no effect with `feature_map` = "
                f"`{settings['feature_map']}`, whose features follow from head_dim; leave it out, or choose {sized}"
            ]
        problem = feature_map.problem(settings["num_features"])
        return [f"`num_features` = {settings['num_features']} {problem}"] if problem else []


class PerformerOptions(LinearOptions):
    """The options of `performer`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "features": Option(
            str,
            "exp",
            "the random features: of softmax, or of generalised attention (relu)",
            choices=tuple(RANDOM_FEATURE_TRAITS),
        ),
        "num_features": Option(
            int, None, "random features per head; by default 4 x head_dim", minimum=1, maximum=MOST_FEATURES
        ),
        "orthogonal": Option(bool, True, "projections in orthogonal blocks; false draws every row by itself"),
        "redraw_interval": Option(int, 0, "training forwards between new projections; 0 never redraws", minimum=0),
        "geometry": Option(
            str,
            "fixed",
            "learned: an affine map per head of queries and of keys before the features, which training fits",
            choices=("fixed", "learned"),
        ),
        "decay": DECAY_OPTION,
        **ROPE_OPTIONS,
        "seed": Option(int, 0, "seed of the random projection", minimum=0),
    }

    @classmethod
    def traits(cls, settings: Mapping[str, Any]) -> FeatureMapTraits:
        """The traits of the random features that `settings` name."""
        return RANDOM_FEATURE_TRAITS[settings["features"]]

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """`trig` has no causal form and no state."""
        if settings["features"] == "trig" and capability in ("causal", "state"):
            return f"with `features` = `trig`, whose early denominators may be negative, has no {capability} form"
        return super().obstacle(capability, settings)

    @classmethod
    def needs_calibration(cls, settings: Mapping[str, Any]) -> bool:
        """Only FAVOR++ has a constant to fit."""
        return settings["features"] == "favor++"


# The values of `projection` with matrices that have a size.
WITH_MATRICES = {"projection": ("learned", "stretched", "conv", "random")}


class LinformerOptions(MechanismOptions):
    """The options of `linformer`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "projection": Option(
            str,
            "learned",
            "what E and F are; mean-pool needs no training and takes any length; stretched is mean-pool that learns",
            choices=("learned", "mean-pool", "stretched", "conv", "random"),
        ),
        "projection_size": Option(
            int, 128, "k, the number of compressed keys and values", minimum=1, maximum=MOST_FEATURES, is_per_layer=True
        ),
        "projection_sharing": Option(
            str,
            "headwise",
            "what shares E and F: none, headwise (the heads of a layer), key-value (E = F too), layerwise (all layers)",
            choices=("none", "headwise", "key-value", "layerwise"),
            needs=WITH_MATRICES,
        ),
        "max_length": Option(
            int, None, "n, the longest input; by default the model's own limit", minimum=1, needs=WITH_MATRICES
        ),
        "seed": Option(int, 0, "seed of the random projections", minimum=0, needs={"projection": ("random",)}),
    }
    supports_bidirectional = supports_padding = supports_gqa = True

    @classmethod
    def projection_kind(cls, settings: Mapping[str, Any]) -> str:
        """The value of the option `projection`."""
        return settings["projection"]

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """`max_length` must be known, and `projection_size` must not exceed it; sharing needs equal sizes."""
        sharing, sizes = settings["projection_sharing"], settings["projection_size"]
        if cls.projection_kind(settings) == "mean-pool":
            return []
        problems, length = [], settings["max_length"] or max_length
        largest = max(sizes) if isinstance(sizes, (list, tuple)) else sizes
        if length is None:
            problems.append(
                "`max_length` is required, because the architecture sets no limit; set it to the longest input, or "
                "choose `projection` = `mean-pool`"
            )
        elif largest > length:
            problems.append(f"`projection_size` = {sizes} is larger than the longest input, {length}")
        if sharing == "layerwise" and isinstance(sizes, (list, tuple)) and len(set(sizes)) > 1:
            problems.append(f"`projection_size` = {sizes} must be one number where `projection_sharing` = `layerwise`")
        return problems


class LinformerLinearOptions(LinformerOptions):
    """The options of `linformer_linear`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "feature_map": Option(str, "exp", "phi of queries and keys", choices=("elu1", "relu", "exp", "hedgehog")),
        "num_features": LinearOptions.options["num_features"],
        **{name: LinformerOptions.options[name] for name in ("projection_size", "projection_sharing", "max_length")},
    }

    @classmethod
    def projection_kind(cls, settings: Mapping[str, Any]) -> str:
        """E and F are always learned."""
        return "learned"

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """The problems of both parts, compression and feature map."""
        return super().problems(settings, max_length) + LinearOptions.problems(settings, max_length)


class NystromOptions(MechanismOptions):
    """The options of `nystrom`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "num_landmarks": Option(int, 64, "M, the segment means of queries and keys", minimum=1, maximum=MOST_FEATURES),
        "conv_kernel_size": Option(
            int,
            0,
            "tokens under a convolution of the values that is added, an odd number, or 0 for none",
            minimum=0,
            maximum=MOST_FEATURES,
        ),
    }
    supports_bidirectional = supports_padding = supports_gqa = True

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """The convolution must be centred on its token."""
        width = settings["conv_kernel_size"]
        if width and width % 2 == 0:
            return [f"`conv_kernel_size` = {width} must be odd, to be centred on its token, or 0 for no convolution"]
        return []


class LatentOptions(MechanismOptions):
    """The options of `latent`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "num_latents": Option(
            int, 64, "L, the learned latent queries per head of the keys", minimum=1, maximum=MOST_FEATURES
        ),
        "seed": Option(int, 0, "seed of the latents' initialisation", minimum=0),
    }
    supports_bidirectional = supports_cross = supports_padding = supports_gqa = True


class AftOptions(MechanismOptions):
    """The options of `aft`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "variant": Option(
            str, "simple", "which position biases are learned", choices=("simple", "local", "conv", "full")
        ),
        "window_size": Option(
            int,
            32,
            "W: local and conv learn biases for |t - s| < W",
            minimum=1,
            maximum=MOST_KEYS,
            needs={"variant": ("local", "conv")},
        ),
        "position_rank": Option(
            int, 64, "rank of full's matrix of biases; 0 learns all T x T", minimum=0, needs={"variant": ("full",)}
        ),
        "max_length": Option(
            int,
            None,
            "T of full and local; by default the model's own limit",
            minimum=1,
            needs={"variant": ("local", "full")},
        ),
        "seed": Option(
            int,
            0,
            "seed of the factorised biases",
            minimum=0,
            needs={"variant": ("full",), "position_rank": range(1, sys.maxsize)},
        ),
    }
    supports_causal = supports_bidirectional = supports_padding = supports_state = supports_gqa = True
    supports_weights = False

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """`full` has no causal form and no state."""
        if settings["variant"] == "full" and capability in ("causal", "state"):
            return f"with `variant` = `full`, which would need all earlier keys at each step, has no {capability} form"
        return super().obstacle(capability, settings)

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """`full` and `local` need a maximum length."""
        if settings["variant"] in ("full", "local") and (settings["max_length"] or max_length) is None:
            return ["`max_length` is required, because the architecture sets no limit; set it to the longest input"]
        return []


FEW_KEYS = 8192  # this many may exceed the longest input


class WindowOptions(MechanismOptions):
    """The options of `window`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "window_size": Option(
            int,
            64,
            "the number w of newest real tokens that every query attends to exactly; in encoders w - 1 to either side",
            minimum=1,
            maximum=MOST_KEYS,
        ),
        "num_sinks": Option(
            int,
            4,
            "the number s of first real tokens that every query attends to exactly; in encoders they also attend to "
            "every token exactly",
            minimum=0,
            maximum=MOST_KEYS,
        ),
        "trained_length": TRAINED_LENGTH_OPTION,
    }
    supports_causal = supports_bidirectional = supports_padding = supports_state = True
    supports_gqa = supports_alibi = True

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """Exact keys beyond the longest input of the model cost time in every input, and are never seen."""
        most = MOST_KEYS if max_length is None else max(FEW_KEYS, max_length)
        return [
            f"`{name}` = {settings[name]} must be at most {most:,} in a model that reads {max_length} tokens; choose a "
            "smaller number"
            for name in ("window_size", "num_sinks")
            if settings[name] > most
        ]


class HybridOptions(WindowOptions):
    """The options of `hybrid`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        **WindowOptions.options,
        "feature_map": Option(str, "exp", "phi, applied to queries and far keys", choices=("exp", "hedgehog")),
        "num_features": LinearOptions.options["num_features"],
        "num_exact_keys": Option(
            int,
            0,
            "the number M of keys behind the window, of each key/value head, that stay exact: those with the largest "
            "learned scores; decoders only",
            minimum=0,
            maximum=MOST_KEYS,
            is_per_layer=True,
        ),
        "decay": DECAY_OPTION,
        **ROPE_OPTIONS,
    }

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """Exact keys run forwards and know no slopes."""
        if settings["num_exact_keys"] and capability in ("bidirectional", "alibi"):
            return f"with `num_exact_keys` = {settings['num_exact_keys']} has no {capability} form"
        return super().obstacle(capability, settings)

    @classmethod
    def needs_calibration(cls, settings: Mapping[str, Any]) -> bool:
        """The scores that choose exact keys are fitted."""
        return bool(settings.get("num_exact_keys"))

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """`num_features` must fit the feature map, and the window the model."""
        problems = super().problems(settings, max_length)
        if settings["num_features"] is None:
            return problems
        problem = FEATURE_MAP_TRAITS[settings["feature_map"]].problem(settings["num_features"])
        return [*problems, f"`num_features` = {settings['num_features']} {problem}"] if problem else problems


OWN, QWEN3_5 = "own", "qwen3_5"
# The options that another form than our own does not have.
OF_OUR_FORM: dict[str, Container[Any]] = {"form": (OWN,)}


class GatedDeltaOptions(MechanismOptions):
    """The options of `gated_delta`, and what it can do with them."""

    options: ClassVar[dict[str, Option]] = {
        "form": Option(
            str,
            OWN,
            "what the layers are made of; qwen3_5: the linear layers of Qwen3.5, so that the result of a conversion is "
            "a checkpoint of that architecture, which transformers and other engines load without this package",
            choices=(OWN, QWEN3_5),
        ),
        "num_features": Option(
            int, None, "features per head; by default head_dim", minimum=1, maximum=MOST_FEATURES, needs=OF_OUR_FORM
        ),
        "decay": Option(
            str,
            "head",
            "what forgets over time, depending on the token: nothing, the state of each head by one factor, or each of "
            "its features by its own",
            choices=("none", "head", "channel"),
            needs=OF_OUR_FORM,
        ),
        "erase": Option(
            bool, True, "erase what the state holds at a key before the key's new value is stored", needs=OF_OUR_FORM
        ),
        "conv_size": Option(
            int,
            0,
            "the number of newest tokens in a short causal convolution over queries, keys and values, at least 2; 0 is "
            "none",
            minimum=0,
            maximum=MOST_FEATURES,
            needs=OF_OUR_FORM,
        ),
        **ROPE_OPTIONS,
        "rope": replace(ROPE_OPTIONS["rope"], needs=OF_OUR_FORM),
    }
    supports_causal = supports_padding = supports_state = supports_gqa = True

    @classmethod
    def obstacle(cls, capability: str, settings: Mapping[str, Any]) -> str | None:
        """The form of Qwen3.5 has no weights."""
        if settings.get("form") == QWEN3_5 and capability == "weights":
            return f"with `form` = `{QWEN3_5}` has no weights"
        return super().obstacle(capability, settings)

    @classmethod
    def problems(cls, settings: Mapping[str, Any], max_length: int | None) -> list[str]:
        """A convolution has at least two tokens."""
        return ["`conv_size` = 1 would see no earlier token; use 0 or at least 2"] if settings["conv_size"] == 1 else []


# By the name in `config.linear_attention["mechanism"]`.
MECHANISM_OPTIONS: dict[str, type[MechanismOptions]] = {
    "aft": AftOptions,
    "gated_delta": GatedDeltaOptions,
    "hybrid": HybridOptions,
    "latent": LatentOptions,
    "linear": LinearOptions,
    "linformer": LinformerOptions,
    "linformer_linear": LinformerLinearOptions,
    "nystrom": NystromOptions,
    "performer": PerformerOptions,
    "window": WindowOptions,
}
