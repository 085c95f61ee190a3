"""Models with random weights, softmax and converted, and what is timed of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import BertConfig, BertModel, DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.attention.transformers_internals import cache_among, cache_argument
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


SOFTMAX = "softmax"
LONGEST_INPUT = 65536
LARGE = "Llama 125M"


def gpt2() -> Any:
    """A small GPT-2."""
    sizes = {"vocab_size": 256, "n_positions": 4096, "n_embd": 96, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None))


def llama(hidden: int, layers: int, heads: int, intermediate: int) -> Any:
    """A Llama of this size."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=LONGEST_INPUT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def minilm(hidden: int = 384, layers: int = 6) -> Any:
    """MiniLM's layers, with positions for long inputs."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    return BertModel(BertConfig(**sizes, max_position_embeddings=LONGEST_INPUT), add_pooling_layer=False)


MODELS: dict[str, Callable[[], Any]] = {
    "Llama 15M": lambda: llama(288, 6, 6, 768),
    LARGE: lambda: llama(768, 12, 12, 2048),
    f"{LARGE}, 2 of 12 layers": lambda: llama(768, 2, 12, 2048),
    "MiniLM": minilm,
    "a small GPT-2": gpt2,
    "a small Llama": lambda: llama(96, 2, 2, 192),
    "a small BERT": lambda: minilm(96, 2),
}
QUICK = {"large": "a small GPT-2", "small": "a small Llama", "encoder": "a small BERT"}
LINEAR = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp": {"mechanism": "linear", "num_features": 64},
}
DEFAULT: dict[str, dict[str, Any]] = {"default": {}}  # whatever is the default of the model


def variants(name: str, settings: dict[str, dict[str, Any]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model with softmax, and converted with each of the settings, with the same weights."""
    torch.manual_seed(0)
    base = MODELS[name]().to(dtype).eval()
    converted = {key: convert(copy.deepcopy(base), **values) for key, values in settings.items()}
    return {SOFTMAX: copy.deepcopy(base), **converted}  # a copy too, of whose weights reading may take longer


def without_attention(model: Any) -> Any:
    """A copy of a converted model whose mechanisms hand queries on; those of decoders make the first state of a cache.

    So its speed is what the layers allow if attention takes no time.
    """

    def passed(forward: Callable[..., Any], inputs: Any, state: Any = None) -> Any:
        return inputs.query.transpose(1, 2), forward(inputs)[1] if inputs.is_causal and not state else state

    model = copy.deepcopy(model)
    for layer in linear_attention_modules(model).values():
        layer.linear_attention.forward = partial(passed, layer.linear_attention.forward)
    return model


def forward_pass(model: Any, length: int) -> Callable[[], Any]:
    """One call without a cache."""
    tokens = torch.randint(model.config.vocab_size, (1, length))
    arguments = {} if isinstance(model, BertModel) else {"logits_to_keep": 1, "use_cache": False}
    return torch.inference_mode()(lambda: model(tokens, **arguments))


def training_step(model: Any, length: int) -> Callable[[], Any]:
    """Forward and backward of a language model's loss, or of a sum for an encoder."""
    tokens = torch.randint(0, 256, (1, length))

    def step() -> None:
        if isinstance(model, BertModel):
            loss = model(tokens).last_hidden_state.square().mean()
        else:
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    return step


def random_cache(model: Any, length: int) -> DynamicCache:
    """Keys and values of `length` tokens in every layer."""
    config = model.config
    cache, heads = DynamicCache(config=config), config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (1, getattr(config, "num_key_value_heads", heads), length, head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    return cache


def decoder(model: Any, cache: Any) -> Callable[[], Any]:
    """One step behind what the cache has read."""
    token = torch.zeros(1, 1, dtype=torch.long)
    past = cache_argument(getattr(model, "_orig_mod", model), cache)  # of a compiled model
    return torch.inference_mode()(lambda: model(token, use_cache=True, **past))


def steps_of(models: dict[str, Any], context: int) -> dict[str, Callable[[], Any]]:
    """One step of each model: behind so many tokens with softmax, and of states behind as many as fill a window."""
    tokens = torch.zeros(1, 128, dtype=torch.long)
    with torch.inference_mode():
        outputs = {key: model(tokens, use_cache=True) for key, model in models.items() if key != SOFTMAX}
        caches = {key: cache_among(output.values()) for key, output in outputs.items()}
        caches[SOFTMAX] = random_cache(models[SOFTMAX], context)
    return {key: decoder(model, caches[key]) for key, model in models.items()}
