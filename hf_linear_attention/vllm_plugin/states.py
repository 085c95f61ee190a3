# SPDX-License-Identifier: Apache-2.0
"""The states of converted layers in vLLM's cache, where the states of Mamba are kept.

A request has one state per converted layer, in one block of the cache. A step of the engine has tokens of many requests
in one row: first one token of each request that writes, then the new tokens of each request whose prompt is read. The
former are one call of the mechanism, which reads and writes their states where they are. Of the latter, prompts that
begin are padded to batches, and each that continues is a call of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import EncoderOnlyAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from ..mechanisms.base import MechanismInputs, State
from . import BACKEND, OPERATOR


ALIGNMENT = 64  # bytes; where each tensor of a state begins
# Prompts are padded to one batch while it has at most so many times the tokens of the prompts.
MOST_PADDING = 1.25


class Prompt(NamedTuple):
    """The part of one request's prompt that this step reads: tokens `start` to `end` of the row."""

    start: int
    end: int
    computed: int  # tokens that earlier steps have read, or that the prefix cache has
    number: int  # among the prompts of this step


class Group(NamedTuple):
    """Prompts that are one call of each layer. Its tensors are made once a step: each is a copy from the host."""

    prompts: Sequence[Prompt]
    numbers: Tensor  # [B] int64, those of the prompts
    first: Tensor  # [B] int32, the position of the first token of each row; padding on the left makes it negative
    mask: Tensor | None  # bool [B, N], of several prompts

    @classmethod
    def of(cls, prompts: Sequence[Prompt], device: torch.device) -> Group:
        """The group of these prompts."""
        longest = max(prompt.end - prompt.start for prompt in prompts)
        places = [(prompt.number, prompt.computed + prompt.end - prompt.start - longest) for prompt in prompts]
        numbers, first = torch.tensor(places, device=device).unbind(1)
        mask = None if len(prompts) == 1 else torch.arange(longest, device=device) >= -first[:, None]
        return cls(prompts, numbers, first.int(), mask)


@dataclass
class StateMetadata(BaseMambaAttentionMetadata):
    """What the layers have to know of a step, beyond what vLLM tells every Mamba layer."""

    groups: tuple[Group, ...] = ()


class StateMetadataBuilder(BaseMambaAttentionMetadataBuilder[StateMetadata]):
    """Makes the metadata of a step from numbers on the CPU, so that a GPU is not waited for."""

    metadata_cls = StateMetadata
    needs_causal_conv1d_metadata = False
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> StateMetadata:
        """The metadata of one step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        if metadata.num_prefills:
            counts = metadata.num_reqs, metadata.num_prefills, metadata.num_decode_tokens
            computed, starts = self._prefill_cpu_metadata(common_attn_metadata, *counts)
            bounds = (starts + metadata.num_decode_tokens).tolist()
            rows = zip(bounds, bounds[1:], computed.tolist())
            prompts = [Prompt(*row, number) for number, row in enumerate(rows)]
            metadata.groups = tuple(Group.of(group, self.device) for group in batches(prompts))
        return metadata


class StateBackend(AttentionBackend):
    """Names the builder of the metadata to vLLM."""

    @staticmethod
    def get_name() -> str:
        """The name under which it is registered."""
        return BACKEND

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """The class that makes the metadata of each step."""
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """Whether vLLM keeps one state per request, not keys and values."""
        return True


class StateSpec(MambaSpec):
    """What vLLM has to know of the states of one layer: unlike those of Mamba, layers may differ in size, and each has
    pages of its own size where no layer computes softmax.
    """

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all layers have states, so that one table of blocks serves them."""
        return all(isinstance(spec, StateSpec) for spec in kv_cache_specs.values())


