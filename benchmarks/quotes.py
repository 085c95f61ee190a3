"""The measured figures of README.md and docs/, each with its place in the results.

    python benchmarks/quotes.py            # lists what differs; the exit code is 1 if anything does
    python benchmarks/quotes.py --write    # writes the figures of the results into the pages (`make figures`)

`quotes.yaml` lists the quotes of every page. A quote has

- `text`: a piece of the page that occurs once, with `{}` for every measured figure;
- `from`: one or more pieces of `file` (benchmarks/RESULTS.md) with as many `{}`; of a .json file, paths to its numbers,
  such as `rows.name=aft simple.causal` or `quality.teacher`;
- `under`, if a piece occurs more than once: the beginning of the heading of its section, of the header of its table, or
  some words of the paragraph in front of its table;
- `as`, if the figures are not quoted as they are: the arithmetic of each, with a, b, c ... for those of `from`.

In a piece, `...` is anything within a line, in a row of a table within a cell; whitespace is any whitespace. Sources
are read without `**`. A figure keeps the form that it has in the page: `.5` or `0.5`, and its decimals, unless the
results have fewer.

What looks measured and is in no quote is an error, unless the page's `not_measured` has it: versions, settings,
definitions, figures of papers, and what is computed on paper.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import yaml


ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/RESULTS.md"
NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
FIGURE = rf"(?<![\d.,])((?:> )?-?(?:{NUMBER}(?:\.\d+)?|\.\d+)(?:e-?\d+)?)(?!\d|[.,]\d)"
UNITS = r"%|x|times|points|nats|bytes|[kMG]i?B|[GT]FLOP/s|[num]?s|h|seconds|minutes|hours"
# A decimal number (but not 1.0M), a number with an exponent, one with a unit, the length from which something holds,
# and a cell of its own that is not the first of its row.
LOOKS_MEASURED = re.compile(
    rf"(?<![\w.,-])(?:{NUMBER}?\.\d+(?![\w-]|\.\d)|{NUMBER}(?:\.\d+)?e-?\d+"
    rf"|(?:{NUMBER}(?:\.\d+)?|\.\d+)(?=(?:,? (?:and |to |or |/ )?[\d.,]*\d)*\s?(?:{UNITS})(?!\w))"
    rf"|(?:(?<=from )|(?<=from\n)|(?<=from about )){NUMBER}(?=\stokens)|(?<=[^\n]\| ){NUMBER}(?= \|))"
)
# Code, the targets of links, and tables that a script writes: after a comment with its command, and those of options.
NO_TEXT = re.compile(
    r"(?ms)^```.*?^```|`[^`]*`|\]\([^)]*\)|https?://\S+"
    r"|^<!-- python [^\n]*-->\n\n(?:\|[^\n]*\n)+|^\| option \|[^\n]*\n(?:\|[^\n]*\n)+"
)


class QuoteError(ValueError):
    """A quote that cannot be followed: it names the piece."""


def pattern(piece: str) -> re.Pattern[str]:
    """What finds a piece, with a group for each of its figures."""
    gap = r"[^|\n]*?" if piece.startswith("|") else r"[^\n]*?"
    parts = [part for part in re.split(r"(\{\}|\s*\.\.\.\s*|\s+)", piece) if part]
    known = {"{}": FIGURE, "...": gap, "": r"\s+"}
    start = "(?m)^" if piece.startswith("#") else ""
    return re.compile(start + "".join(known.get(part.strip(), re.escape(part)) for part in parts))


def find(piece: str, text: str, place: str) -> re.Match[str]:
    """The only place of a piece in a text."""
    found = list(pattern(piece).finditer(text))
    if len(found) != 1:
        raise QuoteError(f"{place} has {len(found)} places instead of one for: {piece}")
    return found[0]


def part(text: str, under: str, place: str) -> str:
    """The section of a heading; or the rest of a table, or of a paragraph with the table behind it."""
    end = r"\n\n(?!\|)"
    if under.startswith("#"):
        end = rf"\n#{{1,{len(under.split()[0])}}} "
    elif under.startswith("|"):
        end = r"\n\n|\n\|[^|\n]+\|[ |]*\n"  # rows with a first cell alone divide a table
    return re.split(end, text[find(under, text, place).start() :], maxsplit=1)[0]


def entry(data: Any, path: str) -> str | Decimal:
    """A number of a .json file."""
    value = data
    for key in path.split("."):
        name, equals, wanted = key.partition("=")
        try:
            if equals:
                value = next(item for item in value if str(item[name]) == wanted)
            else:
                value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, StopIteration, TypeError, ValueError):
            raise QuoteError(f"nothing is at `{key}` of: {path}") from None
    if value is None and "longest" in data:  # conversion/break_even.json: not even the longest length was enough
        return f"> {data['longest']:,}"
    if not isinstance(value, (int, float)):
        raise QuoteError(f"no number is at: {path}")
    return Decimal(str(value))


def number(figure: str | Decimal) -> Decimal:
    """The value of a figure."""
    return Decimal(figure.replace(",", "")) if isinstance(figure, str) else figure


def decimals(figure: str) -> int:
    """The number of digits behind the point."""
    return len(figure.partition("e")[0].partition(".")[2])


def values(quote: dict[str, Any], root: Path) -> list[str | Decimal]:
    """What the results have for the figures of a quote."""
    place = quote.get("file", RESULTS)
    text = (root / place).read_text(encoding="utf-8")
    pieces = quote["from"] if isinstance(quote["from"], list) else [quote["from"]]
    if place.endswith(".json"):
        found = [entry(json.loads(text), piece) for piece in pieces]
    else:
        text = text.replace("**", "")
        text = part(text, quote["under"], place) if "under" in quote else text
        found = [figure for piece in pieces for figure in find(piece, text, place).groups()]
    if "as" not in quote:
        return list(found)
    expressions = quote["as"] if isinstance(quote["as"], list) else [quote["as"]]
    try:
        names = dict(zip(ascii_lowercase, map(number, found)))
        return [Decimal(eval(each, {"__builtins__": {}, "min": min, "max": max}, names)) for each in expressions]
    except (ArithmeticError, NameError, SyntaxError, TypeError) as error:
        raise QuoteError(f"`as` of {expressions} with {found}: {error}") from None


def written(value: str | Decimal, old: str) -> str:
    """A value in the form of the figure that it replaces."""
    digits = decimals(old)
    if isinstance(value, str):
        if value.startswith(">"):
            return value
        digits = min(digits, decimals(value))
    text = f"{number(value):.{digits}e}" if "e" in old else f"{number(value):,.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text) if re.match(r"-?\.", old) else text


def figures(quote: dict[str, Any], page: str, text: str, root: Path) -> list[tuple[int, str, str]]:
    """Where in a page the figures of a quote are, what they are, and what they should be."""
    match = find(quote["text"], text, page)
    wanted = values(quote, root)
    if len(wanted) != len(match.groups()):
        raise QuoteError(f"{len(wanted)} figures for the {len(match.groups())} of: {quote['text']}")
    return [
        (match.start(group), old, written(new, old))
        for group, (old, new) in enumerate(zip(match.groups(), wanted), start=1)
    ]


def at(text: str, place: int) -> int:
    """The number of the line."""
    return text.count("\n", 0, place) + 1


def unquoted(text: str, quoted: list[range], not_measured: list[str]) -> Iterator[tuple[int, str]]:
    """What looks measured and has no source, with its place; and what `not_measured` has for nothing."""
    plain = NO_TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    places = {match.start(): match[0] for match in LOOKS_MEASURED.finditer(plain)}
    for piece in not_measured:
        exempt = [place for match in pattern(piece).finditer(text) for place in places if place in range(*match.span())]
        if not exempt:
            yield 0, f"nothing needs this entry of `not_measured`: {piece}"
        places = {place: figure for place, figure in places.items() if place not in exempt}
    for place, figure in places.items():
        if not any(place in span for span in quoted):
            yield place, f"{figure} looks measured, and is in no quote of benchmarks/quotes.yaml"


def revise(page: str, listed: dict[str, Any], root: Path) -> tuple[str, list[str], list[str]]:
    """A page as it should be, what differs, and what is wrong with its quotes."""
    text = (root / page).read_text(encoding="utf-8")
    found: dict[int, tuple[str, str]] = {}
    errors = []
    for quote in listed.get("quotes", []):
        try:
            found |= {place: (old, new) for place, old, new in figures(quote, page, text, root)}
        except QuoteError as error:
            errors.append(f"{page}: {error}")
    quoted = [range(place, place + len(old)) for place, (old, _) in found.items()]
    for place, problem in unquoted(text, quoted, listed.get("not_measured", [])):
        errors.append(f"{page}:{at(text, place)}: {problem}")
    changed = [(place, old, new) for place, (old, new) in sorted(found.items()) if old != new]
    differences = [f"{page}:{at(text, place)}: {old} is {new} in the results" for place, old, new in changed]
    for place, old, new in reversed(changed):
        text = text[:place] + new + text[place + len(old) :]
    return text, differences, errors


def main(write: bool = False, root: Path = ROOT) -> int:
    """Compare or write all pages; 1 if something differs or is wrong."""
    listed = yaml.safe_load((root / "benchmarks" / "quotes.yaml").read_text(encoding="utf-8"))
    pages = ["README.md", *sorted(page.relative_to(root).as_posix() for page in (root / "docs").rglob("*.md"))]
    problems = [f"benchmarks/quotes.yaml has {page}, which is no page" for page in listed if page not in pages]
    for page in pages:
        text, differences, errors = revise(page, listed.get(page) or {}, root)
        problems += errors
        if write and differences:
            (root / page).write_text(text, encoding="utf-8")
            print(*(f"written: {difference}" for difference in differences), sep="\n")
        else:
            problems += differences
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    sys.exit(main(write=bool(sys.argv[1:])))
