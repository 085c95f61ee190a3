"""`hf-linear-attention serve OUT --engine vllm` over HTTP, for a model that is trained and converted here."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from conftest import CONFIGS, LLAMA, VOCABULARY, expected, save_converted, save_tokenizer
from openai import AuthenticationError, BadRequestError, OpenAI
from servers import server_of

from hf_linear_attention.conversion.commands import main


PATIENCE = 900  # seconds until a server listens
KEY = "open sesame"
TRAINED_LENGTH = 64
# What the tests of this folder set for engines of their own; here the command has to do without.
OF_OTHER_TESTS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OF_OTHER_TESTS}
CHUNK = 256
GREEDY = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def count_up(model: transformers.PreTrainedModel) -> None:
    """Train it until it goes on counting, in steps of 1 to 3."""
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    places = torch.arange(TRAINED_LENGTH, dtype=torch.long)
    for _ in range(200):
        first = torch.tensor([[draw.randrange(VOCABULARY), draw.randrange(1, 4)] for _ in range(32)])
        ids = 3 + (first[:, :1] + first[:, 1:] * places) % (VOCABULARY - 3)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """OUT: a Llama that was trained here, converted by the command."""
    root = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA | {"max_position_embeddings": TRAINED_LENGTH, "initializer_range": 0.1})
    model = transformers.LlamaForCausalLM(config)
    count_up(model)
    model.save_pretrained(root / "SRC")
    save_tokenizer(root / "SRC")
    words = ["--model_name_or_path", str(root / "SRC"), "--output_dir", str(root / "OUT")]
    assert main(["convert", *words, "--attention", "hybrid", "--window_size", "16", "--num_sinks", "2"]) == 0
    return root / "OUT"


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    """The address of a server of OUT. When it is interrupted at the end, it stops as vLLM does: with 0."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    options = ["--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    options += ["--max-num-batched-tokens", str(CHUNK)]
    environment = ENVIRONMENT | {"HF_LINEAR_ATTENTION_API_KEY": KEY}
    with server_of(folder, log, *options, patience=PATIENCE, environment=environment) as (process, address):
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture
def client(address):
    return OpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=300, max_retries=0)


def text_of(ids):
    return " ".join(f"w{number:03}" for number in ids)


def wanted(folder, texts):
    """The words that `generate` writes; the tokenizer leaves out special ones."""
    return [[f"w{number:03}" for number in ids if number not in (0, 2)] for ids in expected(folder, texts)]


def test_it_goes_on_as_it_was_trained(folder, client):
    (model,) = client.models.list()
    assert model.id == str(folder)
    answer = client.completions.create(model=model.id, prompt=text_of(range(20, 60, 2)), temperature=0, max_tokens=8)
    assert answer.choices[0].text.split() == text_of(range(60, 76, 2)).split()


def test_requests_at_once_are_answered_as_generate_answers_each(folder, client):
    draw = random.Random(0)
    texts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 7, 15, 16, 17, 40, 300, 600)]

    def ask(text):
        return client.completions.create(model=str(folder), prompt=text_of(text), **GREEDY).choices[0].text.split()

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(ask, texts)] == wanted(folder, texts)


def test_a_stream(folder, client):
    text = [*range(3, 40)]
    parts = client.completions.create(model=str(folder), prompt=text_of(text), stream=True, **GREEDY)
    pieces = [part.choices[0].text for part in parts]
    assert len(pieces) > 10
    assert "".join(pieces).split() == wanted(folder, [text])[0]


def test_four_samples_of_one_prompt(folder, client):
    def ask():
        asked = GREEDY | {"temperature": 1.5, "n": 4, "seed": 3}
        answer = client.completions.create(model=str(folder), prompt=text_of(range(9, 40)), **asked)
        return [choice.text for choice in answer.choices]

    samples = ask()
    assert len({*samples}) == 4
    assert ask() == samples


def test_a_prompt_is_longer_than_the_trained_length_but_not_than_the_context(folder, client):
    text = [number % 100 + 3 for number in range(12 * TRAINED_LENGTH)]
    answer = client.completions.create(model=str(folder), prompt=text_of(text), **GREEDY)
    assert answer.choices[0].text.split() == wanted(folder, [text])[0]
    with pytest.raises(BadRequestError, match="1024"):
        client.completions.create(model=str(folder), prompt=text_of(text * 2), **GREEDY)


def test_a_prompt_that_comes_again_is_not_read_again(folder, address, client):
    """vLLM keeps a state where a chunk of a prompt ends, at a multiple of its block."""

    def hits():
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            found = re.findall(r"(?m)^vllm:prefix_cache_hits_total\{.*\} ([\d.]+)", answer.read().decode())
        return sum(map(float, found))

    text = [number * 7 % 120 + 3 for number in range(700)]
    before, answers = hits(), []
    for _ in range(2):
        answer = client.completions.create(model=str(folder), prompt=text_of(text), **GREEDY)
        answers.append(answer.choices[0].text.split())
    assert answers == wanted(folder, [text]) * 2
    assert hits() - before >= CHUNK


def test_who_may_ask(folder, address):
    stranger = OpenAI(base_url=f"{address}/v1", api_key="other", timeout=60, max_retries=0)
    with pytest.raises(AuthenticationError):
        stranger.completions.create(model=str(folder), prompt="w005", **GREEDY)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("OUT", ["--nosuch", "3"], "unrecognized arguments: --nosuch 3"),
        ("OUT", ["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        ("OUT", ["--enable-log-outputs"], "--enable-log-outputs requires --enable-log-requests"),
        ("OUT", ["--max-model-len", "0"], "max_model_len"),
        ("OUT", ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], "Speculative decoding"),
        ("SRC", [], "is no converted model (llama); `vllm serve"),
        ("nosuch", [], "cannot be used"),
    ],
)
def test_what_cannot_be_served(folder, name, options, said, capsys):
    assert main(["serve", str(folder.parent / name), "--engine", "vllm", *options]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("hf-linear-attention serve: error: ")
    assert said in line


def test_learned_positions_end_where_those_of_the_original_do(tmp_path):
    folder = save_converted(CONFIGS["gpt2"], tmp_path)
    command = [sys.executable, "-m", "hf_linear_attention", "serve", str(folder), "--engine", "vllm"]
    done = subprocess.run([*command, "--max-model-len", "2048"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2, done.stderr
    assert "max_model_len (2048) is greater than" in done.stderr.splitlines()[-1]
