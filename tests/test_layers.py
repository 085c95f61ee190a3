"""Dependencies point one way: the package that checkpoints are made of <- _common <- training <- conversion."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_linear_attention"
# From the bottom up; a file may import from its own layer and those before it. `model_cards` holds a template alone.
FOLDERS = {
    "": ROOT / PACKAGE,
    "model_cards": ROOT / "model_cards",
    "_common": ROOT / PACKAGE / "_common",
    "training": ROOT / "training",
    "conversion": ROOT / "conversion",
}
LAYERS = list(FOLDERS)


def files_of(layer: str) -> list[Path]:
    """The flat files of the package, which are shipped, or everything below the folder of another layer."""
    if layer == "":  # `__main__.py` starts the command of the topmost layer and belongs to none
        return sorted(path for path in FOLDERS[layer].glob("*.py") if path.name != "__main__.py")
    return sorted(FOLDERS[layer].rglob("*.py"))


def imported_modules(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports anywhere, lazily or by its name as a text too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            yield from ((node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant))


def layer_of(name: str) -> str | None:
    """The layer of a module, or None if it is not ours; a checkout's own folders count by any name."""
    first, *rest = name.split(".")
    if first == PACKAGE:
        return rest[0] if rest and rest[0] in LAYERS else ""
    return first if first in LAYERS else None


def arrows_up(layer: str, name: str, text: str) -> list[str]:
    """The imports of a file that lead to a layer above its own."""
    module = ".".join(part for part in (PACKAGE, layer, name) if part)
    found = ((line, target, layer_of(target)) for line, target in imported_modules(ast.parse(text), module))
    return [
        f"{layer or PACKAGE}/{name}.py:{line} imports {target}"
        for line, target, other in found
        if other is not None and LAYERS.index(other) > LAYERS.index(layer)
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_no_import_leads_up(layer: str) -> None:
    found = []
    for path in files_of(layer):
        name = ".".join(path.relative_to(FOLDERS[layer]).with_suffix("").parts)
        found += arrows_up(layer, name, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)
    assert layer == "model_cards" or len(files_of(layer)) > 5


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("training", "from hf_linear_attention.conversion.plan import Plan"),
        ("training", "def f():\n    from hf_linear_attention.conversion import plan"),
        ("training", "def f():\n    import hf_linear_attention.conversion.plan as p"),
        ("training", "from hf_linear_attention import conversion"),
        ("training", "from ..conversion.plan import Plan"),
        ("training", "from .. import conversion"),
        ("training", "import importlib\nimportlib.import_module('hf_linear_attention.conversion.plan')"),
        ("training", "import conversion.plan"),
        ("_common", "if True:\n    from hf_linear_attention.training import plots"),
        ("", "from ._common.errors import UsageError"),
        ("", "from . import training"),
    ],
)
def test_an_import_that_leads_up_is_found(layer: str, text: str) -> None:
    assert len(arrows_up(layer, "a", text)) == 1


def test_an_import_that_leads_down_or_aside_is_none_of_these() -> None:
    text = """
import conversion_tools, torch
from hf_linear_attention import convert
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms import MECHANISMS
from hf_linear_attention._common.errors import UsageError
from . import packing
"""
    assert not arrows_up("training", "a", text)


def test_every_file_name_exists_once() -> None:
    names = Counter(path.name for layer in LAYERS for path in files_of(layer) if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_what_was_defined_once_is_not_defined_again() -> None:
    """Each command has its own of a few; a package may use a name twice, but not two packages."""
    own_of_each = {"main", "parse", "prepare", "run", "logger"}
    defined = Counter()
    for layer in ("_common", "training", "conversion"):
        names = {name for path in files_of(layer) for name in defined_names(ast.parse(path.read_text("utf-8")))}
        defined.update(name for name in names - own_of_each if not name.startswith("_"))
    assert [name for name, count in defined.items() if count > 1] == []


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and constants at the top of a file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
