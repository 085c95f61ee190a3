"""What the project says of itself in several places is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
