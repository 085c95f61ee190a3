"""`doctor`: what it finds in the installation and in a folder, and that its exit code says so."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from checkpoints import run
from safetensors.torch import load_file, save_file

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion import findings
from hf_linear_attention.conversion.commands import doctor as main
from hf_linear_attention.conversion.findings import (
    BROKEN,
    LIBRARIES,
    NOTE,
    OK,
    environment_findings,
    folder_findings,
)
from hf_linear_attention.kernels.cpu import KernelBackend


ROOT = Path(__file__).resolve().parents[2]


answer = functools.partial(run, command=main)


@pytest.fixture
def folder(linear_llama, tmp_path) -> Path:
    """A converted model of its own."""
    return Path(shutil.copytree(linear_llama, tmp_path / "model"))


def found(folder: Path, topic: str, **options) -> findings.Finding:
    return {finding.topic: finding for finding in folder_findings(folder, **options)}[topic]


def test_a_good_folder_is_fine_also_without_this_package(folder):
    findings = list(folder_findings(folder, runs_its_code=True))
    assert {finding.topic: finding.kind for finding in findings} == {
        "model": OK, "code": OK, "weights": OK, "alone": OK, "length": NOTE,
    }  # fmt: skip
    assert "linear_llama with linear" in findings[0].text
    assert "nothing was measured by length yet" in findings[-1].text


def test_the_command_examines_both_and_the_exit_code_says_what_it_found(folder, monkeypatch):
    monkeypatch.setattr(findings, "TOKENS", 128)
    code, out, err = answer(folder)
    assert (code, err) == (0, "")
    assert out.endswith("Nothing is broken.\n")
    for topic in ("torch", "transformers", "kernels", "threads", "GPU", "cache", "speed", "code", "weights", "length"):
        assert re.search(rf"(?m)^(ok|note) +{topic} ", out), topic
    (folder / "modeling_linear_attention.py").unlink()
    code, out, err = answer(folder)
    assert code == 1
    assert re.search(r"(?m)^broken +code +modeling_linear_attention.py missing", out)
    assert err == "hf-linear-attention doctor: failed: 1 thing is broken; see the lines `broken` above\n"


def test_edited_code_is_told_from_the_installed_one(folder):
    for name, text, kind in (
        ("configuration", None, NOTE),
        ("modeling", "# empty\n", BROKEN),
        ("modeling", "other = True\n", NOTE),
    ):
        path = folder / f"{name}_linear_attention.py"
        path.write_text(path.read_text() + "# mine\n" if text is None else text)
        finding = found(folder, "code")
        assert finding.kind == kind
        assert path.name in finding.text
    assert "2 of 2 files differ" in finding.text


def test_code_that_does_not_load_alone(folder, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: broken on purpose\n")

    monkeypatch.setattr(findings.subprocess, "run", run)
    finding = found(folder, "alone", runs_its_code=True)
    assert finding == (BROKEN, "alone", "it does not load without this package: RuntimeError: broken on purpose")
    assert commands[0][3:] == ["AutoModelForCausalLM", str(folder)]


def test_damaged_weights(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert found(folder, "files").kind == BROKEN
    path.unlink()
    assert found(folder, "weights").kind == BROKEN
    path.write_bytes(whole)
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path, {"format": "pt"})
    assert found(folder, "weights") == (
        BROKEN, "weights", f"1 missing, the first is {name}; export the model again",
    )  # fmt: skip
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    assert found(folder, "weights") == (
        BROKEN, "weights", f"1 with numbers that are not finite, the first is {name}",
    )  # fmt: skip


def test_a_damaged_config(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "linear_attention": {"mechanism": "none such"}}))
    assert found(folder, "files").kind == BROKEN
    path.write_text("{")
    assert found(folder, "config.json").kind == BROKEN


def test_a_measured_length_and_a_missing_tokenizer(folder):
    path = folder / "conversion_report.json"
    quality = {"positions": {"length": 4096, "trained_length": 512, "buckets": []}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quality": quality}))
    assert "measured up to 4,096 tokens (the trained length is 512)" in found(folder, "length").text
    (folder / "tokenizer_config.json").unlink()
    assert found(folder, "tokenizer").kind == NOTE


def test_what_is_no_converted_model_is_a_usage_error(llama, tmp_path):
    for path, said in ((llama, "is not converted"), (tmp_path, "no config.json"), (tmp_path / "x", "is not a folder")):
        with pytest.raises(UsageError, match=said):
            list(folder_findings(path))
    code, _, err = answer("--trust_remote_code")
    assert (code, err.count("\n")) == (2, 1)
    assert "name the folder" in err


def test_versions_that_are_too_old_too_new_or_missing(monkeypatch):
    monkeypatch.setattr(findings, "LIBRARIES", {
        "torch": (">=999", "999.1", ""), "transformers": (">=1,<2", "1", ""), "absent-a": (">=1", "1", ""),
        "absent-b": (">=1", "1", "training"), "safetensors": (">=0.1", "0.1.5", ""),
    })  # fmt: skip
    kinds = {name: findings._library(name) for name in findings.LIBRARIES}
    assert [kinds[name].kind for name in findings.LIBRARIES] == [BROKEN, BROKEN, BROKEN, NOTE, OK]
    assert "torch>=999 is needed" in kinds["torch"].text
    assert "the tests ran with 0.1.5" in kinds["safetensors"].text


def test_the_versions_are_those_of_the_project():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    for name, (wanted, tested, _) in LIBRARIES.items():
        assert tested == pinned[name]
        assert name + wanted in ranges


def test_without_kernels_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(findings, "TOKENS", 16)
    reason = "The package was installed without its C kernels; install the package on a machine with a C compiler."
    monkeypatch.setattr("hf_linear_attention.kernel_backend", lambda: KernelBackend("torch", None, reason))
    monkeypatch.setattr(findings.shutil, "which", lambda name: None)
    finding = {finding.topic: finding for finding in environment_findings()}["kernels"]
    assert finding.kind == NOTE
    assert reason in finding.text
    assert "no C compiler (cc" in finding.text
