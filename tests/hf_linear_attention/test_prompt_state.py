"""The state of a prompt, saved and restored."""

from __future__ import annotations

import copy

import pytest
import torch
from matrix import MECHANISM_ROWS, stock_model
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from hf_linear_attention import convert, load_prompt_state, save_prompt_state


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_put((torch.tensor([0, 0]), torch.tensor([0, 1])), torch.tensor(0))
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
PROMPT = 12
CASES = {
    "linear": ("llama", {"mechanism": "linear", "num_features": 16}),
    "hybrid": ("llama", {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}),
    "softmax-left": ("gpt2", {"mechanism": "performer", "num_features": 16, "layers": [0, 2]}),
    "softmax-first": ("llama", {"mechanism": "linear", "num_features": 16, "layers": [1, 2]}),
    **{row: ("llama", MECHANISM_ROWS[row]) for row in ("aft-local", "linear-decay", "hybrid-delta", "window")},
}


def build(name):
    family, settings = CASES[name]
    return convert(stock_model(family), **settings)


@torch.no_grad()
def read(model, start, stop, cache=None):
    inputs = {"attention_mask": MASK[:, :stop], "position_ids": POSITIONS[:, start:stop]}
    return model(IDS[:, start:stop], past_key_values=cache, use_cache=True, **inputs)


def read_prompt(model, cache=None):
    return read(model, 0, PROMPT, cache).past_key_values


def continued(model, cache):
    return read(model, int(cache.get_seq_length()), IDS.shape[1], cache).logits


@pytest.mark.parametrize("name", CASES)
def test_a_restored_prompt_goes_on_as_the_cache_does(name, tmp_path):
    for dtype in (torch.float32, torch.bfloat16) if name in ("linear", "hybrid") else (torch.float32,):
        model = build(name).to(dtype)
        cache = read_prompt(model)
        model.save_prompt_state(cache, tmp_path / "prompt.safetensors")
        restored = model.load_prompt_state(tmp_path / "prompt.safetensors")
        assert restored.get_seq_length() == PROMPT
        assert torch.equal(continued(model, restored), continued(model, cache))
        # loading once more gives the same, so nothing of it was shared with the first cache
        again = load_prompt_state(model, tmp_path / "prompt.safetensors")
        assert torch.equal(continued(model, again), continued(model, read_prompt(model)))


def test_a_static_cache(tmp_path):
    """A state is the same in every cache; keys and values of a static one are refused."""
    model = build("linear")
    cache = read_prompt(model, StaticCache(config=model.config, max_cache_len=32))
    save_prompt_state(model, cache, tmp_path / "prompt.safetensors")
    restored = load_prompt_state(model, tmp_path / "prompt.safetensors")
    assert torch.equal(continued(model, restored), continued(model, read_prompt(model)))
    model = build("softmax-left")
    cache = read_prompt(model, StaticCache(config=model.config, max_cache_len=32))
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
    model, path = build("linear"), tmp_path / "prompt.safetensors"
    save_prompt_state(model, read_prompt(model), path)

    def refuses(other, match):
        with pytest.raises(ValueError, match=match):
            load_prompt_state(other, path)

    types = "`model_type` is 'linear_llama', the model's is 'linear_gpt2'; `linear_attention` is"
    refuses(build("softmax-left"), types)
    refuses(build("softmax-first"), "another model in .*: `linear_attention` is {.*'layers': 'all'")
    refuses(copy.deepcopy(model).to(torch.bfloat16), "`dtype` is 'torch.float32', the model's is 'torch.bfloat16'")
    changed = copy.deepcopy(model)
    load_prompt_state(changed, path)
    weight = changed.model.layers[2].mlp.up_proj.weight
    with torch.no_grad():  # every weight counts
        weight[3, 5] += 1e-3
    refuses(changed, "another model in .*: `weights` is .*let this model read the prompt again")
    with torch.no_grad():
        weight.copy_(model.model.layers[2].mlp.up_proj.weight)
    load_prompt_state(changed, path)
    weight.data *= 1.01  # torch does not count this
    refuses(changed, "another model in .*: `weights` is")
