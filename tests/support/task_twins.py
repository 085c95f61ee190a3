"""For tasks whose data is not plain text: a tiny random original, and files of training and validation rows.

`TWINS` has one entry for each such task; each writes the original into `original` of a folder, and the rows into
train.jsonl and valid.jsonl, which have 24 and 9.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import save_twin
from PIL import Image
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)


RATE = 16000  # samples per second
TAGS = ("O", "B-LONG", "I-LONG")


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _save(folder: Path, model_class: type[PreTrainedModel], config: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(1)
    model_class(config).save_pretrained(folder / "original")
    tokenizer.save_pretrained(folder / "original")


def bert_config(**options: Any) -> BertConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(
        vocab_size=300, max_position_embeddings=128, initializer_range=0.2, **sizes, **no_dropout, **options
    )


def token_classification(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    names = dict(enumerate(TAGS))
    config = bert_config(id2label=names, label2id={name: index for index, name in names.items()})
    _save(folder, BertForTokenClassification, config, tokenizer)
    for split, part in (("train", texts[:24]), ("valid", texts[24:33])):
        words = [text.split()[:12] for text in part]
        rows = [{"tokens": row, "ner_tags": ["B-LONG" if len(word) > 5 else "O" for word in row]} for row in words]
        _write(folder / f"{split}.jsonl", rows)


def seq2seq_lm(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A T5 that begins to write with <s>, and longer and shorter targets than sources."""
    config = T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        initializer_factor=1.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    _save(folder, T5ForConditionalGeneration, config, tokenizer)
    for split, part in (("train", texts[:24]), ("valid", texts[24:33])):
        rows = [{"source": text[:60], "target": text[: 20 + 5 * (n % 9)][::-1]} for n, text in enumerate(part)]
        _write(folder / f"{split}.jsonl", rows)


def question_answering(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Contexts of several parts at 64 tokens; the answer is a word, or in every fifth row nothing."""
    _save(folder, BertForQuestionAnswering, bert_config(), tokenizer)
    for split, part in (("train", texts[:24]), ("valid", texts[24:33])):
        rows = []
        for number, text in enumerate(part):
            context = " ".join(text.split())[:150]
            word = context.split()[number % 4]
            answer = {"text": [word], "answer_start": [context.index(word)]}
            none: dict[str, list[Any]] = {"text": [], "answer_start": []}
            rows.append(
                {"question": text[:20] + "?", "context": context, "answers": none if number % 5 == 4 else answer}
            )
        _write(folder / f"{split}.jsonl", rows)


def image_embedding(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A ViT without a head, and images without labels."""
    save_twin(folder / "original", "vit", "AutoModel", initializer_range=0.3)
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("valid", 9)):
        for number in range(count):
            pixels = random.integers(0, 255, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{split}-{number}.png")
        _write(folder / f"{split}.jsonl", [{"image": f"{split}-{number}.png"} for number in range(count)])


def _tones(folder: Path, letters: str) -> None:
    """Recordings of two or three tones, each with its letter: 16-bit .wav files of 0.12 s for each tone."""
    random = np.random.default_rng(0)
    for split, count in (("train", 24), ("valid", 9)):
        rows = []
        for number in range(count):
            chosen = random.integers(len(letters), size=2 + number % 2)
            time = np.arange(1920) / RATE
            sound = np.concatenate([np.sin(2 * np.pi * 300 * (1 + place) * time) for place in chosen])
            with wave.open(str(folder / f"{split}-{number}.wav"), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))
                file.writeframes((20000 * sound + random.normal(0, 500, sound.shape)).astype("<i2").tobytes())
            text = "".join(letters[place] for place in chosen)
            rows.append({"audio": f"{split}-{number}.wav", "text": text})
        _write(folder / f"{split}.jsonl", rows)


def speech_seq2seq(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A Whisper with a window of one second."""
    _tones(folder, "abc")
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *(chr(code) for code in range(33, 127))])}
    words = WhisperTokenizer(vocab=vocabulary, merges=[], bos_token=special[1], pad_token=special[0])
    words.add_special_tokens({"additional_special_tokens": special[1:]})
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "init_std": 0.3}
    ids = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    lengths = {"max_source_positions": 50, "max_target_positions": 32, "vocab_size": 100, "encoder_layerdrop": 0.5}
    config = WhisperConfig(**sizes, **heads, **ids, **lengths, apply_spec_augment=True, begin_suppress_tokens=None)
    torch.manual_seed(1)
    WhisperForConditionalGeneration(config).save_pretrained(folder / "original")
    WhisperProcessor(feature_extractor=extractor, tokenizer=words).save_pretrained(folder / "original")


def ctc(folder: Path, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """A wav2vec 2.0 that is trained with SpecAugment and layerdrop, and a head for letters; 49 frames a second."""
    _tones(folder, "abc")
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    words = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sound = {"conv_dim": (16,) * 7, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True}
    more = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2, "layerdrop": 0.5}
    config = Wav2Vec2Config(vocab_size=len(vocabulary), initializer_range=0.3, **sizes, **sound, **more)
    torch.manual_seed(1)
    Wav2Vec2ForCTC(config).save_pretrained(folder / "original")
    Wav2Vec2Processor(feature_extractor=extractor, tokenizer=words).save_pretrained(folder / "original")


TWINS: dict[str, Callable[[Path, list[str], PreTrainedTokenizerFast], None]] = {
    "seq2seq_lm": seq2seq_lm,
    "image_embedding": image_embedding,
    "question_answering": question_answering,
    "token_classification": token_classification,
    "speech_seq2seq": speech_seq2seq,
    "ctc": ctc,
}
