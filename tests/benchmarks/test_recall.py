"""recall.py: the documents of its tasks, the sizes of its forms, and a quick run that is not made twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path_factory):
    """The data sets' cache is not the user's."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def tasks():
    from benchmarks import recall_tasks

    return recall_tasks


@pytest.fixture
def benchmark():
    from benchmarks import recall

    return recall


def documents(tasks, task: str, length: int) -> tuple[list[list[str]], torch.Tensor]:
    tokens, counts = tasks.TASKS[task](20, length, torch.Generator().manual_seed(0))
    assert tokens.shape == counts.shape == (20, length)
    return [[tasks.WORDS[token] for token in document] for document in tokens.tolist()], counts


@pytest.mark.parametrize("length", [9, 33, 129, 1025])
def test_mqar(tasks, length):
    """Pairs of different keys, then the same pairs in another order; the values of the second half count."""
    pairs = (length - 1) // 4
    words, counts = documents(tasks, "mqar", length)
    assert counts[0].nonzero().flatten().tolist() == list(range(2 * pairs + 2, length, 2))
    for document in words:
        assert document[0] == "BOS"
        stored = list(zip(document[1 : 2 * pairs + 1 : 2], document[2 : 2 * pairs + 1 : 2]))
        asked = list(zip(document[2 * pairs + 1 :: 2], document[2 * pairs + 2 :: 2]))
        assert len(dict(stored)) == pairs == len(asked)
        assert sorted(stored) == sorted(asked)
        assert all(key[0] == "k" and value[0] == "v" for key, value in stored)
    assert any(document[1] != document[2 * pairs + 1] for document in words)


@pytest.mark.parametrize(("length", "copied"), [(9, 2), (33, 10), (129, 24), (1025, 24)])
def test_copying(tasks, length, copied):
    """The symbols after the last GO, which are different, are those after the first; the gap has all lengths."""
    words, counts = documents(tasks, "copying", length)
    gaps = set()
    for document in words:
        first = document.index("GO")
        symbols = document[-copied:]
        assert document[-copied - 1] == "GO"
        assert document[first + 1 : first + 1 + copied] == symbols
        assert len(set(symbols)) == copied
        others = document[1:first] + document[first + 1 + copied : -copied - 1]
        assert all(word[0] == "n" for word in others)
        gaps.add(length - copied - 1 - (first + 1 + copied))
    assert min(gaps) >= 0
    assert len(gaps) > 1
    assert counts[0].nonzero().flatten().tolist() == list(range(length - copied, length))


@pytest.mark.parametrize("length", [9, 129, 1025])
def test_needle(tasks, length):
    words, counts = documents(tasks, "needle", length)
    for document in words:
        key, value = document[-2:]
        place = document.index(key)
        assert document[place + 1] == value
        assert place < length - 3
        assert [word[0] for word in document].count("n") == length - 5
    assert counts[0].nonzero().flatten().tolist() == [length - 1]


def test_files_give_the_tokens_back(tasks, tmp_path):
    """Blocks of joined documents are the documents, because all of them have the same length."""
    tasks.write_documents(tmp_path / "rows.jsonl", "mqar", 33, 100, seed=3)
    expected, _ = tasks.TASKS["mqar"](4, 33, torch.Generator().manual_seed(3))
    texts = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tokenizer = tasks.tokenizer()
    found = [[tokenizer.bos_token_id, *ids] for ids in tokenizer(texts)["input_ids"]]
    assert found == expected.tolist()


def test_accuracy_counts_the_answers_alone(tasks):
    tokens, counts = tasks.mqar(6, 33, torch.Generator().manual_seed(0))

    class Oracle(torch.nn.Module):
        """It is right about answers, except in the first `wrong` documents, and wrong about all other tokens."""

        wrong, seen = 0, 0

        def forward(self, inputs, use_cache):
            chosen = slice(self.seen, self.seen + len(inputs))
            right = counts[chosen, 1:] & (torch.arange(6)[chosen, None] >= self.wrong)
            self.seen += len(inputs)
            found = torch.where(right, tokens[chosen, 1:], (tokens[chosen, 1:] + 1) % len(tasks.WORDS))
            return SimpleNamespace(logits=torch.nn.functional.one_hot(found, len(tasks.WORDS)).float())

    model = Oracle()
    assert tasks.accuracy(model, (tokens, counts)) == 1
    model.wrong, model.seen = 3, 0
    assert tasks.accuracy(model, (tokens, counts), tokens_at_once=70) == 0.5


