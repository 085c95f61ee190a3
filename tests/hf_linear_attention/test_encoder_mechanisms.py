"""What only mechanisms of encoders have: starts, sizes, and where they are exact."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import attend, build_mechanism, mechanism_of, qkv, stock_model

from hf_linear_attention import LinearAttentionSettings, convert
from hf_linear_attention.mechanisms.nystrom import iterative_pinv


def build(name: str, max_length: int | None = None, **options):
    """At its start, in float64."""
    return mechanism_of({"mechanism": name, **options}, max_length=max_length).double()


def inputs(length: int, batch: int = 1, std: float = 2.0):
    return qkv(length, batch=batch, std=std, dtype=torch.float64, seed=length)


def run(mechanism, query, key, value, mask=None):
    return attend(mechanism, query, key, value, mask, scaling=0.3, is_causal=False)[0]


def softmax(query, key, value):
    return reference.attend(0.3 * query @ reference.repeat_heads(key, 4).transpose(-1, -2), value).transpose(1, 2)


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
def test_sharing_has_the_papers_number_of_matrices(sharing, count, tmp_path):
    """Linformer 2020, section 4: for 12 layers of 12 heads, 288, 24, 12 or 1 distinct projection matrices."""
    stock = stock_model("bert", num_hidden_layers=12, num_attention_heads=12, hidden_size=24, intermediate_size=24)
    model = convert(stock, mechanism="linformer", projection_size=4, projection_sharing=sharing)
    assert sum(value.shape[0] for name, value in model.state_dict().items() if "_projection" in name) == count
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 9))
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_every_projection_but_the_random_one_starts_as_the_means():
    found = []
    for kind in ("learned", "stretched", "mean-pool", "conv"):
        length = None if kind == "mean-pool" else 96
        found.append(run(build("linformer", length, projection=kind, projection_size=8), *inputs(96)))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-6, atol=1e-6)  # `mean_pool_matrix` is float32


def test_random_projections_are_gaussian_of_variance_1_over_k_and_stored():
    mechanism = build_mechanism("linformer-random", max_length=4000)
    state = mechanism.state_dict()
    assert sorted(state) == ["key_projection", "value_projection"]
    assert not list(mechanism.parameters())
    for matrix in state.values():
        assert abs(matrix.var().item() * 9 - 1) < 0.03  # 36,000 draws: the variance is known to 0.75 %
    assert abs((state["key_projection"] * state["value_projection"]).mean().item()) * 9 < 0.03


def test_each_layer_may_have_its_own_size():
    for layers, expected in (("all", [7, 5, 3]), ([0, 2], [7, 3])):
        model = convert(stock_model("bert"), mechanism="linformer", projection_size=[7, 5, 3], layers=layers)
        assert [v.shape[1] for n, v in model.state_dict().items() if n.endswith("key_projection")] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"projection": "mean-pool", "projection_sharing": "none"}, "`projection_sharing` = `none` has no effect"),
        ({"projection_size": [7, 5]}, "has 2 values, but the model has 3 layers"),
        ({"projection_size": [7, 0, 5]}, r"at least 1 \(layer 1\)"),
        ({"projection_size": [7, 65, 5]}, "larger than the longest input, 64"),
        ({"projection_size": [7, 5, 5], "projection_sharing": "layerwise"}, "must be one number"),
        ({"mechanism": "nystrom", "conv_kernel_size": 4}, "`conv_kernel_size` = 4 must be odd"),
    ],
)
def test_impossible_options_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionSettings({"mechanism": "linformer", **settings}, num_layers=3, max_length=64)


def test_an_input_that_is_too_long_says_what_to_do():
    with pytest.raises(ValueError, match=r"Got 9 positions.*`max_length` = 8.*--max_length"):
        run(build_mechanism("linformer-headwise", max_length=8).double(), *inputs(9))


def test_what_starts_at_0_can_be_learned():
    """E and F of `linformer_linear` beside the means, and the convolution of `nystrom`, which adds nothing then."""
    mechanism = build("linformer_linear", 20, projection_size=5)
    (run(mechanism, *inputs(20)) * torch.randn(1, 20, 4, 8)).sum().backward()
    for projection in (mechanism.key_projection, mechanism.value_projection):
        assert (projection.detach() == 0).any()
        assert (projection.grad != 0).all()
    convolving = build("nystrom", num_landmarks=6, conv_kernel_size=5)
    assert torch.equal(run(build("nystrom", num_landmarks=6), *inputs(25)), run(convolving, *inputs(25)))
    (run(convolving, *inputs(25)) * torch.randn(1, 25, 4, 8)).sum().backward()
    assert (convolving.conv_weight.grad != 0).all()


def test_layers_and_seeds_start_from_different_latents():
    found = []
    for seed in (0, 1):
        model = convert(stock_model("bert"), mechanism="latent", num_latents=5, seed=seed)
        found += [value for name, value in model.state_dict().items() if name.endswith(".latents")]
    assert len({latents.flatten()[0].item() for latents in found}) == 6


def test_the_formula_itself_is_near_exact_with_as_many_landmarks_as_tokens():
    """Landmarks that are the tokens give A Z A V, and Z tends to the pseudo-inverse of A, of singular ones too."""
    query, key, value = inputs(12, std=1.0)
    logits = 0.3 * query @ reference.repeat_heads(key, 4).transpose(-1, -2)
    exact, matrix = softmax(query, key, value).transpose(1, 2), logits.softmax(-1)
    approximations = (matrix @ iterative_pinv(matrix, steps) @ matrix for steps in (2, 6, 12, 24))
    errors = [(a @ reference.repeat_heads(value, 4) - exact).norm() / exact.norm() for a in approximations]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6
    matrix = torch.stack((torch.zeros(5, 5), torch.eye(5), torch.full((5, 5), 0.2)))
    inverse = iterative_pinv(matrix.requires_grad_(), 6)
    torch.testing.assert_close(inverse, torch.linalg.pinv(matrix.detach()), rtol=1e-4, atol=1e-4)
    inverse.sum().backward()
    assert matrix.grad.isfinite().all()
