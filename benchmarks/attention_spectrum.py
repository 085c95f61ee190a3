"""How much of the attention matrices of a real checkpoint fits into a low rank? (Linformer 2020, figure 1)

    python benchmarks/attention_spectrum.py --output_dir outputs/benchmarks
    python benchmarks/attention_spectrum.py --model_name_or_path FOLDER --text_file corpus.txt --length 512

The share of the sum of the singular values of softmax(q k^T) that the largest k of them hold, for each layer and head:
the figures of `conversion/convert_checkpoint.py --spectrum`, plotted. By default of the real MiniLM on Python's
documentation. One minute on one core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from benchmarks.common import argument_parser, save_results, table, write
from benchmarks.real_attention import add_text_argument, minilm_folder, read_text, windows
from hf_linear_attention import convert
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention.conversion.head_figures import diagnose


RANKS = (16, 32, 64, 128, 256)


def spectra(folder: str | Path, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Cumulative shares `[layers, H, n]`, mean over the inputs."""
    with quiet_transformers():
        model = convert(folder)
    return torch.stack([layer.shares for layer in diagnose(model, [{"input_ids": ids} for ids in inputs])])


def run(folder: str | Path, text: str, length: int, num_texts: int) -> dict[str, Any]:
    inputs = windows(AutoTokenizer.from_pretrained(folder), text, length, num_texts)
    shares = spectra(folder, inputs)
    ranks = [rank for rank in RANKS if rank < length]
    return {
        "model": Path(folder).name if Path(folder) != minilm_folder_or_none() else "MiniLM",
        "length": length,
        "texts": num_texts,
        "ranks": ranks,
        "share": {str(rank): shares[..., rank - 1].tolist() for rank in ranks},  # [layers][heads]
        "curves": shares.mean(dim=1)[:, :: max(1, length // 128)].tolist(),  # [layers][every few ranks]
        "curve_step": max(1, length // 128),
    }


def minilm_folder_or_none() -> Path | None:
    try:
        return minilm_folder()
    except SystemExit:
        return None


def report(figures: dict[str, Any]) -> str:
    rows = []
    for layer in range(len(figures["curves"])):
        row: list[Any] = [f"layer {layer}"]
        for rank in figures["ranks"]:
            heads = figures["share"][str(rank)][layer]
            row += [sum(heads) / len(heads), f"{min(heads):.2f}-{max(heads):.2f}"]
        rows.append(row)
    header = [""]
    for rank in figures["ranks"]:
        header += [f"rank {rank}", "heads"]
    return (
        f"Share of the singular values of attention, {figures['model']}, n = {figures['length']}, "
        f"{figures['texts']} texts: mean over heads, lowest to highest head\n\n" + table(header, rows)
    )


def plot(plt, figures):
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", width_ratios=(1.1, 1))
    curves, step = figures["curves"], figures["curve_step"]
    colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(curves)).tolist())
    for layer, (curve, color) in enumerate(zip(curves, colors)):
        left.plot([1 + step * index for index in range(len(curve))], curve, color=color, label=f"layer {layer}")
    rank = 128 if 128 in figures["ranks"] else figures["ranks"][-1]
    left.axvline(rank, color="grey", linestyle="--", linewidth=1)
    left.set(xlabel="rank k (singular values kept)", ylabel="share of the sum of singular values", ylim=(0, 1.02))
    left.set_title("Cumulative singular values, mean over heads")
    left.legend(fontsize=9, ncols=1 + len(curves) // 9)
    image = right.imshow(figures["share"][str(rank)], aspect="auto", cmap="viridis", vmin=0, vmax=1)
    right.spines[:].set_visible(False)
    right.set(xlabel="head", ylabel="layer", title=f"Share held by rank {rank}")
    right.set_xticks(range(len(figures["share"][str(rank)][0])))
    right.set_yticks(range(len(curves)))
    figure.colorbar(image, ax=right, label="share of the sum of singular values")
    figure.suptitle(f"Spectrum of the attention of {figures['model']}, {figures['length']} tokens")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model_name_or_path", help="any checkpoint; by default MiniLM")
    add_text_argument(parser)
    parser.add_argument("--length", type=int, default=512, help="tokens of an input")
    parser.add_argument("--texts", type=int, default=3, help="inputs to average over")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.texts = min(arguments.length, 96), 1
    figures = run(
        arguments.model_name_or_path or minilm_folder(), read_text(arguments), arguments.length, arguments.texts
    )
    write(report(figures))
    save_results(arguments, "attention_spectrum", figures, plot)


if __name__ == "__main__":
    main()
