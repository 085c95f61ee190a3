"""Checkpoints with the code of earlier versions, by themselves and beside each other in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import hf_linear_attention


FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ROOT = Path(__file__).resolve().parents[2]
# Float32 sums of the same two layers in another order differ by up to 2e-6; the logits have a deviation of .45.
TOLERANCE = 2e-5
LOAD_ALL = """
import importlib, json, sys
sys.path[:] = [path for path in sys.path if path not in ("", json.loads(sys.argv[3]))]
import torch, transformers
from safetensors.torch import load_file
if sys.argv[2] == "blocked":
    sys.modules["hf_linear_attention"] = None
if sys.argv[2] == "first":
    importlib.import_module("hf_linear_attention")
auto = {"decoder": transformers.AutoModelForCausalLM, "encoder": transformers.AutoModelForMaskedLM}
models = {}
for folder in json.loads(sys.argv[1]):
    models[folder] = auto[folder.rpartition("/")[2]].from_pretrained(folder, trust_remote_code=True).eval()
if sys.argv[2] == "last":
    importlib.import_module("hf_linear_attention")
found = {}
for folder, model in [*models.items(), *models.items()]:
    given = load_file(f"{folder}/expected.safetensors")
    expected = given.pop("logits")
    with torch.no_grad():
        difference = (model(**given).logits - expected)[given["attention_mask"].bool()].abs().max().item()
        if hasattr(model, "generate") and "decoder" in folder:
            model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)
    found[folder] = [max(difference, found.get(folder, [0])[0]), type(model).__module__.partition(".")[0]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """A decoder and an encoder of two earlier versions with their code, and one of each as this version writes them."""
    root = tmp_path_factory.mktemp("earlier")
    with tarfile.open(FIXTURES / "carried_code.tar.xz") as archive:
        archive.extractall(root, filter="data")
    for kind in ("decoder", "encoder"):
        source = root / "4ec7eec" / kind
        auto = AutoModelForCausalLM if kind == "decoder" else AutoModelForMaskedLM
        assert hf_linear_attention.__file__
        model = auto.from_pretrained(source).eval()
        given = load_file(source / "expected.safetensors")
        model.save_pretrained(root / "now" / kind)
        with torch.no_grad():
            logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        save_file({**given, "logits": logits.contiguous()}, root / "now" / kind / "expected.safetensors")
    return [str(root / version / kind) for version in ("4b9c102", "4ec7eec", "now") for kind in ("decoder", "encoder")]


def load_all(folders: list[str], package: str, tmp_path: Path, **environment: str) -> dict[str, list]:
    given = {**os.environ, "HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, "-c", LOAD_ALL, json.dumps(folders), package, json.dumps(str(ROOT))]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("package", "backend", "step"), [("blocked", "auto", 1), ("last", "auto", -1), ("first", "torch", 1)]
)
def test_every_version_computes_what_it_did(folders, package, backend, step, tmp_path):
    """All in one process, with the package absent, imported at the end and at the start, with C and without."""
    found = load_all(folders[::step], package, tmp_path, HF_LINEAR_ATTENTION_BACKEND=backend)
    assert all(difference < TOLERANCE for difference, _ in found.values()), found
    expected = "transformers_modules" if package == "blocked" else "hf_linear_attention"
    assert {module for folder, (_, module) in found.items() if "/now/" in folder} == {expected}


NEWER = """
import sys, warnings
from transformers import AutoModelForCausalLM
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
said = [str(warning.message) for warning in found if "settings of version" in str(warning.message)]
print(type(model).__module__.partition(".")[0], len(said), *said)
"""


def test_a_package_that_is_too_old_leaves_the_work_to_the_checkpoint(folders, tmp_path):
    folder = shutil.copytree(folders[4], tmp_path / "newer")
    path = folder / "configuration_linear_attention.py"
    text = path.read_text(encoding="utf-8")
    assert text.count("FORMAT_VERSION = 1\n") == 1
    path.write_text(text.replace("FORMAT_VERSION = 1\n", "FORMAT_VERSION = 2\n"), encoding="utf-8")
    given = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", NEWER, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("transformers_modules 1 This checkpoint has settings of version 2, and the installed")
    assert f"{hf_linear_attention.__version__} reads versions up to 1" in done.stdout
