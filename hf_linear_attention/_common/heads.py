"""The purpose of each model head, by class name: its Auto class, its pipeline and its fine-tuning task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


Inputs = Literal["text", "images", "sound"]


# What a task is trained on, if that is not TEXT.jsonl; a name for the file of a user.
DATA = {"seq2seq_lm": "PAIRS.jsonl", "image_classification": "IMAGES.jsonl", "image_embedding": "IMAGES.jsonl"}
SHORT_NAMES = {"sequence_classification": "classifier", "image_classification": "image_classifier"}


@dataclass(frozen=True)
class Head:
    """The Auto class, the pipeline tag and the fine-tuning task of a model head; `inputs` are what the task reads."""

    auto_class: str
    pipeline_tag: str
    task: str | None = None
    inputs: Inputs = "text"

    @property
    def recipe(self) -> str | None:
        """The YAML file in training/configs that trains such a model after conversion, or None if there is none."""
        return None if self.task is None else f"distil_{SHORT_NAMES.get(self.task, self.task)}.yaml"

    @property
    def data(self) -> str:
        """A name for the file that such a model is trained on."""
        return DATA.get(self.task or "", "TEXT.jsonl")


CAUSAL = Head("AutoModelForCausalLM", "text-generation", "causal_lm")
SPEECH = Head("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition", inputs="sound")
CLASSIFIER = Head("AutoModelForSequenceClassification", "text-classification", "sequence_classification")
IMAGES = Head("AutoModelForImageClassification", "image-classification", "image_classification", "images")

# The keys are endings of class names; the first match wins.
HEADS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": Head("AutoModelForMaskedLM", "fill-mask", "masked_lm"),
    "ForSequenceClassification": CLASSIFIER,
    "ForTokenClassification": Head("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": Head("AutoModelForQuestionAnswering", "question-answering"),
    "ForMultipleChoice": Head("AutoModelForMultipleChoice", "multiple-choice"),
    "ForImageClassification": IMAGES,
    "ForMaskedImageModeling": Head("AutoModelForMaskedImageModeling", "image-feature-extraction"),
    "WhisperForConditionalGeneration": SPEECH,
    "Speech2TextForConditionalGeneration": SPEECH,
    "MoonshineForConditionalGeneration": SPEECH,
    "ForConditionalGeneration": Head("AutoModelForSeq2SeqLM", "text2text-generation", "seq2seq_lm"),
    "MTModel": Head("AutoModelForSeq2SeqLM", "translation", "seq2seq_lm"),
    "ForCTC": Head("AutoModelForCTC", "automatic-speech-recognition", inputs="sound"),
    "ForNextSentencePrediction": Head("AutoModelForNextSentencePrediction", "text-classification"),
    "ForPreTraining": Head("AutoModelForPreTraining", "fill-mask"),
}
BASES: dict[Inputs, Head] = {
    "text": Head("AutoModel", "feature-extraction", "embedding"),
    "images": Head("AutoModel", "image-feature-extraction", "image_embedding", "images"),
    "sound": Head("AutoModel", "feature-extraction", inputs="sound"),
}


def head_of(class_name: str, inputs: Inputs = "text", is_encoder_decoder: bool = False) -> Head:
    """The head of a stock or converted class; an encoder without a head counts as one for embeddings.

    A head that is trained on other inputs than those of the model, or an unknown one, has no task.
    """
    found = next((head for ending, head in HEADS.items() if class_name.endswith(ending)), BASES[inputs])
    is_unknown = found is BASES[inputs] and (is_encoder_decoder or re.search("For[A-Z]", class_name) is not None)
    is_mistaken = found.task == "seq2seq_lm" and not is_encoder_decoder
    if found.inputs != inputs or is_unknown or is_mistaken:
        return replace(found, task=None)
    return found


def is_without_head(config: Mapping[str, Any]) -> bool:
    """Whether the model whose config.json has this content has no head, as that of a sentence embedding has none."""
    name = (config.get("architectures") or [""])[0]
    return not name.endswith(tuple(HEADS)) and re.search("For[A-Z]", name) is None


def head_of_config(config: Mapping[str, Any]) -> Head:
    """The head of the model whose config.json has this content."""
    is_sound = "conv_kernel" in config or "num_mel_bins" in config or "input_feat_per_channel" in config
    inputs: Inputs = "images" if "patch_size" in config else "sound" if is_sound else "text"
    return head_of((config.get("architectures") or [""])[0], inputs, bool(config.get("is_encoder_decoder")))
