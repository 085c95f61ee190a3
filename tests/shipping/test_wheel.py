"""What an installation adds: one name, both commands, everything they need, from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkpoints import save_twin


pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]
# Runs commands one after the other and prints, for each, its exit code and both outputs.
RUN = """
import contextlib, io, json, runpy, sys
# The finder of an editable installation would find the checkout first.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
sys.modules.update(dict.fromkeys(["accelerate", "datasets", "evaluate", "peft"]))  # None: there is no such module
results = []
for words in json.loads(sys.argv[1]):
    sys.argv[:] = words
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
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


@pytest.fixture(scope="module")
def results(wheel, tmp_path_factory) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands without the extra for training, in a folder that is not the checkout."""
    folder = tmp_path_factory.mktemp("anywhere")
    save_twin(folder / "source", "llama")
    (folder / "text.txt").write_text("some text\n" * 50)
    (folder / "load.py").write_text(
        "import hf_linear_attention, transformers\n"
        "print(type(transformers.AutoModelForCausalLM.from_pretrained('out')).__name__)\n"
    )
    convert = "hf_linear_attention.conversion.convert_checkpoint --model_name_or_path=source"
    heal = "hf_linear_attention.training.finetune"
    commands = {
        "convert": f"{convert} --output_dir=out",
        "load": "load",
        "heal": f"{heal} --model_name_or_path=out --task=causal_lm --train_file=text.txt --output_dir=healed",
        "preset": f"{convert} --output_dir=two --preset=default --train_file=text.txt --tokens=1k",
        "version": "hf_linear_attention --version",
        "help of convert": f"{convert} --help",
        "help of finetune": f"{heal} --help",
    }
    words = json.dumps([command.split() for command in commands.values()])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(wheel), str(folder)])}
    done = subprocess.run(
        [sys.executable, "-c", RUN, words], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout)))


def test_without_the_extra_for_training_it_converts_and_says_what_training_needs(results):
    assert results["convert"][0] == 0, results["convert"]
    assert results["load"][1] == "LinearLlamaForCausalLM\n", results["load"]
    assert results["version"][1].startswith("hf-linear-attention "), results["version"]
    for name in ("heal", "preset"):
        code, _, err = results[name]
        assert code == 2, err
        assert len(err.splitlines()) == 1
        assert 'pip install "hf-linear-attention[train]"' in err
    for name in ("help of convert", "help of finetune"):
        assert results[name][0] == 0, results[name]
        assert "usage: " in results[name][1]


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
