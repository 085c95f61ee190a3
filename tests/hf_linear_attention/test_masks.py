"""Masks: read from every format, refused where linear attention cannot honour them."""

from __future__ import annotations

import functools

import pytest
import torch
from architectures import tiny_model
from caches import cache_of, past
from matrix import qkv, stock_model
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask

from hf_linear_attention import convert
from hf_linear_attention.attention.masks import attend_packed, linear_attention_mask, read_mask
from hf_linear_attention.mechanisms.base import MechanismInputs


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
IDS = torch.randint(3, 64, (3, 6), generator=torch.Generator().manual_seed(0))


@functools.cache
def converted(family):
    return convert(stock_model(family, num_hidden_layers=1))


def square(padding, is_causal=True):
    mask = padding[:, None, None, :].expand(-1, 1, padding.shape[1], -1)
    return mask.tril() if is_causal else mask.clone()


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_is_read_from_every_format(is_causal):
    whole = square(PADDING, is_causal)
    additive = torch.zeros(3, 1, 6, 6).masked_fill(~whole, torch.finfo(torch.float32).min)
    for mask in (PADDING[:, None, None], PADDING.long(), whole, additive):
        key_mask, segments = read_mask(mask, 6, 0, is_causal)
        assert torch.equal(key_mask, PADDING)
        assert segments is None


def test_only_the_new_keys_are_read():
    seen = PADDING[:, :4]
    for mask in (seen[:, None, None], seen, square(seen)[:, :, 2:]):
        assert torch.equal(read_mask(mask, 2, 2, True)[0], PADDING[:, 2:4])
    # a static cache has columns for keys to come
    wide = torch.nn.functional.pad(square(PADDING)[:, :, 3:4], (0, 5))
    assert torch.equal(read_mask(wide, 1, torch.tensor(3), True)[0], PADDING[:, 3:4])


def test_packed_sequences_are_read_from_square_masks():
    numbers = torch.tensor([[1, 1, 2, 2, 2, 0, 3]])
    mask = ((numbers[:, :, None] == numbers[:, None, :]) & (numbers > 0)[:, None, :]).tril()[:, None]
    key_mask, segments = read_mask(mask, 7, 0, True)
    assert torch.equal(segments, numbers)
    assert torch.equal(key_mask, numbers > 0)


def test_a_sliding_band_is_taken_as_the_whole_context():
    band = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None]
    assert read_mask(band, 6, 0, True) == (None, None)


def test_other_square_masks_are_refused():
    for change in ((1, 4), (5, 2)):
        mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].clone()
        mask[..., change[0], change[1]] ^= True
        with pytest.raises(ValueError, match=r"which it cannot honour|with holes"):
            read_mask(mask, 6, 0, True)
    with pytest.raises(ValueError, match="one mask for all heads"):
        read_mask(torch.ones(1, 4, 6, 6, dtype=torch.bool), 6, 0, True)


def test_an_overlay_is_refused_and_never_ignored():
    model, embeds = converted("llama"), torch.zeros(1, 5, 32)
    for overlay in ("or_mask_function", "and_mask_function"):
        with pytest.raises(ValueError, match="custom mask overlay"):
            create_causal_mask(model.config, embeds, None, None, **{overlay: lambda b, h, q, k: q >= k})
    with pytest.raises(ValueError, match="look ahead"):
        create_causal_mask(model.config, embeds, None, None, block_sequence_ids=torch.tensor([[-1, 0, 0, 0, -1]]))


def test_mask_function_agrees_with_the_softmax_one():
    ours = linear_attention_mask(3, 6, 6, attention_mask=PADDING)
    assert ours.shape == (3, 1, 1, 6)
    theirs = sdpa_mask(3, 6, 6, mask_function=causal_mask_function, attention_mask=PADDING)
    assert torch.equal(ours & torch.ones(6, 6, dtype=torch.bool).tril(), theirs)
    assert linear_attention_mask(3, 6, 6, attention_mask=torch.ones_like(PADDING)) is None
    # while decoding, only the columns of the new keys; in cross-attention, all of them
    decoding = linear_attention_mask(3, 2, 4, q_offset=2, attention_mask=PADDING[:, :4])
    assert torch.equal(decoding, PADDING[:, None, None, 2:4])
    assert linear_attention_mask(3, 2, 6, q_offset=0, attention_mask=PADDING).shape == (3, 1, 1, 6)


CACHED = 4


