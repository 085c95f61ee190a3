"""CPU seconds to generate one image as a sequence of pixels (Katharopoulos 2020, table 5, CPU).

    python benchmarks/autoregressive_images.py --output_dir outputs/benchmarks

MNIST size (784 pixels, 8 layers) and CIFAR size (3,072, 16 layers), 8 heads, width 256, batch 1, random weights (they
cost the same as trained ones); a stock transformers GPT-2 and the same weights converted to linear attention, with one
greedy decoding loop for all:

    softmax          every step runs the whole prefix again (the paper's "softmax"; its last logits alone), with plain
                     matrix products and softmax, as was usual then
    softmax, fused   the same with torch's fused attention, which the paper did not have
    softmax, cached  keys and values are cached (the paper's "stateful softmax"), fused
    linear           the state S, Z
    compiled         the last two by torch.compile with transformers' static cache (left out by `--eager_only`): at
                     this size most of an eager step is Python, the same for both

Both models of such a pair take turns, a block of pixels each. Softmax without a cache is timed at every k-th pixel and
integrated, because one CIFAR image takes an hour; the output says so. Seconds are CPU time: one thread is meant
(OMP_NUM_THREADS=1), and other jobs on the machine then cost nothing. `--family llama` takes Llama instead. About
ten minutes on one core, or five with `--rounds 1 --points 7`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks.common import argument_parser, save_results, table, write
from hf_linear_attention import convert


NUM_VALUES = 256  # of a pixel
IMAGES = {"MNIST": (784, 8), "CIFAR": (3072, 16)}  # pixels, layers
# Seconds on the paper's CPU, in the order of `METHODS`.
PAPER = {"MNIST": (72.6, None, 7.4, 5.5, None, None), "CIFAR": (8651.4, None, 71.9, 45.1, None, None)}
METHODS = ("softmax", "softmax, fused", "softmax, cached", "linear", "softmax, compiled", "linear, compiled")
UNCACHED = {"softmax": "eager", "softmax, fused": "sdpa"}


def softmax_model(family: str, length: int, num_layers: int, width: int = 256, num_heads: int = 8):
    """A stock model with random weights: the softmax side of the comparison."""
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(
            vocab_size=NUM_VALUES,
            n_positions=length,
            n_embd=width,
            n_layer=num_layers,
            n_head=num_heads,
            bos_token_id=0,
            eos_token_id=None,
        )
        return GPT2LMHeadModel(config).eval()
    config = LlamaConfig(
        vocab_size=NUM_VALUES,
        max_position_embeddings=length,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        bos_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Decoder:
    """Greedy decoding with a cache, pixel by pixel, that can pause."""

    def __init__(self, model):
        self.model, self.cache, self.pixel = model, None, torch.zeros(1, 1, dtype=torch.long)

    @torch.no_grad()
    def advance(self, steps: int) -> float:
        """Decode `steps` pixels; seconds."""
        start = time.process_time()
        for _ in range(steps):
            output = self.model(self.pixel, past_key_values=self.cache, use_cache=True)
            self.cache, self.pixel = output.past_key_values, output.logits[:, -1:].argmax(dim=-1)
        return time.process_time() - start


class CompiledDecoder(Decoder):
    """The same with one compiled graph for all steps, which are as long as `length` pixels wherever they are."""

    def __init__(self, model, compiled, length: int):
        super().__init__(model)
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.advance(1)  # the first makes the tensors of the cache
        self.model = compiled


@torch.inference_mode()
def uncached_seconds(model, length: int, points: int) -> float:
    """Integral over the steps of the time of a step, measured at `points` steps (trapezoids), the best of two."""
    steps = sorted({1 + round(number * (length - 1) / (points - 1)) for number in range(points)})
    costs = []
    for step in steps:
        pixels = torch.randint(NUM_VALUES, (1, step))
        times = []
        for _ in range(2):
            start = time.process_time()
            model(pixels, use_cache=False, logits_to_keep=1).logits.argmax(dim=-1)
            times.append(time.process_time() - start)
        costs.append(min(times))
    areas = [
        (second - first) * (cost + next_cost) / 2
        for first, second, cost, next_cost in zip(steps, steps[1:], costs, costs[1:])
    ]
    return sum(areas) + (costs[0] + costs[-1]) / 2


def in_turns(makers: dict[str, Callable[[], Decoder]], length: int, rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of a whole image by each of two decoders, and the median ratio of the first to the second."""
    blocks, totals = 16, []
    for maker in makers.values():
        maker().advance(8)
    for _ in range(rounds):
        decoders = {name: maker() for name, maker in makers.items()}
        totals.append(dict.fromkeys(makers, 0.0))
        for block in range(blocks):
            steps = (length - 1) * (block + 1) // blocks - (length - 1) * block // blocks
            for name, decoder in decoders.items():
                totals[-1][name] += decoder.advance(steps)
    first, second = makers
    median = {name: statistics.median(total[name] for total in totals) for name in makers}
    return median, statistics.median(total[first] / total[second] for total in totals)


