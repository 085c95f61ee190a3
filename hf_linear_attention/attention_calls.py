# SPDX-License-Identifier: Apache-2.0
"""What a stock attention module hands to transformers' attention interface, observed: `attention_call`.

The module's own forward runs on two tokens until it gets there. Its weights are not looked at, because they may be on
`meta`, still to be loaded, or partitioned: every projection gives made-up numbers, no two of a head alike, and every
other parameter is ones. No random number is drawn.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface
from transformers.utils import logging

from .attention.architectures import layer_hidden_size
from .attention.transformers_internals import set_attention_implementation


logger = logging.get_logger(__name__)
OBSERVED = "observed_call"
NUM_TOKENS = 2
# By stock class, see `interface_keywords`.
KEYWORDS: dict[type, frozenset[str]] = {}
# Their second argument, or third, is a weight.
PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.addmm, torch.Tensor.addmm}
# Arguments with a default without which some forwards do nothing.
OPTIONAL = {"attention_mask", "cross_attention_states", "encoder_hidden_states", "key_value_states", "position_ids"}
POSITIONS = {"position_embeddings", "relative_position_embeddings"}


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention interface."""

    query: Tensor  # [1, H, N, D]
    key: Tensor  # [1, Hkv, N, D]
    value: Tensor  # [1, Hkv, N, Dv]
    keywords: frozenset[str]


class NotObservedError(ValueError):
    """A stock module whose forward takes none of the arguments that are tried."""


class _InterfaceReachedError(Exception):
    """Ends the forward where it calls the attention interface; known by its attributes, whichever copy of this file
    (plugin and checkpoint, in one process) has registered its function last."""

    def __init__(self, caller: nn.Module, call: AttentionCall):
        super().__init__(type(caller).__name__)
        self.caller, self.call = caller, call


class _WithoutWeights(TorchFunctionMode):
    """Computes on the CPU, without the values of any parameter and without random numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = (*args, *kwargs.values())[:2]
            return _distinct(*x.shape[:-1], weight.shape[0])
        if func is F.dropout:
            return args[0]
        args, kwargs = tree_map(_stand_in, (args, kwargs))
        if func in PRODUCTS:
            return _distinct(*func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs)).shape)
        return func(*args, **kwargs)


def _distinct(*shape: int) -> Tensor:
    """Float32 numbers that no normalisation makes alike, in size either."""
    last = torch.arange(1, shape[-1] + 1, dtype=torch.float32, device="cpu") ** 1.5
    return last.expand(*shape).clone()


def _stand_in(value: Any) -> Any:
    """Ones in place of a parameter, or of a buffer without values; other tensors come to the CPU."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, nn.Parameter) and not value.is_meta:
        return value.to("cpu")
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return torch.ones((), dtype=dtype, device="cpu").expand(value.shape)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def attention_call(
    module: nn.Module, stock_class: type, positions: Iterable[Any] | None = None
) -> AttentionCall | None:
    """The call of the attention interface that this module makes itself; None if its forward ends without one.

    The module is left as it was, and so is torch's random state. NotObservedError if the forward takes none of the
    arguments that are tried, among them the `positions` as `position_embeddings`, by default all that stock models
    take.
    """
    own_attributes = dict(vars(module))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _WithoutWeights():
            return _observed(module, stock_class, positions)
    finally:
        vars(module).clear()
        vars(module).update(own_attributes)


def _observed(module: Any, stock_class: type, positions: Iterable[Any] | None = None) -> AttentionCall | None:
    """The same, with what the context makes of the weights; the module keeps what its forward and this set in it."""
    forward, problem = stock_class.forward, None
    module.config = copy.copy(module.config)
    set_attention_implementation(module.config, OBSERVED)
    with torch.device("cpu"):
        for arguments in _attempts(module, forward, positions):
            try:
                forward(module, **arguments)
            except Exception as reason:
                if (caller := getattr(reason, "caller", None)) is not None:
                    return reason.call if caller is module else None
                problem = reason
            else:
                return None
    raise NotObservedError(f"{stock_class.__name__} could not be observed: {problem}")


