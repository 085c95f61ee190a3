"""Train an original for a task, convert it, heal it by the preset `default`, and compare the three on held-out rows.

    python -m benchmarks.papers.heal_tasks --task seq2seq_lm
    python -m benchmarks.papers.heal_tasks --task image_classification --mnist MNIST.npz
    python -m benchmarks.papers.heal_tasks --task token_classification --texts A.txt B.txt C.jsonl

Tasks of text start from the first layers of the real MiniLM, those of images and seq2seq_lm from random weights.
MNIST.npz holds `images` [n, 28, 28] and `labels` [n]. Every text of `--texts` is one source. `--convert` takes other
options of convert_checkpoint.py, `--train` and `--heal` further options of finetune.py. Everything is done by the two
commands of this package, whose command lines are printed. A T5 knows positions only by its position bias, which a
linear layer does not have, so the first layer of its encoder keeps softmax attention.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from benchmarks.common import parse, save, table, write
from benchmarks.papers import heal_data
from benchmarks.real_attention import minilm_folder
from hf_linear_attention.conversion.convert_checkpoint import main as convert_main
from hf_linear_attention.training.finetune import main as finetune_main
from hf_linear_attention.training.tasks import TASKS as KNOWN
from hf_linear_attention.training.tracking import read_metrics


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUICK = " --max_train_steps 4"


def save_t5(arguments: Namespace, folder: Path) -> None:
    """A T5 with random weights, and a tokenizer with one token for each letter."""
    words = ["<pad>", "</s>", "<unk>", *heal_data.LETTERS]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=64, **names).save_pretrained(folder)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=len(words), dropout_rate=0.0, **sizes, **ids)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def save_vit(arguments: Namespace, folder: Path) -> None:
    """A ViT with random weights for 28 x 28 images, of 16 patches."""
    names = {"id2label": {n: str(n) for n in range(10)}, "label2id": {str(n): n for n in range(10)}}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = ViTConfig(image_size=28, patch_size=7, **sizes, **NO_DROPOUT, **names)
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 28, "width": 28}).save_pretrained(folder)


def minilm_as(auto_class: Any) -> Callable[[Namespace, Path], None]:
    """A function that saves the first `layers` layers of MiniLM, without dropout."""

    def save(arguments: Namespace, folder: Path) -> None:
        source = minilm_folder()
        config = AutoConfig.from_pretrained(source, num_hidden_layers=arguments.layers, **NO_DROPOUT)
        auto_class.from_pretrained(source, config=config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)

    return save


@torch.no_grad()
def nearest_centroid(model: Path, work: Path) -> dict[str, float]:
    """The share of held-out images whose embedding is nearest to the mean embedding of their class in training."""
    encoder, processor = AutoModel.from_pretrained(model).eval(), AutoImageProcessor.from_pretrained(model)
    found = []
    for name in ("train", "valid"):
        rows = datasets.load_dataset("json", data_files=str(work / f"{name}.jsonl"), split="train")
        images = datasets.Dataset.from_dict({"image": [str(work / path) for path in rows["image"]]})
        parts = images.cast_column("image", datasets.Image(mode="RGB")).iter(500)
        states = [encoder(**processor(part["image"], return_tensors="pt")).last_hidden_state.mean(1) for part in parts]
        found.append((torch.cat(states), torch.tensor([int(label) for label in rows["label"]])))
    (known, classes), (held_out, labels) = found
    centroids = torch.stack([known[classes == number].mean(0) for number in range(10)])
    return {"nearest_centroid": float((torch.cdist(held_out, centroids).argmin(-1) == labels).float().mean())}


@dataclass(frozen=True)
class Task:
    """What a task needs. The strings are options of `finetune.py`, and of `convert_checkpoint.py` for `convert`.

    Args:
        rows: writes `train.jsonl` and `valid.jsonl` into a folder.
        start: writes the model that is trained into a folder.
        train: how the original is trained.
        heal: what `--preset default` gets; steps are those of each stage.
        convert: the conversions, each with its name.
        data: what all runs get.
        evaluate: what evaluations get.
        rows_of: how many rows are for training and held out.
        trained_as: the task of the original, if its head is removed after its training.
        figures: further figures of a model.
    """

    rows: Callable[[Namespace, Path], None]
    start: Callable[[Namespace, Path], None]
    train: str
    heal: str
    convert: dict[str, str]
    data: str = ""
    evaluate: str = ""
    rows_of: tuple[int, int] = (6000, 300)
    trained_as: str | None = None
    figures: Callable[[Path, Path], dict[str, float]] | None = None


LINEAR = "--attention linear --feature_map exp"
HYBRID = "--attention hybrid --num_sinks 1 --window_size"
# Most parameters of MiniLM are embeddings: without them a step takes two thirds of the time.
FROZEN = "--freeze_pattern embeddings --per_device_train_batch_size 4"


def of_text(row: heal_data.TextRow, **changes: Any) -> Task:
    """A task of MiniLM on passages of `--texts`."""
    usual = {
        "start": minilm_as(AutoModel),
        "train": f"--max_train_tokens 80000 --learning_rate 3e-4 {FROZEN}",
        "heal": f"--max_train_tokens 80000 {FROZEN}",
        "convert": {"linear": LINEAR, "hybrid": f"{HYBRID} 16"},
        "data": "--max_length 256",
    }
    return Task(rows=heal_data.text_rows(row), **usual | changes)


def of_digits(**changes: Any) -> Task:
    """A task of a small ViT on the digits of `--mnist`."""
    return Task(
        rows=heal_data.digits,
        start=save_vit,
        train="--max_train_steps 1000 --per_device_train_batch_size 16 --learning_rate 1e-3",
        heal="--max_train_steps 200 --per_device_train_batch_size 16",
        convert={"linear": LINEAR, "hybrid": f"{HYBRID} 2"},
        **changes,
    )


TASKS = {
    "seq2seq_lm": Task(
        rows=heal_data.strings,
        start=save_t5,
        train="--max_train_steps 1000 --per_device_train_batch_size 64 --learning_rate 2e-3",
        heal="--max_train_steps 300 --per_device_train_batch_size 64",
        convert={"linear": f"{LINEAR} --drop position_bias --layers 1,2,3"},
        evaluate="--predict_with_generate --generation_max_length 24",
        rows_of=(20_000, 1000),
    ),
    "image_classification": of_digits(),
    "image_embedding": of_digits(trained_as="image_classification", figures=nearest_centroid),
    "sequence_classification": of_text(heal_data.most_pieces),
    "token_classification": of_text(heal_data.cased_words),
    "question_answering": of_text(
        heal_data.gap, train="--max_train_tokens 120000 --learning_rate 3e-4 --per_device_train_batch_size 8"
    ),
    "masked_lm": of_text(  # the logits of a vocabulary cost more than three layers
        heal_data.plain_text,
        start=minilm_as(AutoModelForMaskedLM),
        train=f"--max_train_tokens 60000 --learning_rate 3e-4 {FROZEN}",
        heal=f"--max_train_tokens 60000 {FROZEN}",
        rows_of=(6000, 150),
    ),
}


def run(name: str, command: Callable[[list[str]], int], *words: Any) -> None:
    """Print a command line and run it."""
    line = [str(word) for word in words]
    write(f"{name} {' '.join(line)}")
    if command(line) != 0:
        raise SystemExit(1)


def finetune(*words: Any, out: Path) -> None:
    """Run a training or an evaluation."""
    run("finetune.py", finetune_main, *words, "--output_dir", out, "--overwrite_output_dir", "true")


def train_original(arguments: Namespace, task: Task, work: Path) -> Path:
    """Train the original of a task; its folder."""
    torch.manual_seed(0)
    task.start(arguments, work / "start")
    trained, original = task.trained_as or arguments.task, work / "original"
    out = work / "with_head" if task.trained_as else original
    data = ["--task", trained, "--train_file", work / "train.jsonl", *task.data.split()]
    schedule = ["--lr_scheduler_type", "cosine", "--warmup_ratio", 0.05, "--logging_steps", 100]
    finetune("--model_name_or_path", work / "start", *data, *schedule, *arguments.train.split(), out=out)
    if task.trained_as:
        AutoModel.from_pretrained(out).save_pretrained(original)
        AutoImageProcessor.from_pretrained(out).save_pretrained(original)
    return original


def evaluate(arguments: Namespace, task: Task, model: Path, work: Path) -> dict[str, float]:
    """The figures of a model on the held-out rows, with its agreement with the original where the task has it."""
    data = ["--task", arguments.task, "--validation_file", work / "valid.jsonl", "--per_device_eval_batch_size", 50]
    original = ["--teacher_name_or_path", work / "original"] if KNOWN[arguments.task].compares else []
    options, out = f"{task.data} {task.evaluate}".split(), work / "figures"
    finetune("--model_name_or_path", model, *original, *data, *options, out=out)
    events = read_metrics(out / "metrics.jsonl")
    found = next(event for event in reversed(events) if any(name.startswith("eval_") for name in event))
    figures = {name.removeprefix("eval_"): value for name, value in found.items() if name.startswith("eval_")}
    return figures | (task.figures(model, work) if task.figures else {})


def heal(arguments: Namespace, task: Task, work: Path) -> dict[str, dict[str, float]]:
    """Train, convert and heal; the figures of each model."""
    original = train_original(arguments, task, work)
    figures = {"original": evaluate(arguments, task, original, work)}
    data = ["--task", arguments.task, "--train_file", work / "train.jsonl", *task.data.split()]
    for name, options in arguments.convert.items():
        converted, healed = work / f"{name}_converted", work / f"{name}_healed"
        words = ["--model_name_or_path", original, "--output_dir", converted, "--overwrite", *options.split()]
        run("convert_checkpoint.py", convert_main, *words)
        models_ = ["--model_name_or_path", converted, "--teacher_name_or_path", original]
        finetune("--preset", "default", *models_, *data, *arguments.heal.split(), "--logging_steps", 100, out=healed)
        for state, folder in (("converted", converted), ("healed", healed)):
            figures[f"{name}, {state}"] = evaluate(arguments, task, folder, work)
    return figures


def main(argv: list[str] | None = None) -> None:
    """Run one of the tasks, and print the figures."""
    defaults = {"task": "seq2seq_lm", "mnist": None, "texts": [], "layers": 3, "words": 80, "longest": 10}
    more = {"rows": 0, "held_out": 0, "train": "", "heal": "", "convert": []}
    arguments = parse(__doc__, argv, {"rows": 200, "held_out": 20}, **defaults, **more)
    task = TASKS[arguments.task]
    quick = QUICK if arguments.quick else ""
    arguments.train = f"{task.train}{quick} {arguments.train}"
    arguments.heal = f"{task.heal}{quick} {arguments.heal}"
    given = {re.sub(r"\W+", "_", words).strip("_"): words for words in arguments.convert}
    arguments.convert = given or task.convert
    arguments.rows, arguments.held_out = arguments.rows or task.rows_of[0], arguments.held_out or task.rows_of[1]
    work = arguments.output_dir / f"heal_{arguments.task}"
    work.mkdir(parents=True, exist_ok=True)
    task.rows(arguments, work)
    figures = heal(arguments, task, work)
    names = list(figures["original"])
    rows = [[model, *(found[name] for name in names)] for model, found in figures.items()]
    save(arguments, "heal_tasks", [table([arguments.task, *names], rows)])


if __name__ == "__main__":
    main()
