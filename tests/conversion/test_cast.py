"""`--dtype` by files: bit for bit what a cast in memory gives, without the memory."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from architectures import tiny_model
from checkpoints import files, run, save_twin
from safetensors.torch import load_file

from hf_linear_attention.conversion import source as source_module
from hf_linear_attention.conversion.options import parse
from hf_linear_attention.conversion.pipeline import load_converted, prepare


BY_FILES = 1000  # bytes; what of a tiny model is larger goes through files


def convert_twice(source: Path, folder: Path, monkeypatch, *words: object) -> list[dict[str, torch.Tensor]]:
    """The weights that a conversion writes without accelerate, cast in memory and by files; all else is the same."""
    written = []
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    for name, size in (("memory", sys.maxsize), ("files", BY_FILES)):
        monkeypatch.setattr(source_module, "FILE_BYTES", size)
        code, _, err = run("--model_name_or_path", source, "--output_dir", folder / name, *words)
        assert code == 0, err
        written.append(load_file(folder / name / "model.safetensors"))
    assert files(folder / "memory") == files(folder / "files")
    for name in ("config.json", "generation_config.json"):
        texts = [(folder / kind / name).read_bytes() for kind in ("memory", "files") if (folder / kind / name).exists()]
        assert len(set(texts)) <= 1
    return written


def assert_identical(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("before", "after", "attention"), [("bfloat16", "float32", "linear"), ("float32", "bfloat16", "performer")]
)
def test_a_cast_by_files_writes_what_a_cast_in_memory_writes(before, after, attention, tmp_path, monkeypatch):
    """From shards, with a tie and a generation config; the new tensors are drawn in the dtype that is asked for."""
    save = {"max_shard_size": "10KB"}
    save_twin(tmp_path / "source", "llama", dtype=getattr(torch, before), save=save, tie_word_embeddings=True)
    transformers.GenerationConfig(max_new_tokens=7, pad_token_id=0).save_pretrained(tmp_path / "source")
    words = ("--attention", attention, "--dtype", after)
    in_memory, by_files = convert_twice(tmp_path / "source", tmp_path, monkeypatch, *words)
    assert_identical(by_files, in_memory)
    assert {tensor.dtype for tensor in by_files.values()} == {getattr(torch, after)}
    assert json.loads((tmp_path / "files" / "generation_config.json").read_text())["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("model_type", "auto_class", "after", "kept"),
    [
        ("deepseek_v3", "AutoModelForCausalLM", "bfloat16", "e_score_correction_bias"),  # and merges its experts
        ("t5", "AutoModelForSeq2SeqLM", "float16", "wo.weight"),
    ],
)
def test_what_the_model_keeps_in_float32_loses_no_bit(model_type, auto_class, after, kept, tmp_path, monkeypatch):
    changes = {"first_k_dense_replace": 1} if model_type == "deepseek_v3" else {}
    tiny_model(model_type, auto_class, **changes).save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").unlink()
    words = ("--dtype", after, "--no_verify", *(["--drop", "position_bias"] if model_type == "t5" else []))
    in_memory, by_files = convert_twice(tmp_path / "source", tmp_path, monkeypatch, *words)
    assert_identical(by_files, in_memory)
    wide = {name for name, tensor in by_files.items() if tensor.dtype == torch.float32}
    found = {name for name in by_files if name.endswith(kept)}
    assert found
    # transformers keeps the gates of DeepSeek's experts too since 5.24
    assert found <= wide <= found | {name for name in by_files if name.endswith("mlp.gate.weight")}


def test_files_that_do_not_have_the_dtype_of_their_configuration(tmp_path, monkeypatch):
    """Without `--dtype`, a checkpoint gets the dtype that its config.json names."""
    source = tmp_path / "source"
    save_twin(source, "bert")
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(json.dumps(json.loads(text) | {"dtype": "float16"}))
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    in_memory, by_files = convert_twice(source, tmp_path, monkeypatch, "--allow_pickle")
    assert_identical(by_files, in_memory)
    assert {tensor.dtype for tensor in by_files.values()} == {torch.float16}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the memory map of the process")
def test_weights_that_were_cast_are_pages_of_files(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "FILE_BYTES", BY_FILES)
    conversion = prepare(
        parse(["--model_name_or_path", str(llama), "--output_dir", str(tmp_path / "out"), "--dtype", "bfloat16"])
    )
    model = load_converted(conversion, tmp_path)
    assert not list(tmp_path.iterdir())
    maps = re.findall(rf"^(\w+)-(\w+) .*{re.escape(str(tmp_path))}/", Path("/proc/self/maps").read_text(), re.MULTILINE)
    spans = [range(int(start, 16), int(end, 16)) for start, end in maps]
    outside = {
        name for name, tensor in model.state_dict().items() if not any(tensor.data_ptr() in span for span in spans)
    }
    assert outside == {tensor.target for tensor in conversion.plan.new}
