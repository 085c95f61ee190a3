"""Converted encoders in vLLM: embeddings and classes are those of transformers, in batches of any lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from conftest import SIZES, engine, prompts, save_tokenizer

from hf_linear_attention import convert


MECHANISMS = {
    "hybrid": {"mechanism": "hybrid", "window_size": 8, "num_sinks": 1},
    "linear": {"mechanism": "linear"},
    "softmax layers": {"mechanism": "hybrid", "window_size": 8, "layers": [0, 2]},
}


def save(folder: Path, auto_class: type, mechanism: str) -> Path:
    sizes = SIZES | {"intermediate_size": 96, "num_attention_heads": 2, "max_position_embeddings": 258}
    torch.manual_seed(0)
    model = auto_class.from_config(transformers.RobertaConfig(**sizes, num_labels=3, pad_token_id=0))
    convert(model, **MECHANISMS[mechanism]).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_embeddings(tmp_path, mechanism):
    folder, texts = save(tmp_path, transformers.AutoModel, mechanism), prompts(24)
    # vLLM changes the class of the model that it runs; this one has the same weights below a head that is not used.
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval().base_model
    with engine(folder, runner="pooling", convert="embed", max_model_len=256, skip_tokenizer_init=False) as llm:
        found = llm.embed([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
    for text, output in zip(texts, found):
        with torch.no_grad():
            hidden = model(torch.tensor([text])).last_hidden_state[0, 0]
        wanted = torch.nn.functional.normalize(hidden, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, atol=1e-5, rtol=0)


def test_classes(tmp_path):
    folder, texts = save(tmp_path, transformers.AutoModelForSequenceClassification, "hybrid"), prompts(24)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with engine(folder, runner="pooling", convert="classify", max_model_len=256, skip_tokenizer_init=False) as llm:
        found = llm.classify([{"prompt_token_ids": text} for text in texts], use_tqdm=False)
    for text, output in zip(texts, found):
        with torch.no_grad():
            wanted = model(torch.tensor([text])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), wanted, atol=1e-5, rtol=0)
