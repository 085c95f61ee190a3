"""Retrieval of documents of 4,000 tokens by a sentence of their last quarter, with MiniLM, which knows 512 positions.

    python -m benchmarks.papers.long_documents --text /path/to/grimms_fairy_tales.txt

Documents are pieces of CPython's documentation (`pydoc_data.topics`) and of a long text, in two collections: as they
are, where the first 512 tokens often say what the last quarter is about, and mixed, where the four quarters of a
document come from four places. Every second piece heals the converted models, without labels (`--preset default
--max_position_embeddings 4096`); queries are sentences of the others, and all documents are candidates. Ways to read a
document, of which the first three use the original, and the others each converted model, untrained and healed
(`--tokens 0` leaves the healing out; `--documents` takes fewer documents):

    original, cut at 512            what a user of MiniLM gets: the rest of the document is not read
    original, chunks of 512         one vector for each chunk, of which the most similar one counts
    original, mean of its chunks    one vector for the document: what one vector can do if its reader makes no error
    hybrid, one vector              the whole document in one pass, the mean of all tokens
    hybrid, late chunking           the same pass, the means of its chunks, of which the most similar one counts

The queries are read by the same model as the documents. Then the speed at 8,192 tokens of one pass of each converted
model against the original in chunks of 512 and against softmax attention over the whole text, in one process, in rounds
in which all take turns. Healed models are kept in the output folder.

    python -m benchmarks.papers.long_documents --qmsum /path/to/QMSum --size 16000

reads the meetings of a copy of github.com/Yale-LILY/QMSum instead, whole, as LongEmbed's LEMBQMSumRetrieval does: each
summary is a query for its meeting. All pieces of the texts above heal, and `hybrid` is also read without its far part.
The vectors are kept, too. `--native_layers 22` adds the speed of ModernBERT's shape, converted, against its own layers.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, ModernBertConfig, ModernBertModel

from benchmarks.common import Table, Times, parse, save, table, times_as_fast, times_in_turns, write
from benchmarks.real_attention import minilm_folder
from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.conversion.convert_checkpoint import main as convert_main


# The mechanisms that can be compared, with their settings.
MECHANISMS: dict[str, dict[str, Any]] = {
    "hybrid": {"window_size": 64, "num_sinks": 1},
    "window": {"window_size": 128, "num_sinks": 1},
    "linear": {"feature_map": "exp"},
    "nystrom": {"num_landmarks": 64},
}
ORIGINAL = "original"
LENGTH, CHUNK = 4096, 512
QUERIES = 8  # per document


def documents(text: str | None, tokenizer: Any, size: int) -> list[str]:
    """Pieces of the sources of at most `size` tokens, which end at a paragraph; shorter pieces are left out."""
    sources = ["\n\n".join(topics[name] for name in sorted(topics))]
    if text is not None:
        sources.append(Path(text).read_text(encoding="utf-8"))
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


def by_original(model: Any, tokenizer: Any, texts: list[str], length: int = LENGTH) -> dict[str, list[Tensor]]:
    """What the original makes of each text by its chunks, each read alone: `[1, D]` or `[chunks, D]` for each text."""
    found: dict[str, list[Tensor]] = {"cut at 512": [], "chunks of 512": [], "mean of its chunks": []}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: length - 2]
        parts = [tokenizer.decode(ids[start : start + CHUNK - 2]) for start in range(0, len(ids), CHUNK - 2)]
        states = [*states_of(model, tokenizer, parts, CHUNK)]
        chunks = torch.cat([whole(part) for part in states])
        found["cut at 512"].append(chunks[:1])
        found["chunks of 512"].append(chunks)
        found["mean of its chunks"].append(whole(torch.cat(states)))
    return found


def by_converted(model: Any, tokenizer: Any, texts: list[str], length: int = LENGTH) -> dict[str, list[Tensor]]:
    """What a converted model makes of each text in one pass: `[1, D]` or `[chunks, D]` for each text."""
    found: dict[str, list[Tensor]] = {"one vector": [], "late chunking": []}
    for states in states_of(model, tokenizer, texts, length):
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


def healed(arguments: argparse.Namespace, source: Path, mechanism: str, texts: list[str], length: int) -> Any:
    """The converted and healed model, which is made if it is not in the output folder."""
    folder = arguments.output_dir / "long_documents" / f"{mechanism}-{arguments.tokens}-{length}"
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
        "max_position_embeddings": length,
        "train_file": train,
        "tokens": arguments.tokens,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    write("hf-linear-attention convert " + " ".join(words))
    if convert_main([*words, "--no_verify"]):
        raise SystemExit(1)  # the error is printed
    return AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def speed(source: Path, mechanisms: list[str], length: int, rounds: int) -> Table:
    """Times as many tokens a second, by CPU time, as the original in chunks and as softmax over the whole text."""
    models = {name: untrained(source, name, length) for name in mechanisms}
    original = AutoModel.from_pretrained(source).eval()
    ids = torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))

    def softmax() -> None:
        with softmax_attention(models[mechanisms[0]]):
            models[mechanisms[0]](input_ids=ids)

    rivals = {"chunks of 512": lambda: original(input_ids=ids.view(-1, CHUNK)), "softmax": softmax}
    passes = {name: partial(model, input_ids=ids) for name, model in models.items()}
    times = times_in_turns({**rivals, **passes}, rounds)
    rows = [[rival, *(times_as_fast(times, rival)[name] for name in models)] for rival in rivals]
    return table([f"one pass over {length:,} tokens, times as fast as", *models], rows)


@torch.no_grad()
def native_speed(mechanisms: list[str], layers: int, length: int, rounds: int) -> Table:
    """Times as many tokens a second, by CPU time, as the stock layers of ModernBERT's shape, with random weights."""
    stock = ModernBertModel(ModernBertConfig(num_hidden_layers=layers, max_position_embeddings=length)).eval()
    models = {name: convert(stock, mechanism=name, **MECHANISMS[name], drop=["sliding_window"]) for name in mechanisms}
    ids = torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))
    passes = {name: partial(model, input_ids=ids) for name, model in {ORIGINAL: stock, **models}.items()}
    found = times_as_fast(times_in_turns(passes, rounds), ORIGINAL)
    row = ["its own layers", *(found[name] for name in models)]
    return table([f"ModernBERT, {layers} layers, {length:,} tokens, times as fast as", *models], [row])


