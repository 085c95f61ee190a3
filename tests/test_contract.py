"""`contract.yaml`: every capability of a user has a test, and what is new needs a row there."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_linear_attention
from hf_linear_attention.configuration_linear_attention import DROPPABLE
from hf_linear_attention.conversion import commands, serve
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.training.losses.objectives import OBJECTIVES
from hf_linear_attention.training.tasks import TASKS


ROOT = Path(__file__).resolve().parents[1]
CONTRACT: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "tests" / "contract.yaml").read_text())
# What the help of `serve` does not list, because transformers' server has these options too.
OF_THE_SERVER = {"host", "port"}


def stems(folder: str) -> set[str]:
    return {path.stem for path in (ROOT / "training" / folder).glob("*.yaml")}


def variables() -> set[str]:
    """Environment variables of ours that the source, or the build, asks for."""
    sources = [
        path for name in ("hf_linear_attention", "conversion", "training") for path in (ROOT / name).rglob("*.py")
    ]
    texts = [path.read_text() for path in (*sources, ROOT / "setup.py")]
    return {name for text in texts for name in re.findall(r'"(HF_LINEAR_ATTENTION_[A-Z0-9_]+)"', text)}


def names_of_api() -> set[str]:
    """Documented names that the package itself does not offer."""
    found = re.findall(r"(?m)^::: [\w.]+\.(\w+)$", (ROOT / "docs" / "api.md").read_text())
    return {*found} - {*hf_linear_attention.__all__}


@functools.cache
def functions_of(file: str) -> set[str]:
    """`function` and `Class::function` of a file of tests."""
    body = ast.parse((ROOT / file).read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    inside = {f"{owner.name}::{node.name}" for owner in classes for node in owner.body if hasattr(node, "name")}
    return inside | {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("section", CONTRACT)
def test_every_named_test_exists(section: str) -> None:
    for capability, node in CONTRACT[section].items():
        file, _, name = node.partition("::")
        assert (ROOT / file).is_file(), f"{section}, {capability}: there is no {file}"
        assert name.partition("[")[0] in functions_of(file), f"{section}, {capability}: {file} has no {name}"


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_every_option_of_a_command_has_a_row(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        commands.main([command, "--help"])
    listed = {*re.findall(r"(?m)^ +(?:-\w, )?--([a-z]\w*)", capsys.readouterr().out)} - {"help"}
    rows = {*CONTRACT[f"options of {command}"]}
    assert rows == listed | (
        OF_THE_SERVER if command == "serve" else {"push_to_hub"} if command == "finetune" else set()
    )
    if command == "serve":
        assert rows == {*vars(serve.parse(["OUT"])[0])}


def test_every_other_capability_has_a_row() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {*scripts} <= {*CONTRACT["entry points"]}
    known = {
        "commands": {*commands.COMMANDS},
        "Python names": {*hf_linear_attention.__all__},
        "Python names of docs/api.md": names_of_api(),
        "mechanisms": {*MECHANISMS},
        "feature maps": {*FEATURE_MAPS},
        "random features": {*RANDOM_FEATURES},
        "features that --drop leaves out": {*DROPPABLE},
        "tasks": {*TASKS},
        "objectives": {*OBJECTIVES},
        "presets": stems("presets"),
        "recipes of --config": stems("configs"),
        "launch files": stems("launch"),
        "environment variables": variables(),
    }
    assert {section: {*CONTRACT[section]} for section in known} == known
