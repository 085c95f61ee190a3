"""The teacher's logits, asked for by row, are the teacher's logits."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import BertForSequenceClassification, LlamaForCausalLM, PreTrainedModel

from hf_linear_attention.training.losses.teacher import Teacher


def batch_of_two() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(5, 290, (2, 9)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("model_class", "fixture"),
    [(LlamaForCausalLM, "llama_teacher"), (BertForSequenceClassification, "named_classifier")],
)
def test_logits_by_row(model_class: type[PreTrainedModel], fixture: str, request: pytest.FixtureRequest) -> None:
    """With and without an output layer that can be separated (`test_output_layer.py` has each kind)."""
    model = model_class.from_pretrained(request.getfixturevalue(fixture)).eval()
    teacher, batch = Teacher(model, nullcontext, layers="all"), batch_of_two()
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
    outputs, rows = teacher(batch), torch.tensor([1, 0])
    assert outputs.logits is not None
    torch.testing.assert_close(outputs.logits(rows), expected.logits.flatten(0, -2)[rows])
    assert (teacher.by_row.layer is not None) == (fixture == "llama_teacher")
    for mine, yours in zip(outputs.hidden_states, expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(mine, yours)
    torch.testing.assert_close(model(**batch).logits, expected.logits)  # no hook is left behind


def test_teacher_never_trains(llama_teacher: str) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_teacher).train()
    teacher = Teacher(model, nullcontext, layers=None)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    outputs = teacher(batch_of_two())
    assert outputs.logits is not None
    assert not outputs.logits(torch.tensor([0])).requires_grad
