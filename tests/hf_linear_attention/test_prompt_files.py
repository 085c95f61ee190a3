"""Files of prompt states: whole or not there, and refused with the difference if they were damaged or changed."""

from __future__ import annotations

import json
import os

import pytest
import torch
from matrix import MECHANISM_ROWS, stock_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

from hf_linear_attention import convert, load_prompt_state, save_prompt_state
from hf_linear_attention.attention.cache import state_layer
from hf_linear_attention.state import prompt_state


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
NUM_TOKENS = 12
HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}


@pytest.fixture(scope="module")
def model():
    """With a softmax layer between converted ones."""
    return convert(stock_model("llama"), **HYBRID, layers=[0, 2])


@pytest.fixture
def path(model, tmp_path):
    with torch.no_grad():
        save_prompt_state(model, model(IDS[:, :NUM_TOKENS]).past_key_values, tmp_path / "prompt.safetensors")
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


@pytest.mark.parametrize("where", [7, 400, -1])
def test_a_truncated_file(model, path, where):
    path.write_bytes(path.read_bytes()[:where])
    refuses(model, path, damage(r"it is not a complete safetensors file \(.*\)"))


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


@pytest.mark.parametrize(
    ("version", "match"),
    [(4, r"in format version 4, .* up to 3\. Upgrade"), (0, "`format_version` = 0"), ("2", "'2'"), (None, "None")],
)
def test_format_versions(model, path, version, match):
    rewrite(path, {"format_version": version})
    refuses(model, path, match)


@pytest.mark.parametrize(
    ("about", "drop", "match"),
    [
        *(({"num_tokens": value}, (), "`num_tokens` is .*, but must be an integer") for value in (True, -1, 10**30)),
        ({}, ["num_layers"], "`num_layers` is None, but must be an integer"),
        ({}, ["weights"], "of another model in .*`weights` is None"),
        ({}, ["0.state.6"], "in layer 0, the tensors are .*; this model makes"),
        ({}, ["1.keys"], "in layer 1, the tensors are .*; this model makes"),
    ],
)
def test_numbers_and_tensors_that_are_wrong_or_missing(model, path, about, drop, match):
    rewrite(path, about, drop=drop)
    refuses(model, path, match)
    save_file(content(path)[1], path, metadata={"prompt_state": "[" * 100_000})
    refuses(model, path, "a damaged prompt state in .*its metadata is not JSON")


