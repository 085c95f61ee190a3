"""Masks: read from every format, refused where linear attention cannot honour them."""

from __future__ import annotations

import pytest
import torch
from matrix import stock_model
from transformers.masking_utils import causal_mask_function, create_causal_mask, sdpa_mask

from hf_linear_attention import convert
from hf_linear_attention.attention_masks import attend_packed, linear_attention_mask, read_mask


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)


def square(padding, is_causal=True):
    mask = padding[:, None, None, :].expand(-1, 1, padding.shape[1], -1)
    return mask.tril() if is_causal else mask.clone()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", ["ours", "flash", "square", "additive"])
def test_padding_is_read_from_every_format(form, is_causal):
    mask = {"ours": PADDING[:, None, None], "flash": PADDING.long(), "square": square(PADDING, is_causal)}.get(form)
    if form == "additive":
        mask = torch.zeros(3, 1, 6, 6).masked_fill(~square(PADDING, is_causal), torch.finfo(torch.float32).min)
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


@pytest.mark.parametrize("change", [(1, 4), (5, 2)])
def test_other_square_masks_are_refused(change):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].clone()
    mask[..., change[0], change[1]] ^= True
    with pytest.raises(ValueError, match=r"cannot honour that|with holes"):
        read_mask(mask, 6, 0, True)


def test_masks_per_head_are_refused():
    with pytest.raises(ValueError, match="one mask for all heads"):
        read_mask(torch.ones(1, 4, 6, 6, dtype=torch.bool), 6, 0, True)


def test_an_overlay_is_refused_and_never_ignored():
    model = convert(stock_model("llama"))
    embeds = torch.zeros(1, 5, 32)
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


def test_packed_attention_is_linear_in_memory_and_exact():
    lengths = (1, 3, 8, 9, 20)
    segments = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(lengths)])[None].repeat(2, 1)
    segments[1, :4] = 0
    query, key, value = torch.randn(2, 4, 41, 8), torch.randn(2, 2, 41, 8), torch.randn(2, 2, 41, 8)
    rows = []

    def attend(query, key, value, mask):
        rows.append(query.shape[0] * query.shape[2])
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        return output.transpose(1, 2)

    actual = attend_packed(attend, query, key, value, None, segments)
    together = ((segments[:, :, None] == segments[:, None]) & (segments > 0)[:, None])[:, None]
    expected = (
        torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), together
        )
        .transpose(1, 2)
        .nan_to_num(0.0)
    )
    torch.testing.assert_close(actual[segments > 0], expected[segments > 0])
    assert (actual[segments == 0] == 0).all()
    assert sum(rows) <= 2 * segments.numel()


def test_an_exported_encoder_refuses_packed_sequences():
    """Every encoder mechanism would have to know of them; outside a graph each sequence is attended to by itself."""
    model, ids = convert(stock_model("bert"), mechanism="nystrom", num_landmarks=4), torch.arange(3, 11)[None]
    mask = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2]])[:, None, None]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        with pytest.raises(NotImplementedError, match="its own row of the batch"):
            torch.export.export(model, (), {"input_ids": ids, "attention_mask": mask}, strict=False)
