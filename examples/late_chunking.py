"""Late chunking: a long document is read in one pass, and each chunk is the mean of its tokens' hidden states.

    python examples/late_chunking.py --model OUT --text document.txt --query "Who was Rapunzel?"

A chunk thus knows the document around it, which a chunk that is read alone does not. OUT is an embedding model that
reads long inputs, such as one converted with `--max_position_embeddings 4096`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import hf_linear_attention  # noqa: F401  (finds the class of a converted model; or pass `trust_remote_code=True`)


@torch.no_grad()
def chunk_embeddings(model: Any, tokenizer: Any, text: str, size: int) -> tuple[list[str], Tensor]:
    """The chunks of `size` tokens of a text, and their normalised embeddings `[chunks, D]` from one pass over it."""
    inputs = tokenizer(text, return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True)
    offsets, special = inputs.pop("offset_mapping")[0], inputs.pop("special_tokens_mask")[0].bool()
    states, offsets = model(**inputs).last_hidden_state[0][~special], offsets[~special]
    means = torch.stack([part.mean(0) for part in states.split(size)])
    chunks = [text[int(part[0, 0]) : int(part[-1, 1])] for part in offsets.split(size)]
    return chunks, torch.nn.functional.normalize(means, dim=-1)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the chunks that are most similar to the query."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--query", required=True)
    parser.add_argument("--chunk_size", type=int, default=256, help="tokens per chunk")
    parser.add_argument("--top", type=int, default=3, help="chunks to print")
    arguments = parser.parse_args(argv)
    model = AutoModel.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.text.read_text(encoding="utf-8")
    chunks, embeddings = chunk_embeddings(model, tokenizer, text, arguments.chunk_size)
    _, query = chunk_embeddings(model, tokenizer, arguments.query, tokenizer.model_max_length)
    similarity = embeddings @ query[0]
    for number in similarity.topk(min(arguments.top, len(chunks))).indices.tolist():
        sys.stdout.write(f"{similarity[number]:.3f}  {' '.join(chunks[number].split())}\n")


if __name__ == "__main__":
    main()
