"""What mkdocs needs to show files of the repository that live outside docs/: they become pages of the site.

Links to them are written as they work in the repository, and changed here for the site. The pages of mechanisms get
their tables of options.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from hf_linear_attention.mechanisms.settings import MECHANISM_OPTIONS, Option


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("conversion", "recall", "recall_bytes", "papers", "speed")
# The file in the repository, and its page.
PAGES = {
    "README.md": "index.md",
    "benchmarks/results/README.md": "results/index.md",
    **{f"benchmarks/results/{name}.md": f"results/{name}.md" for name in RESULTS},
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to their pages."""
    here = posixpath.dirname(page.file.src_uri)
    in_repository = {page: source for source, page in PAGES.items()}.get(page.file.src_uri)
    folder = posixpath.dirname(in_repository) if in_repository else posixpath.join("docs", here)

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        folders = [prefix for prefix in ("docs/", "benchmarks/") if target.startswith(prefix)]
        on_site = PAGES.get(target) or (target.removeprefix(folders[0]) if folders else None)
        return f"{match[1]}{posixpath.relpath(on_site, here or '.')}{match[3]}" if on_site else match[0]

    return LINK.sub(changed, _with_options(markdown))


def _with_options(markdown: str) -> str:
    """The page of a mechanism with a table where it says how to list the options."""
    for name in MECHANISM_OPTIONS:
        markdown = markdown.replace(f"\n{sentence_of_options(name)}\n", f"\n{options_table(name)}\n")
    return markdown


def sentence_of_options(name: str) -> str:
    """What the page of a mechanism has in the place of the table."""
    return f"`hf-linear-attention convert --help` lists the options of `{name}`."


def options_table(name: str) -> str:
    """A Markdown table of the options of a mechanism, each with its default, its values and its help."""
    lines = ["| option | default | values | what it is |", "| --- | --- | --- | --- |"]
    for option, entry in MECHANISM_OPTIONS[name].options.items():
        default = "automatic" if entry.default is None else f"`{_text(entry.default)}`"
        lines.append(f"| `{option}` | {default} | {_values(entry)} | {entry.help} |")
    return "\n".join(lines)


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.kind is bool:
        return "`true`, `false`"
    least = "" if option.minimum is None else f", at least {option.minimum}"
    several = "; or one per layer" if option.is_per_layer else ""
    return {int: "a whole number", float: "a number"}.get(option.kind, "a text") + least + several


def _text(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)
