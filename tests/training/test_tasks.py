"""Tasks beyond plain text: what rows become, what is learned from the original, and what is measured and refused.

Every shipped recipe also trains a converted model on two processes, on real text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.nn.functional as F
import yaml
from runs import changed, write_lines
from task_twins import TAGS, TWINS
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCTC,
    AutoProcessor,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
)

from hf_linear_attention import convert
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import token_weights
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.processors import load_processor
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.evaluation.scores import ErrorRates, TextMatch, scored
from hf_linear_attention.training.models import auto_class_of
from hf_linear_attention.training.recipe_parser import parse_options
from hf_linear_attention.training.tasks import TASKS
from hf_linear_attention.training.tracking import read_metrics


ELSEWHERE = {"text": ["y"], "answer_start": [0]}
Twin = Callable[[str], Path]
DROPPED: dict[str, dict[str, Any]] = {"seq2seq_lm": {"drop": ["position_bias"]}}


@pytest.fixture
def student(twin: Twin, converted: Callable[..., Path]) -> Callable[[str], list[Any]]:
    """Options that distil a converted twin from its original."""

    def options(task: str) -> list[Any]:
        folder = twin(task)
        model = converted(folder / "original", mechanism="linear", feature_map="exp", **DROPPED.get(task, {}))
        models = ["--model_name_or_path", model, "--teacher_name_or_path", folder / "original"]
        return ["--task", task, *models, "--train_file", folder / "train.jsonl", "--logging_steps", 1]

    return options


def recipe_of(task: str, folder: Path, model: Path, *options: Any) -> Any:
    words = ["--task", task, "--model_name_or_path", model, "--output_dir", "o", "--train_file", folder / "train.jsonl"]
    words += ["--validation_file", folder / "valid.jsonl"]
    teacher = ["--teacher_name_or_path", model] if TASKS[task].logits is None else []
    return parse_options([str(word) for word in (*words, *teacher, *options)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def data_of(task: str, twin: Twin, *options: Any) -> Any:
    recipe = recipe_of(task, twin(task), twin(task) / "original", *options)
    return load_data(recipe, load_processor(recipe))


@pytest.mark.parametrize("task", TWINS)
def test_every_task_is_healed(task: str, student: Callable[[str], list[Any]], twin: Twin, finetune: Any) -> None:
    """The loss falls and the predictions come closer to the original's."""
    steps = ["--max_train_steps", 6, "--per_device_train_batch_size", 24, "--learning_rate", 5e-4]
    options = [*student(task), *steps, "--hidden_state_weight", 1, "--validation_file", twin(task) / "valid.jsonl"]
    events = finetune(*options)
    losses = [event["loss"] for event in events if "loss" in event]
    assert losses[-1] < 0.9 * losses[0]
    figures = [event for event in events if any(name.startswith("eval_") for name in event)]
    assert len(figures) == 2
    close = "eval_agreement" if TASKS[task].logits is not None else "eval_cosine"
    assert figures[0][close] <= figures[1][close] <= 1
    assert f"eval_{TASKS[task].figures[0]}" in figures[0]


