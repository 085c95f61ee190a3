"""Metrics against scikit-learn and scipy, and figures of a run against the metric computed from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention.training.evaluation.metrics import Classification, Spearman
from hf_linear_attention.training.tracking import read_metrics


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


def write_pairs(texts: list[str], path: Path) -> list[dict[str, object]]:
    """Five pairs of texts, each with a score."""
    scores = [3, 0.5, 4, 1, 2]
    rows = [{"text": texts[i], "other": texts[-1 - i], "label": score} for i, score in enumerate(scores)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


@pytest.mark.parametrize(("task", "ranks"), [("causal_lm", 2), ("sequence_classification", 2), ("embedding", 3)])
def test_figures_are_the_same_on_several_processes(
    task: str, ranks: int, finetune, request: pytest.FixtureRequest, files: Path, tmp_path: Path, dataset_cache: Path
) -> None:
    """Bit by bit: 21 texts on 2 processes and 10 on 3, so that a sampler would have to repeat some.

    One text a batch, because texts that are padded together with others are rounded differently.
    """
    name = {"causal_lm": "llama", "sequence_classification": "named_classifier", "embedding": "bert"}[task]
    data = files / ("valid.tsv" if task == "sequence_classification" else "valid.jsonl")
    teacher: list[Any] = []
    if task == "embedding":
        data = tmp_path / "pairs.jsonl"
        write_pairs(request.getfixturevalue("texts"), data)
        teacher = [
            "--teacher_name_or_path",
            request.getfixturevalue("bert_teacher"),
            "--text_pair_column_name",
            "other",
        ]
    options = ["--model_name_or_path", request.getfixturevalue(name), "--task", task, *teacher]
    options += ["--validation_file", data, "--max_length", 64, "--per_device_eval_batch_size", 1]
    (one,) = finetune(*options)
    words = [*options, "--output_dir", tmp_path / "several"]
    run = processes.start(processes.finetune, dataset_cache, words, ranks=ranks, stderr=tmp_path / "stderr")
    assert processes.finish(run) == [0] * ranks, (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    assert read_metrics(tmp_path / "several" / "metrics.jsonl") == [one]
    figures = {"causal_lm": {"perplexity"}, "sequence_classification": {"accuracy", "f1"}, "embedding": {"spearman"}}
    assert {f"eval_{figure}" for figure in figures[task]} <= one.keys()
    assert one.get("eval_samples", 21) == {"embedding": 10}.get(task, 21)


@torch.no_grad()
def test_pairs_of_an_embedding_model_are_scored(
    finetune, bert: str, bert_teacher: str, texts: list[str], tmp_path: Path
) -> None:
    stats = pytest.importorskip("scipy.stats")
    rows = write_pairs(texts, tmp_path / "pairs.jsonl")
    options = ["--teacher_name_or_path", bert_teacher, "--text_pair_column_name", "other"]
    data = ["--validation_file", tmp_path / "pairs.jsonl", "--max_length", 64, "--per_device_eval_batch_size", 3]
    (figures,) = finetune("--model_name_or_path", bert, "--task", "embedding", *options, *data)
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)

    def embedded(text: str) -> torch.Tensor:
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt", return_token_type_ids=False)
        return model(**inputs).last_hidden_state[0].mean(0)

    cosines = [torch.cosine_similarity(embedded(row["text"]), embedded(row["other"]), dim=0) for row in rows]
    assert figures["eval_spearman"] == pytest.approx(
        stats.spearmanr(cosines, [row["label"] for row in rows]).statistic, abs=1e-12
    )
    assert figures["eval_samples"] == 10
