"""YAML of other people: recipes and model cards, without what lets a small file take endless time and memory."""

from __future__ import annotations

import re
from typing import Any

import yaml


MAX_YAML_CHARACTERS = 2**20
# What is no text, by its first characters, as in YAML 1.2. In YAML 1.1, `1:30` would be 90, `010` 8, and `no` false.
NO_TEXT = {
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", r"[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)"),
    "float": (
        "-+0123456789.",
        r"[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
    ),
}


def load_yaml(text: str) -> Any:
    """The content of a YAML text, without aliases, which can stand for billions of values.

    yaml.YAMLError if it is no YAML, too long or nested too deeply, or has aliases or a name twice.
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and at most {MAX_YAML_CHARACTERS:,} are read")
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, TypeError) as error:  # a date that does not exist, or a list as a name
        raise yaml.YAMLError(str(error)) from error


class _Loader(yaml.SafeLoader):
    """The safe loader, which makes no objects of Python, without aliases and repeated names."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} has an alias (`*name`); write it out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} begins an object with {', '.join(twice)} twice")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in entries if tag.rpartition(":")[2] not in NO_TEXT]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_first, _pattern) in NO_TEXT.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), list(_first))
