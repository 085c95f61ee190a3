"""YAML of other people: recipes and model cards, without what lets a small file take endless time and memory."""

from __future__ import annotations

from typing import Any

import yaml


MAX_YAML_CHARACTERS = 2**20


def load_yaml(text: str) -> Any:
    """The content of a YAML text, without aliases, which can stand for billions of values.

    Raises:
        yaml.YAMLError: if it is no YAML, too long or nested too deeply, or has aliases or a name twice.
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
