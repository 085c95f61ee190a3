"""What comes out: the same weights, the same outputs where nothing was converted, every kind of checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from architectures import tiny_model
from checkpoints import convert_folder, files, run, save_twin, tiny_tokenizer
from matrix import sample_inputs
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_linear_attention.conversion.source import open_source


def test_layers_none_is_bit_identical(tmp_path):
    save_twin(tmp_path / "source", "gpt2", dtype=torch.bfloat16)
    report = convert_folder(tmp_path / "source", tmp_path / "out", "--layers", "none")
    source, result = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "out"))
    assert type(result).__name__ == "LinearGPT2LMHeadModel"
    inputs = sample_inputs("gpt2")
    inputs["attention_mask"] = torch.tensor([[1] * 13, [1] * 9 + [0] * 4])
    with torch.no_grad():
        expected, actual = (model(**inputs, output_hidden_states=True) for model in (source, result))
    assert torch.equal(expected.logits, actual.logits)
    assert all(map(torch.equal, expected.hidden_states, actual.hidden_states))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("source", "out")]
    assert weights[0].keys() == weights[1].keys()
    assert report["checks"]["student_against_teacher"]["hidden_state_error"] == 0.0
    tokens = [model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in (source, result)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("family", "auto_class"),
    [
        ("bert", "AutoModelForMultipleChoice"),
        ("bert", "AutoModelForPreTraining"),
        ("vit", "AutoModelForImageClassification"),
        ("llama", "AutoModel"),
        ("phi3", "AutoModelForCausalLM"),
    ],
)
def test_a_checkpoint_of_any_head_keeps_its_head_and_every_base_tensor(family, auto_class, tmp_path):
    save_twin(tmp_path / "source", family, auto_class)
    report = convert_folder(tmp_path / "source", tmp_path / "out", "--attention", "performer", "--num_features", 16)
    stock = getattr(transformers, auto_class).from_pretrained(tmp_path / "source")
    result = getattr(transformers, auto_class).from_pretrained(tmp_path / "out")
    assert type(result).__name__ == f"Linear{type(stock).__name__}" == report["linear_class"]
    base, ours = stock.state_dict(), result.state_dict()
    assert all(torch.equal(base[name], ours[name]) for name in base)
    compared = report["checks"]["tensors"]
    assert compared["equal"] == compared["compared"] == len(open_source(str(tmp_path / "source")).tensors)
    figures = report["checks"]["student_against_teacher"]
    assert 0.01 < figures["hidden_state_error"] < 10
    assert ("logits_error" in figures) == (auto_class != "AutoModel")
    assert figures.get("padding_difference", 0.0) < 1e-4
    if family == "vit":
        processors = (transformers.AutoImageProcessor.from_pretrained(tmp_path / name) for name in ("source", "out"))
        pixels = [processor(np.full((3, 20, 20), 90, np.uint8))["pixel_values"][0] for processor in processors]
        assert np.array_equal(*pixels)
        assert pixels[1].shape == (3, 12, 12)


def test_shards_ties_and_half_precision(tmp_path):
    source, out, cast = (tmp_path / part for part in ("source", "out", "cast"))
    save = {"max_shard_size": "10KB"}
    stock = save_twin(source, "llama", dtype=torch.bfloat16, save=save, tie_word_embeddings=True)
    convert_folder(source, out, "--num_features", 16)
    result = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert result.dtype == torch.bfloat16
    assert result.lm_head.weight is result.model.embed_tokens.weight
    assert "lm_head.weight" not in open_source(str(out)).tensors
    assert {info.dtype for info in open_source(str(out)).tensors.values()} == {"bfloat16"}
    assert all(torch.equal(tensor, result.state_dict()[key]) for key, tensor in stock.state_dict().items())
    convert_folder(source, cast, "--num_features", 16, "--dtype", "float32")
    assert {info.dtype for info in open_source(str(cast)).tensors.values()} == {"float32"}
    wide = transformers.AutoModelForCausalLM.from_pretrained(cast).state_dict()
    assert all(torch.equal(tensor.float(), wide[key]) for key, tensor in stock.state_dict().items())
    assert json.loads((cast / "config.json").read_text())["dtype"] == "float32"


def test_a_cast_keeps_in_float32_what_the_model_keeps_there(tmp_path):
    tiny_model("t5", "AutoModelForSeq2SeqLM").save_pretrained(tmp_path / "source")
    words = ("--dtype", "float16", "--drop", "position_bias", "--no_verify")
    convert_folder(tmp_path / "source", tmp_path / "out", "--attention", "linear", *words)
    found = {name: info.dtype for name, info in open_source(str(tmp_path / "out")).tensors.items()}
    assert {*found.values()} == {"float16", "float32"}
    assert {name for name in found if found[name] == "float32"} == {
        name for name in found if name.endswith("wo.weight")
    }


def test_pickled_weights_only_when_allowed(tmp_path):
    source = tmp_path / "source"
    stock = save_twin(source, "gpt2")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    code, _, err = run("--model_name_or_path", source, "--output_dir", tmp_path / "out")
    assert code == 2
    assert "only as pickles (pytorch_model.bin); give `--allow_pickle`" in err
    convert_folder(source, tmp_path / "out", "--allow_pickle", "--num_features", 16)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    result = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, result[key]) for key, tensor in stock.state_dict().items())


def test_tokenizer_and_generation_config_move_along(tmp_path):
    source = tmp_path / "source"
    save_twin(source, "llama")
    transformers.GenerationConfig(max_new_tokens=7, eos_token_id=[1, 2], pad_token_id=0).save_pretrained(source)
    convert_folder(source, tmp_path / "out", "--no_verify")
    moved = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = ["an unusual text, with <mask> and 123", "x " * 100]
    assert moved(text).input_ids == tiny_tokenizer()(text).input_ids
    assert moved.model_max_length == 48
    assert [len(ids) for ids in moved(text, truncation=True).input_ids][1] == 48
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.max_new_tokens, config.eos_token_id) == (7, [1, 2])


def test_a_tokenizer_that_cannot_be_loaded_is_copied(tmp_path):
    source = tmp_path / "source"
    save_twin(source, "llama")
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchTokenizer"}))
    (source / "tokenizer.json").unlink()
    (source / "spiece.model").write_bytes(b"for a library that is not installed here")
    convert_folder(source, tmp_path / "out")
    for name in ("spiece.model", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_a_nested_sentence_transformer_becomes_a_flat_one(tmp_path):
    source = tmp_path / "source"
    save_twin(source / "0_Transformer", "bert", "AutoModel")
    (source / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}'
    )
    kinds = (("0_Transformer", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    (source / "config_sentence_transformers.json").write_text('{"prompts": {"query": "search_query: "}}')
    report = convert_folder(source, tmp_path / "out", "--window_size", 4)
    moved = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["path"] for module in moved] == ["", "1_Pooling"]
    assert {"sentence_bert_config.json", "1_Pooling/config.json", "config.json"} <= set(files(tmp_path / "out"))
    assert report["card_metadata"] == {"license": "mit"}
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), trust_remote_code=True, device="cpu")
    assert model.max_seq_length == 32
    assert model.prompts["query"] == "search_query: "
    text = ["a sentence", "and another, longer one"]
    hidden = transformers.AutoModel.from_pretrained(tmp_path / "out")
    tokens = tiny_tokenizer()(text[:1], return_tensors="pt")
    with torch.no_grad():
        expected = hidden(input_ids=tokens.input_ids).last_hidden_state.mean(1)
    torch.testing.assert_close(torch.from_numpy(model.encode(text))[:1], expected, rtol=1e-4, atol=1e-4)
    modules[1]["path"] = "../elsewhere"
    (source / "modules.json").write_text(json.dumps(modules))
    assert run("--model_name_or_path", source, "--dry_run")[0] == 2
