"""What README and docs/ show works: commands parse, code compiles, tables are generated, links lead to files."""

from __future__ import annotations

import json
import re
import shlex
from decimal import Decimal
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
# The rows of the table of lengths in docs/positions.md, by their names in the measured file.
MEASURED = {
    "linear elu1": "`linear` elu1",
    "linear exp 128": "`linear` exp, hedgehog, t2r",
    "linear hedgehog 128": "`linear` exp, hedgehog, t2r",
    "linear t2r 64": "`linear` exp, hedgehog, t2r",
    "performer 256": "`performer`, 256 features",
    "hybrid 64 + 4": "`hybrid`, window 64",
    "linformer 128": "`linformer`, 128 slots",
    "nystrom 64": "`nystrom`, 64 landmarks",
    "latent 64": "`latent`, 64 latents",
    "aft simple": "`aft` simple",
}
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


def test_the_first_figures_are_those_of_the_run():
    """`benchmarks/plot_quick_start.py` keeps them, and draws the picture from them."""
    kept = json.loads(read("images", "quick_start.json"))
    quality, text = kept["quality"], (ROOT / "README.md").read_text(encoding="utf-8")
    beyond = next(bucket for bucket in quality["positions"]["buckets"] if bucket["from"] == 1024)
    for figures, place in ((quality, "within the 512 tokens of its training"), (beyond, "positions 1,024 to 2,047")):
        row = [f"{figures[name]:.3f}" for name in ("teacher", "student", "same_bytes")]
        assert f"{place} | {' | '.join(row)} |" in text
    assert f"| {quality['agreement']:.1%} |".replace("%", " %") in text
    assert f"| {kept['state_bytes'] / 1000:.0f} kB |" in text


def test_the_lengths_are_those_that_were_measured():
    rows = {}
    for row in json.loads((ROOT / "conversion" / "break_even.json").read_text(encoding="utf-8"))["rows"]:
        if row["name"] in MEASURED:
            lengths = [row[way] or "> 4,096" if way in row else "" for way in ("bidirectional", "causal")]
            rows[row["name"]] = [f"{entry:,}" if isinstance(entry, int) else entry for entry in lengths]
    assert rows.keys() == MEASURED.keys()
    table = re.sub(" +", " ", read("positions.md"))
    assert [
        n for n, row in rows.items() if f"| {MEASURED[n]} | {row[0]} | {row[1]} |".replace("  ", " ") not in table
    ] == []


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


# Figures that are the mean of seeds, with the values that RESULTS.md has.
MEANS = {"1.434": ("1.4320", "1.4375", "1.4323"), "1.462": ("1.4681", "1.4581", "1.4597")}
DECIMAL = r"(?<![\d.\w,^-])\d*\.\d{3,4}(?![\d.])"


def measured() -> list[Decimal]:
    """Every decimal number in RESULTS.md, and in the figures of the quick start."""
    files = [ROOT / "benchmarks" / "RESULTS.md", DOCS / "images" / "quick_start.json"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return [Decimal(number) for number in re.findall(r"(?<![\d\w])\d*\.\d+", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_were_measured(page):
    """Every number with three or four decimals outside of code is, rounded, one of those that were measured."""
    known = measured()
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for figure in sorted(set(re.findall(DECIMAL, text)) - set(MEANS)):
        unit = Decimal(figure).as_tuple().exponent
        assert any(round(number, -unit) == Decimal(figure) for number in known if number.as_tuple().exponent <= unit), (
            f"{page.name} has {figure}, which benchmarks/RESULTS.md does not have"
        )


def test_means_are_of_what_was_measured():
    known = measured()
    for mean, values in MEANS.items():
        assert all(Decimal(value) in known for value in values)
        assert round(sum(map(Decimal, values)) / len(values), 3) == Decimal(mean)