Reader = tuple[Any, Callable[..., dict[str, list[Tensor]]]]
"""A model, and what it makes of documents."""


def readers_of(
    arguments: argparse.Namespace, source: Path, texts: list[str], length: int = LENGTH
) -> dict[str, Reader]:
    """The original, and each converted model, untrained and healed on these texts; all read `length` tokens."""
    readers: dict[str, Reader] = {}
    for name in arguments.models:
        if name == ORIGINAL:
            readers[name] = (AutoModel.from_pretrained(source).eval(), partial(by_original, length=length))
            continue
        models = {"untrained": untrained(source, name, length)}
        if arguments.tokens != "0":
            models["healed"] = healed(arguments, source, name, texts, length)
        readers |= {f"{name} {state}": (model, partial(by_converted, length=length)) for state, model in models.items()}
    return readers


def without_far(reader: Reader) -> Reader:
    """The same weights, of which a `hybrid` computes its window and its global tokens only."""
    model = copy.deepcopy(reader[0])
    for module in model.modules():
        if hasattr(module, "uses_far"):
            module.uses_far = False
    return model, reader[1]


def meetings(folder: Path) -> tuple[list[str], dict[str, int]]:
    """The documents of LongEmbed's QMSum, and its queries, each with the number of its document.

    There are 197 and 1,527. A query is a summary; two of them stand at two meetings, of which the first one counts.

    Raises:
        SystemExit: if the folder is no copy of the repository.
    """
    texts: list[str] = []
    queries: dict[str, int] = {}
    for part in (folder / "data" / "ALL" / split for split in ("train", "val")):
        files = sorted(part.glob("*.json"))
        if not files:
            raise SystemExit(f"--qmsum: {part} has no *.json; give a copy of github.com/Yale-LILY/QMSum")
        for meeting in (json.loads(file.read_text(encoding="utf-8")) for file in files):
            for asked in meeting["general_query_list"] + meeting["specific_query_list"]:
                queries.setdefault(asked["answer"], len(texts))
            texts.append("\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]))
    return texts, queries


def kept(folder: Path, texts: list[str], embed: Callable[[list[str]], Any]) -> tuple[Any, float]:
    """What `embed` makes of texts, and its CPU seconds, from the folder if they are there."""
    file = folder / f"{hashlib.sha256(''.join(texts).encode()).hexdigest()[:16]}.pt"
    if not file.is_file():
        start = time.process_time()
        found = embed(texts)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((found, time.process_time() - start), file)
    return torch.load(file)


def ndcg(documents: list[Tensor], queries: Tensor, right: Tensor) -> Tensor:
    """nDCG@10 `[Q]` of queries `[Q, D]` with one right document each, `[Q]`; documents are `[chunks, D]`."""
    scores = torch.stack([(queries @ chunks.T).amax(1) for chunks in documents], 1)
    better = (scores > scores.gather(1, right[:, None])).sum(1)
    return (better < 10) / (better + 2).log2()


def difference(mine: Tensor, other: Tensor | None) -> str | None:
    """The mean of paired differences, and its 95% interval by the bootstrap."""
    if other is None or other is mine:
        return None
    paired = mine - other
    picks = torch.randint(len(paired), (10_000, len(paired)), generator=torch.Generator().manual_seed(0))
    low, high = paired[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{paired.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def meeting_retrieval(arguments: argparse.Namespace, source: Path, tokenizer: Any, pieces: list[str]) -> Table:
    """nDCG@10 of every way to read QMSum's meetings, and the speed of the models, which take turns by meeting."""
    texts, asked = meetings(Path(arguments.qmsum))
    length = max(len(tokenizer(text, verbose=False).input_ids) for text in texts)
    readers = readers_of(arguments, source, pieces, max(LENGTH, length))
    readers |= {f"{name} without far": without_far(readers[name]) for name in readers if name.startswith("hybrid")}
    kind = f"{arguments.tokens}{'-bfloat16' * arguments.bfloat16}"
    folders = {name: arguments.output_dir / "long_documents" / f"{name}-{kind}".replace(" ", "-") for name in readers}
    reading = torch.autocast("cpu", torch.bfloat16, enabled=arguments.bfloat16)
    vectors: dict[str, list[Tensor]] = {}
    times: Times = {name: [] for name in readers}
    for number, text in enumerate(texts, 1):
        for name, (model, embed) in readers.items():
            found, seconds = kept(folders[name], [text], reading(partial(embed, model, tokenizer)))
            times[name].append(seconds)
            for way, (vector,) in found.items():
                vectors.setdefault(f"{name}, {way}", []).append(vector)
        write(f"{number} of {len(texts)} meetings")
    right = torch.tensor([*asked.values()])
    scores: dict[str, Tensor] = {}
    for way, given in vectors.items():
        name = way.partition(",")[0]
        read, _ = kept(folders[name], [*asked], reading(partial(query_vectors, readers[name][0], tokenizer)))
        scores[way] = ndcg(given, torch.stack(read), right)
    rows = []
    for way, score in scores.items():
        window = re.sub(r"(hybrid|linear) (\w+)( without far)?", r"window \2", way)
        rivals = (f"{ORIGINAL}, chunks of 512", window, way.replace(",", " without far,"))
        first, mine = next(iter(times.values())), times[way.partition(",")[0]]
        low, middle, high = statistics.quantiles([a / b for a, b in zip(first, mine, strict=True)], n=4)
        found = [score.mean().item(), *(difference(score, scores.get(rival)) for rival in rivals)]
        rows.append([way, *found, len(texts) / sum(mine), middle, f"{low:.2f} to {high:.2f}"])
    more = ("more than chunks", "than window", "than without far", "meetings a second")
    title = f"{len(texts)} meetings, {len(asked)} queries"
    return table([title, "nDCG@10", *more, f"times as fast as {next(iter(times))}", "quartiles"], rows)


def retrieval(readers: dict[str, Reader], tokenizer: Any, texts: list[str]) -> Table:
    """The recall of every way to read the documents, as they are and mixed."""
    asked = [(place, query) for place in range(0, len(texts), 2) for query in queries(texts[place], QUERIES)]
    mix = [text for pair in itertools.zip_longest(mixed(texts[::2]), mixed(texts[1::2])) for text in pair if text]
    rows = []
    for reader, (model, embed) in readers.items():
        read = query_vectors(model, tokenizer, [query for _, query in asked])
        pairs = [(place, vector) for (place, _), vector in zip(asked, read, strict=True)]
        given = [embed(model, tokenizer, collection) for collection in (texts, mix)]
        for way in given[0]:
            shares = (recall(vectors[way], pairs, most) for vectors in given for most in (1, 5))
            rows.append([f"{reader}, {way}", *shares])
            write(str(rows[-1]))
    title = f"{len(texts)} documents, {len(asked)} queries"
    return table([title, "recall@1", "recall@5", "mixed, recall@1", "mixed, recall@5"], rows)


def main(argv: list[str] | None = None) -> None:
    """Heal the models, and measure recall and speed."""
    quick = {"documents": 6, "size": 1024, "tokens": "2k", "rounds": 1, "length": 1024}
    defaults = {"text": None, "documents": 0, "size": LENGTH - 96, "tokens": "0.25M", "rounds": 3, "length": 8192}
    defaults |= {"qmsum": None, "bfloat16": False, "native_layers": 0}
    arguments = parse(__doc__, argv, quick, models=[ORIGINAL, "hybrid", "window"], **defaults)
    source = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = documents(arguments.text, tokenizer, arguments.size)
    if arguments.documents:  # spread over both sources
        texts = texts[:: max(1, len(texts) // arguments.documents)][: arguments.documents]
    if arguments.qmsum:
        tables = [meeting_retrieval(arguments, source, tokenizer, texts)]
    else:
        tables = [retrieval(readers_of(arguments, source, texts[1::2]), tokenizer, texts)]
    timed = [name for name in arguments.models if name != ORIGINAL]
    if timed and arguments.rounds:
        tables.append(speed(source, timed, arguments.length, arguments.rounds))
        if arguments.native_layers:
            tables.append(native_speed(timed, arguments.native_layers, arguments.length, arguments.rounds))
    save(arguments, "long_documents", tables)


if __name__ == "__main__":
    main()
