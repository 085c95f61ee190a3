"""Beside what one would otherwise install: performer-pytorch, linformer, nystrom-attention and aft-pytorch.

    pip install performer-pytorch linformer nystrom-attention aft-pytorch
    python benchmarks/peers.py --output_dir outputs/benchmarks

Each peer and our mechanism get the same queries, keys and values (standard deviation 1, 2 and 4; values 1), the same
projections or biases, and are compared with the float64 oracle of their paper's formula, `reference.py`: the relative
error of the output in float32, and the time of a forward pass, in turns, without the peer's own projections of its
input. performer-pytorch's distance to the mean of the values and to softmax is there because its epsilon changes the
function. A peer that is not installed is left out. Ten minutes on one core, nearly all of them aft-pytorch's and our
quadratic AFT at 16,384 tokens.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the oracles

import reference
import torch
from torch import nn

from benchmarks.common import argument_parser, interleaved_times, median_ratio, save_results, table, write
from benchmarks.real_attention import build_mechanism
from hf_linear_attention.mechanism import LayerShape
from hf_linear_attention.mechanisms import MECHANISMS


BATCH, HEADS, DIM = 2, 4, 32
SCALING = DIM**-0.5
STDS = (1.0, 2.0, 4.0)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SLOTS = 64  # projection size, landmarks
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Pair(NamedTuple):
    """Functions to `[B, H, N, D]`: ours and the oracle of q, k, v `[B, H, N, D]`, the peer of `prepare(heads)`."""

    prepare: Callable[[Heads], Any]
    peer: Callable[[Any], torch.Tensor]
    ours: Callable[[Heads], torch.Tensor]
    oracle: Callable[[Heads], torch.Tensor]


class Part(nn.Module):
    """In the place of a peer's projections of its input, which has q, k and v side by side: one of the three."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def forward(self, x):
        return x.chunk(3, dim=-1)[self.number]


def softmax(heads: Heads) -> torch.Tensor:
    query, key, value = (x.double() for x in heads)
    return reference.attend(SCALING * query @ key.transpose(-1, -2), value)


def mechanism_function(mechanism) -> Callable[[Heads], torch.Tensor]:
    def function(heads: Heads) -> torch.Tensor:
        return mechanism(*heads, attention_mask=None, scaling=SCALING, is_causal=False, state=None)[0].transpose(1, 2)

    return function


def build(name: str, length: int, **settings):
    return build_mechanism(name, LayerShape(HEADS, HEADS, DIM, 0, length), **settings)


