"""Copying a sequence of symbols: linear attention reaches the loss of softmax (Katharopoulos 2020, section 4.1.1).

    python benchmarks/copy_task.py --output_dir outputs/benchmarks

    input    0 w_1 .. w_n 0 w_1 .. w_n       w of 10 symbols, n drawn for each batch; the loss is over the second half

A stock GPT-2 of random weights (softmax), and the same weights with each linear mechanism, trained on the same batches
in turn. Copying needs attention at a distance that the position embeddings have to learn; the answer "every symbol
alike" has a loss of ln 10 = 2.30 nats. A mechanism has reached the loss of softmax if its final loss, on new batches,
is within 0.001 nats of it. A symbol is copied from n tokens back, at least 6. The hybrid's window reaches 2 tokens
back in one layer and 4 in two layers, so whatever the hybrid copies comes through its linear part. A curve takes three
to nine minutes on one core.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention import convert
from hf_linear_attention.mechanisms import MECHANISMS


NUM_SYMBOLS = 10
SEPARATOR = 0
# Nats within which a final loss is that of softmax: 0.04 % of the loss of a guess.
REACHED = 1e-3
MODELS: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "exp": {"mechanism": "linear", "feature_map": "exp"},
    "performer": {"mechanism": "performer"},
    "hybrid": {"mechanism": "hybrid", "window_size": 3, "num_sinks": 1},
}


def copy_batch(size: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`(input, target)`, `[size, 2 n + 1]` with n from `length` / 2 to `length`; -100 where there is no loss."""
    count = int(torch.randint(length // 2, length + 1, (), generator=generator))
    word = torch.randint(1, NUM_SYMBOLS + 1, (size, count), generator=generator)
    separator = torch.full((size, 1), SEPARATOR)
    tokens = torch.cat((separator, word, separator, word), dim=1)
    target = tokens[:, 1:].clone()
    target[:, : count + 1] = -100
    return tokens[:, :-1], target


def stock_model(length: int, width: int, num_layers: int, num_heads: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=NUM_SYMBOLS + 1,
        n_positions=2 * length + 2,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
    )
    return GPT2LMHeadModel(config)


def loss_of(model, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def train(model, arguments, every: int) -> dict[str, Any]:
    """The curve of the loss on unseen batches (every batch is new), averaged over `every` updates."""
    model.train()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.RAdam(model.parameters(), lr=arguments.learning_rate)
    warm = max(1, arguments.updates // 20)

    def rate(step: int) -> float:  # linear warm-up, then a cosine to 0
        return min(1, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / arguments.updates))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    steps, curve, recent = [], [], []
    start = time.perf_counter()
    for step in range(1, arguments.updates + 1):
        loss = loss_of(model, *copy_batch(arguments.batch_size, arguments.length, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % every == 0:
            steps.append(step)
            curve.append(sum(recent) / len(recent))
            recent = []
    return {"updates": steps, "loss": curve, "seconds": time.perf_counter() - start, **evaluate(model, arguments)}


@torch.no_grad()
def evaluate(model, arguments) -> dict[str, float]:
    """Loss and share of right symbols on 10 new batches of the full length."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    losses, right = [], []
    for _ in range(10):
        tokens, target = copy_batch(arguments.batch_size, arguments.length, generator)
        losses.append(loss_of(model, tokens, target).item())
        is_target = target != -100
        right.append((model(tokens, use_cache=False).logits.argmax(-1) == target)[is_target].float().mean().item())
    return {"final_loss": sum(losses) / len(losses), "accuracy": sum(right) / len(right)}


def run(arguments) -> dict[str, Any]:
    names = [name for name in arguments.models if MODELS[name] is None or MODELS[name]["mechanism"] in MECHANISMS]
    curves = {}
    for name in names:
        model: Any = stock_model(arguments.length, arguments.width, arguments.layers, arguments.heads)
        if MODELS[name] is not None:
            model = convert(model, **MODELS[name])
        curves[name] = train(model, arguments, max(1, arguments.updates // 40))
        write(f"{name}: loss {curves[name]['final_loss']:.4f} in {curves[name]['seconds']:.0f} s")
    return {
        "uniform_loss": math.log(NUM_SYMBOLS),
        "length": arguments.length,
        "curves": curves,
        "reaches_softmax": reaches_softmax(curves),
    }


def report(figures: dict[str, Any]) -> str:
    rows = []
    for name, curve in figures["curves"].items():
        marks = [curve["loss"][len(curve["loss"]) * part // 4 - 1] for part in (1, 2, 3, 4)]
        rows.append([name, *marks, curve["final_loss"], f"{100 * curve['accuracy']:.1f} %", f"{curve['seconds']:.0f}"])
    updates = next(iter(figures["curves"].values()))["updates"][-1]
    reached = [
        f"{name}: {'reaches' if is_reached else 'does not reach'} the loss of softmax"
        for name, is_reached in figures["reaches_softmax"].items()
    ]
    header = ["", *(f"at {updates * part // 4}" for part in (1, 2, 3, 4)), "final", "right", "seconds"]
    return (
        f"\nLoss of the copied symbols in nats, up to {figures['length']} symbols "
        f"(uniform: {figures['uniform_loss']:.3f})\n\n{table(header, rows)}\n\n"
        f"Final losses, within {REACHED} nats: {', '.join(reached) or 'softmax was not run'}"
    )


def reaches_softmax(curves: dict[str, dict[str, Any]]) -> dict[str, bool]:
    if "softmax" not in curves:
        return {}
    limit = curves["softmax"]["final_loss"] + REACHED
    return {name: curve["final_loss"] <= limit for name, curve in curves.items() if name != "softmax"}


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for name, curve in figures["curves"].items():
        label = "softmax" if name == "softmax" else f"linear: {name}"
        color = {"color": "black"} if name == "softmax" else {}
        axis.plot(curve["updates"], curve["loss"], label=label, **color)
    axis.axhline(figures["uniform_loss"], color="grey", linestyle="--", linewidth=1, label="every symbol alike")
    axis.set(yscale="log", xlabel="updates", ylabel="cross-entropy of the copied symbols (nats)")
    axis.set_title(f"Copying {figures['length'] // 2} to {figures['length']} symbols of an alphabet of {NUM_SYMBOLS}")
    axis.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=tuple(MODELS), default=["softmax", "elu1", "performer", "hybrid"]
    )
    parser.add_argument("--length", type=int, default=12, help="the longest sequence to copy")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.length, arguments.updates, arguments.batch_size = 4, 60, 16
        arguments.width, arguments.layers, arguments.heads = 32, 2, 2
    figures = run(arguments)
    write(report(figures))
    save_results(arguments, "copy_task", figures, plot)


if __name__ == "__main__":
    main()