class ConvertedLayer:
    """What decoders and encoders do with the tokens of one step; `module` is the converted attention.

    It stands in a tuple, because torch would take the parent of this layer for its child.
    """

    module: tuple[Any]
    prefix: str

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only earlier ones."""
        return bool(self.module[0].linear_attention_is_causal)

    @property
    def metadata(self) -> Any:
        """That of this step; None in a run that only measures memory."""
        metadata: Any = get_forward_context().attn_metadata
        return metadata.get(self.prefix) if isinstance(metadata, dict) else metadata

    def run(self, inputs: MechanismInputs, first: Tensor, state: State | None = None) -> tuple[Tensor, Any]:
        """The output `[B, N, H, D]` and the new states; `first [B]` is the position of the first token of each row."""
        return self.module[0].linear_attention(self.placed(inputs, first), state)

    def placed(self, inputs: MechanismInputs, first: Tensor) -> MechanismInputs:
        """The inputs with what the mechanism needs of the positions of the tokens; see `run`."""
        mechanism = self.module[0].linear_attention
        if not mechanism.needs_positions:
            return inputs
        batch, _, length, _ = inputs.query.shape
        places = torch.arange(length, dtype=torch.int32, device=first.device)
        positions = (first.int().unsqueeze(1) + places).clamp(min=0)
        return mechanism.prepare(inputs._replace(positions=positions.expand(batch, -1)))

    def read(self, inputs: MechanismInputs, group: Group, output: Tensor, state: State | None = None) -> Any:
        """Read sequences in one call, several from their beginning; write their outputs, and return their states."""
        prompts, _, first, mask = group
        if mask is None:
            start, end, *_ = prompts[0]
            output[:, start:end], state = self.run(slice_tokens(inputs, start, end), first, state)
            return state
        # Padding is on the left, where no window counts it.
        query, key, value = (_pad(x, 2, prompts) for x in (inputs.query, inputs.key, inputs.value))
        gates = None if inputs.gates is None else _pad(inputs.gates, 1, prompts)
        padded = MechanismInputs(query, key, value, mask, inputs.scaling, inputs.is_causal, gates=gates)
        found, state = self.run(padded, first)
        for row, (start, end, *_) in zip(found, prompts):
            output[0, start:end] = row[len(row) - (end - start) :]
        return state


class StateLayer(ConvertedLayer, nn.Module, MambaBase):
    """The states of one converted layer of a decoder; its attention is `module`, with queries in `dtype`.

    To vLLM a state is one string of bytes, in which every tensor of the state begins at a multiple of `ALIGNMENT`. So
    all mechanisms look alike, and prefix caching copies one string.
    """

    def __init__(self, module: Any, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        self.module, self.prefix = (module,), prefix
        self.layout = [(shape[1:], kind) for shape, kind in module.linear_attention.state_layout(dtype)]
        self.sizes = [-(-math.prod(shape) * kind.itemsize // ALIGNMENT) * ALIGNMENT for shape, kind in self.layout]
        self.states: State = ()
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"Duplicate layer name: {prefix}")
        context[prefix] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The backend that `register` has added."""
        return MambaAttentionBackendEnum[BACKEND]

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The same, as a class."""
        return StateBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> StateSpec:
        """That of Mamba's layers, as a `StateSpec`."""
        return StateSpec(**vars(super().get_kv_cache_spec(vllm_config)))

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """One string of bytes."""
        return ((sum(self.sizes),),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """The dtype of that string."""
        return (torch.int8,)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Keep views `[blocks, ...]` of the tensors of the states in the blocks of the cache."""
        super().bind_kv_cache(kv_cache)
        parts = self.kv_cache[0].split(self.sizes, dim=1)
        self.states = tuple(
            part[:, : math.prod(shape) * kind.itemsize].view(kind).unflatten(1, shape)
            for part, (shape, kind) in zip(parts, self.layout)
        )

    def attend(self, inputs: MechanismInputs, output: Tensor) -> None:
        """Write the output `[1, N, H, D]` for the tokens of this step, and continue the states of their requests."""
        metadata = self.metadata
        if metadata is None:
            output.copy_(self.run(inputs, output.new_zeros(1))[0])
            return
        if count := metadata.num_decode_tokens:
            steps = self.placed(slice_tokens(inputs, 0, count, are_steps=True), metadata.seq_lens[:count] - 1)
            output[0, :count] = self.step(steps, metadata.state_indices_tensor_d[:count, 0].long())[:, 0]
        for group in metadata.groups:
            rows = metadata.state_indices_tensor_p.index_select(0, group.numbers).long()
            state = self._load(rows) if group.prompts[0].computed else None
            self._store(rows, self.read(inputs, group, output, state))

    def step(self, inputs: MechanismInputs, rows: Tensor) -> Tensor:
        """One token of each request whose state is in one of these blocks: the output `[B, 1, H, D]`."""
        return self.module[0].linear_attention.step_in_rows(inputs, self.states, rows)

    def _load(self, rows: Tensor) -> State:
        return tuple(states.index_select(0, rows) for states in self.states)

    def _store(self, rows: Tensor, state: State) -> None:
        for states, new in zip(self.states, state):
            states.index_copy_(0, rows, new.to(states.dtype))


class EncoderLayer(ConvertedLayer, EncoderOnlyAttention):
    """Bidirectional linear attention, which has no state; the base class brings the bounds of the sequences."""

    def __init__(self, module: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module, self.prefix = (module,), kwargs["prefix"]

    def attend(self, inputs: MechanismInputs, output: Tensor) -> None:
        """Write the output `[1, N, H, D]` for the sequences of this step."""
        metadata = self.metadata
        bounds = [0, output.shape[1]] if metadata is None else metadata.query_start_loc.tolist()
        for group in batches([Prompt(*pair, 0, number) for number, pair in enumerate(itertools.pairwise(bounds))]):
            self.read(inputs, Group.of(group, output.device), output)


def batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Groups of prompts that are one call each: those that continue alone, those that begin by their lengths."""
    group: list[Prompt] = []
    total = 0
    for prompt in sorted(prompts, key=lambda prompt: (prompt.computed > 0, prompt.end - prompt.start)):
        length = prompt.end - prompt.start
        # The prompts come shortest first, so this one would be the longest of its group.
        if group and (prompt.computed or (len(group) + 1) * length > MOST_PADDING * (total + length)):
            yield group
            group, total = [], 0
        group.append(prompt)
        total += length
    if group:
        yield group


def slice_tokens(inputs: MechanismInputs, start: int, end: int, are_steps: bool = False) -> MechanismInputs:
    """The inputs of some tokens of the only row; with `are_steps` each of them becomes a row of its own."""

    def cut(x: Tensor, dim: int) -> Tensor:
        part = x.narrow(dim, start, end - start)
        return part.transpose(0, dim) if are_steps else part

    query, key, value = (cut(x, 2) for x in (inputs.query, inputs.key, inputs.value))
    gates = None if inputs.gates is None else cut(inputs.gates, 1)
    return inputs._replace(query=query, key=key, value=value, gates=gates)


def _pad(x: Tensor, dim: int, group: Sequence[Prompt]) -> Tensor:
    """The tokens of each prompt as a row, with padding on the left; `dim` is the axis of tokens in `x`."""
    tokens = x[0].movedim(dim - 1, 0)
    rows = [tokens[prompt.start : prompt.end] for prompt in group]
    return pad_sequence(rows, batch_first=True, padding_side="left").movedim(1, dim)


def attend_in_layer(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor | None, scaling: float, output: Tensor, layer_name: str
) -> None:
    """The operator that graphs of torch.compile call; it finds its layer, and the step's metadata, by name."""
    layer = get_forward_context().no_compile_layers[layer_name]
    inputs = MechanismInputs(query, key, value, None, scaling, layer.is_causal, gates=gates)
    layer.attend(inputs, output)


def _attend_nowhere(*given: Any) -> None:
    """What a graph is traced with: the output has its shape already."""


direct_register_custom_op(OPERATOR, attend_in_layer, mutates_args=["output"], fake_impl=_attend_nowhere)
