"""The state of a prompt: saved and restored, in files that are whole or refused, and in a folder that is searched."""

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

from hf_linear_attention import PromptStore, convert, load_prompt_state, save_prompt_state
from hf_linear_attention.state import prompt_state
from hf_linear_attention.state.prompt_state import identity_of


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS).index_put((torch.tensor([0, 0]), torch.tensor([0, 1])), torch.tensor(0))
POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)  # as `generate` counts them
PROMPT = 12
CASES = {
    "linear": ("llama", {"mechanism": "linear", "num_features": 16}),
    "hybrid": ("llama", {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}),
    "softmax-left": ("gpt2", {"mechanism": "performer", "num_features": 16, "layers": [0, 2]}),
    "softmax-first": ("llama", {"mechanism": "linear", "num_features": 16, "layers": [1, 2]}),
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


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}


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
    cache = recording_cache(model)
    model(IDS[:, :6], **past(cache))
    cache.crop(0)
    model(IDS[:, 6:9], **past(cache))
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
    cache = cache_of(mixed(IDS[:, :PROMPT]))
    save_prompt_state(mixed, cache, mixed_path)
    older = [dict(entry) for entry in content(mixed_path)[0]["linear_attention"]]
    del older[0]["rope"], older[1]["rotary"]
    rewrite(mixed_path, {"linear_attention": older})
    restored = load_prompt_state(mixed, mixed_path)
    outputs = [mixed(IDS[:, PROMPT:], **past(state)).logits for state in (restored, cache)]
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
        cache = cache_of(model(IDS[:, :5]))
    with pytest.raises(OSError, match="No space left"):
        save_prompt_state(model, cache, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    save_prompt_state(model, cache, path)
    assert load_prompt_state(model, path).get_seq_length() == 5
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


LINE = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def double(model):
    return copy.deepcopy(model).double()


def other_end(length: int) -> torch.Tensor:
    """The prompt, with other tokens from `length` on."""
    return torch.cat([LINE[:, :length], 66 - LINE[:, length:]], dim=1)


def files(folder):
    return sorted((int(path.name.split("-")[0]), path) for path in folder.glob("*.safetensors"))


def count_reads(double, monkeypatch):
    """The number of tokens in every call of the base model."""
    read, forward = [], double.base_model.forward

    def counted(*args, **kwargs):
        read.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(double.base_model, "forward", counted)
    return read


@torch.no_grad()
def goes_on(double, ids, cache):
    """What follows a restored beginning is what one pass gives."""
    start = int(cache.get_seq_length())
    expected = double(input_ids=ids).logits[:, start:]
    torch.testing.assert_close(double(input_ids=ids[:, start:], **past(cache)).logits, expected)


@torch.no_grad()
def test_the_longest_shared_beginning_is_read_once(double, tmp_path, monkeypatch):
    store = PromptStore(double, tmp_path, boundary=5)
    assert store.length_of(LINE) == 0
    cache = store.read(LINE)
    assert cache.get_seq_length() == 20  # the last boundary before the last token
    assert [length for length, _ in files(tmp_path)] == [5, 10, 15, 20]
    goes_on(double, LINE, cache)
    again = PromptStore(double, tmp_path, boundary=5)  # as in another process
    read = count_reads(double, monkeypatch)
    cache = again.read(LINE)
    assert sum(read) == 1  # `read_prompt_state` reads one token to know the sizes
    goes_on(double, LINE, cache)
    for shared, found in ((23, 20), (19, 15), (5, 5), (4, 0)):
        assert again.length_of(other_end(shared)) == found
        goes_on(double, other_end(shared), again.read(other_end(shared)))


def test_generation_goes_on_from_it(double, tmp_path):
    store = PromptStore(double, tmp_path, boundary=8)
    expected = double.generate(LINE, max_new_tokens=6, do_sample=False)
    for _ in range(2):  # a stored state serves many times
        found = double.generate(LINE, **past(store.read(LINE)), max_new_tokens=6, do_sample=False)
        assert torch.equal(found, expected)


def test_a_prompt_that_ends_at_a_boundary_leaves_one_token(double, tmp_path):
    store = PromptStore(double, tmp_path, boundary=8)
    assert store.read(LINE).get_seq_length() == 16  # 24 would leave nothing for `generate`
    assert store.read(LINE[:, :8]) is None
    assert store.read(LINE[:, :9]).get_seq_length() == 8


def test_what_was_not_used_for_longest_goes_first(double, tmp_path):
    store = PromptStore(double, tmp_path, boundary=12)
    store.read(LINE)
    ((_, first),) = files(tmp_path)
    largest = 2 * first.stat().st_size + 100
    store = PromptStore(double, tmp_path, boundary=12, max_bytes=largest)
    os.utime(first, (1, 1))
    second = other_end(1)
    store.read(second)
    assert store.length_of(LINE) == store.length_of(second) == 12
    os.utime(first, (1, 1))
    store.read(LINE)  # used: now the second is the older one
    store.read(other_end(2))
    assert store.length_of(LINE) == store.length_of(other_end(2)) == 12
    assert store.length_of(second) == 0
    assert sum(path.stat().st_size for _, path in files(tmp_path)) <= largest
    with pytest.raises(ValueError, match="`max_bytes` = 10, but one state of this model takes"):
        PromptStore(double, tmp_path / "small", boundary=12, max_bytes=10).read(LINE)
    assert not files(tmp_path / "small")


def test_another_model_is_refused(double, tmp_path):
    PromptStore(double, tmp_path).read(LINE)
    torch.manual_seed(7)
    other = convert(stock_model("llama"), **HYBRID).double()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"of another model in .*prompt_store\.json"):
        PromptStore(other, tmp_path)


@pytest.mark.parametrize("given", ["a shorter beginning", "another prompt"])
def test_a_file_under_the_name_of_another_is_not_used(double, tmp_path, given):
    store = PromptStore(double, tmp_path, boundary=8)
    store.read(LINE)
    (_, shorter), (_, path) = files(tmp_path)
    store.read(other_end(2))
    (other,) = {other for length, other in files(tmp_path) if length == 16} - {path}
    path.write_bytes((shorter if given == "a shorter beginning" else other).read_bytes())
    cache = store.read(LINE)
    assert cache.get_seq_length() == 16
    goes_on(double, LINE, cache)


def test_a_folder_of_an_earlier_version(double, tmp_path, monkeypatch):
    """Its files do not name their tokens, and its weights were compared by samples."""
    with monkeypatch.context() as earlier:
        earlier.setattr("hf_linear_attention.state.prompt_store.identity_of", lambda given: identity_of(given, 2))
        PromptStore(double, tmp_path, boundary=8)
    PromptStore(double, tmp_path, boundary=8).read(LINE)
    for _, path in files(tmp_path):
        save_prompt_state(double, load_prompt_state(double, path), path)
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["prompt_state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        about |= identity_of(double, 2)
        del about["sha256"]
        about["sha256"] = prompt_state._digest(about, tensors)
        save_file(tensors, path, metadata={"prompt_state": json.dumps(about)})
    read = count_reads(double, monkeypatch)
    assert PromptStore(double, tmp_path, boundary=8).read(LINE).get_seq_length() == 16
    assert sum(read) == 1  # `read_prompt_state` reads one token to know the sizes
