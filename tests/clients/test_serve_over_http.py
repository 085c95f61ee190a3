"""`hf-linear-attention serve` over HTTP, with OpenAI's client."""

from __future__ import annotations

import os

import pytest
import torch
from checkpoints import convert_folder, save_twin
from servers import server_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_linear_attention  # noqa: F401  (registers the classes)


pytestmark = pytest.mark.clients

PATIENCE = 300
MESSAGES = [{"role": "user", "content": "some text"}]


def serving(folder, log, **environment):
    options = ("--host", "127.0.0.1", "--device", "cpu")
    return server_of(folder, log, *options, patience=PATIENCE, environment={**os.environ, **environment})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of a converted decoder and the address of its server, on a machine that has used no model yet."""
    for name in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(name, reason="needs the extra `clients`")
    root = tmp_path_factory.mktemp("serve")
    save_twin(root / "source", "llama")
    tokenizer = AutoTokenizer.from_pretrained(root / "source")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(root / "source")
    convert_folder(root / "source", root / "out", "--attention", "hybrid", "--window_size", 4, "--no_verify")
    with serving(root / "out", root / "log.txt", HF_HOME=str(root / "no cache")) as (_, address):
        yield root / "out", address


@pytest.fixture(scope="module")
def expected(served):
    """What the model writes greedily by itself."""
    folder, _ = served
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, return_tensors="pt", return_dict=True, add_generation_prompt=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip()
    return text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat(served, expected, is_streamed):
    from openai import OpenAI

    folder, address = served
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)
    answer = client.chat.completions.create(
        model=str(folder), messages=MESSAGES, max_tokens=8, temperature=0, stream=is_streamed
    )
    if is_streamed:
        events = [event for event in answer if event.choices]
        assert events[-1].choices[0].finish_reason is not None
        assert len(events) > 1
        text = "".join(event.choices[0].delta.content or "" for event in events)
    else:
        text = answer.choices[0].message.content
    assert text.strip() == expected.strip()
