"""Image classifiers: what files become, what is learned from a softmax original, and what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_linear_attention.training.data.packing import Examples
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.recipe_parser import parse_options


TASK = ["--task", "image_classification"]


def inputs_of(split: str, pictures: Path, processor: Any) -> dict[str, torch.Tensor]:
    """A split as one batch, made without this project."""
    rows = [json.loads(line) for line in (pictures / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    images = [Image.open(pictures / row["image"]).convert("RGB") for row in rows]
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels, "labels": torch.tensor([row["label"] == "dark" for row in rows]).long()}


def test_distillation_from_the_softmax_original(finetune, converted, vision_teacher, pictures, tmp_path):
    """What is saved stands alone."""
    data = ["--train_file", pictures / "train.jsonl", "--validation_file", pictures / "valid.jsonl"]
    objective = ["--logits_kl_weight", 2, "--hidden_state_weight", 1]
    steps = ["--max_train_steps", 8, "--logging_steps", 1, "--learning_rate", "3e-3", "--checkpointing_steps", 8]
    split = ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 3, "--per_device_eval_batch_size", 3]
    student = converted(vision_teacher, mechanism="linear", feature_map="exp")
    models = ["--model_name_or_path", student, "--teacher_name_or_path", vision_teacher]
    events = finetune(*models, *TASK, *data, *objective, *steps, *split)
    losses = [event["loss"] for event in events if "loss" in event]
    assert losses[-1] < 0.8 * losses[0]

    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert next(event["images"] for event in events if "loss" in event) == 12
    valid = inputs_of("valid", pictures, processor)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out", trust_remote_code=True)
    guess = loaded(pixel_values=valid["pixel_values"]).logits.detach().argmax(-1)
    assert events[-1]["eval_accuracy"] == (guess == valid["labels"]).double().mean().item()
    assert (events[-1]["eval_samples"], events[-1]["images"]) == (7, 96)
    assert loaded.config.id2label == {0: "bright", 1: "dark"}
    assert (tmp_path / "out" / "checkpoint-8" / "preprocessor_config.json").is_file()
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: image-classification" in card
    assert "AutoImageProcessor" in card


def examples_of(folder: str, *words: Any) -> Examples:
    recipe = parse_options([*map(str, ("--model_name_or_path", folder, *TASK, *words)), "--output_dir=o"])
    found = load_data(recipe, AutoImageProcessor.from_pretrained(folder)).train
    assert found is not None
    return found


def test_a_folder_of_classes_a_parquet_and_a_list_of_paths_are_the_same(vision_teacher, pictures, tmp_path):
    paths = examples_of(vision_teacher, "--train_file", pictures / "train.jsonl")
    folder = examples_of(vision_teacher, "--dataset_name", pictures / "train")
    rows = datasets.load_dataset(str(pictures / "train"), split="train").rename_column("image", "picture")
    rows.to_parquet(tmp_path / "rows.parquet")
    column = ["--image_column_name", "picture"]
    parquet = examples_of(vision_teacher, "--train_file", tmp_path / "rows.parquet", *column)
    for other in (folder, parquet):  # both by class, then by name
        order = sorted(range(12), key=lambda number: (number % 2, str(number)))
        assert len(other) == len(paths) == 12
        for mine, yours in enumerate(order):
            assert other[mine]["labels"] == paths[yours]["labels"] == yours % 2
            assert torch.equal(other[mine]["pixel_values"], paths[yours]["pixel_values"])


def test_rows_without_image_or_class(vision_teacher, pictures, tmp_path, finetune, capsys):
    lines = (pictures / "train.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.copytree(pictures / "train", tmp_path / "train")
    (tmp_path / "train" / "dark" / "1.png").write_text("not an image", encoding="utf-8")
    lines[2] = json.dumps({"image": "train/nowhere.png", "label": "dark"})
    lines[3] = json.dumps({"image": None, "label": "dark"})
    lines[4] = json.dumps({**json.loads(lines[4]), "label": None})
    (tmp_path / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--model_name_or_path", vision_teacher, *TASK, "--train_file", tmp_path / "some.jsonl"]
    finetune(*options, "--max_train_steps", 1, expect=2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "4 bad row(s)" in error
    for line, what in ((2, "cannot identify"), (3, "No such file"), (4, "`image` cannot be opened"), (5, "`label` is")):
        assert f"line {line}: " in error
        assert what in error
