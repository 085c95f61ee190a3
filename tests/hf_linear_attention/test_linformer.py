"""Linformer: the paper's formula at full length, means of what is there at any other."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import build_mechanism, stock_model

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.linformer import LinformerAttention, mean_pool_matrix, stretched


ROWS = ("linformer-none", "linformer-headwise", "linformer-key-value", "linformer-layerwise")


@pytest.mark.parametrize("row", ROWS)
def test_full_length_is_the_formula_of_the_paper(row):
    mechanism = build_mechanism(row, max_length=24, dtype=torch.float64)
    query, key = torch.randn(2, 4, 24, 8, dtype=torch.float64), torch.randn(2, 2, 24, 8, dtype=torch.float64)
    value = torch.randn(2, 2, 24, 8, dtype=torch.float64)
    leaves = [query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), *mechanism.parameters()]
    actual = mechanism.attend(query, key, value, attention_mask=None, scaling=0.3, is_causal=False, state=None)[0]
    expected = reference.linformer(query, key, value, *mechanism._projections, 0.3).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad((actual * direction).sum(), leaves),
        torch.autograd.grad((expected * direction).sum(), leaves),
    ):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length", [1, 7, 8, 13, 24])
def test_a_shorter_input_is_pooled_by_the_count_of_what_is_there(length):
    """At the start every slot is the mean of the real keys of its segment; slots without keys take no part."""
    settings = LinearAttentionSettings({"mechanism": "linformer", "projection_size": 6}, max_length=24)
    mechanism = LinformerAttention(settings, build_mechanism("linformer-none", max_length=24).shape)
    mechanism.reset_parameters()
    query, key, value = torch.randn(1, 4, length, 8), torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    segments = [slice(start, min(start + 4, length)) for start in range(0, length, 4)]
    means = [torch.stack([x[:, :, part].mean(2) for part in segments], dim=2) for x in (key, value)]
    weights = (query @ reference.repeat_heads(means[0], 4).transpose(-1, -2) * 0.3).softmax(-1)
    expected = (weights @ reference.repeat_heads(means[1], 4)).transpose(1, 2)
    actual = mechanism.attend(query, key, value, attention_mask=None, scaling=0.3, is_causal=False, state=None)[0]
    torch.testing.assert_close(actual, expected)
    ones = mechanism.attend(
        query, key, torch.ones_like(value), attention_mask=None, scaling=0.3, is_causal=False, state=None
    )
    torch.testing.assert_close(ones[0], torch.ones_like(ones[0]), rtol=0, atol=1e-6)


def test_mean_pool_matrix_averages():
    pool = mean_pool_matrix(5, 13)
    torch.testing.assert_close(pool.sum(1), torch.ones(5))
    assert ((pool > 0).sum(0) == 1).all()


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
def test_sharing_has_the_papers_number_of_matrices(sharing, count, tmp_path):
    """Linformer 2020, section 4: for 12 layers of 12 heads, 288, 24, 12 or 1 distinct projection matrices."""
    stock = stock_model("bert", num_hidden_layers=12, num_attention_heads=12, hidden_size=24, intermediate_size=24)
    model = convert(stock, mechanism="linformer", projection_size=4, projection_sharing=sharing)
    names = [name for name in model.state_dict() if "_projection" in name]
    assert sum(model.state_dict()[name].shape[0] for name in names) == count
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 9))
    assert torch.equal(again(ids).logits, model(ids).logits)


def tokens(length: int, batch: int = 1):
    torch.manual_seed(length)
    return [torch.randn(batch, heads, length, 8) for heads in (4, 2, 2)]


def run(mechanism, query, key, value, mask=None):
    return mechanism.attend(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


@pytest.mark.parametrize("row", ["linformer-mean-pool", "linformer-stretched"])
@pytest.mark.parametrize("length", [1, 5, 9])
def test_few_tokens_are_not_compressed(length, row):
    query, key, value = tokens(length)
    logits = 0.3 * query.double() @ reference.repeat_heads(key.double(), 4).transpose(-1, -2)
    expected = reference.attend(logits, value).transpose(1, 2).float()
    mechanism = build_mechanism(row)
    torch.testing.assert_close(run(mechanism, query, key, value), expected)
    longer = torch.ones(1, 40, dtype=torch.bool)
    longer[:, length:] = False  # a row of another batch: padding does not count
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, 40 - length), value=7.0) for x in (key, value))
    torch.testing.assert_close(run(mechanism, query, keys, values, longer), expected)


def test_a_stretched_projection_at_full_length_is_the_formula_of_the_paper():
    """E is the means plus the parameter, and so is F; values and gradients."""
    mechanism = build_mechanism("linformer-stretched-none", max_length=24, dtype=torch.float64)
    leaves = [x.double().requires_grad_() for x in tokens(24, batch=2)] + list(mechanism.parameters())
    actual = run(mechanism, *leaves[:3])
    pool = mean_pool_matrix(7, 24).double()
    expected = reference.linformer(*leaves[:3], *(pool + leaf for leaf in leaves[3:]), 0.3).transpose(1, 2)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # `mean_pool_matrix` is float32
    direction = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad((actual * direction).sum(), leaves),
        torch.autograd.grad((expected * direction).sum(), leaves),
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [10, 11, 37, 48, 96, 97])
def test_a_stretched_matrix_keeps_its_sums_and_is_itself_at_full_length(length):
    """The weights of the tokens are the columns shared out by overlap, wherever padding is."""
    generator = torch.Generator().manual_seed(length)
    change = torch.randn(2, 9, 97, generator=generator, dtype=torch.float64)
    mask = torch.zeros(3, 97, dtype=torch.bool)
    for row in mask:
        row[torch.randperm(97, generator=generator)[:length]] = True
    columns = stretched(change, mask)
    mean = reference.stretched(torch.zeros_like(change), length)
    for row, real in zip(columns, mask):
        assert not row[..., ~real].any()
        torch.testing.assert_close(row[..., real], reference.stretched(change, length) - mean)
    torch.testing.assert_close(columns.sum(-1), change.sum(-1).expand(3, -1, -1))
    if length == 97:
        torch.testing.assert_close(columns[0], change)


def test_a_stretched_projection_is_saved_and_loaded(tmp_path):
    model = convert(stock_model("bert"), mechanism="linformer", projection="stretched", projection_size=5).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_projection" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids, mask = torch.randint(3, 60, (3, 31)), torch.ones(3, 31, dtype=torch.long)
    mask[0, :20], mask[1, 3:] = 0, 0
    assert torch.equal(again(ids, mask).logits, model(ids, mask).logits)


def test_mean_pooling_takes_any_length_and_has_nothing_to_store():
    mechanism = build_mechanism("linformer-mean-pool", max_length=None)
    assert not mechanism.state_dict()
    query, key, value = tokens(200)
    pools = [x.unflatten(2, (8, 25)).mean(3) for x in (key, value)]
    mechanism.num_slots = 8
    weights = (0.3 * query @ reference.repeat_heads(pools[0], 4).transpose(-1, -2)).softmax(-1)
    expected = (weights @ reference.repeat_heads(pools[1], 4)).transpose(1, 2)
    torch.testing.assert_close(run(mechanism, query, key, value), expected)


def test_every_projection_but_the_random_one_starts_as_the_means():
    query, key, value = tokens(96)
    outputs = []
    for kind in ("learned", "stretched", "mean-pool", "conv"):
        settings = {"mechanism": "linformer", "projection": kind, "projection_size": 8}
        shape = build_mechanism("linformer-none", max_length=96).shape
        mechanism = LinformerAttention(LinearAttentionSettings(settings, max_length=96), shape)
        mechanism.reset_parameters()
        outputs.append(run(mechanism, query, key, value))
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)


def test_random_projections_are_gaussian_of_variance_1_over_k_and_stored():
    mechanism = build_mechanism("linformer-random", max_length=4000)
    state = mechanism.state_dict()
    assert sorted(state) == ["key_projection", "value_projection"]
    assert not list(mechanism.parameters())
    for matrix in state.values():
        assert abs(matrix.var().item() * 9 - 1) < 0.03  # 36,000 draws: the variance is known to 0.75 %
    assert abs((state["key_projection"] * state["value_projection"]).mean().item()) * 9 < 0.03


@pytest.mark.parametrize("row", ["linformer-mean-pool", "linformer-conv", "linformer-headwise", "linformer-stretched"])
def test_an_empty_row_has_finite_gradients(row):
    leaves, mask = [x.requires_grad_() for x in tokens(20, batch=2)], torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    run(build_mechanism(row), *leaves, mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_each_layer_may_have_its_own_size():
    model = convert(stock_model("bert"), mechanism="linformer", projection_size=[7, 5, 3])
    sizes = [value.shape[1] for name, value in model.state_dict().items() if name.endswith("key_projection")]
    assert sizes == [7, 5, 3]
    some = convert(stock_model("bert"), mechanism="linformer", projection_size=[7, 5, 3], layers=[0, 2])
    assert [v.shape[1] for n, v in some.state_dict().items() if n.endswith("key_projection")] == [7, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"projection": "mean-pool", "projection_sharing": "none"}, "`projection_sharing` = `none` has no effect"),
        ({"projection": "mean-pool", "max_length": 64}, "`max_length` = `64` has no effect"),
        ({"projection": "mean-pool", "seed": 1}, "`seed` = `1` has no effect with `projection` = `mean-pool`"),
        ({"projection": "stretched", "seed": 1}, "`seed` = `1` has no effect with `projection` = `stretched`"),
        ({"projection": "stretched", "projection_size": 65}, "larger than the longest input, 64"),
        ({"projection": "conv", "seed": 1}, "`seed` = `1` has no effect with `projection` = `conv`"),
        ({"projection": "max-pool"}, "must be one of `learned`, `mean-pool`"),
        ({"projection_size": [7, 5]}, "has 2 values, but the model has 3 layers"),
        ({"projection_size": [7, 0, 5]}, r"at least 1 \(layer 1\)"),
        ({"projection_size": [7, "5", 5]}, r"type int \(layer 1\)"),
        ({"projection_size": [7, 65, 5]}, "larger than the longest input, 64"),
        ({"projection_size": [7, 5, 5], "projection_sharing": "layerwise"}, "must be one number"),
        ({"projection_sharing": ["none"]}, "must be of type str"),
    ],
)
def test_impossible_options_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionSettings({"mechanism": "linformer", **settings}, num_layers=3, max_length=64)


def test_an_input_that_is_too_long_says_what_to_do():
    mechanism = build_mechanism("linformer-headwise", max_length=8)
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"Got 9 positions.*`max_length` = 8.*--max_length"):
        mechanism.attend(torch.randn(1, 4, 9, 8), x, x, attention_mask=None, scaling=1.0, is_causal=False, state=None)
