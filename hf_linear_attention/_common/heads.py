"""The purpose of each model head, by class name: its Auto class, its pipeline and its fine-tuning task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """The Auto class, the pipeline tag and the fine-tuning task of a model head.

    `recipe` is the YAML file in training/configs that trains such a model after conversion, or None if there is none.
    """

    auto_class: str
    pipeline_tag: str
    task: str | None = None
    recipe: str | None = None


# The keys are endings of class names; the first match wins.
HEADS = {
    "ForCausalLM": Head("AutoModelForCausalLM", "text-generation", "causal_lm", "distil_causal_lm.yaml"),
    "LMHeadModel": Head("AutoModelForCausalLM", "text-generation", "causal_lm", "distil_causal_lm.yaml"),
    "ForMaskedLM": Head("AutoModelForMaskedLM", "fill-mask", "masked_lm", "distil_masked_lm.yaml"),
    "ForSequenceClassification": Head(
        "AutoModelForSequenceClassification", "text-classification", "sequence_classification", "distil_classifier.yaml"
    ),
    "ForTokenClassification": Head("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": Head("AutoModelForQuestionAnswering", "question-answering"),
    "ForMultipleChoice": Head("AutoModelForMultipleChoice", "multiple-choice"),
    "ForImageClassification": Head(
        "AutoModelForImageClassification",
        "image-classification",
        "image_classification",
        "distil_image_classifier.yaml",
    ),
    "ForMaskedImageModeling": Head("AutoModelForMaskedImageModeling", "image-feature-extraction"),
    "WhisperForConditionalGeneration": Head("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    "Speech2TextForConditionalGeneration": Head("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
    "ForConditionalGeneration": Head("AutoModelForSeq2SeqLM", "text-generation"),
    "ForCTC": Head("AutoModelForCTC", "automatic-speech-recognition"),
    "ForNextSentencePrediction": Head("AutoModelForNextSentencePrediction", "text-classification"),
    "ForPreTraining": Head("AutoModelForPreTraining", "fill-mask"),
}
TEXT_BASE = Head("AutoModel", "feature-extraction", "embedding", "distil_embedding.yaml")
VISION_BASE = Head("AutoModel", "image-feature-extraction")


def head_of(class_name: str, is_vision: bool = False) -> Head:
    """The head of a stock or converted class; a model without a head counts as an encoder for embeddings."""
    for ending, head in HEADS.items():
        if class_name.endswith(ending):
            return head
    return VISION_BASE if is_vision else TEXT_BASE
