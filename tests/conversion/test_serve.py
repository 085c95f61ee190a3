"""`serve`: transformers' own server finds the classes of a converted model, and only this command changes that."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linear_attention.attention.transformers_internals import server_namespace
from hf_linear_attention.conversion import serve
from hf_linear_attention.conversion.commands import main


def manager():
    from transformers.cli.serving.model_manager import ModelManager

    return ModelManager(device="cpu", dtype="float32", model_timeout=-1)


def test_the_manager_of_the_server_loads_a_registered_model(linear_llama, monkeypatch):
    name = f"{linear_llama}@main"
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM", raising=False)
    with pytest.raises(AttributeError, match="no attribute LinearLlamaForCausalLM"):
        manager().load_model_and_processor(name)
    found = serve.register_model(str(linear_llama))
    model, tokenizer = manager().load_model_and_processor(name)
    assert type(model) is found
    inputs = tokenizer("some text", return_tensors="pt")
    expected = AutoModelForCausalLM.from_pretrained(linear_llama).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM")


@pytest.fixture(scope="module")
def client_of(linear_llama, tmp_path_factory):
    """A client of the application, in this process; `has_template`: whether the tokenizer of its model reads chats."""
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from fastapi.testclient import TestClient
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import GenerationState

    from hf_linear_attention.conversion.serve_app import Limits, build_app

    serve.register_model(str(linear_llama))
    pinned = ModelManager(device="cpu", dtype="float32", force_model=str(linear_llama))

    def client(has_template=False, **limits):
        (loaded,) = pinned.loaded_models.values()
        loaded.processor.chat_template = (
            "{% for m in messages %}{{ m['content'] }} {% endfor %}" if has_template else None
        )
        state = GenerationState()
        kinds = {"chat": ChatCompletionHandler, "completion": CompletionHandler, "response": ResponseHandler}
        handlers = {name: kind(pinned, state) for name, kind in kinds.items()}
        limits = {"hosts": serve.LOCAL, "max_request_bytes": 10_000, "request_timeout": 60.0, **limits}
        return TestClient(build_app(pinned, handlers, Limits(**limits), state=state), base_url="http://localhost")

    yield client
    pinned.shutdown()
    delattr(server_namespace(), "LinearLlamaForCausalLM")


TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "some text"}]
FEW = {"max_tokens": 3, "temperature": 0}


def test_a_model_with_a_chat_template_answers_on_every_path(client_of, linear_llama):
    client = client_of(has_template=True)
    chat = client.post(CHAT, json={"model": str(linear_llama), "messages": MESSAGES, **FEW}).json()
    text = client.post(COMPLETION, json={"prompt": "some text ", **FEW}).json()
    body = {"input": "some text", "max_output_tokens": 3, "temperature": 0, "stream": False}
    answer = client.post(RESPONSE, json=body).json()
    assert text["usage"]["completion_tokens"] == 3
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"] > 1
    assert answer["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_base_model_names_the_path_that_works(client_of):
    client = client_of()
    for path, body in ((CHAT, {"messages": MESSAGES}), (RESPONSE, {"input": "some text"})):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
        assert "/v1/completions" in answer.json()["error"]["message"]
    assert client.post(COMPLETION, json={"prompt": "some text", **FEW}).status_code == 200


def test_hosts_are_this_machine_and_those_that_are_named(monkeypatch, linear_llama):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from transformers.cli.serving import server

    seen = []
    monkeypatch.setattr("hf_linear_attention.conversion.serve_app.build_app", lambda *given, **_: seen.append(given[2]))
    ours, _ = serve.parse([str(linear_llama), "--allowed_host", "a.example, b.example"])
    with serve._our_app(ours):
        server.build_server(None, None, None, None, generation_state=None)
    assert {*seen[0].hosts} == {*serve.LOCAL, ours.host, "a.example", "b.example"}


def test_one_model_is_listed_and_loaded(client_of, linear_llama, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "missing"))
    client = client_of()
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [str(linear_llama)]
    answer = client.post("/load_model", json={"model": str(linear_llama)})  # what `transformers chat` asks first
    assert json.loads(answer.text.removeprefix("data: "))["status"] == "ready"
    for body in ({"model": "another/model"}, {}):
        answer = client.post("/load_model", json=body)
        assert answer.status_code == 400
        assert "loads no other model" in answer.json()["error"]["message"]
    assert client.post("/reset").status_code == 404
    assert client.post(COMPLETION, json={"prompt": "a", "model": "another/model"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {}, "messages: Field required"),
        (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
        (CHAT, {"messages": [{"content": "text"}]}, "messages.0.role: Field required"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content.str: Input should be"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "cannot be read (KeyError: 'arguments')"),
        (CHAT, {"messages": MESSAGES, "generation_config": "{"}, "generation_config: Invalid JSON"),
        (CHAT, {"messages": MESSAGES, "generation_config": '{"max_new_tokens": -1}'}, "cannot be read"),
        (RESPONSE, {"input": [5]}, "input.list[dict[str,any]].0: Input should be a valid dictionary"),
        (RESPONSE, {"input": [{"type": "function_call", "role": None}]}, "it holds no token"),
        (COMPLETION, {"prompt": 5}, "prompt: Input should be a valid string"),
        (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens: Input should be greater than"),
        (COMPLETION, {"prompt": "a", "temperature": "hot"}, "temperature: Input should be a valid number"),
        (COMPLETION, [], "body: Input should be a valid dictionary"),
    ],
)
def test_a_malformed_request_is_answered_with_400(client_of, path, body, said):
    answer = client_of(has_template=True).post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_large_request_is_refused_before_it_is_read(client_of):
    client = client_of()
    assert client.post(COMPLETION, json={"prompt": "a" * 9_000, **FEW}).status_code == 200
    for content in (b"a" * 11_000, iter([b"a" * 6_000] * 2)):  # with its length in a header, and in pieces
        answer = client.post(COMPLETION, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "more than 10,000 bytes; `serve --max_request_mb`" in answer.json()["error"]["message"]


def test_a_request_that_takes_too_long_ends(client_of):
    client, others = client_of(request_timeout=0.2), client_of()
    body = {"prompt": "some text", "max_tokens": 100_000, "temperature": 0}
    answer = client.post(COMPLETION, json=body)
    assert answer.status_code == 504
    assert "--request_timeout" in answer.json()["error"]["message"]
    with client.stream("POST", COMPLETION, json={**body, "stream": True}) as answer:
        assert "took too long" in list(answer.iter_lines())[-2]
    assert others.post(COMPLETION, json={**body, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("is_started", [False, True])
def test_a_request_that_does_not_end_by_itself_is_given_up(is_started, monkeypatch):
    """As one that waits for its turn, or a layer that takes longer than the limit."""
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    from starlette.testclient import TestClient

    from hf_linear_attention.conversion import serve_app

    async def endless(scope, receive, send):
        if is_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    monkeypatch.setattr(serve_app, "OVERTIME", 0.0)
    limits = serve_app.Limits(hosts=(), max_request_bytes=100, request_timeout=0.1)
    answer = TestClient(serve_app.LimitMiddleware(endless, limits)).get("/")
    assert answer.status_code == (200 if is_started else 504)
    assert "--request_timeout` allows (0.1 s)" in answer.text


def test_who_may_ask(client_of):
    body = {"prompt": "a", **FEW}
    for host, status in (("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("evil.example.org", 400)):
        assert client_of().post(COMPLETION, json=body, headers={"host": host}).status_code == status
    client = client_of(api_key="open sesame")
    for given, status in ((None, 401), ("Bearer other", 401), ("Bearer open sesame", 200), ("Basic open sesame", 401)):
        headers = {} if given is None else {"authorization": given}
        answer = client.post(COMPLETION, json=body, headers=headers)
        assert answer.status_code == status
        assert client.get("/v1/models", headers=headers).status_code == status
        assert client.post("/load_model", json={}, headers=headers).status_code in (status, 400)
    assert "API key" in client.post(COMPLETION, json=body).json()["error"]["message"]
    assert client.get("/health").status_code == 200


def test_options_of_both_commands(linear_llama, monkeypatch):
    started = []
    monkeypatch.setattr(serve, "start", lambda ours, words: started.append((ours, words)))
    monkeypatch.setenv(serve.API_KEY, "secret")
    words = [str(linear_llama), "--port", "9", "--dtype", "float32", "--request-timeout", "3", "--allowed_host", "a, b"]
    assert main(["serve", *words]) == 0
    ((ours, others),) = started
    assert (ours.port, ours.api_key, ours.request_timeout, ours.allowed_host) == (9, "secret", 3, "a, b")
    assert others == [str(linear_llama), "--dtype", "float32", "--host", "localhost", "--port", "9"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no model; give the folder"),
        (["--port", "9"], "`--port` is not an option here; give the folder"),
        (["OUT", "--continuous-batching"], "leave it out"),
        (["OUT", "--port", "99999999"], "`--port` is 99999999; give a whole number from 0 to 65535"),
        (["OUT", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["OUT", "--max_request_mb", "0"], "`--max_request_mb` is 0; give a number above 0"),
        (["OUT", "--request_timeout", "inf"], "`--request_timeout` is inf; give a number above 0"),
        (["OUT", "--allowed_host", "a*b"], "`--allowed_host` is 'a*b'; give a name such as"),
        (["OUT", "--api_key="], "`--api_key` is empty"),
        (["OUT", "--engine", "sglang"], "argument --engine: invalid choice: 'sglang'"),
        (["OUT", "--nosuch"], "No such option: --nosuch"),
        (["OUT", "another"], "Got unexpected extra argument"),
        (["./such-a-model"], "config.json of './such-a-model' cannot be used"),
        (["~nosuchuser/x"], "`~nosuchuser/x` cannot be used"),
    ],
)
def test_what_cannot_be_served(words, said, capsys):
    pytest.importorskip("fastapi", reason="needs the extra `serve`")
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_without_the_libraries_it_says_what_to_install(linear_llama, monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main(["serve", str(linear_llama)]) == 2
    assert 'run `pip install "hf-linear-attention[serve]"`' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "words", "said"),
    [
        (None, [], 'vLLM is not installed; run `pip install "hf-linear-attention[vllm]"`; docs/serve.md says'),
        ("0.31.2", [], "vLLM 0.31.2 is older than 0.32, which converted models need"),
        (None, ["--allowed_host", "a"], "`--allowed_host` is an option of our own server, which `--engine vllm`"),
        (None, ["--max-request-mb", "4"], "`--max_request_mb` is an option of our own server"),
        (None, ["--request_timeout=600"], "`--request_timeout` is an option of our own server"),
        (None, ["--port", "70000"], "`--port` is 70000; give a whole number from 0 to 65535"),
    ],
)
def test_what_the_engine_vllm_refuses(version, words, said, linear_llama, monkeypatch, capsys):
    """Without vLLM; tests/vllm_plugin has what it does with vLLM."""
    monkeypatch.setitem(sys.modules, "vllm", version and types.SimpleNamespace(__version__=version))
    assert main(["serve", str(linear_llama), "--engine", "vllm", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_tokenizer_needs_no_question_where_the_package_is_imported(linear_llama):
    """Without it, AutoTokenizer reads config.json first, which names code."""
    code = (
        "import sys\n"
        "import hf_linear_attention, transformers\n"
        "print(len(transformers.AutoTokenizer.from_pretrained(sys.argv[1])('some text').input_ids))"
    )
    command = [sys.executable, "-c", code, str(linear_llama)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "Do you wish" not in done.stdout + done.stderr
    assert int(done.stdout) > 2
