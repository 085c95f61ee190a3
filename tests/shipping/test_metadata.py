"""What the project says of itself in several places, its hosted CI among them, is the same in all of them."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import release_version
import yaml
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDER = ROOT / ".github" / "workflows"
# `on` is a boolean in YAML 1.1.
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8").replace("\non:", "\n'on':", 1))
    for path in FOLDER.glob("*.yml")
}
JOBS = [(workflow, job) for workflow, content in WORKFLOWS.items() for job in content["jobs"]]


def commands(steps: list[dict[str, Any]]) -> list[str]:
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_the_matrix_is_what_the_project_states():
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]
    stated = [name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert matrix["python"] == stated
    assert PROJECT["requires-python"] == f">={stated[0]}"
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert any("--constraint constraints.txt" in line for line in commands(WORKFLOWS["ci"]["jobs"]["test"]["steps"]))


@pytest.mark.parametrize(("workflow", "job"), JOBS)
def test_a_job(workflow, job):
    """Every action has a version, every target and file exists, and only the publishing job may identify itself."""
    content = WORKFLOWS[workflow]
    steps, targets = content["jobs"][job]["steps"], (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v[\d.]+", step["uses"]) for step in steps if "uses" in step)
    for line in commands(steps):
        words = [word for word in shlex.split(line) if "=" not in word]
        if words[0] == "make":
            assert all(f".PHONY: {target}\n" in targets for target in words[1:])
        for word in words:
            assert "/" not in word or word == "$GITHUB_REF_NAME" or (ROOT / word).is_file(), word
    assert content["permissions"] == {"contents": "read"}
    assert content["jobs"][job].get("permissions", {}) == ({"id-token": "write"} if job == "publish" else {})
    assert not re.search(r"password|secrets\.|'\w*token'(?!: 'write')", str(content))


@pytest.fixture
def root(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2026-11-23)\n\n## 1.1.0\n")
    return tmp_path


def test_the_versions_of_a_release_agree(root):
    assert release_version.problems("v1.2.0", root) == []
    assert len(release_version.problems("v1.2.1", root)) == 3
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.0\n")
    (problem,) = release_version.problems("v1.2.0", root)
    assert problem == "the first section of CHANGELOG.md has Unreleased, and the tag is v1.2.0"


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]


def test_the_oldest_versions_that_are_tested_are_those_that_are_stated():
    """All but torch's, whose old wheels cannot be had without CUDA."""
    stated = {}
    for requirement in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]:
        name, bound = re.fullmatch(r"([\w-]+)(?:>=([\d.]+).*)?", requirement).groups()
        stated[name] = bound
    text = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE))
    assert tested
    for name, version in tested.items():
        assert Version(version) == Version(stated[name]), name
    assert {name for name, bound in stated.items() if bound is not None} - set(tested) == {"torch", "jinja2"}
