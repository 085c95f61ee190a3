"""What stock attention hands to the interface, observed without its weights, wherever a model is built."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_config, tiny_model
from matrix import default_dtype
from transformers import AutoModel
from transformers.initialization import no_init_weights

from hf_linear_attention.attention.architectures import attention_modules
from hf_linear_attention.attention_calls import KEYWORDS, NotObservedError, attention_call, interface_keywords
from hf_linear_attention.observed_rotary import PAIRINGS, RotaryPairing, rotary_pairing


PLACES = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "no_init_weights": no_init_weights,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.fixture(autouse=True)
def nothing_known():
    for known in (KEYWORDS, PAIRINGS):
        known.clear()


def first_attention(model):
    return next(iter(attention_modules(model).values()))


@pytest.mark.parametrize("place", PLACES)
def test_it_is_observed_wherever_a_model_is_built(place):
    with PLACES[place]():
        module = first_attention(AutoModel.from_config(tiny_config("gpt_oss")))
        keywords = interface_keywords(module, type(module))
        pairing = rotary_pairing(module)
    assert keywords >= {"scaling", "dropout", "s_aux"}
    assert pairing == RotaryPairing("half", "half", 2)


def test_nothing_is_left_behind():
    """No random number, no attribute, no other implementation, no gradient; in training mode too."""
    module = first_attention(tiny_model("llama", "AutoModel", attention_dropout=0.5).train())
    before, attributes, implementation = torch.get_rng_state(), dict(vars(module)), module.config._attn_implementation
    call = attention_call(module, type(module))
    assert (call.query.shape, call.key.shape) == ((1, 4, 2, 8), (1, 4, 2, 8))
    assert not call.query.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
    assert all(vars(module)[name] is value for name, value in attributes.items())
    assert vars(module).keys() == attributes.keys()
    assert module.config._attn_implementation == implementation


def test_who_cannot_be_observed_is_named_and_left_alone(caplog):
    class OddAttention(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, hidden_states):
            raise RuntimeError("no such kernel")

    module = OddAttention(tiny_config("llama"))
    with pytest.raises(NotObservedError, match="OddAttention could not be observed: no such kernel"):
        attention_call(module, OddAttention)
    assert attention_modules(torch.nn.ModuleList([module])) == {}
