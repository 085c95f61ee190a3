"""What files become."""

from __future__ import annotations

import copy
import json
from itertools import chain
from typing import Any

import datasets
import pytest
from matrix import stock_config
from recipes import recipe_of
from runs import write_lines
from tokenizers import processors
from transformers import BertConfig

from hf_linear_attention import convert_config
from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.data import texts as tokenization
from hf_linear_attention.training.data.batches import pad
from hf_linear_attention.training.data.packing import Examples, Part
from hf_linear_attention.training.data.processors import sequence_length, warn_of_length
from hf_linear_attention.training.data.rows import label_names, load_rows
from hf_linear_attention.training.data.texts import build_examples, check_texts, paragraphs
from hf_linear_attention.training.models import class_mapping
from hf_linear_attention.training.recipe import DataArguments


@pytest.fixture
def build(tokenizer):
    def examples(task: str, split: str, max_length: int = 16, classes: Any = None, **data: Any) -> Examples:
        recipe = recipe_of(task, task_loss_weight=1.0, **data)
        rows = load_rows(recipe.data, split)
        assert rows is not None
        part = Part(recipe, rows, split, tokenizer, max_length, classes)
        check_texts(part)
        return build_examples(part)

    return examples


def tokens_of(examples: Examples) -> list[list[int]]:
    return [examples[index]["input_ids"].tolist() for index in range(len(examples))]


@pytest.fixture(params=["<s>", ""])
def beginning(request, tokenizer):
    """The tokens that the tokenizer puts before a text by itself: its BOS, or none though it has one."""
    before = tokenizer.backend_tokenizer.post_processor
    if request.param:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("a").input_ids == tokenizer(f"{request.param}a", add_special_tokens=False).input_ids
    yield [tokenizer.bos_token_id] * bool(request.param)
    tokenizer.backend_tokenizer.post_processor = before


def test_running_text_is_one_stream_after_at_most_one_bos(build, files, tokenizer, beginning):
    blocks = tokens_of(build("causal_lm", "train", train_file=str(files / "train.txt")))
    text = (files / "train.txt").read_text(encoding="utf-8")
    expected = [*beginning, *tokenizer(text, add_special_tokens=False).input_ids]
    joined = [token for block in blocks for token in block]
    assert joined == expected[: len(joined)]
    assert len(expected) - len(joined) <= 1
    assert {len(block) for block in blocks[:-1]} == {16}


def test_every_json_document_starts_with_a_bos_or_ends_with_an_eos(build, files, tokenizer, beginning):
    """In training they are packed, and evaluated one by one."""
    end = [] if beginning else [tokenizer.eos_token_id]
    for split, name in (("train", "train"), ("validation", "valid")):
        texts = [json.loads(line)["text"] for line in (files / f"{name}.jsonl").read_text("utf-8").splitlines()]
        expected = [[*beginning, *tokenizer(text, add_special_tokens=False).input_ids, *end] for text in texts]
        found = tokens_of(build("causal_lm", split, **{f"{split}_file": str(files / f"{name}.jsonl")}))
        if split == "train":
            stream, blocks = (list(chain(*texts)) for texts in (expected, found))
            assert blocks == stream[: len(blocks)]
            assert len(stream) - len(blocks) <= 1
        else:
            assert found == [text[:16] for text in expected]


def test_paragraphs_of_a_text_file_are_documents(build, files, tokenizer):
    documents = tokens_of(build("embedding", "train", train_file=str(files / "train.txt")))
    pieces = paragraphs((files / "train.txt").read_text(encoding="utf-8"))
    assert documents == [tokenizer(piece).input_ids[:16] for piece in pieces]
    assert paragraphs("a\nb\n\n\nc\n \nd\n") == ["a\nb", "c", "d"]
    assert paragraphs("a\nb\nc\n") == ["a", "b", "c"]


def test_tables(build, tmp_path):
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


CLASSES = {"classes": {"x": 0, "y": 1}}
COLUMNS = {"text_column_name": "source", "text_pair_column_name": "target"}


@pytest.mark.parametrize(
    ("task", "suffix", "content", "options", "places"),
    [
        ("causal_lm", "jsonl", '{"text": "a"}\n\n{"text": null}\n{"text": "b"}\n', {}, ["line 3: `text` is None"]),
        ("causal_lm", "jsonl", '{"text": "a"}\n{"text": \n{"text": 5}\n', {}, ["2: is not a JSON", "3: `text` is 5"]),
        ("seq2seq_lm", "jsonl", '{"source": "a", "target": 3}\n', COLUMNS, ["line 1: `target` is 3"]),
        (
            *("sequence_classification", "csv", 'text,label\n"a\nb",x\n,y\nb,\nc,y\n', CLASSES),
            ["line 4: `text` is empty", "line 5: `label` is missing"],
        ),
    ],
)
def test_bad_rows_are_refused(task, suffix, content, options, places, build, tmp_path):
    path = tmp_path / f"t.{suffix}"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TrainingError, match=r"bad row\(s\) in .*Correct or remove them") as error:
        build(task, "train", train_file=str(path), **options)
    assert all(place in str(error.value) for place in places)


