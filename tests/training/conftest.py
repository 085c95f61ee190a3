"""Tiny random models, a tokenizer and files of CPython's own documentation; nothing is fetched, nothing is shared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from checkpoints import save_twin
from converted import dataset_cache, fresh_accelerate, undrawn  # noqa: F401  (fixtures, found here by name)
from PIL import Image
from runs import write_lines
from task_twins import TWINS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_linear_attention import convert
from hf_linear_attention.training.finetune import main
from hf_linear_attention.training.tracking import read_metrics


VOCABULARY = 300


@pytest.fixture(scope="session")
def texts():
    """Paragraphs of very different lengths."""
    return [part for topic in sorted(topics) for part in topics[topic].split("\n\n") if len(part) > 20][:400]


@pytest.fixture(scope="session")
def tokenizer(texts):
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<mask>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    core.train_from_iterator(texts[:100], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        unk_token="<unk>",
        model_max_length=128,
    )


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": VOCABULARY, "max_position_embeddings": 128}


def llama_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, **SIZES, **options)


def bert_config(**options: Any) -> BertConfig:
    return BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES, **options)


@pytest.fixture(scope="session")
def save(tmp_path_factory, tokenizer):
    """Save a model class with random weights and the tokenizer; returns the folder."""

    def saved(model_class: type[PreTrainedModel], config: Any, seed: int = 0) -> str:
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp(model_class.__name__)
        model_class(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return saved


def saved_model(model_class: type[PreTrainedModel], config: Any, seed: int = 0) -> Any:
    """A fixture: the folder of this model."""

    @pytest.fixture(scope="session")
    def folder(save):
        return save(model_class, config, seed)

    return folder


llama = saved_model(LlamaForCausalLM, llama_config())
llama_teacher = saved_model(LlamaForCausalLM, llama_config(initializer_range=0.2), seed=1)
bert = saved_model(BertModel, bert_config())
bert_teacher = saved_model(BertModel, bert_config(initializer_range=0.2), seed=1)
masked = saved_model(BertForMaskedLM, bert_config())
masked_teacher = saved_model(BertForMaskedLM, bert_config(initializer_range=0.2), seed=1)


@pytest.fixture(scope="session")
def named_classifier(save):
    """Its classes are those of `files`; with dropout, so that resuming it exactly needs the random state."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = {"id2label": {0: "short", 1: "long"}, "label2id": {"short": 0, "long": 1}}
    return save(BertForSequenceClassification, BertConfig(**(SIZES | sizes), **names))


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A function: convert the model of a folder, and copy what stands beside it. The folder is not to be changed."""
    made: dict[str, Path] = {}

    def folder_of(source: str | Path, **settings: Any) -> Path:
        key = json.dumps([str(source), settings], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("converted")
            convert(str(source), **settings).save_pretrained(made[key])
            for path in Path(source).iterdir():
                if path.is_file() and path.suffix != ".safetensors" and not (made[key] / path.name).exists():
                    shutil.copy(path, made[key])
        return made[key]

    return folder_of


@pytest.fixture(scope="session")
def files(tmp_path_factory, texts):
    """A folder: train and valid as .txt (paragraphs), .jsonl and labelled .tsv."""
    folder = tmp_path_factory.mktemp("files")
    for name, part in (("train", texts[:60]), ("valid", texts[60:81])):
        (folder / f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")
        write_lines(folder / f"{name}.jsonl", ({"text": text} for text in part))
        rows = [(" ".join(text.split()), "long" if len(text) > 200 else "short") for text in part]
        table = "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows])
        (folder / f"{name}.tsv").write_text(table, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def any_task(tmp_path_factory):
    """A file with the columns of every task, for tests that only look at options."""
    row = dict.fromkeys(("text", "label", "image", "source", "target"), "Here")
    return write_lines(tmp_path_factory.mktemp("any_task") / "train.jsonl", [row])


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder: <split>/<class>/<number>.png, dark and bright, and <split>.jsonl with their paths."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 12), ("valid", 7)):
        rows = []
        for number in range(count):
            name, low = [("bright", 100), ("dark", 0)][number % 2]
            path = folder / split / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(low, low + 150, (16, 16), dtype=np.uint8)).save(path)
            rows.append({"image": str(path.relative_to(folder)), "label": name})
        write_lines(folder / f"{split}.jsonl", rows)
    return folder


@pytest.fixture(scope="session")
def vision_teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    names = {"id2label": {0: "bright", 1: "dark"}, "label2id": {"bright": 0, "dark": 1}}
    save_twin(folder, "vit", "AutoModelForImageClassification", **names)
    return str(folder)


@pytest.fixture(scope="session")
def twin(tmp_path_factory, texts, tokenizer):
    """The folder of an original and its data for a task, as `task_twins.py` describes it."""
    made: dict[str, Path] = {}

    def folder_of(task: str) -> Path:
        if task not in made:
            made[task] = tmp_path_factory.mktemp(task)
            TWINS[task](made[task], texts, tokenizer)
        return made[task]

    return folder_of


@pytest.fixture
def finetune(tmp_path):
    """Run the command line in this process; returns the events of metrics.jsonl."""

    def run(*options: Any, output_dir: Path | None = None, expect: int = 0) -> list[dict[str, Any]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        output_dir = output_dir or tmp_path / "out"
        code = main([*map(str, options), "--output_dir", str(output_dir)])
        assert code == expect, f"exit code {code}"
        return read_metrics(output_dir / "metrics.jsonl") if code == 0 else []

    return run
