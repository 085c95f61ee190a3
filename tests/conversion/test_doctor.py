"""`doctor`: what it finds in the installation and in a folder, and that its exit code says so."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from checkpoints import run

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion import doctor
from hf_linear_attention.conversion.commands import doctor as main
from hf_linear_attention.conversion.doctor import BROKEN, LIBRARIES, NOTE, OK, environment_findings, folder_findings
from hf_linear_attention.kernels.cpu import KernelBackend


ROOT = Path(__file__).resolve().parents[2]


answer = functools.partial(run, command=main)


@pytest.fixture
def folder(linear_llama, tmp_path) -> Path:
    """A converted model of its own."""
    return Path(shutil.copytree(linear_llama, tmp_path / "model"))


def found(folder: Path, topic: str) -> doctor.Finding:
    return {finding.topic: finding for finding in folder_findings(folder)}[topic]


def test_the_command_examines_both_and_the_exit_code_says_what_it_found(folder):
    code, out, err = answer(folder)
    assert (code, err) == (0, "")
    assert out.endswith("Nothing is broken.\n")
    for topic in ("torch", "transformers", "kernels", "threads", "GPU", "model", "code"):
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
        ("modeling", "class (", BROKEN),
        ("modeling", "other = True\n", NOTE),
    ):
        path = folder / f"{name}_linear_attention.py"
        path.write_text(path.read_text() + "# mine\n" if text is None else text)
        finding = found(folder, "code")
        assert finding.kind == kind
        assert path.name in finding.text


def test_a_damaged_config(folder):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "linear_attention": {"mechanism": "none such"}}))
    assert found(folder, "files").kind == BROKEN
    for damage in ("{", "[]"):
        path.write_text(damage)
        assert found(folder, "config.json").kind == BROKEN


def test_what_is_no_converted_model_is_a_usage_error(llama, tmp_path):
    for path, said in ((llama, "is not converted"), (tmp_path, "no config.json"), (tmp_path / "x", "is not a folder")):
        with pytest.raises(UsageError, match=said):
            list(folder_findings(path))


def test_versions_that_are_too_old_too_new_or_missing(monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", {
        "torch": (">=999", "999.1", ""), "transformers": (">=1,<2", "1", ""), "absent-a": (">=1", "1", ""),
        "absent-b": (">=1", "1", "training"), "safetensors": (">=0.1", "0.1.5", ""),
    })  # fmt: skip
    kinds = {name: doctor._library(name) for name in doctor.LIBRARIES}
    assert [kinds[name].kind for name in doctor.LIBRARIES] == [BROKEN, BROKEN, BROKEN, NOTE, OK]
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
    reason = "The package was installed without its C kernels; install the package on a machine with a C compiler."
    monkeypatch.setattr("hf_linear_attention.kernel_backend", lambda: KernelBackend("torch", None, reason))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = {finding.topic: finding for finding in environment_findings()}["kernels"]
    assert finding.kind == NOTE
    assert reason in finding.text
    assert "no C compiler (cc" in finding.text
