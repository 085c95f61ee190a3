"""What ruff cannot see: private names of transformers, tensors without a dtype, long functions, the tree."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoModel, Cache, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_linear_attention"
FOLDERS = ("hf_linear_attention", "conversion", "training")
FILES = sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_a_function_has_60_lines_and_the_median_one_12_at_most() -> None:
    """Functions stay small enough to be read at once: the limit of CONTRIBUTING.md.

    A Triton kernel is one function, because what it computes stays in registers.
    """
    found = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[f"{path.name}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert [name for name, length in found.items() if length > 60 and not name.startswith("triton_")] == []
    assert statistics.median(found.values()) <= 12


# Every tensor that the shipped code makes names its dtype and its device, or comes from another tensor.
#
# `torch.full(shape, x)` has the default dtype of the moment: C once read such a float64 number as float32, and a cache
# kept one for ever. Parameters and persistent buffers follow the default dtype and device, as in transformers; they say
# so by being made inside `nn.Parameter(...)` or `register_buffer(...)`. `*_like`, `new_*` and `from_numpy` take both
# from what they are given.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
OWNERS = {"Parameter", "register_buffer"}


def unnamed(tree: ast.AST) -> Iterator[str]:
    """What is missing in each call of a factory that is not inside an owner's call: `line: name lacks ...`."""
    owned: set[ast.AST] = set()
    for node in ast.walk(tree):  # from the outside in
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in OWNERS:
            owned |= set(ast.walk(node))
        is_torch = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "torch"
        if is_torch and name in FACTORIES and node not in owned:
            lacks = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
            if lacks:
                yield f"{node.lineno}: torch.{name} lacks {' and '.join(sorted(lacks))}"


def test_every_tensor_names_its_dtype_and_device() -> None:
    for text, missing in {
        "torch.full((1,), scaling)": "device and dtype",
        "torch.arange(8, device=x.device)": "dtype",
        "f(torch.tensor([1.0], dtype=x.dtype))": "device",
        "nn.Parameter(torch.empty(3))": None,
        "self.register_buffer('b', None if n is None else torch.empty(n))": None,
        "x.new_zeros(3) + torch.zeros_like(x)": None,
    }.items():
        assert [line.partition(" lacks ")[2] for line in unnamed(ast.parse(text))] == ([missing] if missing else [])
    tools = [PACKAGE / name for name in ("_common", "conversion", "training", "model_cards", "vllm_plugin")]
    shipped = [path for path in FILES if PACKAGE in path.parents and path.parent not in tools]
    assert [f"{path.name}:{line}" for path in shipped for line in unnamed(TREES[path])] == []


ALLOWED = "transformers_internals.py"
# For one version of vLLM, which needs one of transformers; it works around a mistake of theirs.
OF_ONE_VERSION = "vllm_plugin/model.py"
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
BASES = (AutoModel, AutoModel._model_mapping, CONFIG_MAPPING, Cache, GenerationMixin, LlamaConfig(), PreTrainedModel)
PRIVATE = {name for base in BASES for name in dir(base) if name.startswith("_") and not name.startswith("__")}
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


def breaches(tree: ast.AST) -> list[str]:
    found, imported = [], {"transformers"}
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


def test_private_names_of_transformers_stand_in_one_file() -> None:
    """And nothing reads the code of a stock module."""
    for text in (
        "from transformers.utils import output_capturing",
        "import transformers.masking_utils",
        "def f():\n    from transformers import conversion_mapping",
        "from transformers import AutoModel\nAutoModel._unheard_of",
        "getattr(model, '_tied_weights_keys', None)",
        "class A(B):\n    def _prepare_cache_for_generation(self): ...",
    ):
        assert breaches(ast.parse(text))
    own = "class A(B):\n    def _own(self):\n        self._own = state._replace(a=1)\ntorch._foo\nAutoModel.register"
    assert breaches(ast.parse(own)) == []
    found = {path.relative_to(PACKAGE).as_posix() for path, tree in TREES.items() if breaches(tree)}
    assert found == {f"attention/{ALLOWED}", OF_ONE_VERSION}
    assert [path for path, tree in TREES.items() if {name for _, name, _ in names_used(tree)} & CODE_READERS] == []


def test_the_tree_of_contributing_is_that_of_the_repository() -> None:
    """What it names is there, wherever it is; the files of the package and the folders of all are named."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"(?ms)^## How the pieces fit\n(.*?)(?=^## |\Z)", text)
    assert section
    tree = "".join(re.findall(r"(?s)```\n(.*?)```", section[1]))
    names = set(re.findall(r"[\w<>]+\.py\b", tree)) | set(re.findall(r"\w+/", tree))
    folders = (*FOLDERS, "model_cards", "tests", "docs", "csrc", "benchmarks")
    paths = [path for name in folders for path in (ROOT / name, *(ROOT / name).rglob("*"))]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in paths if "__pycache__" not in path.parts}
    patterns = {name: re.compile(re.escape(name).replace("<name>", r"\w+")) for name in names}
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, there))] == []
    needed = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    for folder in (PACKAGE, ROOT / "conversion", ROOT / "training"):
        needed |= {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
    unnamed_ones = {name for name in needed if not any(pattern.fullmatch(name) for pattern in patterns.values())}
    assert unnamed_ones - {"__pycache__/", "model_cards/"} == set()
