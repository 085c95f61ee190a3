"""What transformers' dynamic module loader demands of the shipped files, each rule by itself."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from hf_linear_attention.mechanisms import ENTRY_FILES, MECHANISMS, REGISTRY, checkpoint_code


CODE = checkpoint_code(MECHANISMS, has_softmax_heads=True)
# safetensors is a requirement of transformers itself.
ALLOWED = {*sys.stdlib_module_names, "torch", "transformers", "safetensors"}


def guarded(tree: ast.Module) -> set[ast.AST]:
    """Nodes inside a `try:`, which the loader does not take for requirements."""
    return {node for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}


def problems(text: str) -> list[str]:
    """Every breach of the rules in one file."""
    tree, lines, found = ast.parse(text), text.splitlines(), []
    optional = guarded(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.level > 1 or node.module is None or "." in node.module:
                found.append(f"line {node.lineno}: `{lines[node.lineno - 1].strip()}` is not copied")
            if node.end_lineno != node.lineno or len(node.names) > 1:
                found.append(f"line {node.lineno}: one name a line, on one line")
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and node not in optional:
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [
                f"line {node.lineno}: imports {module}" for module in modules if module.partition(".")[0] not in ALLOWED
            ]
    real = {node.lineno for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}
    for number, line in enumerate(lines, 1):
        if number not in real and re.match(r"\s*(from\s+\.|import\s+\.|import\s+\w+\s*$|from\s+\w+\s+import\s)", line):
            found.append(f"line {number}: text that is taken for an import")
    return found


@pytest.mark.parametrize("name", CODE)
def test_a_shipped_file_keeps_the_rules(name):
    assert problems(CODE[name]) == []
    assert CODE[name].startswith("# SPDX-License-Identifier: Apache-2.0\n")  # in a checkpoint it stands alone


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_registry_of_a_checkpoint_keeps_the_rules_and_has_one_line(name):
    text = checkpoint_code({name})[REGISTRY.name]
    assert problems(text) == []
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    classes = {mechanism.__name__ for mechanism in MECHANISMS.values() if re.search(rf"\b{mechanism.__name__}\b", text)}
    assert classes == {MECHANISMS[name].__name__}
    assert set(checkpoint_code({name})) < set(CODE)


@pytest.mark.parametrize(
    "text",
    [
        "from . import masks",
        "from .kernels.chunk import f",
        "from ..training import f",
        "from .cache import a, b",
        "from .cache import (\n    a,\n)",
        "import numpy",
        "from hf_linear_attention.cache import a",
        '"""Text.\n\nfrom .cache import a\n"""',
        'def f():\n    """Text\n    import .cache\n    """',
    ],
)
def test_each_rule_notices_a_breach(text):
    assert problems(text)


def test_optional_packages_may_be_tried():
    assert problems("try:\n    import triton\nexcept ImportError:\n    triton = None") == []


def test_the_loader_copies_exactly_the_shipped_files():
    for entry in ENTRY_FILES:
        copied = {str(path).rpartition("/")[2] for path in get_relative_import_files(str(REGISTRY.with_name(entry)))}
        assert copied == set(CODE)
    others = {"__init__.py", "registration.py", "conversion_api.py", "attention_observation.py"}
    assert others.isdisjoint(CODE)
