"""`hf-linear-attention serve OUT --engine vllm` over HTTP."""

from __future__ import annotations

import os
import signal

import pytest
import transformers
from conftest import LLAMA, expected
from openai import AuthenticationError, OpenAI
from servers import server_of

from hf_linear_attention.conversion.commands import main


PATIENCE = 900  # seconds until a server listens
KEY = "open sesame"
# What the tests of this folder set for engines of their own; here the command has to do without.
OF_OTHER_TESTS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_OTHER_TESTS}
TEXT = [*range(3, 40)]
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def text_of(ids):
    return " ".join(f"w{number:03}" for number in ids)


@pytest.fixture(scope="module")
def served(converted, tmp_path_factory):
    """A converted decoder and the address of its server. When it is interrupted, it stops as vLLM does: with 0."""
    folder, log = converted("hybrid"), tmp_path_factory.mktemp("server") / "log.txt"
    # Twice the length that the original was trained on.
    options = ["--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--api-key", KEY]
    with server_of(folder, log, *options, patience=PATIENCE, environment=ENVIRONMENT) as (process, address):
        yield folder, address
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, log.read_text()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer(served, is_streamed):
    folder, address = served
    client = OpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=300, max_retries=0)
    answer = client.completions.create(model=str(folder), prompt=text_of(TEXT), stream=is_streamed, **GREEDY)
    pieces = [part.choices[0].text for part in (answer if is_streamed else [answer])]
    assert (len(pieces) > 10) == is_streamed
    # The tokenizer leaves out special ones.
    wanted = [number for number in expected(folder, [TEXT])[0] if number not in (0, 2)]
    assert "".join(pieces).split() == text_of(wanted).split()


def test_who_may_ask(served):
    folder, address = served
    stranger = OpenAI(base_url=f"{address}/v1", api_key="other", timeout=60, max_retries=0)
    with pytest.raises(AuthenticationError):
        stranger.completions.create(model=str(folder), prompt="w005", **GREEDY)


def test_what_cannot_be_served(tmp_path, capsys):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "SRC")
    for name, said in (("SRC", "is no converted model (llama); `vllm serve"), ("nosuch", "cannot be used")):
        assert main(["serve", str(tmp_path / name), "--engine", "vllm"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("hf-linear-attention serve: error: ")
        assert said in line
