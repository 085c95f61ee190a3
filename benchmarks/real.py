"""Nats per token of a real decoder and its conversions on held-out text by position, beside their controls.

    python -m benchmarks.real MODEL STUDENT... --text HELD_OUT.txt [--length 4096] [--quick] [--tasks multikey]

MODEL is the original and each STUDENT a conversion of it (`hf-linear-attention convert`). A row of the table is the
original, the untrained window of the bytes of a student (in the dtype of its checkpoint), a student, or a student with
a part of its memory taken away:

    far keys off    only window, sinks and exact keys
    newest keys     exact keys that are chosen by their age alone, as before any fit
    random scores   exact keys that are chosen by random weights of the hidden state

"gap" is what is left of the gap between window and original, (student - original) / (window - original), on the same
tokens from the last power of two on; "low" and "high" are its 95 % interval by a paired bootstrap of blocks of 64
tokens. "kl" is the divergence from the original there. "key tokens" has the nats of those that need the
context, by the thresholds of LongPPL (Fang 2024, arXiv:2410.23771): the original gives them a probability of more than
e^-2, and e^2 times as much as the window does. Windows of text do not overlap. Models have the dtype of their
checkpoint where the processor multiplies it; on two cores without bfloat16, a row of 4,096 tokens takes
Qwen2.5-Coder-0.5B one to three minutes.

With `--tasks`, a column is the share of values that each model finds again in contexts of `--length` tokens;
`benchmarks.retrieval` has the tasks, and does the same with the caches of kvpress.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.retrieval import TASKS, Context
from hf_linear_attention import convert
from hf_linear_attention._common.devices import multiplies_bfloat16
from hf_linear_attention._common.logs import progress
from hf_linear_attention.conversion.quality import SameBytes, windows_of_same_bytes
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.score_fit import newest_keys
from hf_linear_attention.training.data.batches import Batch, aligned_labels
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.processors import bos_of
from hf_linear_attention.training.evaluation import retention
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.models import checkpoint_dtype


SINKS, KEY = 4, 2.0
BLOCK, DRAWS = 64, 1000  # of the bootstrap


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("students", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rows", type=int, help="2, or 1 with --quick")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[], help="what is looked up")
    parser.add_argument("--quick", action="store_true", help="one row, and no students without a part of their memory")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args(argv)
    options.rows = 2 - options.quick if options.rows is None else options.rows
    for missing in (path for path in (options.text, *options.students) if not path.exists()):
        parser.error(f"there is no {missing}; STUDENTS are folders that `convert` has written, and --text is a file")
    return options


@contextlib.contextmanager
def altered(student: Any, control: str) -> Iterator[None]:
    """Inside, the student lacks a part of its memory."""
    mechanisms = [module.linear_attention for module in linear_attention_modules(student).values()]
    scored = [mechanism for mechanism in mechanisms if mechanism.num_exact_keys]
    if control == "newest keys":
        with newest_keys(scored):
            yield
        return
    changed = {
        "far keys off": [mechanism.mix.far_log_scale for mechanism in mechanisms],
        "random scores": [mechanism.score_projection for mechanism in scored],
    }[control]
    before = [parameter.detach().clone() for parameter in changed]
    generator = torch.Generator().manual_seed(0)
    for parameter in changed:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(noise.fill_(-1e4) if control == "far keys off" else noise)
    try:
        yield
    finally:
        for parameter, value in zip(changed, before, strict=True):
            parameter.data.copy_(value)


def loaded(folder: str | Path) -> Any:
    """A model in the dtype of its checkpoint where this processor multiplies it, and in float32 elsewhere."""
    dtype = "auto" if multiplies_bfloat16("cpu") else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def compared(original: str, students: Sequence[Path], has_controls: bool) -> Iterator[tuple[str, Any]]:
    """The original, the window of the bytes of each student, each student, and its controls, with their names."""
    seen = set[str]()
    for folder in students:
        teacher, student = loaded(original), loaded(folder)
        dtype = getattr(torch, checkpoint_dtype("causal_lm", str(folder), False))
        length = student.config.max_position_embeddings
        found = [w for w in windows_of_same_bytes(teacher, student, length, dtype) if w.num_sinks == SINKS]
        if not seen:
            yield "original", teacher
        if found and named(found[0]) not in seen:
            yield named(found[0]), convert(teacher, settings=found[0].settings)
        seen |= {"original", *map(named, found)}
        yield folder.name, student
        for control in ("far keys off", "newest keys", "random scores") if has_controls else ():
            with altered(student, control):
                yield f"{folder.name}, {control}", student


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The nats of every target of each row of the table, with the position of the targets."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    wanted = options.rows * options.length
    if len(ids) < wanted:
        raise SystemExit(f"{options.text} has {len(ids):,} tokens, and {wanted:,} are wanted; give a longer text")
    windows = retention.separate_windows(np.array(ids[:wanted]), options.length, bos_of(tokenizer))
    batches = retention.batches_of(windows, options.length, 0)
    rows, found = dict[str, Tensor](), dict[str, dict[str, float]]()
    teacher: list[Rows] = []
    tasks = {name: [*map(with_answers, TASKS[name](tokenizer, options.length))] for name in options.tasks}
    for name, model in compared(options.model, options.students, not options.quick):
        teacher = teacher or outputs_of(model, batches)
        rows[name] = nats_and_divergence(model, batches, teacher)
        found[name] = {task: values_found(model, contexts) for task, contexts in tasks.items()}
    nats, kl = ({name: x[:, column] for name, x in rows.items()} for column in (0, 1))
    return {"position": retention.target_positions(batches), "nats": nats, "kl": kl, "found": found}


@torch.no_grad()
def outputs_of(model: Any, batches: Sequence[Batch]) -> list[Rows]:
    """What the logits of each batch are made of."""
    by_row = ByRow(model)
    return [by_row.rows(batch) for batch in progress(batches, "measuring")]


def nats_and_divergence(model: Any, batches: Sequence[Batch], teacher: Sequence[Rows]) -> Tensor:
    """The nats of every target and KL(teacher || model) there, `[targets, 2]` in float64."""
    parts = []
    for batch, yours, mine in zip(batches, teacher, outputs_of(model, batches), strict=True):
        labels = aligned_labels(batch, "causal_lm").flatten()

        def look(logits: Tensor, rows: Tensor, yours: Rows = yours, labels: Tensor = labels) -> Tensor:
            nats = F.cross_entropy(logits.float(), labels[rows], reduction="none")
            return torch.stack([nats, divergence(logits.float(), yours(rows).float())], dim=-1)

        parts.append(mine.read((labels != IGNORED).nonzero().squeeze(-1), look).double())
    return torch.cat(parts)


def with_answers(context: Context) -> tuple[Tensor, list[range]]:
    """The tokens `[1, N]` of a context and its questions with their answers, and where the values are."""
    ids, places = list(context.words), []
    for question in context.questions:
        first = len(ids) + len(question.words)
        places.append(range(first, first + len(question.value)))
        ids += [*question.words, *question.value, *question.end]
    return torch.tensor([ids]), places


@torch.no_grad()
def values_found(model: Any, contexts: list[tuple[Tensor, list[range]]]) -> float:
    """The share of the values whose tokens are all the most likely ones."""
    right, by_row = [], ByRow(model)
    for ids, places in contexts:
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows = torch.tensor([place - 1 for value in places for place in value])
        likely = by_row.rows(batch).read(rows, lambda logits, _: logits.argmax(-1))
        same = (likely == ids[0, rows + 1]).split([len(value) for value in places])
        right += [value.all().item() for value in same]
    return sum(right) / len(right)


def named(window: SameBytes) -> str:
    return f"window of {window.window_size + window.num_sinks} tokens"


def table(found: dict[str, Any], length: int) -> list[dict[str, Any]]:
    """A row for each model: its mean nats in each range of positions, its gap, and the error of the difference."""
    edges = sorted({0, length, *(2**power for power in range(8, 20) if 2**power < length)})
    rows, position, teacher = [], found["position"], found["nats"]["original"]
    window = next((nats for name, nats in found["nats"].items() if name.startswith("window of ")), None)
    for name, nats in found["nats"].items():
        window = nats if name.startswith("window of ") else window
        figures: dict[str, Any] = {"model": name}
        for first, last in itertools.pairwise(edges):
            here = (position >= first) & (position < last)
            figures[f"{first}-{last - 1}"] = nats[here].mean().item()
        here = position >= edges[-2]
        if window is not None:
            is_key = (teacher < KEY) & (window - teacher > KEY)
            figures["key tokens"] = nats[is_key].mean().item()
            figures |= gap_left(nats[here], window[here], teacher[here])
        figures["kl"] = found["kl"][name][here].mean().item()
        rows.append(figures | found["found"][name])
    return rows


def gap_left(mine: Tensor, window: Tensor, original: Tensor) -> dict[str, float]:
    """The share of the gap between window and original that is left, by nats of the same targets; its interval."""
    sums = torch.stack([torch.stack([part.sum() for part in x.split(BLOCK)]) for x in (mine, window, original)])
    places = torch.randint(sums.shape[1], (DRAWS, sums.shape[1]), generator=torch.Generator().manual_seed(0))
    drawn = torch.cat([sums.sum(1, keepdim=True), sums[:, places].sum(-1)], dim=1)
    whole, *shares = ((drawn[0] - drawn[2]) / (drawn[1] - drawn[2])).tolist()
    low, high = np.quantile(shares, [0.025, 0.975])
    return {"gap": whole, "low": float(low), "high": float(high)}


def printed(rows: list[dict[str, Any]]) -> str:
    names = list(max(rows, key=len))
    cells = [[row.get(name, "") for name in names] for row in rows]
    text = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in line] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [names, ["---"] * len(names), *text])


def main(argv: Sequence[str] | None = None) -> None:
    options = parsed(argv)
    rows = table(measured(options), options.length)
    print(printed(rows))
    if options.output is not None:
        facts = {"model": options.model, "text": options.text.name, "length": options.length, "windows": options.rows}
        options.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
