"""The state of a prompt: saved and restored, in files that are whole or refused."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from caches import cache_of, past
from matrix import MECHANISM_ROWS, recording_cache, stock_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, StaticCache

from hf_linear_attention import convert, load_prompt_state, save_prompt_state
from hf_linear_attention.state import prompt_state


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_put((torch.tensor([0, 0]), torch.tensor([0, 1])), torch.tensor(0))
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
PROMPT = 12
HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}
CASES = {
    "linear": ("llama", {"mechanism": "linear", "num_features": 16}),
    "hybrid": ("llama", HYBRID),
    "softmax-left": ("gpt2", {"mechanism": "performer", "num_features": 16, "layers": [0, 2]}),
    "softmax-first": ("llama", {"mechanism": "linear", "num_features": 16, "layers": [1, 2]}),
    "mixed": ("llama", {"settings": [HYBRID | {"layers": [0]}, MECHANISM_ROWS["performer"] | {"layers": [1]}]}),
    **{row: ("llama", MECHANISM_ROWS[row]) for row in ("aft-local", "linear-decay", "window")},
}


def build(name):
    family, settings = CASES[name]
    return convert(stock_model(family), **settings)


@torch.no_grad()
def read(model, start, stop, cache=None):
    inputs = {"attention_mask": MASK[:, :stop], "position_ids": POSITIONS[:, start:stop]}
    return model(IDS[:, start:stop], **past(cache), use_cache=True, **inputs)


def read_prompt(model, cache=None):
    return cache_of(read(model, 0, PROMPT, cache))


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
    refuses(build("mixed"), r"another model in .*`linear_attention` is \{.*\}, the model's is \[\{'mechanism'")
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


@pytest.fixture(scope="module")
def model():
    """With a softmax layer between converted ones."""
    return convert(stock_model("llama"), **HYBRID, layers=[0, 2])


@pytest.fixture
def path(model, tmp_path):
    with torch.no_grad():
        save_prompt_state(model, cache_of(model(IDS[:, :PROMPT])), tmp_path / "prompt.safetensors")
    return tmp_path / "prompt.safetensors"


def content(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["prompt_state"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def rewrite(path, about=None, tensors=None, drop=(), signed=True):
    """Change a file; `signed` with the checksum of what it holds then, as whoever knows the format would."""
    old_about, old_tensors = content(path)
    about = {**old_about, **(about or {})}
    tensors = {name: x for name, x in {**old_tensors, **(tensors or {})}.items() if name not in drop}
    about = {name: value for name, value in about.items() if name not in drop}
    if signed:
        about.pop("sha256", None)
        about["sha256"] = prompt_state._digest(about, tensors)
    save_file(tensors, path, metadata={"prompt_state": json.dumps(about)})


def refuses(model, path, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_prompt_state(model, path)
    assert str(path) in str(caught.value)


def damage(match):
    return rf"a damaged prompt state in .*{match}.*\. Let the model read the prompt again\.$"


def test_a_truncated_file(model, path):
    path.write_bytes(path.read_bytes()[:-1])
    refuses(model, path, damage(r"it is not a complete safetensors file \(.*\)"))
    save_file({"0.state.0": torch.ones(2)}, path, metadata={"prompt_state": "[" * 100_000})
    refuses(model, path, "a damaged prompt state in .*its metadata is not JSON")


def test_a_flipped_bit_anywhere(model, path):
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (header, (header + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        refuses(model, path, damage("its checksum does not match its content"))
    rewrite(path, {"num_tokens": 13}, signed=False)
    refuses(model, path, damage("its checksum"))
    rewrite(path, drop=["sha256"], signed=False)
    refuses(model, path, damage("its checksum"))


# How metadata and tensors of a file are changed, with a checksum of what it holds then, and what is said of it.
CHANGES = [
    ({"format_version": 2}, {}, r"in format version 2, .* up to 1\. Upgrade"),
    ({"format_version": None}, {}, "None"),
    *(({"num_tokens": value}, {}, damage("`num_tokens` is .*, but must be an integer")) for value in (None, True, -1)),
    ({"weights": None}, {}, "of another model in .*`weights` is None"),
    ({}, {"0.state.6": lambda x: None}, damage(r"it lacks 0\.state\.6, and this model makes no other one")),
    ({}, {"2.state.0": torch.Tensor.double}, damage("`2.state.0` is .* in torch.float64")),
    ({}, {"0.state.6": lambda x: torch.tensor(3)}, damage("rows, but must all have the same number")),
    ({}, {"2.state.0": lambda x: x[:1]}, damage(r"its tensors have \[1, 2\] rows")),
    ({}, {"1.keys": lambda x: x[:, :, 1:].contiguous()}, damage(r"`1.keys` is \[2, 2, 11, 8\]")),
    ({}, {"1.state.0": lambda _: torch.ones(2, 1)}, damage(r"this model makes no 1\.state\.0")),
    ({}, {"0.state.6": lambda x: x - 99}, damage(r"`0.state.6` holds -87 to -87, .* 0 to 12")),
]


@pytest.mark.parametrize(("about", "changes", "match"), CHANGES)
def test_what_this_model_does_not_write(model, path, about, changes, match):
    tensors = content(path)[1]
    changed = {name: change(tensors.get(name)) for name, change in changes.items()}
    kept = {name: x for name, x in changed.items() if x is not None}
    rewrite(path, about, kept, drop=changed.keys() - kept.keys())
    refuses(model, path, match)


@pytest.mark.parametrize("row", ["aft-conv", "linear-gated", "hybrid", "gated_delta-conv"])
@torch.no_grad()
def test_every_tensor_of_every_mechanism_is_checked(row, tmp_path):
    model, path = convert(stock_model("llama", num_hidden_layers=1), **MECHANISM_ROWS[row]), tmp_path / "prompt"
    cache = recording_cache(model)
    model(IDS[:, :6], **past(cache))
    cache.crop(0)
    model(IDS[:, 6:9], **past(cache))
    cache.crop(-1)
    save_prompt_state(model, cache, path)
    assert load_prompt_state(model, path).get_seq_length() == 8
    about, tensors = content(path)
    for name, tensor in tensors.items():
        rewrite(path, about, {**tensors, name: torch.cat((tensor, tensor[..., :1]), dim=-1)})
        refuses(model, path, damage(f"`{name}` is "))


@pytest.mark.parametrize("fault", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file_and_no_litter(model, path, fault, monkeypatch):
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((prompt_state, "save_file") if fault == "write" else (os, "replace")), fail)
    with torch.no_grad():
        cache = cache_of(model(IDS[:, :5]))
    with pytest.raises(OSError, match="No space left"):
        save_prompt_state(model, cache, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    save_prompt_state(model, cache, path)
    assert load_prompt_state(model, path).get_seq_length() == 5
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
