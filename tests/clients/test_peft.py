"""PEFT's LoRA on converted models, with the target modules it knows for the stock ones."""

from __future__ import annotations

import pytest
import torch
from matrix import sample_inputs
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM


peft = pytest.importorskip("peft", reason="needs the extra `peft`")
pytestmark = pytest.mark.clients

HEADS = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}
# LoRA on the stock projections alone, and with the mechanism trained as a whole, as LoLCATs does
CONFIGS = {"default": {}, "with mechanism": {"modules_to_save": ["linear_attention"]}}


def load(folders, name):
    return HEADS[name].from_pretrained(folders[name], trust_remote_code=True)


def train(model, ids):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize(("name", "config"), [*((name, "default") for name in HEADS), ("llama", "with mechanism")])
def test_train_save_load_and_merge(name, config, folders, tmp_path):
    ids = sample_inputs(name)["input_ids"]
    model = peft.get_peft_model(load(folders, name), peft.LoraConfig(r=4, **CONFIGS[config]))
    untrained = {n: p.clone() for n, p in model.named_parameters()}
    trained = train(model, ids)
    changed = {n for n, p in trained.named_parameters() if not p.equal(untrained[n])}
    assert any("lora_" in n for n in changed)
    assert any(".linear_attention." in n for n in changed) == (config == "with mechanism")
    trained.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = trained(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(load(folders, name), tmp_path / "adapter").eval()
        assert torch.equal(loaded(input_ids=ids).logits, expected)
        merged = loaded.merge_and_unload()
        # W + B A in one product instead of two
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        again = HEADS[name].from_pretrained(tmp_path / "merged", trust_remote_code=True)
        assert torch.equal(again(input_ids=ids).logits, merged(input_ids=ids).logits)
