"""A folder of prompt states: the longest shared beginning is found, and what comes of it is what one pass gives."""

from __future__ import annotations

import json
import os

import pytest
import torch
from matrix import stock_model
from safetensors import safe_open
from safetensors.torch import save_file

from hf_linear_attention import PromptStore, convert, load_prompt_state, save_prompt_state
from hf_linear_attention.state import prompt_state
from hf_linear_attention.state.prompt_state import identity_of


IDS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(3))
HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}


@pytest.fixture(scope="module")
def model():
    """With a softmax layer."""
    return convert(stock_model("llama"), **HYBRID, layers=[0, 2]).double()


def other_end(length: int) -> torch.Tensor:
    """The prompt, with other tokens from `length` on."""
    return torch.cat([IDS[:, :length], 66 - IDS[:, length:]], dim=1)


def files(folder):
    return sorted((int(path.name.split("-")[0]), path) for path in folder.glob("*.safetensors"))


def count_reads(model, monkeypatch):
    """The number of tokens in every call of the base model."""
    read, forward = [], model.base_model.forward

    def counted(*args, **kwargs):
        read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", counted)
    return read


@torch.no_grad()
def goes_on(model, ids, cache):
    """What follows a restored beginning is what one pass gives."""
    start = int(cache.get_seq_length())
    expected = model(input_ids=ids).logits[:, start:]
    torch.testing.assert_close(model(input_ids=ids[:, start:], past_key_values=cache).logits, expected)


@torch.no_grad()
def test_the_longest_shared_beginning_is_read_once(model, tmp_path, monkeypatch):
    store = PromptStore(model, tmp_path, boundary=5)
    assert store.length_of(IDS) == 0
    cache = store.read(IDS)
    assert cache.get_seq_length() == 20  # the last boundary before the last token
    assert [length for length, _ in files(tmp_path)] == [5, 10, 15, 20]
    goes_on(model, IDS, cache)
    again = PromptStore(model, tmp_path, boundary=5)  # as in another process
    read = count_reads(model, monkeypatch)
    cache = again.read(IDS)
    assert sum(read) == 1  # `read_prompt_state` reads one token to know the sizes
    goes_on(model, IDS, cache)
    for shared, found in ((23, 20), (19, 15), (5, 5), (4, 0)):
        assert again.length_of(other_end(shared)) == found
        goes_on(model, other_end(shared), again.read(other_end(shared)))


def test_generation_goes_on_from_it(model, tmp_path):
    store = PromptStore(model, tmp_path, boundary=8)
    expected = model.generate(IDS, max_new_tokens=6, do_sample=False)
    for _ in range(2):  # a stored state serves many times
        found = model.generate(IDS, past_key_values=store.read(IDS), max_new_tokens=6, do_sample=False)
        assert torch.equal(found, expected)


def test_a_prompt_that_ends_at_a_boundary_leaves_one_token(model, tmp_path):
    store = PromptStore(model, tmp_path, boundary=8)
    assert store.read(IDS).get_seq_length() == 16  # 24 would leave nothing for `generate`
    assert store.read(IDS[:, :8]) is None
    assert store.read(IDS[:, :9]).get_seq_length() == 8


def test_what_was_not_used_for_longest_goes_first(model, tmp_path):
    store = PromptStore(model, tmp_path, boundary=12)
    store.read(IDS)
    ((_, first),) = files(tmp_path)
    largest = 2 * first.stat().st_size + 100
    store = PromptStore(model, tmp_path, boundary=12, max_bytes=largest)
    os.utime(first, (1, 1))
    second = other_end(1)
    store.read(second)
    assert store.length_of(IDS) == store.length_of(second) == 12
    os.utime(first, (1, 1))
    store.read(IDS)  # used: now the second is the older one
    store.read(other_end(2))
    assert store.length_of(IDS) == store.length_of(other_end(2)) == 12
    assert store.length_of(second) == 0
    assert sum(path.stat().st_size for _, path in files(tmp_path)) <= largest
    with pytest.raises(ValueError, match="`max_bytes` = 10, but one state of this model takes"):
        PromptStore(model, tmp_path / "small", boundary=12, max_bytes=10).read(IDS)
    assert not files(tmp_path / "small")


def test_another_model_is_refused(model, tmp_path):
    PromptStore(model, tmp_path).read(IDS)
    torch.manual_seed(7)
    other = convert(stock_model("llama"), **HYBRID).double()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"of another model in .*prompt_store\.json"):
        PromptStore(other, tmp_path)


@pytest.mark.parametrize("given", ["a shorter beginning", "another prompt"])
def test_a_file_under_the_name_of_another_is_not_used(model, tmp_path, given):
    store = PromptStore(model, tmp_path, boundary=8)
    store.read(IDS)
    (_, shorter), (_, path) = files(tmp_path)
    store.read(other_end(2))
    (other,) = {other for length, other in files(tmp_path) if length == 16} - {path}
    path.write_bytes((shorter if given == "a shorter beginning" else other).read_bytes())
    cache = store.read(IDS)
    assert cache.get_seq_length() == 16
    goes_on(model, IDS, cache)


def test_a_folder_of_an_earlier_version(model, tmp_path, monkeypatch):
    """Its files do not name their tokens, and its weights were compared by samples."""
    with monkeypatch.context() as earlier:
        earlier.setattr("hf_linear_attention.state.prompt_store.identity_of", lambda model: identity_of(model, 2))
        PromptStore(model, tmp_path, boundary=8)
    PromptStore(model, tmp_path, boundary=8).read(IDS)
    for _, path in files(tmp_path):
        save_prompt_state(model, load_prompt_state(model, path), path)
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["prompt_state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        about |= identity_of(model, 2)
        del about["sha256"]
        about["sha256"] = prompt_state._digest(about, tensors)
        save_file(tensors, path, metadata={"prompt_state": json.dumps(about)})
    read = count_reads(model, monkeypatch)
    assert PromptStore(model, tmp_path, boundary=8).read(IDS).get_seq_length() == 16
    assert sum(read) == 1  # `read_prompt_state` reads one token to know the sizes
