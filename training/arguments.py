"""Every option of `training/finetune.py`, as dataclasses that `command_line.Parser` reads.

Each field is an option of the same name. Its help text is its documentation, and everything else that holds for it
(`options.Facts`) is given beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from hf_linear_attention._common.options import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    SIZE,
    Bounds,
    OnResume,
    facts_of,
    option,
)
from hf_linear_attention.training.objective_arguments import TRANSFER_WEIGHTS, ObjectiveArguments
from hf_linear_attention.training.task_arguments import EVALUATION_DATA, TaskArguments
from hf_linear_attention.training.tasks import CLASSIFICATION, COLUMN_TASKS, IMAGE_TASKS, SOUND_TASKS, TASKS, TEXT_TASKS


def _where_patience_counts(values: Mapping[str, Any]) -> OnResume:
    """What a changed `logging_steps` means on resumption: `layer_patience` counts log lines."""
    return OnResume.WARNED if values.get("layer_patience") else OnResume.FREE


def _where_embeddings_are_compared(values: Mapping[str, Any]) -> OnResume:
    """What a changed teacher means on resumption: an embedding model is evaluated by its similarity to its teacher."""
    task = TASKS.get(str(values.get("task")))
    return OnResume.WARNED | (OnResume.INCOMPARABLE if task and task.logits is None else OnResume.FREE)


@dataclass
class ModelArguments:
    """The model that is trained, its teacher, and which parameters are trained."""

    model_name_or_path: str = option(
        "Model to train: a folder (such as a converted checkpoint) or a name on the Hub.",
        for_evaluation=True,
        is_path=True,
        is_per_stage=True,
    )
    task: str = option(
        "Task of the model; it decides the head, the loss and the figures of an evaluation.",
        choices=tuple(TASKS),
        for_evaluation=True,
    )
    teacher_name_or_path: str | None = option(
        "Model to imitate, usually the original that was converted.",
        None,
        for_evaluation=True,
        is_path=True,
        on_resume=_where_embeddings_are_compared,
    )
    tokenizer_name: str | None = option(
        "Tokenizer, if it is not the model's own.", None, tasks=TEXT_TASKS, for_evaluation=True, is_path=True
    )
    trust_remote_code: bool = option(
        "Run the Python code in the model folders.", False, for_evaluation=True, on_resume=OnResume.FREE
    )
    allow_missing: bool = option(
        "Train although the checkpoint lacks weights, which are then random, or has layers that its config.json lacks.",
        False,
        for_evaluation=True,
        on_resume=OnResume.FREE,
    )
    trainable: Literal["all", "mechanism", "adapter"] = option(
        "Parameters to train: all (with use_peft: the adapters and those of the attention mechanism), those of the "
        "mechanism, or the adapters.",
        "all",
    )
    use_peft: bool = option(
        "Train LoRA adapters instead of the base weights; they are merged into the weights that are saved.", False
    )
    lora_r: int = option("Rank of the adapters.", 8, bounds=COUNT, needs=("use_peft",))
    lora_alpha: int = option(
        "Scale of the adapters: their output is multiplied by lora_alpha / lora_r.", 16, needs=("use_peft",)
    )
    lora_dropout: float = option(
        "Dropout probability of the adapters.", 0.0, bounds=BELOW_ONE, needs=("use_peft",), on_resume=OnResume.WARNED
    )
    lora_target_modules: str | None = option(
        "Modules that get adapters: names separated by commas, `attention` (the projections of converted layers) or "
        "`all-linear`; default: peft's choice for the model type.",
        None,
        needs=("use_peft",),
    )
    freeze_pattern: str | None = option(
        "Freeze every parameter whose name contains a match of this regular expression.", None
    )
    untie_embeddings: Literal["keep", "retie"] | None = option(
        "Train shared input and output embeddings as two separate matrices; `keep` saves both, `retie` their mean as "
        "one.",
        None,
        tasks=TEXT_TASKS,
    )
    offload_folder: str | None = option(
        "Attention transfer for a model larger than memory: all weights but those of the mechanisms are kept in this "
        "folder and read when they are needed.",
        None,
        needs=TRANSFER_WEIGHTS,
        on_resume=OnResume.FREE,
    )
    use_dora: bool = option(
        "Train DoRA adapters, which also learn the norm of each weight vector.", False, needs=("use_peft",)
    )

    @property
    def trains_beside(self) -> bool:
        """Whether the base weights stay those of `model_name_or_path`, and only parameters beside them are trained."""
        return self.use_peft or self.offload_folder is not None


@dataclass
class DataArguments:
    """The training and validation data, and how inputs are made of it."""

    train_file: str | None = option(
        "Training data: .txt, .jsonl, .csv (quoted or not), .tsv (not quoted) or .parquet; without it, only evaluate.",
        None,
        is_path=True,
    )
    validation_file: str | None = option(
        "Validation data, in the formats of train_file; used at the start, every eval_steps and at the end.",
        None,
        for_evaluation=True,
        is_path=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    dataset_name: str | None = option(
        "Data set instead of files: a name or folder (also of images) for datasets.load_dataset.", None, is_path=True
    )
    join_documents: bool = option(
        "Let documents that are packed into one block attend to each other (causal_lm); by default they do not.",
        False,
        tasks=("causal_lm",),
    )
    # Another value is refused on resumption by `streaming_processes`, which a checkpoint records (`inputs.py`).
    streaming: bool = option(
        "Read training rows as they are needed; --max_train_steps is then the length of the run.",
        False,
        on_resume=OnResume.FREE,
    )
    dataset_config_name: str | None = option("Configuration of dataset_name.", None, needs=("dataset_name",))
    text_column_name: str = option(
        "Column with the text, or with its words; default: text (seq2seq_lm: source; token_classification: tokens).",
        "text",
        tasks=(*COLUMN_TASKS, *SOUND_TASKS),
        for_evaluation=True,
    )
    image_column_name: str = option(
        "Column with the image itself or its path, relative to the folder of the data file.",
        "image",
        tasks=IMAGE_TASKS,
        for_evaluation=True,
    )
    text_pair_column_name: str | None = option(
        "Column with a second text. For sequence_classification, both texts are one input; in the validation data of "
        "an embedding model, the label is the similarity of the two texts; for seq2seq_lm, it is the text to write "
        "(default: target).",
        None,
        tasks=("sequence_classification", "embedding", "seq2seq_lm"),
        for_evaluation=True,
    )
    label_column_name: str = option(
        "Column with the class, the class of every word, or the score of a pair; default: label (token_classification: "
        "tags, ner_tags or pos_tags).",
        "label",
        tasks=(*CLASSIFICATION, "token_classification", "embedding"),
        for_evaluation=True,
    )
    on_bad_rows: Literal["raise", "skip"] = option(
        "Stop at rows without text, image, recording or label, or skip them.", "raise", for_evaluation=True
    )
    max_length: int | None = option(
        "Tokens in a sequence or block; default: 512, or fewer if the model accepts fewer.",
        None,
        bounds=Bounds(least=2, below=2**24),
        tasks=(*TEXT_TASKS, "speech_seq2seq"),
        for_evaluation=True,
    )
    mlm_probability: float = option(
        "Share of the tokens that are masked (masked_lm).",
        0.15,
        bounds=PROBABILITY,
        tasks=("masked_lm",),
        for_evaluation=True,
    )
    max_eval_tokens: int | None = option(
        "Evaluate on only about this many tokens, from the start of the validation data.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        tasks=TEXT_TASKS,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    max_eval_samples: int | None = option(
        "Evaluate on only this many examples, from the start of the validation data.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    max_eval_chars: int | None = option(
        "Evaluate on only this many characters, from the start of a .txt validation_file.",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )


@dataclass
class OptimizationArguments:
    """The optimizer, its schedule, and the length of the run."""

    per_device_train_batch_size: int = option(
        "Sequences per forward pass and process in training.", 8, bounds=SIZE, on_resume=OnResume.WARNED
    )
    per_device_eval_batch_size: int = option(
        "Sequences per forward pass and process in evaluation.",
        8,
        bounds=SIZE,
        needs=EVALUATION_DATA,
        for_evaluation=True,
        on_resume=OnResume.FREE,
    )
    gradient_accumulation_steps: int = option(
        "Forward passes per optimizer step.", 1, bounds=SIZE, on_resume=OnResume.WARNED
    )
    learning_rate: float = option("Peak learning rate of AdamW.", 5e-5, bounds=POSITIVE, on_resume=OnResume.WARNED)
    mechanism_learning_rate: float | None = option(
        "Peak learning rate of the mechanism's parameters (*.linear_attention.*); default: that of learning_rate.",
        None,
        bounds=POSITIVE,
        on_resume=OnResume.WARNED,
    )
    weight_decay: float = option(
        "Weight decay of matrices; vectors have none.", 0.0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED
    )
    max_grad_norm: float = option(
        "Norm to which gradients are clipped; 0: no clipping.", 1.0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED
    )
    gradient_checkpointing: bool = option(
        "Recompute activations in the backward pass: slower, but less memory.", False, on_resume=OnResume.FREE
    )
    ema_decay: float | None = option(
        "Decay per step of an exponential moving average of the weights, which is then evaluated and saved.",
        None,
        bounds=Bounds(above=0, below=1, such_as=0.999),
    )
    num_train_epochs: float | None = option(
        "Length in epochs; default: 3 without other limits.",
        None,
        bounds=Bounds(above=0, below=10**6),
        on_resume=OnResume.WARNED,
    )
    max_train_steps: int | None = option(
        "Length of the run in optimizer steps; the limit that is reached first ends the run.",
        None,
        bounds=COUNT,
        on_resume=OnResume.WARNED,
    )
    max_train_tokens: int | None = option(
        "Length of the run in tokens, not counting padding.",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        on_resume=OnResume.WARNED,
        is_per_stage=True,
    )
    min_train_steps: int | None = option(
        "Smaller batches, down to one text, where max_train_tokens would end the run in fewer optimizer steps: in few "
        "steps no parameter gets far, however long the texts are.",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        needs=("max_train_tokens",),
        on_resume=OnResume.WARNED,
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "Learning-rate schedule after the warmup.", "linear", on_resume=OnResume.WARNED
    )
    warmup_ratio: float = option(
        "Share of the steps in which the rate rises from 0.", 0.0, bounds=BELOW_ONE, on_resume=OnResume.WARNED
    )
    warmup_steps: int = option(
        "Warmup as a number of optimizer steps.", 0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED
    )


@dataclass
class RunArguments:
    """Where a run writes, how it resumes, and when it logs, evaluates and saves."""

    output_dir: str = option(
        "Folder for the trained model, metrics.jsonl and the checkpoint-<step> folders.",
        for_evaluation=True,
        on_resume=OnResume.FREE,
        is_per_stage=True,
    )
    overwrite_output_dir: bool = option(
        "Start over in a folder that holds an earlier run.",
        False,
        for_evaluation=True,
        on_resume=OnResume.FREE,
        is_per_stage=True,
    )
    resume_from_checkpoint: str | None = option(
        "Checkpoint to resume from: `latest` or the path of a checkpoint-<step> folder.",
        None,
        on_resume=OnResume.FREE,
        is_per_stage=True,
    )
    seed: int = option("Seed of data order, masks, dropout and new heads.", 42, bounds=SEED, for_evaluation=True)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        "Mixed precision; default: that of `accelerate launch`.", None, for_evaluation=True
    )
    logging_steps: int = option(
        "Optimizer steps between lines in metrics.jsonl.", 10, bounds=COUNT, on_resume=_where_patience_counts
    )
    eval_steps: int | None = option(
        "Optimizer steps between evaluations; default: evaluate at the start and the end only.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        on_resume=OnResume.FREE,
    )
    checkpointing_steps: int | None = option(
        "Optimizer steps between checkpoints; default: none.", None, bounds=COUNT, on_resume=OnResume.FREE
    )
    save_total_limit: int | None = option(
        "Keep only this many checkpoints, the newest, and the best one.",
        None,
        bounds=COUNT,
        needs=("checkpointing_steps", "load_best_model_at_end"),
        on_resume=OnResume.FREE,
    )
    load_best_model_at_end: bool = option(
        "Write the model of the best evaluation instead of the last; a checkpoint is saved at each new best.",
        False,
        needs=("eval_steps",),
        on_resume=OnResume.FREE,
    )
    metric_for_best_model: str | None = option(
        "Figure that decides which evaluation is best, such as perplexity, accuracy or cosine; default: the main "
        "figure of the task.",
        None,
        needs=("load_best_model_at_end", "early_stopping_patience"),
        on_resume=OnResume.INCOMPARABLE,
    )
    early_stopping_patience: int | None = option(
        "Stop after this many evaluations in a row without a new best.",
        None,
        bounds=COUNT,
        needs=("eval_steps",),
        on_resume=OnResume.FREE,
    )
    report_to: str | None = option(
        "Trackers of accelerate, such as tensorboard,trackio.", None, on_resume=OnResume.FREE
    )


GROUPS = (ModelArguments, DataArguments, ObjectiveArguments, OptimizationArguments, RunArguments, TaskArguments)
FACTS = facts_of(*GROUPS)
DEFAULTS = {entry.name: entry.default for group in GROUPS for entry in fields(group) if entry.default is not MISSING}