def merged(heads: Heads) -> torch.Tensor:
    """q, k, v side by side, `[B, N, 3 H D]`."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in heads], dim=-1)


def split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, DIM)).transpose(1, 2)


def performer_pair(package, length: int) -> Pair:
    peer = package.FastAttention(dim_heads=DIM, nb_features=4 * DIM)
    mine = build("performer", length, num_features=4 * DIM)
    with torch.no_grad():
        mine.feature_map.projection.copy_(peer.projection_matrix)

    def oracle(heads: Heads) -> torch.Tensor:
        query, key, value = heads
        features = (reference.favor(x.double() * SCALING**0.5, peer.projection_matrix) for x in (query, key))
        return reference.kernel_attention(*features, value)

    return Pair(lambda heads: heads, lambda heads: peer(*heads), mechanism_function(mine), oracle)


def linformer_pair(package, length: int) -> Pair:
    width = HEADS * DIM
    peer = package.LinformerSelfAttention(3 * width, length, k=SLOTS, heads=HEADS, dim_head=DIM).eval()
    peer.to_q, peer.to_k, peer.to_v = (Part(number) for number in range(3))
    peer.to_out = nn.Identity()
    mine = build("linformer", length, projection_size=SLOTS)
    with torch.no_grad():
        mine.key_projection.copy_(peer.proj_k.T)
        mine.value_projection.copy_(peer.proj_v.T)

    def oracle(heads: Heads) -> torch.Tensor:
        return reference.linformer(*heads, peer.proj_k.T[None], peer.proj_v.T[None], SCALING)

    return Pair(merged, lambda x: split_heads(peer(x)), mechanism_function(mine), oracle)


def nystrom_pair(package, length: int) -> Pair:
    width = HEADS * DIM
    peer = package.NystromAttention(3 * width, dim_head=DIM, heads=HEADS, num_landmarks=SLOTS, residual=False).eval()
    peer.to_qkv = peer.to_out = nn.Identity()
    mine = build("nystrom", length, num_landmarks=SLOTS)

    def oracle(heads: Heads) -> torch.Tensor:
        return reference.nystrom(*heads, SLOTS, 6, SCALING)

    return Pair(merged, lambda x: split_heads(peer(x)), mechanism_function(mine), oracle)


def aft_pair(package, length: int) -> Pair:
    width = HEADS * DIM
    peer = package.AFTFull(length, 3 * width, hidden_dim=width).eval()
    peer.to_q, peer.to_k, peer.to_v = (Part(number) for number in range(3))
    peer.project = nn.Identity()
    # One head, as the peer has: a head has a length x length matrix of its own.
    mine = build_mechanism("aft", LayerShape(1, 1, width, 0, length), variant="full", position_rank=0)
    with torch.no_grad():
        mine.position_bias.copy_(peer.wbias[None])
    ours = mechanism_function(mine)

    def oracle(heads: Heads) -> torch.Tensor:
        rows = [
            reference.aft(heads[0][:, :, start : start + 64], *heads[1:], peer.wbias[None, start : start + 64])
            for start in range(0, length, 64)
        ]
        return torch.cat(rows, dim=2)

    return Pair(
        merged,
        lambda x: split_heads(peer(x)),
        lambda heads: split_heads(ours(tuple(x.transpose(1, 2).flatten(2)[:, None] for x in heads))[:, 0]),
        oracle,
    )


# {package: (module, mechanism, the pair)}
PEERS: dict[str, tuple[str, str, Callable[..., Pair]]] = {
    "performer-pytorch": ("performer_pytorch", "performer", performer_pair),
    "linformer": ("linformer", "linformer", linformer_pair),
    "nystrom-attention": ("nystrom_attention", "nystrom", nystrom_pair),
    "aft-pytorch": ("aft_pytorch", "aft", aft_pair),
}


def random_heads(std: float, length: int) -> Heads:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(BATCH, HEADS, length, DIM, generator=generator) for _ in range(3))
    return query * std, key * std, value


def relative(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Over all elements; infinite where an output is not a number."""
    error = ((output.double() - exact).norm() / exact.norm()).item()
    return error if math.isfinite(error) else math.inf


@torch.no_grad()
def measure(pair: Pair, softmax_too: bool, error_length: int, rounds: int, builder: Callable[[int], Pair], lengths):
    errors = []
    for std in STDS:
        heads = random_heads(std, error_length)
        exact = pair.oracle(heads)
        theirs = pair.peer(pair.prepare(heads))
        row = {"std": std, "peer": relative(theirs, exact), "ours": relative(pair.ours(heads), exact)}
        if softmax_too:
            row["oracle_to_softmax"] = relative(exact, softmax(heads))
            row["peer_to_softmax"] = relative(theirs, softmax(heads))
            mean = heads[2].mean(dim=2, keepdim=True).double()
            row["peer_to_mean_of_values"] = relative(theirs, mean.expand_as(exact))
        errors.append(row)
    times = []
    for length in lengths:
        timed, heads = builder(length), random_heads(1.0, length)
        functions = {"peer": partial(timed.peer, timed.prepare(heads)), "ours": partial(timed.ours, heads)}
        seconds = interleaved_times(functions, rounds)
        times.append(
            {
                "length": length,
                **{f"{name}_ms": 1000 * statistics.median(values) for name, values in seconds.items()},
                "peer_over_ours": median_ratio(seconds["peer"], seconds["ours"]),
            }
        )
    return {"errors": errors, "times": times}


