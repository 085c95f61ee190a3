"""Metrics against scikit-learn and scipy, and figures of a run against the metric computed from outside."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from training.metrics import Classification, Spearman


@pytest.mark.parametrize("classes", [2, 5])
def test_classification_is_scikit_learns(classes: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(classes)
    truth, guess = random.integers(0, classes, (2, 97)).tolist()
    figures = Classification(keep_in_memory=True).compute(predictions=guess, references=truth)
    average = "binary" if classes == 2 else "macro"
    assert figures["f1"] == pytest.approx(sklearn.f1_score(truth, guess, average=average), abs=1e-12)
    assert figures["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, guess), abs=1e-12)
    nothing = Classification(keep_in_memory=True).compute(predictions=[0, 0], references=[1, 1])
    assert nothing == {"accuracy": 0.0, "f1": 0.0, "samples": 2}


def test_spearman_is_scipys_with_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(0)
    mine, yours = random.integers(0, 9, 50).astype(float).tolist(), random.normal(size=50).tolist()
    figures = Spearman(keep_in_memory=True).compute(predictions=mine, references=yours)
    assert figures["spearman"] == pytest.approx(stats.spearmanr(mine, yours).statistic, abs=1e-12)
    constant = Spearman(keep_in_memory=True).compute(predictions=[1.0, 1.0], references=[1.0, 2.0])
    assert np.isnan(constant["spearman"])


@torch.no_grad()
def test_pairs_of_an_embedding_model_are_scored(
    finetune, bert: str, bert_teacher: str, texts: list[str], tmp_path: Path
) -> None:
    stats = pytest.importorskip("scipy.stats")
    scores = [3, 0.5, 4, 1, 2]
    rows = [{"text": texts[i], "other": texts[-1 - i], "label": score} for i, score in enumerate(scores)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = ["--teacher_name_or_path", bert_teacher, "--text_pair_column_name", "other"]
    data = ["--validation_file", tmp_path / "pairs.jsonl", "--max_length", 64, "--per_device_eval_batch_size", 3]
    (figures,) = finetune("--model_name_or_path", bert, "--task", "embedding", *options, *data)
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)

    def embedded(text: str) -> torch.Tensor:
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=False)
        return model(**inputs).last_hidden_state[0].mean(0)

    cosines = [torch.cosine_similarity(embedded(row["text"]), embedded(row["other"]), dim=0) for row in rows]
    assert figures["eval_spearman"] == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-12)
    assert figures["eval_samples"] == 10
