"""A recipe: all options (`arguments.py`) of one run of `training/finetune.py`, parsed and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_linear_attention.configuration_linear_attention import parse_layers
from hf_linear_attention.training.arguments import (
    FACTS,
    DataArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
)
from hf_linear_attention.training.data.sentence_files import Pooling, SentenceFiles, sentence_files
from hf_linear_attention.training.objective_arguments import ObjectiveArguments
from hf_linear_attention.training.task_arguments import TaskArguments
from hf_linear_attention.training.tasks import TASKS, Task, unit_of


def parse_layer_numbers(text: str) -> list[int]:
    """The layer numbers in a text such as `0,2,4-7`.

    Raises:
        ValueError: if `text` does not consist of numbers and ranges of layers.
    """
    layers = parse_layers(text)
    if isinstance(layers, str):
        raise ValueError(f"`{text}` is not a list of layer numbers; give numbers and ranges, such as 0,2,4-7")
    return layers


def parse_rates(text: str | None) -> tuple[float, ...]:
    """The probabilities in a text such as `0.9,0.75,0.5`; none for None.

    Raises:
        ValueError: if a part of `text` is not a number from 0 to 1.
    """
    rates = tuple(float(part) for part in text.split(",")) if text is not None else ()
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"`{text}` has a number that is not between 0 and 1; give probabilities, such as 0.9,0.75,0.5")
    return rates


def parse_dims(text: str | None) -> tuple[int, ...]:
    """The numbers of dimensions in a text such as `256,128,64`; none for None.

    Raises:
        ValueError: if a part of `text` is not a whole number above 0.
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"`--matryoshka_dims {text}`: give numbers of dimensions, such as 256,128,64")
    return tuple(int(part) for part in parts)


@dataclass
class Recipe:
    """The options of one run, by group.

    `given` names the options that the user set, in the YAML file or on the command line.
    """

    model: ModelArguments
    data: DataArguments
    objective: ObjectiveArguments
    optimization: OptimizationArguments
    run: RunArguments
    task_options: TaskArguments = field(default_factory=TaskArguments)
    given: frozenset[str] = frozenset()

    @property
    def has_training(self) -> bool:
        """Whether there is training data; without it, the model is only evaluated."""
        return self.data.train_file is not None or self.data.dataset_name is not None

    @property
    def task(self) -> Task:
        """What distinguishes the task."""
        return TASKS[self.model.task]

    @property
    def unit(self) -> str:
        """The unit in which the amount of training is counted, such as "tokens"."""
        return unit_of(self.model.task)

    @property
    def sentence_files(self) -> SentenceFiles:
        """What the files of sentence-transformers beside the model say, for embeddings of texts."""
        if self.model.task != "embedding":
            return SentenceFiles(self.model.model_name_or_path)
        return sentence_files(self.model.model_name_or_path)

    @property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding."""
        return self.sentence_files.pooling

    @property
    def text_prompt(self) -> str:
        """What stands before every text of an embedding model that is neither a query nor a document."""
        return self.sentence_files.text_prompt(self.task_options)

    @property
    def output_dir(self) -> Path:
        """The folder that receives the model, as a path."""
        return Path(self.run.output_dir)

    def summary(self) -> dict[str, Any]:
        """The options that are needed to repeat the run, for the model card: those given, and important defaults."""
        always = {"seed", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"}
        names = (self.given | always) - set(RunArguments.__dataclass_fields__) - {"trust_remote_code"} | {"seed"}
        values = self.flat()
        weights = {name for name, value in values.items() if name.endswith("_weight") and value}
        return {name: value for name, value in values.items() if name in names | weights}

    def flat(self) -> dict[str, Any]:
        """All options in one dictionary, without their groups."""
        groups = (self.model, self.data, self.objective, self.optimization, self.run, self.task_options)
        return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}

    def facts(self) -> dict[str, Any]:
        """All options for a checkpoint, with absolute paths, so that a run can resume in another working directory."""
        values = self.flat()
        paths = {name: values[name] for name, fact in FACTS.items() if fact.is_path and values[name]}
        return values | {name: str(Path(path).resolve()) for name, path in paths.items() if Path(path).exists()}
