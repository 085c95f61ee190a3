"""What the documentation shows: its fenced blocks, their commands, and the commands that its sentences name."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_linear_attention.conversion.commands import COMPARE, EVALUATE, overview


ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[a-z ]+) -->\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
# An example in the docstring at the head of a script.
INDENTED = re.compile(r"(?P<mark>)(?P<language>)(?:^|\n\n)(?P<text>(?:    [^\n]*(?:\n|$))+)")
# How a line begins that is a command, in a block without a language or between backquotes.
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:accelerate|hf|hf-linear-attention|lm_eval|make|pip|pytest|python|transformers) "
)
# What outputs have beside figures that is another model's, or another disk's.
OF_A_MODEL = (
    (r"stories260k-llama", "SRC"),
    (r"^(tale|story) ", "label "),
    (r"(?<=, )`\w+`(?= \d)", "another mechanism"),
    (r"(?<![\w.])/\S*/", ""),
    # how fast this machine is now
    (r"never within its [\d,]+ positions( \([\d,]+ tokens\))?|not up to [\d,]+ tokens", "# tokens"),
    (r"faster here (?=#)", "it is faster than softmax here from "),
)
OVERVIEW = "hf-linear-attention --help"


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is the comment in front of it."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""


@dataclass(frozen=True)
class Command:
    """A command of a block, on one line."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: `{self.text}`"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def pages() -> dict[str, str]:
    """The text of every page, and of the docstring at the head of every script; only what shows a block is needed."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    for folder in ("conversion", "training"):
        for file in sorted((ROOT / folder).glob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            head = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            found[name] = head.replace("%(prog)s", f"python {name}")
    for name, head in (("compare", COMPARE), ("evaluate", EVALUATE)):
        found[f"hf-linear-attention {name} --help"] = head.replace("%(prog)s", f"hf-linear-attention {name}")
    return found | {OVERVIEW: overview()}


def blocks(page: str, text: str) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    for match in (FENCE if page.endswith(".md") else INDENTED).finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        language = match["language"] if page.endswith(".md") else "bash"
        yield Block(page, line, language, match["text"], match["mark"] or "")


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block: every line of bash, and those of a block without a language that start a program."""
    lines = block.text.split("\n")
    while lines:
        number = block.line + block.text.count("\n") + 1 - len(lines)
        whole = lines.pop(0)
        while whole.endswith("\\"):
            whole = f"{whole[:-1].rstrip()} {lines.pop(0).strip()}"
        words = shlex.split(whole, comments=True) if block.language == "bash" else []
        if words or (block.language == "" and PROGRAM.match(whole)):
            yield Command(block.page, number, shlex.join(words) if words else whole)


def mentions(page: str, text: str) -> Iterator[Command]:
    """The commands that a page names between backquotes."""
    for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if PROGRAM.match(match[1] + " ") and " " in match[1]:
            yield Command(page, text.count("\n", 0, match.start()) + 1, match[1])


def with_smaller_budget(text: str, tokens: str = "500") -> str:
    """The text of a block with a few seconds of training, where it asks for minutes."""
    for pattern, smaller in (
        (r"--tokens \w\S*", f"--tokens {tokens}"),
        (r'tokens="\w+"', f'tokens="{tokens}"'),
        (r"--max_train_tokens \d+", "--max_train_tokens 300"),
        (r"--(num_train_)?epochs \d+", r"--\1epochs 1"),
    ):
        text = re.sub(pattern, smaller, text)
    return text


def form(line: str) -> str:
    """A line without what differs between two models: figures, folders of the disk, and the widths of columns."""
    for pattern, same in OF_A_MODEL:
        line = re.sub(pattern, same, line)
    return " ".join(re.sub(r"(?<![\w])[-+]?\d+(?:,\d+)*(?:\.\d+)?(?:e[-+]?\d+)?|(?<=\s)-(?=\s|$)", "#", line).split())


def first_missing_line(shown: str, printed: str, exact: tuple[str, ...] = ()) -> str | None:
    """The first line of a block of output that was not printed behind those before it, or None.

    Lines and their ends may be left out, and a line may be continued on the next one. Lines that begin as one of
    `exact` are compared as they are, the others by their form.
    """

    def compared(line: str) -> str:
        return line.rstrip() if exact and line.startswith(exact) else form(line)

    rest = "".join(f"\n{compared(line)}" for line in printed.splitlines())
    for line in filter(str.strip, shown.splitlines()):
        start = 0 if rest.startswith(f" {compared(line)}") else rest.find(f"\n{compared(line)}")
        if start < 0:
            return line
        rest = rest[start + 1 + len(compared(line)) :]
    return None
