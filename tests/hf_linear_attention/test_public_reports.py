"""What users of such libraries report: bases of adapters, padding on the left, missing gradients, offloading."""

from __future__ import annotations

import copy
import json
import re
import warnings

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from caches import cache_of, past
from matrix import stock_model
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache, masking_utils

from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.positions import padding


IDS = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(0))
PADS = 30
MECHANISMS = {
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_exact_keys": 3, "num_features": 16},
    "linear": {"mechanism": "linear", "num_features": 16},
    "gated": {"mechanism": "linear", "num_features": 16, "decay": "gated", "input_gate": True},
    "gated_delta": {"mechanism": "gated_delta", "num_features": 8},
    "mixed": {"mechanism": "linear", "num_features": 16, "layers": [1]},
    "performer": {"mechanism": "performer", "num_features": 16},
}


QWEN = {"qwen3_5": {"mechanism": "gated_delta", "form": "qwen3_5"}}
# Scores, which attention transfer alone trains, and projections that only softmax attention reads.
FROZEN = {"hybrid": {"score_projection", "score_slope"}, "qwen3_5": {"weight"}}


def noisy(model):
    """The model with mechanisms that are not at their start, where some parameters do nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linear_attention." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_an_adapter_of_a_conversion_names_no_base_before_it_is_saved(tmp_path):
    model = convert(stock_model("llama"), **MECHANISMS["linear"])
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        peft.get_peft_model(model, adapter).save_pretrained(tmp_path / "early")
    assert any("is not saved: call `save_pretrained(FOLDER)` on it first" in str(w.message) for w in found)
    with pytest.raises(OSError, match="is not saved: call `save_pretrained"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "early")


@pytest.mark.parametrize("given", ["folder", "loaded"])
def test_a_saved_conversion_is_the_base_of_its_adapters(given, tmp_path):
    stock_model("llama").save_pretrained(tmp_path / "source")
    source = tmp_path / "source" if given == "folder" else AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    model = convert(source, **MECHANISMS["linear"])
    assert model.converted_from == str(tmp_path / "source")
    model.save_pretrained(tmp_path / "converted")
    assert "name_or_path" not in json.loads((tmp_path / "converted" / "config.json").read_text())
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, adapter).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, adapted(input_ids=IDS).logits)


# Two orders of float32 sums over at most 50 tokens; positions that are off by the padding move logits by 0.01 or more.
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


@torch.no_grad()
@pytest.mark.parametrize(("family", "name"), [*(("llama", name) for name in MECHANISMS), ("gpt_neox", "hybrid")])
def test_padding_on_the_left_without_positions_changes_nothing(family, name):
    stock = stock_model(family)
    model = noisy(convert(stock, **MECHANISMS[name])).eval()
    long = torch.randint(3, 64, (1, PADS + IDS.shape[1]), generator=torch.Generator().manual_seed(2))
    ids = torch.cat((nn.functional.pad(IDS, (PADS, 0)), long))
    mask = torch.ones_like(ids)
    mask[0, :PADS] = 0
    torch.testing.assert_close(stock(ids, attention_mask=mask).logits[:1, PADS:], stock(IDS).logits, **TOLERANCE)
    whole = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(whole[:1, PADS:], model(IDS).logits, **TOLERANCE)
    torch.testing.assert_close(whole[1:], model(long).logits, **TOLERANCE)
    if name != "performer":  # whose positions are those of the stock layers
        split = PADS + 5
        first = model(ids[:, :split], attention_mask=mask[:, :split], use_cache=True)
        second = model(ids[:, split:], attention_mask=mask, **past(cache_of(first)))
        torch.testing.assert_close(second.logits, whole[:, split:], **TOLERANCE)
    embeddings = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeddings, attention_mask=mask).logits, whole, **TOLERANCE)


@torch.no_grad()
def test_a_mask_that_does_not_tell_positions_is_warned_of_once(caplog):
    type(padding.logger).warning_once.cache_clear()  # another test may have had the warning
    model = convert(stock_model("llama"), **MECHANISMS["linear"])
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    model(IDS, attention_mask=mask[None, None])
    assert not caplog.records
    mask = mask & (torch.arange(20) > 2)
    for _ in range(2):
        model(IDS, attention_mask=mask[None, None])
    assert len([r for r in caplog.records if "padding on the left, no `position_ids`" in r.message]) == 1


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("name", [*MECHANISMS, *QWEN])
def test_every_trainable_parameter_gets_a_gradient(name, length):
    model = convert(stock_model("llama"), **(MECHANISMS | QWEN)[name]).train()
    ids = IDS[:, :length].repeat(2, 1)
    model(ids, labels=ids).loss.backward() if length > 1 else model(ids).logits.sum().backward()
    assert not [name for name, x in model.named_parameters() if x.requires_grad and x.grad is None]
    frozen = {name.rpartition(".")[2] for name, x in model.named_parameters() if not x.requires_grad}
    assert frozen == FROZEN.get(name, set())


@torch.no_grad()
@pytest.mark.parametrize(("name", "offload"), [*((name, "disk") for name in MECHANISMS), ("hybrid", "cpu")])
def test_offloaded_weights_are_brought(name, offload, tmp_path):
    model = noisy(convert(stock_model("llama"), **MECHANISMS[name]))
    logits, text = model(IDS).logits, model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    if offload == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    for _ in range(2):
        assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0), text)
    assert all(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("layers", ["all", [0]], ids=str)
@pytest.mark.parametrize("implementation", ["flex_attention", "paged|sdpa"])
def test_masks_of_other_kinds_are_refused_by_name(implementation, layers, monkeypatch):
    # transformers compiles how masks of blocks are made, for half a minute.
    make = masking_utils.create_block_mask
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **given: make(**{**given, "_compile": False}))
    model = convert(stock_model("llama"), **MECHANISMS["linear"] | {"layers": layers})
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=rf"`attn_implementation` = `{re.escape(implementation)}`.* Choose `sdpa` or"):
        model(IDS, attention_mask=torch.ones_like(IDS))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "mixed"])  # stock static layers fail as well
def test_a_cache_from_inference_mode_goes_on_outside(name, static):
    model = convert(stock_model("llama"), **MECHANISMS[name]).eval()
    with torch.no_grad():
        expected = model(IDS).logits[:, 12:]
    with torch.inference_mode():
        given = past(StaticCache(config=model.config, max_cache_len=24)) if static else {}
        cache = cache_of(model(IDS[:, :12], use_cache=True, **given))
        model(IDS[:, 12:13], **past(cache))
    found = []
    for step in range(13, 20):
        with torch.no_grad() if step % 3 else torch.enable_grad():
            found.append(model(IDS[:, step : step + 1], **past(cache)).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 1:], **TOLERANCE)
    if not static:
        model(IDS[:, :1], **past(cache)).logits.sum().backward()
        assert model.get_input_embeddings().weight.grad.abs().max() > 0


def test_a_model_trains_after_it_has_read_in_inference_mode():
    """What is made once for all calls, such as rotary frequencies, is no tensor of that mode."""
    model = convert(stock_model("llama"))
    with torch.inference_mode():
        model(IDS)
    model(IDS, labels=IDS).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().max() > 0


ADAPTER = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.fixture
def any_peft(monkeypatch):
    """transformers 5.24 asks for a version of PEFT that was not released with it."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda min_version: None)


