"""What README and docs/ show works: commands parse, code compiles, tables are generated, links lead to files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from capability_table import capability_table, options_table

from hf_linear_attention import supported_model_types
from hf_linear_attention.conversion.commands import COMMANDS, main
from hf_linear_attention.conversion.convert_checkpoint import architecture_table
from hf_linear_attention.conversion.request import parse as parse_conversion
from hf_linear_attention.mechanisms import MECHANISMS
from hf_linear_attention.training.recipe_parser import build_parser


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def read(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Every line of a bash block that starts one of our scripts or a target of make, with its page."""
    found = []
    for page in PAGES:
        for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] in (["make"], ["hf-linear-attention"]) or any(
                word.endswith(("convert_checkpoint.py", "finetune.py")) for word in words
            ):
                found.append((page.name, words))
    return found


def test_the_readme_is_short_and_counts_the_model_types():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert f"({len(supported_model_types())} model types)" in text


def test_the_capability_table_is_generated():
    assert f"\n{capability_table()}\n\n" in read("mechanisms.md")


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_options_table_is_generated(name):
    assert f"\n{options_table(name)}\n\n" in read("mechanisms", f"{name}.md") + "\n"


def test_the_table_of_architectures_is_generated():
    assert architecture_table() in read("architectures.md")


def test_every_page_is_in_the_navigation():
    # Tags such as those of Python objects are for mkdocs alone.
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load(text)["nav"]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    # made by docs/site_hooks.py from files elsewhere in the repository
    assert set(named) - {"results.md", "changelog.md", "contributing.md"} == there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command[0]}: {' '.join(command[1])[:60]}")
def test_commands_exist(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = command[1]
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    if words[0] == "hf-linear-attention":
        name, arguments = words[1], words[2:]
    else:
        script = next(part for part in words if part.endswith(".py"))
        assert Path(script).exists()
        name, arguments = "finetune", words[words.index(script) + 1 :]
        assert script == "training/finetune.py"
    if name == "convert" and "--config" not in arguments:
        parse_conversion(arguments)
    elif name in ("compare", "evaluate"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert {part for part in arguments if part.startswith("--")} <= set(
            re.findall(r"--\w+", capsys.readouterr().out)
        )
    elif name == "finetune":
        known = {option for action in build_parser()._actions for option in action.option_strings}
        assert {part for part in arguments if part.startswith("--")} <= known | {"--config"}
        for part in words:
            assert not part.endswith(".yaml") or Path(part).exists()
    else:
        assert name in COMMANDS


@pytest.mark.parametrize(
    ("page", "code"),
    [(page.name, code) for page in PAGES for code in blocks(page, "python")],
    ids=lambda text: text.strip()[:40],
)
def test_code_compiles(page, code):
    compile(code, page, "exec")
