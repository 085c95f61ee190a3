"""Speed of healing on one thread: tokens per CPU second in every stage of the preset `default`, and where they go.

    python -m benchmarks.speed_training
    python -m benchmarks.speed_training --checkpoint FOLDER     a decoder with trained weights instead of random ones

Both models go the way of `convert --preset default`: a Llama of 260,000 parameters, the size of stories260k, and the
real MiniLM. The rival is the original as the student of the last stage: the same loop, batches, teacher and loss. The
first lines are tokens per CPU second of everything, and what the matrix products of the linear layers would allow
if there were nothing else: those of the teacher (in attention transfer the student, which computes softmax), of the
student and of both gradients, at the speed of torch for the same sizes. Then come the shares of the parts; `attention`
are the mechanisms in the forward pass, and `losses` what they are compared with.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import parse, save, table
from benchmarks.real_attention import documentation, minilm_folder
from examples.train_demo_model import make_tokenizer
from hf_linear_attention.attention.layer import LinearizedAttention
from hf_linear_attention.conversion.convert_and_heal import convert_and_heal
from hf_linear_attention.training.data import batches
from hf_linear_attention.training.loop import TrainingLoop
from hf_linear_attention.training.losses import objectives
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.run import run


WARM = 3  # steps that are not counted
PARTS: dict[str, list[tuple[Any, str]]] = {
    "teacher": [(Teacher, "__call__")],
    "student": [(objectives.ByRow, "run")],
    "attention": [(LinearizedAttention, "_attend")],
    "losses": [
        (objectives.StudentWithObjectives, "forward"),
        (objectives.AttentionTransfer, "total"),
        (objectives.FarShare, "total"),
    ],
    "backward": [(Accelerator, "backward"), (objectives, "gradients_of")],
    "clipping": [(TrainingLoop, "_clip")],
    "optimizer": [(TrainingLoop, "_update")],
    "data": [(batches, "pad"), (batches.Stream, "__getitem__"), (TrainingLoop, "_to_device")],
    "rest": [],
}


class Clock:
    """CPU seconds by part; a part inside another one counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inside, self.since, self.tokens = ["rest"], time.process_time(), 0
        self.runs: list[tuple[Recipe, dict[str, float]]] = []

    def switch(self) -> None:
        """What has passed belongs to the innermost part."""
        now = time.process_time()
        self.seconds[self.inside[-1]] += now - self.since
        self.since = now

    def counted(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is that of the part."""

        def call(*given: Any, **named: Any) -> Any:
            self.switch()
            self.inside.append(part)
            try:
                return function(*given, **named)
            finally:
                self.switch()
                self.inside.pop()

        return call

    def after_step(self, loop: TrainingLoop) -> None:
        """Start behind the steps that are not counted, and note the figures of the last one."""
        self.switch()
        if loop.state.step == WARM:
            self.seconds.clear()
            self.tokens = loop.state.tokens
        if loop.state.step == loop.total_steps:
            steps, tokens, total = loop.state.step - WARM, loop.state.tokens - self.tokens, self.seconds.total()
            figures = {"all": tokens / total, "products": tokens / (steps * products(loop, tokens // steps))}
            shares = {part: self.seconds[part] / total for part in PARTS}
            self.runs.append((loop.context.recipe, figures | shares))


def products(loop: TrainingLoop, tokens: int) -> float:
    """CPU seconds of the products in one step with so many tokens."""
    is_transfer = loop.module.observes_attention
    model = loop.context.student.base_model if is_transfer else loop.context.student
    forward, backward = 0.0, 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "pooler" not in name:
            sizes = (tokens, layer.in_features), (tokens, layer.out_features), tuple(layer.weight.shape)
            x, grad, weight = (torch.randn(*size) for size in sizes)
            forward += seconds(lambda x=x, weight=weight: x @ weight.T)
            backward += seconds(lambda x=x, grad=grad, weight=weight: (grad @ weight, grad.T @ x))
    return forward if is_transfer else 2 * forward + backward


def seconds(function: Callable[[], Any], rounds: int = 5) -> float:
    """CPU seconds of a call, the least of some."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


@contextlib.contextmanager
def measuring() -> Iterator[Clock]:
    """Inside, the parts of every run of training are timed."""
    clock, after = Clock(), TrainingLoop._after_step
    with contextlib.ExitStack() as stack:
        for part, places in PARTS.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, clock.counted(part, getattr(owner, name))))
        noted = lambda loop, progress: (clock.after_step(loop), after(loop, progress))[1]  # noqa: E731
        stack.enter_context(mock.patch.object(TrainingLoop, "_after_step", noted))
        yield clock


def small_llama(folder: Path) -> str:
    """A Llama of the size of stories260k, with random weights and a tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "max_position_embeddings": 512, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
    make_tokenizer([documentation()], 512).save_pretrained(folder)
    return str(folder)


def heal(original: str, file: Path, tokens: int, folder: Path) -> list[tuple[str, dict[str, float]]]:
    """The figures of all stages, and of the original in the last one."""
    with measuring() as clock:
        convert_and_heal(original, "default", str(file), tokens=tokens)
        names = ["attention transfer", "distillation"][-len(clock.runs) :]
        recipe = clock.runs[-1][0]
        of_original = replace(recipe.model, model_name_or_path=original)
        optimization = replace(recipe.optimization, mechanism_learning_rate=None)
        own = replace(recipe.run, output_dir=str(folder), resume_from_checkpoint=None, overwrite_output_dir=True)
        run(replace(recipe, model=of_original, optimization=optimization, run=own))
    return list(zip([*names, "original"], (figures for _, figures in clock.runs), strict=True))


def main(argv: list[str] | None = None) -> None:
    """Heal both models."""
    quick = {"steps": 3, "characters": 120, "llama_steps": 3}
    arguments = parse(__doc__, argv, quick, steps=24, llama_steps=40, characters=600, checkpoint="")
    tables = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, text = Path(scratch), documentation()
        length = arguments.characters
        file = folder / "texts.jsonl"
        lines = ({"text": text[n : n + length]} for n in range(0, len(text), length))
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        llama = arguments.checkpoint or small_llama(folder / "llama")
        cases = {
            "Llama of stories260k's size": (llama, 2 * (WARM + arguments.llama_steps) * 1024),
            "MiniLM": (str(minilm_folder()), (WARM + arguments.steps) * 16 * length // 4),
        }
        for name, (original, tokens) in cases.items():
            found = heal(original, file, tokens, folder / "tuned")
            rows = [[row, *(figures[row] for _, figures in found)] for row in ("all", "products", *PARTS)]
            tables.append(table([name, *(stage for stage, _ in found)], rows))
    save(arguments, "speed_training", tables)


if __name__ == "__main__":
    main()
