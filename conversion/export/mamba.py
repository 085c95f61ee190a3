"""Normalised linear attention as a Mamba-2 block: what the stock architectures that have one share.

    state  <- exp(dt A) state + dt x B^T       y = state C       output = W rmsnorm(y silu(gate))

    the block                  linear attention
    heads, and groups of norm  query heads
    B and C                    phi(k) and phi(q): silu(K z) is K relu(z), unless |z| is a few 1 / K
    x                          v: silu(s v) is s v / 2 for a small s; and a constant, whose y is the denominator
    dt = 1, and A              the decay
    silu(gate)                 a constant
    rmsnorm                    the division by the denominator, beside which the values are too small to count
    convolution                the identity

The scales are powers of 2. They follow from bounds on what the weights can make of a normalised hidden state, so that
nothing overflows in float32 or bfloat16, whatever the input is; float16 is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.export import decoders


# Exponents of 2. In float32 silu(x) is x or 0 if |x| is above 2^7, and x / 2 if it is below 2^-24.
FEATURE, VALUE = 36, -24
CONSTANT = 5  # of the channels whose y is the denominator: silu(2^5) is 2^5
# The largest denominator after the gate: the sum of its squares must stay below 2^127. Near 2^-60 of that size the
# epsilon of the norm counts, and the output becomes 0, as it is where query and keys share no feature.
LARGEST = 60
MOST_TOKENS = 2.0**20  # that have the largest features, and no decay makes them count less
DT_BIAS = math.log(math.e - 1)  # its softplus is 1
NO_DECAY = -80.0  # the logarithm of a rate that changes nothing in float32, however many tokens there are
UNIT = 16  # of sizes; vLLM's convolution in bfloat16 on a CPU takes multiples of 32 channels
# What the settings of the mechanism must be.
NEEDED = {
    "mechanism": ("linear",),
    "feature_map": ("t2r",),
    "rope": ("none",),
    "decay": ("none", "learned"),
    "input_gate": (False,),
}


@dataclass(frozen=True)
class Sizes:
    """Of the blocks of a model: heads, channels of x per head, features per head."""

    heads: int
    channels: int
    features: int

    @property
    def denominators(self) -> int:
        """The channels per head whose y is the denominator; 1/16 of them gives the norm a power of 2."""
        return max(1, self.channels // 16)

    def hold(self, size: int) -> bool:
        """Whether there are channels for a value of this size and its denominator, in a number that kernels take."""
        convolved = self.heads * (self.channels + 2 * self.features)
        return self.channels >= size + self.denominators and convolved % (2 * UNIT) == 0

    def fields(self) -> dict[str, Any]:
        """The settings that Mamba-2 blocks have in common."""
        return {
            "mamba_n_heads": self.heads,
            "mamba_n_groups": self.heads,
            "mamba_d_head": self.channels,
            "mamba_d_state": self.features,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
            "mamba_proj_bias": True,
        }


class Affine(NamedTuple):
    """The R channels of a head as affine functions of the hidden state, in float64."""

    weight: Tensor  # [R, E]
    bias: Tensor  # [R]

    def bounds(self, norm: Tensor) -> Tensor:
        """The largest size of each channel, `[R]`, for hidden states after an RMS norm with these weights `[E]`."""
        return (self.weight * norm).norm(dim=1) * math.sqrt(self.weight.shape[1]) + self.bias.abs()

    def times(self, factor: float) -> Affine:
        """The channels times a factor."""
        return Affine(self.weight * factor, self.bias * factor)


def obstacles(config: Any, sources: Collection[str]) -> list[str]:
    """Why a decoder with Mamba-2 blocks cannot hold this converted model, each with what to do.

    Args:
        config: that of the converted model.
        sources: the stock model types whose other layers the decoder has.
    """
    if config.stock_model_type not in sources:
        return decoders.obstacles(config, sources, ())
    problems = {
        f"`{name}` = `{entry[name]}` is not possible; convert with `--attention linear --feature_map t2r --rope none`"
        + (" and `--decay none` or `learned`" if name == "decay" else "")
        for entry in entries_of(config.linear_attention)
        for name, values in NEEDED.items()
        if name in entry and entry[name] not in values
    }
    if not decoders.linear_layers(config):
        problems.add("no layer is converted; leave out `--layers none`")
    if config.dtype == torch.float16:
        problems.add("float16 is too narrow for the features; convert with `--dtype bfloat16` or `float32`")
    problems.update(decoders.obstacles(config, sources, decoders.softmax_layers(config)))
    return sorted(problems)


def linear_attentions(layers: Sequence[Any]) -> dict[int, Any]:
    """The attention of the converted layers, by number."""
    return {i: layer.self_attn for i, layer in enumerate(layers) if hasattr(layer.self_attn, "linear_attention")}


def number_of_features(modules: Mapping[int, Any]) -> int:
    """The features of the layer that has most, in multiples of `UNIT`; those that are too many are 0."""
    most = max(module.linear_attention.feature_map.num_features for module in modules.values())
    return -(-most // UNIT) * UNIT


class Block:
    """The parameters of a Mamba-2 block by head, which begin as those of a block whose output is 0."""

    @torch.no_grad()
    def __init__(self, block: Any) -> None:
        self.sizes = sizes = Sizes(block.num_heads, block.head_dim, block.ssm_state_size)
        inner, states = sizes.heads * sizes.channels, sizes.heads * sizes.features
        for parameter in block.parameters():
            parameter.zero_()
        block.conv1d.weight[:, 0, -1] = 1
        block.dt_bias.fill_(DT_BIAS)
        self.rate = block.A_log.fill_(NO_DECAY)
        self.gate = block.in_proj.bias[:inner].view(sizes.heads, -1)
        rows, biases = block.in_proj.weight[inner : 2 * (inner + states)], block.conv1d.bias
        # Of the channels x, B and C, `[heads, channels, E]` and `[heads, channels]`.
        self.rows = [x.unflatten(0, (sizes.heads, -1)) for x in rows.split((inner, states, states))]
        self.biases = [x.view(sizes.heads, -1) for x in biases.split((inner, states, states))]
        self.norm = block.norm.weight.view(sizes.heads, -1)
        self.output = block.out_proj.weight.view(-1, sizes.heads, sizes.channels)


@torch.no_grad()
def fill(block: Any, module: Any, norm: Tensor, heads: Sequence[int]) -> None:
    """Write into a Mamba-2 block, in float32, what these query heads of a converted layer compute; others are 0.

    Args:
        block: the block of the stock model, which has at least so many heads.
        module: the attention of the converted layer; of a softmax layer, if there are no heads.
        norm: the weights `[E]` of the norm of its hidden states.
        heads: the numbers of its query heads.
    """
    target, groups, size = Block(block), module.num_key_value_groups, module.head_dim
    norm, sizes = norm.double(), target.sizes
    if module.o_proj.bias is not None:
        block.out_proj.bias.copy_(module.o_proj.bias)
    for place, head in enumerate(heads):
        mechanism, group = module.linear_attention, head // groups
        rate = norm.new_zeros(()) if mechanism.decay is None else -mechanism.decay()[group].double()
        key, query = (
            _features(linear, number, group, mechanism.feature_map, module.linear_attention_scaling)
            for linear, number in ((module.k_proj, group), (module.q_proj, head))
        )
        key, query = (x.times(_power(x.bounds(norm), FEATURE)) for x in (key, query))
        value = _of_head(module.v_proj, group, size)
        small = _power(value.bounds(norm), VALUE)
        for x, rows, biases in zip((value.times(small), key, query), target.rows, target.biases, strict=True):
            rows[place, : len(x.bias)], biases[place, : len(x.bias)] = x.weight, x.bias
        target.biases[0][place, -sizes.denominators :] = 2.0**CONSTANT
        target.rate[place] = rate.log().clamp(min=NO_DECAY)
        tokens = (1 / -torch.expm1(-rate)).clamp(max=MOST_TOKENS)
        largest = 2.0**CONSTANT * tokens * (key.bounds(norm) * query.bounds(norm)).sum()
        target.gate[place] = 2 * _power(largest, LARGEST)  # silu of a small number is half of it
        # What the norm divides by has this share of the denominator; and silu has made the values half as large.
        share = 2.0**CONSTANT * math.sqrt(sizes.denominators / sizes.channels)
        target.norm[place, :size] = 2 * share / small
        target.output[:, place, :size] = module.o_proj.weight[:, head * size : (head + 1) * size]


def _features(linear: nn.Linear, head: int, key_head: int, feature_map: Any, scaling: float) -> Affine:
    """The input of the relu in a key/value head's feature map, for one head of queries or keys."""
    matrix = feature_map.projection[key_head].double().T * math.sqrt(scaling)
    x = _of_head(linear, head, matrix.shape[1])
    return Affine(matrix @ x.weight, matrix @ x.bias + feature_map.bias[key_head, 0].double())


