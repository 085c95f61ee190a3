"""Two mechanisms in different layers of one model: converted, saved, loaded with and without this package."""

from __future__ import annotations

import pytest
import torch
from matrix import sample_inputs, stock_config, stock_model

from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import with_softmax_layers
from hf_linear_attention.model_conversion import convert_config


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_features": 8, "layers": [0]}
FITTED = {"mechanism": "performer", "features": "favor++", "num_features": 8, "layers": [2]}  # layer 1 stays softmax


@pytest.fixture(scope="module")
def model():
    return convert(stock_model("llama"), settings=[HYBRID, FITTED])


def test_it_computes_what_the_layers_compute_in_models_of_their_own(model):
    """Each layer with its weights, under the settings that it has alone."""
    for settings in (HYBRID, FITTED):
        alone = convert(stock_model("llama"), settings=settings)
        both = with_softmax_layers(model, [layer for layer in (0, 2) if layer not in settings["layers"]])
        alone.load_state_dict(both.state_dict())
        with torch.no_grad():
            outputs = [other(**sample_inputs("llama")).logits for other in (alone, both)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([HYBRID, {**FITTED, "layers": [0, 2]}], "the entries 0 and 1 both name layer 0"),
        ([HYBRID, {**FITTED, "layers": "all"}], "`layers` = 'all' in entry 1 of the list"),
        ([HYBRID, {**FITTED, "layers": [7]}], "`layers` names [7]"),
        ([HYBRID, {**FITTED, "mechanism": "latent"}], "`latent` has no causal form"),
        ([{**HYBRID, "cross_attention": True}, {**FITTED, "cross_attention": True}], "`cross_attention` = true in"),
        ([], "one dict for each group of layers"),
    ],
)
def test_what_no_list_can_mean_is_refused(settings, said):
    with pytest.raises(ValueError, match="Invalid `linear_attention` settings") as caught:
        convert_config(stock_config("llama"), settings)
    assert said in str(caught.value)
