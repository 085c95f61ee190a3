"""The state of a prompt, saved and restored."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix import MECHANISM_ROWS, stock_model
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from hf_linear_attention import convert, load_prompt_state, save_prompt_state
from hf_linear_attention.attention.cache import state_layer


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_put((torch.tensor([0, 0]), torch.tensor([0, 1])), torch.tensor(0))
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
PROMPT = 12
CASES = {
    "linear": ("llama", {"mechanism": "linear", "num_features": 16}),
    "hybrid": ("llama", {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}),
    "softmax-left": ("gpt2", {"mechanism": "performer", "num_features": 16, "layers": [0, 2]}),
    "softmax-first": ("llama", {"mechanism": "linear", "num_features": 16, "layers": [1, 2]}),
}


def build(name, dtype=torch.float32, **changes):
    family, settings = CASES[name]
    model = convert(stock_model(family, **changes), **settings).to(dtype)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@torch.no_grad()
def read(model, start, stop, cache=None):
    inputs = {"attention_mask": MASK[:, :stop], "position_ids": POSITIONS[:, start:stop]}
    return model(IDS[:, start:stop], past_key_values=cache, use_cache=True, **inputs)


def read_prompt(model, length=PROMPT):
    return read(model, 0, length).past_key_values


def continued(model, cache):
    return read(model, int(cache.get_seq_length()), IDS.shape[1], cache).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_restored_prompt_goes_on_as_the_cache_does(name, dtype, tmp_path):
    model = build(name, dtype)
    cache = read_prompt(model)
    save_prompt_state(model, cache, tmp_path / "prompt.safetensors")
    restored = load_prompt_state(model, tmp_path / "prompt.safetensors")
    assert restored.get_seq_length() == PROMPT
    assert torch.equal(continued(model, restored), continued(model, cache))
    # saving once more gives what was loaded, so nothing of it was shared with the first cache
    again = load_prompt_state(model, tmp_path / "prompt.safetensors")
    assert torch.equal(continued(model, again), continued(model, read_prompt(model)))


@pytest.mark.parametrize(
    "row", ["aft-local", "linear-taylor", "linear-decay", "hybrid-delta", "gated_delta-conv", "window"]
)
def test_of_every_mechanism(row, tmp_path):
    model = convert(stock_model("llama"), **MECHANISM_ROWS[row])
    cache = read_prompt(model)
    model.save_prompt_state(cache, tmp_path / "prompt.safetensors")
    restored = model.load_prompt_state(tmp_path / "prompt.safetensors")
    assert torch.equal(continued(model, restored), continued(model, cache))


@pytest.mark.parametrize("kept", [2, 0], ids=["some tokens kept", "all tokens removed"])
def test_after_a_rollback(kept, tmp_path):
    """The tokens that stayed are not in the state yet."""
    model = build("hybrid")
    cache = DynamicCache(config=model.config)
    for layer in range(3):
        state_layer(cache, layer)
    cache.activate_past_recording()
    read(model, 0, 6, cache)
    cache.crop(0)
    read(model, 6, 10, cache)
    cache.crop(kept - 4)
    save_prompt_state(model, cache, tmp_path / "prompt.safetensors")
    restored = load_prompt_state(model, tmp_path / "prompt.safetensors")
    assert restored.get_seq_length() == 6 + kept
    assert torch.equal(continued(model, restored), continued(model, cache))


def test_a_static_cache(tmp_path):
    """A state is the same in every cache; keys and values of a static one are refused."""
    model = build("linear")
    cache = StaticCache(config=model.config, max_cache_len=32)
    read(model, 0, PROMPT, cache)
    save_prompt_state(model, cache, tmp_path / "prompt.safetensors")
    restored = load_prompt_state(model, tmp_path / "prompt.safetensors")
    assert torch.equal(continued(model, restored), continued(model, read_prompt(model)))
    model = build("softmax-left")
    cache = StaticCache(config=model.config, max_cache_len=32)
    read(model, 0, PROMPT, cache)
    with pytest.raises(ValueError, match=r"a StaticLayer, which cannot be saved\. .*layers of a `DynamicCache`"):
        save_prompt_state(model, cache, tmp_path / "refused.safetensors")


def test_what_is_not_a_prompt_is_refused(tmp_path):
    model = build("linear")
    with pytest.raises(ValueError, match="holds no token of a decoder; pass the `past_key_values`"):
        save_prompt_state(model, DynamicCache(config=model.config), tmp_path / "empty.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other.safetensors', which is not a prompt state"):
        load_prompt_state(model, tmp_path / "other.safetensors")


def test_the_state_of_another_model_is_refused_by_what_differs(tmp_path):
    model = build("linear")
    save_prompt_state(model, read_prompt(model), tmp_path / "prompt.safetensors")

    def refuses(other, match):
        with pytest.raises(ValueError, match=match):
            load_prompt_state(other, tmp_path / "prompt.safetensors")

    refuses(
        build("softmax-left"), "`model_type` is 'linear_llama', the model's is 'linear_gpt2'; `linear_attention` is"
    )
    refuses(build("softmax-first"), "another model in .*: `linear_attention` is {.*'layers': 'all'")
    refuses(copy.deepcopy(model).to(torch.bfloat16), "`dtype` is 'torch.float32', the model's is 'torch.bfloat16'")
    changed = copy.deepcopy(model)
    load_prompt_state(changed, tmp_path / "prompt.safetensors")
    with torch.no_grad():  # every weight counts
        changed.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3
    refuses(changed, "another model in .*: `weights` is .*let this model read the prompt again")
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight.copy_(model.model.layers[2].mlp.up_proj.weight)
    load_prompt_state(changed, tmp_path / "prompt.safetensors")
    changed.model.layers[2].mlp.up_proj.weight.data *= 1.01  # torch does not count this
    refuses(changed, "another model in .*: `weights` is")
