"""Which heads keep softmax: by ablation (`--softmax_heads auto:K`), or by gates of all heads that are learned together.

    OMP_NUM_THREADS=1 python benchmarks/head_choice.py --teacher SRC --text_file TEXT.jsonl --heads 4

The ablation gives one head at a time the untrained mechanism and takes the K heads whose loss rises most. The gates, as
in DuoAttention (Xiao 2024, section 2.2), mix both outputs in every head at once, g softmax + (1 - g) mechanism, and all
other parameters stay as they are: from g = 1 they are trained on the same losses with a penalty on their sum, and the K
largest are taken. Both choices, and the mean of `--draws` random ones, are then kept in the same model, and the losses
are those of other random tokens and of later text. The loss of repeated random tokens is that of their second copy.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import (
    rank_heads,
    repeated_tokens,
    set_softmax_heads,
)
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.softmax_heads import exact_attention
from hf_linear_attention.training.data.rows import load_rows
from hf_linear_attention.training.presets.preset import load_preset
from hf_linear_attention.training.recipe import DataArguments


def retrieval_loss(model: Any, ids: Tensor) -> Tensor:
    """Nats per token of the second copy."""
    length = ids.shape[1] // 2
    logits = model(input_ids=ids, use_cache=False).logits[:, length:-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())


def text_loss(model: Any, ids: Tensor) -> Tensor:
    """Nats per token."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@contextlib.contextmanager
def gated(model: Any, gates: Tensor) -> Iterator[None]:
    """A context in which head h of the i-th module computes gates[i, h] softmax + (1 - gates[i, h]) mechanism."""
    mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]

    def mixed(number: int, forward: Any) -> Any:
        def call(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, **options: Any) -> Any:
            output, state = forward(query, key, value, scaling=scaling, **options)
            groups = query.shape[1] // key.shape[1]
            exact = exact_attention(query, *(x.repeat_interleave(groups, 1) for x in (key, value)), None, scaling)
            return output + gates[number][:, None] * (exact.transpose(1, 2) - output), state

        return call

    for number, mechanism in enumerate(mechanisms):
        mechanism.forward = mixed(number, mechanism.forward)
    try:
        yield
    finally:
        for mechanism in mechanisms:
            del mechanism.forward


def learned_gates(model: Any, retrieval: Tensor, text: Sequence[Tensor], penalty: float, steps: int) -> Tensor:
    """The gates, `[layers, heads]`, after `steps` of Adam on both losses and `penalty` x mean gate."""
    shapes = [module.linear_attention.shape for module in linear_attention_modules(model).values()]
    gates = torch.ones(len(shapes), shapes[0].num_heads, requires_grad=True)
    optimizer = torch.optim.Adam([gates], lr=0.02)
    with gated(model, gates):
        for step in range(steps):
            loss = retrieval_loss(model, retrieval) + text_loss(model, text[step % len(text)]) + penalty * gates.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                gates.clamp_(0, 1)
    return gates.detach()


def choices(model: Any, arguments: Any, retrieval: Tensor, text: Sequence[Tensor]) -> dict[str, list[list[list[int]]]]:
    """The heads to keep by each method; several sets where they are random."""
    layers = [module.linear_attention.shape.layer for module in linear_attention_modules(model).values()]
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in text]
    ranking = rank_heads(model, retrieval, batches)
    found = {"ablation": [[[entry.layer, entry.head] for entry in ranking[: arguments.heads]]]}
    for penalty in arguments.penalties:
        gates = learned_gates(model, retrieval, text, penalty, arguments.steps)
        best = gates.flatten().topk(arguments.heads).indices.tolist()
        found[f"gates, penalty {penalty:g}"] = [[[layers[i // gates.shape[1]], i % gates.shape[1]] for i in best]]
        write(f"gates, penalty {penalty:g}: mean {gates.mean():.3f}, above 1/2: {int((gates > 0.5).sum())}")
    everywhere = [[entry.layer, entry.head] for entry in ranking]
    generator = random.Random(0)
    found["random"] = [generator.sample(everywhere, arguments.heads) for _ in range(arguments.draws)]
    return found | {"none": [[]], "all": [everywhere]}


@torch.no_grad()
def losses_with(
    model: Any, sets: Sequence[Sequence[Sequence[int]]], retrieval: Tensor, text: Sequence[Tensor]
) -> tuple[float, float]:
    """Both losses with softmax in these heads, the mean over several sets of them."""
    found = []
    for heads in sets:
        set_softmax_heads(model, heads)
        nats = statistics.fmean(text_loss(model, ids).item() for ids in text)
        found.append((retrieval_loss(model, retrieval).item(), nats))
    set_softmax_heads(model, [])
    first, second = zip(*found)
    return statistics.fmean(first), statistics.fmean(second)


def text_windows(arguments: Any, tokenizer: Any, length: int) -> list[Tensor]:
    """Batches of four windows of `length` tokens from the start of the text."""
    ids: list[int] = []
    for row in load_rows(DataArguments(train_file=arguments.text_file), "train") or ():
        ids += tokenizer(row["text"], verbose=False)["input_ids"]
        if len(ids) > 16 * 4 * length:
            break
    windows = torch.tensor(ids[: len(ids) // (4 * length) * 4 * length]).view(-1, 4, length)
    return list(windows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--teacher", required=True, help="a decoder with softmax attention")
    parser.add_argument("--text_file", required=True, help="rows with a column `text`")
    parser.add_argument("--preset", default="linear", help="whose settings the mechanism has")
    parser.add_argument("--heads", type=int, default=4, help="K")
    parser.add_argument("--penalties", type=float, nargs="+", default=[1.0, 3.0], help="on the mean of the gates")
    parser.add_argument("--steps", type=int, default=150, help="of the gates")
    parser.add_argument("--draws", type=int, default=10, help="random choices")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.steps, arguments.draws, arguments.penalties = 3, 2, [1.0]
    teacher = AutoModelForCausalLM.from_pretrained(arguments.teacher)
    # Heads with softmax need the whole rotation (`rope_obstacle`).
    settings = {**load_preset(arguments.preset).settings["causal"], "rope": "before_map"}
    torch.manual_seed(0)
    model = convert(teacher, **{key: value for key, value in settings.items() if key != "state_bytes"}).eval()
    model.requires_grad_(False)
    length = min(256, model.config.max_position_embeddings)
    text = text_windows(arguments, AutoTokenizer.from_pretrained(arguments.teacher), length)
    half = len(text) // 2
    found = choices(model, arguments, repeated_tokens(model, 0), text[: half or 1])
    held_out, later = repeated_tokens(model, 1), text[half:]
    figures: dict[str, Any] = {}
    for name, sets in found.items():
        retrieval, nats = losses_with(model, sets, held_out, later)
        chosen = " ".join(f"{layer}.{head}" for layer, head in sorted(sets[0]))
        figures[name] = {"heads": chosen if len(sets) == 1 else None, "retrieval": retrieval, "text": nats}
    rows = [
        (name, row["retrieval"], row["text"], "" if name == "all" else row["heads"]) for name, row in figures.items()
    ]
    write(table(("softmax heads", "repeated tokens", "text", "which"), rows))
    save_results(arguments, "head_choice", {"choices": figures}, plot)


def plot(plt: Any, figures: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, row in figures["choices"].items():
        axis.scatter(row["text"], row["retrieval"], label=name)
    axis.set_xlabel("nats per token of text")
    axis.set_ylabel("nats per repeated random token")
    axis.legend()
    return figure


if __name__ == "__main__":
    main()
