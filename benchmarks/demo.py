"""The main job from beginning to end, without a network: convert a model that needs memory, and see what it still has.

    make demo                                 the Llama in examples/demo_model, in three minutes
    make demo MODEL=folder TEXT=text.txt      a decoder of yours, and a text of some hundred thousand words

The README's command converts the model and trains it to imitate its original. The text has index entries and asks for
them later (examples/train_demo_model.py), so that it shows what a model still knows of what stood before.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_linear_attention._common.command_line import let_threads_sleep


let_threads_sleep()  # before torch is loaded

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import write
from examples.train_demo_model import LENGTH, WORDS_BETWEEN, look_ups, prose, with_notes
from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.model_speed import first_faster
from hf_linear_attention.training.data.processors import bos_of


OWN_MODEL = ROOT / "examples" / "demo_model"
LONGEST, MOST_TOKENS = 8192, 32_768  # of a row of look-ups, and of all rows
EVALUATED = 20_000  # tokens for the figures of the command
PARTS = 4, 2, 1  # look-ups are counted up to a quarter, a half and the whole of a row back


def parts_of(text: Path | None) -> tuple[list[str], list[str]]:
    """The words to train on, and an eighth that is held out."""
    if text is None:
        return prose(False), prose(True)
    words = text.read_text(encoding="utf-8").split()
    end = len(words) * 7 // 8
    return words[:end], words[end:]


def run(command: str, **options: object) -> float:
    """Run `hf-linear-attention` as a user would; its messages appear. Returns its seconds."""
    words = [command, *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
    write(f"\n$ hf-linear-attention {shlex.join(words)}")
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "hf_linear_attention", *words], check=True)
    return time.perf_counter() - start


@torch.no_grad()
def looked_up(model: Any, tokenizer: Any, text: str, length: int) -> list[list[bool]]:
    """Whether the model knows the pages asked for in rows of `length` tokens, by how far back they stood (PARTS)."""
    ids, pages = look_ups(text, tokenizer)
    begin = [] if (bos := bos_of(tokenizer)) is None else [bos]
    size, found = length - len(begin), [[] for _ in PARTS]
    for start in range(0, min(len(ids), MOST_TOKENS) - size + 1, size):
        tokens = torch.tensor([[*begin, *ids[start : start + size]]])
        guesses = model(input_ids=tokens, use_cache=False).logits[0].argmax(-1)
        right = [True] * len(begin) + (guesses[:-1] == tokens[0, 1:]).tolist()[len(begin) - 1 :]
        for first, end, distance in pages:
            if first - distance > start and end <= start + size:
                part = sum(distance >= length // share for share in PARTS)
                found[part].append(all(right[first - start + len(begin) : end - start + len(begin)]))
    return found


def table(rows: dict[str, list[str]]) -> str:
    """The rows by their names, all cells on the right."""
    widths = [max(map(len, column)) for column in zip(*rows.values())]
    return "\n".join(
        f"  {name:40}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths))
        for name, cells in rows.items()
    )


def look_up_rows(models: dict[str, Any], tokenizer: Any, text: str, length: int) -> dict[str, list[str]]:
    """For each distance the share of look-ups that each model knows."""
    found = [looked_up(model, tokenizer, text, length) for model in models.values()]
    edges = [1, *(length // share for share in PARTS)]
    return {
        f"look-ups, {edges[part]:,} to {edges[part + 1] - 1:,} tokens back": [
            f"{sum(each[part]) / len(each[part]):.0%}" for each in found
        ]
        for part in range(len(PARTS))
        if found[0][part]
    }


def summary(report: dict[str, Any], models: dict[str, Any], look_ups: dict[str, list[str]], seconds: float) -> str:
    """What the conversion cost and kept, and from which length it pays."""
    quality, last = report["quality"], report["quality"]["positions"]["buckets"][-1]
    trained = quality["positions"]["trained_length"]
    sizes = {"converted": report["state_bytes"], "window of the same bytes": quality["control"].get("state_bytes")}
    names = {"original": "teacher", "converted": "student", "window of the same bytes": "same_bytes"}
    kept = {
        "": list(models),
        f"nats per token, up to {trained:,} tokens": [f"{quality[names[name]]:.3f}" for name in models],
        f"nats per token, positions {last['from']:,} to {last['to'] - 1:,}": [
            f"{last[names[name]]:.3f}" for name in models
        ],
        **look_ups,
        "bytes per sequence": [f"{sizes[name]:,}" if name in sizes else "grow" for name in models],
    }
    pays = [f"{name} {pays_from(curve)}" for name, curve in quality["speed"]["model"].items()]
    word, reason = figures_of(quality).verdict
    return f"""
The model was trained for {trained:,} tokens and converted. {word}: {reason}.

What it cost: one command and {seconds:.0f} seconds, the measurements included.
What was kept: {quality["agreement"]:.0%} of the original's choices of the next token, and
{table(kept)}
From which length it pays, here: {"; ".join(pays)}. Larger models gain more: docs/figures.md.
"""


def pays_from(curve: list[dict[str, float]]) -> str:
    length = first_faster(curve)
    return f"not up to {curve[-1]['length']:,} tokens" if length is None else f"from {length:,} tokens"


def next_steps(folder: Path) -> str:
    return f"""
The result on one page:     {folder / "report.html"}
Load it, with only torch and transformers installed:

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)

The same with a model and a text of yours:

    make demo MODEL=folder TEXT=text.txt
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=OWN_MODEL)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", default="0.1M")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"))
    given = parser.parse_args()
    start = time.perf_counter()
    disable_progress_bar()
    shutil.rmtree(given.output_dir, ignore_errors=True)
    given.output_dir.mkdir(parents=True)
    length = min(max_length_of(AutoConfig.from_pretrained(given.model)) or LONGEST, LONGEST)
    files = [given.output_dir / name for name in ("train.txt", "held_out.txt")]
    for seed, (path, words) in enumerate(zip(files, parts_of(given.text))):
        path.write_text(with_notes(words, seed, length * WORDS_BETWEEN // LENGTH), encoding="utf-8")
    converted = given.output_dir / "converted"
    seconds = run(
        "convert",
        model_name_or_path=given.model,
        output_dir=converted,
        preset="default",
        train_file=files[0],
        tokens=given.tokens,
        validation_file=files[1],
        max_eval_tokens=EVALUATED,
    )
    report = json.loads((converted / "conversion_report.json").read_text(encoding="utf-8"))
    original = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    models = {"original": original, "converted": AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)}
    control = report["quality"]["control"]
    if "window_size" in control:
        sizes = {name: control[name] for name in ("window_size", "num_sinks")}
        models["window of the same bytes"] = convert(original, mechanism="window", **sizes)
    text = files[1].read_text(encoding="utf-8")
    rows = look_up_rows(models, AutoTokenizer.from_pretrained(given.model), text, length)
    write(summary(report, models, rows, seconds) + next_steps(converted))
    write(f"{time.perf_counter() - start:.0f} seconds in all")


if __name__ == "__main__":
    main()
