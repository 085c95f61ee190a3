"""Padding is in no loss, the losses are what their names say, and what is stepped with is their weighted sum."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
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
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.objectives import (
    OBJECTIVES,
    AttentionTransfer,
    StudentWithObjectives,
    build_objectives,
    relative_head_error,
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


@torch.no_grad()
def with_small_far_share(student: Any, nats: float) -> Any:
    for path, parameter in student.named_parameters():
        parameter -= nats * ("far_log_scale" in path)
    return student


# Shares of far keys are those of causal attention.
PADDED = [
    (task, name)
    for task in ("masked_lm", "causal_lm")
    for name in OBJECTIVES
    if (task, name) != ("masked_lm", "far_share")
]


@pytest.mark.parametrize(("task", "name"), PADDED)
def test_padding_changes_neither_loss_nor_units(task, name, request):
    model_class, fixtures = {
        "masked_lm": (BertForMaskedLM, ("masked", "masked_teacher")),
        "causal_lm": (LlamaForCausalLM, ("llama", "llama_teacher")),
    }[task]
    student, teacher = (model_class.from_pretrained(request.getfixturevalue(f)).eval() for f in fixtures)
    if name == "attention_transfer":
        student = convert(teacher, mechanism="linear")
    if name == "far_share":
        student = with_small_far_share(convert(teacher, mechanism="hybrid", window_size=3, num_sinks=1), 10)
    objectives = objectives_of(task, **{name: 1.0})
    module = StudentWithObjectives(student, objectives, "all")
    watcher = Teacher(teacher.train(), nullcontext, layers="all")
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
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


OBSERVING = ("attention_transfer", "far_share")
DISTILLING = tuple(name for name in OBJECTIVES if name not in OBSERVING)


@pytest.mark.parametrize("names", [DISTILLING, OBSERVING], ids=["distilling", "observing"])
def test_the_gradient_is_the_weighted_sum_of_the_gradients(names, llama, llama_teacher):
    student = LlamaForCausalLM.from_pretrained(llama).eval()
    if names is OBSERVING:
        student = with_small_far_share(convert(student, mechanism="hybrid", window_size=3, num_sinks=1), 6)
    teacher = Teacher(LlamaForCausalLM.from_pretrained(llama_teacher).eval(), nullcontext, layers="all")
    batch = ragged_batch("causal_lm", 0, 0)

    def gradient_of(**weights: float) -> tuple[Tensor, Tensor]:
        objectives = objectives_of("causal_lm", **weights)
        assert set(objectives) == set(weights)
        scales = {name: 1 / objective.units(batch) for name, (_, objective) in objectives.items()}
        student.zero_grad()
        loss, _ = StudentWithObjectives(student, objectives, "all")(batch, teacher(batch), scales)
        loss.backward()
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in student.parameters()]
        return loss.detach().double(), torch.cat([gradient.flatten().double() for gradient in flat])

    weights = dict(zip(names, (30.0, 0.25, 4.0, 8.0)))
    apart = {name: gradient_of(**{name: 1.0}) for name in names}
    assert all(gradient.norm() > 1e-4 for _, gradient in apart.values())
    loss, gradient = gradient_of(**weights)
    expected_loss, expected = (sum(weights[name] * apart[name][part] for name in names) for part in (0, 1))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()  # float32 sums in another order
    # the test can fail: each weight moves the sum by more than that
    for name, (_, own) in apart.items():
        assert abs(weights[name] - 1) * own.norm() > 1e-4 * expected.norm()


def test_every_layer_is_differentiated_before_the_next_one(llama_teacher, monkeypatch):
    """So no activation of a layer outlives it; the gradients are those of the whole loss."""
    settings = {"mechanism": "hybrid", "window_size": 2, "num_sinks": 1, "num_features": 8, "num_exact_keys": 1}
    student = convert(LlamaForCausalLM.from_pretrained(llama_teacher).eval(), **settings)
    student.requires_grad_(False)
    learned = [p for name, p in student.named_parameters() if "linear_attention" in name and "score_" not in name]
    trained = [parameter.requires_grad_() for parameter in learned]
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


def test_queries_for_which_all_keys_are_exact_have_no_error_and_no_gradient(llama_teacher):
    """So attention transfer learns from the others alone, whatever it counts."""
    sizes = {"window_size": 2, "num_sinks": 1, "num_exact_keys": 3}
    student = convert(LlamaForCausalLM.from_pretrained(llama_teacher).double().eval(), mechanism="hybrid", **sizes)
    learned = [p for n, p in student.named_parameters() if "linear_attention" in n and "score_" not in n]
    ids = torch.randint(5, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    seen: list[ObservedAttention] = []
    with observe_attention(student, seen.append):
        student(input_ids=ids)
    weights = torch.arange(9) < sum(sizes.values())
    for mask, is_exact in ((weights, True), (~weights, False)):
        error = sum(relative_head_error(one, mask[None]).sum() for one in seen)
        gradients = torch.autograd.grad(error, learned, retain_graph=True)
        assert (error.item() < 1e-25) == is_exact  # in float64
        assert all((gradient.norm() < 1e-14) == is_exact for gradient in gradients)


def test_attention_transfer_compares_the_heads_on_the_softmax_model(llama_teacher):
    """Independent form, from hooks on the stock model, whose states every layer reads: the mean over layers, heads, and
    texts by their tokens."""
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


def test_every_mechanism_learns_and_the_output_layer_is_not_computed(
    finetune, converted, llama_teacher, files, tmp_path, monkeypatch
):
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


def naive(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    p = (teacher.double() / temperature).softmax(-1)
    q = (student.double() / temperature).softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_values_and_gradients_equal_the_definition(temperature):
    student = torch.randn(2, 11, 7, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(2, 11, 7, dtype=torch.float64)
    value, expected = divergence(student, teacher, temperature), naive(student, teacher, temperature)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_half_precision_logits_are_compared_in_float32():
    """The log-softmax of bfloat16 logits in bfloat16 would be off by 1e-2."""
    student = (8 * torch.randn(64, 500)).bfloat16().requires_grad_()
    teacher = (8 * torch.randn(64, 500)).bfloat16()
    value = divergence(student, teacher)
    torch.testing.assert_close(value.double(), naive(student, teacher, 1.0), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_excluded_teacher_tokens_count_nothing():
    teacher = torch.tensor([[1.0, float("-inf"), 0.0]], dtype=torch.float64)
    student = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    value = divergence(student, teacher).sum()
    p, log_q = teacher.softmax(-1)[0, [0, 2]], student.log_softmax(-1)[0, [0, 2]]
    torch.testing.assert_close(value, (p * (p.log() - log_q)).sum())
    (gradient,) = torch.autograd.grad(value, student)
    torch.testing.assert_close(gradient, student.softmax(-1) - teacher.softmax(-1))
