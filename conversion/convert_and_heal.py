"""`convert_and_heal`: a conversion and all stages of a preset in one call from Python."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention._common.model_card import HISTORY, PLOT, REPORT
from hf_linear_attention.conversion.pipeline import prepare
from hf_linear_attention.conversion.recipe_file import RECIPE
from hf_linear_attention.conversion.request import parse
from hf_linear_attention.training.presets.preset import preset_names


BESIDE_THE_WEIGHTS = ("README.md", REPORT, HISTORY, PLOT, RECIPE)


def convert_and_heal(
    model: PreTrainedModel | str | os.PathLike,
    recipe: str | os.PathLike | Mapping[str, Any] = "default",
    train_data: Sequence[str] | str | os.PathLike | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output_dir: str | os.PathLike | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A linear copy of a pretrained model, trained to imitate it: `hf-linear-attention convert --preset` from Python.

        model = convert_and_heal("SRC", "default", ["A text.", "Another text."], tokens="200k")
        model.save_pretrained("OUT")

    Args:
        model: a folder or hub name; or a loaded model, which does not change, with its `tokenizer`.
        recipe: the name of a preset, a recipe.yaml that a conversion left, or a dict of the options of `convert`.
        train_data: texts, or a file as `--train_file` takes it; may be left out if the recipe names a file.
        output_dir: a folder to write too, in which a run that was killed is resumed; otherwise nothing is left.
        **options: further options of `hf-linear-attention convert`, such as `tokens`, `seed` or `window_size`.

    Returns:
        The trained model in evaluation mode. Its `save_pretrained` writes report, card and recipe too.

    Raises:
        UsageError: for options that do not fit each other or the model.
        ConversionError, TrainingError: if a step failed.
    """
    with tempfile.TemporaryDirectory(prefix="hf-linear-attention-") as folder, quiet_transformers():
        scratch = Path(folder)
        given: dict[str, Any] = {"model_name_or_path": _source(model, tokenizer, scratch / "source")}
        given["output_dir"] = scratch / "result" if output_dir is None else output_dir
        if train_data is not None:
            given["train_file"] = _file(train_data, scratch / "train.jsonl")
        words = [f"--{name}={value}" for name, value in {**given, **options}.items() if value is not None]
        conversion = prepare(parse([*_words_of(recipe), *words]))
        if conversion.training is None or conversion.output_dir is None:
            raise UsageError("`recipe` names no preset, so nothing would be trained; use `convert`, or name a preset")
        from hf_linear_attention.conversion.preset_run import run_training  # needs the extra `train`

        run_training(conversion, conversion.training)
        return _load(conversion.plan.linear_class, conversion.output_dir)


def _words_of(recipe: str | os.PathLike | Mapping[str, Any]) -> list[str]:
    if isinstance(recipe, Mapping):
        return [f"--{name}={value}" for name, value in recipe.items() if value is not None]
    if str(recipe) in preset_names():
        return [f"--preset={recipe}"]
    if Path(recipe).is_file():
        return [f"--config={os.fspath(recipe)}"]
    raise UsageError(f"`recipe` = {str(recipe)!r} is neither a file nor a preset; presets: {', '.join(preset_names())}")


def _source(model: Any, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> str:
    """The name of the source; a loaded model is written to `folder` first."""
    if not isinstance(model, PreTrainedModel):
        return os.fspath(model)
    if tokenizer is None:
        raise UsageError("a loaded model has no tokenizer; pass it as `tokenizer`, or the folder or name of the model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _file(train_data: Sequence[str] | str | os.PathLike, path: Path) -> str:
    """The file with the training data; texts are written to `path`.

    Raises:
        UsageError: for anything but texts.
    """
    if isinstance(train_data, (str, os.PathLike)):
        return os.fspath(train_data)
    texts = list(train_data)
    if not texts or not all(isinstance(text, str) for text in texts):
        kinds = ", ".join(sorted({type(text).__name__ for text in texts})) or "nothing"
        raise UsageError(f"`train_data` holds {kinds}; pass a list of texts, or the name of a file")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def _load(linear_class: Any, folder: Path) -> PreTrainedModel:
    """The model, which keeps what stands beside its weights for its own `save_pretrained`."""
    model = linear_class.from_pretrained(folder, dtype="auto").eval()
    model.conversion_files = {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in (".md", ".png")
        or path.name in ("conversion_report.json", "training_report.json", "recipe.yaml")
    }
    return model
