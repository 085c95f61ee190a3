"""Scores against their formulas, without the libraries that compute some, and on several processes."""

from __future__ import annotations

import math
import sys

import processes
import pytest
import torch
from runs import write_lines
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.calibration_data import check_pairs_file
from hf_linear_attention.training.evaluation.scores import Classification, Spearman, TokenLoss, scored
from hf_linear_attention.training.tasks import PACKAGES, can_score
from hf_linear_attention.training.tracking import read_metrics


def test_scores_are_their_formulas():
    found = scored(Classification, [0, 1, 1, 1], [1, 1, 0, 1])
    assert found == {"accuracy": 0.5, "f1": pytest.approx(2 / 3), "samples": 4}
    three = scored(Classification, [0, 1, 2, 2], [0, 1, 1, 2])  # F1 of the classes: 1, 2/3 and 2/3
    assert three["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert scored(Classification, [0, 0], [1, 1])["f1"] == 0
    assert scored(Spearman, [1.0, 2.0, 3.0, 3.0], [1.0, 3.0, 2.0, 2.0])["spearman"] == pytest.approx(1 / 3)
    assert math.isnan(scored(Spearman, [1.0, 1.0], [1.0, 2.0])["spearman"])
    assert scored(TokenLoss, [2.0, 4.0], [1, 2]) == {"nats_per_token": 2, "perplexity": math.exp(2), "tokens": 3}


@pytest.fixture
def no_libraries(monkeypatch):
    """As if only the extra `train` were installed."""
    can_score.cache_clear()
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    yield
    can_score.cache_clear()


@pytest.mark.usefixtures("no_libraries")
def test_without_the_libraries_the_other_figures_remain(finetune, named_classifier, files, caplog):
    options = ["--task", "sequence_classification", "--model_name_or_path", named_classifier]
    (figures,) = finetune(*options, "--validation_file", files / "valid.tsv", "--max_length", 64)
    assert "eval_accuracy" in figures
    assert "eval_f1" not in figures
    assert len([text for text in caplog.messages if "hf-linear-attention[eval]" in text]) == 1


@pytest.mark.usefixtures("no_libraries")
def test_scored_pairs_are_refused_without_their_library(tmp_path):
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n", encoding="utf-8")
    with pytest.raises(UsageError, match="`--pairs_file` needs scipy; install it"):
        check_pairs_file(str(tmp_path / "pairs.tsv"))


@pytest.mark.long
def test_figures_are_the_same_on_several_processes(finetune, named_classifier, files, tmp_path, dataset_cache):
    """Bit by bit: 21 texts on 2 processes, so that a sampler would have to repeat one.

    One text a batch, because texts that are padded together with others are rounded differently.
    """
    options = ["--model_name_or_path", named_classifier, "--task", "sequence_classification"]
    options += ["--validation_file", files / "valid.tsv", "--max_length", 64, "--per_device_eval_batch_size", 1]
    (one,) = finetune(*options)
    words = [*options, "--output_dir", tmp_path / "several"]
    run = processes.start(processes.finetune, dataset_cache, words, ranks=2, stderr=tmp_path / "stderr")
    assert processes.finish(run) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    assert read_metrics(tmp_path / "several" / "metrics.jsonl") == [one]
    assert {"eval_accuracy", "eval_f1"} <= one.keys()
    assert one["eval_samples"] == 21


@torch.no_grad()
def test_pairs_of_an_embedding_model_are_scored(finetune, bert, bert_teacher, texts, tmp_path):
    stats = pytest.importorskip("scipy.stats")
    scores = [3, 0.5, 4, 1, 2]
    rows = [{"text": texts[i], "other": texts[-1 - i], "label": score} for i, score in enumerate(scores)]
    write_lines(tmp_path / "pairs.jsonl", rows)
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
