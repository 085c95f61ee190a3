"""What the README shows works: its commands parse, its code compiles, its table is the classes' own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from capability_table import capability_table

from hf_linear_attention.conversion.commands import COMMANDS
from hf_linear_attention.conversion.convert_checkpoint import architecture_table
from hf_linear_attention.conversion.request import parse as parse_conversion
from hf_linear_attention.training.recipe_parser import build_parser


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    text = "\n".join(block for language, block in BLOCKS if language == "bash").replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def test_the_capability_table_is_generated():
    assert capability_table() in README


def test_the_table_of_architectures_is_generated():
    assert architecture_table() in README


@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command)[:60])
def test_commands_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    if command[0] == "make":
        assert f"\n{command[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    if command[0] == "hf-linear-attention":
        assert command[1] in COMMANDS
        if command[1] == "convert":
            parse_conversion(command[2:])
        return
    script = next(part for part in command if part.endswith(".py"))
    assert Path(script).exists()
    arguments = command[command.index(script) + 1 :]
    if script.startswith("conversion"):
        parse_conversion(arguments)
    else:
        known = {option for action in build_parser()._actions for option in action.option_strings}
        assert {part for part in arguments if part.startswith("--")} <= known | {"--config"}
        for part in command:
            assert not part.endswith(".yaml") or Path(part).exists()


@pytest.mark.parametrize("code", [block for language, block in BLOCKS if language == "python"])
def test_code_compiles(code):
    compile(code, "README.md", "exec")