def run(error_length: int, lengths, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    missing = []
    for name, (module, mechanism, make) in PEERS.items():
        try:
            package = importlib.import_module(module)
        except ImportError:
            missing.append(name)
            continue
        if mechanism not in MECHANISMS:
            continue
        torch.manual_seed(0)

        def builder(length: int, make=make, package=package) -> Pair:
            return make(package, length)

        figures = measure(builder(error_length), mechanism == "performer", error_length, rounds, builder, lengths)
        results[name] = {"version": importlib.metadata.version(name), "mechanism": mechanism, **figures}
    return {"length": error_length, "peers": results, "missing": missing}


def report(figures: dict[str, Any]) -> str:
    errors, times, notes = [], [], []
    for name, content in figures["peers"].items():
        label = f"{name} {content['version']}"
        found = content["errors"]
        errors.append([label, *(f"{row['peer']:.1e}" for row in found)])
        errors.append([f"  ours, {content['mechanism']}", *(f"{row['ours']:.1e}" for row in found)])
        cells = [f"{row['peer_ms']:.1f} / {row['ours_ms']:.1f}" for row in content["times"]]
        times.append([label, *cells])
        times.append(["  ratio", *(f"{row['peer_over_ours']:.2f}x" for row in content["times"])])
        if "peer_to_mean_of_values" in found[0]:
            notes += [
                f"std {row['std']:g}: {name} is {row['peer_to_mean_of_values']:.3f} from the mean of the values, "
                f"{row['peer_to_softmax']:.3f} from softmax; its formula in float64 {row['oracle_to_softmax']:.3f}."
                for row in found
            ]
    parts = []
    if errors:
        first = next(iter(figures["peers"].values()))
        lengths = [f"n = {row['length']}" for row in first["times"]]
        parts += [
            f"Relative error to the float64 oracle, n = {figures['length']}, q and k of standard deviation\n",
            table(["", *(f"{std:g}" for std in STDS)], errors),
            "",
            *notes,
            "\nMilliseconds of a forward pass, peer / ours, batch 2, 4 heads of 32\n",
            table(["", *lengths], times),
        ]
    if figures["missing"]:
        parts.append(f"\nNot installed, left out: pip install {' '.join(figures['missing'])}")
    return "\n".join(parts)


def plot(plt, figures):
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    marks = {"package": {"linestyle": "--", "marker": "x"}, "ours": {"linestyle": "-", "marker": "o"}}
    handles = [plt.Line2D([], [], color="grey", label=name, **mark) for name, mark in marks.items()]
    for number, (name, content) in enumerate(figures["peers"].items()):
        color, errors, times = f"C{number}", content["errors"], content["times"]
        stds, lengths = [row["std"] for row in errors], [row["length"] for row in times]
        left.plot(stds, [row["peer"] for row in errors], color=color, **marks["package"])
        left.plot(stds, [row["ours"] for row in errors], color=color, **marks["ours"])
        ratios = [row["peer_over_ours"] for row in times]
        handles += right.plot(lengths, ratios, color=color, marker="o", label=f"{name} / {content['mechanism']}")
    left.set(xlabel="standard deviation of q and k", ylabel="relative error to the float64 oracle", yscale="log")
    left.set_xticks(STDS)
    left.set_title("Exactness in float32")
    right.axhline(1, color="black", linewidth=1, linestyle=":")
    right.set(xlabel="length (tokens)", ylabel="time of the package / ours", xscale="log")
    right.set_title("Time of a forward pass (above 1: ours is faster)")
    if figures["peers"]:
        right.set_xticks(lengths, [f"{length:,}" for length in lengths])
    right.minorticks_off()
    right.set_ylim(bottom=0)
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=int, default=512, help="tokens at which errors are measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens at which forwards are timed")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of timing")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.rounds, arguments.lengths = 128, 1, (128, 256)
    figures = run(arguments.length, arguments.lengths, arguments.rounds)
    write(report(figures))
    save_results(arguments, "peers", figures, plot)


if __name__ == "__main__":
    main()