def test_the_first_token_of_a_word_has_its_class(twin: Twin) -> None:
    found = data_of("token_classification", twin)
    rows = rows_of(twin("token_classification") / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(twin("token_classification") / "original")
    for row, example in zip(rows, [found.train[number] for number in range(len(rows))], strict=True):
        ids, labels = list(example["input_ids"]), list(example["labels"])
        assert [TAGS[label] for label in labels if label != IGNORED] == row["ner_tags"]
        parts = [tokenizer(word, add_special_tokens=False).input_ids for word in row["tokens"]]
        starts = [sum(map(len, parts[:number])) for number in range(len(parts))]
        assert ids == [token for part in parts for token in part]
        assert [place for place, label in enumerate(labels) if label != IGNORED] == starts


def inputs_of(example: Any) -> dict[str, torch.Tensor]:
    names = ("input_ids", "input_values", "input_features", "attention_mask")
    return {name: torch.as_tensor(example[name])[None] for name in names if name in example}


def relative_error(mine: Any, yours: Any) -> float:
    pairs = [((a - b).square().sum(-1) / b.square().sum(-1)).mean().item() for a, b in zip(mine[1:], yours[1:])]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("task", ["token_classification", "seq2seq_lm", "ctc", "speech_seq2seq"])
def test_losses_are_the_formulas(task: str, student: Callable[[str], list[Any]], twin: Twin, finetune: Any) -> None:
    """Of one example at a time, without padding, dropped layers or masked time.

    A text weighs what its tokens do, those of its target included, and every recording the same.
    """
    options = [*student(task), "--max_train_steps", 1, "--per_device_train_batch_size", 24]
    weights = ["--task_loss_weight", 1, "--logits_kl_weight", 1, "--hidden_state_weight", 1]
    event = next(e for e in finetune(*options, *weights, "--hidden_state_layers", "all") if "loss" in e)
    models = [auto_class_of(task).from_pretrained(str(options[place])).eval() for place in (3, 5)]
    for model in models:
        model.config.ctc_loss_reduction = "sum"
    is_divided, is_speech = TASKS[task].logits == "targets", TASKS[task].inputs == "sound"
    states = ("encoder_hidden_states", "decoder_hidden_states") if is_divided else ("hidden_states",)
    found, sums = data_of(task, twin).train, dict.fromkeys(("task_loss", "logits_kl", "hidden_state"), 0.0)
    scored_labels = rows = units = 0
    for number in range(len(found)):
        example = found[number]
        labels = torch.tensor(example["targets" if is_divided else "labels"])[None]
        with torch.no_grad():
            mine, yours = (model(**inputs_of(example), labels=labels, output_hidden_states=True) for model in models)
        a, b = (outputs.logits[0].log_softmax(-1) for outputs in (mine, yours))
        count, weight = int((labels != IGNORED).sum()), 1
        if not is_speech:
            weight = len(example["input_ids"]) + (count if is_divided else 0)
        sums["task_loss"] += mine.loss.item() * (1 if task == "ctc" else count)
        sums["logits_kl"] += F.kl_div(a, b, log_target=True, reduction="sum").item()
        errors = [relative_error(getattr(mine, name), getattr(yours, name)) for name in states]
        sums["hidden_state"] += sum(errors) / len(errors) * weight
        scored_labels, rows, units = scored_labels + count, rows + len(a), units + weight
    rel = 1e-3 if is_speech else 1e-4
    assert event["task_loss"] == pytest.approx(sums["task_loss"] / scored_labels, rel=rel)
    assert event["logits_kl"] == pytest.approx(sums["logits_kl"] / rows, rel=rel)
    assert event["hidden_state"] == pytest.approx(sums["hidden_state"] / units, rel=rel)
    assert event["recordings" if is_speech else "tokens"] == units


@pytest.mark.parametrize(
    ("task", "row", "what"),
    [
        ("token_classification", {"tokens": "some words", "ner_tags": ["O"]}, "not a list of words"),
        ("token_classification", {"tokens": ["some", "words"], "ner_tags": ["O"]}, "one class for each of the 2 words"),
        (
            "question_answering",
            {"question": "?", "context": "x", "answers": {"text": ["y"], "answer_start": [0]}},
            "not 'y'",
        ),
        ("seq2seq_lm", {"source": "text", "target": 3}, "`target` is 3"),
        ("ctc", {"audio": [0.0] * 300, "text": "a"}, "the model makes 0 frames, but 1 are needed"),
        ("ctc", {"audio": [0.0] * 1600, "text": "aabcd"}, "the model makes 4 frames, but 6 are needed"),
        ("speech_seq2seq", {"audio": [0.0] * 17600, "text": "a"}, "1.1 s long, but the model reads at most 1.0 s"),
        ("speech_seq2seq", {"audio": [0.0] * 1600, "text": None}, "`text` is None, not a text"),
    ],
)
def test_bad_rows_are_named(
    task: str, row: dict[str, Any], what: str, twin: Twin, tmp_path: Path, finetune: Any, capsys: Any
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    finetune("--task", task, "--model_name_or_path", twin(task) / "original", "--train_file", path, expect=2)
    error = capsys.readouterr().err
    assert "1 bad row(s)" in error
    assert what in error


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_attention_transfer_reaches_encoder_decoder_and_cross_attention(
    family: str, twin: Twin, finetune: Any, tmp_path: Path
) -> None:
    """Every converted layer is trained, by a loss that does not depend on the padding of either side."""
    source = twin("seq2seq_lm") / "original"
    settings: dict[str, Any] = {"drop": ["position_bias"]}
    if family == "bart":
        torch.manual_seed(0)
        source, settings = tmp_path / "bart", {"cross_attention": True}
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
        more = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "init_std": 0.3}
        ids = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        BartForConditionalGeneration(BartConfig(**sizes, **more, **ids)).save_pretrained(source)
    model = convert(str(source), mechanism="linear", feature_map="exp", **settings)
    model.save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(twin("seq2seq_lm") / "original").save_pretrained(tmp_path / "student")
    options = ["--task", "seq2seq_lm", "--model_name_or_path", tmp_path / "student", "--trainable", "mechanism"]
    options += ["--attention_transfer_weight", 1, "--train_file", twin("seq2seq_lm") / "train.jsonl"]
    options += ["--max_train_steps", 2, "--logging_steps", 1, "--learning_rate", 1e-2]
    events = [
        event
        for size in (24, 1)  # one step of all pairs, with and without padding
        for event in finetune(
            *options, "--per_device_train_batch_size", size, "--gradient_accumulation_steps", 24 // size,
            output_dir=tmp_path / f"out{size}",
        )
        if event["step"] == 1
    ]  # fmt: skip
    assert events[0]["loss"] == pytest.approx(events[1]["loss"], rel=1e-4)
    names = changed(tmp_path / "student", tmp_path / "out24")
    modules = linear_attention_modules(model)
    assert all(any(name.startswith(f"{module}.linear_attention") for name in names) for module in modules)
    assert all(".linear_attention." in name for name in names)
    assert ("decoder.layers.0.encoder_attn" in " ".join(modules)) == (family == "bart")


def test_an_answer_is_where_its_characters_are(twin: Twin) -> None:
    """Every part that holds the whole answer points at tokens that spell it; other parts point at token 0."""
    found = data_of("question_answering", twin, "--max_length", 40).train
    rows = rows_of(twin("question_answering") / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(twin("question_answering") / "original")
    assert len(found) > 2 * len(rows)
    held = 0
    for number, (row, offsets) in enumerate(zip(found.rows, found.offsets, strict=True)):
        example = found[number]
        start, end = example["labels"]
        answers, ids = rows[row]["answers"]["text"], example["input_ids"]
        assert len(ids) <= 40
        if (start, end) != (0, 0):
            held += 1
            assert answers[0] in tokenizer.decode(ids[start : end + 1])
            assert answers[0] not in tokenizer.decode(ids[start + 1 : end + 1])
            assert answers[0] not in tokenizer.decode(ids[start:end])
        elif answers:
            place = rows[row]["answers"]["answer_start"][0]
            spans = [offsets[n] for n in range(len(ids)) if example["context_mask"][n]]
            assert not (spans[0][0] <= place and place + len(answers[0]) <= spans[-1][1])
    assert held >= sum(bool(row["answers"]["text"]) for row in rows)
    inside = [found[number]["input_ids"][found[number]["context_mask"] == 1] for number in range(len(found))]
    for number in range(1, len(found)):
        if found.rows[number] == found.rows[number - 1]:  # parts share a quarter of the length
            assert inside[number - 1][-10:].tolist() == inside[number][:10].tolist()


def test_the_best_answer_of_all_parts_is_scored(twin: Twin) -> None:
    """Each part proposes a span; the best of a question wins, and nothing wins only where nothing may be answered."""
    found = data_of("question_answering", twin, "--max_length", 40).validation
    rows = rows_of(twin("question_answering") / "valid.jsonl")
    spans = []
    for number in range(len(found)):
        start, end = found[number]["labels"]
        has_answer = (start, end) != (0, 0)
        place = (start, end) if has_answer else (int(found[number]["context_mask"].argmax()),) * 2
        spans.append((number, [float(has_answer), *map(float, place), 0.5]))
    texts, references = found.texts(spans)
    assert references == [row["answers"]["text"] or [""] for row in rows]
    figures = scored(TextMatch, texts, references)
    assert figures == {"exact_match": 1.0, "f1": 1.0, "texts": 9}


def test_a_question_without_room_for_its_context_is_refused(twin: Twin, finetune: Any, capsys: Any) -> None:
    folder = twin("question_answering")
    options = ["--task", "question_answering", "--model_name_or_path", folder / "original", "--max_length", 16]
    finetune(*options, "--train_file", folder / "train.jsonl", expect=2)
    assert "with `--max_length` 16 only 11 fit" in capsys.readouterr().err


def test_a_vision_model_without_a_head_learns_the_mean_of_its_states(
    student: Callable[[str], list[Any]], twin: Twin, finetune: Any, tmp_path: Path
) -> None:
    """The preset shares its epochs among the stages; the first losses of the last stage are the formulas."""
    options = student("image_embedding")
    batch = ["--per_device_train_batch_size", 24, "--validation_file", twin("image_embedding") / "valid.jsonl"]
    events = finetune("--preset", "default", *options, *batch, "--num_train_epochs", 4)
    runs = json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"]
    assert [run["training"]["num_train_epochs"] for run in runs] == [2, 2]
    assert [run["training"]["images"] for run in runs] == [48, 48]
    first, last = (event["eval_cosine"] for event in events if "eval_cosine" in event)
    assert first < last <= 1
    found = data_of("image_embedding", twin).train
    pixels = torch.stack([found[number]["pixel_values"] for number in range(24)])
    folders = (tmp_path / "out" / "stages" / "1-transfer", options[5])
    with torch.no_grad():
        models = [AutoModel.from_pretrained(str(folder)) for folder in folders]
        mine, yours = (model(pixels, output_hidden_states=True).hidden_states[-1] for model in models)
    cosine = F.cosine_similarity(mine.mean(1), yours.mean(1), dim=-1).mean().item()
    event = next(event for event in events if "embedding" in event)
    assert event["embedding"] == pytest.approx(1 - cosine, rel=1e-3, abs=1e-6)


def test_what_is_saved_of_speech_keeps_its_dropout(
    student: Callable[[str], list[Any]], finetune: Any, tmp_path: Path
) -> None:
    finetune(*student("ctc"), "--max_train_steps", 1)
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
    found = data_of("ctc", twin).validation
    texts = []
    for number in range(len(found)):
        with torch.no_grad():
            ids = model(**inputs_of(found[number])).logits[0].argmax(-1)
        texts.append(processor.tokenizer.decode(ids))
    expected = scored(ErrorRates, texts, [row["text"] for row in rows_of(folder / "valid.jsonl")])
    assert {name: figures[f"eval_{name}"] for name in expected} == expected
    assert len(set(texts)) > 1


@pytest.mark.parametrize("task", ["seq2seq_lm", "speech_seq2seq"])
def test_generated_texts_are_compared(
    task: str, student: Callable[[str], list[Any]], twin: Twin, finetune: Any
) -> None:
    """The figures are those of `generate` of the models alone, on one input at a time."""
    options = [*student(task), "--validation_file", twin(task) / "valid.jsonl", "--max_train_steps", 1]
    figures = finetune(*options, "--predict_with_generate", "--generation_max_length", 8)[0]
    tokenizer = AutoTokenizer.from_pretrained(str(options[3]))
    models = [auto_class_of(task).from_pretrained(str(options[place])).eval() for place in (3, 5)]
    found, texts = data_of(task, twin).validation, ([], [])
    for number in range(len(found)):
        for model, own in zip(models, texts, strict=True):
            ids = model.generate(**inputs_of(found[number]), max_new_tokens=8)[0]
            own.append(tokenizer.decode(ids, skip_special_tokens=True))
    mine, yours = texts
    rows = rows_of(twin(task) / "valid.jsonl")
    if task == "speech_seq2seq":
        expected = scored(ErrorRates, mine, [row["text"] for row in rows])
    else:
        expected = scored(TextMatch, mine, [[row["target"]] for row in rows], ignores_case=False)
    assert {name: figures[f"eval_{name}"] for name in expected} == expected
    assert figures["eval_same_text"] == sum(a == b for a, b in zip(mine, yours, strict=True)) / len(mine)


def test_targets_do_not_repeat_the_token_that_a_decoder_starts_with(twin: Twin) -> None:
    found = data_of("speech_seq2seq", twin).train
    tokenizer = AutoProcessor.from_pretrained(twin("speech_seq2seq") / "original").tokenizer
    for number in (0, 1):
        written = tokenizer.convert_ids_to_tokens(found[number]["targets"].tolist())
        assert written == ["<|notimestamps|>", *found.references[number], "<|endoftext|>"]
        assert found[number]["frames"] == 50


def test_columns_of_speech_are_named(twin: Twin, tmp_path: Path, finetune: Any, capsys: Any) -> None:
    model = ["--task", "ctc", "--model_name_or_path", twin("ctc") / "original", "--train_file"]
    for row, option in (({"path": "a.wav", "text": "a"}, "audio"), ({"audio": "a.wav", "said": "a"}, "text")):
        (tmp_path / "bad.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        finetune(*model, tmp_path / "bad.jsonl", expect=2)
        assert f"`--{option}_column_name {option}` is not a column" in capsys.readouterr().err


def test_without_a_task_loss_no_text_is_needed(student: Callable[[str], list[Any]], twin: Twin, finetune: Any) -> None:
    rows, path = rows_of(twin("ctc") / "train.jsonl"), twin("ctc") / "silent.jsonl"
    write_lines(path, ({"audio": row["audio"]} for row in rows[:4]))
    events = finetune(*student("ctc"), "--train_file", path, "--max_train_steps", 1)
    assert any("logits_kl" in event for event in events)


def test_weights_where_layers_see_fewer_positions_than_frames() -> None:
    batch = {"frame_mask": torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]]), "index": torch.arange(2)}
    for length in (7, 4, 3):
        weights = token_weights(batch, length)
        assert weights.shape == (2, length)
        assert torch.allclose(weights.sum(-1), torch.ones(2))
    assert (token_weights(batch, 3)[1] > 0).tolist() == [True, True, False]


