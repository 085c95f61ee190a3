"""`convert_and_heal`: a conversion and all stages of a preset in one call from Python."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import TerminatedError, UsageError
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention._common.model_card import HISTORY, PLOT, REPORT, is_hub_name
from hf_linear_attention.conversion.arguments import RECIPE, request_of
from hf_linear_attention.conversion.output_folder import with_texts
from hf_linear_attention.conversion.pipeline import Conversion, prepare, writing
from hf_linear_attention.conversion.preset_plan import Training
from hf_linear_attention.training.presets import preset_names


BESIDE_THE_WEIGHTS = ("README.md", REPORT, HISTORY, PLOT, RECIPE)
logger = logging.getLogger(__name__)
UNNAMED, TEXTS = "a model in memory", "texts in memory"


def convert_and_heal(
    model: PreTrainedModel | str | os.PathLike,
    recipe: str | Mapping[str, Any] = "default",
    train_data: Sequence[str] | str | os.PathLike | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output_dir: str | os.PathLike | None = None,
    **options: Any,
) -> PreTrainedModel:
    """A linear copy of a pretrained model, trained to imitate it: `hf-linear-attention convert --preset` from Python.

        model = convert_and_heal("SRC", "default", "texts.txt", tokens="200k")
        model.save_pretrained("OUT")

    Args:
        model: a folder or hub name; or a loaded model, which does not change, with its `tokenizer`.
        recipe: the name of a preset, or a dict of the options of `convert`.
        train_data: a file as `--train_file` takes it, or texts; may be left out if the recipe names a file.
        output_dir: a folder to write too; the same call resumes a run that was killed, if model and data are named and
            not in memory. Otherwise nothing is left.
        **options: further options of `hf-linear-attention convert`, such as `tokens`, `seed` or `window_size`.

    Returns:
        The trained model in evaluation mode. Its `save_pretrained` writes report, card and recipe too.

    Raises:
        UsageError: for options that do not fit each other or the model.
        ConversionError, TrainingError: if a step failed.
        TerminatedError: after SIGTERM; it is a `SystemExit`, which no `except Exception` stops.
    """
    with tempfile.TemporaryDirectory(prefix="hf-linear-attention-") as folder, quiet_transformers():
        # What was given in memory is written there, under names that reports and cards can show.
        scratch, name = Path(folder), _name_of(model)
        title = model.config.model_type if name is None and isinstance(model, PreTrainedModel) else Path(str(name)).name
        source = _source(model, tokenizer, scratch / "model" / (Path(name).name if name else UNNAMED))
        given: dict[str, Any] = {"model_name_or_path": source, "output_dir": output_dir}
        if output_dir is None:
            given["output_dir"] = scratch / "result" / f"{title}-linear"
        if train_data is not None:
            given["train_file"] = _file(train_data, scratch / f"{TEXTS}.jsonl")
        conversion = prepare(request_of({**_options_of(recipe), **given, **options}))
        if source != name and name is not None and is_hub_name(name):
            conversion = replace(conversion, base_model=name)
        training, result = _training_of(conversion)
        from hf_linear_attention.conversion.preset_run import run_training  # needs the extra `train`

        is_named = source == name and given.get("train_file") == str(train_data)
        again = "the same call resumes the run ({work})" if output_dir is not None and is_named else None
        try:
            with writing(conversion):
                run_training(conversion, training, again)
        except TerminatedError as error:
            logger.warning("terminated; %s", error)
            raise
        _forget(result, scratch, {source: name or UNNAMED, given.get("train_file"): TEXTS})
        is_stock = conversion.plan.stock_form is not None
        return _load(AutoModelForCausalLM if is_stock else conversion.plan.linear_class, result)


def _training_of(conversion: Conversion) -> tuple[Training, Path]:
    """The preset, and the folder of its result.

    Raises:
        UsageError: without a preset, or for options that only the command has.
    """
    if conversion.training is None or conversion.output_dir is None:
        raise UsageError("`recipe` names no preset, so nothing would be trained; use `convert`, or name a preset")
    if conversion.request.arguments.dry_run or conversion.request.arguments.push_to_hub is not None:
        raise UsageError(
            "`dry_run` and `push_to_hub` are options of the command; leave them out, and call `model.push_to_hub` "
            "of the result"
        )
    return conversion.training, conversion.output_dir


def _options_of(recipe: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(recipe, Mapping):
        return recipe
    if recipe not in preset_names():
        raise UsageError(f"`recipe` = {recipe!r} is no preset; presets: {', '.join(preset_names())}")
    return {"preset": recipe}


def _name_of(model: Any) -> str | None:
    """The folder or hub name that was given, or from which a loaded model comes; None if nothing there has it now."""
    if not isinstance(model, PreTrainedModel):
        return os.fspath(model)
    name = str(model.name_or_path)
    return name if os.path.isdir(name) or is_hub_name(name) else None


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


def _forget(folder: Path, scratch: Path, names: Mapping[str | None, str]) -> None:
    """Replace the paths below `scratch`, which is removed, by the `names` of what was there.

    A recipe cannot name what was in memory: it gets a comment that says what to give.
    """

    def known(text: str) -> str:
        return names.get(text, Path(text).name) if text.startswith(str(scratch)) else text

    for name in (REPORT, HISTORY, RECIPE):
        path = folder / name
        path.write_text(with_texts(name, path.read_text(encoding="utf-8"), known), encoding="utf-8")
    text = (folder / RECIPE).read_text(encoding="utf-8")
    for name in [name for name, value in yaml.safe_load(text).items() if value in (UNNAMED, TEXTS)]:
        text = re.sub(rf"(?m)^{name}: .*$", f"# The {name} was in memory, and is to be given again.", text)
    (folder / RECIPE).write_text(text, encoding="utf-8")


def _load(linear_class: Any, folder: Path) -> PreTrainedModel:
    """The model, which keeps what stands beside its weights for its own `save_pretrained`."""
    model = linear_class.from_pretrained(folder, dtype="auto").eval()
    files = (folder / name for name in BESIDE_THE_WEIGHTS)
    model.conversion_files = {path.name: path.read_bytes() for path in files if path.is_file()}
    return model
