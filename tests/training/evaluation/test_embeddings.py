"""Retrieval by embeddings: its figures, its files, and the prompts, pooling and dimensions of sentence-transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import write_lines
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention._common.errors import DataError, UsageError
from hf_linear_attention.training.data.processors import load_processor
from hf_linear_attention.training.data.sentence_files import sentence_files
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.evaluation.embeddings import (
    compare_embeddings,
    read_retrieval,
    retrieval_figures,
    retrieval_test,
)
from hf_linear_attention.training.losses.outputs import pooled
from hf_linear_attention.training.recipe_parser import parse_options


PROMPTS = {"prompts": {"query": "ask: ", "passage": "tell: ", "topic": "sort: "}, "default_prompt_name": "topic"}
ROWS = [
    {"query": "The import statement", "document": "How modules are found and loaded."},
    {"query": "A loop", "document": "while and for repeat their suites."},
    {"query": "A loop", "document": "for takes the items of an iterable."},
    {"query": None, "document": "A class has a namespace of its own."},
    {"query": "Another question", "document": "How modules are found and loaded."},
]


@pytest.fixture(scope="module")
def model(bert_teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder with prompts, which pools the first token, and 32 dimensions."""
    folder = tmp_path_factory.mktemp("sentence") / "model"
    shutil.copytree(bert_teacher, folder)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    modules += [{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS), encoding="utf-8")
    return folder


def test_figures_are_those_of_their_definition() -> None:
    """Four documents on the axes; the scores of a query are its own coordinates."""
    queries = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4], [0, 0, 0, 0]])
    relevant = [{0}, {0, 2}, {3}]  # ranks: 1; 4 and 2; and 4, because of equal scores the first document is nearer
    found = retrieval_figures(queries, torch.eye(4), relevant)
    gain = [1 / math.log2(1 + rank) for rank in range(5) if rank]
    ndcg = (1 + (gain[1] + gain[3]) / (gain[0] + gain[1]) + gain[3]) / 3
    assert found == pytest.approx({"recall_at_1": 1 / 3, "recall_at_10": 1, "ndcg_at_10": ndcg})
    many = torch.eye(20)
    assert retrieval_figures(many[:1] + 2 * many[5:6], many, [{19}]) == dict.fromkeys(found, 0.0)  # it has rank 20


def test_a_file_has_queries_and_other_documents(tmp_path: Path) -> None:
    found = read_retrieval(str(write_lines(tmp_path / "rows.jsonl", ROWS)))
    assert found.queries == ["The import statement", "A loop", "Another question"]
    assert len(found.documents) == 4
    assert found.relevant == [{0}, {1, 2}, {0}]
    (tmp_path / "rows.tsv").write_text("query\tdocument\na\tb\n\tc\n", encoding="utf-8")
    assert read_retrieval(str(tmp_path / "rows.tsv")).documents == ["b", "c"]
    for row, what in (({"query": "a", "document": " "}, "`document` is empty"), (ROWS[3], "has no query")):
        with pytest.raises(DataError, match=what):
            read_retrieval(str(write_lines(tmp_path / "bad.jsonl", [row])))


def recipe_of(model: Path, folder: Path, *options: Any) -> Any:
    file = write_lines(folder / "rows.jsonl", ROWS)
    texts = write_lines(folder / "texts.jsonl", [{"text": row["document"]} for row in ROWS])
    words = ["--task", "embedding", "--model_name_or_path", model, "--teacher_name_or_path", model, "--output_dir", "o"]
    return parse_options(
        [str(word) for word in (*words, "--validation_file", texts, "--retrieval_file", file, *options)]
    )


