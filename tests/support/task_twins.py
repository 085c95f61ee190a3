"""For tasks whose data is not plain text: a tiny random original, and files of training and validation rows.

`TWINS` has one entry for each such task; each writes the original into `original` of a folder, and the rows into
train.jsonl and valid.jsonl, which have 24 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from checkpoints import save_twin
from PIL import Image
from runs import write_lines
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration


def seq2seq_lm(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A T5 that begins to write with <s>, and longer and shorter targets than sources."""
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        initializer_factor=1.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    T5ForConditionalGeneration(config).save_pretrained(folder / "original")
    tokenizer.save_pretrained(folder / "original")
    for split, part in (("train", texts[:24]), ("valid", texts[24:33])):
        rows = [{"source": text[:60], "target": text[: 20 + 5 * (n % 9)][::-1]} for n, text in enumerate(part)]
        write_lines(folder / f"{split}.jsonl", rows)


def image_embedding(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A ViT without a head, and images without labels."""
    save_twin(folder / "original", "vit", "AutoModel", initializer_range=0.3)
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("valid", 9)):
        for number in range(count):
            pixels = random.integers(0, 255, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}-{number}.png")
        write_lines(folder / f"{split}.jsonl", [{"image": f"{split}-{number}.png"} for number in range(count)])


TWINS: dict[str, Callable[[Path, list[str], PreTrainedTokenizerFast], None]] = {
    "seq2seq_lm": seq2seq_lm,
    "image_embedding": image_embedding,
}
