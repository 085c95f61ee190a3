"""Every option of `training/finetune.py`, as dataclasses that `transformers.HfArgumentParser` reads.

A field is an option of the same name; the help text is its documentation, and what else holds for it (`options.Facts`)
stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_linear_attention._common.options import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    Bounds,
    OnResume,
    facts_of,
    option,
)


CLASSIFICATION = ("sequence_classification", "image_classification")
# Images are counted in steps, epochs and samples.
TEXT_TASKS = ("causal_lm", "masked_lm", "sequence_classification", "embedding")
TEACHER = ("teacher_name_or_path",)
EVALUATION_DATA = ("validation_file", "dataset_name")
TEACHER_WEIGHTS = ("logits_kl_weight", "hidden_state_weight", "embedding_weight")
# The student computes softmax attention for these, and is its own teacher.
TRANSFER_WEIGHTS = ("attention_transfer_weight", "attention_map_weight")


def _loss_weight(text: str, default: float | None = None, needs: tuple[str, ...] = ()) -> Any:
    return option(text, default, bounds=NOT_NEGATIVE, needs=needs, off=0, on_resume=OnResume.WARNED)


def _where_patience_counts(values: Mapping[str, Any]) -> OnResume:
    """`layer_patience` counts log lines."""
    return OnResume.WARNED if values.get("layer_patience") else OnResume.FREE


def _where_embeddings_are_compared(values: Mapping[str, Any]) -> OnResume:
    """An embedding model is evaluated by how near it is to its teacher."""
    return OnResume.WARNED | (OnResume.INCOMPARABLE if values.get("task") == "embedding" else OnResume.FREE)


@dataclass
class ModelArguments:
    model_name_or_path: str = option(
        "Model to train: a folder (such as a converted checkpoint) or a hub name.",
        for_evaluation=True,
        is_path=True,
        is_per_stage=True,
    )
    task: Literal["causal_lm", "masked_lm", "sequence_classification", "embedding", "image_classification"] = option(
        "What the model is for.", for_evaluation=True
    )
    teacher_name_or_path: str | None = option(
        "Model to learn from, usually the unconverted original.",
        None,
        for_evaluation=True,
        is_path=True,
        on_resume=_where_embeddings_are_compared,
    )
    tokenizer_name: str | None = option(
        "Tokenizer, when it is not that of the model.", None, tasks=TEXT_TASKS, for_evaluation=True, is_path=True
    )
    trust_remote_code: bool = option(
        "Run the Python code that the model folders carry.", False, for_evaluation=True, on_resume=OnResume.FREE
    )
    trainable: Literal["all", "mechanism", "adapter"] = option(
        "Train all parameters (with use_peft: adapters and the attention mechanism's), the mechanism's, or adapters.",
        "all",
    )
    use_peft: bool = option("Train LoRA adapters in place of the base weights; merged into what is saved.", False)
    lora_r: int = option("Rank of the adapters.", 8, bounds=COUNT, needs=("use_peft",))
    lora_alpha: int = option("Adapters are scaled by lora_alpha / lora_r.", 16, needs=("use_peft",))
    lora_dropout: float = option(
        "Dropout before the adapters.", 0.0, bounds=BELOW_ONE, needs=("use_peft",), on_resume=OnResume.WARNED
    )
    lora_target_modules: str | None = option(
        "Modules by name, with commas between; `attention` (the projections of converted layers) or `all-linear`; "
        "default: peft's choice for the model type.",
        None,
        needs=("use_peft",),
    )
    freeze_pattern: str | None = option("Freeze parameters in whose name this regular expression is found.", None)
    untie_embeddings: Literal["keep", "retie"] | None = option(
        "Train input and output embeddings that are one matrix apart; keep them so, or save their mean as one.",
        None,
        tasks=TEXT_TASKS,
    )
    offload_folder: str | None = option(
        "Attention transfer for a model larger than memory: all but the mechanisms lies in this folder and is read "
        "while it is used.",
        None,
        needs=TRANSFER_WEIGHTS,
        on_resume=OnResume.FREE,
    )
    use_dora: bool = option(
        "DoRA: adapters that also learn the norm of each weight vector.", False, needs=("use_peft",)
    )

    @property
    def trains_beside(self) -> bool:
        """Whether what is trained lies beside weights that stay those of `model_name_or_path`."""
        return self.use_peft or self.offload_folder is not None


@dataclass
class DataArguments:
    train_file: str | None = option(
        ".txt, .jsonl, .csv, .tsv (no quoting) or .parquet. None: evaluate only.", None, is_path=True
    )
    validation_file: str | None = option(
        "Like train_file; evaluated at the start, every eval_steps, at the end.",
        None,
        for_evaluation=True,
        is_path=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    dataset_name: str | None = option(
        "Instead of files: name or folder (of images, too) for datasets.load_dataset.", None, is_path=True
    )
    join_documents: bool = option(
        "Let the documents of a packed block see each other (causal_lm); else each is by itself.",
        False,
        tasks=("causal_lm",),
    )
    # what it decides, `streaming_processes`, is a fact of its own (checkpointing.py)
    streaming: bool = option(
        "Read training rows while they are needed; the length is --max_train_steps.", False, on_resume=OnResume.FREE
    )
    dataset_config_name: str | None = option("Configuration of dataset_name.", None, needs=("dataset_name",))
    text_column_name: str = option("Column with the text.", "text", tasks=TEXT_TASKS, for_evaluation=True)
    image_column_name: str = option(
        "Column with the image (image_classification): itself, or its path from the folder of the file.",
        "image",
        tasks=("image_classification",),
        for_evaluation=True,
    )
    text_pair_column_name: str | None = option(
        "Column with a second text: one input with the first (sequence_classification), or, in the validation data of "
        "an embedding model, the text whose similarity the label scores.",
        None,
        tasks=("sequence_classification", "embedding"),
        for_evaluation=True,
    )
    label_column_name: str = option(
        "Column with the class.", "label", tasks=(*CLASSIFICATION, "embedding"), for_evaluation=True
    )
    on_bad_rows: Literal["raise", "skip"] = option(
        "Stop at rows without text, image or label, or leave them out.", "raise", for_evaluation=True
    )
    max_length: int | None = option(
        "Tokens in a sequence or block; default: 512, or less if the model says so.",
        None,
        bounds=Bounds(least=2),
        tasks=TEXT_TASKS,
        for_evaluation=True,
    )
    mlm_probability: float = option(
        "Share of tokens masked (masked_lm).", 0.15, bounds=PROBABILITY, tasks=("masked_lm",), for_evaluation=True
    )
    max_eval_tokens: int | None = option(
        "Evaluate on about the first so many tokens.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        tasks=TEXT_TASKS,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    max_eval_samples: int | None = option(
        "Evaluate on the first so many examples.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    max_eval_chars: int | None = option(
        "Evaluate on the first so many characters of a .txt validation_file.",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )


@dataclass
class ObjectiveArguments:
    task_loss_weight: float | None = _loss_weight("Weight of the task's cross-entropy; default: 1 without teacher.")
    logits_kl_weight: float | None = _loss_weight("Weight of KL(teacher || student) of the logits.", needs=TEACHER)
    hidden_state_weight: float | None = _loss_weight(
        "Weight of the relative squared error of hidden states.", needs=TEACHER
    )
    attention_transfer_weight: float = _loss_weight(
        "Weight of the relative squared error of every converted layer's output, on the softmax model's activations "
        "(the model is its own teacher; with --trainable mechanism and no other weight).",
        0.0,
    )
    attention_transfer_error: Literal["relative", "absolute"] = option(
        "Squared error of each head over that of the softmax output, or plainly its mean.",
        "relative",
        needs=("attention_transfer_weight",),
        on_resume=OnResume.WARNED,
    )
    attention_map_weight: float = _loss_weight(
        "Weight of the cross-entropy between softmax attention weights and the mechanism's; otherwise like "
        "attention_transfer_weight, with which it may be combined.",
        0.0,
    )
    transfer_layers: str | None = option(
        "Layers that learn from attention, as 0,2,4-7; those behind the last are not computed. Default: all.",
        None,
        needs=TRANSFER_WEIGHTS,
    )
    layer_patience: int | None = option(
        "A layer stops to learn from attention after so many log lines without a lower error of its own.",
        None,
        bounds=COUNT,
        needs=TRANSFER_WEIGHTS,
        on_resume=OnResume.WARNED,
    )
    embedding_weight: float | None = option(
        "Weight of 1 - cosine of the mean-pooled embeddings.",
        None,
        bounds=NOT_NEGATIVE,
        needs=TEACHER,
        tasks=TEXT_TASKS,
        off=0,
        on_resume=OnResume.WARNED,
    )
    window_dropout: str | None = option(
        "Probability with which a batch is computed without the windows of `hybrid` layers, so that their linear part "
        "is used; with commas between, such as 0.9,0.75,0.5: of equal parts of the run.",
        None,
        on_resume=OnResume.WARNED,
    )
    hidden_state_layers: Literal["last", "all"] = option(
        "Layers that hidden_state_weight matches.", "last", needs=("hidden_state_weight",), on_resume=OnResume.WARNED
    )
    temperature: float = option(
        "Temperature of the KL; its value is multiplied by temperature squared.",
        1.0,
        bounds=POSITIVE,
        needs=("logits_kl_weight",),
        on_resume=OnResume.WARNED,
    )
    disable_dropout: bool | None = option(
        "Train without dropout; default: yes where a teacher is imitated.", None, on_resume=OnResume.WARNED
    )


@dataclass
class OptimizationArguments:
    per_device_train_batch_size: int = option(
        "Sequences in one forward pass of one process.", 8, bounds=COUNT, on_resume=OnResume.WARNED
    )
    per_device_eval_batch_size: int = option(
        "The same in evaluation.",
        8,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        for_evaluation=True,
        on_resume=OnResume.FREE,
    )
    gradient_accumulation_steps: int = option(
        "Forward passes in one optimizer step.", 1, bounds=COUNT, on_resume=OnResume.WARNED
    )
    learning_rate: float = option("Peak learning rate of AdamW.", 5e-5, bounds=POSITIVE, on_resume=OnResume.WARNED)
    mechanism_learning_rate: float | None = option(
        "For parameters named *.linear_attention.*; else as above.", None, bounds=POSITIVE, on_resume=OnResume.WARNED
    )
    weight_decay: float = option(
        "On matrices; never on one-dimensional parameters.", 0.0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED
    )
    max_grad_norm: float = option(
        "Gradients are clipped to this norm; 0: no clipping.", 1.0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED
    )
    gradient_checkpointing: bool = option(
        "Compute activations again in the backward pass: slower, less memory.", False, on_resume=OnResume.FREE
    )
    ema_decay: float | None = option(
        "Evaluate and save an exponential moving average of the weights.",
        None,
        bounds=Bounds(above=0, below=1, such_as=0.999),
    )
    num_train_epochs: float | None = option(
        "Length of the run; default 3 when nothing else limits it.", None, bounds=POSITIVE, on_resume=OnResume.WARNED
    )
    max_train_steps: int | None = option(
        "Limit in optimizer steps; the limit reached first ends the run.",
        None,
        bounds=COUNT,
        on_resume=OnResume.WARNED,
    )
    max_train_tokens: int | None = option(
        "Limit in tokens (padding not counted).",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        on_resume=OnResume.WARNED,
        is_per_stage=True,
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = option(
        "Schedule.", "linear", on_resume=OnResume.WARNED
    )
    warmup_ratio: float = option(
        "Share of the steps over which the rate rises from 0.", 0.0, bounds=BELOW_ONE, on_resume=OnResume.WARNED
    )
    warmup_steps: int = option("The same as a number of steps.", 0, bounds=NOT_NEGATIVE, on_resume=OnResume.WARNED)


@dataclass
class RunArguments:
    output_dir: str = option(
        "Receives the trained model, metrics.jsonl and checkpoint-<step> folders.",
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
        "`latest` or the path of a checkpoint-<step> folder.", None, on_resume=OnResume.FREE, is_per_stage=True
    )
    seed: int = option("Data order, masks, dropout and new heads.", 42, bounds=NOT_NEGATIVE, for_evaluation=True)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(
        "Default: as `accelerate launch` says.", None, for_evaluation=True
    )
    logging_steps: int = option(
        "Optimizer steps between lines in metrics.jsonl.", 10, bounds=COUNT, on_resume=_where_patience_counts
    )
    eval_steps: int | None = option(
        "Optimizer steps between evaluations; default: at start and end only.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        on_resume=OnResume.FREE,
    )
    checkpointing_steps: int | None = option(
        "Optimizer steps between checkpoints; default: none.", None, bounds=COUNT, on_resume=OnResume.FREE
    )
    save_total_limit: int | None = option(
        "Keep only the newest so many checkpoints, and the best.",
        None,
        bounds=COUNT,
        needs=("checkpointing_steps", "load_best_model_at_end"),
        on_resume=OnResume.FREE,
    )
    load_best_model_at_end: bool = option(
        "Write the best evaluated model, not the last; saves each new best.",
        False,
        needs=("eval_steps",),
        on_resume=OnResume.FREE,
    )
    metric_for_best_model: str | None = option(
        "Figure to choose it by; default: the task's first.",
        None,
        needs=("load_best_model_at_end", "early_stopping_patience"),
        on_resume=OnResume.INCOMPARABLE,
    )
    early_stopping_patience: int | None = option(
        "Stop after so many evaluations without a new best.",
        None,
        bounds=COUNT,
        needs=("eval_steps",),
        on_resume=OnResume.FREE,
    )
    report_to: str | None = option(
        "Trackers of accelerate, with commas between: tensorboard, trackio, ...", None, on_resume=OnResume.FREE
    )


GROUPS = (ModelArguments, DataArguments, ObjectiveArguments, OptimizationArguments, RunArguments)
FACTS = facts_of(*GROUPS)
