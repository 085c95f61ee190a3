"""`serve`: transformers' own server finds the classes of a converted model, and only this command changes that."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from checkpoints import convert_folder, save_twin
from transformers import AutoModelForCausalLM

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion import serve
from hf_linear_attention.conversion.commands import main
from hf_linear_attention.transformers_internals import server_namespace


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


def test_the_command_hands_the_words_on(linear_llama, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(serve, "start", started.append)
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM", raising=False)
    assert main(["serve", str(linear_llama), "--port", "9"]) == 0
    assert started == [[str(linear_llama), "--port", "9"]]
    assert server_namespace().LinearLlamaForCausalLM.__name__ == "LinearLlamaForCausalLM"
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no model; give the folder"),
        (["--port", "9"], "`--port` is not an option here; give the folder"),
        (["OUT", "--continuous-batching"], "leave it out"),
        (["./such-a-model"], "config.json of './such-a-model' cannot be used"),
    ],
)
def test_what_cannot_be_served(words, said, capsys):
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_softmax_model_is_left_to_transformers(llama):
    with pytest.raises(UsageError, match="is no converted model"):
        serve.register_model(str(llama))


def test_without_the_libraries_it_says_what_to_install(linear_llama, monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main(["serve", str(linear_llama)]) == 2
    assert 'run `pip install "transformers[serving]"`' in capsys.readouterr().err
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM")


def test_a_tokenizer_needs_no_question_where_the_package_is_imported(tmp_path):
    """Without it, AutoTokenizer reads config.json first, which names code; a concrete class reads its own files."""
    save_twin(tmp_path / "source", "llama")
    convert_folder(tmp_path / "source", tmp_path / "out", "--no_verify", "--attention", "linear")
    code = (
        "import sys\n"
        "folder, imports = sys.argv[1:]\n"
        "if imports: import hf_linear_attention\n"
        "import transformers\n"
        "name = 'AutoTokenizer' if imports else 'PreTrainedTokenizerFast'\n"
        "print(len(getattr(transformers, name).from_pretrained(folder)('some text').input_ids))"
    )
    for imports in ("x", ""):
        command = [sys.executable, "-c", code, str(tmp_path / "out"), imports]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        assert "Do you wish" not in done.stdout + done.stderr
        assert int(done.stdout) > 2
