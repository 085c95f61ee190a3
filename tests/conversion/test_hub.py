"""`--push_to_hub` against an emulated Hub on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import huggingface_hub
import pytest
import yaml
from checkpoints import files, run
from huggingface_hub import constants

from hf_linear_attention.conversion.commands import main


class Hub(BaseHTTPRequestHandler):
    """Creates repositories, takes every file as a regular one, and keeps the commits."""

    requests: ClassVar[list] = []
    committed: ClassVar[dict] = {}
    deleted: ClassVar[list] = []
    there: ClassVar[list] = []
    refuses = False

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        lines = [json.loads(line) for line in body.splitlines() if line]
        self.requests.append((self.path, lines[0], self.headers["Authorization"]))
        if self.refuses:
            return self.answer({"error": "no"}, 403)
        if self.path == "/api/repos/create":
            return self.answer({"url": f"http://{self.headers['Host']}/{lines[0].get('organization')}/model"})
        if self.path.endswith("/preupload/main"):
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in lines[0]["files"]]
            return self.answer({"files": modes})
        if self.path.endswith("/commit/main"):
            self.deleted.extend(line["value"]["path"] for line in lines if line["key"] == "deletedFile")
            for line in (line for line in lines if line["key"] == "file"):
                self.committed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/user/model/commit/1",
                    "commitOid": "1",
                    "pullRequestUrl": None,
                }
            )
        return self.answer({"errors": [], "warnings": []})  # the check of the card's metadata

    def do_GET(self):
        if self.path.startswith("/api/models/user/model/tree/main"):
            return self.answer([{"type": "file", "path": path, "size": 1, "oid": "1"} for path in self.there])
        return self.answer({"error": "no"}, 404)

    def answer(self, content, code=200):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    Hub.requests, Hub.committed, Hub.refuses = [], {}, False
    Hub.deleted, Hub.there = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    huggingface_hub.close_session()  # it holds whether there is a network
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()
    huggingface_hub.close_session()


def test_the_folder_is_one_commit_without_paths_of_this_machine(llama, tmp_path, hub):
    hub.there += ["notes.md", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    words = ("--attention", "linear", "--no_verify", "--push_to_hub", "user/model")
    code, out, err = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out", *words)
    assert code == 0, err
    assert out.rstrip().endswith(f"Pushed to {constants.ENDPOINT}/user/model")
    assert sorted(hub.committed) == list(files(tmp_path / "out"))
    assert hub.committed["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert {token for _, _, token in hub.requests} == {"Bearer hf_test"}
    texts = {name: content for name, content in hub.committed.items() if not name.endswith(".safetensors")}
    assert not [name for name, content in texts.items() if str(tmp_path.parent).encode() in content]
    recipe = yaml.safe_load(hub.committed["recipe.yaml"])
    assert recipe["model_name_or_path"] == "llama"
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["model_name_or_path"] == str(llama)
    assert sorted(hub.deleted) == ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]  # stale weights
    card = hub.committed["README.md"].decode()
    assert 'from_pretrained("user/model", trust_remote_code=True)' in card


def test_a_trained_model_is_shown_and_pushed_without_its_checkpoints(linear_llama, tmp_path, hub, capsys):
    trained, text = tmp_path / "trained", tmp_path / "a.txt"
    text.write_text("\n\n".join(f"Some text of some words, number {place}." for place in range(20)))
    words = ["finetune", "--task", "causal_lm", "--output_dir", str(trained), "--push_to_hub=user/model"]
    words += ["--model_name_or_path", str(linear_llama), "--validation_file", str(text)]
    assert main(words) == 1
    assert "nothing was trained" in capsys.readouterr().err
    words += ["--train_file", str(text), "--max_train_tokens", "100", "--checkpointing_steps", "1"]
    assert main([*words, "--overwrite_output_dir"]) == 0
    page = (trained / "report.html").read_text()
    assert "Trained: nats per token" in page
    assert "not trained" not in page
    pushed = [name for name in files(trained) if not name.startswith("checkpoint-")]
    assert sorted(hub.committed) == pushed != list(files(trained))


@pytest.mark.parametrize("refuses", [False, True])
def test_without_the_hub_the_result_is_shown_and_can_be_pushed_later(llama, tmp_path, hub, monkeypatch, refuses):
    hub.refuses = refuses
    if not refuses:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    out = tmp_path / "out"
    words = ("--output_dir", out, "--attention", "linear", "--no_verify", "--push_to_hub", "user/model")
    code, said, err = run("--model_name_or_path", llama, *words)
    assert code == 1
    assert f"written to  {out}" in said
    line = err.splitlines()[-1]
    assert f"the model is complete in {out}" in line
    assert (
        "`--push_to_hub user/model` failed: " if refuses else "could not reach the Hub (http://127.0.0.1:9): "
    ) in line
    assert f"`hf upload user/model {out}` tries again" in line
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "is_offline", "token", "said"),
    [
        ("a/b/c", False, "x", "give a name such as user/model"),
        ("user/model", True, "x", "HF_HUB_OFFLINE is set; unset it, or push later"),
        ("user/model", False, None, "run `hf auth login`, or set HF_TOKEN"),
    ],
)
def test_what_cannot_be_pushed_is_said_before_the_work(llama, tmp_path, monkeypatch, name, is_offline, token, said):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr("hf_linear_attention.conversion.output_folder.get_token", lambda: token)
    code, _, err = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--push_to_hub", name)
    assert code == 2
    assert said in err
    assert not (tmp_path / "out").exists()
