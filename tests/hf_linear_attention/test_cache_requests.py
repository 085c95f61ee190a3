"""What `generate` can ask of a cache: offloaded, quantised, static, continuous batching."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checkpoints import convert_folder, save_twin
from matrix import stock_model
from transformers import AutoModelForCausalLM, QuantizedCache, StaticCache, cache_utils

from hf_linear_attention import convert, softmax_attention


PROMPT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))


class NoStream(contextlib.nullcontext):
    """In the place of a CUDA stream."""

    def wait_stream(self, other):
        pass


@pytest.fixture(params=["all", [0, 2]], ids=str, scope="module")
def model(request):
    converted = convert(stock_model("llama"), mechanism="linear", num_features=16, layers=request.param)
    converted.generation_config.pad_token_id, converted.generation_config.eos_token_id = 0, None
    return converted


def generate(model, **kwargs):
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False, **kwargs)


def test_offloaded(model, monkeypatch):
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
    result = generate(model, cache_implementation="offloaded", return_dict_in_generate=True)
    assert torch.equal(result.sequences, generate(model))
    # what remains softmax is still offloaded
    assert result.past_key_values.offloading == (not all(result.past_key_values.is_linear))


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the one backend without another package")
def test_quantized(model):
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    result = generate(model, **options, return_dict_in_generate=True)
    cache = result.past_key_values
    assert isinstance(cache, QuantizedCache)
    quantized = [index for index, layer in enumerate(cache.layers) if "Quantized" in type(layer).__name__]
    assert quantized == [index for index, is_linear in enumerate(cache.is_linear) if not is_linear]
    if not quantized:  # the state is float32 all the same
        assert torch.equal(result.sequences, generate(model))


def test_static_has_room_for_what_it_was_made_for(model):
    cache = StaticCache(config=model.config, max_cache_len=PROMPT.shape[1] + 8)
    assert torch.equal(generate(model, past_key_values=cache), generate(model))
    assert cache.get_max_length() == PROMPT.shape[1] + 8


def test_continuous_batching_is_refused(model):
    said = "cannot store the recurrent state of linear attention; use `generate`"
    with pytest.raises(NotImplementedError, match=said):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)
    with softmax_attention(model):  # the stock model's own answer
        assert model.init_continuous_batching() is not None


def test_a_conversion_counts_the_state_in_the_dtype_of_the_checkpoint(tmp_path):
    save_twin(tmp_path / "source", "llama", dtype=torch.bfloat16)
    words = ("--attention", "window", "--window_size", 4, "--no_verify")
    report = convert_folder(tmp_path / "source", tmp_path / "linear", *words)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "linear", dtype="auto")
    with torch.no_grad():
        cache = model(torch.randint(3, 60, (1, 20)), use_cache=True).past_key_values
    assert report["state_bytes"] == sum(layer.state_bytes() for layer in cache.layers)