def measure(length: int, num_layers: int, arguments, settings: dict[str, Any]) -> dict[str, Any]:
    softmax = softmax_model(arguments.family, length, num_layers)
    linear = convert(softmax, **settings)
    makers = {"softmax, cached": lambda: Decoder(softmax), "linear": lambda: Decoder(linear)}
    seconds, ratio = in_turns(makers, length, arguments.rounds)
    over_linear = {"softmax, cached": ratio, "linear": 1.0}
    if not arguments.eager_only:
        graphs = [torch.compile(model, fullgraph=True) for model in (softmax, linear)]
        makers = {
            "softmax, compiled": lambda: CompiledDecoder(softmax, graphs[0], length),
            "linear, compiled": lambda: CompiledDecoder(linear, graphs[1], length),
        }
        compiled, ratio = in_turns(makers, length, arguments.rounds)
        seconds |= compiled
        over_linear |= {"softmax, compiled": ratio, "linear, compiled": 1.0}
    for method, implementation in UNCACHED.items():
        softmax.set_attn_implementation(implementation)
        seconds[method] = uncached_seconds(softmax, length, arguments.points)
        over_linear[method] = seconds[method] / seconds["linear"]
    return {"pixels": length, "layers": num_layers, "seconds": seconds, "over_linear": over_linear}


def report(figures: dict[str, Any]) -> str:
    rows = []
    for name, content in figures["images"].items():
        seconds, paper = content["seconds"], PAPER.get(name, (None,) * len(METHODS))
        for number, method in enumerate(METHODS):
            if method not in seconds:
                continue
            theirs = paper[number]
            rows.append(
                [
                    f"{name} ({content['pixels']}), {method}",
                    f"{seconds[method]:.1f}",
                    f"{content['pixels'] / seconds[method]:.1f}",
                    f"{content['over_linear'][method]:.2f}x",
                    f"{theirs:.1f}" if theirs else None,
                    f"{theirs / paper[METHODS.index('linear')]:.1f}x" if theirs else None,
                ]
            )
    return (
        f"One image, batch 1, {figures['family']}, linear with {figures['settings']}\n\n"
        + table(["", "CPU seconds", "pixels/s", "/ linear", "paper, s", "paper, / linear"], rows)
        + "\n\ncompiled: over the compiled linear model."
        + f"\nsoftmax without a cache: timed at {figures['points']} lengths and integrated, not run through."
    )


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    names = list(figures["images"])
    contents = [figures["images"][name] for name in names]
    methods = [method for method in METHODS if method in contents[0]["seconds"]]
    width = 0.88 / len(methods)
    for number, method in enumerate(methods):
        places = [place + width * (number - (len(methods) - 1) / 2) for place in range(len(names))]
        values = [content["seconds"][method] for content in contents]
        bars = axis.bar(
            places, values, width=0.9 * width, label=method + (" (integrated)" if method in UNCACHED else "")
        )
        labels = [
            f"{value:,.{1 if value < 10 else 0}f} s\n{content['over_linear'][method]:.1f}x"
            for value, content in zip(values, contents)
        ]
        axis.bar_label(bars, labels, fontsize=8, padding=2)
    axis.set_xticks(
        range(len(names)),
        [
            f"{name}: {figures['images'][name]['pixels']:,} pixels, {figures['images'][name]['layers']} layers"
            for name in names
        ],
    )
    axis.set(yscale="log", ylabel="CPU seconds per image")
    every = [value for content in figures["images"].values() for value in content["seconds"].values()]
    axis.set_ylim(min(every) / 2, max(every) * 6)
    axis.set_title("Generating one image on a CPU (second line: time over linear)")
    axis.legend(loc="upper left")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--family", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--feature_map", default="elu1", help="of the linear model; the paper's is elu1")
    parser.add_argument("--eager_only", action="store_true", help="without torch.compile")
    parser.add_argument("--rounds", type=int, default=3, help="images per cached model; the median counts")
    parser.add_argument("--points", type=int, default=13, help="lengths at which softmax without a cache is timed")
    arguments = parser.parse_args(argv)
    settings = {"mechanism": "linear", "feature_map": arguments.feature_map}
    sizes = IMAGES
    if arguments.quick:
        arguments.eager_only = True
        sizes, arguments.rounds, arguments.points = {"tiny": (96, 2)}, 1, 3
    images = {name: measure(length, layers, arguments, settings) for name, (length, layers) in sizes.items()}
    figures = {"family": arguments.family, "settings": settings, "points": arguments.points, "images": images}
    write(report(figures))
    save_results(arguments, "autoregressive_images", figures, plot)


if __name__ == "__main__":
    main()
