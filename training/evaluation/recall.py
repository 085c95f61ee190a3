"""Recall of a causal language model: the share of the nats of a text that its copy further back saves.

    with      text r      ... other text ...   text r     N tokens together, with the BOS token if there is one
    without   text r + 1  ... other text ...   text r

    recall = 1 - nats(text r | with) / nats(text r | without)

It is near 1 for a model that finds the copy and near 0 for one that forgets it. Mean nats do not show it: fine-tuning
on texts that need no memory lowers them, and may ruin recall (arXiv 2606.11052). Every process reads the same rows,
which is all that models in shards need. No random number is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention.training.data.packing import Examples, Tokens, shorten
from hf_linear_attention.training.evaluation.retention import running_text, separate_windows
from hf_linear_attention.training.losses.output_layer import ByRow


RECALL = "eval_recall"
# Tokens of a text that is copied, at most a quarter of all.
MOST_COPIED, FEWEST_COPIED = 64, 4
TIMES, MOST_ROWS = (1, 2), 8


def recall_rows(stream: Tokens, length: int, most_rows: int, bos_token_id: int | None) -> tuple[Tensor, Tensor, int]:
    """Rows `[R, N]` with and without the copy, spread evenly over `stream`, and the number of tokens that are copied.

    There are no rows if the text is too short.
    """
    windows = separate_windows(stream, length, bos_token_id)
    copied, first = min(MOST_COPIED, length // 4), int(bos_token_id is not None)
    count = min(most_rows, len(windows)) if len(windows) > 1 and copied >= FEWEST_COPIED else 0
    with_copy, without = np.empty((2, count, length), np.int64)
    for row in range(count):
        place = len(windows) * row // count
        with_copy[row] = without[row] = windows[place]["input_ids"]
        with_copy[row, first : first + copied] = with_copy[row, -copied:]
        without[row, first : first + copied] = windows[(place + 1) % len(windows)]["input_ids"][-copied:]
    return torch.from_numpy(with_copy), torch.from_numpy(without), copied


class RecallProbe:
    """Recall at the training length and, if the model has positions for it, at twice that length."""

    def __init__(
        self,
        examples: Examples,
        length: int,
        positions: int | None,
        bos_token_id: int | None,
        most_tokens: int | None = None,
    ) -> None:
        """Take the texts from the first `examples`.

        Args:
            positions: their number in the model, or None.
            most_tokens: what is read at most, but for one row at the training length.
        """
        stream = running_text(shorten(examples, MOST_ROWS * TIMES[-1] * length))
        lengths = [times for times in TIMES if times == 1 or times * length <= (positions or 2**62)]
        most = dict.fromkeys(lengths, MOST_ROWS)
        if most_tokens is not None:  # each length gets its part, and reads a row twice
            fit = {times: most_tokens // (2 * len(lengths) * times * length) for times in lengths}
            most = {times: min(MOST_ROWS, max(fit[times], int(times == 1))) for times in lengths}
        rows = {times: recall_rows(stream, times * length, most[times], bos_token_id) for times in lengths}
        self.rows = {RECALL + f"_x{times}" * (times > 1): found for times, found in rows.items() if len(found[0])}

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, autocast: Callable[[], AbstractContextManager[Any]]) -> dict[str, float]:
        """The figures of the model, which stays in the mode that it had; none of a text that is too short."""
        was_training, figures, by_row = model.training, {}, ByRow(model)
        model.eval()
        with autocast():
            for name, (with_copy, without, copied) in self.rows.items():
                figures[name] = 1 - _nats(by_row, with_copy, copied) / _nats(by_row, without, copied)
        model.train(was_training)
        return figures


def _nats(by_row: ByRow, rows: Tensor, copied: int) -> float:
    """The mean nats of the last text of all rows `[R, N]` but its first token, which nothing announces."""
    found: list[Tensor] = []
    for row in rows.to(by_row.model.device).split(1):  # one by one, which needs no more memory than training
        targets = row[0].roll(-1)

        def look(logits: Tensor, part: Tensor, targets: Tensor = targets) -> None:
            found.append(F.cross_entropy(logits.float(), targets[part], reduction="none"))

        by_row.run(
            lambda logits: logits.each(logits.all()[-copied:-1], look),
            {"input_ids": row, "attention_mask": torch.ones_like(row)},
        )
    return torch.cat(found).mean().item()
