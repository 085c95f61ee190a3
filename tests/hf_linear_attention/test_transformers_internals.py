"""Private names of transformers stand in one file, and nothing reads the code of a stock module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModel, Cache, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


ROOT = Path(__file__).resolve().parents[2]
ALLOWED = "transformers_internals.py"
SHIPPED = sorted((ROOT / "hf_linear_attention").glob("*.py"))
FOLDERS = ("hf_linear_attention/_common", "conversion", "training")
FILES = [*SHIPPED, *sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
# Files of transformers that its documentation does not name, and that may go with any version.
UNDOCUMENTED = {
    "transformers.conversion_mapping",
    "transformers.core_model_loading",
    "transformers.dynamic_module_utils",
    "transformers.masking_utils",
    "transformers.models.auto.auto_factory",
    "transformers.models.auto.modeling_auto",
    "transformers.utils.output_capturing",
}
# Private names of the classes that our own derive from or get objects of, by whatever name those go.
OWNERS = (AutoModel, AutoModel._model_mapping, CONFIG_MAPPING, Cache, GenerationMixin, LlamaConfig(), PreTrainedModel)
PRIVATE = {name for owner in OWNERS for name in dir(owner) if name.startswith("_") and not name.startswith("__")}
# What namedtuples, enums and torch's modules have of the same name is no business of transformers.
PRIVATE -= set(dir(tuple)) | {"_parameters", "_buffers", "_modules", "_version"}
CODE_READERS = {"__code__", "co_names", "co_consts", "co_code", "getsource", "getsourcelines"}


def modules_imported(tree: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and name of every import from transformers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [(node.lineno, node.module or "", alias.name) for alias in node.names]
        else:
            continue
        yield from (entry for entry in found if entry[1].partition(".")[0] == "transformers")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_used(tree: ast.AST) -> Iterator[tuple[int, str, ast.AST | None]]:
    """Line and name of every attribute, method and text that could name an attribute; the object where there is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, node.value
        elif isinstance(node, ast.ClassDef) and node.bases:
            yield from ((part.lineno, part.name, None) for part in node.body if isinstance(part, ast.FunctionDef))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.lineno, node.value, None


def breaches(text: str) -> list[str]:
    tree, found, imported = ast.parse(text), [], {"transformers"}
    for line, module, name in modules_imported(tree):
        full = f"{module}.{name}" if name else module
        if any(map(is_private, full.split("."))) or {module, full} & UNDOCUMENTED:
            found.append(f"line {line}: imports {full}")
        imported.add(name or module)
    for line, name, owner in names_used(tree):
        is_of_transformers = owner is not None and ast.unparse(owner).partition(".")[0] in imported
        if name in PRIVATE or (is_private(name) and is_of_transformers):
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_of_transformers_stand_in_one_file(path):
    assert bool(breaches(path.read_text(encoding="utf-8"))) == (path.name == ALLOWED)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_no_file_reads_the_code_of_stock_modules(path):
    assert {name for _, name, _ in names_used(ast.parse(path.read_text(encoding="utf-8")))} & CODE_READERS == set()


@pytest.mark.parametrize(
    "text",
    [
        "from transformers.utils.output_capturing import x",
        "from transformers.utils import output_capturing",
        "import transformers.masking_utils",
        "def f():\n    from transformers import conversion_mapping",
        "from transformers.models.llama.modeling_llama import _private",
        "import transformers\ntransformers.AutoModel._x",
        "from transformers import AutoModel\nAutoModel._unheard_of",
        "config._attn_implementation_internal = 'sdpa'",
        "model._no_split_modules",
        "getattr(model, '_tied_weights_keys', None)",
        "LlamaModel._from_config(config)",
        "class A(B):\n    def _prepare_cache_for_generation(self): ...",
    ],
)
def test_each_breach_is_noticed(text):
    assert breaches(text)


def test_names_of_our_own_are_none():
    text = """
from transformers import AutoModel
import torch
class A(B):
    def _own(self):
        self._own = state._replace(a=1)
torch._foo
AutoModel.register
def _auto_class(): ...
"""
    assert breaches(text) == []