def interface_keywords(module: nn.Module, stock_class: type) -> frozenset[str] | None:
    """The names that this module passes to its attention function beyond the mask; None if it does not get there."""
    if stock_class not in KEYWORDS:
        try:
            call = attention_call(module, stock_class)
        except NotObservedError as error:
            logger.warning_once(f"{error}. Its attention stays as it is.")
            call = None
        if call is None:
            return None  # not kept: another config may make the same class get there
        KEYWORDS[stock_class] = call.keywords
    return KEYWORDS[stock_class]


def _spy(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> NoReturn:
    raise _InterfaceReachedError(module, AttentionCall(query, key, value, frozenset(kwargs)))


AttentionInterface.register(OBSERVED, _spy)


def _attempts(module: Any, forward: Any, positions: Iterable[Any] | None) -> Iterator[dict[str, Any]]:
    """Arguments to try, the usual ones first."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    parameters = [parameter for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    size = layer_hidden_size(module)
    if not any(parameter.name in POSITIONS for parameter in parameters):
        positions = [None]
    elif positions is None:
        positions = list(_position_embeddings(module, size))
    shapes = [(1, NUM_TOKENS, size), (NUM_TOKENS, size), (1, 2, 2, size)]
    optional = [{"hidden_states", *POSITIONS}, {"hidden_states", *POSITIONS, *OPTIONAL}]
    for shape, names, embeddings in itertools.product(shapes, optional, positions):
        hidden = _distinct(*shape)
        mask = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.float32, device="cpu")
        known = {
            "attention_mask": mask if "attention_mask" in names else None,
            "cu_seqlens": torch.tensor([0, NUM_TOKENS], dtype=torch.int32, device="cpu"),
            "height": 1,
            "layer_idx": 0,
            "max_seqlen": NUM_TOKENS,
            "position_ids": torch.arange(NUM_TOKENS, dtype=torch.long, device="cpu")[None],
            "shared_kv_states": {},
            "width": NUM_TOKENS,
            **dict.fromkeys(POSITIONS, embeddings),
        }
        yield {p.name: known.get(p.name, hidden) for p in parameters if p.default is p.empty or p.name in names}


def rotary_widths(module: Any) -> list[int]:
    """The widths that the cos and sin of this module may have."""
    names = ("head_dim", "attention_head_size", "head_size")
    head_dim = next((size for name in names if isinstance(size := getattr(module, name, None), int)), 8)
    own = [value for name, value in vars(module).items() if "rot" in name or "rope" in name]
    own = [value for value in own if isinstance(value, int) and value > 1]
    return list(dict.fromkeys([head_dim, *own, head_dim // 2, head_dim // 4]))


def cos_and_sin(cos: Any, sin: Any, width: int) -> tuple[Tensor, Tensor]:
    """`position_embeddings` `[1, N, width]` in float32 that are the same at every position."""
    shape = (1, NUM_TOKENS, width)
    first, second = (torch.as_tensor(x, dtype=torch.float32, device="cpu").expand(shape) for x in (cos, sin))
    return first, second


def _position_embeddings(module: Any, hidden_size: int) -> Iterator[Any]:
    """(cos, sin), complex rotations, vectors to add, distances: whatever stock forwards take by these names."""
    widths = rotary_widths(module)
    pairs = [cos_and_sin(1.0, 0.0, width) for width in widths]
    yield from pairs
    yield from ((cos[0], sin[0]) for cos, sin in pairs)
    for width in widths:
        yield torch.ones(1, NUM_TOKENS, width // 2, dtype=torch.complex64, device="cpu")
    for shape in ((1, NUM_TOKENS, hidden_size), (1, 2 * NUM_TOKENS - 1, hidden_size), (2, NUM_TOKENS, 1, 1, widths[0])):
        yield torch.ones(shape, dtype=torch.float32, device="cpu")
    yield torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.long, device="cpu")
    yield from (defaultdict(partial(tuple, pair)) for pair in pairs)  # the same for whatever layer type
    yield None
