"""The configs of real families as they are on the hub: each converts and loads anywhere, or is refused at once."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from architectures import inputs_of
from checkpoints import run, tiny_tokenizer
from hub_configs import HUB_CONFIGS, shrunk
from safetensors.torch import save_file

from hf_linear_attention import softmax_attention
from hf_linear_attention.kernels import cpu as kernels_cpu


CONVERTED = {name: row for name, row in HUB_CONFIGS.items() if row.drop or row.options or not row.refused}
REFUSED = {name: row for name, row in HUB_CONFIGS.items() if row.refused}
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "WhisperForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "ForImageClassification": "AutoModelForImageClassification",
}
# Shorter than the inputs, so that the far keys count.
SETTINGS = ("--window_size", 4)


def auto_class_of(fields: dict) -> str:
    architecture = fields.get("architectures", [""])[0]
    return next((auto for end, auto in AUTO_CLASSES.items() if architecture.endswith(end)), "AutoModel")


def save_source(name: str, folder) -> None:
    """A random checkpoint with exactly the fields of the row in its config.json."""
    fields = shrunk(HUB_CONFIGS[name].fields)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model_class = getattr(transformers, auto_class_of(fields))
    dtype = getattr(torch, fields.get("torch_dtype", fields.get("dtype", "float32")))
    model_class.from_config(config).to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    if "vocab_size" in fields:
        tiny_tokenizer().save_pretrained(folder)


def inputs_for(model) -> dict[str, torch.Tensor]:
    if model.main_input_name != "input_features":
        size = getattr(getattr(model.config, "vision_config", None), "image_size", None)
        images = {} if size is None else {"pixel_values": torch.ones(2, 3, size, size)}
        return {**inputs_of(model, length=24), **images}
    shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": torch.arange(5, 19).view(2, 7)}


@torch.no_grad()
def job_of(name: str, root) -> dict[str, str]:
    """Convert a row, compare it with its stock model, and return what alone.py shall load and compute again."""
    row, auto = HUB_CONFIGS[name], auto_class_of(HUB_CONFIGS[name].fields)
    save_source(name, root / "source")
    drop = ("--drop", ",".join(row.drop)) if row.drop else ()
    words = ("--model_name_or_path", root / "source", "--output_dir", root / "converted")
    code, _, error = run(*words, *SETTINGS, *drop, *(row.options or ("--no_verify",)))
    assert code == 0, error
    stock = getattr(transformers, auto).from_pretrained(root / "source").eval()
    model = getattr(transformers, auto).from_pretrained(root / "converted").eval()
    assert type(model).__module__ == "hf_linear_attention.modeling_linear_attention"
    assert model.dtype == stock.dtype
    inputs = inputs_for(stock)
    saved = {"inputs": inputs, "output": model(**inputs)[0]}
    with softmax_attention(model):
        assert torch.equal(model(**inputs)[0], stock(**inputs)[0])
    assert torch.isfinite(saved["output"]).all()
    if auto == "AutoModelForCausalLM":
        saved["new_tokens"] = 5
        saved["tokens"] = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    torch.save(saved, root / "inputs.pt")
    return {"auto_class": auto, "checkpoint": str(root / "converted"), "inputs": str(root / "inputs.pt")}


def test_every_family_converts_and_loads_with_and_without_the_package(run_alone, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)  # without the package, torch computes
    jobs, results = {}, {}
    for number, name in enumerate(CONVERTED):
        try:
            jobs[name] = job_of(name, tmp_path / str(number))
        except Exception as error:  # one broken row must not hide the others
            results[name] = f"{type(error).__name__}: {error}"
    results |= run_alone(jobs, tmp_path, tmp_path)
    assert {name: result for name, result in results.items() if name in CONVERTED and result != "equal"} == {}
    assert set(CONVERTED) <= set(results)


@pytest.mark.parametrize("name", REFUSED)
def test_what_linear_attention_lacks_is_refused_before_weights_are_read(name, tmp_path):
    fields = shrunk(HUB_CONFIGS[name].fields)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    save_file({"none_of_the_model": torch.zeros(1)}, source / "model.safetensors")
    code, _, error = run("--model_name_or_path", source, "--output_dir", tmp_path / "converted", *SETTINGS)
    assert HUB_CONFIGS[name].refused in error
    assert code == 2
    assert not (tmp_path / "converted").exists()
