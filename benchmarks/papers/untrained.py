"""What mechanisms are worth before any training, on the heads of the real MiniLM (Python's documentation, 512 tokens).

    python -m benchmarks.papers.untrained

Errors are relative errors of the head outputs to softmax, means over layers and heads. The tables:

    swap         every mechanism for encoders with each of its maps, at 32 to 1024 features, slots, landmarks, latents,
                 or tokens of a window to each side; beside them the best matrix of that rank (truncated SVD), the mean
                 of the values, and the float64 formulas of Nystromformer and Linformer, which ours must equal
    spectrum     the share of the singular values of softmax(q k^T) that the largest k hold (Linformer 2020, figure 1)
    features     the mean square error of random features for random queries and keys of several norms, orthogonal and
                 iid, in units of that of the answer 0 (Performer 2020, figure 4)
    both         Linformer inside linear attention, Phi = elu + 1: the formula often written down,
                 Phi(Q) [(E Phi(K))^T (F V)] / Phi(Q) sum Phi(K), and the valid one, whose weights sum to 1
                 (`linformer_linear`); no gain over linear attention alone

Five minutes on one core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, Table, parse, save, table
from benchmarks.real_attention import (
    Heads,
    build_mechanism,
    documentation,
    mechanism_output,
    minilm_heads,
    relative_errors,
)
from hf_linear_attention.features.maps import elu_plus_one
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.mechanisms.linformer import mean_pool_matrix
from hf_linear_attention.mechanisms.registry import MECHANISMS


sys.path.append(str(ROOT / "tests" / "support"))  # the oracles
import reference


# The option that says how much a mechanism may store. `hybrid` has a window besides its features.
SIZE_OPTIONS = ("num_features", "num_landmarks", "num_latents", "projection_size")
SIZE_OPTION_OF = {"hybrid": "window_size"}
NORMS = (0.5, 1.0, 2.0)
Errors = dict[str, dict[int, list[Tensor]]]
"""The errors of all heads, by row and size; 0 is the size of what has none."""


def variants() -> Iterator[tuple[str, str, dict[str, Any], str | None]]:
    """`(row, mechanism, settings, size option)` for all that the registry has for encoders."""
    for name, mechanism in MECHANISMS.items():
        if not mechanism.supports_bidirectional:
            continue
        sizes = (option for option in SIZE_OPTIONS if option in mechanism.options)
        size = SIZE_OPTION_OF.get(name) or next(sizes, None)
        defaults = {key: option.default for key, option in mechanism.options.items()}
        usable = {
            key: [x for x in option.choices if mechanism.supports("bidirectional", {**defaults, key: x})]
            for key, option in mechanism.options.items()
        }
        choosing = next((key for key, choices in usable.items() if len(choices) > 1), None)
        for choice in usable[choosing] if choosing else [None]:
            yield f"{name} {choice or ''}".strip(), name, {choosing: choice} if choosing else {}, size


def sized(
    name: str, settings: dict[str, Any], option: str | None, sizes: list[int], heads: Heads
) -> list[tuple[int, dict[str, Any]]]:
    """The sizes that a row has, and its settings with each; 0 alone for a map or mechanism without a choice of size."""
    found = []
    for size in sizes if option else ():
        try:
            build_mechanism(name, heads.shape(), **settings, **{option: size})
        except ValueError:  # this feature map, or this length, does not take that number
            continue
        found.append((size, {**settings, option: size}))
    return found or [(0, settings)]


def error_of(name: str, heads: Heads, fitting: Heads, target: Tensor, **settings: Any) -> Tensor:
    """The errors of one layer; `fitting` is another text, for mechanisms that calibrate constants."""
    mechanism = build_mechanism(name, heads.shape(), **settings)
    given = MechanismInputs(fitting.query, fitting.key, fitting.value, None, fitting.scaling, is_causal=False)
    mechanism.calibrate(given)
    return relative_errors(mechanism_output(mechanism, heads), target)


def compare(errors: Errors, heads: Heads, target: Tensor, sizes: list[int]) -> None:
    """What no matrix of rank k can beat, what needs no attention at all, and the float64 formulas of two papers."""

    def add(row: str, size: int, output: Tensor) -> None:
        errors.setdefault(row, {}).setdefault(size, []).append(relative_errors(output.float(), target))

    left, values, right = torch.linalg.svd(heads.weights())
    length = heads.key.shape[2]
    for size in (size for size in sizes if size < length):
        add("truncated SVD", size, (left[..., :size] * values[..., None, :size]) @ (right[..., :size, :] @ heads.value))
        query, key, value, scaling = heads
        add("formula of Nystromformer", size, reference.nystrom(query, key, value, size, 6, scaling))
        pool = mean_pool_matrix(size, length).double()[None]
        add("formula of Linformer, mean-pool", size, reference.linformer(query, key, value, pool, pool, scaling))
    add("mean of the values", 0, heads.value.mean(dim=2, keepdim=True))


def swap(texts: list[list[Heads]], fitting: list[Heads], sizes: list[int]) -> Table:
    """The error of every mechanism by its size."""
    errors: Errors = {}
    for heads, other in ((heads, other) for layers in texts for heads, other in zip(layers, fitting)):
        target = heads.softmax_output()
        compare(errors, heads, target, sizes)
        for row, name, settings, option in variants():
            for size, given in sized(name, settings, option, sizes, heads):
                found = error_of(name, heads, other, target, **given)
                errors.setdefault(row, {}).setdefault(size, []).append(found)
    means = {row: {n: torch.cat(found).mean().item() for n, found in by.items()} for row, by in errors.items()}
    rows = [[row, *(found.get(size) for size in (*sizes, 0))] for row, found in means.items()]
    return table(["error before any training", *map(str, sizes), "one size"], rows)


def spectrum(texts: list[list[Heads]], ranks: list[int]) -> Table:
    """The share of the singular values in each layer, means over heads and texts."""
    rows = []
    for number, layers in enumerate(zip(*texts)):
        shares = [torch.linalg.svdvals(heads.weights()).cumsum(-1) for heads in layers]
        mean = torch.cat([share / share[..., -1:] for share in shares]).mean(dim=(0, 1))
        rows.append([f"layer {number}", *(mean[rank - 1].item() for rank in ranks)])
    return table(["share of the singular values", *(f"rank {rank}" for rank in ranks)], rows)


def features(length: int, draws: int, size: int) -> Table:
    """The square error of estimators of exp(q·k) over that of the answer 0, medians over draws of data and features."""
    rows = []
    for name, orthogonal in ((n, o) for n in RANDOM_FEATURES if n != "relu" for o in (True, False)):
        row: list[Any] = [f"{name}, {'orthogonal' if orthogonal else 'iid'}"]
        for norm in NORMS:
            found = []
            for seed in range(draws):
                generator = torch.Generator().manual_seed(1000 + seed)
                query, key, value = (torch.randn(1, 1, length, 16, generator=generator) for _ in range(3))
                heads = Heads(query * (norm / 2), key * (norm / 2), value, 0.25)
                options = {"features": name, "num_features": size, "orthogonal": orthogonal, "seed": seed}
                found.append(error_of("performer", heads, heads, heads.softmax_output(), **options).square().item())
            row.append(statistics.median(found))
        rows.append(row)
    return table([f"square error, {size} features", *(f"norm {norm}" for norm in NORMS)], rows)


def both(layers: list[Heads], sizes: list[int]) -> Table:
    """The sum of a query's weights and the error of both formulas, and of linear attention alone."""
    rows = []
    for size in (None, *sizes):
        sums, slides, valid = [], [], []
        for heads in layers:
            query, key = elu_plus_one(heads.query), elu_plus_one(heads.key)
            pool = torch.eye(key.shape[2]) if size is None else mean_pool_matrix(size, key.shape[2]).float()
            weights = query @ (pool @ key).transpose(-1, -2)
            target, values = heads.softmax_output(), weights @ (pool @ heads.value)
            total = query @ key.sum(dim=2).unsqueeze(-1)
            sums.append((weights @ pool).sum(-1) / total[..., 0])
            slides.append(relative_errors(values / total, target))
            valid.append(relative_errors(values / (weights @ pool.sum(-1, keepdim=True)), target))
        name = "linear attention alone" if size is None else f"mean-pool, k = {size}"
        rows.append([name, *(torch.cat(found).mean().item() for found in (sums, slides, valid))])
    return table(["Linformer inside linear", "sum of the weights, slides", "error, slides", "error, valid"], rows)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Measure all tables."""
    quick = {"texts": 1, "length": 160, "sizes": [16, 64], "draws": 2}
    defaults = {"texts": 5, "length": 512, "sizes": [32, 64, 128, 256, 512, 1024], "draws": 15}
    arguments = parse(__doc__, argv, quick, **defaults)
    fitting, *texts = minilm_heads(documentation(), arguments.length, arguments.texts + 1)
    sizes = [size for size in arguments.sizes if size < arguments.length]
    tables = [swap(texts, fitting, arguments.sizes), spectrum(texts, sizes)]
    tables += [features(8 * arguments.length, arguments.draws, 256), both(texts[0], sizes)]
    save(arguments, "untrained", tables)


if __name__ == "__main__":
    main()
