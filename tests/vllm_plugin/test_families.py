"""Decoders of families that differ in what vLLM has to know of them: each writes what `generate` writes.

The outcomes of the other families are in `hf_linear_attention/vllm_plugin/families.py`: whoever is not named there was
compared in the same way.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import HYBRID, LLAMA, SIZES, VOCABULARY, WIDE, engine, prompts, save_converted

from hf_linear_attention.vllm_plugin import OPERATOR, register
from hf_linear_attention.vllm_plugin.families import refuse_other_values
from hf_linear_attention.vllm_plugin.heads import match_logits


SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # No positions: its bias depends on distances, as the decay of the mechanism then does.
    "bloom": ("bloom", SIZES | {"n_layer": 3, "n_head": 4, "initializer_range": 0.2}, HYBRID),
    # Softmax layers with a window beside converted ones.
    "layers with a window": ("gemma3_text", WIDE | SLIDING, HYBRID | {"layers": "full_attention"}),
    # Logits that the model divides, and a scale of attention of its own.
    "scaled logits": ("granite", LLAMA | {"logits_scaling": 8.0, "attention_multiplier": 0.3}, HYBRID),
    # Experts, which are vLLM's own layers.
    "experts": ("qwen3_moe", LLAMA | EXPERTS, HYBRID),
    # Learned positions that begin at 2, and queries that the layer scales.
    "opt": ("opt", SIZES | OPT, HYBRID),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_their_probabilities(tmp_path, name):
    from vllm import SamplingParams

    save_converted(FAMILIES[name], tmp_path)
    texts = prompts(8)
    sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCABULARY, ignore_eos=True, detokenize=False)
    with engine(tmp_path, max_num_batched_tokens=96, max_logprobs=VOCABULARY) as llm:
        found = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for text, (output,) in zip(texts, (request.outputs for request in found)):
        ids = torch.tensor([[*text, *output.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(text) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(output.token_ids)
        logprobs = [[entry[token].logprob for token in range(VOCABULARY)] for entry in output.logprobs]
        # Sums of other orders: logits of about 10 in float32.
        torch.testing.assert_close(torch.tensor(logprobs), logits.log_softmax(-1), atol=1e-3, rtol=0)


def processor(**values: Any) -> Any:
    """What `match_logits` knows of vLLM's processor of logits."""
    return SimpleNamespace(**{"vocab_size": VOCABULARY, "scale": 1.0, "soft_cap": None, **values})


@pytest.mark.parametrize(
    ("kind", "sizes", "before", "scale"),
    [
        ("llama", LLAMA, {}, 1.0),
        ("granite", LLAMA | {"logits_scaling": 8.0}, {}, 0.125),
        ("cohere", LLAMA | {"logit_scale": 0.5}, {"scale": 0.5}, 0.5),
        ("gemma2", WIDE | {"final_logit_softcapping": 30.0}, {"soft_cap": 30.0}, 1.0),
    ],
)
def test_logits_are_scaled_as_the_model_scales_them(kind, sizes, before, scale):
    found = processor(**before)
    match_logits(found, transformers.AutoConfig.for_model(kind, **sizes))
    assert found.scale == pytest.approx(scale)


def test_logits_that_vllm_cannot_make_are_refused():
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes its logits in a way that vLLM does not know"):
        match_logits(processor(), transformers.Gemma2Config(**WIDE, final_logit_softcapping=30.0))


def test_values_of_another_width_are_refused():
    mechanism = SimpleNamespace(shape=SimpleNamespace(head_dim=16))
    refuse_other_values(SimpleNamespace(linear_attention=mechanism, v_head_dim=16))
    with pytest.raises(ValueError, match="values of 8 numbers and keys of 16"):
        refuse_other_values(SimpleNamespace(linear_attention=mechanism, v_head_dim=8))


def test_a_second_registration_changes_nothing(caplog):
    """`register` tells vLLM each name once, however often vLLM calls it."""
    from vllm import ModelRegistry
    from vllm.config import CompilationConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    def names():
        return [*ModelRegistry.get_supported_archs()], [*CompilationConfig._attention_ops], {*MODELS_CONFIG_MAP}

    register()
    architectures, operators, _ = before = names()
    register()
    assert names() == before
    assert {"LinearLlamaForCausalLM", "LinearGPT2LMHeadModel", "LinearBertModel"} <= {*architectures}
    assert operators.count(f"vllm::{OPERATOR}") == 1
    assert "hf-linear-attention" not in caplog.text
