"""What mkdocs needs to show files of the repository that live outside docs/: they become pages of the site.

Links to them are written as they work in the repository, and changed here for the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ("conversion", "recall", "long_documents", "papers", "speed")
# The file in the repository, and its page.
PAGES = {
    "benchmarks/results/README.md": "results/index.md",
    **{f"benchmarks/results/{name}.md": f"results/{name}.md" for name in RESULTS},
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and the pictures of the results."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for picture in sorted((ROOT / "benchmarks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
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

    return LINK.sub(changed, markdown)
