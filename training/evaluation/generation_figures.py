"""Figures of the text that a student generates: its agreement with the teacher, and how likely the teacher finds it.

    agreement   greedily generated tokens before the first that the teacher would not have generated
    nats        nats of the teacher on the student's samples and on its own; high if the student loses the thread
    repeated    share of the 4-grams in a sample that occurred before in it; high if the student repeats itself

The teacher reads samples in overlapping windows of its trained length (`data/packing.py`), for which it was trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.packing import StreamWindows, Tokens
from hf_linear_attention.training.evaluation.retention import ORDER, batches_of, nats_of


LENGTHS = (1, 4)  # in multiples of the trained length
# These limit the decoding steps per model and length. Small models need seconds on a CPU.
SAMPLES, MAX_SAMPLED, MAX_GREEDY = 8, 1024, 64

Choice = Callable[[Tensor], Tensor]


def generation_figures(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    stream: Tokens,
    bos_token_id: int | None,
    trained_length: int,
    longest: int,
) -> list[dict[str, Any]]:
    """Figures at 1 and 4 times the trained length, but at most `longest` tokens.

    The first half is held-out text from `stream`; the second half, at most 1,024 tokens, is generated.
    """
    figures = []
    for length in dict.fromkeys(min(times * trained_length, longest, len(stream)) for times in LENGTHS):
        if length < 2 * ORDER:
            continue
        count = min(length // 2, MAX_SAMPLED)
        prompts = _prompts(stream, length - count, bos_token_id).to(student.device)
        greedy = min(count, MAX_GREEDY)
        row: dict[str, Any] = {"length": length, "sampled": count, "samples": len(prompts), "greedy": greedy}
        row["agreement_length"] = agreement_length(teacher, prompts, continued(student, prompts, greedy, _likeliest))
        for name, model in (("student", student), ("teacher", teacher)):
            samples = continued(model, prompts, count, drawn(seed=0))
            row[f"teacher_on_{name}"] = nats_of_samples(teacher, prompts, samples, bos_token_id, trained_length)
            row[f"repeated_{name}"] = repeated_share(samples.tolist())
        figures.append(row)
    return figures


def _prompts(stream: Tokens, length: int, bos_token_id: int | None) -> Tensor:
    """Prompts `[samples, length]` that are spread evenly over the text; none occurs twice."""
    body = length - (bos_token_id is not None)
    starts = sorted({round(number * (len(stream) - body) / SAMPLES) for number in range(SAMPLES)})
    rows = np.stack([stream[start : start + body] for start in starts])
    if bos_token_id is not None:
        rows = np.concatenate([np.full((len(rows), 1), bos_token_id), rows], axis=1)
    return torch.from_numpy(rows.astype(np.int64))


def _likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def drawn(seed: int) -> Choice:
    """A function that draws tokens from the softmax of logits `[B, V]`.

    The noise does not depend on the logits (the Gumbel trick), so that equal models generate equal samples.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
        return (logits.double() - (-uniform.log()).log().to(logits.device)).argmax(-1)

    return draw


@torch.no_grad()
def continued(model: PreTrainedModel, prompts: Tensor, count: int, choose: Choice) -> Tensor:
    """`count` tokens after each of the prompts `[B, N]`, chosen from logits `[B, V]`; end tokens are not special."""
    ids, cache, chosen = prompts, None, []
    for _ in progress(range(count), "writing"):
        outputs = model(input_ids=ids, past_key_values=cache, use_cache=True, **_last_logits(model, 1))
        ids, cache = choose(outputs.logits[:, -1].float())[:, None], outputs.past_key_values
        chosen.append(ids)
    return torch.cat(chosen, dim=1)


def _last_logits(model: PreTrainedModel, count: int) -> dict[str, int]:
    """The keyword for computing only the last `count` logits, if the model has it."""
    has_it = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if has_it else {}


@torch.no_grad()
def agreement_length(teacher: PreTrainedModel, prompts: Tensor, written: Tensor) -> float:
    """The mean number of tokens in `written` before the first that is not the most likely one of the teacher.

    Args:
        prompts: [B, N].
        written: the tokens after each prompt, [B, M].
    """
    count = written.shape[1]
    last = _last_logits(teacher, count + 1)
    logits = teacher(input_ids=torch.cat((prompts, written), dim=1), use_cache=False, **last).logits
    likeliest = logits[:, -count - 1 : -1].argmax(-1)
    return (likeliest == written).long().cumprod(dim=1).sum(dim=1).double().mean().item()


def nats_of_samples(
    teacher: PreTrainedModel, prompts: Tensor, samples: Tensor, bos_token_id: int | None, trained_length: int
) -> float:
    """The mean nats per token of the teacher on samples `[B, M]` after their prompts `[B, N]`."""
    found = []
    for prompt, sample in zip(prompts.cpu(), samples.cpu(), strict=True):
        stream = torch.cat((prompt, sample)).numpy()[bos_token_id is not None :]
        windows = StreamWindows(stream, trained_length, bos_token_id)
        nats = nats_of(teacher, batches_of(windows, trained_length, 0))
        found.append(nats[-samples.shape[1] :])
    return torch.cat(found).mean().item()


def repeated_share(samples: list[list[int]]) -> float:
    """The share of the 4-grams in a sample that occurred before in it, averaged over the samples."""
    shares = []
    for tokens in samples:
        grams = list(zip(*(tokens[start:] for start in range(ORDER))))
        shares.append(1 - len(set(grams)) / len(grams))
    return float(np.mean(shares))
