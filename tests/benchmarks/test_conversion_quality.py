"""conversion_quality.py on tiny models of random weights: both tasks, recipes with options, no run made twice."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState
from checkpoints import save_twin


@pytest.fixture
def benchmark(monkeypatch, tmp_path_factory):
    """The module; its data sets' cache is not the user's."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    from benchmarks import conversion_quality

    return conversion_quality


def run(benchmark, folder: Path, *words: object) -> dict:
    words = (*words, "--quick", "--output_dir", folder / "out", "--work_dir", folder / "work")
    benchmark.main([str(word) for word in words])
    assert (folder / "out" / "conversion_quality.png").stat().st_size > 5_000
    return json.loads((folder / "out" / "conversion_quality.json").read_text())["recipes"]


@pytest.fixture
def files(tmp_path) -> Path:
    texts = [topics[name] for name in sorted(topics)[:30]]
    lines = "".join(json.dumps({"text": " ".join(text.split()[:60])}) + "\n" for text in texts)
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "valid.txt").write_text(texts[0])
    words = texts[1].split()
    rows = [(" ".join(words[at : at + 6]), " ".join(words[at + at % 4 : at + 6]), at % 4) for at in range(0, 60, 5)]
    table = "".join(f"{first}\t{second}\t{score}\n" for first, second, score in rows)
    (tmp_path / "pairs.tsv").write_text(f"sentence1\tsentence2\tscore\n{table}")
    return tmp_path


def test_language_models(benchmark, files, tmp_path, capsys):
    save_twin(tmp_path / "llama", "llama")
    data = ["--teacher", tmp_path / "llama", "--train_file", files / "train.jsonl"]
    data += ["--validation_file", files / "valid.txt", "--settings", "window_size=4", "num_features=8"]
    found = run(benchmark, tmp_path, *data, "--recipes", "default")
    assert found["default"]["settings"]["window_size"] == 4
    assert {"gap", "gap_closed", "linear_share", "agreement", "kl", "state_bytes", "minutes"} <= set(
        found["default"]["runs"][0]
    )
    assert found["default"]["curves"][0][0][0] == 0
    figures, kept = found["default"]["runs"][0], tmp_path / "work"
    assert {"same_bytes", "healed"} <= set(figures)
    assert figures["control"]["state_bytes"] <= figures["state_bytes"]
    assert len(list((kept / "controls").iterdir())) == 2  # one window, converted and healed
    made = {
        path: path.stat().st_mtime_ns for name in ("nats", "controls") for path in (kept / name).rglob("*.[ps][ta]*")
    }
    assert len(made) > 4
    before = (tmp_path / "work" / "llama-default-2000-0" / "model.safetensors").stat().st_mtime_ns
    again = run(benchmark, tmp_path, *data, "--recipes", "default")
    assert again["default"]["runs"] == found["default"]["runs"]
    assert (tmp_path / "work" / "llama-default-2000-0" / "model.safetensors").stat().st_mtime_ns == before
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert "window of the same bytes" in capsys.readouterr().out


def test_embedding_models(benchmark, files, tmp_path, capsys):
    save_twin(tmp_path / "bert", "bert", "AutoModel")
    data = ["--task", "embedding", "--teacher", tmp_path / "bert", "--train_file", files / "train.jsonl"]
    recipe = "nystrom:preset=default,mechanism=nystrom,num_landmarks=4"
    found = run(benchmark, tmp_path, *data, "--validation_file", files / "pairs.tsv", "--recipes", recipe)
    assert found["nystrom"]["settings"]["num_landmarks"] == 4
    (figures,) = found["nystrom"]["runs"]
    assert -1 <= figures["untrained"]["cosine_min"] < figures["cosine"] <= 1.001
    assert figures["cosine"] != figures["untrained"]["cosine"]
    assert figures["spearman_teacher"] == figures["untrained"]["spearman_teacher"]
    assert "nystrom, untrained" in capsys.readouterr().out


def test_an_option_of_a_stage_that_is_none_is_refused(benchmark):
    recipe = benchmark.parse_recipe("hot:preset=default,anneal.learning_rate=1e-3", {})
    with pytest.raises(ValueError, match="has the stages transfer, distil"):
        benchmark.preset_of(recipe)
    recipe = benchmark.parse_recipe("cold:preset=default,distil.learning_rate=0.001,distil.share=0.5", {})
    (stage,) = [stage for stage in benchmark.preset_of(recipe).stages["causal_lm"] if stage.name == "distil"]
    assert (stage.options["learning_rate"], stage.share) == (0.001, 0.5)
