"""CPU seconds to generate one image as a sequence of pixels (Katharopoulos 2020, table 5, CPU).

    python -m benchmarks.papers.autoregressive_images

MNIST size (784 pixels, 8 layers) and CIFAR size (3,072, 16 layers), 8 heads, width 256, batch 1; a stock GPT-2 with
random weights (they cost the same as trained ones), and the same weights converted to linear attention.

    softmax          every step runs the whole prefix again (the paper's "softmax"), with plain products and softmax
    softmax, fused   the same with torch's fused attention, which the paper did not have
    softmax, cached  keys and values are cached (the paper's "stateful softmax"), fused
    linear           the state S, Z

The cached ones take turns, a block of pixels each. Softmax without a cache is timed at every k-th pixel and integrated,
because one CIFAR image takes an hour. About five minutes on one core. The paper has 13.2, 1.3 (MNIST), 191.8 and 1.6
(CIFAR) times the time of linear for softmax without and with a cache.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import parse, save, table
from hf_linear_attention import convert


NUM_VALUES = 256  # of a pixel
IMAGES = {"MNIST": (784, 8), "CIFAR": (3072, 16)}  # pixels, layers
BLOCKS = 16


class Decoder:
    """Greedy decoding with a cache, pixel by pixel, that can pause."""

    def __init__(self, model: Any):
        self.model, self.cache, self.pixel, self.seconds = model, None, torch.zeros(1, 1, dtype=torch.long), 0.0

    @torch.no_grad()
    def advance(self, steps: int) -> None:
        """Decode `steps` pixels."""
        start = time.process_time()
        for _ in range(steps):
            output = self.model(self.pixel, past_key_values=self.cache, use_cache=True)
            self.cache, self.pixel = output.past_key_values, output.logits[:, -1:].argmax(dim=-1)
        self.seconds += time.process_time() - start


@torch.inference_mode()
def uncached_seconds(model: Any, length: int, points: int) -> float:
    """Integral over the steps of the time of a step, measured at `points` steps (trapezoids), the best of two."""
    steps = sorted({1 + round(number * (length - 1) / (points - 1)) for number in range(points)})
    costs = []
    for step in steps:
        pixels, times = torch.randint(NUM_VALUES, (1, step)), []
        for _ in range(2):
            start = time.process_time()
            model(pixels, use_cache=False, logits_to_keep=1)
            times.append(time.process_time() - start)
        costs.append(min(times))
    areas = ((b - a) * (cost + after) / 2 for (a, b), (cost, after) in zip(pairwise(steps), pairwise(costs)))
    return sum(areas) + (costs[0] + costs[-1]) / 2


def measure(length: int, layers: int, points: int) -> dict[str, float]:
    """Seconds of a whole image with each method."""
    torch.manual_seed(0)
    sizes = {"vocab_size": NUM_VALUES, "n_positions": length, "n_embd": 256, "n_layer": layers, "n_head": 8}
    softmax = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()
    models = {"softmax, cached": softmax, "linear": convert(softmax, mechanism="linear", feature_map="elu1")}
    for model in models.values():
        Decoder(model).advance(8)
    decoders = {name: Decoder(model) for name, model in models.items()}
    for block in range(BLOCKS):
        for decoder in decoders.values():
            decoder.advance((length - 1) * (block + 1) // BLOCKS - (length - 1) * block // BLOCKS)
    seconds = {name: decoder.seconds for name, decoder in decoders.items()}
    for name, implementation in {"softmax": "eager", "softmax, fused": "sdpa"}.items():
        softmax.set_attn_implementation(implementation)
        seconds[name] = uncached_seconds(softmax, length, points)
    return seconds


def main(argv: list[str] | None = None) -> None:
    """Time an image of each size."""
    arguments = parse(__doc__, argv, {"points": 3}, points=7)
    images = {"tiny": (96, 2)} if arguments.quick else IMAGES
    found = {name: measure(*sizes, arguments.points) for name, sizes in images.items()}
    rows = [
        [f"{name}, {method}", seconds, seconds / times["linear"]]
        for name, times in found.items()
        for method, seconds in times.items()
    ]
    save(arguments, "autoregressive_images", [table(["one image", "CPU seconds", "over linear"], rows)])


if __name__ == "__main__":
    main()
