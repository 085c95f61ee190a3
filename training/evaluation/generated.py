"""Texts that models generate for the inputs of a batch (`--predict_with_generate`)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.evaluation.text_metrics import ErrorRates, TextMatch


MODEL_INPUTS = ("input_ids", "attention_mask", "input_features", "input_values")
# Number of an example, the text of the model, that of the data, and that of the teacher, if there is one; for
# conversations, which have no text of the data here, whether the answer of each model ended.
Generated = tuple[int, Any, str | None, Any]


class Generation:
    """Generates greedily, at most `max_length` tokens for each text, and decodes."""

    def __init__(self, processor: Any, max_length: int, is_sharded: bool = False) -> None:
        self.processor, self.max_length, self.is_sharded = processor, max_length, is_sharded

    @torch.no_grad()
    def texts(self, model: Any, batch: Batch) -> list[str]:
        """The texts that the model generates for the inputs of `batch`."""
        inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        # The processes that share a sharded model must make as many forward passes as the slowest.
        more = {"synced_gpus": True} if self.is_sharded else {}
        found = model.generate(**inputs, max_new_tokens=self.max_length, do_sample=False, num_beams=1, **more)
        return self.processor.batch_decode(found, skip_special_tokens=True)

    @torch.no_grad()
    def ends(self, model: Any, batch: Batch) -> list[bool]:
        """Whether the answer that the model gives to the last message of every conversation ends."""
        stop = model.generation_config.eos_token_id
        stop = self.processor.eos_token_id if stop is None else stop
        ends = []
        for ids, length in zip(batch["input_ids"], batch["prompt_length"].tolist(), strict=True):
            prompt = ids[:length].unsqueeze(0)  # one by one, so that nothing is padded on the left
            more = {"synced_gpus": True} if self.is_sharded else {}
            options = {"max_new_tokens": self.max_length, "do_sample": False, "num_beams": 1, "eos_token_id": stop}
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options, **more)
            new = found[0, length:].tolist()
            ends.append(bool(set(new) & set(stop if isinstance(stop, list) else [stop])))
        return ends

    def __call__(self, model: PreTrainedModel, teacher: PreTrainedModel | None, batch: Batch) -> list[Generated]:
        """The texts of both models and of the data for a batch, or whether the answers of both models end."""
        if "prompt_length" in batch:
            mine = self.ends(model, batch)
            others: list[Any] = [None] * len(mine) if teacher is None else self.ends(teacher, batch)
            return list(zip(batch["index"].tolist(), mine, [None] * len(mine), others, strict=True))
        labels = [[token for token in row if token != IGNORED] for row in batch["labels"].tolist()]
        known = self.processor.batch_decode(labels, skip_special_tokens=True)
        theirs = [None] * len(known) if teacher is None else self.texts(teacher, batch)
        return list(zip(batch["index"].tolist(), self.texts(model, batch), known, theirs, strict=True))


def generation_figures(rows: list[Generated], is_speech: bool = False) -> dict[str, float]:
    """The share of texts that equal those of the data, the F1 score of their words, and the share that equal the
    teacher's (`same_text`). For conversations, the shares of answers that end, of the model and of the teacher. For
    speech, error rates instead of the share and the F1 score."""
    if not rows:
        return {}
    if rows[0][2] is None:
        shares = {"ending_answers": sum(row[1] for row in rows) / len(rows)}
        if rows[0][3] is not None:
            shares["ending_answers_teacher"] = sum(row[3] for row in rows) / len(rows)
        return shares
    mine, known = [row[1] for row in rows], [row[2] for row in rows]
    if is_speech:
        found = ErrorRates(keep_in_memory=True).compute(predictions=mine, references=known) or {}
    else:
        pairs = {"predictions": mine, "references": [[text] for text in known]}
        found = TextMatch(keep_in_memory=True).compute(**pairs, ignores_case=False) or {}
    if rows[0][3] is not None:
        found["same_text"] = sum(row[1] == row[3] for row in rows) / len(rows)
    return found
