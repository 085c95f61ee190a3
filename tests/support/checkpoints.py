"""Tiny random checkpoints on disk, with a tokenizer trained on text that CPython carries."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics

from matrix import stock_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, ViTImageProcessorPil

from hf_linear_attention.conversion import commands
from hf_linear_attention.conversion.convert_checkpoint import main


SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]  # in the order of the ids in the matrix' configs


def tiny_tokenizer(max_length: int = 48) -> PreTrainedTokenizerFast:
    """A byte pair encoding of 64 tokens, as many as the vocabulary of the twins."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=64, limit_alphabet=40, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator([text for _, text in sorted(topics.topics.items())][:20], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def save_twin(folder: Path, family: str, auto_class: str | None = None, dtype=None, save=None, **changes):
    """Write a random stock twin with its tokenizer or image processor; returns the model."""
    model = stock_model(family, auto_class, **changes)
    model = model if dtype is None else model.to(dtype)
    model.save_pretrained(folder, **(save or {}))
    if family == "vit":
        ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(folder)
    else:
        tiny_tokenizer().save_pretrained(folder)
    return model


def run(*words: object, command: Callable[[list[str]], int] = main) -> tuple[int, str, str]:
    """`convert_checkpoint.py` in this process; returns exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def evaluate(*words: object) -> tuple[int, str, str]:
    """`hf-linear-attention evaluate`, of a model and its original that are named as for its conversion."""
    names = {"--model_name_or_path": "--teacher_name_or_path", "--output_dir": "--model_name_or_path"}
    parts = [str(word).partition("=") for word in words]
    return run(*("".join((names.get(name, name), *rest)) for name, *rest in parts), command=commands.evaluate)


def convert_folder(source: Path, output: Path, *words: object) -> dict:
    """Convert or fail the test; returns conversion_report.json."""
    code, _, err = run("--model_name_or_path", source, "--output_dir", output, *words)
    assert code == 0, err
    return json.loads((output / "conversion_report.json").read_text())


def files(folder: Path) -> Sequence[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
