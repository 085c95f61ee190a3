"""`convert` of a loaded model: every weight as it is, in its own dtype, and nothing lost in silence."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from matrix import stock_model
from torch import nn

from hf_linear_attention import convert


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(converted, stock):
    ours = tensors(converted)
    for name, tensor in tensors(stock).items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert {tensor.dtype for name, tensor in ours.items() if ".linear_attention." in name} <= {stock.dtype}


def test_what_transformers_keeps_in_float32_stays_so(tmp_path):
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    stock = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    wo = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert stock.get_parameter(wo).dtype == torch.float32
    converted = convert(stock, drop=["position_bias"])
    assert_same(converted, stock)
    assert converted.get_parameter(wo).dtype == torch.float32


@pytest.mark.parametrize("layers", ["all", [1]])
def test_a_position_bias_that_nothing_reads_is_not_trained(layers):
    """An optimizer, DDP and gradient checkpointing expect a gradient of whatever requires one."""
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    stock = transformers.T5ForConditionalGeneration(config)
    model = convert(stock, mechanism="linear", feature_map="elu1", drop=["position_bias"], layers=layers).train()
    ids = torch.arange(1, 9)[None]
    found = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(1)  # of the dropout
        model(input_ids=ids, labels=ids).loss.backward()
        assert {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None} == set()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.requires_grad == (layers != "all")


@pytest.mark.parametrize("shares", [None, False, True])
def test_dropped_tables_of_other_models_are_frozen_too(shares):
    """UMT5's tables, one for each layer, and BEiT's, one for each layer or for all."""
    if shares is None:
        sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        stock = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**sizes, decoder_start_token_id=0))
        inputs = dict.fromkeys(("input_ids", "labels"), torch.arange(1, 9)[None])
    else:
        kind = {"use_shared_relative_position_bias" if shares else "use_relative_position_bias": True}
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        stock = transformers.BeitForImageClassification(
            transformers.BeitConfig(**sizes, **kind, image_size=16, patch_size=4)
        )
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    model = convert(stock, mechanism="linear", feature_map="elu1", drop=["position_bias"]).train()
    model(**inputs).logits.square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, parameter in model.named_parameters() if not parameter.requires_grad} != set()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_buffers_outside_checkpoints_keep_dtype_and_value(family):
    """Rotary frequencies in bfloat16 turn far tokens by other angles."""
    stock = stock_model(family)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    if family == "llama":
        stock.model.rotary_emb.inv_freq *= 0.5  # as after a change of the base
    assert_same(convert(stock), stock)


def test_generation_settings_are_kept():
    stock = stock_model("llama")
    stock.generation_config.update(eos_token_id=[2, 7], temperature=0.5, do_sample=True)
    assert convert(stock).generation_config.to_diff_dict() == stock.generation_config.to_diff_dict()


def test_weights_without_a_place_are_refused():
    stock = stock_model("llama")
    stock.score = nn.Linear(32, 2, bias=False)
    with pytest.raises(ValueError, match=r"LinearLlamaForCausalLM does not have score\.weight\. Pass the model as"):
        convert(stock)


def test_weights_that_are_missing_are_refused():
    stock = stock_model("llama")
    del stock.model.layers[1].mlp.up_proj
    with pytest.raises(ValueError, match=r"LlamaForCausalLM lacks model\.layers\.1\.mlp\.up_proj\.weight\. Pass"):
        convert(stock)
    with pytest.raises(ValueError, match=r"does not have lm_head\.weight"):
        convert(stock_model("llama"), model_class=transformers.LlamaForSequenceClassification)


def test_adapters_are_merged_first():
    adapted = peft.get_peft_model(stock_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"Got a PeftModel; .* Pass `model.merge_and_unload\(\)`\."):
        convert(adapted)
    merged = adapted.merge_and_unload()
    assert_same(convert(merged), merged)


def test_what_a_model_was_built_without_is_left_out():
    stock = transformers.BertModel(stock_model("bert").config, add_pooling_layer=False).eval()
    converted = convert(stock)
    assert converted.pooler is None
    assert_same(converted, stock)
    assert converted(torch.arange(3, 20)[None]).pooler_output is None
