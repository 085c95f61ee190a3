"""The plan: complete, right, and made without reading a weight."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from checkpoints import convert_folder, files, run, save_twin
from matrix import FAMILY_ROWS

from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.plan import make_plan
from hf_linear_attention.conversion.result_text import describe
from hf_linear_attention.conversion.source import Source, open_source


LINEAR = {"mechanism": "linear", "num_features": 16}


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_the_plan_is_what_the_conversion_does(family, tmp_path):
    stock = save_twin(tmp_path / "source", family)
    source = open_source(str(tmp_path / "source"))
    plan = make_plan(source, {**LINEAR, "layers": [0, 2]})
    model = convert(stock, **LINEAR, layers=[0, 2])
    names = set(model.state_dict())
    assert {t.target for t in plan.mapped} | {t.target for t in plan.new} | {t.target for t in plan.tied} == names
    assert {t.source for t in plan.mapped} == set(source.tensors)
    assert plan.dropped == plan.new_base == []
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert all(shapes[t.target] == t.shape for t in (*plan.mapped, *plan.new, *plan.tied))
    assert [(layer.layer, layer.linear_class[:6]) for layer in plan.layers] == [(0, "Linear"), (2, "Linear")]
    assert plan.weights["total"] == sum(
        tensor.numel() for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values()
    )


def test_state_bytes_are_those_of_the_dtype_of_the_checkpoint(tmp_path):
    sizes = []
    for dtype in (torch.float32, torch.bfloat16):
        save_twin(tmp_path / str(dtype), "llama", dtype=dtype)
        window = {"mechanism": "window", "window_size": 4}  # whose keys and values are kept as they are
        sizes.append(make_plan(open_source(str(tmp_path / str(dtype))), window).layers[0].state_bytes)
    assert sizes[1] < sizes[0]


def test_the_plan_compares_the_state_with_caches(tmp_path):
    """In bytes: of 1,024 tokens, of 8,192 and of the trained length."""
    stock = save_twin(tmp_path / "source", "llama", max_position_embeddings=4096)
    source = open_source(str(tmp_path / "source"))
    plan, config = make_plan(source, {"mechanism": "hybrid", "state_tokens": 128}), stock.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    text = describe(plan, source)
    assert (
        f"{plan.state_bytes:,} in all, per sequence of any length (the size of a key-value cache of 127 tokens" in text
    )
    for length in (1024, 4096, 8192):
        share, size = plan.state_bytes / (per_token * length), per_token * length / 1e6
        assert f"{share:.2g} times that of {length:,} ({size:.3g} MB)" in text


def test_dry_run_reads_no_tensor_and_writes_nothing(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(Source, "read", None)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    before = files(llama)
    code, out, _ = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--dry_run")
    assert code == 0
    assert not list(tmp_path.iterdir())
    assert files(llama) == before
    assert out.endswith("Nothing was written (--dry_run).\n")


def test_unexpected_and_sharded_tensors(tmp_path):
    folder = tmp_path / "source"
    save_twin(folder, "gpt2", save={"max_shard_size": "20KB"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    extra = {"transformer.h.9.mlp.stray": torch.zeros(2, 3)}
    safetensors.torch.save_file(extra, folder / "extra.safetensors", metadata={"format": "pt"})
    index["weight_map"]["transformer.h.9.mlp.stray"] = "extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = make_plan(open_source(str(folder)), LINEAR)
    assert [(t.source, t.target, t.shape) for t in plan.dropped] == [("transformer.h.9.mlp.stray", None, (2, 3))]
    assert len(plan.mapped) == len(index["weight_map"]) - 1
    assert [t.target for t in plan.tied] == ["lm_head.weight"]
    report = convert_folder(folder, tmp_path / "out", "--num_features", 16)
    assert [t["source"] for t in report["tensors"]["dropped"]] == ["transformer.h.9.mlp.stray"]
    (folder / "extra.safetensors").unlink()
    code, _, err = run("--model_name_or_path", folder, "--output_dir", tmp_path / "again")
    assert code == 2
    assert "extra.safetensors, which is missing" in err


def test_what_a_linear_layer_cannot_keep_is_listed(tmp_path):
    save_twin(tmp_path / "mistral", "mistral", sliding_window=8)
    with pytest.raises(UsageError, match=r"sees the nearest 8 tokens only, in layers 0, 1, 2.*`--drop sliding_window`"):
        make_plan(open_source(str(tmp_path / "mistral")), LINEAR)
    plan = make_plan(open_source(str(tmp_path / "mistral")), {**LINEAR, "drop": ["sliding_window"]})
    assert plan.dropped_features == ["sliding_window: MistralAttention sees the nearest 8 tokens only"]
    assert make_plan(open_source(str(tmp_path / "mistral")), {"layers": "none"}).dropped_features == []
    save_twin(tmp_path / "without", "mistral", sliding_window=None)  # as the later versions: one setting for all
    code, _, err = run("--model_name_or_path", tmp_path / "without", "--dry_run", "--drop", "sliding_window")
    assert code == 0
    assert "no converted layer has the feature `sliding_window`, so `--drop` leaves nothing out" in err
    save_twin(tmp_path / "bert", "bert", attention_probs_dropout_prob=0.25)
    features = make_plan(open_source(str(tmp_path / "bert")), LINEAR).dropped_features
    assert features == ["attention dropout of 0.25 (in training only)"]
    code, out, _ = run("--model_name_or_path", tmp_path / "mistral", "--dry_run", "--drop", "sliding_window")
    assert code == 0
    assert "sees the nearest 8 tokens only" in out