RECIPES = sorted((Path(__file__).resolve().parents[2] / "training" / "configs").glob("*.yaml"))


@pytest.fixture
def originals(request: pytest.FixtureRequest, files: Path) -> Callable[[str], tuple[str, Path, str]]:
    """An original for a task, and the folder and suffix of its data files."""

    def original(task: str) -> tuple[str, Path, str]:
        if task == "image_classification":
            return request.getfixturevalue("vision_teacher"), request.getfixturevalue("pictures"), "jsonl"
        if task in TWINS:
            folder = request.getfixturevalue("twin")(task)
            return str(folder / "original"), folder, "jsonl"
        if task == "sequence_classification":
            return request.getfixturevalue("named_classifier"), files, "tsv"
        names = {"causal_lm": "llama_teacher", "masked_lm": "masked_teacher", "embedding": "bert_teacher"}
        return request.getfixturevalue(names[task]), files, "jsonl"

    return original


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_on_two_processes(
    recipe: Path, originals: Callable[[str], tuple[str, Path, str]], converted: Any, tmp_path: Path, dataset_cache: Path
) -> None:
    task = yaml.safe_load(recipe.read_text(encoding="utf-8"))["task"]
    original, files, suffix = originals(task)
    settings = {"drop": ["position_bias"]} if task == "seq2seq_lm" else {}
    student, out = converted(original, mechanism="linear", feature_map="exp", **settings), tmp_path / "out"
    options: list[Any] = ["--config", recipe, "--model_name_or_path", student, "--teacher_name_or_path", original]
    options += ["--train_file", files / f"train.{suffix}", "--validation_file", files / f"valid.{suffix}"]
    options += ["--output_dir", out, "--max_train_steps", 2, "--logging_steps", 1]
    options += ["--per_device_train_batch_size", 4, *(["--max_length", 64] if TASKS[task].inputs == "text" else [])]
    log = tmp_path / "stderr"
    run = processes.start(processes.finetune, dataset_cache, options, ranks=2, stderr=log)
    assert processes.finish(run) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    events = read_metrics(out / "metrics.jsonl")
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert [event["step"] for event in events if any(name.startswith("eval_") for name in event)] == [0, 2]
    assert {".linear_attention." in name for name in changed(student, out)} == {True, False}
