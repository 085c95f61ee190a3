"""What config.json says in published checkpoints of real families: `hub_configs.yaml`.

`shrunk` is the one rule that makes them small: fewer layers, narrower heads and a vocabulary of 64 tokens. What a
family is known by stays as published: the kinds of special tokens (a list, -1, none), rope scalings, tied embeddings,
which heads share keys, heads that are wider than their share of the hidden size, windows, types of layers, dtypes, and
fields that transformers has renamed since.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class HubConfig:
    """One checkpoint; the file says what each field means."""

    fields: dict[str, Any]
    drop: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    refused: str = ""


TABLE = Path(__file__).with_name("hub_configs.yaml")
HUB_CONFIGS = {name: HubConfig(**row) for name, row in yaml.safe_load(TABLE.read_text(encoding="utf-8")).items()}

NARROWER = 8  # times, every head and what is measured by it
HIDDEN = r"hidden_size|n_embd|d_model|word_embed_proj_dim|projection_dim"
HEADS = r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads"
LAYERS = r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|(en|de)coder_layers|max_window_layers"
INNER = r"intermediate_size|ffn_dim|(en|de)coder_ffn_dim|d_ff"
HEAD_SIZES = r"head_dim|d_kv|query_pre_attn_scalar|rotary_dim"
WINDOWS = r"sliding_window|local_attention"
VOCABULARY = 64


def _first(fields: dict[str, Any], pattern: str) -> Any:
    return next((value for name, value in fields.items() if re.fullmatch(pattern, name) and value), None)


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The same model in small; see the top of this file."""
    heads, hidden = _first(fields, HEADS), _first(fields, HIDDEN)
    key_heads = fields.get("num_key_value_heads") or heads
    few_key_heads = min(2, key_heads or 2)
    few_heads = few_key_heads * heads // key_heads if heads else 1
    narrow = few_heads / (heads or hidden or 1) / NARROWER
    period = fields.get("sliding_window_pattern") or fields.get("global_attn_every_n_layers") or 2
    tokens = sorted({number for number in _token_ids(fields) if number >= VOCABULARY - 8})
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "hidden_size" in value:
            small[name] = shrunk(value)
        elif name == "layer_types":
            small[name] = value[:period]
        elif re.fullmatch(r"\w+_token_id|begin_suppress_tokens|forced_decoder_ids", name):
            small[name] = _mapped(value, {number: VOCABULARY - 8 + place for place, number in enumerate(tokens)})
        elif type(value) is not int and not (isinstance(value, float) and re.fullmatch("init.*", name)):
            small[name] = value
        elif re.fullmatch(HIDDEN, name):
            small[name] = -(-round(value * narrow) // 8) * 8 if heads else 16  # experts need rows of 16 bytes
        elif re.fullmatch(HEADS, name):
            small[name] = few_heads
        elif re.fullmatch(LAYERS, name):
            small[name] = min(value, period)
        elif re.fullmatch(INNER, name):
            small[name] = 32
        elif re.fullmatch(HEAD_SIZES, name):
            small[name] = value // NARROWER
        elif re.fullmatch(WINDOWS, name):
            small[name] = 8 if value < fields.get("max_position_embeddings", value) else value
        else:
            small[name] = {
                "num_key_value_heads": few_key_heads,
                "vocab_size": VOCABULARY,
                "image_size": 3 * fields.get("patch_size", 0),
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "experts_per_token": 2,
                "max_source_positions": 20,
                # At 0.02 the attention of an untrained model is uniform and proves nothing.
                "initializer_range": 0.3,
                "init_std": 0.3,
                "initializer_factor": 2.0,
            }.get(name, value)
    return small


def _token_ids(fields: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for name, value in fields.items():
        if re.fullmatch(r"\w+_token_id|begin_suppress_tokens", name) and value is not None:
            found += value if isinstance(value, list) else [value]
        elif name == "forced_decoder_ids":
            found += [number for _, number in value]
    return found


def _mapped(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_mapped(entry, numbers) for entry in value]
    return value if value is None else numbers.get(value, value)
