"""The options of `training/finetune.py` that choose the terms of the loss (see `arguments.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hf_linear_attention._common.options import COUNT, NOT_NEGATIVE, POSITIVE, OnResume, option
from hf_linear_attention.training.tasks import CACHED, TEXT_TASKS


TEACHER = ("teacher_name_or_path",)
TEACHER_WEIGHTS = ("logits_kl_weight", "hidden_state_weight", "embedding_weight")
# With these, the student computes its original softmax attention and is its own teacher.
TRANSFER_WEIGHTS = ("attention_transfer_weight", "attention_map_weight")


def _loss_weight(text: str, default: float | None = None, needs: tuple[str, ...] = ()) -> Any:
    return option(text, default, bounds=NOT_NEGATIVE, needs=needs, off=0, on_resume=OnResume.WARNED)


@dataclass
class ObjectiveArguments:
    """The terms of the loss and their weights."""

    task_loss_weight: float | None = _loss_weight("Weight of the task's cross-entropy; default: 1 without a teacher.")
    logits_kl_weight: float | None = _loss_weight("Weight of KL(teacher || student) of the logits.", needs=TEACHER)
    hidden_state_weight: float | None = _loss_weight(
        "Weight of the relative squared error of the hidden states.", needs=TEACHER
    )
    attention_transfer_weight: float = _loss_weight(
        "Weight of the relative squared error of every converted layer's output, computed on the softmax model's "
        "activations (the model is its own teacher; requires --trainable mechanism and excludes the other weights "
        "except attention_map_weight).",
        0.0,
    )
    attention_transfer_error: Literal["relative", "absolute"] = option(
        "Error in attention transfer: each head's squared error relative to its squared softmax output, or the mean "
        "squared error.",
        "relative",
        needs=("attention_transfer_weight",),
        on_resume=OnResume.WARNED,
    )
    attention_map_weight: float = _loss_weight(
        "Weight of the cross-entropy between the attention weights of softmax and those of the mechanism. The "
        "conditions are those of attention_transfer_weight, and the two may be combined.",
        0.0,
    )
    far_share_weight: float = option(
        "Weight, in attention transfer, of the divergence of the share that softmax gives to a hybrid's far keys from "
        "the share that they have; without it, far keys of heads with large logits may never be learned.",
        0.0,
        bounds=NOT_NEGATIVE,
        needs=("attention_transfer_weight",),
        tasks=("causal_lm",),
        off=0,
        on_resume=OnResume.WARNED,
    )
    transfer_layers: str | None = option(
        "Layers that are trained by attention transfer, such as 0,2,4-7; layers after the last of them are not "
        "computed. Default: all.",
        None,
        needs=TRANSFER_WEIGHTS,
    )
    layer_patience: int | None = option(
        "Stop the attention transfer of a layer after this many log lines in a row without a lower error.",
        None,
        bounds=COUNT,
        needs=TRANSFER_WEIGHTS,
        on_resume=OnResume.WARNED,
    )
    embedding_weight: float | None = option(
        "Weight of 1 - cosine similarity of the mean-pooled embeddings.",
        None,
        bounds=NOT_NEGATIVE,
        needs=TEACHER,
        tasks=(*TEXT_TASKS, "image_embedding"),
        off=0,
        on_resume=OnResume.WARNED,
    )
    window_dropout: str | None = option(
        "Probability with which a batch is computed without the windows of `hybrid` layers, so that their linear part "
        "is trained to be used. Several values, such as 0.9,0.75,0.5, apply to equal parts of the run in turn.",
        None,
        on_resume=OnResume.WARNED,
    )
    hidden_state_layers: Literal["last", "all"] = option(
        "Layers whose hidden states are compared.", "last", needs=("hidden_state_weight",), on_resume=OnResume.WARNED
    )
    temperature: float = option(
        "Temperature of both distributions in logits_kl_weight, whose value is multiplied by the temperature squared.",
        1.0,
        bounds=POSITIVE,
        needs=("logits_kl_weight",),
        on_resume=OnResume.WARNED,
    )
    disable_dropout: bool | None = option(
        "Train without dropout; default: yes if a teacher is imitated.", None, on_resume=OnResume.WARNED
    )
    cache_teacher: str | None = option(
        "Keep the outputs of the teacher in this folder, and read them where a text is trained on again: in a later "
        "epoch, stage or run. Attention transfer computes them anyway, and only writes them.",
        None,
        needs=("teacher_name_or_path", *TRANSFER_WEIGHTS),
        tasks=CACHED,
        is_path=True,
        on_resume=OnResume.WARNED,
    )
