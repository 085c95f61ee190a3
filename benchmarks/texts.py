"""The texts of the figures of real decoders, from installed packages and this repository.

    python -m benchmarks.texts FOLDER

    fit.txt     the beginning of the source of eight packages in turns, to fit scores (57,344 tokens are read)
    train.txt   what follows in them, to train
    code.txt    this project's training/ at 131117e: no model has seen it, like the next two
    new.txt     code of three models in transformers that were published in 2026
    prose.txt   this project's docs/ at 131117e

Text to fit and text to measure share no package. The hashes are those of the versions in constraints.txt; other
versions give other texts, and a line says so.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import ROOT


FITTED = ("accelerate", "datasets", "peft", "huggingface_hub", "evaluate", "pip", "matplotlib", "pandas")
NEWEST = ("qwen4_exp", "glm5_next", "deepseek_v4")
COMMIT = "131117e"
# Characters of each package that are fitted to, and then trained on, and how many of them stand together.
FIT, GAP, TRAIN, PIECE = 34_000, 40_000, 250_000, 50_000
HASHES = {
    "fit.txt": "2657640a71eda459aa40ad7f1930a119a0834c8166faed7dbc068fefa36d3e25",
    "train.txt": "7db109ddae3a498d67a378908781cb1cdebc03dddcdd4b9841942ba916f78b2d",
    "code.txt": "990e5d429d9e56ca66e319a5223fd57c536f182bbac18e243afb63707c60ac28",
    "new.txt": "5166ca27339f184bf72840bed9319c75f4faf8c2e40601d2a8503410fcefb962",
    "prose.txt": "7b142ebe40b78df154a0e63a9932bdb8f31ccc7695522ce510858fb7e48726e2",
}


def source_of(package: str, pattern: str = "*.py") -> str:
    """The files of an installed package, in the order of their names."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; `make setup` installs all packages that are read")
    (folder,) = spec.submodule_search_locations
    return "".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).rglob(pattern)))


def at_commit(folder: str, suffix: str) -> str:
    """The files of a folder of this repository at `COMMIT`, in the order of their names."""

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        if found.returncode:
            raise SystemExit(
                f"{ROOT} must be a clone with commit {COMMIT} (`git fetch --unshallow`): {found.stderr.strip()}"
            )
        return found.stdout

    names = sorted(git("ls-tree", "-r", "--name-only", COMMIT, folder).split())
    return "".join(git("show", f"{COMMIT}:{name}") for name in names if name.endswith(suffix))


def in_turns(texts: Sequence[str], size: int) -> str:
    """The first `size` characters of each text, then the next ones."""
    return "".join(text[start : start + size] for start in range(0, max(map(len, texts)), size) for text in texts)


def texts() -> Iterator[tuple[str, str]]:
    """Each file and its text."""
    packages = [source_of(name) for name in FITTED]
    yield "fit.txt", in_turns([text[:FIT] for text in packages], FIT)
    yield "train.txt", in_turns([text[GAP : GAP + TRAIN] for text in packages], PIECE)
    yield "code.txt", at_commit("training", ".py")
    yield "new.txt", "".join(source_of(f"transformers.models.{name}", "modeling_*.py") for name in NEWEST)
    yield "prose.txt", at_commit("docs", ".md")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts():
        (folder / name).write_text(text, encoding="utf-8")
        found = hashlib.sha256(text.encode()).hexdigest()
        print(f"{name}: {len(text):,} characters{'' if found == HASHES[name] else ', of other versions'}", flush=True)


if __name__ == "__main__":
    main()
