# SPDX-License-Identifier: Apache-2.0
"""Converted models in vLLM's Transformers backend: its layers everywhere but in the mechanisms and their attention."""

from __future__ import annotations

import copy
import re
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.transformers import (
    TransformersEmbeddingModel,
    TransformersForCausalLM,
    TransformersForSequenceClassification,
    TransformersMoEForCausalLM,
)
from vllm.model_executor.models.transformers.base import Base
from vllm.model_executor.models.transformers.fusers.attention import AttentionFuser

from ..mechanisms.base import MechanismInputs
from ..modeling_linear_attention import linear_attention_modules, reset_mechanisms
from . import OPERATOR
from .config import STOCK_LAYER_TYPES
from .families import check_positions, counts_after_padding, refuse_other_values
from .heads import ClassificationHead, match_logits
from .sharding import shard
from .states import EncoderLayer, StateLayer


def attend(prefix: str, inputs: MechanismInputs) -> Tensor:
    """The output `[1, N, H, D]` of a converted layer, by the operator at which graphs stop."""
    query, value = inputs.query, inputs.value
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    getattr(torch.ops.vllm, OPERATOR)(query, inputs.key, value, inputs.gates, inputs.scaling, output, prefix)
    return output


class ConvertedMixin(Base):
    """What decoders and encoders share, before a class of vLLM's Transformers backend."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        check_positions(self.model, self.model_config.max_model_len)
        reset_mechanisms(self.model)  # fills buffers that no checkpoint has

    def _decorate_for_torch_compile(self) -> None:
        """Change the class of the model only where graphs are compiled: this process may use it without vLLM too."""
        if self.compilation_config.mode != CompilationMode.NONE:
            super()._decorate_for_torch_compile()

    @cached_property
    def _from_config_kwargs(self) -> dict[str, Any]:
        given = super()._from_config_kwargs
        if (types := getattr(self.config, STOCK_LAYER_TYPES, None)) is not None:
            given["config"] = copy.copy(self.config)
            given["config"].layer_types = types
        return given

    def _create_hf_to_vllm_mapper(self) -> None:
        """Keep names to ignore from the names of weights: GPT-2's `attn.bias` also matches `c_attn.bias`."""
        names = [name for name, _ in self.model.named_parameters()]
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()
        self.model._keys_to_ignore_on_load_unexpected = [
            pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)
        ]
        super()._create_hf_to_vllm_mapper()

    def recursive_replace(self) -> None:
        """Keep vLLM's layers out of the mechanisms, of which each process takes the part for its heads."""
        modules = linear_attention_modules(self.model).values()
        mechanisms = [module._modules.pop("linear_attention") for module in modules]
        super().recursive_replace()
        rank, size = self.tp_group.rank_in_group, self.tp_group.world_size
        made: dict[int, Tensor] = {}
        for module, mechanism in zip(modules, mechanisms):
            part = mechanism if size == 1 else shard(mechanism, rank, size, made, self.device_config.device)
            module.linear_attention = part

    def _create_attention_instances(self, prefix: str = "") -> None:
        for number, (name, module) in enumerate(linear_attention_modules(self.model).items()):
            layer = getattr(module, "layer_idx", None)
            fuser = AttentionFuser(type(module).__name__)
            self.attention_fusers[number if layer is None else layer] = (f"model.{name}", fuser)
        super()._create_attention_instances(prefix)

    def _get_attn_cls(self) -> Any:
        softmax = super()._get_attn_cls()

        def make(**kwargs: Any) -> Any:
            module, name = self.get_submodule(kwargs["prefix"].rpartition(".")[0]), kwargs["prefix"]
            if not hasattr(module, "linear_attention_enabled"):
                return softmax(**kwargs)
            module.linear_attention_backend = partial(attend, name)
            if not module.linear_attention_is_causal:
                return EncoderLayer(module, **kwargs)
            refuse_other_values(module)
            return StateLayer(module, self.model_config.dtype, name)

        return make


class DecoderForCausalLM(ConvertedMixin, TransformersForCausalLM, HasInnerState, IsHybrid):
    """Every `Linear<X>ForCausalLM`.

    It is a hybrid even without softmax layers, because vLLM knows that of a class, and layers differ by checkpoint.
    """

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> DecoderForCausalLM:
        """A model with experts gets vLLM's layers for them; which model has them is known from its config."""
        if vllm_config.model_config.is_moe and not issubclass(cls, TransformersMoEForCausalLM):
            cls = type(cls.__name__, (cls, TransformersMoEForCausalLM), {})
        return super().__new__(cls)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        specs = self.get_mamba_specs_from_config(vllm_config)
        pages = {spec.page_size_bytes for spec in specs}
        has_softmax = len(specs) < len(get_layers_from_vllm_config(vllm_config, AttentionLayerBase))
        if has_softmax and len(pages) > 1:  # all pages have to be of one size then
            vllm_config.cache_config.mamba_page_size_padded = max(pages)
        if isinstance(processor := getattr(self, "logits_processor", None), LogitsProcessor):  # not in embedding models
            match_logits(processor, self._from_config_kwargs["config"])

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> list[Any]:
        """What each layer of states needs, so that blocks of softmax layers fit; asked when the layers are there."""
        layers = get_layers_from_vllm_config(vllm_config, StateLayer).values()
        return [layer.get_kv_cache_spec(vllm_config) for layer in layers]

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        """How prefix caching copies a state: as a whole."""
        return (get_temporal_copy_spec,)


class EncoderMixin(ConvertedMixin):
    """What encoders share."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.is_roberta = counts_after_padding(self.model)  # whether vLLM adds that number to all positions


class EncoderForEmbedding(EncoderMixin, TransformersEmbeddingModel):
    """Every `Linear<X>Model` of an encoder."""


class EncoderForClassification(EncoderMixin, TransformersForSequenceClassification):
    """Every `Linear<X>ForSequenceClassification` of an encoder, with all modules of the stock classifier."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        head = ClassificationHead(self.config, self.model_config.head_dtype, self.device_config.device)
        for name, part in head.parts.items():
            setattr(self, name, part)
        if head.pooler is not None:
            self.model.pooler = head.pooler
        pooler_config = vllm_config.model_config.pooler_config
        pooler_config.seq_pooling_type = head.pooling()
        self.pooler = DispatchPooler.for_seq_cls(pooler_config, classifier=head)