def test_prompts_stand_before_the_texts(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def texts_of(*options: Any) -> tuple[list[str], list[str]]:
        recipe = recipe_of(model, tmp_path, *options)
        processor = load_processor(recipe)
        parts = load_data(recipe, processor).validation, retrieval_test(recipe, processor).examples
        return tuple([tokenizer.decode(part[n]["input_ids"]) for n in range(len(part))] for part in parts)

    texts, retrieval = texts_of()
    assert all(text.startswith("sort: ") for text in texts)
    assert [text.split(": ")[0] for text in retrieval] == ["ask"] * 3 + ["tell"] * 4
    texts, retrieval = texts_of("--prompt_name", "passage", "--query_prompt_name", "topic")
    assert all(text.startswith("tell: ") for text in texts)
    assert [text.split(": ")[0] for text in retrieval] == ["sort"] * 3 + ["tell"] * 4
    with pytest.raises(UsageError, match=r"`--document_prompt_name x`: .* it has passage, query, topic"):
        texts_of("--document_prompt_name", "x")


def test_an_evaluation_has_the_figures_of_both_models(model: Path, bert: str, finetune: Any, tmp_path: Path) -> None:
    """Against embeddings that are computed one by one, without padding."""
    options = recipe_of(model, tmp_path, "--matryoshka_dims", "16,8").flat()
    names = ("task", "teacher_name_or_path", "validation_file", "retrieval_file", "matryoshka_dims")
    student = tmp_path / "student"
    shutil.copytree(model, student)
    shutil.copy(Path(bert) / "model.safetensors", student)
    words = [f"--{name}={options[name]}" for name in names]
    (event,) = finetune(*words, f"--model_name_or_path={student}")
    tokenizer, found = AutoTokenizer.from_pretrained(model), read_retrieval(options["retrieval_file"])

    @torch.no_grad()
    def embed(folder: Path, texts: list[str]) -> torch.Tensor:
        network = AutoModel.from_pretrained(folder).eval()
        rows = [network(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in texts]
        return torch.stack(rows)

    for folder, name in ((student, "eval_{}"), (model, "eval_{}_teacher")):
        queries = embed(folder, [f"ask: {text}" for text in found.queries])
        documents = embed(folder, [f"tell: {text}" for text in found.documents])
        expected = retrieval_figures(queries, documents, found.relevant)
        assert {key: event[name.format(key)] for key in expected} == pytest.approx(expected)
    texts = ["sort: " + row["document"] for row in ROWS]
    mine, yours = embed(student, texts), embed(model, texts)
    for cut, name in ((32, "eval_cosine"), (16, "eval_cosine_dim_16"), (8, "eval_cosine_dim_8")):
        assert event[name] == pytest.approx(F.cosine_similarity(mine[:, :cut], yours[:, :cut]).mean().item(), rel=1e-4)
    assert {"eval_recall_at_1_dim_8", "eval_ndcg_at_10_teacher_dim_16"} <= {*event}


def test_the_loss_averages_over_the_dimensions(model: Path, finetune: Any, tmp_path: Path) -> None:
    options = {**recipe_of(model, tmp_path).flat(), "train_file": tmp_path / "texts.jsonl"}
    names = ("task", "model_name_or_path", "teacher_name_or_path", "train_file", "validation_file", "prompt_name")
    words = [f"--{name}={options[name]}" for name in names if options[name]]
    words += ["--embedding_weight=1", "--hidden_state_weight=0", "--max_train_steps=1", "--logging_steps=1"]
    student = tmp_path / "student"
    shutil.copytree(model, student)
    torch.manual_seed(3)
    network = AutoModel.from_pretrained(student)
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    network.save_pretrained(student)
    words += [f"--model_name_or_path={student}", "--matryoshka_dims=8", "--per_device_train_batch_size=5"]
    events = finetune(*words)
    whole, cut = events[0]["eval_cosine"], events[0]["eval_cosine_dim_8"]
    loss = next(event["embedding"] for event in events if "embedding" in event)
    assert loss == pytest.approx(1 - (whole + cut) / 2, rel=1e-4)
    assert abs(whole - cut) > 1e-4


def test_dimensions_are_those_of_the_config_or_refused(model: Path, tmp_path: Path) -> None:
    def dims_of(source: Path, *options: Any) -> str | None:
        recipe = recipe_of(source, tmp_path, *options)
        load_data(recipe, load_processor(recipe))
        return recipe.task_options.matryoshka_dims

    assert dims_of(model) is None
    with pytest.raises(UsageError, match="embeddings have 32 dimensions"):
        dims_of(model, "--matryoshka_dims", "16,32")
    named = tmp_path / "named"
    shutil.copytree(model, named)
    config = json.loads((named / "config.json").read_text(encoding="utf-8"))
    (named / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16, 32]}), encoding="utf-8")
    assert dims_of(named) == "8,16"
    modules = json.loads((named / "modules.json").read_text(encoding="utf-8"))
    modules.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (named / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(UsageError, match="changes embeddings after their pooling"):
        dims_of(named, "--matryoshka_dims", "16")


def test_poolings_are_those_of_sentence_transformers(model: Path) -> None:
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
    assert sentence_files(str(model)).pooling == "cls"
    path = model / "1_Pooling" / "config.json"
    before = path.read_text(encoding="utf-8")
    for text, name in (('{"pooling_mode": "max"}', "max"), ('{"pooling_mode_mean_tokens": true}', "mean")):
        path.write_text(text, encoding="utf-8")
        assert sentence_files(str(model)).pooling == name
    path.write_text('{"pooling_mode": ["max", "mean"]}', encoding="utf-8")
    with pytest.raises(UsageError, match="pools by max, mean"):
        sentence_files(str(model))
    path.write_text(before, encoding="utf-8")


def test_neighbours() -> None:
    """Texts 0 and 1 are nearest to each other for both; 2 and 3 change partners."""
    yours = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), dim=-1)
    mine = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.6, 1.0], [-1.0, 1.0]]), dim=-1)
    assert compare_embeddings(yours, yours) == pytest.approx({"cosine": 1, "cosine_min": 1, "same_neighbour": 1})
    assert compare_embeddings(mine, yours)["same_neighbour"] == 0.75
