"""Tiny configs and inputs of each family, in the form in which transformers' common tests ask for them.

transformers has such a class in the test file of every model, but its source distribution leaves those files out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.testing_utils import torch_device

from hf_linear_attention.configuration_linear_attention import model_heads
from hf_linear_attention.model_conversion import convert_config
from hf_linear_attention.modeling_linear_attention import linear_model_class


BATCH, LENGTH, CHOICES = 13, 7, 4

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {"vocab_size": 99, **_SIZES, "max_position_embeddings": 512, **_ENDS}

# The stock config class, its tiny sizes, and what its test class of transformers sets.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_TEXT, "num_key_value_heads": 2}, {}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": 512}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 98),
        {},
    ),
    "bert": ("BertConfig", {**_TEXT, "type_vocab_size": 16}, {}),
    "vit": (
        "ViTConfig",
        {**_SIZES, "image_size": 30, "patch_size": 2, "encoder_stride": 2},
        {"test_resize_embeddings": False},
    ),
}
DECODERS = ("llama", "gpt2")


class ModelTester:
    """What the common tests call `model_tester`. Without `linear_attention` it is the stock model's."""

    def __init__(self, family: str, linear_attention: Mapping[str, Any] | None):
        name, self.fields, _ = FAMILIES[family]
        self.family, self.linear_attention = family, linear_attention
        self.stock_config_class = getattr(transformers, name)
        self.batch_size, self.num_choices, self.is_training = BATCH, CHOICES, True
        config = self.stock_config_class(**self.fields)
        self.hidden_size = config.hidden_size
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads
        if self.is_vision:
            self.image_size, self.patch_size = config.image_size, config.patch_size
            self.mask_length = (config.image_size // config.patch_size) ** 2
            self.seq_length = self.mask_length + 1
            self.num_masks = self.seq_length // 2
        else:
            self.seq_length = LENGTH
            self.causal_lm_class = self._ours(model_heads(family).get("AutoModelForCausalLM"))

    @property
    def is_vision(self) -> bool:
        return self.family == "vit"

    def _ours(self, stock: str | None):
        if stock is None or self.linear_attention is None:
            return stock and getattr(transformers, stock)
        return linear_model_class(getattr(transformers, stock))

    def all_model_classes(self) -> tuple[type, ...]:
        """Every head that an Auto class knows for the family, the base model first."""
        return tuple(self._ours(stock) for stock in dict.fromkeys(model_heads(self.family).values()))

    def get_config(self):
        config = self.stock_config_class(**copy.deepcopy(self.fields))
        return config if self.linear_attention is None else convert_config(config, **self.linear_attention)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        if self.is_vision:
            shape = (BATCH, config.num_channels, config.image_size, config.image_size)
            return config, {"pixel_values": torch.rand(shape, device=torch_device)}
        mask = torch.randint(0, 2, (BATCH, LENGTH), device=torch_device)
        mask[:, 0] = 1
        # Without special tokens: RoBERTa takes padding for a reason to shift positions, which `inputs_embeds` lacks.
        ids = torch.randint(3, config.vocab_size - 1, (BATCH, LENGTH), device=torch_device)
        return config, {"input_ids": ids, "attention_mask": mask}
