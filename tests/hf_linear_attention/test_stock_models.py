"""Stock models with gated delta layers compute with our kernels what transformers' torch code computes."""

from __future__ import annotations

import importlib

import pytest
import torch
from architectures import tiny_model

from hf_linear_attention import accelerate_stock_models, stock_models
from hf_linear_attention.stock_models import STOCK_FUNCTIONS, STOCK_MODELS


# Text models with few and small heads.
KIMI = {"linear_head_dim": 16, "linear_num_heads": 4}
QWEN = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
TWINS = {
    "bailing_hybrid": {**KIMI, "layer_types": LAYERS, "num_expert_group": 1},
    "kimi_linear": {**KIMI, "layer_types": LAYERS},
    "olmo_hybrid": {**QWEN, "layer_types": LAYERS, "linear_num_key_heads": 4},
    "qwen3_5_text": {**QWEN, "layer_types": LAYERS},
    "qwen3_5_moe_text": {**QWEN, "layer_types": LAYERS},
    "qwen3_next": {**QWEN, "layer_types": LAYERS},
}
IDS = torch.randint(5, 60, (2, 90), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of our kernels."""
    count, kernel = [], stock_models.gated_delta
    monkeypatch.setattr(
        stock_models, "gated_delta", lambda *args, **kwargs: (count.append(1), kernel(*args, **kwargs))[1]
    )
    return count


def twin(name: str):
    """A tiny twin whose decays are moderate: random ones of up to 100 nats a token cost transformers' sums digits."""
    model = tiny_model(name, "AutoModelForCausalLM", num_hidden_layers=4, **TWINS[name])
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            parameter.data.fill_(-2.0)
    return model


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
@pytest.mark.parametrize("name", STOCK_MODELS)
def test_functions_are_those_of_transformers(name, kind, calls):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (function,) = [x for x in STOCK_FUNCTIONS if kind in x and hasattr(module, x)]
    stock = getattr(module, function)
    torch.manual_seed(0)
    by_feature, length = "kimi" in function, 1 if kind == "recurrent" else 70
    query, key = torch.randn(2, 2, length, 2, 8)
    value = torch.randn(2, length, 2 if by_feature else 4, 12)
    g = -torch.rand(*value.shape[:3], 8) if by_feature else -torch.rand(value.shape[:3])
    state = torch.randn(2, value.shape[2], 8, 12)
    tensors, kept = (query, key, value, g, torch.rand(value.shape[:3])), state.clone()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    exact = stock(*tensors, **options)
    with accelerate_stock_models():
        actual = getattr(module, function)(*tensors, **options)
        assert getattr(module, function)(*tensors, **{**options, "output_final_state": False})[1] is None
    torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)  # float32 sums in another order
    assert len(calls) == 2
    assert torch.equal(state, kept)


@pytest.mark.parametrize("name", TWINS)
def test_logits_and_generation_are_those_of_transformers(name, calls):
    model = twin(name)
    generation = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with torch.no_grad():
        exact, text = model(IDS).logits, model.generate(IDS, **generation)
        with accelerate_stock_models():
            actual, written = model(IDS).logits, model.generate(IDS, **generation)
    # Another order of float32 sums, through four layers of wide random weights.
    torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    assert torch.equal(written, text)
    num_layers = model.config.layer_types.count("linear_attention")
    assert len(calls) == num_layers * (1 + generation["max_new_tokens"])


def test_closing_it_brings_back_the_functions_of_transformers():
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in STOCK_MODELS]
    stock = [[getattr(module, name, None) for name in STOCK_FUNCTIONS] for module in modules]
    assert all(sum(function is not None for function in functions) == 2 for functions in stock)
    undo = accelerate_stock_models()
    changed = [[getattr(module, name, None) for name in STOCK_FUNCTIONS] for module in modules]
    assert all(x is not y for ours, theirs in zip(changed, stock) for x, y in zip(ours, theirs) if y is not None)
    undo.close()
    assert [[getattr(module, name, None) for name in STOCK_FUNCTIONS] for module in modules] == stock


def test_packed_sequences_go_on_to_transformers(calls):
    """Its torch code refuses them by name; it must not be answered by a rule that mixes the sequences."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    tensors = [torch.zeros(1, 4, 2, 8)] * 3 + [torch.zeros(1, 4, 2)] * 2
    with accelerate_stock_models(), pytest.raises(ValueError, match="packed sequences"):
        module.torch_chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor([0, 2, 4]))
    assert not calls
