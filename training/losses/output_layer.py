"""Logits of a model by row, so that no tensor [tokens, vocabulary] exists.

The model runs without its output layer, which is applied to a few rows at a time: their logits, and whatever of the
same shape is made of them, take `MEGABYTES` at most. In training, it is applied while the model runs, since parameters
in shards (FSDP2) are whole only then.

The gradients of a chunk of rows are computed at once (as in Liger Kernel, arXiv:2410.10989, section 3.2), so that no
logits are kept for the backward pass and none are computed twice.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.gradients import GRADIENT_SCALE, with_gradients
from hf_linear_attention.training.losses.outputs import logits_of, run_model


logger = logging.getLogger(__name__)

MEGABYTES = 256
# Tensors [rows, vocabulary] in float32 that are alive together at most; test_output_layer.py counts them.
COPIES = 10

LossOfRows = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""A function from logits [r, V] and their row numbers [r] to a sum and to detached figures by name, all scalars."""


def chunks(rows: Tensor, classes: int) -> tuple[Tensor, ...]:
    """The row numbers [R], in parts whose logits may be copied `COPIES` times within `MEGABYTES` (of 2^20 bytes)."""
    return rows.split(max(1, int(MEGABYTES * 2**20) // (4 * COPIES * classes)))


@dataclass(frozen=True)
class Rows:
    """The logits [R, classes] of a batch, which `head` makes of the inputs [R, D] of the output layer."""

    inputs: Tensor
    head: Callable[[Tensor], Tensor]
    classes: int

    def __call__(self, rows: Tensor) -> Tensor:
        """The logits [r, classes] of the row numbers [r]."""
        return self.head(self.inputs[rows])

    def all(self) -> Tensor:
        """The numbers of all rows."""
        return torch.arange(len(self.inputs), device=self.inputs.device)

    @torch.no_grad()
    def read(self, rows: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What `read` makes of the logits [r, classes] of each chunk of the row numbers [R], and these: [R, ...]."""
        return torch.cat([read(self(part), part) for part in chunks(rows, self.classes)])

    @torch.no_grad()
    def each(self, rows: Tensor, read: Callable[[Tensor, Tensor], None]) -> None:
        """Call `read` with the logits [r, classes] of each chunk of the row numbers [R], and these."""
        for part in chunks(rows, self.classes):
            read(self(part), part)

    def summed(
        self, rows: Tensor, parameters: Iterable[nn.Parameter], loss: LossOfRows, scale: float = GRADIENT_SCALE
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of `loss` over the row numbers [R] and the sums of its figures.

        Args:
            parameters: those of `head`.
            scale: see `gradients.GRADIENT_SCALE`.
        """
        trained = [source for source in (self.inputs, *parameters) if source.requires_grad and torch.is_grad_enabled()]
        gradients = [torch.zeros_like(source) for source in trained]
        total, figures = torch.zeros((), device=self.inputs.device), dict[str, Tensor]()
        for part in chunks(rows, self.classes):
            inputs = self.inputs.detach()[part].requires_grad_(self.inputs.requires_grad)
            value, found = loss(self.head(inputs), part)
            leaves = [inputs if source is self.inputs else source for source in trained]
            slopes = torch.autograd.grad(value * scale, leaves, allow_unused=True) if leaves else ()
            for leaf, gradient, slope in zip(leaves, gradients, slopes, strict=True):
                if leaf is inputs:
                    gradient[part] = slope
                elif slope is not None:
                    gradient += slope
            total = total + value.detach()
            figures = {name: figures.get(name, 0) + figure for name, figure in found.items()}
        return (with_gradients(total, gradients, trained, scale) if trained else total), figures


@dataclass(frozen=True)
class OutputLayer:
    """The output layer of a model, and what the model does with its results."""

    module: nn.Module
    after: Callable[[Tensor], Tensor]
    classes: int

    @contextlib.contextmanager
    def replaced(self, use: Callable[[Tensor, Callable[[Tensor], Tensor]], None]) -> Iterator[None]:
        """Inside, `use` gets the inputs [R, D] and what makes logits of them, and the model's own are 0."""
        forward, is_own = self.module.forward, "forward" in vars(self.module)

        def instead(inputs: Tensor) -> Tensor:
            use(inputs.flatten(0, -2), lambda some: self.after(forward(some)))
            return inputs.new_zeros(1).expand(len(inputs), 1, self.classes)

        self.module.forward = instead  # type: ignore[method-assign]
        try:
            yield
        finally:
            if is_own:  # accelerate's hooks put it there
                self.module.forward = forward  # type: ignore[method-assign]
            else:
                del self.module.forward


class ByRow:
    """A model that runs without its output layer, unless it does something unknown with the results of the layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.layer = model, output_layer(model)

    def run(
        self,
        use: Callable[[Rows], None],
        batch: Batch,
        layers: str | None = None,
        call: Callable[[], Any] | None = None,
    ) -> Any:
        """The outputs of the model for a batch, without logits.

        Args:
            use: is called once, while the model runs, unless it has no logits.
            layers: which hidden states the model returns (`run_model`).
            call: what runs the model in place of `run_model`.
        """
        call = call or (lambda: run_model(self.model, batch, layers))
        layer = self.layer
        if layer is not None:
            with layer.replaced(lambda inputs, head: use(Rows(inputs, head, layer.classes))):
                return call()
        outputs = call()
        if (logits := logits_of(outputs)) is None:
            return outputs
        if 4 * logits.numel() > MEGABYTES * 2**20:
            logger.warning(WHOLE, type(self.model).__name__, 4 * logits.numel() // 2**20)
        use(Rows(logits.flatten(0, -2), lambda rows: rows, logits.shape[-1]))
        return outputs

    def outputs(
        self, batch: Batch, layers: str | None = None, call: Callable[[], Any] | None = None
    ) -> tuple[Any, Rows | None]:
        """What `run` returns, and the logits, if there are any. The output layer is applied when they are read."""
        found: list[Rows] = []
        outputs = self.run(found.append, batch, layers, call)
        return outputs, found[0] if found else None

    def rows(self, batch: Batch) -> Rows:
        """The logits for a batch."""
        if (rows := self.outputs(batch)[1]) is None:
            raise RuntimeError("the model has no logits")
        return rows


WHOLE = (
    "%s does something with the results of its output layer that is not known here, so its logits are computed as a "
    "whole: %d megabytes. Fewer sequences per forward pass, or shorter ones, need less"
)


@torch.no_grad()
def output_layer(model: PreTrainedModel) -> OutputLayer | None:
    """The output layer, if it is known how the model makes its logits of the results; otherwise None.

    The results for a small input are replaced by numbers up to 50, so that capping shows whatever the weights are.
    """
    head = model.get_output_embeddings()
    if head is None or model.main_input_name != "input_ids":
        return None
    seen: list[Tensor] = []
    calls: list[tuple[Any, ...]] = []

    def replace(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        calls.append(arguments)
        seen.append(torch.linspace(-50, 50, output.numel(), device=output.device).view_as(output).to(output.dtype))
        return seen[-1]

    tokens = torch.arange(1, 9, device=model.device).unsqueeze(0)  # 0 is often padding, which is embedded as zeros
    # A state that a decoder would fill is not used; an encoder may not know the argument.
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    if model.config.is_encoder_decoder:
        options["decoder_input_ids"] = tokens
    was_training = model.training
    try:
        with head.register_forward_hook(replace):
            outputs = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
    finally:
        model.train(was_training)
    logits = getattr(outputs, "logits", None)
    if logits is None or len(calls) != 1 or len(calls[0]) != 1 or calls[0][0].dim() != 3:
        return None
    equal = (after for after in _afterwards(model) if torch.equal(after(seen[0]).float(), logits.float()))
    after = next(equal, None)
    return None if after is None else OutputLayer(head, after, logits.shape[-1])


def _afterwards(model: PreTrainedModel) -> Iterator[Callable[[Tensor], Tensor]]:
    """What models do with the results of their output layer.

    Nothing; they add to them (BART), cap them (Gemma 2), divide them (Granite) or multiply them (Cohere).
    """
    text = model.config.get_text_config()
    yield lambda logits: logits
    if isinstance(bias := getattr(model, "final_logits_bias", None), Tensor):
        yield lambda logits: logits + bias[0]
    if cap := getattr(text, "final_logit_softcapping", None):
        yield lambda logits: torch.tanh(logits / cap) * cap
    if scaling := getattr(text, "logits_scaling", None):
        yield lambda logits: logits / scaling
    if scale := getattr(text, "logit_scale", None):
        yield lambda logits: logits * scale
