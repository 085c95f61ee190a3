"""A conversion in words: whether it is good, beside its original and a window, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_linear_attention.conversion.layer_speed import first_faster


GOOD, USABLE, NOT_YET = "Good", "Usable", "Not yet"
# Shares of the original's nats per token that a model may lie above it.
GOOD_GAP, USABLE_GAP = 0.02, 0.1
# Cosines to the original's embeddings, and what a figure of the task itself (a correlation, nDCG) may lose.
GOOD_COSINE, USABLE_COSINE = 0.98, 0.9
GOOD_LOSS, USABLE_LOSS = 0.01, 0.05
NEARNESS = {GOOD: "nearly as good as", USABLE: "close to", NOT_YET: "far from"}
WINDOW = "a window of the same bytes, which needs no training"
# A difference of fewer standard errors is none.
FEWEST_ERRORS = 2
# So many times the tokens of the training are proposed for the next one.
MORE = 4


def verdict(quality: Mapping[str, Any]) -> tuple[str, str] | None:
    """One of the three words, and its reason; None without figures that say it."""
    if quality.get("student") is not None:
        return _of_language(quality)
    if quality.get("cosine") is not None:
        word = _of_embeddings(quality)
        return word, f"its embeddings are {NEARNESS[word]} those of the original"
    return None


def _of_language(quality: Mapping[str, Any]) -> tuple[str, str]:
    gap = (quality["student"] - quality["teacher"]) / quality["teacher"]
    word = GOOD if gap <= GOOD_GAP else USABLE if gap <= USABLE_GAP else NOT_YET
    text = f"{NEARNESS[word]} the original"
    control = quality.get("same_bytes")
    if control is None:
        return word, text
    difference = quality.get("student_minus_same_bytes") or {"mean": quality["student"] - control}
    error = FEWEST_ERRORS * (difference.get("standard_error") or 0.0)
    if difference["mean"] > error:
        return NOT_YET, f"worse than {WINDOW}"
    if difference["mean"] >= -error:
        return (USABLE if word == GOOD else word), f"{text}, but no better than {WINDOW}"
    return word, f"{text}, and better than a window of the same bytes"


def _of_embeddings(quality: Mapping[str, Any]) -> str:
    lost = [
        quality[f"{name}_teacher"] - quality[name]
        for name in ("spearman", "ndcg_at_10")
        if quality.get(name) is not None and quality.get(f"{name}_teacher") is not None
    ]
    if lost:  # what the embeddings are for counts for more than their likeness
        return GOOD if max(lost) <= GOOD_LOSS else USABLE if max(lost) <= USABLE_LOSS else NOT_YET
    cosine = quality["cosine"]
    return GOOD if cosine >= GOOD_COSINE else USABLE if cosine >= USABLE_COSINE else NOT_YET


def next_step(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str | None:
    """What to do now, in a sentence; None if nothing was converted."""
    if not report.get("layers"):
        return None
    found = verdict(report.get("quality") or {})
    if found is None and runs:
        return "Next: measure it on data of your own task, beside its original."
    if found is None or (not runs and found[0] != GOOD):
        return "Next: train it, with --preset default and a --train_file; some minutes are enough for a small model."
    word, reason = found
    tokens = sum(run["training"].get("tokens") or 0 for run in runs)
    longer = f"--tokens {_short(MORE * tokens)}" if tokens else "more --tokens"
    if word == GOOD:
        return "Next: try it on your own task; it loads as its original does."
    if reason.endswith(WINDOW):
        return f"Next: train longer, with {longer}, or take that window (--attention window)."
    return f"Next: train longer, with {longer}; more of the text that it will read helps most."


def _short(tokens: float) -> str:
    tokens = float(f"{tokens:.2g}")
    return f"{tokens / 1e6:.3g}M" if tokens >= 10**6 else f"{tokens / 1e3:.3g}k"


def faster(report: Mapping[str, Any]) -> str | None:
    """From which length it is faster, as a part of a sentence: the whole model where it was timed, or its attention."""
    measured = (report.get("quality") or {}).get("speed") or {}
    if curves := measured.get("model"):
        parts = [_faster(verb, curves[name]) for verb, name in (("reads", "reading"), ("writes", "writing"))]
        return " and ".join(part for part in parts if part) or None
    length = measured.get("faster_from")
    return f"its attention alone is faster from {length:,} tokens" if length else None


def _faster(verb: str, curve: Sequence[Mapping[str, float]]) -> str | None:
    """`reads 3.7 times as fast at 2,048 tokens (faster from 512)`."""
    if not curve:
        return None
    last, first = curve[-1], first_faster(curve)
    if first is None:
        return f"{verb} no faster up to {last['length']:,.0f} tokens"
    ratio = last["softmax_seconds"] / last["seconds"]
    return f"{verb} {ratio:.2g} times as fast at {last['length']:,.0f} tokens (faster from {first:,.0f})"
