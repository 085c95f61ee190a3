"""int8 weights on a CPU: the stock projections shrink, the mechanism stays as it is, generation and saving work."""

from __future__ import annotations

import pytest
import torch
from caches import cache_of
from matrix import sample_inputs
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig


pytestmark = pytest.mark.clients


def torchao():
    pytest.importorskip("torchao", reason="needs the extra `clients`")
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes():
    pytest.importorskip("bitsandbytes", reason="needs the extra `clients`")
    return BitsAndBytesConfig(load_in_8bit=True)


@torch.no_grad()
# GPT-2 has `Conv1D`, which torchao leaves alone in the stock model too.
@pytest.mark.parametrize(("name", "config"), [("llama", torchao), ("llama", bitsandbytes), ("gpt2", bitsandbytes)])
def test_int8_weights(name, config, folders, tmp_path):
    def load(folder, **options):
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)

    plain, model = load(folders[name]), load(folders[name], quantization_config=config(), device_map="cpu")
    ids = sample_inputs(name)["input_ids"]
    expected, logits = plain(ids).logits, model(ids).logits
    error = (logits - expected).norm() / expected.norm()
    # 8 bits a weight through three random layers with a standard deviation of 0.3; and something was quantised
    assert 1e-5 < error < 0.1
    mechanisms = {key: value for key, value in plain.state_dict().items() if ".linear_attention." in key}
    assert mechanisms
    assert all(torch.equal(model.state_dict()[key], value) for key, value in mechanisms.items())
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    model.save_prompt_state(cache_of(model(ids, use_cache=True)), tmp_path / "prompt.safetensors")
    assert model.load_prompt_state(tmp_path / "prompt.safetensors").get_seq_length() == ids.shape[1]
    model.save_pretrained(tmp_path / "quantised")
    assert torch.equal(load(tmp_path / "quantised", device_map="cpu")(ids).logits, logits)
