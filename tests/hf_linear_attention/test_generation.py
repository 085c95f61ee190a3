"""Generation from the constant state gives the tokens that recomputing the whole sequence gives."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from caches import cache_of, past
from matrix import MECHANISM_ROWS, recording_cache, stock_model
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from hf_linear_attention import convert


LINEAR = {"mechanism": "linear", "feature_map": "exp", "num_features": 16}
# shorter than the prompts, so that tokens leave the window in prefill and in decoding
HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}
PERFORMER = {"mechanism": "performer", "num_features": 16}
# Each kind of state, each kind of positions, and softmax layers beside converted ones.
CASES = {
    "linear": ("llama", LINEAR),
    "hybrid": ("llama", HYBRID),
    "gated_delta": ("llama", {"mechanism": "gated_delta", "conv_size": 3}),
    "gpt2": ("gpt2", {**LINEAR, "layers": [0, 2]}),
    "gpt_neox": ("gpt_neox", {**HYBRID, "layers": [0, 2]}),
    "opt": ("opt", PERFORMER),
    **{row: ("llama", MECHANISM_ROWS[row]) for row in ("aft-local", "linear-gated")},
    "window": ("llama", MECHANISM_ROWS["window"]),
}
SOME = ("linear", "hybrid", "gated_delta", "gpt2", "gpt_neox", "opt")
STATES = ("linear", "hybrid", "gated_delta")
PROMPT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))
# Row 0 has three tokens of padding on the left.
MASK = torch.ones_like(PROMPT).index_put((torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2])), torch.tensor(0))


@functools.cache
def build(name: str, family: str | None = None):
    """One model for all tests of a case, by default of its own family; none of them may change it."""
    own, settings = CASES[name]
    model = convert(stock_model(family or own), **settings)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def generate(model, **kwargs):
    arguments = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": False, **kwargs}
    return model.generate(PROMPT, **arguments, return_dict_in_generate=True, output_scores=True, output_logits=True)


def assert_same(actual, expected):
    assert torch.equal(actual.sequences, expected.sequences)
    # float32 sums in another order, through three layers of weights with a standard deviation of 0.3
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_cached_generation_equals_recomputation(name):
    model = build(name)
    expected = generate(model, use_cache=False)
    # the last call gives the same text: nothing of the earlier ones is left in the model
    for options in ({}, {"prefill_chunk_size": 4}, {"cache_implementation": "static"}, {}):
        assert_same(generate(model, **options), expected)
    # and a padded row the text that it gives alone
    alone = model.generate(PROMPT[:1, 3:], max_new_tokens=8, do_sample=False)
    assert torch.equal(expected.sequences[0, 3:], alone[0])


@pytest.mark.parametrize("name", SOME)
def test_beams_samples_and_looked_up_tokens(name):
    """The last ones go back to an earlier state where tokens from the prompt turn out wrong."""
    model, beams = build(name), {"num_beams": 3, "num_return_sequences": 2}
    cached, recomputed = generate(model, **beams), generate(model, use_cache=False, **beams)
    assert torch.equal(cached.sequences, recomputed.sequences)
    torch.testing.assert_close(cached.sequences_scores, recomputed.sequences_scores, rtol=1e-4, atol=1e-4)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        sampled.append(generate(model, do_sample=True, top_k=20, num_return_sequences=2, use_cache=use_cache).sequences)
    assert torch.equal(*sampled)
    lookup, options = torch.cat([PROMPT[1:]] * 3, dim=1), {"max_new_tokens": 12, "do_sample": False}
    looked_up = model.generate(lookup, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(looked_up, model.generate(lookup, use_cache=False, **options))


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_every_split_of_prefill_and_decoding_gives_the_logits_of_one_forward(name):
    model = build(name)
    ids = torch.randint(3, 64, (2, 17), generator=torch.Generator().manual_seed(4))
    whole = model(ids, use_cache=False).logits
    for split in range(1, 17):
        first = model(ids[:, :split], use_cache=True)
        second = model(ids[:, split:], **past(cache_of(first)))
        logits = torch.cat((first.logits, second.logits), dim=1)
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STATES)
def test_assisted_decoding_as_target_and_as_assistant(name):
    model, prompt = build(name), PROMPT[1:]
    alone = model.generate(prompt, max_new_tokens=12, do_sample=False)
    for assistant in (build("opt", "llama"), model, stock_model("llama")):
        assisted = model.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=assistant)
        assert torch.equal(assisted, alone)


@pytest.mark.parametrize("name", [*STATES, "gpt2"])
def test_an_assistant_proposes_what_it_would_generate_itself(name, monkeypatch):
    """Whatever it proposes, the target corrects: that the text is right says nothing of the assistant's rollback."""
    assistant = copy.deepcopy(build(name))
    assistant.generation_config.update(
        num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    proposals = []

    def recorded(generator, input_ids, *args, **kwargs):
        result = get_candidates(generator, input_ids, *args, **kwargs)
        proposals.append((input_ids, result[0]))
        return result

    get_candidates = AssistedCandidateGenerator.get_candidates
    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", recorded)
    target = stock_model(CASES[name][0], initializer_range=0.2)  # another model, which rejects most of them
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = 0, None
    # no padding tokens: transformers gives the assistant no mask, so it would take those that come out for padding
    arguments = {"do_sample": False, "suppress_tokens": [0]}
    text = target.generate(PROMPT[1:], max_new_tokens=12, assistant_model=assistant, **arguments)
    assert torch.equal(text, target.generate(PROMPT[1:], max_new_tokens=12, **arguments))
    assert sum(candidates.shape[1] - ids.shape[1] for ids, candidates in proposals) > 12  # some were rejected
    for ids, candidates in proposals:
        if (count := candidates.shape[1] - ids.shape[1]) > 0:
            assert torch.equal(candidates, assistant.generate(ids, max_new_tokens=count, use_cache=False, **arguments))


@pytest.mark.parametrize("cross_attention", [False, True])
def test_whisper_returns_its_outputs_one_by_one(cross_attention: bool):
    """It reads `keys` and `values` of every layer of the cache then, to split them by example."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 30, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None, "init_std": 0.3}
    config = WhisperConfig(vocab_size=100, max_target_positions=40, **sizes, **heads, **tokens, **none)
    stock = WhisperForConditionalGeneration(config).eval()
    stock.generation_config.no_timestamps_token_id = 50
    model = convert(stock, mechanism="linear", cross_attention=cross_attention)
    features = torch.randn(2, 8, 60)
    model.generation_config.update(max_new_tokens=6, max_length=None, return_dict_in_generate=True)
    for beams in (1, 2):
        output = model.generate(features, num_beams=beams)
        assert cache_of(output) is not None
        assert torch.equal(output.sequences, model.generate(features, num_beams=beams, use_cache=False).sequences)


@pytest.mark.parametrize("name", STATES)
@torch.no_grad()
def test_crop_is_exact_also_once_saved(name, tmp_path):
    model, ids = build(name), torch.randint(3, 64, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = recording_cache(model)

    def check(cache, start, stop):
        actual = model(ids[:, start:stop], attention_mask=mask[:, :stop], **past(cache)).logits
        expected = model(ids[:, :stop], attention_mask=mask[:, :stop], use_cache=False).logits[:, start:]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    check(cache, 0, 10)
    cache.crop(-3)  # the tokens that stay are not in the state yet
    assert cache.get_seq_length() == 7
    model.save_prompt_state(cache, tmp_path / "prompt.safetensors")
    check(model.load_prompt_state(tmp_path / "prompt.safetensors"), 7, 20)
    check(cache, 7, 12)
    cache.crop(0)
    check(cache, 12, 15)
    cache.reorder_cache(torch.tensor([1, 0]))  # as beams are, with what was recorded
    ids, mask = ids.flip(0), mask.flip(0)
    cache.crop(-2)
    check(cache, 13, 15)
    cache.crop(-1)
    cache.crop(-1)
    check(cache, 13, 20)
    with pytest.raises(ValueError, match="only 7 tokens were recorded"):
        cache.crop(-9)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(3)
