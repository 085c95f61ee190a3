"""Plants one error at a time in a copy of the checkout and says whether the tests notice.

    python tests/planted/run.py                       every error against the tests of its row
    python tests/planted/run.py mask-left cache-crop  some errors, by id or by area
    python tests/planted/run.py --tests tests/conversion --all

The working tree is never changed. The exit code is 1 if an error survives that must be killed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import yaml


ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("errors.yaml")
SOURCES = ("hf_linear_attention", "conversion", "training", "model_cards", "csrc")
SUFFIXES = (".py", ".c", ".h", ".yaml", ".html", ".json", ".md")
# A C function begins with a line that is not indented, and ends with the next line that is a brace alone.
C_FUNCTION = r"(?m)^[A-Za-z][^\n;]*\b{name}\((?:[^;{{}}]*)\{{\n(?:.*\n)*?\}}"


class Place(NamedTuple):
    """Where the old text of an error stands: a file, and the characters of the text in it."""

    path: Path
    start: int
    stop: int


def read_table() -> list[dict[str, Any]]:
    """The rows of errors.yaml."""
    return yaml.safe_load(TABLE.read_text())


def find_place(row: dict[str, Any], root: Path = ROOT) -> Place:
    """The only place of an error: in the file of its row, or else where a file has its function and its old text.

    Raises:
        LookupError: The old text stands nowhere, or more than once.
    """
    own = root / row["file"]
    found = _places_in(own, row) if own.is_file() else []
    if not found:
        found = [place for path in source_files(root) for place in _places_in(path, row)]
    if len(found) != 1:
        places = ", ".join(str(place.path.relative_to(root)) for place in found) or "nowhere"
        raise LookupError(f"{row['id']}: the old text must stand exactly once, and stands in: {places}")
    return found[0]


def source_files(root: Path) -> list[Path]:
    """Every file in which an error can be planted."""
    paths = (path for folder in SOURCES for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    return sorted(path for path in paths if path.is_file())


def _places_in(path: Path, row: dict[str, Any]) -> list[Place]:
    text, old = path.read_text(), row["old"]
    if old not in text:
        return []
    if row.get("function") is None:
        spans = [(0, len(text))] if path.suffix == Path(row["file"]).suffix else []
    elif path.suffix == ".py":
        spans = _python_functions(text, row["function"])
    else:
        spans = [match.span() for match in re.finditer(C_FUNCTION.format(name=re.escape(row["function"])), text)]
    starts = (start + match.start() for start, stop in spans for match in re.finditer(re.escape(old), text[start:stop]))
    return [Place(path, start, start + len(old)) for start in starts]


def _python_functions(text: str, name: str) -> list[tuple[int, int]]:
    """The characters of each function or class with this qualified name."""
    lines = list(itertools.accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0))
    found = []

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            own = names
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own = (*names, child.name)
                if ".".join(own) == name:
                    found.append((lines[child.lineno - 1], lines[child.end_lineno or child.lineno]))
            visit(child, own)

    visit(ast.parse(text), ())
    return found


def copy_checkout(target: Path) -> None:
    """Copy what git knows or would know, and the libraries that were built."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "hf_linear_attention").glob("*.so")]
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Plantation:
    """A copy of the checkout in which one error at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = itertools.count(int(time.time()) + 10, 10)  # Python knows a changed file by the second
        copy_checkout(folder)

    def write(self, path: Path, text: str) -> None:
        """Write a file so that neither Python nor setuptools takes an earlier result for that of this text."""
        path.write_text(text)
        moment = next(self.clock)
        os.utime(path, (moment, moment))

    def build(self) -> None:
        """Build the library of this processor again; all of them would take three times as long."""
        setup, every = self.folder / "setup.py", "for name, flags in INSTRUCTION_SETS.items()\n"
        chosen = f"{every.rstrip()} if name == {self.instruction_set!r}\n"
        setup.write_text((ROOT / "setup.py").read_text().replace(every, chosen))
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)
        shutil.copy2(ROOT / "setup.py", setup)

    @functools.cached_property
    def instruction_set(self) -> str:
        """That of the library which the package loads on this machine."""
        code = "import hf_linear_attention; print(hf_linear_attention.kernel_backend().instruction_set)"
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
        return found.stdout.strip()

    def run(self, row: dict[str, Any], tests: list[str], timeout: float) -> tuple[str, str, float]:
        """Plant an error and run tests: (killed, survived or broken; the test that failed, or the reason; seconds)."""
        place, start = find_place(row, self.folder), time.time()
        text = place.path.read_text()
        is_native = place.path.parent.name == "csrc"
        self.write(place.path, text[: place.start] + row["new"] + text[place.stop :])
        try:
            if is_native:
                self.build()
            result, detail = self.test(tests, timeout)
        except subprocess.CalledProcessError as error:
            result, detail = "broken", f"the library was not built: {error.stderr[-200:]!r}"
        finally:
            self.write(place.path, text)
            if is_native:
                for path in (ROOT / "hf_linear_attention").glob("*.so"):
                    shutil.copy2(path, self.folder / "hf_linear_attention" / path.name)
        return result, detail, time.time() - start

    def test(self, tests: list[str], timeout: float) -> tuple[str, str]:
        """Run tests in the copy until one fails."""
        output = self.folder / "planted.log"
        child = PROCESSES.Process(target=run_pytest, args=(self.folder, tests, output))
        with STARTS_AND_ENDS:
            child.start()
        has_ended = multiprocessing.connection.wait([child.sentinel], timeout)
        if not has_ended:
            child.kill()
            multiprocessing.connection.wait([child.sentinel])
        with STARTS_AND_ENDS:
            child.join()
        if not has_ended:
            return "broken", f"no end after {timeout:.0f} s"
        text = output.read_text()
        failed = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", text)
        if child.exitcode == 1 and failed:
            return "killed", failed[1]
        if child.exitcode < 0:
            return "killed", f"the tests ended by signal {-child.exitcode}"
        return ("survived", "") if child.exitcode == 0 else ("broken", text.strip().rpartition("\n")[2] or "no output")


# A process that has imported the libraries, which takes longer than most tests; every run of tests is a fork of it.
PROCESSES = multiprocessing.get_context("forkserver")
LIBRARIES = ("torch._dynamo", "transformers.modeling_utils", "transformers.generation.utils", "datasets", "accelerate")
MODELS = ("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")
PROCESSES.set_forkserver_preload(["pytest", *LIBRARIES, *MODELS])
# `start` also reads the exit codes of other children; of two threads that read one at once, one would get 255.
STARTS_AND_ENDS = threading.Lock()


def run_pytest(folder: Path, tests: list[str], output: Path) -> None:
    """Run tests of a copy in this process, with their output in a file; the exit code is that of pytest."""
    import pytest

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    options = [] if tests == ["tests"] else ["-m", ""]  # what a row names runs, whatever suite it is of
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=no", *tests, *options]))


def part(text: str) -> tuple[int, int]:
    """`K/N` as two numbers."""
    first, step = map(int, text.split("/"))
    if not 1 <= first <= step:
        raise ValueError(text)
    return first, step


def main() -> int:
    """Plant the chosen errors, print a line for each, and write the results if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("errors", nargs="*", help="ids or areas; by default all")
    parser.add_argument("--tests", nargs="+", help="files or nodes to run; by default those of the row, `killed_by`")
    parser.add_argument("--all", action="store_true", help="run the whole suite against each error")
    parser.add_argument("--part", type=part, metavar="K/N", help="only every Nth error, from the Kth on")
    parser.add_argument("--jobs", type=int, default=1, help="copies in which errors are planted at the same time")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one error (1 hour with --all)")
    parser.add_argument("--json", type=Path, help="also append each result to this file, one JSON object a line")
    arguments = parser.parse_args()
    rows = [row for row in read_table() if not arguments.errors or {row["id"], row["area"]} & set(arguments.errors)]
    if arguments.part is not None:
        first, step = arguments.part
        rows = rows[first - 1 :: step]
    if not rows:
        parser.error(f"no error has the id or the area {' or '.join(arguments.errors)}")

    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    survivors = []
    with tempfile.TemporaryDirectory(prefix="planted_") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: Queue[Plantation] = Queue()
        for number in range(arguments.jobs):
            copies.put(Plantation(Path(folder) / str(number)))

        def planted(row: dict[str, Any]) -> tuple[str, str, float]:
            tests = ["tests"] if arguments.all else arguments.tests or row["killed_by"]
            copy = copies.get()
            try:
                return copy.run(row, tests, 3600 if arguments.all else arguments.timeout)
            finally:
                copies.put(copy)

        waiting = {pool.submit(planted, row): row for row in rows}
        for done in as_completed(waiting):
            row, (result, detail, seconds) = waiting[done], done.result()
            print(f"{result:9} {seconds:6.0f} s  {row['area']:12} {row['id']:32} {detail}", flush=True)
            if result != "killed" and not row.get("survives_today", False):
                survivors.append(row["id"])
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps({"id": row["id"], "result": result, "detail": detail}) + "\n")
    print(f"{len(rows)} errors planted; not killed, and no `survives_today`: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
