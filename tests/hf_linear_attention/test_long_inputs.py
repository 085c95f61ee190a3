"""Long inputs: chunks of decoders, which nobody can tell by the result, and memory that does not grow."""

from __future__ import annotations

import pytest
import torch
from caches import cache_of, past
from matrix import attend, mechanism_of, stock_model

from hf_linear_attention import convert
from hf_linear_attention.attention import long_inputs
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms import aft as mechanism_aft
from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms import window as mechanism_window
from hf_linear_attention.mechanisms.hybrid import HybridAttention


IDS = torch.randint(5, 60, (2, 29), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :7] = 0
SETTINGS = {
    "linear": {"mechanism": "linear", "feature_map": "exp", "decay": "gated", "input_gate": True},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "feature_map": "exp", "rope": "partial"},
    "gated_delta": {"mechanism": "gated_delta"},
    "softmax between": {"mechanism": "linear", "feature_map": "exp", "layers": [0]},
}


@pytest.fixture
def divided(monkeypatch):
    """Chunks of 6 tokens from 9 tokens on; the list has an entry for each input that was divided."""
    monkeypatch.setattr(long_inputs, "CHUNK_SIZE", 6)
    monkeypatch.setattr(long_inputs, "LONGEST_UNDIVIDED", 8)
    calls, divide = [], long_inputs._divided
    monkeypatch.setattr(long_inputs, "_divided", lambda *given: (calls.append(1), divide(*given))[1])
    return calls


def model_of(name: str = "linear", family: str = "llama", auto_class: str | None = None):
    torch.manual_seed(0)
    return convert(stock_model(family, auto_class), **SETTINGS[name]).eval()


def assert_close(actual, exact):
    torch.testing.assert_close(actual, exact.detach(), rtol=1e-4, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_one_pass(name, divided):
    model = model_of(name)
    exact = model(IDS, attention_mask=PADDED).logits  # with gradients, which keep an input whole
    assert not divided
    with torch.no_grad():
        output = model(IDS, attention_mask=PADDED, use_cache=False)
        assert_close(output.logits[PADDED.bool()], exact[PADDED.bool()])
        assert cache_of(output) is None
        nothing = {"return_dict": None, "use_cache": None, "labels": None}  # which are defaults
        assert_close(model(IDS, attention_mask=PADDED, logits_to_keep=8, **nothing).logits[1], exact[1, -8:])
        assert_close(model(IDS, attention_mask=PADDED, logits_to_keep=1, return_dict=False)[0], exact[:, -1:])
        assert len(divided) == 3
        cache = cache_of(model(IDS[:, :11]))
        output = model(IDS[:, 11:28], **past(cache))
        assert_close(output.logits[1], exact[1, 11:28])
        assert_close(model(IDS[:, 28:], **past(cache_of(output))).logits[1], exact[1, 28:])
    assert len(divided) == 5


@pytest.mark.parametrize(
    ("takes", "rows", "lengths"), [(True, 2, [12, 12, 5]), (True, 9, [6] * 4 + [5]), (None, 2, [6] * 4 + [5])]
)
def test_on_cuda_a_pass_is_as_long_as_its_kernels_allow(takes, rows, lengths, divided, monkeypatch):
    """24 tokens of all sequences together here; torch's form of exact keys would take memory for each of them."""
    monkeypatch.setattr(long_inputs, "TOKENS_OF_KERNELS", 24)
    monkeypatch.setattr(HybridAttention, "reads_at_once", lambda *_: takes)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    model, seen = model_of("hybrid"), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    with torch.no_grad():
        model(IDS[:1].expand(rows, -1))
    assert seen == lengths


def test_generation_is_the_same(divided, monkeypatch):
    model = model_of("hybrid")
    options = {"attention_mask": PADDED, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    text = model.generate(IDS, **options)
    assert divided
    monkeypatch.setattr(long_inputs, "LONGEST_UNDIVIDED", 8192)
    assert torch.equal(model.generate(IDS, **options), text)


PACKED = torch.cat((torch.arange(14), torch.arange(15))).expand(2, -1)
WHOLE = {
    "labels": {"labels": IDS},
    "hidden states": {"output_hidden_states": True},
    "packed": {"position_ids": PACKED},
    "square mask": {"attention_mask": torch.ones(2, 1, 29, 29, dtype=torch.bool).tril()},
    "rows to keep": {"logits_to_keep": torch.tensor([3, 4])},
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_all_tokens_gets_them(name, divided):
    model = model_of(name="softmax between" if name == "square mask" else "linear")
    exact = model(IDS, **WHOLE[name])
    with torch.no_grad():
        actual = model(IDS, **WHOLE[name])
    torch.testing.assert_close(actual.logits, exact.logits.detach())
    assert not divided


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForSequenceClassification"])
def test_hidden_states_are_joined_for_whoever_reads_them(auto_class, divided):
    model = model_of(auto_class=auto_class)
    exact = model(IDS, attention_mask=PADDED)[0]
    with torch.no_grad():
        assert_close(model(IDS, attention_mask=PADDED)[0][1], exact[1])
    assert len(divided) == 1  # that of its base model


SMALL_CHUNKS = (
    (mechanism_linear, "FEATURES_IN_CACHE"),
    (mechanism_aft, "PART_ELEMENTS"),
    (mechanism_window, "QUERIES_AT_ONCE"),
)


def most_beyond(settings, tokens: int, is_causal: bool) -> int:
    """The bytes that torch has allocated at most during a call, less those of its output; the last keys are hidden."""
    mechanism = mechanism_of(settings, heads=(4, 4), max_length=tokens)
    inputs = [torch.randn(1, tokens, 4, 8).transpose(1, 2) for _ in range(3)]
    mask = torch.arange(tokens)[None] < tokens - 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output, _ = attend(mechanism, *inputs, mask, is_causal=is_causal)
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    assert most >= output.nbytes
    return most - output.nbytes


@pytest.mark.parametrize(
    ("settings", "is_causal"),
    [
        ({"mechanism": "linear", "feature_map": "elu1"}, False),
        ({"mechanism": "linear", "feature_map": "exp", "num_features": 8}, True),
        ({"mechanism": "aft", "variant": "simple"}, False),
        ({"mechanism": "performer", "num_features": 8}, False),
        ({"mechanism": "hybrid", "num_features": 8, "window_size": 8, "decay": "learned"}, False),
        ({"mechanism": "window", "window_size": 8}, False),
    ],
    ids=str,
)
@torch.no_grad()
def test_memory_is_that_of_a_shorter_input(settings, is_causal, monkeypatch):
    # The C kernels need no chunks; here are small ones, so that short inputs have many.
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    for module, name in SMALL_CHUNKS:
        monkeypatch.setattr(module, name, 1 << 14)
    short, long = (most_beyond(settings, tokens, is_causal) for tokens in (2048, 8192))
    # What remains of the length is the mask of a byte per token, and one number per chunk.
    assert long <= 1.2 * short, (short, long)
