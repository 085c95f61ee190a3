"""Embeddings: their figures and their loss, pooled as the files of sentence-transformers say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from runs import write_lines
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.training.data.pooling import pooling_of
from hf_linear_attention.training.losses.outputs import pooled


TEXTS = [
    "How modules are found and loaded.",
    "while and for repeat their suites.",
    "for takes the items of an iterable.",
]


@pytest.fixture(scope="module")
def model(bert_teacher, tmp_path_factory):
    """A sentence-transformers folder that pools the first token."""
    folder = tmp_path_factory.mktemp("sentence") / "model"
    shutil.copytree(bert_teacher, folder)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    modules += [{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    return folder


@torch.no_grad()
def test_figures_and_loss_are_those_of_texts_one_by_one(model, bert, finetune, tmp_path):
    """Without padding; the model pools the first token, and so does the training."""
    file, student = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]), tmp_path / "student"
    shutil.copytree(model, student)
    shutil.copy(Path(bert) / "model.safetensors", student)
    words = ["--task", "embedding", "--model_name_or_path", student, "--teacher_name_or_path", model]
    words += ["--train_file", file, "--validation_file", file, "--hidden_state_weight", 0, "--embedding_weight", 1]
    with torch.enable_grad():
        events = finetune(*words, "--max_train_steps", 1, "--logging_steps", 1, "--per_device_train_batch_size", 3)
    tokenizer, embeddings = AutoTokenizer.from_pretrained(model), []
    for folder in (student, model):
        network = AutoModel.from_pretrained(folder).eval()
        rows = [network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in TEXTS]
        embeddings.append(torch.stack(rows))
    cosines = F.cosine_similarity(*embeddings)
    assert events[0]["eval_cosine"] == pytest.approx(cosines.mean().item(), rel=1e-4)
    assert events[0]["eval_cosine_min"] == pytest.approx(cosines.min().item(), rel=1e-4)
    loss = next(event["embedding"] for event in events if "embedding" in event)
    assert loss == pytest.approx(1 - cosines.mean().item(), rel=1e-4)


def test_poolings_are_those_of_sentence_transformers(model):
    hidden, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    texts = hidden[0], hidden[1, :3]
    expected = {
        "mean": [text.mean(0) for text in texts],
        "max": [text.max(0).values for text in texts],
        "cls": [text[0] for text in texts],
        "lasttoken": [text[-1] for text in texts],
    }
    for name, rows in expected.items():
        torch.testing.assert_close(pooled(hidden, mask, name), torch.stack(rows))
    assert pooling_of(str(model)) == "cls"
    path = model / "1_Pooling" / "config.json"
    before = path.read_text(encoding="utf-8")
    for text, name in (('{"pooling_mode": "max"}', "max"), ('{"pooling_mode_mean_tokens": true}', "mean")):
        path.write_text(text, encoding="utf-8")
        assert pooling_of(str(model)) == name
    path.write_text('{"pooling_mode": ["max", "mean"]}', encoding="utf-8")
    with pytest.raises(UsageError, match="pools by max, mean"):
        pooling_of(str(model))
    path.write_text(before, encoding="utf-8")
