"""Converted models in the form of stock architectures, which vLLM runs by its own code, without our plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from conftest import WIDE, prompts, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.conversion.export import qwen3_5


ALONE = """
import json, sys
sys.modules["hf_linear_attention"] = None  # as if it were not installed
from vllm import LLM, SamplingParams
texts, dtype = json.load(sys.stdin)
llm = LLM(sys.argv[1], dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=1024,
          kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False)
sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=1)
found = llm.generate([{"prompt_token_ids": text} for text in texts], sampling, use_tqdm=False)
print("\\n" + json.dumps([[list(row.outputs[0].token_ids), [step[token].logprob for token, step in
    zip(row.outputs[0].token_ids, row.outputs[0].logprobs)]] for row in found]))
"""


def test_vllm_writes_what_transformers_writes(tmp_path):
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **WIDE, **ends))
    student = convert(model, mechanism="gated_delta", form="qwen3_5", layers=[0, 2]).eval()
    with torch.no_grad():  # the layers of Qwen3.5 start with an output of 0
        for name, parameter in student.named_parameters():
            if ".linear_attention." in name:
                parameter += 0.3 * torch.randn_like(parameter)
    qwen3_5.rewritten(student, torch.float32).save_pretrained(tmp_path / "stock")
    save_tokenizer(tmp_path / "stock")
    texts = prompts(6)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "stock")],
        input=json.dumps([texts, "bfloat16"]),  # vLLM's delta rule for CPUs knows no other dtype
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float32).eval()
    errors = []
    for text, (tokens, given) in zip(texts, found):
        with torch.no_grad():
            exact = stock(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1].log_softmax(-1)
            rounded = stock.to(torch.bfloat16)(torch.tensor([text + tokens])).logits[0, len(text) - 1 : -1]
        stock.float()
        chosen = torch.tensor(tokens)[:, None]
        given = torch.tensor(given) - exact.gather(1, chosen)[:, 0]
        own = (rounded.float().log_softmax(-1) - exact).gather(1, chosen)[:, 0]
        errors.append((given.square().mean(), own.square().mean()))
    # Random weights make texts part where two tokens are nearly as likely, so log-probabilities are compared.
    assert sum(a for a, _ in errors) < 2 * sum(b for _, b in errors)
