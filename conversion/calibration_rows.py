"""Rows of the task of a model as real inputs: pairs, words, questions, conversations, images, read as in training."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
import torch.nn.functional as F

from hf_linear_attention._common.errors import TrainingError, UsageError
from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.conversion.data_recipes import data_recipe
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.file_checks import SUFFIXES, column_instead, file_problems, wanted_columns
from hf_linear_attention.training.data.packing import IGNORED, Examples, shorten
from hf_linear_attention.training.data.processors import Processor, load_processor, pad_token_id
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.recipe_parser import fill_defaults


BATCH_SIZE = 8
TEXT_COLUMN = "text"
# What base models read, as far as the forward of one accepts it.
INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "decoder_attention_mask", "pixel_values", "input_values",
    "input_features",
)  # fmt: skip


def reads_rows(source: Source, plan: Plan, path: str) -> bool:
    """Whether `path` is read as rows of the model's task, and not as plain text or as a folder of images.

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


class TaskRows:
    """A file of rows of the model's task."""

    def __init__(self, source: Source, plan: Plan, path: str, trust_remote_code: bool) -> None:
        self.source, self.plan, self.path, self.name = source, plan, path, Path(path).name
        self.trust_remote_code = trust_remote_code

    def batches(self, max_tokens: int) -> list[Batch]:
        """Padded batches of the first rows, up to `max_tokens` tokens, images or recordings in all."""
        from hf_linear_attention.training.data.splits import load_data  # imports `datasets`

        recipe = _recipe(self.source, str(self.plan.head.task), self.path, self.trust_remote_code)
        processor = load_processor(recipe)
        try:
            examples: Examples = load_data(recipe, processor).train  # type: ignore[assignment]  # not streamed
        except TrainingError as error:
            raise UsageError(f"`--calibration_file` = {self.path!r}: {error}") from error
        examples = shorten(examples, None, max_tokens)
        plan = EvaluationBatches(len(examples), BATCH_SIZE, 0, 1)
        batches = loader(Stream(examples, 0, shuffle=False), plan, pad_token_id(processor))
        return [self._inputs(batch, processor) for batch in batches]

    def _inputs(self, batch: Batch, processor: Processor) -> Batch:
        accepted = inspect.signature(self.plan.stock_class.forward).parameters
        inputs = {name: batch[name] for name in INPUTS if name in batch and name in accepted}
        if "decoder_attention_mask" not in batch:
            return inputs
        config = self.plan.config
        names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
        shifted = F.pad(batch["labels"][:, :-1], (1, 0), value=special_token(config, *names))
        padding = pad_token_id(processor)
        return {**inputs, "decoder_input_ids": torch.where(shifted == IGNORED, padding, shifted)}
