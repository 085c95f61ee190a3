"""`--max_position_embeddings`: a checkpoint that reads longer inputs, with every file that limits them."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import convert_folder, evaluate, run, save_twin, tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer, DistilBertModel

from hf_linear_attention import convert


LIMITS = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}


@pytest.fixture(scope="module")
def embedding(tmp_path_factory):
    """A sentence-transformers model of 64 positions, whose tokenizer cuts texts after 48 tokens by itself."""
    folder = tmp_path_factory.mktemp("sources") / "embedding"
    save_twin(folder, "bert", "AutoModel")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(48)
    tokenizer.save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "1_Pooling").mkdir()
    contents = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": 48, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16")])
def test_a_longer_checkpoint(embedding, tmp_path, options):
    out = tmp_path / "out"
    report = convert_folder(embedding, out, "--max_position_embeddings", 150, *options)
    assert report["figures"]["positions"].startswith("64 -> 150 tokens, ")
    assert {read(out / file)[field] for file, field in LIMITS.items()} == {150}
    assert read(out / "tokenizer.json")["truncation"]["max_length"] == 150
    assert AutoTokenizer.from_pretrained(out).model_max_length == 150
    model = AutoModel.from_pretrained(out)
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.full((1, 150), 7)).last_hidden_state).all()
    expected = convert(embedding, max_position_embeddings=150)
    name = "embeddings.position_embeddings.weight"
    assert torch.equal(load_file(out / "model.safetensors")[name], expected.state_dict()[name].to(model.dtype))


def test_a_conversion_without_the_option_changes_no_limit(embedding, tmp_path):
    out = tmp_path / "out"
    convert_folder(embedding, out, "--no_verify")
    assert {read(out / file)[field] for file, field in LIMITS.items()} == {48}


def test_sinusoids_of_a_checkpoint_go_on(tmp_path):
    stock = save_twin(tmp_path / "source", "distilbert", "AutoModel", sinusoidal_pos_embds=True)
    convert_folder(tmp_path / "source", tmp_path / "out", "--max_position_embeddings", 150)
    stock.config.max_position_embeddings = 150
    expected = DistilBertModel(stock.config).embeddings.position_embeddings.weight
    model = AutoModel.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(model.embeddings.position_embeddings.weight, expected)


def test_a_checkpoint_that_was_damaged_on_the_way_is_noticed(embedding, tmp_path, monkeypatch):
    from hf_linear_attention.conversion import pipeline

    monkeypatch.setattr(pipeline, "_extend_tables", lambda *_: None)  # leaves the table as it was initialised
    arguments = ("--model_name_or_path", embedding, "--output_dir", tmp_path / "out", "--max_position_embeddings", 150)
    code, _, error = run(*arguments)
    assert code == 1
    assert "1 tensors of the source have changed, the first is `embeddings.position_embeddings.weight`" in error


@pytest.mark.parametrize(("length", "texts"), [("4096", "2"), ("1024", "8"), ("600", "13")])
def test_a_preset_trains_at_the_new_length(embedding, tmp_path, length, texts):
    """Attention transfer stays where its softmax teacher has positions; batches have as many tokens as before."""
    (tmp_path / "train.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    words = ("--model_name_or_path", embedding, "--preset", "default", "--train_file", tmp_path / "train.txt")
    words = (*words, "--attention", "hybrid")  # which has parameters to train in attention transfer
    code, text, error = run(*words, "--max_position_embeddings", length, "--tokens", "250k", "--dry_run")
    assert code == 0, error
    stages = [line for line in text.splitlines() if line.startswith("  stage ")]
    assert [line.partition("max_length=")[2].split(",")[0] for line in stages] == ["64", length]
    assert [line.partition("train_batch_size=")[2].split(",")[0] for line in stages] == ["16", texts]
    assert all("min_train_steps=24" in line for line in stages)
    plain = run(*words, "--dry_run")[1]
    assert "max_length" not in plain


@pytest.mark.parametrize(("words", "is_equal"), [(10, True), (120, False)])
def test_an_evaluation_reads_the_whole_new_length(embedding, tmp_path, words, is_equal):
    """No layer is converted, so texts of the original's length are embedded alike, and longer ones by its windows."""
    texts = [" ".join(f"{letter}{n % 7}" for n in range(words)) for letter in "abc"]
    (tmp_path / "held_out.txt").write_text("\n\n".join(texts), encoding="utf-8")
    where = ("--model_name_or_path", embedding, "--output_dir", tmp_path / "out")
    code, _, error = run(*where, "--max_position_embeddings", 150, "--layers", "none", "--no_verify")
    assert code == 0, error
    code, _, error = evaluate(*where, "--validation_file", tmp_path / "held_out.txt")
    assert code == 0, error
    quality = read(tmp_path / "out" / "conversion_report.json")["quality"]
    assert quality["max_length"] == 150
    assert (quality["cosine_min"] > 1 - 1e-5) == is_equal
