"""The time to the first token of a prompt whose beginning a `PromptStore` holds (one thread, CPU time).

    python benchmarks/shared_prefix.py --output_dir outputs/benchmarks

Llama 15M with random weights, converted with the default settings: a question of 32 tokens behind a prefix of 1,024 to
32,768 tokens that an earlier prompt had, with the prefix read again and with its state from the folder. The state
is read from its file every time, checked, and the store is opened anew as another process would. About two minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_kernels import cpu_times
from benchmarks.speed_models import MODELS
from hf_linear_attention import PromptStore, convert


MODEL = "Llama 15M"
LENGTHS = (1024, 8192, 32768)
QUESTION = 32
AGAIN, STORED = "the prefix read again", "its state from the folder"


def measure(model, length: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token behind a prefix of `length` tokens, and the bytes of its state."""
    torch.manual_seed(length)
    prefix = torch.randint(3, 32000, (1, length))
    prompts = [torch.cat([prefix, torch.randint(3, 32000, (1, QUESTION))], dim=1) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        PromptStore(model, folder, boundary=length).read(prompts[0])

        def first_token(cache=None):
            return model.generate(prompts[1], past_key_values=cache, max_new_tokens=1, do_sample=False)

        def stored():
            return first_token(PromptStore(model, folder, boundary=length).read(prompts[1]))

        if not torch.equal(first_token(), stored()):
            raise SystemExit("the stored state gives another token")
        times = cpu_times({AGAIN: first_token, STORED: stored}, rounds)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return {"length": length, "bytes": size, "seconds": times, "ratio": median_ratio(times[AGAIN], times[STORED])}


def report(figures: dict[str, Any]) -> str:
    rows = []
    for row in figures["rows"]:
        milliseconds = [f"{1000 * statistics.median(row['seconds'][name]):,.1f}" for name in (AGAIN, STORED)]
        rows.append([f"{row['length']:,}", *milliseconds, f"{row['ratio']:.1f}x", f"{row['bytes']:,}"])
    header = ["tokens of the prefix", f"{AGAIN}, CPU ms", f"{STORED}, CPU ms", "sooner", "bytes of the state"]
    return table(header, rows)


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(7, 4.5))
    lengths = [row["length"] for row in figures["rows"]]
    for name in (AGAIN, STORED):
        axis.plot(lengths, [statistics.median(row["seconds"][name]) for row in figures["rows"]], marker="o", label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens of the shared prefix", ylabel="CPU seconds to the first token")
    axis.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    arguments = argument_parser(__doc__).parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = convert(MODELS[MODEL]().eval())
    lengths, rounds = ((64, 128), 1) if arguments.quick else (LENGTHS, 5)
    figures = {"model": MODEL, "rows": [measure(model, length, rounds) for length in lengths]}
    write(report(figures))
    save_results(arguments, "shared_prefix", figures, plot)


if __name__ == "__main__":
    main()
