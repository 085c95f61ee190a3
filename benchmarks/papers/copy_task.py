"""Copying a sequence of symbols: linear attention reaches the loss of softmax (Katharopoulos 2020, section 4.1.1).

    python -m benchmarks.papers.copy_task

    input    0 w_1 .. w_n 0 w_1 .. w_n       w of 10 symbols, n drawn for each batch; the loss is over the second half

A stock GPT-2 of random weights (softmax), and the same weights with each linear mechanism, trained on the same batches
in turn. The answer "every symbol alike" has a loss of ln 10 = 2.30 nats. A mechanism has reached the loss of softmax if
its final loss, on new batches, is within 0.001 nats of it. A symbol is copied from at least 6 tokens back, which the
hybrid's window does not reach. A curve takes three to nine minutes on one core.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import parse, save, table
from hf_linear_attention import convert


NUM_SYMBOLS = 10
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
    separator = torch.zeros((size, 1), dtype=torch.long)
    tokens = torch.cat((separator, word, separator, word), dim=1)
    target = tokens[:, 1:].clone()
    target[:, : count + 1] = -100
    return tokens[:, :-1], target


def stock_model(length: int, width: int, layers: int) -> GPT2LMHeadModel:
    """A GPT-2 of random weights, without dropout."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": NUM_SYMBOLS + 1, "n_positions": 2 * length + 2, "n_embd": width, "n_layer": layers}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, n_head=4, bos_token_id=0, eos_token_id=0))


def train(model: Any, arguments: Namespace) -> None:
    """RAdam with a linear warm-up and a cosine to 0; every batch is new."""
    optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)
    updates, generator = arguments.updates, torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, 20 * (step + 1) / updates) * (0.5 + 0.5 * math.cos(math.pi * step / updates))
    )
    model.train()
    for _ in range(updates):
        tokens, target = copy_batch(arguments.batch_size, arguments.length, generator)
        logits = model(tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Any, arguments: Namespace) -> tuple[float, float]:
    """The loss and the share of right symbols on 10 new batches."""
    model.eval()
    generator, losses, right = torch.Generator().manual_seed(1), [], []
    for _ in range(10):
        tokens, target = copy_batch(arguments.batch_size, arguments.length, generator)
        logits = model(tokens, use_cache=False).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
        right.append((logits.argmax(-1) == target)[target != -100].float().mean())
    return torch.stack(losses).mean().item(), torch.stack(right).mean().item()


def main(argv: list[str] | None = None) -> None:
    """Train and evaluate every model."""
    quick = {"length": 4, "updates": 60, "batch_size": 16, "width": 32}
    defaults = {"length": 12, "updates": 4000, "batch_size": 32, "width": 128, "layers": 2}
    arguments = parse(__doc__, argv, quick, models=["softmax", "elu1", "performer", "hybrid"], **defaults)
    rows = []
    for name in arguments.models:
        model: Any = stock_model(arguments.length, arguments.width, arguments.layers)
        if (settings := MODELS[name]) is not None:
            model = convert(model, **settings)
        train(model, arguments)
        rows.append([name, *evaluate(model, arguments)])
    save(arguments, "copy_task", [table(["copying", "final loss, nats", "symbols right"], rows)])


if __name__ == "__main__":
    main()