# How the tensors of a file are changed, and what is said of it.
CHANGES = {
    "fewer features": (lambda t: {"0.state.0": t["0.state.0"][:, :, :8]}, r"`state.0` is \[2, 2, 8, 10\]"),
    "another dtype": (lambda t: {"2.state.0": t["2.state.0"].double()}, "layer 2, `state.0` is .* in torch.float64"),
    "a number": (lambda t: {"0.state.6": torch.tensor(3)}, r"rows, but must all have the same number"),
    "fewer rows": (lambda t: {"2.state.0": t["2.state.0"][:1]}, r"its tensors have \[1, 2\] rows"),
    "fewer softmax keys": (lambda t: {"1.keys": t["1.keys"][:, :, 1:]}, r"`keys` is \[2, 2, 11, 8\]"),
    "a tensor too many": (lambda t: {"0.state.7": t["0.state.6"]}, "in layer 0, the tensors are .*state.7"),
    "a layer too many": (
        lambda t: {"3.state.0": t["0.state.0"]},
        r"belong to no layer of this model, 3\.state\.0",
    ),
    "a state for softmax": (lambda t: {"1.state.0": t["0.state.0"]}, "in layer 1, the tensors are keys, state"),
    "a count below 0": (lambda t: {"0.state.6": t["0.state.6"] - 99}, r"`state.6` holds -87 to -87, .* 0 to 12"),
    "a kind below 0": (lambda t: {"0.state.3": t["0.state.3"] - 5}, "`state.3` holds -4 to -4, .* 0 to 127"),
    "too much pending": (
        lambda t: {f"0.pending.{place}": torch.zeros(2, 2, 13, 8) for place in range(2)},
        r"`pending.0` is \[2, 2, 13, 8\] in torch.float32; this model makes \[2, 2, 1 to 12, 8\]",
    ),
    "unequal pending": (
        lambda t: {f"0.pending.{place}": torch.zeros(2, 2, 1 + place, 8) for place in range(2)},
        r"the tensors `pending` hold \[1, 2\] of 12 tokens",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors_that_this_model_does_not_make(model, path, case):
    """In a file of the first version, which has no checksum, so that only this protects."""
    change, match = CHANGES[case]
    tensors = {name: x.contiguous() for name, x in change(content(path)[1]).items()}
    weights = {"weights": prompt_state.identity_of(model, 1)["weights"]}
    rewrite(path, weights, tensors=tensors, drop=["sha256", "format_version"], signed=False)
    refuses(model, path, damage(match))


@pytest.mark.parametrize("row", ["aft-conv", "linear-gated", "hybrid", "gated_delta-conv"])
@torch.no_grad()
def test_every_tensor_of_every_mechanism_is_checked(row, tmp_path):
    model, path = convert(stock_model("llama", num_hidden_layers=1), **MECHANISM_ROWS[row]), tmp_path / "prompt"
    cache = DynamicCache(config=model.config)
    state_layer(cache, 0)
    cache.activate_past_recording()
    model(IDS[:, :6], past_key_values=cache)
    cache.crop(0)
    model(IDS[:, 6:9], past_key_values=cache)
    cache.crop(-1)
    save_prompt_state(model, cache, path)
    assert load_prompt_state(model, path).get_seq_length() == 8
    about, tensors = content(path)
    assert {name.split(".")[1] for name in tensors} == {"state", "pending"}
    first = {"prompt_state": json.dumps({**about, **prompt_state.identity_of(model, 1)})}
    for name, tensor in tensors.items():
        save_file({**tensors, name: torch.cat((tensor, tensor[..., :1]), dim=-1)}, path, metadata=first)
        refuses(model, path, damage("in layer 0, "))


@torch.no_grad()
def test_layers_with_different_mechanisms(model, path, tmp_path):
    """Layer 2 stays softmax. A file of an earlier version lacks options of either mechanism."""
    settings = [{**HYBRID, "layers": [0]}, {"mechanism": "performer", "num_features": 16, "layers": [1]}]
    mixed, mixed_path = convert(stock_model("llama"), settings=settings), tmp_path / "mixed.safetensors"
    cache = mixed(IDS[:, :NUM_TOKENS]).past_key_values
    save_prompt_state(mixed, cache, mixed_path)
    older = [dict(entry) for entry in content(mixed_path)[0]["linear_attention"]]
    del older[0]["rope"], older[1]["rotary"]
    rewrite(mixed_path, {"linear_attention": older})
    restored = load_prompt_state(mixed, mixed_path)
    outputs = [mixed(IDS[:, NUM_TOKENS:], past_key_values=state).logits for state in (restored, cache)]
    assert torch.equal(*outputs)
    refuses(mixed, path, r"another model in .*`linear_attention` is \{.*\}, the model's is \[\{'mechanism'")
    refuses(model, mixed_path, r"another model in .*`linear_attention` is \[\{.*\}\], the model's is \{'mechanism'")


@pytest.mark.parametrize("fault", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file_and_no_litter(model, path, fault, monkeypatch):
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((prompt_state, "save_file") if fault == "write" else (os, "replace")), fail)
    with torch.no_grad():
        cache = model(IDS[:, :5]).past_key_values
    with pytest.raises(OSError, match="No space left"):
        save_prompt_state(model, cache, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    save_prompt_state(model, cache, path)
    assert load_prompt_state(model, path).get_seq_length() == 5
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@torch.no_grad()
def test_where_there_is_no_file(model, tmp_path, monkeypatch):
    cache = model(IDS[:, :5]).past_key_values
    with pytest.raises(FileNotFoundError):
        load_prompt_state(model, tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError):
        save_prompt_state(model, cache, tmp_path / "no" / "prompt.safetensors")
    monkeypatch.chdir(tmp_path)  # a name alone
    save_prompt_state(model, cache, "prompt.safetensors")
    assert load_prompt_state(model, "prompt.safetensors").get_seq_length() == 5
