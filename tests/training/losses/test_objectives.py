"""Padding is in no loss, and the losses are what their names say."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from caches import past
from recipes import recipe_of
from runs import changed
from torch import Tensor
from transformers import BertForMaskedLM, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.training import run
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.objectives import (
    OBJECTIVES,
    AttentionTransfer,
    StudentWithObjectives,
    build_objectives,
)
from hf_linear_attention.training.losses.outputs import StudentOutputs
from hf_linear_attention.training.losses.teacher import Teacher


def objectives_of(task: str, **weights: float) -> Any:
    """The objectives with these weights, and no others."""
    every = {f"{name}_weight": weights.get(name, 0.0) for name in OBJECTIVES}
    return build_objectives(recipe_of(task, **every))


def ragged_batch(task: str, extra: int, fill: int) -> dict[str, Tensor]:
    """Two texts of 9 and 5 tokens, padded by `extra` further columns of the token `fill`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (2, 9), generator=generator)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    chosen = mask.bool() if task == "causal_lm" else mask.bool() & (torch.arange(9) % 3 == 1)
    labels = ids.masked_fill(~chosen, -100)
    ids = ids.masked_fill(mask == 0, fill)
    padded = {"input_ids": (ids, fill), "attention_mask": (mask, 0), "labels": (labels, -100)}
    batch = {name: F.pad(value, (0, extra), value=default) for name, (value, default) in padded.items()}
    return {**batch, "index": torch.arange(2)}


# Shares of far keys are those of causal attention.
PADDED = [
    (task, name)
    for task in ("masked_lm", "causal_lm")
    for name in OBJECTIVES
    if (task, name) != ("masked_lm", "far_share")
]


@pytest.mark.parametrize(("task", "name"), PADDED)
def test_padding_changes_neither_loss_nor_units(task: str, name: str, request) -> None:
    model_class, fixtures = {
        "masked_lm": (BertForMaskedLM, ("masked", "masked_teacher")),
        "causal_lm": (LlamaForCausalLM, ("llama", "llama_teacher")),
    }[task]
    student, teacher = (model_class.from_pretrained(request.getfixturevalue(f)).eval() for f in fixtures)
    if name.startswith("attention_"):
        student = convert(teacher, mechanism="linear")
    if name == "far_share":
        student = convert(teacher, mechanism="hybrid", window_size=3, num_sinks=1)
        with torch.no_grad():  # far keys have too small a share
            for path, parameter in student.named_parameters():
                parameter -= 10.0 * ("far_log_scale" in path)
    objectives = objectives_of(task, **{name: 1.0})
    module = StudentWithObjectives(student, objectives, "all")
    watcher = Teacher(teacher, nullcontext, layers="all")
    results = []
    for extra, fill in [(0, 0), (6, 0), (6, 77)]:
        batch = ragged_batch(task, extra, fill)
        units = objectives[name][1].units(batch)
        loss, _ = module(batch, watcher(batch), {name: torch.tensor(1.0)})
        student.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
        results.append((units, loss.detach(), gradient))
    assert results[0][1] > 0.01
    for units, loss, gradient in results[1:]:
        assert units == results[0][0]
        torch.testing.assert_close(loss, results[0][1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, results[0][2], rtol=1e-3, atol=1e-5)


def test_every_layer_is_differentiated_before_the_next_one(llama_teacher: str, monkeypatch) -> None:
    """So no activation of a layer outlives it; the gradients are those of the whole loss."""
    settings = {"mechanism": "hybrid", "window_size": 2, "num_sinks": 1, "num_features": 8, "num_exact_keys": 1}
    student = convert(LlamaForCausalLM.from_pretrained(llama_teacher).eval(), **settings)
    student.requires_grad_(False)
    trained = [p.requires_grad_() for name, p in student.named_parameters() if "linear_attention" in name]
    batch, objectives = ragged_batch("causal_lm", 2, 0), objectives_of("causal_lm", attention_transfer=3, far_share=2)
    seen: list[ObservedAttention] = []
    with observe_attention(student, seen.append):
        student(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    totals = [
        weight * objective.total(batch, StudentOutputs(attention=tuple(seen)), None).mean() / 14
        for weight, objective in objectives.values()
    ]
    expected = torch.autograd.grad(sum(totals), trained)
    outputs: list[weakref.ref] = []
    total = AttentionTransfer.total

    def watched(self: AttentionTransfer, batch: Batch, student: StudentOutputs, teacher: None) -> Tensor:
        assert all(output() is None for output in outputs)
        outputs.append(weakref.ref(student.attention[0].output))
        return total(self, batch, student, teacher)

    monkeypatch.setattr(AttentionTransfer, "total", watched)
    scales = dict.fromkeys(objectives, torch.tensor(1 / 14))
    loss, _ = StudentWithObjectives(student, objectives, None)(batch, None, scales)
    (2 * loss).backward()
    assert len(outputs) == 2
    torch.testing.assert_close(loss.detach(), sum(totals).detach())
    for parameter, gradient in zip(trained, expected, strict=True):
        assert gradient.norm() > 0
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_attention_transfer_compares_the_heads_on_the_softmax_model(llama_teacher: str) -> None:
    """Independent form, from hooks on the stock model: mean over layers, heads, and texts by their tokens."""
    stock = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    student = convert(stock, mechanism="linear", feature_map="elu1")
    batch = ragged_batch("causal_lm", 2, 0)
    objectives = objectives_of("causal_lm", attention_transfer=1.0)
    units = objectives["attention_transfer"][1].units(batch)
    loss, _ = StudentWithObjectives(student, objectives, None)(batch, None, {"attention_transfer": 1 / units})
    errors = []
    for stock_layer, layer in zip(stock.model.layers, student.model.layers):
        inputs: list = []
        hook = stock_layer.self_attn.register_forward_pre_hook(lambda m, a, k: inputs.append(k), with_kwargs=True)  # noqa: B023
        outputs: list = []
        other = stock_layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a: outputs.append(a[0]))  # noqa: B023
        stock(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        hook.remove()
        other.remove()
        mine: list = []
        other = layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a: mine.append(a[0]))  # noqa: B023
        layer.self_attn(**inputs[0] | past(None))
        other.remove()
        for row in range(2):
            real = batch["attention_mask"][row].bool()
            s, t = (x[0][row, real].double().unflatten(-1, (4, 8)) for x in (mine, outputs))
            errors.append((((s - t) ** 2).sum((0, 2)) / (t**2).sum((0, 2))).mean() * real.sum())
    expected = sum(errors) / len(stock.model.layers) / units
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)  # float32


