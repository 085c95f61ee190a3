"""Train a small original from nothing, convert it, and heal it: a T5 that reverses strings, a ViT that reads digits.

    python benchmarks/heal_tasks.py --task seq2seq_lm
    python benchmarks/heal_tasks.py --task image_classification --mnist MNIST.npz

MNIST.npz holds `images` [n, 28, 28] and `labels` [n]; the last 1,000 are held out. Everything is done by the two
commands of this package, whose command lines are printed. A T5 knows positions only by its position bias, which a
linear layer does not have, so the first layer of its encoder keeps softmax attention (`--convert` changes that).
"""

from __future__ import annotations

import json
import random
import string
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention.conversion.convert_checkpoint import main as convert_main
from hf_linear_attention.training.finetune import main as finetune_main
from hf_linear_attention.training.tracking import read_metrics


HELD_OUT = 1000
LETTERS = string.ascii_lowercase[:10]


def strings(folder: Path, longest: int, count: int, held_out: int) -> None:
    """Random strings of 4 to `longest` letters and their reversals; no string of the validation data is in training."""
    generator, seen = random.Random(0), set()
    while len(seen) < count + held_out:
        seen.add("".join(generator.choices(LETTERS, k=generator.randint(4, longest))))
    rows = sorted(seen)
    generator.shuffle(rows)
    for name, part in (("train", rows[held_out:]), ("valid", rows[:held_out])):
        lines = (json.dumps({"source": text, "target": text[::-1]}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def save_t5(folder: Path) -> None:
    """A T5 with random weights, and a tokenizer with one token for each letter."""
    words = ["<pad>", "</s>", "<unk>", *LETTERS]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=64, **names).save_pretrained(folder)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(vocab_size=len(words), dropout_rate=0.0, **sizes, **ids)).save_pretrained(
        folder
    )


def digits(folder: Path, path: str) -> None:
    """The images as PNG files, and their classes."""
    from PIL import Image

    data = np.load(path)
    images, labels = data["images"], data["labels"]
    (folder / "png").mkdir(exist_ok=True)
    for name, part in (("train", range(len(images) - HELD_OUT)), ("valid", range(len(images) - HELD_OUT, len(images)))):
        rows = []
        for number in part:
            Image.fromarray(images[number]).save(folder / "png" / f"{number}.png")
            rows.append({"image": f"png/{number}.png", "label": str(labels[number])})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def save_vit(folder: Path) -> None:
    """A ViT with random weights for 28 x 28 images, of 16 patches."""
    names = {"id2label": {n: str(n) for n in range(10)}, "label2id": {str(n): n for n in range(10)}}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(image_size=28, patch_size=7, **sizes, **no_dropout, **names)).save_pretrained(
        folder
    )
    ViTImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)


def finetune(*words: Any, out: Path) -> list[dict[str, Any]]:
    """Run `finetune.py`, and return its log."""
    command = [str(word) for word in (*words, "--output_dir", out, "--overwrite_output_dir", "true")]
    write(f"finetune.py {' '.join(command)}")
    if finetune_main(command) != 0:
        raise SystemExit(1)
    return read_metrics(out / "metrics.jsonl")


def last_figures(events: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of the last evaluation."""
    found = next(event for event in reversed(events) if any(name.startswith("eval_") for name in event))
    return {name.removeprefix("eval_"): value for name, value in found.items() if name.startswith("eval_")}


def heal(arguments: Namespace, work: Path) -> dict[str, dict[str, float]]:
    """Train, convert and heal; the figures of each model."""
    task, scratch = arguments.task, work / "scratch"
    data = ["--task", task, "--validation_file", work / "valid.jsonl", "--per_device_eval_batch_size", 100]
    data += ["--logging_steps", 100]
    if task == "seq2seq_lm":
        data += ["--predict_with_generate", "--generation_max_length", 24]
    train = [
        "--train_file",
        work / "train.jsonl",
        "--per_device_train_batch_size",
        arguments.batch_size,
        "--warmup_ratio",
        0.05,
    ]
    train += ["--lr_scheduler_type", "cosine"]
    steps = ["--max_train_steps", arguments.steps, "--learning_rate", arguments.learning_rate]
    figures = {
        "original": last_figures(
            finetune("--model_name_or_path", scratch, *data, *train, *steps, out=work / "original")
        )
    }
    words = ["--model_name_or_path", work / "original", "--output_dir", work / "converted", "--overwrite"]
    command = [str(word) for word in (*words, *arguments.convert.split())]
    write(f"convert_checkpoint.py {' '.join(command)}")
    if convert_main(command) != 0:
        raise SystemExit(1)
    models_ = ["--model_name_or_path", work / "converted", "--teacher_name_or_path", work / "original"]
    transfer = ["--attention_transfer_weight", 1, "--trainable", "mechanism", "--learning_rate", 2e-2]
    lengths = ["--max_train_steps", arguments.heal_steps]
    before = finetune(*data, *train, *models_[:2], *transfer, *lengths, out=work / "transferred")
    figures["attention transfer"] = last_figures(before)
    models_[1] = work / "transferred"
    weights = ["--logits_kl_weight", 1, "--hidden_state_weight", 1, "--hidden_state_layers", "all"]
    rates = ["--learning_rate", arguments.heal_rate, "--mechanism_learning_rate", 5e-3]
    healed = finetune(*data, *train, *models_, *weights, *rates, *lengths, out=work / "healed")
    figures["healed"] = last_figures(healed)
    return figures


def main(argv: list[str] | None = None) -> None:
    """Run one of the two tasks, and print the figures."""
    parser = argument_parser(__doc__)
    parser.add_argument("--task", choices=["seq2seq_lm", "image_classification"], default="seq2seq_lm")
    parser.add_argument("--mnist", help="the .npz of the digits")
    parser.add_argument("--longest", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps of training the original")
    parser.add_argument("--heal_steps", type=int, help="steps of each of the two stages of healing")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--heal_rate", type=float, default=5e-4)
    parser.add_argument("--convert", help="options of convert_checkpoint.py")
    arguments = parser.parse_args(argv)
    is_text = arguments.task == "seq2seq_lm"
    suggested = (1000, 400, 64, "--drop position_bias --layers 1,2,3") if is_text else (1000, 200, 16, "")
    for name, value in zip(("steps", "heal_steps", "batch_size", "convert"), suggested, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, 4 if arguments.quick and name.endswith("steps") else value)
    disable_progress_bar()
    work = Path(arguments.output_dir) / f"heal_{arguments.task}"
    work.mkdir(parents=True, exist_ok=True)
    if is_text:
        count, held_out = (200, 20) if arguments.quick else (20_000, HELD_OUT)
        strings(work, arguments.longest, count, held_out)
        save_t5(work / "scratch")
    else:
        digits(work, arguments.mnist)
        save_vit(work / "scratch")
    figures = heal(arguments, work)
    names = list(figures["healed"])
    rows = [
        [model, *(f"{found[name]:.4g}" if name in found else "" for name in names)] for model, found in figures.items()
    ]
    write(table(["", *names], rows))
    save_results(arguments, f"heal_{arguments.task}", {"figures": figures}, _plot)


def _plot(plt: Any, results: dict[str, Any]) -> Any:
    """The agreement with the original after each stage."""
    figure, axes = plt.subplots()
    found = {model: figures["agreement"] for model, figures in results["figures"].items() if "agreement" in figures}
    axes.bar(list(found), list(found.values()))
    axes.set_ylabel("same prediction as the original")
    return figure


if __name__ == "__main__":
    main()
