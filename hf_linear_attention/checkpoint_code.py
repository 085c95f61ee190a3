# SPDX-License-Identifier: Apache-2.0
"""Writes the two code files of a checkpoint from the modules of the model ring.

The definitions that the configs need become `configuration_linear_attention.py`, and the others that the checkpoint's
mechanisms need `modeling_linear_attention.py`. They are copied as they are written, comments included, in the order of
the imports. Of the tables in `TABLES` only the rows of the checkpoint's own settings are kept, and what only other rows
use is left out.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .configuration_linear_attention import CODE_FILES, LICENCE_LINE, entries_of


ROOT = Path(__file__).parent
ENTRIES = tuple(name.removesuffix(".py") for name in CODE_FILES)
# The tables that are cut, and the setting whose values are the keys of the rows that stay.
TABLES = {
    "MECHANISM_OPTIONS": "mechanism",
    "MECHANISMS": "mechanism",
    "FEATURE_MAPS": "feature_map",
    "RANDOM_FEATURES": "features",
}
TITLES = (
    "The configs of models with linear attention, and their settings.",
    "Models whose attention has a cost that is linear in the length.",
)
HEADER = '''{licence}"""{title}

hf_linear_attention {version} wrote this file from its own modules, which the headings name. If the package is installed
and reads these settings, it serves the checkpoint instead, with its kernels.
"""
'''
# Before the other imports of the config's file, which comes first, because these would name what is missing only.
OLDEST_TRANSFORMERS = (5, 16)  # as in pyproject.toml
CHECK = f"""import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < {OLDEST_TRANSFORMERS}:
    raise ImportError(
        "This checkpoint needs transformers {".".join(map(str, OLDEST_TRANSFORMERS))} or newer, and "
        f"{{transformers.__version__}} is installed: pip install -U transformers"
    )
"""
HEADING = "# " + "-" * 20 + " {} " + "-" * 20
Rows = tuple[tuple[str, tuple[str, ...]], ...]


class Statement(NamedTuple):
    """A statement at the top level of a module of the ring."""

    text: str  # with the comments before it, and without imports from the ring
    defined: frozenset[str]
    used: frozenset[str]


class Module(NamedTuple):
    """A module of the ring."""

    name: str  # below the package, with dots
    statements: list[Statement]
    external: dict[str, str]  # for each name that it imports from elsewhere, the statement that does
    imported: dict[str, tuple[str, str]]  # for each name from the ring, its module and its name there


Key = tuple[Module, Statement]


def checkpoint_code(config: Any) -> dict[str, str]:
    """`{file: text}` of the code for a model with this `Linear<X>Config`."""
    entries = entries_of(config.linear_attention)
    kept = {table: {entry[name] for entry in entries if name in entry} for table, name in TABLES.items()}
    if config.linear_attention_classes is not None:
        kept["ADAPTERS"] = set(config.linear_attention_classes)
    return _files(tuple((table, tuple(sorted(rows))) for table, rows in kept.items()))


@functools.lru_cache(maxsize=8)
def _files(rows: Rows) -> dict[str, str]:
    ring = _ring(dict(rows))
    of_configs = _reached(ring, ENTRIES[0], ())
    of_models = _reached(ring, ENTRIES[1], of_configs)
    shared = {name for key in of_models for name in _used_from(ring, key, of_configs)}
    lines = [f"from .{ENTRIES[0]} import (", *(f"    {name}," for name in sorted(shared)), ")"]
    # transformers copies the files that a line like this names, and config.json names classes of both.
    other = ["if TYPE_CHECKING:", f"    from .{ENTRIES[1]} import __getattr__ as _"]
    texts = _text(of_configs, TITLES[0], other), _text(of_models, TITLES[1], lines)
    return dict(zip(CODE_FILES, texts))


def _ring(rows: dict[str, tuple[str, ...]]) -> dict[str, Module]:
    """The modules that the entry files import, each after those that it imports."""
    ring: dict[str, Module] = {}

    def visit(name: str) -> None:
        if name in ring:
            return
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        module = _parsed(name, text, tuple(row for row in rows.items() if row[0] in text))
        for other, _ in module.imported.values():
            visit(other)
        ring[name] = module

    for name in ENTRIES:
        visit(name)
    return ring


@functools.lru_cache(maxsize=256)
def _parsed(name: str, text: str, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> Module:
    tree, lines = ast.parse(text), text.splitlines()
    module = Module(name, [], {}, {})
    ring_lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = name.split(".")[: -node.level]
            for alias in node.names:
                module.imported[alias.asname or alias.name] = (".".join([*folder, str(node.module)]), alias.name)
            ring_lines.update(range(node.lineno, int(node.end_lineno or 0) + 1))
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in [] if ring_lines & {node.lineno} else node.names:
                module.external[(alias.asname or alias.name).split(".")[0]] = ast.unparse(_only(node, alias))
        elif not _is_for_checkers(node) and node is not tree.body[0]:  # nor the docstring
            table = _cut(node, dict(rows))
            module.statements.append(_statement(node, lines, ring_lines, table))
    return module


def _is_for_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _only(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    """The import of one name."""
    return ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], 0)


def _cut(node: ast.stmt, rows: dict[str, tuple[str, ...]]) -> str | None:
    """The text of a table with only the rows of these settings, which `node` loses; None for any other statement."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Dict):
        return None
    kept = rows.get(ast.unparse(node.target))
    if not kept:  # the settings do not choose from this table
        return None
    pairs = [(k, v) for k, v in zip(node.value.keys, node.value.values) if getattr(k, "value", None) in kept]
    node.value.keys, node.value.values = [k for k, _ in pairs], [v for _, v in pairs]
    text = "".join(f"    {ast.unparse(k)}: {ast.unparse(v)},\n" for k, v in pairs if k)
    return f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)} = {{\n{text}}}"


