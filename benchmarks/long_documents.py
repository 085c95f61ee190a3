"""Retrieval of documents of 4,000 tokens by a sentence of their last quarter, with MiniLM, which knows 512 positions.

    python benchmarks/long_documents.py --text /path/to/grimms_fairy_tales.txt

Documents are pieces of CPython's documentation (`pydoc_data.topics`) and of a long text, in two collections: as they
are, where the first 512 tokens often say what the last quarter is about, and mixed, where the four quarters of a
document come from four places. Every second piece heals the converted models, without labels (`--preset default
--max_position_embeddings 4096`); queries are sentences of the others, and all documents are candidates. Ways to read a
document, of which the first three use the original, and the others each converted model, untrained and healed:

    original, cut at 512            what a user of MiniLM gets: the rest of the document is not read
    original, chunks of 512         one vector for each chunk, of which the most similar one counts
    original, mean of its chunks    one vector for the document: what one vector can do if its reader makes no error
    hybrid, one vector              the whole document in one pass, the mean of all tokens
    hybrid, late chunking           the same pass, the means of its chunks, of which the most similar one counts

The queries are read by the same model as the documents. Then the speed at 8,192 tokens of one pass of each converted
model against the original in chunks of 512 and against softmax attention over the whole text, in one process, in rounds
in which all take turns. Healed models are kept in the output folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from benchmarks.common import argument_parser, interleaved_times, median_ratio, save_results, table, write
from benchmarks.real_attention import minilm_folder
from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.conversion.convert_checkpoint import main as convert_main


# The mechanisms that can be compared, with their settings.
MECHANISMS: dict[str, dict[str, Any]] = {
    "hybrid": {"window_size": 64, "num_sinks": 1},
    "window": {"window_size": 64, "num_sinks": 1},
    "linear": {"feature_map": "exp"},
    "nystrom": {"num_landmarks": 64},
}
ORIGINAL = "original"
LENGTH, CHUNK = 4096, 512
QUERIES = 8  # per document


def documents(text: Path | None, tokenizer: Any, size: int) -> list[str]:
    """Pieces of the sources of at most `size` tokens, which end at a paragraph; shorter pieces are left out."""
    sources = ["\n\n".join(topics[name] for name in sorted(topics))]
    if text is not None:
        sources.append(text.read_text(encoding="utf-8"))
    pieces = []
    for source in sources:
        piece: list[str] = []
        count = 0
        for paragraph in re.split(r"\n\s*\n", source):
            tokens = len(tokenizer(paragraph, add_special_tokens=False, verbose=False).input_ids)
            if count + tokens > size - 2 and piece:
                pieces.append("\n\n".join(piece))
                piece, count = [], 0
            piece.append(paragraph)
            count += tokens
    return pieces


def queries(document: str, count: int) -> list[str]:
    """Sentences spread over the last quarter of a document."""
    last = " ".join(document[len(document) * 3 // 4 :].split())
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", last)[1:-1] if 40 <= len(part) <= 300]
    step = max(1, len(sentences) // count)
    return sentences[::step][:count]


@torch.no_grad()
def states_of(model: Any, tokenizer: Any, texts: list[str], length: int) -> Iterator[Tensor]:
    """The last hidden states `[tokens, D]` of each text, cut after `length` tokens."""
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt", verbose=False)
        yield model(**inputs).last_hidden_state[0]


def whole(states: Tensor) -> Tensor:
    """The normalised mean of all tokens `[tokens, D]`, `[1, D]`."""
    return F.normalize(states.mean(0, keepdim=True), dim=-1)


def query_vectors(model: Any, tokenizer: Any, texts: list[str]) -> list[Tensor]:
    """The embedding `[D]` of each text, cut at `CHUNK` tokens."""
    return [whole(states)[0] for states in states_of(model, tokenizer, texts, CHUNK)]


def by_original(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, list[Tensor]]:
    """What the original makes of each text by its chunks, each read alone: `[1, D]` or `[chunks, D]` for each text."""
    found: dict[str, list[Tensor]] = {"cut at 512": [], "chunks of 512": [], "mean of its chunks": []}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: LENGTH - 2]
        parts = [tokenizer.decode(ids[start : start + CHUNK - 2]) for start in range(0, len(ids), CHUNK - 2)]
        states = [*states_of(model, tokenizer, parts, CHUNK)]
        chunks = torch.cat([whole(part) for part in states])
        found["cut at 512"].append(chunks[:1])
        found["chunks of 512"].append(chunks)
        found["mean of its chunks"].append(whole(torch.cat(states)))
    return found


def by_converted(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, list[Tensor]]:
    """What a converted model makes of each text in one pass: `[1, D]` or `[chunks, D]` for each text."""
    found: dict[str, list[Tensor]] = {"one vector": [], "late chunking": []}
    for states in states_of(model, tokenizer, texts, LENGTH):
        found["one vector"].append(whole(states))
        found["late chunking"].append(torch.cat([whole(part) for part in states.split(CHUNK)]))
    return found


def mixed(texts: list[str]) -> list[str]:
    """As many documents, whose quarters come from four of these; the last quarter of a document stays its own."""
    quarters: list[list[str]] = []
    for text in texts:
        parts = re.split(r"\n\s*\n", text)
        ends = list(itertools.accumulate(map(len, parts)))
        owner = [min(3, 4 * (end - len(part)) // ends[-1]) for part, end in zip(parts, ends, strict=True)]
        quarters.append(
            ["\n\n".join(part for part, q in zip(parts, owner, strict=True) if q == quarter) for quarter in range(4)]
        )
    count = len(texts)
    return [
        "\n\n".join(quarters[(place + (3 - quarter) * count // 4) % count][quarter] for quarter in range(4))
        for place in range(count)
    ]


def recall(documents: list[Tensor], asked: list[tuple[int, Tensor]], most: int = 1) -> float:
    """The share of queries whose document is among the `most` most similar ones."""
    hits = 0
    for right, query in asked:
        similarity = torch.stack([(chunks @ query).max() for chunks in documents])
        hits += int(right in similarity.topk(most).indices.tolist())
    return hits / len(asked)


def untrained(source: Path, mechanism: str, length: int) -> Any:
    """The converted model, which reads `length` tokens."""
    return convert(source, mechanism=mechanism, **MECHANISMS[mechanism], max_position_embeddings=length)


def healed(arguments: argparse.Namespace, source: Path, mechanism: str, texts: list[str]) -> Any:
    """The converted and healed model, which is made if it is not in the output folder."""
    folder = arguments.output_dir / "long_documents" / f"{mechanism}-{arguments.tokens}"
    if folder.is_dir():
        write(f"Using {folder}; remove it to heal anew.")
        return AutoModel.from_pretrained(folder).eval()
    folder.parent.mkdir(parents=True, exist_ok=True)
    train = folder.parent / "train.jsonl"
    passages = [part for text in texts for part in re.split(r"\n\s*\n", text) if 60 <= len(part) <= 600]
    rows = [*texts, *mixed(texts), *passages[:: max(1, len(passages) // (8 * len(texts)))]]  # queries are short
    train.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    options = {
        "model_name_or_path": source,
        "output_dir": folder,
        "attention": mechanism,
        **MECHANISMS[mechanism],
        "preset": "default",
        "max_position_embeddings": LENGTH,
        "train_file": train,
        "tokens": arguments.tokens,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    write("hf-linear-attention convert " + " ".join(words))
    if convert_main([*words, "--no_verify"]):
        raise SystemExit(1)  # the error is printed
    return AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def speed(source: Path, mechanisms: list[str], length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Times as many tokens a second, by CPU time, as the original in chunks and as softmax over the whole text."""
    models = {name: untrained(source, name, length) for name in mechanisms}
    original = AutoModel.from_pretrained(source).eval()
    ids = torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))

    def softmax() -> None:
        with softmax_attention(models[mechanisms[0]]):
            models[mechanisms[0]](input_ids=ids)

    rivals = {"chunks of 512": lambda: original(input_ids=ids.view(-1, CHUNK)), "softmax": softmax}
    passes = {name: partial(model, input_ids=ids) for name, model in models.items()}
    times = interleaved_times({**rivals, **passes}, rounds, time.process_time)
    return {rival: {name: median_ratio(times[rival], times[name]) for name in models} for rival in rivals}


