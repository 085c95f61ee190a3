"""report.html in headless chromium: both colour schemes, and on a phone nothing reaches beyond the edge."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from page_reports import CONFIG, REPORT, RUNS
from PIL import Image

from hf_linear_attention.conversion.page import page_of


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium (`apt-get install chromium`)"),
]
HEIGHT = 5600


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(
        page_of(REPORT, RUNS, CONFIG, "a-model-with-a-name-as-long-as-those-of-the-hub-are"), encoding="utf-8"
    )
    return path


def screenshot(page: Path, scheme: str, width: int) -> Image.Image:
    """A picture of the page; chromium's log says what it could not do."""
    path = page.with_name(f"{scheme}-{width}.png")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{HEIGHT}"]
    flags += ["--force-dark-mode"] if scheme == "dark" else []
    # No name can be resolved: a page that loads something would fail to.
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--screenshot={path}"]
    done = subprocess.run(["chromium", *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return Image.open(path).convert("RGB")


def colour_of(page: Path, scheme: str) -> tuple[int, ...]:
    """`--page` in the style sheet."""
    found = re.findall(r"--page: #(\w{6})", page.read_text(encoding="utf-8"))[scheme == "dark"]
    return tuple(bytes.fromhex(found))


# Headless chromium has windows of 500 pixels or more; an iframe has the width of a phone.
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_it_is_drawn_in_its_scheme_and_inside_its_width(page, scheme, width):
    framed = page
    if width < 500:
        framed = page.with_name("phone.html")
        style = f'style="width: {width}px; height: {HEIGHT}px; border: 0"'
        framed.write_text(f'<body style="margin: 0"><iframe {style} src="{page.name}"></iframe>', encoding="utf-8")
    image = screenshot(framed, scheme, max(width, 500)).crop((0, 0, width, HEIGHT))
    background = colour_of(page, scheme)
    assert image.getpixel((2, 2)) == background
    for x in (width - 3, 2):  # the margins
        assert image.crop((x, 0, x + 1, HEIGHT)).getcolors() == [(HEIGHT, background)]
    drawn = [y for y in range(0, HEIGHT, 8) if len(image.crop((0, y, width, y + 1)).getcolors(width)) > 1]
    assert drawn[-1] > 1400  # all sections
    assert len(image.getcolors(width * HEIGHT)) > 100
