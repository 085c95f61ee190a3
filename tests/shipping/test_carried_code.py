"""Which code a checkpoint carries: that of its own mechanism and nothing else, whoever saves it and wherever."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
import transformers
from checkpoints import save_twin
from documented import ROOT
from matrix import stock_config
from transformers.dynamic_module_utils import get_relative_import_files

from hf_linear_attention import convert, convert_config
from hf_linear_attention.checkpoint_code import checkpoint_code
from hf_linear_attention.configuration_linear_attention import CODE_FILES, LICENCE_LINE
from hf_linear_attention.mechanisms.registry import MECHANISMS


# The lines of both files together; a change that needs more says why: `hybrid` takes a step of a token at once in
# torch, which is 1.2 times as fast where the package is not installed.
MOST_LINES = {"aft": 4700, "gated_delta": 4200, "hybrid": 6500, "latent": 3400, "linear": 5100, "linformer": 3700}
MOST_LINES |= {"linformer_linear": 5600, "nystrom": 3500, "performer": 5500, "window": 4500}
# safetensors is a requirement of transformers itself.
ALLOWED = {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}


def code_of(mechanism: str, is_decoder: bool) -> dict[str, str]:
    more = {"projection_size": 8} if "linformer" in mechanism else {}
    return checkpoint_code(convert_config(stock_config("llama" if is_decoder else "bert"), mechanism=mechanism, **more))


def check(folder: Path) -> None:
    """The files of code in a folder are those of its config, and transformers takes both along."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert found == checkpoint_code(transformers.AutoConfig.from_pretrained(folder))
    assert set(found) == set(CODE_FILES)
    for entry in CODE_FILES:
        assert {Path(path).name for path in get_relative_import_files(str(folder / entry))} == set(CODE_FILES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_twin(folder, "llama")
    return folder


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_code_of_a_mechanism_stands_alone(name):
    """No name is undefined, nothing else is imported, and the other mechanisms are left out."""
    code = code_of(name, is_decoder=MECHANISMS[name].supports_causal)
    assert sum(text.count("\n") for text in code.values()) <= MOST_LINES[name]
    for text in code.values():
        assert text.startswith(LICENCE_LINE)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
                modules = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert {str(module).partition(".")[0] for module in modules} <= ALLOWED
    classes = [kind.__name__ for kind in MECHANISMS.values() if f"class {kind.__name__}(" in "".join(code.values())]
    bases = {kind.__name__ for kind in MECHANISMS[name].__mro__}
    assert MECHANISMS[name].__name__ in classes
    assert set(classes) <= bases | {"LinearAttention"}  # the features of `linformer_linear`


def test_the_config_needs_no_models():
    """Only for type checkers does the file of the configs import that of the models."""
    tree = ast.parse(code_of("hybrid", is_decoder=True)[CODE_FILES[0]])
    tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def test_an_old_transformers_is_named_before_anything_is_imported(monkeypatch):
    code = code_of("hybrid", is_decoder=True)["configuration_linear_attention.py"]
    needed = re.search(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text()).group(1)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ImportError, match=f"needs transformers {needed} or newer, and 4.57.1 is installed:"):
        exec(code, {"__name__": "code"})


def test_models_configs_and_merged_adapters(llama, tmp_path):
    peft = pytest.importorskip("peft")
    model = convert(llama, mechanism="hybrid")
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "config")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("*.py"))
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("model", "config", "merged"):
        check(tmp_path / name)


def test_what_is_left_of_another_version_goes_and_what_is_not_ours_stays(llama, tmp_path):
    """An earlier version wrote one file for each of its modules."""
    convert(llama, mechanism="hybrid").save_pretrained(tmp_path)
    entry = tmp_path / "modeling_linear_attention.py"
    more = "\n\nfrom .mine import tune\nfrom .kernels_torch import EXP\n"
    entry.write_text(entry.read_text(encoding="utf-8") + more, encoding="utf-8")
    (tmp_path / "kernels_torch.py").write_text(f"{LICENCE_LINE}from .cache import a\n", encoding="utf-8")
    own = {
        "mine.py": "def tune(): ...\n",
        "cache.py": "def a(): ...\n",
        "train.py": LICENCE_LINE,
        "mechanism_mine.py": LICENCE_LINE,
    }
    for name, text in own.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    convert(llama, mechanism="linear").save_pretrained(tmp_path)
    for name, text in own.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        (tmp_path / name).unlink()
    check(tmp_path)


def test_a_class_of_the_users_own_still_carries_its_file(llama, tmp_path, monkeypatch):
    """`register_for_auto_class` does nothing for our classes alone."""
    text = "from hf_linear_attention.modeling_linear_attention import LinearLlamaForCausalLM\n\n\n"
    (tmp_path / "mine.py").write_text(f"{text}class Mine(LinearLlamaForCausalLM):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = __import__("mine").Mine
    mine.register_for_auto_class("AutoModelForCausalLM")
    model = mine(convert(llama, mechanism="linear").config)
    model.save_pretrained(tmp_path / "out")
    assert model.config.auto_map["AutoModelForCausalLM"] == "mine.Mine"
    (tmp_path / "out" / "mine.py").unlink()
    check(tmp_path / "out")


def test_saving_where_a_file_is_changes_nothing(llama, tmp_path):
    shutil.copy(llama / "config.json", tmp_path / "file")
    with pytest.raises(AssertionError, match="should be a directory"):
        convert(llama, mechanism="linear").config.save_pretrained(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
