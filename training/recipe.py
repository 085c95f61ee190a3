"""Every option of `training/finetune.py`, and the recipe of a run, which is all of them.

Each field of the dataclasses is an option of the same name. Its help text is its documentation, and everything else
that holds for it (`options.Facts`) is given beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
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
from hf_linear_attention.training.data.pooling import Pooling, pooling_of
from hf_linear_attention.training.tasks import CLASSIFICATION, IMAGE_TASKS, TASKS, TEXT_TASKS, Task, unit_of


# A part of the name of every parameter of a mechanism: the child module that a conversion adds to a converted module.
MECHANISM = ".linear_attention."
TEACHER = ("teacher_name_or_path",)
TEACHER_WEIGHTS = ("logits_kl_weight", "hidden_state_weight", "embedding_weight")
# With these, the student computes its original softmax attention and is its own teacher.
TRANSFER = "attention_transfer_weight"

# Options that hold for a model that is only evaluated, too.
shared = partial(option, for_evaluation=True)
# Options with another value of which a run is resumed (`OnResume`); the last are those of evaluations.
warned = partial(option, on_resume=OnResume.WARNED)
free = partial(option, on_resume=OnResume.FREE)
incomparable = partial(option, on_resume=OnResume.INCOMPARABLE, for_evaluation=True)


def _loss_weight(text: str, default: float | None = None, **facts: Any) -> Any:
    return warned(text, default, bounds=NOT_NEGATIVE, off=0, **facts)


@dataclass
class ObjectiveArguments:
    """The terms of the loss and their weights."""

    task_loss_weight: float | None = _loss_weight("Weight of the task's cross-entropy; default: 1 without a teacher.")
    logits_kl_weight: float | None = _loss_weight("Weight of KL(teacher || student) of the logits.", needs=TEACHER)
    hidden_state_weight: float | None = _loss_weight(
        "Weight of the relative squared error of the last hidden states, or of those of every layer for images.",
        needs=TEACHER,
    )
    attention_transfer_weight: float = _loss_weight(
        "Weight of the relative squared error of every converted layer's output, computed on the softmax model's "
        "activations (the model is its own teacher; requires --trainable mechanism and excludes the other weights "
        "but far_share_weight).",
        0.0,
    )
    far_share_weight: float = _loss_weight(
        "Weight, in attention transfer, of the divergence of the share that softmax gives to a hybrid's far keys from "
        "the share that they have; without it, far keys of heads with large logits may never be learned.",
        0.0,
        needs=("attention_transfer_weight",),
        tasks=("causal_lm",),
    )
    embedding_weight: float | None = _loss_weight(
        "Weight of 1 - cosine similarity of the embeddings.",
        None,
        needs=TEACHER,
        tasks=(*TEXT_TASKS, "image_embedding"),
    )
    temperature: float = warned(
        "Temperature of both distributions in logits_kl_weight, whose value is multiplied by the temperature squared.",
        1.0,
        bounds=POSITIVE,
        needs=("logits_kl_weight",),
    )


EVALUATION_DATA = ("validation_file", "dataset_name")
PADDED = tuple(name for name in TEXT_TASKS if name != "causal_lm")  # the blocks of causal_lm have one length


def _where_embeddings_are_compared(values: Mapping[str, Any]) -> OnResume:
    """What a changed teacher means on resumption: an embedding model is evaluated by its similarity to its teacher."""
    task = TASKS.get(str(values.get("task")))
    return OnResume.WARNED | (OnResume.INCOMPARABLE if task and task.logits is None else OnResume.FREE)


@dataclass
class ModelArguments:
    """The model that is trained, its teacher, and which parameters are trained."""

    model_name_or_path: str = shared(
        "Model to train: a folder (such as a converted checkpoint) or a name on the Hub.",
        is_path=True,
        is_per_stage=True,
    )
    task: str = shared(
        "Task of the model; it decides the head, the loss and the figures of an evaluation.", choices=tuple(TASKS)
    )
    teacher_name_or_path: str | None = shared(
        "Model to imitate, usually the original that was converted.",
        None,
        is_path=True,
        on_resume=_where_embeddings_are_compared,
    )
    trust_remote_code: bool = free("Run the Python code in the model folders.", False, for_evaluation=True)
    allow_missing: bool = free(
        "Train although the checkpoint lacks weights, which are then random, or has layers that its config.json lacks.",
        False,
        for_evaluation=True,
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
    lora_target_modules: str | None = option(
        "Modules that get adapters: names separated by commas, `attention` (the projections of converted layers) or "
        "`all-linear`; default: peft's choice for the model type.",
        None,
        needs=("use_peft",),
    )


@dataclass
class DataArguments:
    """The training and validation data, and how inputs are made of it."""

    train_file: str | None = option(
        "Training data: .txt, .jsonl, .csv (quoted or not), .tsv (not quoted) or .parquet; without it, only evaluate.",
        None,
        is_path=True,
    )
    validation_file: str | None = incomparable(
        "Validation data, in the formats of train_file; used at the start, every eval_steps and at the end.",
        None,
        is_path=True,
    )
    dataset_name: str | None = option(
        "Data set instead of files: a name or folder (also of images) for datasets.load_dataset.", None, is_path=True
    )
    group_by_length: bool = option(
        "Train on texts of similar length in each optimizer step, so that little is computed on padding; the order of "
        "the examples is another one.",
        False,
        tasks=PADDED,
    )
    text_column_name: str = shared(
        "Column with the text; default: text (seq2seq_lm: source).", "text", tasks=TEXT_TASKS
    )
    image_column_name: str = shared(
        "Column with the image itself or its path, relative to the folder of the data file.", "image", tasks=IMAGE_TASKS
    )
    text_pair_column_name: str | None = shared(
        "Column with a second text. For sequence_classification, both texts are one input; in the validation data of "
        "an embedding model, the label is the similarity of the two texts; for seq2seq_lm, it is the text to write "
        "(default: target).",
        None,
        tasks=("sequence_classification", "embedding", "seq2seq_lm"),
    )
    label_column_name: str = shared(
        "Column with the class, or the score of a pair.", "label", tasks=(*CLASSIFICATION, "embedding")
    )
    max_length: int | None = shared(
        "Tokens in a sequence or block; default: 512, or twice the keys that stay exact, or eight times up to 4,096 if "
        "heads choose keys, or fewer if the model accepts fewer.",
        None,
        bounds=Bounds(least=2, below=2**24),
        tasks=TEXT_TASKS,
    )
    mlm_probability: float = shared(
        "Share of the tokens that are masked (masked_lm).", 0.15, bounds=PROBABILITY, tasks=("masked_lm",)
    )
    max_eval_tokens: int | None = incomparable(
        "Evaluate on only about this many tokens, from the start of the validation data.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
        tasks=TEXT_TASKS,
    )


@dataclass
class OptimizationArguments:
    """The optimizer, its schedule, and the length of the run."""

    per_device_train_batch_size: int = warned("Sequences per forward pass and process in training.", 8, bounds=SIZE)
    per_device_eval_batch_size: int = free(
        "Sequences per forward pass and process in evaluation.",
        8,
        bounds=SIZE,
        needs=EVALUATION_DATA,
        for_evaluation=True,
    )
    gradient_accumulation_steps: int = warned("Forward passes per optimizer step.", 1, bounds=SIZE)
    learning_rate: float = warned("Peak learning rate of AdamW.", 5e-5, bounds=POSITIVE)
    mechanism_learning_rate: float | None = warned(
        "Peak learning rate of the mechanism's parameters (*.linear_attention.*); default: that of learning_rate.",
        None,
        bounds=POSITIVE,
    )
    weight_decay: float = warned("Weight decay of matrices; vectors have none.", 0.0, bounds=NOT_NEGATIVE)
    max_grad_norm: float = warned("Norm to which gradients are clipped; 0: no clipping.", 1.0, bounds=NOT_NEGATIVE)
    gradient_checkpointing: bool = free(
        "Recompute activations in the backward pass: slower, but less memory. Attention transfer keeps none, and does "
        "not change.",
        False,
    )
    num_train_epochs: float | None = warned(
        "Length in epochs; default: 3 without other limits.", None, bounds=Bounds(above=0, below=10**6)
    )
    max_train_steps: int | None = warned(
        "Length of the run in optimizer steps; the limit that is reached first ends the run.", None, bounds=COUNT
    )
    max_train_tokens: int | None = warned(
        "Length of the run in tokens, not counting padding.", None, bounds=COUNT, tasks=TEXT_TASKS, is_per_stage=True
    )
    min_train_steps: int | None = warned(
        "Smaller batches, down to one text, where max_train_tokens would end the run in fewer optimizer steps: in few "
        "steps no parameter gets far, however long the texts are.",
        None,
        bounds=COUNT,
        tasks=TEXT_TASKS,
        needs=("max_train_tokens",),
    )
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = warned(
        "Learning-rate schedule after the warmup.", "linear"
    )
    warmup_ratio: float = warned("Share of the steps in which the rate rises from 0.", 0.0, bounds=BELOW_ONE)


@dataclass
class RunArguments:
    """Where a run writes, how it resumes, and when it logs, evaluates and saves."""

    output_dir: str = free(
        "Folder for the trained model, metrics.jsonl and the checkpoint-<step> folders.",
        for_evaluation=True,
        is_per_stage=True,
    )
    overwrite_output_dir: bool = free(
        "Start over in a folder that holds an earlier run.", False, for_evaluation=True, is_per_stage=True
    )
    resume_from_checkpoint: str | None = free(
        "Checkpoint to resume from: `latest` or the path of a checkpoint-<step> folder.", None, is_per_stage=True
    )
    seed: int = shared("Seed of data order, masks, dropout and new heads.", 42, bounds=SEED)
    dtype: Literal["float32", "bfloat16", "float16"] | None = free(
        "Dtype of the weights written at the end; default: that of the checkpoint. Until then they are float32.", None
    )
    logging_steps: int = free("Optimizer steps between lines in metrics.jsonl.", 10, bounds=COUNT)
    eval_steps: int | None = free(
        "Optimizer steps between evaluations; default: evaluate at the start and the end only.",
        None,
        bounds=COUNT,
        needs=EVALUATION_DATA,
    )
    checkpointing_steps: int | None = free("Optimizer steps between checkpoints; default: none.", None, bounds=COUNT)
    save_total_limit: int | None = free(
        "Keep only this many checkpoints, the newest, and the best one.",
        None,
        bounds=COUNT,
        needs=("checkpointing_steps", "load_best_model_at_end"),
    )
    load_best_model_at_end: bool = free(
        "Write the model of the best evaluation instead of the last; a checkpoint is saved at each new best.",
        False,
        needs=("eval_steps",),
    )
    report_to: str | None = free("Trackers of accelerate, such as tensorboard,trackio.", None)


GROUPS = (ModelArguments, DataArguments, ObjectiveArguments, OptimizationArguments, RunArguments)
FACTS = facts_of(*GROUPS)

# Options that there are no more, and what to do instead.
_BY_TRAINER = "train this head with `Trainer` of transformers (docs/data.md, Heads without a task)"
_TASKS = ("ctc", "speech_seq2seq", "question_answering", "token_classification")
REMOVED: dict[str, str] = {
    "attention_map_weight": "give `--attention_transfer_weight`",
    "attention_transfer_error": "leave it out: the error of a head is relative to its output",
    "predict_with_generate": "write texts with `generate` of the model that was saved, and score them with `evaluate`",
    "metric_for_best_model": "leave it out: it is the first figure of the task (docs/data.md)",
    "dataset_config_name": "save the configuration with `datasets`, and give its folder or file",
    **{f"task {name}": _BY_TRAINER for name in _TASKS},
    "audio_column_name": _BY_TRAINER,
    "retrieval_file": "sentence-transformers evaluates the trained model (docs/tutorials/embeddings.md)",
    **dict.fromkeys(
        ("prompt_name", "query_prompt_name", "document_prompt_name"), "write the prompts into the texts of the data"
    ),
    "matryoshka_dims": "leave it out: whole embeddings are trained",
    "cache_teacher": "leave it out: the teacher runs on every batch",
    "restore_projections": "leave it out: a finetuned model keeps its own projections",
    "tokenizer_name": "save that tokenizer into the model's folder (`save_pretrained`)",
    "freeze_pattern": "freeze parameters with `requires_grad_(False)`, and train with `Trainer` of transformers",
    "join_documents": "leave it out: packed documents are one text; `packing` of TRL's `SFTTrainer` keeps them apart",
    "max_logits_mb": "leave it out: logits take 256 MB at most",
    "mixed_precision": "give it to `accelerate launch` (docs/scale.md)",
    "recall_texts": "leave it out: recall is measured on 8 texts",
    "hidden_state_layers": "leave it out: the last hidden states are compared, of images those of every layer",
}


@dataclass
class Recipe:
    """The options of one run, by group.

    `given` names the options that the user set, in the YAML file or on the command line; `asked` has what was asked for
    where a run does with less memory.
    """

    model: ModelArguments
    data: DataArguments
    objective: ObjectiveArguments
    optimization: OptimizationArguments
    run: RunArguments
    given: frozenset[str] = frozenset()
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_training(self) -> bool:
        """Whether there is training data; without it, the model is only evaluated."""
        return self.data.train_file is not None or self.data.dataset_name is not None

    @property
    def task(self) -> Task:
        """What distinguishes the task."""
        return TASKS[self.model.task]

    @property
    def imitates(self) -> bool:
        """Whether outputs of a teacher, which are computed without dropout, are imitated."""
        return any(getattr(self.objective, name) for name in (TRANSFER, *TEACHER_WEIGHTS))

    @property
    def unit(self) -> str:
        """The unit in which the amount of training is counted, such as "tokens"."""
        return unit_of(self.model.task)

    @property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding: as the files of sentence-transformers beside the model say."""
        return pooling_of(self.model.model_name_or_path) if self.model.task == "embedding" else "mean"

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
        groups = (self.model, self.data, self.objective, self.optimization, self.run)
        return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}

    def changed(self, **options: Any) -> Recipe:
        """The same with other values of data and optimization options, of which it keeps those that were asked for."""
        data, plan = (
            {name: value for name, value in options.items() if hasattr(group, name)}
            for group in (self.data, self.optimization)
        )
        values = self.flat()
        return dataclasses.replace(
            self,
            data=dataclasses.replace(self.data, **data),
            optimization=dataclasses.replace(self.optimization, **plan),
            given=self.given | set(options),
            asked={name: values[name] for name in options} | dict(self.asked),
        )

    def facts(self) -> dict[str, Any]:
        """All options for a checkpoint, with absolute paths, so that a run can resume in another working directory."""
        values = self.flat() | ({"asked": dict(self.asked)} if self.asked else {})
        paths = {name: values[name] for name, fact in FACTS.items() if fact.is_path and values[name]}
        return values | {name: str(Path(path).resolve()) for name, path in paths.items() if Path(path).exists()}
