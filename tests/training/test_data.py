"""What files become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import BertConfig, PreTrainedTokenizerFast

from training.arguments import (
    DataArguments,
    ModelArguments,
    ObjectiveArguments,
    OptimizationArguments,
    Recipe,
    RunArguments,
)
from training.data import build_examples, label_names, load_rows, paragraphs
from training.errors import TrainingError
from training.models import class_mapping
from training.packing import Examples


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerFast):
    def examples(task: str, split: str, max_length: int = 16, classes: Any = None, **data: Any) -> Examples:
        groups = (ObjectiveArguments(task_loss_weight=1.0), OptimizationArguments(), RunArguments("out"))
        recipe = Recipe(ModelArguments("m", task), DataArguments(**data), *groups)
        rows = load_rows(recipe.data, split)
        assert rows is not None
        return build_examples(recipe, rows, tokenizer, max_length, classes, split)

    return examples


def tokens_of(examples: Examples) -> list[list[int]]:
    return [examples[index]["input_ids"].tolist() for index in range(len(examples))]


def test_running_text_is_one_stream_after_one_bos(build, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = tokens_of(build("causal_lm", "train", train_file=str(files / "train.txt")))
    text = (files / "train.txt").read_text(encoding="utf-8")
    expected = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
    joined = [token for block in blocks for token in block]
    assert joined == expected[: len(joined)]
    assert len(expected) - len(joined) <= 1
    assert {len(block) for block in blocks[:-1]} == {16}


def test_every_json_document_starts_with_bos(build, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = files / "train.jsonl"
    joined = [token for block in tokens_of(build("causal_lm", "train", train_file=str(path))) for token in block]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    expected = [t for text in texts for t in [tokenizer.bos_token_id, *tokenizer(text).input_ids]]
    assert joined == expected[: len(joined)]
    assert len(expected) - len(joined) <= 1


def test_documents_are_evaluated_one_by_one(build, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = files / "valid.jsonl"
    documents = tokens_of(build("causal_lm", "validation", validation_file=str(path)))
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert documents == [[tokenizer.bos_token_id, *tokenizer(text).input_ids][:16] for text in texts]


def test_paragraphs_of_a_text_file_are_documents(build, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    documents = tokens_of(build("embedding", "train", train_file=str(files / "train.txt")))
    pieces = paragraphs((files / "train.txt").read_text(encoding="utf-8"))
    assert documents == [tokenizer(piece).input_ids[:16] for piece in pieces]
    assert paragraphs("a\nb\n\n\nc\n \nd\n") == ["a\nb", "c", "d"]
    assert paragraphs("a\nb\nc\n") == ["a", "b", "c"]


def test_first_characters_of_the_evaluation_text(build, files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = str(files / "valid.txt")
    windows = build("causal_lm", "validation", validation_file=path, max_eval_chars=100)
    text = Path(path).read_text(encoding="utf-8")[:100]
    assert windows.lengths.sum() == len(tokenizer(text, add_special_tokens=False).input_ids)
    limited = build("causal_lm", "validation", validation_file=path, max_eval_tokens=40, max_eval_samples=9)
    assert 40 <= limited.lengths.sum() < 40 + 16
    assert len(limited) <= 9


def test_tables(build, tmp_path: Path) -> None:
    """Quotes in a .tsv are characters; the text "null" is a text."""
    (tmp_path / "t.tsv").write_text('text\tlabel\n"open quote\ta\nnull\tb\nthree\ta\n', encoding="utf-8")
    rows = load_rows(DataArguments(train_file=str(tmp_path / "t.tsv")), "train")
    assert rows is not None
    assert rows["text"][:] == ['"open quote', "null", "three"]
    assert label_names(rows, "label") == ["a", "b", "a"]
    examples = build("sequence_classification", "train", classes={"a": 1, "b": 0}, train_file=str(tmp_path / "t.tsv"))
    assert [examples[index]["labels"] for index in range(3)] == [1, 0, 1]
    with pytest.raises(TrainingError, match=r"unknown classes.*'b'"):
        build("sequence_classification", "train", classes={"a": 1}, train_file=str(tmp_path / "t.tsv"))
    with pytest.raises(TrainingError, match=r"nothere.*text, label"):
        build("embedding", "train", train_file=str(tmp_path / "t.tsv"), text_column_name="nothere")


def test_a_text_that_is_no_text(build, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": null}\n', encoding="utf-8")
    with pytest.raises(TrainingError, match=r"row 1 of column `text` is None"):
        build("causal_lm", "train", train_file=str(tmp_path / "t.jsonl"))


def test_a_labelled_row_without_text_is_refused(build, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "", "label": 1}\n', encoding="utf-8")
    with pytest.raises(TrainingError, match="row 1 has a label but no text"):
        build("sequence_classification", "train", classes={"0": 0, "1": 1}, train_file=str(tmp_path / "t.jsonl"))


def test_dataset_folder(build, files: Path, tmp_path: Path) -> None:
    for split, name in (("train", "train"), ("validation", "valid")):
        (tmp_path / f"{split}.jsonl").write_bytes((files / f"{name}.jsonl").read_bytes())
    for split, name in (("train", "train"), ("validation", "valid")):
        expected = build("embedding", split, **{f"{split}_file": str(files / f"{name}.jsonl")})
        assert tokens_of(build("embedding", split, dataset_name=str(tmp_path))) == tokens_of(expected)


def test_class_mapping() -> None:
    assert class_mapping(BertConfig(num_labels=2), ["1", "0", "1"]) == {"0": 0, "1": 1}
    assert class_mapping(BertConfig(num_labels=2), [str(n) for n in range(11)])["10"] == 10
    named = BertConfig(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    assert class_mapping(named, ["yes"]) == {"no": 0, "yes": 1}
    assert class_mapping(BertConfig(num_labels=2), ["b", "a", "c"]) == {"a": 0, "b": 1, "c": 2}
    trained = BertConfig(num_labels=2, architectures=["BertForSequenceClassification"])
    with pytest.raises(TrainingError, match=r"\['0', '1', '2'\].*LABEL_0, LABEL_1"):
        class_mapping(trained, ["0", "1", "2"])


def test_class_names_of_a_class_label_column() -> None:
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"label": [1, 0]}, features=features)
    assert label_names(rows, "label") == ["yes", "no"]
