"""Real inputs for the source model: the file of `--calibration_file`, or the built-in sentences.

Rows of the model's task (pairs, words, questions, conversations, images) are read as in training. Other data are
read as the model is used: by a decoder as a stream in full blocks, by an encoder one text per input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import TrainingError, UsageError
from hf_linear_attention._common.reading import short
from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.configuration_linear_attention import is_causal_config, max_length_of
from hf_linear_attention.conversion.output_folder import load_source_tokenizer
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.conversion.verification import built_in_text, documentation
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.file_checks import (
    SUFFIXES,
    column_instead,
    file_problems,
    wanted_columns,
)
from hf_linear_attention.training.data.packing import IGNORED, Examples, Part, shorten
from hf_linear_attention.training.data.processors import (
    CHOOSING_LENGTH,
    chooses_keys,
    default_length,
    load_processor,
    pad_token_id,
)
from hf_linear_attention.training.recipe import (
    DataArguments,
    ModelArguments,
    ObjectiveArguments,
    OptimizationArguments,
    Recipe,
    RunArguments,
)
from hf_linear_attention.training.recipe_parser import fill_defaults
from hf_linear_attention.training.tasks import INSTALL, is_installed


if TYPE_CHECKING:
    from datasets import Dataset  # most conversions do without this library


BATCH_TOKENS = 4096
FEWEST_ROWS = 4
DOCUMENTATION = "Python's documentation"
TEXT_COLUMN = "text"
PAIR_COLUMNS: dict[str, Any] = {
    "text_column_name": "sentence1",
    "text_pair_column_name": "sentence2",
    "label_column_name": "score",
}
# What base models read, as far as the forward of one accepts it.
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "decoder_attention_mask", "pixel_values")


@dataclass(frozen=True)
class RealInputs:
    """Inputs for the base model.

    Args:
        name: their name in the report.
        batches: a function that returns padded batches of the first inputs, up to a number of tokens or patches in all.
    """

    name: str
    batches: Callable[[int], list[Batch]]


def real_inputs(source: Source, plan: Plan, path: str | None, trust_remote_code: bool = False) -> RealInputs | None:
    """The inputs that fit the model; None if `path` is None and there are no built-in inputs for the model.

    Raises:
        UsageError: if the file does not exist, or is of a kind that this model cannot read.
    """
    kind = plan.stock_class.main_input_name
    if path is not None and not Path(path).exists():
        raise UsageError(f"`--calibration_file` = {path!r}: there is no such file")
    if path is not None and reads_rows(source, plan, path):
        return RealInputs(Path(path).name, partial(_task_rows, source, plan, path, trust_remote_code))
    if kind == "input_ids":
        return _text_inputs(source, plan, path, trust_remote_code)
    if path is not None:
        raise UsageError(
            f"`--calibration_file` = {path!r} has no rows that {source.name} reads; a model of images needs a column "
            "`image` (.jsonl, .csv, .tsv or .parquet)"
        )
    return None


def _text_inputs(source: Source, plan: Plan, path: str | None, trust_remote_code: bool) -> RealInputs | None:
    config, tokenizer = plan.config, load_source_tokenizer(source, trust_remote_code)
    ids = built_in_text(config, tokenizer)
    if path is None:
        if ids is None:
            return None
        if keeps_exact_keys(plan):
            return RealInputs(DOCUMENTATION, partial(_documentation_rows, config, tokenizer))
        found = [_complete(config, {"input_ids": one}) for one in ids]
        return RealInputs("built-in sentences", lambda _: found)  # few, whatever their number of tokens
    check_text_file("calibration_file", path)
    if tokenizer is None or ids is None:
        raise UsageError(f"`--calibration_file`: {source.name} has no tokenizer of its own to read the file with")
    return RealInputs(Path(path).name, partial(_text_batches, config, tokenizer, path))


def keeps_exact_keys(plan: Plan) -> bool:
    """Whether heads of a layer choose exact keys by scores, which are fitted to long texts."""
    return chooses_keys(plan.settings)


def _documentation_rows(config: PreTrainedConfig, tokenizer: Any, max_tokens: int) -> list[Batch]:
    """Rows of the second half of Python's documentation; the verification reads the first."""
    text, length = documentation(), _row_length(config, max_tokens)
    part = text[len(text) // 2 :][: 8 * max_tokens]
    ids = tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids[0, :max_tokens]
    rows = ids[: len(ids) // length * length].view(-1, length) if len(ids) >= length else ids[None]
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]


def check_text_file(option: str, path: str, columns: Sequence[str] = ("text",), instead: str | None = None) -> None:
    """Check that `path`, which `--option` names, is a text file of a type that training can read.

    A file of rows must have these columns, or else the column `instead`.

    Raises:
        UsageError: if it is not.
    """
    if not Path(path).is_file() or Path(path).suffix not in SUFFIXES:
        raise UsageError(f"`--{option}` = {path!r}: give a file named *" + ", *".join(SUFFIXES))
    if problems := file_problems(path, dict.fromkeys(columns), instead):
        raise UsageError(*(f"`--{option}`: {problem}" for problem in problems))


def check_pairs_file(path: str) -> None:
    """Check that `path` is a file of scored pairs.

    Raises:
        UsageError: if it is not.
    """
    from hf_linear_attention.training.data.rows import (
        load_rows,  # imports `datasets`, which most conversions do without
    )

    check_text_file("pairs_file", path, tuple(PAIR_COLUMNS.values()))
    if not is_installed("scipy"):
        raise UsageError(f"`--pairs_file` needs scipy; {INSTALL}")
    try:
        load_rows(DataArguments(validation_file=path, **PAIR_COLUMNS), "validation")
    except TrainingError as error:
        raise UsageError(f"`--pairs_file`: {error}") from error


def _text_batches(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, path: str, max_tokens: int
) -> list[Batch]:
    """A text file, read and divided as `training/finetune.py` does with a `--train_file`."""
    from hf_linear_attention.training.data.rows import load_rows  # these import `datasets`
    from hf_linear_attention.training.data.texts import build_examples, check_texts

    name = f"`--calibration_file` = {path!r}"
    is_causal = is_causal_config(config, config.stock_model_type)
    recipe = data_recipe("", "causal_lm" if is_causal else "embedding", train_file=path)
    rows = load_rows(recipe.data, "train")
    if rows is None or not texts_of(rows, name):
        raise UsageError(f"{name} contains no text; give another file")
    # Every row has at least one token, so no more rows are needed than tokens.
    rows = rows.select(range(min(len(rows), max_tokens)))
    try:
        length = _row_length(config, max_tokens, int(getattr(tokenizer, "model_max_length", max_tokens)))
        part = Part(recipe, rows, "train", tokenizer, length)
        check_texts(part)
        examples = shorten(build_examples(part), max_tokens)
    except TrainingError as error:
        raise UsageError(f"{name}: {error}") from error
    names = ("input_ids", "attention_mask")
    padded = _padded(examples, pad_token_id(tokenizer))
    return [_complete(config, {name: batch[name] for name in names}) for batch in padded]


def _row_length(config: PreTrainedConfig, tokens: int, most: int | None = None) -> int:
    """That of training, or more where exact keys are chosen and the model reads more; at most `most`."""
    length = default_length(config)
    if chooses_keys(config.linear_attention):
        length = max(length, min(CHOOSING_LENGTH, tokens // FEWEST_ROWS, max_length_of(config) or CHOOSING_LENGTH))
    return length if most is None else min(length, most)


def _padded(examples: Examples, padding: int) -> list[Batch]:
    size = max(1, BATCH_TOKENS // max(examples.lengths, default=1))
    plan = EvaluationBatches(len(examples), size, 0, 1)
    return list(loader(Stream(examples, 0, shuffle=False), plan, padding))


def _complete(config: PreTrainedConfig, batch: Batch) -> Batch:
    """The batch, with the same text for the decoder if the model is an encoder-decoder."""
    return {**batch, **{f"decoder_{name}": x for name, x in batch.items()}} if config.is_encoder_decoder else batch


def texts_of(rows: Dataset, name: str) -> list[str]:
    """The texts of a file that are not empty.

    Args:
        rows: its rows.
        name: the option and its value, for the message.

    Raises:
        UsageError: without a column `text`, or if it holds something else.
    """
    if "text" not in rows.column_names:
        raise UsageError(f"{name} has no column `text`; rename the column of its texts")
    texts = [text for text in rows["text"] if text is not None]
    if (wrong := next((text for text in texts if not isinstance(text, str)), None)) is not None:
        raise UsageError(f"{name}: `text` is {short(wrong)}, not a text; correct it, or give another file")
    return [text for text in texts if text.strip()]


# ---- Rows of the model's task


def reads_rows(source: Source, plan: Plan, path: str) -> bool:
    """Whether `path` is read as rows of the model's task, and not as plain text.

    Raises:
        UsageError: if it is a file of rows without the columns of that task.
    """
    task = plan.head.task
    if task is None or not Path(path).is_file() or Path(path).suffix not in SUFFIXES[1:]:
        return False
    recipe = _recipe(source, task, path, False)
    wanted, instead = wanted_columns(recipe, "train"), column_instead(recipe)
    if recipe.task.inputs == "text":
        has_messages = instead is not None and not file_problems(path, {instead: None})
        if not file_problems(path, {TEXT_COLUMN: None}) or (TEXT_COLUMN in wanted and not has_messages):
            return False  # what such a file lacks is said where texts are read
    if problems := file_problems(path, wanted, instead=instead):
        raise UsageError(*(f"`--calibration_file`: {problem}" for problem in problems))
    return True


def _recipe(source: Source, task: str, path: str, trust_remote_code: bool) -> Recipe:
    recipe = data_recipe(source.loadable, task, source.loadable, trust_remote_code, train_file=path)
    fill_defaults(recipe)  # with a teacher, no labels are needed
    return recipe


def _task_rows(source: Source, plan: Plan, path: str, trust_remote_code: bool, max_tokens: int) -> list[Batch]:
    """The first rows of a file of rows of the model's task."""
    from hf_linear_attention.training.data.splits import load_data  # imports `datasets`

    recipe = _recipe(source, str(plan.head.task), path, trust_remote_code)
    processor = load_processor(recipe)
    try:
        examples: Examples = load_data(recipe, processor).train  # type: ignore[assignment]  # there is a file
    except TrainingError as error:
        raise UsageError(f"`--calibration_file` = {path!r}: {error}") from error
    accepted, padding = inspect.signature(plan.stock_class.forward).parameters, pad_token_id(processor)
    found = []
    for batch in _padded(shorten(examples, max_tokens), padding):
        inputs = {name: batch[name] for name in INPUTS if name in batch and name in accepted}
        if "decoder_attention_mask" in batch:
            start = special_token(plan.config, "decoder_start_token_id", "bos_token_id", "pad_token_id")
            shifted = F.pad(batch["labels"][:, :-1], (1, 0), value=start)
            inputs["decoder_input_ids"] = torch.where(shifted == IGNORED, padding, shifted)
        found.append(inputs)
    return found


def data_recipe(
    model: str, task: str, teacher: str | None = None, trust_remote_code: bool = False, **data: Any
) -> Recipe:
    """A recipe of `training` for this model, which is not trained.

    Args:
        **data: options of `DataArguments`.
    """
    import datasets  # most conversions do without this library

    datasets.disable_progress_bars()
    return Recipe(
        ModelArguments(model, task, teacher, trust_remote_code=trust_remote_code),  # type: ignore[arg-type]
        DataArguments(**data),
        ObjectiveArguments(),
        OptimizationArguments(),
        RunArguments(""),
        given=frozenset(data),
    )
