"""Figures that pages quote stand in the results, too: rounded, in a line with these words."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
# The page, words before or around its figures, the figures, the page of results, and words of the line with them.
FIGURES = [
    ("README.md", "have a cosine of", ".977", "conversion", "| `window`, 128 + 1 |"),
    ("README.md", "Llama of 125M parameters read", "5.1", "speed", "| default | 0.936"),
    ("README.md", "and it writes", "26", "speed", "| default | 0.935"),
    ("README.md", "one of ModernBERT's shape is", "4.5", "speed", "layers (sdpa): `hybrid` 3.27"),
    ("README.md", "recall of 32 pairs", "98 100", "recall", "| `--preset default`, window 13"),
    ("README.md", "recall of 32 pairs", "54", "recall", "| window 64, healed | 53.9"),
    ("README.md", "within the 512 tokens of its training", "1.406 1.406 1.414", "conversion", "The quick start"),
    ("README.md", "positions 2,048 to 4,095", "1.98", "real", "| converted, 512 tokens, 57,344"),
    ("README.md", "positions 2,048 to 4,095", "1.82", "real", "| original | 2.345 | 1.712 | 1.816"),
    ("README.md", "positions 4,096 to 8,191", "1.81", "real", "| the original, in bfloat16"),
    ("README.md", "positions 4,096 to 8,191", "1.82", "real", "| converted, 2,048 tokens"),
    ("README.md", "positions 4,096 to 8,191", "1.87", "real", "| the window of 2,043, in bfloat16"),
    ("README.md", "problems of HumanEval solved", "74 164", "real", "| HumanEval: original"),
    ("README.md", "problems of HumanEval solved", "72", "real", "| converted, 512 tokens | 72"),
    ("README.md", "problems of HumanEval solved", "69", "real", "| window of 506 and 4 sinks | 69"),
    ("README.md", "values found in 61 random key-value pairs", "17 20", "real", "| original, the whole cache | 17"),
    ("README.md", "values found in 61 random key-value pairs", "17", "real", "| converted, nothing trained | 17"),
    ("README.md", "values found in 61 random key-value pairs", "3", "real", "| window of as many bytes | 3"),
    ("README.md", "positions 2,048 to 4,095", "2.29", "real", "| window of 508 and 4 sinks | 2.394"),
    ("docs/tutorials/real_decoder.md", "512 to 1,023", "2.349 1.762", "real", "| converted, 512 tokens, 57,344"),
    ("docs/tutorials/real_decoder.md", "LoRA adapters on 300,000 tokens", "1.948 .28", "real", "| 5e-4, 294,912"),
    ("docs/figures.md", "nats per token, and the default", "1.432 1.438", "conversion", "LoLCATs' form"),
    ("docs/figures.md", "`--preset default` of 131117e, 76,920 bytes", "1.355", "conversion", "| version 7, means"),
    ("docs/figures.md", "`--preset linear --num_features 64`", "1.465", "conversion", "| preset `linear`, 64"),
    ("docs/figures.md", "| `linear` exp, decay |", "91.7 49.2 100", "recall", "exp, decay, 120 features | 91.7"),
    ("docs/figures.md", "(the default before) | 72.7", "72.7 40.9", "recall", "| `--preset default` | 72.7"),
    ("docs/figures.md", "| one token at 32,768 |", "25.7", "speed", "| default | 0.935"),
    ("docs/figures.md", "| prompt of 32,768 tokens |", "5.1", "speed", "| default | 0.936"),
    ("docs/figures.md", "| default, `window` of 128 | 1.05", "1.77 4.3", "speed", "| default | 0.966"),
    ("docs/figures.md", "| `--preset gated_delta` | 0.5M", "1.462", "conversion", "| preset `gated_delta`, 80"),
    ("docs/figures.md", "two prompts of 16,384 tokens", "4.2", "speed", "| 16,384 x 2 | 931"),
    ("docs/figures.md", "times as fast, from", "3.9", "speed", "| 16,384 x 2 | 48"),
    ("docs/figures.md", "softmax without a cache", "27 1.09", "papers", "| softmax, "),
    ("docs/figures.md", "window of 64", ".63", "conversion", "| the same, window 64 |"),
    ("docs/install.md", "With AMX, converted models", "1.8 3.1 .98", "speed", "| bfloat16 | 1.76"),
    ("docs/mechanisms/gated_delta.md", "32 pairs after 0.5M", "99", "recall", "| `--preset gated_delta` | 99"),
    ("docs/mechanisms/hybrid.md", "the slowest kernel", ".9 5.4", "speed", "| hybrid 64 + 1 | 0.462"),
    (
        "docs/positions.md",
        "With a state of 136 tokens, decoders are",
        ".8 2.0 4.9",
        "speed",
        "| hybrid, exact keys (default) |",
    ),
    ("docs/tutorials/embeddings.md", "Before the training the cosine was", ".9992 .9745", "conversion", "The tutorial"),
]
NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def numbers(text: str) -> list[Decimal]:
    return [Decimal(figure.replace(",", "").rstrip(".")) for figure in NUMBER.findall(text)]


def is_in(figure: str, text: str) -> bool:
    """Whether a number of the text can be rounded to this figure; the number may be a rounded one itself."""
    wanted = Decimal(figure.replace(",", ""))

    def unit(number: Decimal) -> Decimal:
        return Decimal(1).scaleb(number.as_tuple().exponent)

    return any(2 * abs(found - wanted) <= unit(found) + unit(wanted) for found in numbers(text))


@pytest.mark.parametrize(("page", "words", "figures", "results", "row"), FIGURES)
def test_a_figure_stands_in_the_page_and_in_the_results(page, words, figures, results, row):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert words in text
    places = [match.start() for match in re.finditer(re.escape(words), text)]
    around = [text[max(0, place - 120) : place + len(words) + 160] for place in places]
    lines = (ROOT / "benchmarks" / "results" / f"{results}.md").read_text(encoding="utf-8").splitlines()
    found = " ".join(line for line in lines if row in line)
    for figure in figures.split():
        assert any(is_in(figure, part) for part in around), figure
        assert is_in(figure, found), figure
