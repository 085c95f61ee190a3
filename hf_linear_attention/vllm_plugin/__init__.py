# SPDX-License-Identifier: Apache-2.0
"""Converted models in vLLM, which calls `register` in each of its processes (entry point `vllm.general_plugins`).

Nothing heavy is imported before vLLM asks for a model. A converted decoder (`LinearLlamaForCausalLM` and so on) and a
converted encoder run in vLLM's Transformers backend; vLLM itself is not changed.
"""

from __future__ import annotations

import logging
import re
import sys


MODEL = "hf_linear_attention.vllm_plugin.model"
BACKEND = "HF_LINEAR_ATTENTION"
OPERATOR = "hf_linear_attention"
# The class of `MODEL` for the models of an Auto class; encoders are what has a masked language model.
DECODERS = {"AutoModelForCausalLM": "DecoderForCausalLM"}
ENCODERS = {"AutoModel": "EncoderForEmbedding", "AutoModelForSequenceClassification": "EncoderForClassification"}
# The minor version of vLLM that the tests run; the names of vLLM that are used here may change with any other.
TESTED = (0, 32)

_LOGGER = logging.getLogger(__name__)


def version_of(text: str) -> tuple[int, ...]:
    """Major and minor version, as in `0.32.0`; a build of vLLM's main branch is called `0.33.0rc1.dev5` or `dev`.

    A version without numbers counts as newer than any.
    """
    found = re.match(r"(\d+)\.(\d+)", text)
    return (sys.maxsize,) if found is None else (int(found[1]), int(found[2]))


def is_too_old(text: str) -> bool:
    """Whether this version of vLLM is older than the one that the tests run."""
    return version_of(text) < TESTED


def register() -> None:
    """Tell vLLM the classes of converted models, the backend of their states and the operator that splits graphs.

    Calling it again changes nothing. With a vLLM older than the tested version nothing is registered, and one line in
    the log says so; with a newer one, one line warns.
    """
    import vllm

    tested = ".".join(map(str, TESTED))
    if is_too_old(vllm.__version__):
        _LOGGER.error("Got vLLM %s; hf-linear-attention serves its models from %s on.", vllm.__version__, tested)
        return
    if version_of(vllm.__version__) > TESTED:
        _LOGGER.warning("hf-linear-attention was tested with vLLM %s, and this is %s.", tested, vllm.__version__)
    _register_models()
    _register_backend()


def _register_models() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import hf_linear_attention  # noqa: F401  (registers `linear_<x>` with AutoConfig)

    from ..attention.transformers_internals import is_masked_lm, stock_heads
    from .config import ConvertedModelConfig

    for model_type in CONFIG_MAPPING_NAMES:
        classes = DECODERS | ENCODERS if is_masked_lm(model_type) else DECODERS
        for auto_class, stock in stock_heads(model_type):
            # vLLM makes embedding models and classifiers of a decoder's class for text; all of them are checked.
            MODELS_CONFIG_MAP[f"Linear{stock}"] = ConvertedModelConfig
            if stock and auto_class in classes:
                ModelRegistry.register_model(f"Linear{stock}", f"{MODEL}:{classes[auto_class]}")


def _register_backend() -> None:
    from vllm.config import CompilationConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    if not hasattr(MambaAttentionBackendEnum, BACKEND):
        register_backend(BACKEND, "hf_linear_attention.vllm_plugin.states.StateBackend", is_mamba=True)
    # Graphs of torch.compile and of CUDA stop before this operator, as before vLLM's own attention.
    if (operator := f"vllm::{OPERATOR}") not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(operator)