def _of_head(linear: nn.Linear, head: int, size: int) -> Affine:
    rows = slice(head * size, (head + 1) * size)
    weight = linear.weight[rows].double()
    return Affine(weight, weight.new_zeros(size) if linear.bias is None else linear.bias[rows].double())


def _power(bounds: Tensor, exponent: int) -> float:
    """The power of 2 with which the largest of these bounds is at most 2^exponent, and more than half of that."""
    largest = float(bounds.max())
    return 2.0 ** (exponent - math.ceil(math.log2(largest))) if largest > 0 else 1.0


def begun(model_class: Any, config: Any, model: Any) -> PreTrainedModel:
    """A stock model in float32 that has the embeddings and the output layer of `model`, and no other weights yet."""
    with no_init_weights():
        stock = model_class(config).float()
    copy_(stock.model.embed_tokens, model.model.embed_tokens)
    copy_(stock.lm_head, model.lm_head)
    return stock


@torch.no_grad()
def copy_(target: nn.Module, *sources: nn.Module) -> None:
    """Write the parameters of modules, one below the other, into the module `target`; a bias that lacks them is 0."""
    for name, parameter in target.named_parameters():
        found = [getattr(source, name) for source in sources]
        parameter.copy_(torch.cat([torch.zeros_like(parameter) if x is None else x for x in found]))