@pytest.mark.parametrize(("family", "cached"), [("llama", 0), ("llama", CACHED), ("bert", 0)])
@torch.no_grad()
def test_a_mask_of_another_size_is_refused(family, cached):
    model, new = converted(family), 6 - cached
    cache = past(cache_of(model(IDS[:, :CACHED]))) if cached else {}
    # too few columns, one too many, between the new and all, other rows, and one row
    for rows, columns in ((3, 1 if cached else 4), (3, 7), (3, 5), (2, 6), (1, 6)):
        mask = torch.ones(rows, columns, dtype=torch.long)
        mask[:, 0] = 0
        sizes = rf"mask of {rows} rows and {columns} columns for 3 rows of {new} new tokens after {cached} cached"
        with pytest.raises(ValueError, match=sizes):
            model(IDS[:, -new:], attention_mask=mask, **cache)
        assert not cache or next(iter(cache.values())).get_seq_length() == CACHED
    places = (torch.arange(6) - PADDING.long().argmax(1, keepdim=True)).clamp(min=0)[:, CACHED:]
    # all tokens, or the new ones, which do not tell how many were padding before them
    for right, given in ((PADDING, {}), (PADDING[:, CACHED:], {"position_ids": places})) if cached else ():
        whole = model(IDS, attention_mask=PADDING).logits[:, CACHED:]
        old = cache_of(model(IDS[:, :CACHED], attention_mask=PADDING[:, :CACHED]))
        output = model(IDS[:, CACHED:], attention_mask=right, **given, **past(old)).logits
        real = PADDING[:, CACHED:]
        torch.testing.assert_close(output[real], whole[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
@torch.no_grad()
def test_a_ready_made_mask_is_for_all_rows_or_refused(family):
    model = converted(family)
    for shape in ((3, 1, 6, 5), (3, 1, 5, 6), (2, 1, 6, 6), (3, 6, 6), (3, 1, 1, 5), (2, 1, 1, 6), (6,)):
        mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"a(n attention)? mask of"):
            model(IDS, attention_mask=mask.tril() if len(shape) == 4 and shape[2] > 1 else mask)
    expected = model(IDS, attention_mask=PADDING[1:2].expand(3, -1)).logits
    for mask in (square(PADDING[1:2], is_causal=family == "llama"), PADDING[1:2, None, None]):
        actual = model(IDS, attention_mask=mask).logits
        torch.testing.assert_close(actual[:, PADDING[1]], expected[:, PADDING[1]])


@torch.no_grad()
def test_masks_of_an_encoder_that_a_converted_decoder_attends_to():
    model = convert(tiny_model("bart", "AutoModelForSeq2SeqLM"), cross_attention=True)
    encoded = model.get_encoder()(IDS)
    logits = model(encoder_outputs=encoded, attention_mask=PADDING, decoder_input_ids=IDS[:, :4]).logits
    for row, real in enumerate(PADDING):  # as without the padding
        one = type(encoded)(last_hidden_state=encoded.last_hidden_state[row : row + 1, real])
        alone = model(encoder_outputs=one, decoder_input_ids=IDS[row : row + 1, :4]).logits
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-4, atol=1e-5)
    for wrong in (PADDING[:, :5], PADDING[:2], PADDING[:1]):
        with pytest.raises(ValueError, match=r"mask of \d rows and \d columns for 3 rows of 6"):
            model(encoder_outputs=encoded, attention_mask=wrong, decoder_input_ids=IDS[:, :4])


def test_packed_attention_is_linear_in_memory_and_exact():
    lengths = (1, 3, 8, 9, 20)
    segments = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None].repeat(2, 1)
    segments[1, :4] = 0
    query, key, value = qkv(41)
    rows = []

    def softmax(query, key, value, mask):
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        return scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)

    def attend(inputs):
        rows.append(inputs.query.shape[0] * inputs.query.shape[2])
        return softmax(*inputs[:3], inputs.attention_mask[:, None, None])

    actual = attend_packed(attend, MechanismInputs(query, key, value, segments, 0.3, is_causal=False))
    together = (segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None]
    expected = softmax(query, key, value, together[:, None])
    torch.testing.assert_close(actual[segments > 0], expected[segments > 0])
    assert (actual[segments == 0] == 0).all()
    assert sum(rows) <= 2 * segments.numel()


@torch.no_grad()
def test_an_exported_encoder_refuses_packed_sequences():
    """Every encoder mechanism would have to know of them; outside a graph each sequence is attended to by itself."""
    model, ids = convert(stock_model("bert"), mechanism="nystrom", num_landmarks=4), torch.arange(3, 11)[None]
    mask = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2]])[:, None, None]
    model(input_ids=ids, attention_mask=mask)
    with pytest.raises(NotImplementedError, match="its own row of the batch"):
        torch.export.export(model, (), {"input_ids": ids, "attention_mask": mask}, strict=False)
