"""Which library is loaded, what is said where none is, and how setup.py builds it."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_linear_attention
from hf_linear_attention.kernels import cpu as kernels_cpu


ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the libraries are looked for, anew in each test."""
    monkeypatch.setattr(kernels_cpu, "package_folder", lambda: tmp_path)
    monkeypatch.delenv(kernels_cpu.BACKEND_VARIABLE, raising=False)
    caches = kernels_cpu._loaded, kernels_cpu.requested_backend
    for cache in caches:
        cache.cache_clear()
    yield tmp_path
    for cache in caches:
        cache.cache_clear()


def compiled(path: Path, source: str) -> None:
    if COMPILER is None:
        pytest.skip("no C compiler")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source.encode(), check=True)


def library_with(numbers: list[int]) -> str:
    body = "".join(f"n[{place}] = {number};" for place, number in enumerate(numbers))
    return f"#include <stdint.h>\nvoid abi(int64_t *n) {{ {body} }}\nint64_t best_instruction_set(void) {{ return 0; }}"


def test_another_interface_is_not_called(folder):
    numbers = [*kernels_cpu.ABI[:-1], kernels_cpu.ABI[-1] + 1]
    compiled(folder / f"_kernels_base{kernels_cpu.SUFFIX}", library_with(numbers))
    assert kernels_cpu.library() is None
    backend = kernels_cpu.kernel_backend()
    assert backend.name == "torch"
    assert str(tuple(numbers)) in backend.reason
    assert str(kernels_cpu.ABI) in backend.reason


@pytest.mark.parametrize("content", [b"not a library", None])
def test_a_damaged_library_is_named(folder, content):
    path = folder / f"_kernels_base{kernels_cpu.SUFFIX}"
    if content is None:
        compiled(path, "int nothing(void) { return 0; }")
    else:
        path.write_bytes(content)
    backend = kernels_cpu.kernel_backend()
    assert backend.name == "torch"
    said = "is not a library of hf_linear_attention" if content is None else "cannot be loaded"
    assert f"{path} {said}" in backend.reason


@pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")
def test_a_damaged_library_of_the_processor_leaves_the_one_for_all(folder, caplog):
    installed = Path(hf_linear_attention.__file__).parent
    name = f"_kernels_base{kernels_cpu.SUFFIX}"
    shutil.copy(installed / name, folder / name)
    base = ctypes.CDLL(str(folder / name))
    best = kernels_cpu.INSTRUCTION_SETS[base.best_instruction_set()]
    if best == "base":
        pytest.skip("this processor has no other instruction set")
    (folder / f"_kernels_{best}{kernels_cpu.SUFFIX}").write_bytes(b"damaged")
    with caplog.at_level(logging.INFO, kernels_cpu.__name__):
        backend = kernels_cpu.kernel_backend()
    assert (backend.name, backend.instruction_set) == ("c", "base")
    assert best in caplog.text


def test_torch_can_be_asked_for(folder, monkeypatch):
    monkeypatch.setenv(kernels_cpu.BACKEND_VARIABLE, "torch")
    assert kernels_cpu.kernel_backend()[::2] == ("torch", "`HF_LINEAR_ATTENTION_BACKEND` is `torch`.")
    for value in ("c", "Torch", ""):
        monkeypatch.setenv(kernels_cpu.BACKEND_VARIABLE, value)
        kernels_cpu._loaded.cache_clear()
        kernels_cpu.requested_backend.cache_clear()
        with pytest.raises(ValueError, match=f"_BACKEND` = '{value}' is not one of auto, torch; set one of them"):
            kernels_cpu.kernel_backend()


RUN = """
import os, subprocess, sys
def refuse(event, given):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork"):
        raise AssertionError(f"{event} {given}")
    if event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+") and ".pyc" not in str(given[0]):
        raise AssertionError(f"{event} {given}")
import torch
sys.addaudithook(refuse)
import hf_linear_attention
from hf_linear_attention.kernels import operators as first
for name in [name for name in sys.modules if name.startswith("hf_linear_attention")]:
    del sys.modules[name]
import hf_linear_attention
from hf_linear_attention.kernels import operators as second
from hf_linear_attention.torch_kernels.attention import kernel_attention
assert first is not second and first.OPERATORS is second.OPERATORS is torch.ops.hf_linear_attention
x = torch.rand(1, 2, 40, 8, requires_grad=True)
kernel_attention(x, x, x, log_features=False, is_causal=True)[0].sum().backward()
assert x.grad.isfinite().all()
"""


@pytest.mark.long
def test_a_first_call_compiles_and_writes_nothing_and_a_second_import_registers_no_operator_again(tmp_path):
    places = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", RUN]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | places, timeout=120)
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.rglob("*"))


def build(source: Path, *options: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "setup.py", "build_ext", *options]
    clean = {name: value for name, value in os.environ.items() if name != "HF_LINEAR_ATTENTION_REQUIRE_KERNELS"}
    return subprocess.run(command, cwd=source, capture_output=True, text=True, env=clean | environment, timeout=300)


@pytest.fixture
def source(tmp_path):
    """What a source distribution has, and nothing that was built."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("no setuptools")
    target = tmp_path / "source"
    target.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for name in ("csrc", "hf_linear_attention", "conversion", "training", "model_cards"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("*.so", "*.dll", "__pycache__"))
    return target


def test_an_installation_without_a_compiler_goes_on(source, tmp_path):
    before = {path for path in source.rglob("*") if path.is_file()}
    folders = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    result = build(source, *folders, CC="/bin/false")
    assert result.returncode == 0, result.stderr
    assert not list((tmp_path / "lib").rglob("*.so"))
    assert {path for path in source.rglob("*") if path.is_file()} == before


def test_an_installation_that_requires_the_kernels_fails_without_a_compiler(source):
    assert build(source, CC="/bin/false", HF_LINEAR_ATTENTION_REQUIRE_KERNELS="1").returncode != 0