def plot(plt: Any, figures: dict[str, Any]) -> Any:
    names = list(figures["recall@1"])
    figure, axis = plt.subplots(figsize=(7, 0.3 * len(names) + 0.8), layout="constrained")
    axis.barh(names[::-1], [figures["recall@1"][name] for name in names[::-1]], color="tab:blue")
    axis.set_xlabel("recall@1 by a sentence of the last quarter")
    axis.set_xlim(0, 1)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--text", type=Path, help="a long text besides CPython's documentation")
    parser.add_argument("--documents", type=int, help="use this number of documents (default: all)")
    names = [ORIGINAL, *MECHANISMS]
    parser.add_argument("--models", nargs="+", choices=names, default=names[:3], help="with which to read")
    parser.add_argument("--tokens", help="the tokens of each healing run; 0 for none (default: 0.25M)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement of speed; 0 for none")
    arguments = parser.parse_args(argv)
    source = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = documents(arguments.text, tokenizer, 1024 if arguments.quick else LENGTH - 96)
    arguments.tokens = arguments.tokens or ("2k" if arguments.quick else "0.25M")
    if arguments.quick:
        texts = texts[:6]
    if arguments.documents is not None:  # spread over both sources
        texts = texts[:: max(1, len(texts) // arguments.documents)][: arguments.documents]
    readers: dict[str, tuple[Any, Callable[..., dict[str, list[Tensor]]]]] = {}
    for name in arguments.models:
        if name == ORIGINAL:
            readers[name] = (AutoModel.from_pretrained(source).eval(), by_original)
        else:
            readers[f"{name} untrained"] = (untrained(source, name, LENGTH), by_converted)
            if arguments.tokens != "0":
                readers[f"{name} healed"] = (healed(arguments, source, name, texts[1::2]), by_converted)
    asked = [(place, query) for place in range(0, len(texts), 2) for query in queries(texts[place], QUERIES)]
    write(f"{len(texts)} documents of at most {LENGTH} tokens, {len(asked)} queries")
    figures: dict[str, Any] = {"documents": len(texts), "queries": len(asked), "recall@1": {}, "recall@5": {}}
    own, others = texts[::2], texts[1::2]
    mix = [text for pair in itertools.zip_longest(mixed(own), mixed(others)) for text in pair if text is not None]
    for reader, (model, embed) in readers.items():
        read = query_vectors(model, tokenizer, [query for _, query in asked])
        pairs = [(place, vector) for (place, _), vector in zip(asked, read, strict=True)]
        for collection, given in (("as they are", texts), ("mixed", mix)):
            for way, vectors in embed(model, tokenizer, given).items():
                name = f"{collection}: {reader}, {way}"
                for most in (1, 5):
                    figures[f"recall@{most}"][name] = recall(vectors, pairs, most)
                write(f"{name}: recall@1 {figures['recall@1'][name]:.3f}, recall@5 {figures['recall@5'][name]:.3f}")
    header = ("read by", "recall@1", "recall@5")
    rows = [(name, share, figures["recall@5"][name]) for name, share in figures["recall@1"].items()]
    write("\n" + table(header, rows))
    length, rounds = (1024, 1) if arguments.quick else (8192, arguments.rounds)
    timed = [name for name in arguments.models if name != ORIGINAL]
    if timed and rounds:
        ratios = speed(source, timed, length, rounds)
        figures["speed"] = {"tokens": length, "times as fast as": ratios}
        write(f"\nTimes as fast at {length} tokens, one pass:")
        write(table(("as", *timed), [(rival, *(row[name] for name in timed)) for rival, row in ratios.items()]))
    save_results(arguments, "long_documents", figures, plot)


if __name__ == "__main__":
    main()
