# SPDX-License-Identifier: Apache-2.0
"""What a model computes after its last hidden states, which vLLM's Transformers backend does not take from the model.

That backend has an output layer, a factor and a cap for logits of its own, and of a classifier it takes one module.
Here the model's own code says what it computes: its forward runs with known numbers in place of the layers below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions


ROUNDING = 0.02  # relative to the largest logit: more than that of bfloat16, less than that of another token
PROBE_TOKENS = 3  # of a known sequence, enough to tell its first token, its last one and their mean


class _Output(BaseModelOutputWithPoolingAndCrossAttentions):
    """The output of a base model; what it was not given, such as the logits of a router, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Returns `output`, whatever it is called with."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The given output."""
        return self.output


def match_logits(processor: Any, config: PreTrainedConfig) -> None:
    """Let vLLM's processor of logits do what the model does with the products of its output layer.

    ValueError if the model does more than to multiply them, or to cap them by `final_logit_softcapping`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # In float32 on the CPU, whatever defaults vLLM has set.
    logits = torch.linspace(-40, 40, processor.vocab_size, dtype=torch.float32, device="cpu")[None, None]
    size = config.get_text_config().hidden_size
    hidden = _Output(last_hidden_state=torch.zeros(1, 1, size, dtype=torch.float32, device="cpu"))
    token = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    for base in (model.base_model, model.get_decoder()):
        base.forward = lambda *args, **kwargs: hidden
    model.set_output_embeddings(_Given(logits))
    with torch.device("cpu"):
        found = model(input_ids=token, use_cache=False, return_dict=True).logits.float()
    capped = logits if processor.soft_cap is None else processor.soft_cap * torch.tanh(logits / processor.soft_cap)
    if torch.allclose(found, processor.scale * capped):
        return
    factor = (found[..., -1] / capped[..., -1]).item()
    if not torch.allclose(found, factor * capped, rtol=1e-4):
        raise ValueError(
            f"{type(model).__name__} changes its logits in a way that vLLM does not know; serve it with "
            "`hf-linear-attention serve`."
        )
    processor.scale = factor


class ClassificationHead:
    """The stock classifier, with all modules that stand between it and the hidden states.

    Its parameters have the given dtype and device, and no values yet.

    Attributes:
        model: the stock model on the meta device; only what is not below its base model is computed.
        pooler: the module of the base model that makes one vector of hidden states, or None.
        parts: the modules above the base model by their names in the checkpoint.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        with torch.device("meta"):
            self.model = AutoModelForSequenceClassification.from_config(config, dtype=dtype).eval()
        base = self.model.base_model
        self.pooler = getattr(base, "pooler", None)
        self.parts = {name: part for name, part in self.model.named_children() if part is not base}
        for part in (self.pooler, *self.parts.values()):
            if part is not None:
                part.to_empty(device=device)

    def __call__(self, pooled: Tensor) -> Tensor:
        """The logits `[B, classes]` of one vector `[B, E]` for each text."""
        return self.logits(pooled.unsqueeze(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits `[B, classes]` of hidden states `[B, N, E]`."""
        pooled = None if self.pooler is None else self.pooler(hidden)
        output = _Output(last_hidden_state=hidden, pooler_output=pooled)
        self.model.base_model.forward = lambda *args, **kwargs: output
        return self.model(inputs_embeds=hidden, return_dict=True).logits

    @torch.no_grad()
    def pooling(self) -> str:
        """Which hidden states of a text the classifier reads, as vLLM calls it: found by trying it on random numbers.

        ValueError if it reads anything but the first one, the last one or their mean.
        """
        for part in (self.pooler, *self.parts.values()):
            for parameter in part.parameters() if part is not None else ():
                parameter.normal_()
        parameter = next(parameter for part in self.parts.values() for parameter in part.parameters())
        size = self.model.config.hidden_size
        hidden = torch.randn(1, PROBE_TOKENS, size, dtype=parameter.dtype, device=parameter.device)
        found = self.logits(hidden)
        candidates = {"CLS": hidden[:, 0], "LAST": hidden[:, -1], "MEAN": hidden.mean(dim=1)}
        gaps = {name: (self(pooled) - found).abs().max().item() for name, pooled in candidates.items()}
        if gaps[nearest := min(gaps, key=gaps.__getitem__)] <= ROUNDING * found.abs().max().item():
            return nearest
        raise ValueError(
            f"{type(self.model).__name__} reads more of a text than its first or last hidden state or their mean, "
            "which is all that vLLM gives to a classifier; classify with transformers."
        )
