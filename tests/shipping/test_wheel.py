"""What an installation adds: one name, both commands, everything they need, from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkpoints import save_twin


ROOT = Path(__file__).resolve().parents[2]
# The finder of an editable installation would find the checkout first.
COMMAND = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")) if sys.argv[1] else {})  # None: there is no such module
sys.argv[:] = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel of the sources that git knows or would take, built where there is no compiler, and unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / "source" / name)
    environment = {**os.environ, "CC": "/bin/false"}
    environment.pop("HF_LINEAR_ATTENTION_REQUIRE_KERNELS", None)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(root), str(root / "source")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (found,) = root.glob("*.whl")
    assert found.name.split("-")[2:4] == ["py3", "none"]
    with zipfile.ZipFile(found) as file:
        file.extractall(root / "installed")
    return root / "installed"


def command(wheel: Path, folder: Path, *words: str, missing: str = ""):
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, missing, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_without_the_extra_for_training_it_converts_and_says_what_training_needs(wheel, tmp_path):
    save_twin(tmp_path / "source", "llama")
    convert = ("hf_linear_attention.conversion.convert_checkpoint", "--model_name_or_path", str(tmp_path / "source"))
    missing = "accelerate,datasets,evaluate"
    done = command(wheel, tmp_path, *convert, "--output_dir", str(tmp_path / "out"), missing=missing)
    assert done.returncode == 0, done.stderr
    (tmp_path / "load.py").write_text(
        "import hf_linear_attention, transformers\n"
        "print(type(transformers.AutoModelForCausalLM.from_pretrained('out')).__name__)\n"
    )
    done = command(wheel, tmp_path, "load", missing=missing)
    assert done.stdout == "LinearLlamaForCausalLM\n", done.stderr
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    heal = ("--task", "causal_lm", "--train_file", "text.txt", "--output_dir", str(tmp_path / "healed"))
    for words in (
        ("hf_linear_attention.training.finetune", "--model_name_or_path", str(tmp_path / "out"), *heal),
        (*convert, "--output_dir", "two", "--preset", "default", "--train_file", "text.txt", "--tokens", "1k"),
    ):
        done = command(wheel, tmp_path, *words, missing=missing)
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert 'pip install "hf-linear-attention[train]"' in done.stderr.splitlines()[-1]


def test_it_adds_one_name(wheel):
    names = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"hf_linear_attention"}
    assert not list(wheel.rglob("*.so")) + list(wheel.rglob("*.c"))
    assert (next(wheel.glob("*.dist-info")) / "licenses" / "LICENSE").read_text().strip().startswith("Apache License")


def test_every_file_of_the_packages_is_there(wheel):
    places = {name: ROOT / name for name in ("conversion", "training", "model_cards")}
    for package, folder in {**places, "_common": ROOT / "hf_linear_attention" / "_common"}.items():
        files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        expected = {path for path in files if "__pycache__" not in path.parts and path.name != "README.md"}
        found = wheel / "hf_linear_attention" / package
        assert expected <= {path.relative_to(found) for path in found.rglob("*")}


def test_both_commands_run_from_any_folder(wheel, tmp_path):
    """That of conversion in the first test, too."""
    done = command(wheel, tmp_path, "hf_linear_attention.training.finetune", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
