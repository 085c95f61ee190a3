"""A recipe: one run of `training/finetune.py`, with all its options (`arguments.py`), parsed and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linear_attention.configuration_linear_attention import parse_layers
from hf_linear_attention.training.arguments import (
    CLASSIFICATION,
    FACTS,
    DataArguments,
    ModelArguments,
    ObjectiveArguments,
    OptimizationArguments,
    RunArguments,
)


# Figures that can choose the best model, by task; the first is the default.
SELECTING = {
    "causal_lm": ("nats_per_token", "perplexity"),
    "masked_lm": ("nats_per_token", "perplexity"),
    "sequence_classification": ("accuracy", "f1"),
    "embedding": ("cosine", "cosine_min", "spearman"),
    "image_classification": ("accuracy", "f1"),
}


def parse_layer_numbers(text: str) -> list[int]:
    """`0,2,4-7` as numbers.

    Raises:
        ValueError: if they are none.
    """
    layers = parse_layers(text)
    if isinstance(layers, str):
        raise ValueError(f"{text} are no numbers of layers")
    return layers


def parse_rates(text: str | None) -> tuple[float, ...]:
    """`0.9,0.75,0.5` as numbers.

    Raises:
        ValueError: if they are none, or not from 0 to 1.
    """
    rates = tuple(float(part) for part in text.split(",")) if text is not None else ()
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"{text} is not between 0 and 1")
    return rates


@dataclass
class Recipe:
    """One run. `given` names the options that the user set, in the YAML file or on the command line."""

    model: ModelArguments
    data: DataArguments
    objective: ObjectiveArguments
    optimization: OptimizationArguments
    run: RunArguments
    given: frozenset[str] = frozenset()

    @property
    def has_training(self) -> bool:
        return self.data.train_file is not None or self.data.dataset_name is not None

    @property
    def is_classification(self) -> bool:
        return self.model.task in CLASSIFICATION

    @property
    def unit(self) -> str:
        """What the amount of training is counted in."""
        return "images" if self.model.task == "image_classification" else "tokens"

    @property
    def output_dir(self) -> Path:
        return Path(self.run.output_dir)

    def summary(self) -> dict[str, Any]:
        """What a reader of the model card needs to repeat the run: what was chosen, and the defaults that matter."""
        always = {"seed", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"}
        names = (self.given | always) - set(RunArguments.__dataclass_fields__) - {"trust_remote_code"} | {"seed"}
        values = self.flat()
        weights = {name for name, value in values.items() if name.endswith("_weight") and value}
        return {name: value for name, value in values.items() if name in names | weights}

    def flat(self) -> dict[str, Any]:
        """All options in one dictionary, as they are stored in checkpoints and model cards."""
        groups = (self.model, self.data, self.objective, self.optimization, self.run)
        return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}

    def facts(self) -> dict[str, Any]:
        """The same for checkpoints: with absolute paths, so that resuming from another folder works."""
        values = self.flat()
        paths = {name: values[name] for name, fact in FACTS.items() if fact.is_path and values[name]}
        return values | {name: str(Path(path).resolve()) for name, path in paths.items() if Path(path).exists()}
