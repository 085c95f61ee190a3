"""The pages of README and docs/: tables are generated, links lead to files. tests/docs runs what they show."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from capability_table import HEALED_AS, architecture_table, capability_table, page_of

from hf_linear_attention import supported_model_types
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.training.tasks import TASKS


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def read(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


def test_the_readme_is_short_and_counts_the_model_types():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert f"({len(supported_model_types())} model types)" in text


def test_the_capability_table_is_generated():
    assert f"\n{capability_table()}\n\n" in read("mechanisms.md")


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_site_has_a_table_of_the_options(name, monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS))
    hooks = importlib.import_module("site_hooks")
    source = page_of(name).partition("#")[0]
    shown = hooks.on_page_markdown(read(source), SimpleNamespace(file=SimpleNamespace(src_uri=source)))
    assert [option for option in MECHANISMS[name].options if f"\n| `{option}` | " not in shown] == []


def test_the_table_of_architectures_is_generated():
    assert architecture_table() in read("architectures.md")
    assert {task for tasks in HEALED_AS.values() for task in tasks} == set(TASKS)


def test_every_page_is_in_the_navigation():
    # Tags such as those of Python objects are for mkdocs alone.
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load(text)["nav"]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    # made by docs/site_hooks.py from files elsewhere in the repository
    made = {"index.md", "changelog.md", "contributing.md"}
    assert {page for page in named if not page.startswith("results/")} - made == there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
