"""Every option of `training/finetune.py`, as dataclasses that `transformers.HfArgumentParser` reads.

A field is an option of the same name; the help text is its documentation. `Recipe` is the whole, parsed and checked.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_linear_attention._common.command_line import option
from hf_linear_attention.configuration_linear_attention import parse_layers


CLASSIFICATION = ("sequence_classification", "image_classification")
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
class ModelArguments:
    model_name_or_path: str = option("Model to train: a folder (such as a converted checkpoint) or a hub name.")
    task: Literal["causal_lm", "masked_lm", "sequence_classification", "embedding", "image_classification"] = option(
        "What the model is for."
    )
    teacher_name_or_path: str | None = option("Model to learn from, usually the unconverted original.", None)
    tokenizer_name: str | None = option("Tokenizer, when it is not that of the model.", None)
    trust_remote_code: bool = option("Run the Python code that the model folders carry.", False)
    trainable: Literal["all", "mechanism", "adapter"] = option(
        "Train all parameters (with use_peft: adapters and the attention mechanism's), the mechanism's, or adapters.",
        "all",
    )
    use_peft: bool = option("Train LoRA adapters in place of the base weights; merged into what is saved.", False)
    lora_r: int = option("Rank of the adapters.", 8)
    lora_alpha: int = option("Adapters are scaled by lora_alpha / lora_r.", 16)
    lora_dropout: float = option("Dropout before the adapters.", 0.0)
    lora_target_modules: str | None = option(
        "Modules by name, with commas between; `attention` (the projections of converted layers) or `all-linear`; "
        "default: peft's choice for the model type.",
        None,
    )
    freeze_pattern: str | None = option("Freeze parameters in whose name this regular expression is found.", None)
    untie_embeddings: Literal["keep", "retie"] | None = option(
        "Train input and output embeddings that are one matrix apart; keep them so, or save their mean as one.", None
    )
    offload_folder: str | None = option(
        "Attention transfer for a model larger than memory: all but the mechanisms lies in this folder and is read "
        "while it is used.",
        None,
    )
    use_dora: bool = option("DoRA: adapters that also learn the norm of each weight vector.", False)

    @property
    def trains_beside(self) -> bool:
        """Whether what is trained lies beside weights that stay those of `model_name_or_path`."""
        return self.use_peft or self.offload_folder is not None


@dataclass
class DataArguments:
    train_file: str | None = option(".txt, .jsonl, .csv, .tsv (no quoting) or .parquet. None: evaluate only.", None)
    validation_file: str | None = option("Like train_file; evaluated at the start, every eval_steps, at the end.", None)
    dataset_name: str | None = option(
        "Instead of files: name or folder (of images, too) for datasets.load_dataset.", None
    )
    join_documents: bool = option(
        "Let the documents of a packed block see each other (causal_lm); else each is by itself.", False
    )
    streaming: bool = option("Read training rows while they are needed; the length is --max_train_steps.", False)
    dataset_config_name: str | None = option("Configuration of dataset_name.", None)
    text_column_name: str = option("Column with the text.", "text")
    image_column_name: str = option(
        "Column with the image (image_classification): itself, or its path from the folder of the file.", "image"
    )
    text_pair_column_name: str | None = option(
        "Column with a second text: one input with the first (sequence_classification), or, in the validation data of "
        "an embedding model, the text whose similarity the label scores.",
        None,
    )
    label_column_name: str = option("Column with the class.", "label")
    on_bad_rows: Literal["raise", "skip"] = option(
        "Stop at rows without text, image or label, or leave them out.", "raise"
    )
    max_length: int | None = option("Tokens in a sequence or block; default: 512, or less if the model says so.", None)
    mlm_probability: float = option("Share of tokens masked (masked_lm).", 0.15)
    max_eval_tokens: int | None = option("Evaluate on about the first so many tokens.", None)
    max_eval_samples: int | None = option("Evaluate on the first so many examples.", None)
    max_eval_chars: int | None = option("Evaluate on the first so many characters of a .txt validation_file.", None)


@dataclass
class ObjectiveArguments:
    task_loss_weight: float | None = option("Weight of the task's cross-entropy; default: 1 without teacher.", None)
    logits_kl_weight: float | None = option("Weight of KL(teacher || student) of the logits.", None)
    hidden_state_weight: float | None = option("Weight of the relative squared error of hidden states.", None)
    attention_transfer_weight: float = option(
        "Weight of the relative squared error of every converted layer's output, on the softmax model's activations "
        "(the model is its own teacher; with --trainable mechanism and no other weight).",
        0.0,
    )
    attention_transfer_error: Literal["relative", "absolute"] = option(
        "Squared error of each head over that of the softmax output, or plainly its mean.", "relative"
    )
    attention_map_weight: float = option(
        "Weight of the cross-entropy between softmax attention weights and the mechanism's; otherwise like "
        "attention_transfer_weight, with which it may be combined.",
        0.0,
    )
    transfer_layers: str | None = option(
        "Layers that learn from attention, as 0,2,4-7; those behind the last are not computed. Default: all.", None
    )
    layer_patience: int | None = option(
        "A layer stops to learn from attention after so many log lines without a lower error of its own.", None
    )
    embedding_weight: float | None = option("Weight of 1 - cosine of the mean-pooled embeddings.", None)
    window_dropout: str | None = option(
        "Probability with which a batch is computed without the windows of `hybrid` layers, so that their linear part "
        "is used; with commas between, such as 0.9,0.75,0.5: of equal parts of the run.",
        None,
    )
    hidden_state_layers: Literal["last", "all"] = option("Layers that hidden_state_weight matches.", "last")
    temperature: float = option("Temperature of the KL; its value is multiplied by temperature squared.", 1.0)
    disable_dropout: bool | None = option("Train without dropout; default: yes where a teacher is imitated.", None)


@dataclass
class OptimizationArguments:
    per_device_train_batch_size: int = option("Sequences in one forward pass of one process.", 8)
    per_device_eval_batch_size: int = option("The same in evaluation.", 8)
    gradient_accumulation_steps: int = option("Forward passes in one optimizer step.", 1)
    learning_rate: float = option("Peak learning rate of AdamW.", 5e-5)
    mechanism_learning_rate: float | None = option("For parameters named *.linear_attention.*; else as above.", None)
    weight_decay: float = option("On matrices; never on one-dimensional parameters.", 0.0)
    max_grad_norm: float = option("Gradients are clipped to this norm; 0: no clipping.", 1.0)
    gradient_checkpointing: bool = option("Compute activations again in the backward pass: slower, less memory.", False)
    ema_decay: float | None = option("Evaluate and save an exponential moving average of the weights.", None)
    num_train_epochs: float | None = option("Length of the run; default 3 when nothing else limits it.", None)
    max_train_steps: int | None = option("Limit in optimizer steps; the limit reached first ends the run.", None)
    max_train_tokens: int | None = option("Limit in tokens (padding not counted).", None)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option("Schedule.", "linear")
    warmup_ratio: float = option("Share of the steps over which the rate rises from 0.", 0.0)
    warmup_steps: int = option("The same as a number of steps.", 0)


@dataclass
class RunArguments:
    output_dir: str = option("Receives the trained model, metrics.jsonl and checkpoint-<step> folders.")
    overwrite_output_dir: bool = option("Start over in a folder that holds an earlier run.", False)
    resume_from_checkpoint: str | None = option("`latest` or the path of a checkpoint-<step> folder.", None)
    seed: int = option("Data order, masks, dropout and new heads.", 42)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option("Default: as `accelerate launch` says.", None)
    logging_steps: int = option("Optimizer steps between lines in metrics.jsonl.", 10)
    eval_steps: int | None = option("Optimizer steps between evaluations; default: at start and end only.", None)
    checkpointing_steps: int | None = option("Optimizer steps between checkpoints; default: none.", None)
    save_total_limit: int | None = option("Keep only the newest so many checkpoints, and the best.", None)
    load_best_model_at_end: bool = option("Write the best evaluated model, not the last; saves each new best.", False)
    metric_for_best_model: str | None = option("Figure to choose it by; default: the task's first.", None)
    early_stopping_patience: int | None = option("Stop after so many evaluations without a new best.", None)
    report_to: str | None = option("Trackers of accelerate, with commas between: tensorboard, trackio, ...", None)


GROUPS = (ModelArguments, DataArguments, ObjectiveArguments, OptimizationArguments, RunArguments)


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
