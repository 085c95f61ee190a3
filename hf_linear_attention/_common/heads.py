"""The purpose of each model head, by class name: its Auto class, its pipeline and its fine-tuning task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


Inputs = Literal["text", "images", "sound"]


@dataclass(frozen=True)
class Head:
    """The Auto class, the pipeline tag and the fine-tuning task of a model head.

    `recipe` is the YAML file in training/configs that trains such a model after conversion, or None if there is none,
    and `data` a name for the file that it is trained on. `inputs` are what the recipe reads.
    """

    auto_class: str
    pipeline_tag: str
    task: str | None = None
    recipe: str | None = None
    data: str = "TEXT.jsonl"
    inputs: Inputs = "text"


CAUSAL = Head("AutoModelForCausalLM", "text-generation", "causal_lm", "distil_causal_lm.yaml")
SPEECH = Head(
    "AutoModelForSpeechSeq2Seq",
    "automatic-speech-recognition",
    "speech_seq2seq",
    "distil_speech_seq2seq.yaml",
    "RECORDINGS.jsonl",
    "sound",
)

# The keys are endings of class names; the first match wins.
HEADS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": Head("AutoModelForMaskedLM", "fill-mask", "masked_lm", "distil_masked_lm.yaml"),
    "ForSequenceClassification": Head(
        "AutoModelForSequenceClassification", "text-classification", "sequence_classification", "distil_classifier.yaml"
    ),
    "ForTokenClassification": Head(
        "AutoModelForTokenClassification",
        "token-classification",
        "token_classification",
        "distil_token_classification.yaml",
        "WORDS.jsonl",
    ),
    "ForQuestionAnswering": Head(
        "AutoModelForQuestionAnswering",
        "question-answering",
        "question_answering",
        "distil_question_answering.yaml",
        "QUESTIONS.jsonl",
    ),
    "ForMultipleChoice": Head("AutoModelForMultipleChoice", "multiple-choice"),
    "ForImageClassification": Head(
        "AutoModelForImageClassification",
        "image-classification",
        "image_classification",
        "distil_image_classifier.yaml",
        "IMAGES.jsonl",
        "images",
    ),
    "ForMaskedImageModeling": Head("AutoModelForMaskedImageModeling", "image-feature-extraction"),
    "WhisperForConditionalGeneration": SPEECH,
    "Speech2TextForConditionalGeneration": SPEECH,
    "MoonshineForConditionalGeneration": SPEECH,
    "ForConditionalGeneration": Head(
        "AutoModelForSeq2SeqLM", "text2text-generation", "seq2seq_lm", "distil_seq2seq_lm.yaml", "PAIRS.jsonl"
    ),
    "MTModel": Head("AutoModelForSeq2SeqLM", "translation", "seq2seq_lm", "distil_seq2seq_lm.yaml", "PAIRS.jsonl"),
    "ForCTC": replace(SPEECH, auto_class="AutoModelForCTC", task="ctc", recipe="distil_ctc.yaml"),
    "ForNextSentencePrediction": Head("AutoModelForNextSentencePrediction", "text-classification"),
    "ForPreTraining": Head("AutoModelForPreTraining", "fill-mask"),
}
BASES: dict[Inputs, Head] = {
    "text": Head("AutoModel", "feature-extraction", "embedding", "distil_embedding.yaml"),
    "images": Head(
        "AutoModel",
        "image-feature-extraction",
        "image_embedding",
        "distil_image_embedding.yaml",
        "IMAGES.jsonl",
        "images",
    ),
    "sound": Head("AutoModel", "feature-extraction", inputs="sound"),
}

# The tasks that heal the architectures of `tested_architectures.py`, by kind; the head of a model decides among them.
HEALED_AS = {
    "decoders": ("causal_lm", "sequence_classification", "token_classification", "question_answering"),
    "encoders": (
        "masked_lm", "embedding", "sequence_classification", "token_classification", "question_answering",
    ),
    "vision": ("image_classification", "image_embedding"),
    "audio": ("ctc",),
    "encoder-decoders": ("seq2seq_lm", "speech_seq2seq"),
}  # fmt: skip


def head_of(class_name: str, inputs: Inputs = "text", is_encoder_decoder: bool = False) -> Head:
    """The head of a stock or converted class; an encoder without a head counts as one for embeddings.

    A head that is trained on other inputs than those of the model, or an unknown one, has no task.
    """
    found = next((head for ending, head in HEADS.items() if class_name.endswith(ending)), BASES[inputs])
    inputs = "sound" if found.inputs == "sound" else inputs  # these heads have no other inputs
    is_unknown = found is BASES[inputs] and (is_encoder_decoder or re.search("For[A-Z]", class_name) is not None)
    is_mistaken = found.task == "seq2seq_lm" and not is_encoder_decoder
    if found.inputs != inputs or is_unknown or is_mistaken:
        return replace(found, task=None, recipe=None)
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
