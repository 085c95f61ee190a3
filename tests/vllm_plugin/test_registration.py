"""`register` tells vLLM each name once, however often vLLM calls it."""

from __future__ import annotations

from vllm import ModelRegistry
from vllm.config import CompilationConfig
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from hf_linear_attention.vllm_plugin import OPERATOR, register


def test_a_second_call_changes_nothing(caplog):
    def names():
        return [*ModelRegistry.get_supported_archs()], [*CompilationConfig._attention_ops], {*MODELS_CONFIG_MAP}

    register()
    architectures, operators, _ = before = names()
    register()
    assert names() == before
    assert {"LinearLlamaForCausalLM", "LinearGPT2LMHeadModel", "LinearBertModel"} <= {*architectures}
    assert operators.count(f"vllm::{OPERATOR}") == 1
    assert "hf-linear-attention" not in caplog.text
