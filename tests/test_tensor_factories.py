"""Every tensor that the shipped code makes names its dtype and its device, or comes from another tensor.

`torch.full(shape, x)` has the default dtype of the moment: C once read such a float64 number as float32, and a cache
kept one for ever. Parameters and persistent buffers follow the default dtype and device, as in transformers; they say
so by being made inside `nn.Parameter(...)` or `register_buffer(...)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).resolve().parents[1] / "hf_linear_attention"
# `*_like`, `new_*` and `from_numpy` take both from what they are given.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
OWNERS = {"Parameter", "register_buffer"}


def unnamed(text: str) -> Iterator[str]:
    """What is missing in each call of a factory that is not inside an owner's call: `line: name lacks ...`."""
    owned: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):  # from the outside in
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


def test_every_tensor_names_its_dtype_and_device():
    found = [
        f"{path.name}:{line}" for path in sorted(PACKAGE.glob("*.py")) for line in unnamed(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("torch.full((1,), scaling)", "device and dtype"),
        ("torch.arange(8, device=x.device)", "dtype"),
        ("torch.randn(3, **options)", "device and dtype"),
        ("f(torch.tensor([1.0], dtype=x.dtype))", "device"),
        ("torch.zeros(2, dtype=x.dtype, device=x.device)", None),
        ("nn.Parameter(torch.empty(3))", None),
        ("self.register_buffer('b', None if n is None else torch.empty(n))", None),
        ("x.new_zeros(3) + torch.zeros_like(x)", None),
    ],
)
def test_what_is_found(text, missing):
    assert [line.partition(" lacks ")[2] for line in unnamed(text)] == ([missing] if missing else [])