def _statement(node: ast.stmt, lines: list[str], ring_lines: set[int], table: str | None) -> Statement:
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    numbers = [n for n in range(first, int(node.end_lineno or 0) + 1) if n not in ring_lines]
    text = "\n".join(lines[n - 1] for n in numbers) if table is None else table
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    defined = {x.id for target in targets if target is not None for x in ast.walk(target) if isinstance(x, ast.Name)}
    defined |= {node.name} if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else set()
    used = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)} - defined
    return Statement(text, frozenset(defined), frozenset(used))


def _reached(ring: dict[str, Module], entry: str, known: Collection[Key]) -> list[Key]:
    """What the module `__getattr__` of an entry file needs, in the order of the modules, without what is `known`."""
    found: set[int] = set()
    excluded = {id(statement) for _, statement in known}
    waiting = list(_definitions(ring[entry], "__getattr__"))
    while waiting:
        module, statement = waiting.pop()
        if id(statement) in found or id(statement) in excluded:
            continue
        found.add(id(statement))
        # Statements that define nothing register something, and belong to what their module defines.
        waiting += [(module, other) for other in module.statements if not other.defined]
        for name in statement.used:
            waiting += _targets(ring, module, name)
    return [
        (module, statement) for module in ring.values() for statement in module.statements if id(statement) in found
    ]


def _definitions(module: Module, name: str) -> list[Key]:
    return [(module, statement) for statement in module.statements if name in statement.defined]


def _targets(ring: dict[str, Module], module: Module, name: str) -> list[Key]:
    """The statements of the ring that define what `module` calls `name`."""
    if name in module.imported:
        other, own_name = module.imported[name]
        if own_name != name:
            raise ValueError(f"{module.name} imports `{own_name}` as `{name}`; one file has one name for it.")
        return _targets(ring, ring[other], name)
    return _definitions(module, name)


def _used_from(ring: dict[str, Module], key: Key, others: Iterable[Key]) -> Iterator[str]:
    """The names in a statement that `others` define."""
    known = {id(statement) for _, statement in others}
    for name in key[1].used:
        if any(id(statement) in known for _, statement in _targets(ring, key[0], name)):
            yield name


def _text(keys: list[Key], title: str, more: list[str]) -> str:
    """One file of these statements; ValueError if two of them define or import different things under one name."""
    from . import __version__

    imports: dict[str, str] = {"TYPE_CHECKING": "from typing import TYPE_CHECKING"} if more[0].startswith("if") else {}
    owners: dict[str, str] = {}
    parts, heading = [], ""
    for module, statement in keys:
        for name in statement.used & set(module.external):
            _claim(imports, name, module.external[name])
        for name in statement.defined:
            _claim(owners, name, statement.text)
        if heading != module.name:
            heading = module.name
            parts.append(HEADING.format(f"hf_linear_attention.{heading}"))
        parts.append(statement.text)
    if both := set(imports) & set(owners):
        raise ValueError(f"{sorted(both)} are imported and defined in one file.")
    lines = sorted(set(imports.values()), key=lambda line: (line.split()[1].lower(), line))
    header = HEADER.format(licence=LICENCE_LINE, title=title, version=__version__)
    check = [CHECK] if title == TITLES[0] else []
    head = "\n".join(["from __future__ import annotations\n", *check, *lines, "", *more])
    return f"{header}\n{head}\n\n\n" + "\n\n\n".join(parts) + "\n"


def _claim(owners: dict[str, str], name: str, what: str) -> None:
    if owners.setdefault(name, what) != what:
        raise ValueError(f"`{name}` is two things in one file:\n{owners[name][:200]}\n{what[:200]}")
