"""The three rings: the model ring imports nothing of ours outside itself, the kernels only it, the tools both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hf_linear_attention.checkpoint_code import _ring


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_linear_attention"
# A module may import from its own ring and those before it.
RINGS = ("model", "kernels", "tools", "_common", "training", "conversion")
FOLDERS = {"kernels": "kernels", "_common": "_common", "training": "training", "conversion": "conversion"}
MODEL = {f"hf_linear_attention.{name}" for name in _ring({})}


def modules() -> Iterator[tuple[str, Path]]:
    for folder in (PACKAGE, ROOT / "training", ROOT / "conversion"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            in_package = parts[0] == "hf_linear_attention"
            if in_package and parts[1] in ("conversion", "training", "model_cards"):
                continue  # they point at the folders of the checkout
            yield ".".join(parts if in_package else ("hf_linear_attention", *parts)), path


def ring_of(name: str) -> str:
    if name in MODEL:
        return "model"
    return FOLDERS.get(name.split(".")[1], "tools") if "." in name else "facade"


def imported(name: str, text: str) -> Iterator[str]:
    """Every module of ours that a file imports anywhere, or names in a text as `import_module` does."""
    for node in ast.walk(ast.parse(text)):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*name.split(".")[: -node.level], *([node.module] if node.module else [])])
            base = base if node.level else str(node.module)
            found = [f"{base}.{alias.name}" for alias in node.names] + [base]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("hf_linear_attention."):
            found = [str(node.value)]
        yield from (module for module in found if module in KNOWN)


KNOWN = {name for name, _ in modules()}


def test_arrows_point_inwards():
    found = []
    for name, path in modules():
        if name in (f"{PACKAGE.name}.__init__", f"{PACKAGE.name}.__main__"):
            continue  # the facade names everything
        own = RINGS.index(ring_of(name))
        targets = imported(name, path.read_text(encoding="utf-8"))
        found += [f"{name} imports {other}" for other in targets if RINGS.index(ring_of(other)) > own]
    assert not found


def test_an_arrow_outwards_is_found():
    for text in ("from ..kernels.cpu import takes", "def f():\n    from hf_linear_attention.conversion import plan"):
        found = [ring_of(name) for name in imported("hf_linear_attention.mechanisms.linear", text)]
        assert {"kernels", "conversion"} & set(found)
