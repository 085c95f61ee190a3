"""The tasks of speech: their losses are the formulas, their figures those of the models alone, bad rows are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCTC, AutoModelForSpeechSeq2Seq, AutoProcessor

from hf_linear_attention import convert
from hf_linear_attention.training.data.batches import token_weights
from hf_linear_attention.training.data.recordings import frames_needed
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.evaluation.scores import ErrorRates, scored
from hf_linear_attention.training.recipe_parser import parse


Twin = Callable[[str], Path]
AUTO = {"ctc": AutoModelForCTC, "speech_seq2seq": AutoModelForSpeechSeq2Seq}


@pytest.fixture
def student(twin: Twin, tmp_path: Path) -> Callable[[str], Path]:
    """A converted twin, which is farther from its original than an untrained conversion is."""

    def folder(task: str) -> Path:
        original, converted = twin(task) / "original", tmp_path / "student"
        model = convert(str(original), mechanism="linear", feature_map="exp")
        model.save_pretrained(converted)
        AutoProcessor.from_pretrained(original).save_pretrained(converted)
        return converted

    return folder


def examples_of(task: str, folder: Path) -> Any:
    words = ["--task", task, "--model_name_or_path", folder / "original", "--output_dir", "o"]
    words += ["--train_file", folder / "train.jsonl", "--validation_file", folder / "valid.jsonl"]
    recipe = parse([*map(str, words), "--task_loss_weight", "1"])
    return load_data(recipe, AutoProcessor.from_pretrained(folder / "original"))


def inputs_of(example: Any) -> dict[str, torch.Tensor]:
    names = ("input_values", "input_features", "attention_mask")
    return {name: torch.tensor(example[name])[None] for name in names if name in example}


def relative_error(mine: Any, yours: Any) -> float:
    pairs = [((a - b).square().sum(-1) / b.square().sum(-1)).mean().item() for a, b in zip(mine[1:], yours[1:])]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("task", AUTO)
def test_losses_are_the_formulas(task: str, student: Callable[[str], Path], twin: Twin, finetune: Any) -> None:
    """Of one recording at a time, without padding, dropped layers or masked time: each weighs the same."""
    converted, original = student(task), twin(task) / "original"
    options = ["--task", task, "--model_name_or_path", converted, "--teacher_name_or_path", original]
    options += ["--train_file", twin(task) / "train.jsonl", "--logging_steps", 1, "--max_train_steps", 1]
    options += ["--per_device_train_batch_size", 24, "--hidden_state_layers", "all"]
    weights = ["--task_loss_weight", 1, "--logits_kl_weight", 1, "--hidden_state_weight", 1]
    event = next(event for event in finetune(*options, *weights) if "loss" in event)
    models = [AUTO[task].from_pretrained(folder).eval() for folder in (converted, original)]
    for model in models:
        model.config.ctc_loss_reduction = "sum"
    found = examples_of(task, twin(task)).train
    sums, tokens, rows = dict.fromkeys(("task_loss", "logits_kl", "hidden_state"), 0.0), 0, 0
    for number in range(len(found)):
        example = found[number]
        labels = torch.tensor(example["labels" if task == "ctc" else "targets"])[None]
        with torch.no_grad():
            mine, yours = (model(**inputs_of(example), labels=labels, output_hidden_states=True) for model in models)
        a, b = (outputs.logits[0].log_softmax(-1) for outputs in (mine, yours))
        sums["task_loss"] += mine.loss.item() * (1 if task == "ctc" else labels.numel())
        sums["logits_kl"] += F.kl_div(a, b, log_target=True, reduction="sum").item()
        parts = ("hidden_states",) if task == "ctc" else ("encoder_hidden_states", "decoder_hidden_states")
        sums["hidden_state"] += sum(relative_error(mine[name], yours[name]) for name in parts) / len(parts)
        tokens, rows = tokens + labels.numel(), rows + len(a)
    assert event["task_loss"] == pytest.approx(sums["task_loss"] / tokens, rel=1e-3)
    assert event["logits_kl"] == pytest.approx(sums["logits_kl"] / rows, rel=1e-3)
    assert event["hidden_state"] == pytest.approx(sums["hidden_state"] / len(found), rel=1e-3)
    assert event["recordings"] == 24


def test_what_is_saved_keeps_its_dropout(student: Callable[[str], Path], twin: Twin, finetune: Any, tmp_path) -> None:
    options = ["--task", "ctc", "--model_name_or_path", student("ctc"), "--max_train_steps", 1]
    options += ["--teacher_name_or_path", twin("ctc") / "original", "--train_file", twin("ctc") / "train.jsonl"]
    finetune(*options)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.layerdrop, config.apply_spec_augment) == (0.5, True)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForCTC, AutoProcessor" in card
    assert "pipeline_tag: automatic-speech-recognition" in card


def test_figures_of_ctc_are_those_of_the_model_alone(twin: Twin, finetune: Any) -> None:
    folder = twin("ctc")
    options = ["--task", "ctc", "--model_name_or_path", folder / "original", "--validation_file"]
    figures = finetune(*options, folder / "valid.jsonl")[0]
    model = AutoModelForCTC.from_pretrained(folder / "original").eval()
    processor = AutoProcessor.from_pretrained(folder / "original")
    found = examples_of("ctc", folder).validation
    texts = []
    for number in range(len(found)):
        with torch.no_grad():
            ids = model(**inputs_of(found[number])).logits[0].argmax(-1)
        texts.append(processor.tokenizer.decode(ids))
    known = [json.loads(line)["text"] for line in (folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = scored(ErrorRates, texts, known)
    assert {name: figures[f"eval_{name}"] for name in expected} == expected
    assert len(set(texts)) > 1


def test_generated_speech_is_compared(student: Callable[[str], Path], twin: Twin, finetune: Any) -> None:
    task, folder = "speech_seq2seq", twin("speech_seq2seq")
    converted = student(task)
    options = ["--task", task, "--model_name_or_path", converted, "--teacher_name_or_path", folder / "original"]
    options += ["--validation_file", folder / "valid.jsonl", "--predict_with_generate", "--generation_max_length", 8]
    figures = finetune(*options)[0]
    tokenizer = AutoProcessor.from_pretrained(converted).tokenizer
    models = [AutoModelForSpeechSeq2Seq.from_pretrained(path).eval() for path in (converted, folder / "original")]
    found, mine, yours = examples_of(task, folder).validation, [], []
    for number in range(len(found)):
        for model, texts in zip(models, (mine, yours), strict=True):
            ids = model.generate(**inputs_of(found[number]), max_new_tokens=8)[0]
            texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    expected = scored(ErrorRates, mine, list(found.references))
    assert figures["eval_wer"] == expected["wer"]
    assert figures["eval_cer"] == expected["cer"]
    assert figures["eval_same_text"] == sum(a == b for a, b in zip(mine, yours, strict=True)) / len(mine)


def test_targets_do_not_repeat_the_token_that_a_decoder_starts_with(twin: Twin) -> None:
    found = examples_of("speech_seq2seq", twin("speech_seq2seq")).train
    tokenizer = AutoProcessor.from_pretrained(twin("speech_seq2seq") / "original").tokenizer
    for number in (0, 1):
        written = tokenizer.convert_ids_to_tokens(found[number]["targets"].tolist())
        assert written == ["<|notimestamps|>", *found.references[number], "<|endoftext|>"]
        assert found[number]["frames"] == 50


def bad_row(task: str, twin: Twin, tmp_path: Path, finetune: Any, row: dict[str, Any], *more: Any) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    model = ["--task", task, "--model_name_or_path", twin(task) / "original", "--train_file", path]
    finetune(*model, *more, expect=2)


@pytest.mark.parametrize(
    ("task", "row", "what"),
    [
        ("ctc", {"audio": {"array": [0.0] * 4000, "sampling_rate": 8000}, "text": "a"}, "it has 8,000 Hz, but"),
        ("ctc", {"audio": "absent.wav", "text": "a"}, "there is no file"),
        ("ctc", {"audio": [0.0] * 300, "text": "a"}, "the model makes 0 frames, but 1 are needed"),
        ("ctc", {"audio": [0.0] * 1600, "text": "aabcd"}, "the model makes 4 frames, but 6 are needed"),
        ("ctc", {"audio": [0.0] * 1600, "text": 3}, "`text` is 3, not a text"),
        ("speech_seq2seq", {"audio": [0.0] * 17600, "text": "a"}, "1.1 s long, but the model reads at most 1.0 s"),
        ("speech_seq2seq", {"audio": [0.0] * 1600, "text": None}, "`text` is None, not a text"),
    ],
)
def test_bad_rows_are_named(task: str, row: dict, what: str, twin: Twin, tmp_path: Path, finetune, capsys) -> None:
    bad_row(task, twin, tmp_path, finetune, row)
    error = capsys.readouterr().err
    assert "1 bad row(s)" in error
    assert what in error


def test_columns_and_texts_are_named(twin: Twin, tmp_path: Path, finetune: Any, capsys: Any) -> None:
    bad_row("ctc", twin, tmp_path, finetune, {"path": "a.wav", "text": "a"})
    assert "`--audio_column_name audio` is not a column" in capsys.readouterr().err
    bad_row("ctc", twin, tmp_path, finetune, {"audio": "a.wav", "said": "a"})
    assert "`--text_column_name text` is not a column" in capsys.readouterr().err
    path = tmp_path / "x.txt"
    path.write_text("text", encoding="utf-8")
    finetune("--task", "ctc", "--model_name_or_path", twin("ctc") / "original", "--train_file", path, expect=2)
    assert "a .txt file has no recordings" in capsys.readouterr().err


def test_without_a_task_loss_no_text_is_needed(student, twin: Twin, tmp_path: Path, finetune: Any) -> None:
    rows = [json.loads(line) for line in (twin("ctc") / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    path = twin("ctc") / "silent.jsonl"
    path.write_text("".join(json.dumps({"audio": row["audio"]}) + "\n" for row in rows[:4]), encoding="utf-8")
    options = ["--task", "ctc", "--model_name_or_path", student("ctc"), "--teacher_name_or_path"]
    events = finetune(*options, twin("ctc") / "original", "--train_file", path, "--max_train_steps", 1)
    assert "logits_kl" in events[-1] or any("logits_kl" in event for event in events)


def test_weights_where_layers_see_fewer_positions_than_frames() -> None:
    batch = {"frame_mask": torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]]), "index": torch.arange(2)}
    for length in (7, 4, 3):
        weights = token_weights(batch, length)
        assert weights.shape == (2, length)
        assert torch.allclose(weights.sum(-1), torch.ones(2))
    assert (token_weights(batch, 3)[1] > 0).tolist() == [True, True, False]


def test_an_alignment_has_a_blank_between_equal_tokens() -> None:
    assert frames_needed([1, 1, 2, 2, 2]) == 8
