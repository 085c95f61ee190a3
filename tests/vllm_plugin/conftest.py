"""Converted models for vLLM, and its engine in the process of the tests.

These tests need an environment of their own (`make test-vllm`), because vLLM asks for an older transformers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # converted decoders read more than they were trained on
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
if os.environ.get("HF_LINEAR_ATTENTION_TEST_VLLM") != "1":
    collect_ignore_glob = ["test_*.py"]

import tokenizers
import torch
import transformers

from hf_linear_attention import convert


VOCABULARY = 128
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
# A spread of weights with which the likeliest token is never nearly as likely as the second.
LLAMA = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.2}
# vLLM's softmax on CPUs has no heads of less than 32 numbers.
WIDE = LLAMA | {"head_dim": 64}
HYBRID = {"mechanism": "hybrid", "window_size": 16, "num_sinks": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hybrid": ("llama", LLAMA, HYBRID),
    "default": ("llama", LLAMA, HYBRID | {"feature_map": "hedgehog", "decay": "learned", "rope": "partial"}),
    "exact keys": ("llama", LLAMA, HYBRID | {"num_exact_keys": 4, "decay": "learned", "rope": "partial"}),
    "keys by layer": ("llama", LLAMA, HYBRID | {"num_exact_keys": [2, 40, 7], "decay": "learned", "rope": "partial"}),
    "keys beside softmax": ("llama", WIDE, HYBRID | {"num_exact_keys": [2, 40, 7], "layers": [0, 1]}),
    "linear": ("llama", LLAMA, {"mechanism": "linear"}),
    "gated": ("llama", LLAMA, {"mechanism": "linear", "decay": "gated"}),
    "gated_delta": ("llama", LLAMA, {"mechanism": "gated_delta"}),
    "window": ("llama", LLAMA, {"mechanism": "window", "window_size": 16}),
    "softmax layers": ("llama", WIDE, HYBRID | {"layers": [1]}),
    "layer types": ("qwen3", WIDE | {"layer_types": ["full_attention"] * 3}, HYBRID | {"layers": [0, 2]}),
    "two settings": (
        "llama",
        LLAMA,
        {"mechanism": {"0-1": "hybrid", "2-": "linear"}, "window_size": 16, "num_sinks": 2},
    ),
}


def save_tokenizer(folder: Path) -> None:
    """A tokenizer that knows the words w000 to w127, for the parts of vLLM that ask for one."""
    words = tokenizers.models.WordLevel({f"w{number:03}": number for number in range(VOCABULARY)}, unk_token="w002")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w000", eos_token="w002").save_pretrained(
        folder
    )


def save_converted(row: tuple[str, dict[str, Any], dict[str, Any]], folder: Path) -> Path:
    """A random model of a row, as in `CONFIGS`, converted and saved."""
    kind, config, settings = row
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config, **ends))
    convert(model, **settings).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A function from the name of a row to the folder of its model, which is made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_converted(CONFIGS[name], tmp_path_factory.mktemp("model") / name.replace(" ", "_"))
        return made[name]

    return folder


@contextlib.contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """vLLM's engine for a folder; it has 64 MB for states and keys unless told otherwise."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    usual = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False}
    usual |= {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False}
    llm = LLM(str(folder), **usual | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(count: int, longest: int = 200, seed: int = 0) -> list[list[int]]:
    """Random prompts, some of them of equal length and some of one token."""
    draw = random.Random(seed)
    lengths = [draw.choice((1, 15, 16, 17, longest, draw.randrange(2, longest))) for _ in range(count)]
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def written(llm: Any, texts: list[list[int]], tokens: int = 24, **options: Any) -> list[list[int]]:
    """What the engine writes after each prompt: the likeliest tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in found]


def expected(folder: Path, texts: list[list[int]], tokens: int = 24, dtype: Any = torch.float32) -> list[list[int]]:
    """What `generate` writes after each prompt, of all of them together."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=(ids > 0).long(), eos_token_id=None, **options)
    return found[:, longest:].tolist()


def metric(llm: Any, name: str) -> float:
    """The value of one of vLLM's counters."""
    return sum(entry.value for entry in llm.get_metrics() if entry.name == f"vllm:{name}")
