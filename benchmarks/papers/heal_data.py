"""Rows for `heal_tasks.py`: real text and digits in the forms of the tasks, and strings made for an encoder-decoder."""

from __future__ import annotations

import json
import random
import re
import string
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


LETTERS = string.ascii_lowercase[:10]
DIGITS_HELD_OUT = 1000
PIECES, PIECE_WORDS, MOST = 5, 16, 3  # of a passage whose classes are counted
ASIDE = 5  # the words of a question on either side of its blank
PLAIN = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")  # quotation marks

Row = dict[str, Any]
Sources = dict[str, list[str]]
"""The words of every text, by the name of its file."""
TextRow = Callable[[random.Random, Sources, int], Row]
"""Makes one row of the words of the sources; the number is that of the words of a passage."""


def words_of(path: Path) -> list[str]:
    """The words of a .txt or of the texts in a .jsonl, without what only one of the sources prints."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        text = "\n".join(json.loads(line)["text"] for line in text.splitlines())
    text = re.sub(r"<unk>|@(?=[-,.]@)|(?<=@[-,.])@|^ *=.*= *$", "", text.translate(PLAIN), flags=re.MULTILINE)
    return re.sub(r"\s+([,.;:!?])", r"\1", text).split()


def text_rows(row: TextRow) -> Callable[[Namespace, Path], None]:
    """A function that writes rows of passages at random places; the last tenth of every text is held out."""

    def write_rows(arguments: Namespace, folder: Path) -> None:
        texts = {Path(path).stem: words_of(Path(path)) for path in arguments.texts}
        cuts = {source: len(words) * 9 // 10 for source, words in texts.items()}
        train = {source: words[: cuts[source]] for source, words in texts.items()}
        held_out = {source: words[cuts[source] :] for source, words in texts.items()}
        for name, parts, count in (("train", train, arguments.rows), ("valid", held_out, arguments.held_out)):
            generator = random.Random(name)
            write_jsonl(folder / f"{name}.jsonl", [row(generator, parts, arguments.words) for _ in range(count)])

    return write_rows


def write_jsonl(path: Path, rows: list[Row]) -> None:
    """Write one row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def passage(generator: random.Random, words: list[str], count: int) -> list[str]:
    """`count` words in a row from a random place."""
    start = generator.randrange(len(words) - count + 1)
    return words[start : start + count]


def plain_text(generator: random.Random, sources: Sources, count: int) -> Row:
    """masked_lm: a passage."""
    return {"text": " ".join(passage(generator, generator.choice([*sources.values()]), count))}


def most_pieces(generator: random.Random, sources: Sources, count: int) -> Row:
    """sequence_classification: short pieces of all sources in random order, and the source with the most of them."""
    label = generator.choice([*sources])
    others = [name for name in sources if name != label]
    # No other source has as many pieces as the label.
    chosen = [label] * MOST + [others[number % len(others)] for number in range(PIECES - MOST)]
    generator.shuffle(chosen)
    pieces = [" ".join(passage(generator, sources[name], PIECE_WORDS)) for name in chosen]
    return {"text": " ".join(pieces), "label": label}


def cased_words(generator: random.Random, sources: Sources, count: int) -> Row:
    """token_classification: words in lower case, and how they were written."""
    words = passage(generator, generator.choice([*sources.values()]), count)
    return {"tokens": [word.lower() for word in words], "tags": [case_of(word) for word in words]}


def case_of(word: str) -> str:
    """The tag of a word: O for lower case, UPPER for two or more capitals and no small letter, TITLE otherwise."""
    if word == word.lower():
        return "O"
    letters = [letter for letter in word if letter.isalpha()]
    return "UPPER" if len(letters) > 1 and word == word.upper() else "TITLE"


def gap(generator: random.Random, sources: Sources, count: int) -> Row:
    """question_answering: some words of a passage with a blank in the place of one to three; these are the answer."""
    words = passage(generator, generator.choice([*sources.values()]), count)
    length = generator.randint(1, 3)
    start = generator.randrange(ASIDE, count - ASIDE - length)
    question = [*words[start - ASIDE : start], "_", *words[start + length : start + length + ASIDE]]
    answers = {"text": [" ".join(words[start : start + length])], "answer_start": [len(" ".join(words[:start])) + 1]}
    return {"question": " ".join(question), "context": " ".join(words), "answers": answers}


def strings(arguments: Namespace, folder: Path) -> None:
    """Random strings of 4 to `longest` letters and their reversals; no string of the validation data is in training."""
    generator, seen = random.Random(0), set()
    while len(seen) < arguments.rows + arguments.held_out:
        seen.add("".join(generator.choices(LETTERS, k=generator.randint(4, arguments.longest))))
    found = sorted(seen)
    generator.shuffle(found)
    for name, part in (("train", found[arguments.held_out :]), ("valid", found[: arguments.held_out])):
        write_jsonl(folder / f"{name}.jsonl", [{"source": text, "target": text[::-1]} for text in part])


def digits(arguments: Namespace, folder: Path) -> None:
    """The images of `--mnist` as PNG files, and their classes; the last thousand are held out."""
    from PIL import Image

    data = np.load(arguments.mnist)
    images, labels = data["images"], data["labels"]
    (folder / "png").mkdir(exist_ok=True)
    held_out = len(images) - min(DIGITS_HELD_OUT, len(images) // 2)
    for name, part in (("train", range(held_out)), ("valid", range(held_out, len(images)))):
        rows = []
        for number in part:
            Image.fromarray(images[number]).save(folder / "png" / f"{number}.png")
            rows.append({"image": f"png/{number}.png", "label": str(labels[number])})
        write_jsonl(folder / f"{name}.jsonl", rows)