@torch.no_grad()
def test_adapters_of_transformers_are_saved_alone(any_peft, tmp_path):
    model = convert(stock_model("llama"), **MECHANISMS["linear"])
    unsaved = copy.deepcopy(model)
    unsaved.add_adapter(ADAPTER)
    with pytest.warns(UserWarning, match=r"has adapters of a conversion of a model in memory that is not saved"):
        unsaved.save_pretrained(tmp_path / "early")
    model.save_pretrained(tmp_path / "out")
    model.add_adapter(ADAPTER)
    expected = model.eval()(IDS).logits
    model.save_pretrained(tmp_path / "adapter")
    assert not {"config.json", "conversion_report.json"} & {path.name for path in (tmp_path / "adapter").iterdir()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(again(IDS).logits, expected)
    again.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(again.eval()(IDS).logits, expected)


def test_a_model_with_adapters_is_not_converted(any_peft, tmp_path):
    model = stock_model("llama")
    model.save_pretrained(tmp_path / "both")
    model.add_adapter(ADAPTER)
    model.save_pretrained(tmp_path / "both")
    for source in (model, str(tmp_path / "both")):
        with pytest.raises(ValueError, match=r"has adapters beside its weights; merge them first"):
            convert(source, **MECHANISMS["linear"])
    with pytest.raises(UsageError, match=r"both contains an adapter; merge it into its base model"):
        open_source(str(tmp_path / "both"))