def test_attention_transfer_teaches_each_layer_by_itself(llama_teacher: str) -> None:
    """The gradient of a layer's mechanism does not depend on the mechanisms before it."""
    model = convert(LlamaForCausalLM.from_pretrained(llama_teacher), mechanism="linear").eval()
    module = StudentWithObjectives(model, objectives_of("causal_lm", attention_transfer=1.0), None)
    model.requires_grad_(False)
    mechanisms = [layer.self_attn.linear_attention for layer in model.model.layers]
    gradients = []
    for shift in (0.0, 0.5):
        with torch.no_grad():
            mechanisms[0].feature_map.query_projection += shift
        model.zero_grad()
        mechanisms[1].requires_grad_(True)
        module(ragged_batch("causal_lm", 0, 0), None, {"attention_transfer": torch.tensor(1.0)})[0].backward()
        gradients.append(mechanisms[1].feature_map.query_projection.grad.clone())
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)


def test_every_mechanism_learns_and_the_output_layer_is_not_computed(
    finetune, converted, llama_teacher: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)  # the model without its output layer is enough
    monkeypatch.setattr(run, "recall_probe", lambda *_: None)
    student = converted(llama_teacher, mechanism="linear", feature_map="exp")
    options = ["--model_name_or_path", student, "--task", "causal_lm", "--train_file", files / "train.jsonl"]
    options += ["--attention_transfer_weight", 1, "--trainable", "mechanism", "--max_length", 32]
    steps = finetune(*options, "--max_train_steps", 3, "--logging_steps", 1)
    names = changed(student, tmp_path / "out")
    assert all(".linear_attention." in name for name in names)
    assert {name.split(".")[2] for name in names} == {"0", "1"}
    assert {name for name in steps[0] if "layer_" in name} == {f"attention_transfer.layer_{layer}" for layer in (0, 1)}