def test_pairs_of_texts(build, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "model_input_names", ["input_ids", "token_type_ids", "attention_mask"])  # as BERT's
    lines = [{"text": "one", "other": "first text", "label": "a"}, {"text": "two", "other": "it", "label": "b"}]
    write_lines(tmp_path / "t.jsonl", lines)
    options = {"train_file": str(tmp_path / "t.jsonl"), "text_pair_column_name": "other", "classes": {"a": 0, "b": 1}}
    examples = build("sequence_classification", "train", **options)
    expected = [tokenizer(line["text"], line["other"]) for line in lines]
    assert tokens_of(examples) == [found.input_ids for found in expected]
    assert [examples[index]["labels"] for index in range(2)] == [0, 1]
    types = [examples[index]["token_type_ids"].tolist() for index in range(2)]
    assert types == [found.token_type_ids for found in expected]
    batch = pad([{**examples[index], "index": index} for index in range(2)], 0)
    assert batch["token_type_ids"].shape == batch["input_ids"].shape
    assert batch["token_type_ids"].sum() == sum(map(sum, types)) > 0


def test_dataset_folder(build, files, tmp_path):
    for split, name in (("train", "train"), ("validation", "valid")):
        (tmp_path / f"{split}.jsonl").write_bytes((files / f"{name}.jsonl").read_bytes())
    for split, name in (("train", "train"), ("validation", "valid")):
        expected = build("embedding", split, **{f"{split}_file": str(files / f"{name}.jsonl")})
        assert tokens_of(build("embedding", split, dataset_name=str(tmp_path))) == tokens_of(expected)


def test_class_mapping():
    assert class_mapping(BertConfig(num_labels=2), ["1", "0", "1"]) == {"0": 0, "1": 1}
    assert class_mapping(BertConfig(num_labels=2), [str(n) for n in range(11)])["10"] == 10
    named = BertConfig(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    assert class_mapping(named, ["yes"]) == {"no": 0, "yes": 1}
    assert class_mapping(BertConfig(num_labels=2), ["b", "a", "c"]) == {"a": 0, "b": 1, "c": 2}
    trained = BertConfig(num_labels=2, architectures=["BertForSequenceClassification"])
    with pytest.raises(TrainingError, match=r"\['0', '1', '2'\].*LABEL_0, LABEL_1"):
        class_mapping(trained, ["0", "1", "2"])


def test_tokens_are_kept_between_runs(build, files, tmp_path, monkeypatch, tokenizer):
    """Another text, another option or another tokenizer is tokenised anew."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    calls: list[int] = []
    fields = tokenization.fields
    monkeypatch.setattr(tokenization, "fields", lambda *args, **options: calls.append(1) or fields(*args, **options))
    train, valid = str(files / "train.jsonl"), str(files / "valid.jsonl")
    first = tokens_of(build("embedding", "train", train_file=train))
    assert calls == [1]
    assert tokens_of(build("embedding", "train", train_file=train)) == first
    assert calls == [1]
    build("embedding", "train", train_file=valid)
    build("embedding", "train", train_file=train, max_length=15)
    assert len(calls) == 3
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["the"])
    text = ["what the tokenizer knows"]
    mine, yours = (tokenization.tokenize_texts(text, each)["input_ids"][0].tolist() for each in (tokenizer, other))
    assert mine != yours
    assert tokenization.tokenize_texts(["a", ""], tokenizer)["input_ids"][1].tolist() == []


def test_rows_are_longer_than_what_stays_exact(tokenizer, caplog):
    """Twice as long by default, or more if keys are chosen, where the model reads so much; a shorter `--max_length` or
    limit of the tokenizer gets a warning.
    """
    tokenizer, stock = copy.deepcopy(tokenizer), stock_config("llama", max_position_embeddings=4096)
    tokenizer.model_max_length = 10**6
    sizes = {"window_size": 300, "num_sinks": 4, "num_exact_keys": 700}
    config, few = (convert_config(stock, mechanism="hybrid", **sizes | x) for x in ({}, {"num_exact_keys": 5}))
    none = convert_config(stock, mechanism="hybrid", window_size=1000, num_sinks=4)
    lengths = [sequence_length(recipe_of(), tokenizer, x) for x in (stock, config, few, none)]
    assert lengths == [512, 4096, 2472, 2008]
    config.max_position_embeddings = 1500
    assert sequence_length(recipe_of(), tokenizer, config) == 1500
    warn_of_length(1005, config)
    assert not caplog.messages
    assert sequence_length(recipe_of(max_length=1004), tokenizer, config) == 1004
    assert not caplog.messages
    warn_of_length(1004, config)
    assert "rows have 1004 tokens, not more than the 1004 that stay exact" in caplog.text
    tokenizer.model_max_length = 900
    assert sequence_length(recipe_of(), tokenizer, config) == 900
    warn_of_length(900, config)
    assert "rows have 900 tokens, not more than the 1004 that stay exact" in caplog.text