def test_a_teacher_learns(tasks, monkeypatch):
    """From chance (1 of 64 values) to more than a third of the answers of two pairs, in seconds."""
    monkeypatch.setattr(tasks, "STEP_TOKENS", 1152)
    torch.manual_seed(0)
    model = tasks.new_teacher(9, 64, 2, 2)
    documents = tasks.mqar(200, 9, torch.Generator().manual_seed(1))
    before = tasks.accuracy(model, documents)
    facts = tasks.train_teacher(model, "mqar", 0, most_steps=150)
    assert before < 0.1
    assert tasks.accuracy(model, documents) > 1 / 3  # to copy any value that was stored gives half
    assert facts["steps"] <= 150


def test_curriculum(tasks):
    assert tasks.curriculum(129) == [9, 17, 33, 65, 129]
    assert tasks.curriculum(100) == [9, 17, 33, 65, 100]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_form_uses_the_bytes(benchmark, tasks, share):
    """At most the budget, and the next size would exceed it; the bytes are those of the state that decoding keeps."""
    teacher = tasks.new_teacher(129, 64, 2, 2)
    assert benchmark.cache_bytes(teacher) == 2 * 2 * 64 * 129 * 4  # layers, keys and values, width, tokens, float32
    budget = int(share * benchmark.cache_bytes(teacher))
    available = {name: form for name, form in benchmark.FORMS.items() if form.is_available}
    assert len(available) >= 7
    for name, form in available.items():
        settings = benchmark.sized(teacher, form, budget)
        least = 0 if form.size is None else 0.95 * budget
        assert least < benchmark.bytes_of(teacher, settings) <= budget, name
        if form.settings and form.size is not None:
            larger = {**settings, form.size: settings[form.size] + 2}
            assert benchmark.bytes_of(teacher, larger) > budget, name


def test_a_budget_that_is_too_small(benchmark, tasks):
    teacher = tasks.new_teacher(129, 64, 2, 2)
    assert benchmark.sized(teacher, benchmark.FORMS["linear exp"], 100) is None


def test_quick(benchmark, tmp_path, capsys):
    forms = ["window", "linear exp", "preset default"]
    words = ["--quick", "--tasks", "mqar", "needle", "--forms", *forms]
    words += ["--output_dir", str(tmp_path / "out"), "--work_dir", str(tmp_path / "work")]
    benchmark.main(words)
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "out" / "recall.json").read_text())
    assert result["benchmark"] == "recall"
    for content in result["tasks"].values():
        assert [row["form"] for row in content["rows"]] == forms
        for row in content["rows"]:
            assert 0 < row["state_bytes"] <= 0.5 * content["cache_bytes"]
            assert all(0 <= value <= 1 for value in [*row["healed"], *(row["untrained"] or ())])
            assert len(row["healed"]) == 2
    printed = capsys.readouterr().out
    assert "window, untrained" in printed
    assert "mqar: the teacher itself cannot recall" in printed
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert len([path for path in made if path.name == "model.safetensors"]) > 2 * len(forms)
    benchmark.main(words)
    again = json.loads((tmp_path / "out" / "recall.json").read_text())
    for task, content in again["tasks"].items():
        assert [row["healed"] for row in content["rows"]] == [row["healed"] for row in result["tasks"][task]["rows"]]
    assert {path: path.stat().st_mtime_ns for path in made} == made


def test_healing_changes_the_student(benchmark, tmp_path):
    """The converted and the healed checkpoint have different weights, the mechanism's and the base model's."""
    from safetensors.torch import load_file

    words = ["--quick", "--tasks", "mqar", "--forms", "linear exp", "--work_dir", str(tmp_path / "work")]
    benchmark.main([*words, "--output_dir", str(tmp_path / "out")])
    folders = sorted((tmp_path / "work" / "mqar-33x32x2x2-0").glob("linear-*"), key=lambda path: len(path.name))
    converted, healed = (load_file(folder / "model.safetensors") for folder in folders)
    for part in ("linear_attention", "q_proj"):
        assert any(not torch.equal(converted[name], healed[name]) for name in converted if part in name)


def test_conclusion(benchmark):
    def content(teacher: float, **found: float) -> dict:
        rows = [{"form": form, "share": 0.5, "healed": [value]} for form, value in found.items()]
        return {"teachers": [{"accuracy": [teacher]}], "rows": rows}

    figures = {"forms": ["a", "b"], "tasks": {"mqar": content(1.0, a=0.96, b=0.94), "needle": content(0.5, a=0.5, b=0)}}
    assert benchmark.conclusion(figures).splitlines()[1:] == ["mqar: a", "needle: the teacher itself cannot recall"]
    figures["tasks"] = {"mqar": content(1.0, a=0.9, b=0.94)}
    assert benchmark.conclusion(figures).splitlines()[1:] == ["mqar: none"]
