"""What the optimizer is given at each step: the learning rate of the schedule, and gradients that are clipped.

At the end, transformers' own Trainer, on the same model, data and settings, ends where our loop does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import losses
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_linear_attention.training.data.batches import pad, stream_of
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.loop import TrainingLoop
from hf_linear_attention.training.recipe_parser import parse_options


STEPS = 8
PEAK = 1e-3
Steps = list[tuple[list[float], Tensor]]


@pytest.fixture
def steps(monkeypatch):
    """Of each call of the optimizer: the rates of its groups, and all gradients, flat."""
    found: Steps = []
    step = torch.optim.AdamW.step

    def recorded(self: torch.optim.AdamW, *arguments: Any, **keywords: Any) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradient = torch.cat([p.grad.detach().flatten().double() for p in parameters])
        found.append(([group["lr"] for group in self.param_groups], gradient))
        return step(self, *arguments, **keywords)

    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    return found


@pytest.fixture
def options(llama, files):
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_steps", STEPS]
    rate = ["--learning_rate", PEAK, "--logging_steps", 1]
    return ["--model_name_or_path", llama, "--task", "causal_lm", *data, *rate]


def test_only_steps_compute_without_denormal_numbers(options, finetune, monkeypatch):
    """They slow products down; other code of the process keeps them."""
    found, step = [], TrainingLoop._step
    tiny = torch.tensor(1e-40)
    monkeypatch.setattr(TrainingLoop, "_step", lambda loop, window: found.append(float(tiny * 1)) or step(loop, window))
    finetune(*options)
    assert found == [0.0] * STEPS
    assert float(tiny * 1) > 0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (["--warmup_ratio", 0.2], [0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),  # 1.6 steps are 2
        (["--warmup_ratio", 0.5, "--lr_scheduler_type", "constant_with_warmup"], [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]),
        (["--lr_scheduler_type", "constant"], [1] * STEPS),
    ],
)
def test_the_rates_rise_over_the_warm_up(schedule, expected, finetune, converted, options, llama, steps):
    """The rate of every step, as the optimizer has it and as it is logged; that of the mechanisms goes with it."""
    student = ["--model_name_or_path", converted(llama, mechanism="linear"), "--mechanism_learning_rate", 10 * PEAK]
    events = losses(finetune(*options, *schedule, *student))
    for name, peak in (("learning_rate", PEAK), ("mechanism_learning_rate", 10 * PEAK)):
        assert [event[name] for event in events] == pytest.approx([peak * share for share in expected])
    for (groups, _), share in zip(steps, expected, strict=True):
        assert sorted({round(rate, 12) for rate in groups}) == pytest.approx(sorted({PEAK * share, 10 * PEAK * share}))


@pytest.mark.parametrize("limit", [0.05, 0])
def test_gradients_are_clipped_to_the_norm(limit, finetune, options, steps):
    """To the limit and not below, all by one factor; the norm that is logged is the one before. 0 is no limit."""
    plain = ["--max_train_steps", 1, "--gradient_accumulation_steps", 2]
    (event,) = losses(finetune(*options, *plain, "--max_grad_norm", limit))
    (clipped,) = (gradient for _, gradient in steps)
    steps.clear()
    finetune(*options, *plain, "--max_grad_norm", 1e9, "--overwrite_output_dir")
    (whole,) = (gradient for _, gradient in steps)
    assert whole.norm() > 0.5
    assert event["grad_norm"] == pytest.approx(whole.norm().item(), rel=1e-4)
    factor = 0.05 / (whole.norm() + 1e-6) if limit == 0.05 else 1.0  # torch's own guard against a norm of 0
    torch.testing.assert_close(clipped, whole * factor, rtol=1e-4, atol=1e-9)


BATCH, ACCUMULATION = 4, 2


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


def test_the_stock_trainer_reaches_the_same_loss(finetune, converted, llama_teacher, files, tmp_path):
    """Packed documents, a linear schedule, clipped gradients, ragged last blocks, losses as means of two steps.

    Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; a loss averaged in another way or a
    rate that is a step late would be off in the third digit.
    """
    source = converted(llama_teacher, mechanism="hybrid", window_size=8, num_features=8)
    tokenizer = AutoTokenizer.from_pretrained(source)
    words = ["--model_name_or_path", source, "--task", "causal_lm", "--train_file", files / "train.jsonl"]
    words += ["--max_length", 32, "--learning_rate", "1e-3", "--max_train_steps", STEPS, "--logging_steps", 2]
    words += ["--per_device_train_batch_size", BATCH, "--gradient_accumulation_steps", ACCUMULATION]
    events = losses(finetune(*words, output_dir=tmp_path / "ours"))

    recipe = parse_options([*map(str, words), "--output_dir", str(tmp_path / "unused")])
    stream = stream_of(load_data(recipe, tokenizer).train, recipe, tokenizer, shuffle=True)
    settings = TrainingArguments(
        str(tmp_path / "theirs"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=1e-3,
        gradient_accumulation_steps=ACCUMULATION, logging_steps=2, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        args=settings,
        train_dataset=[stream[position] for position in range(STEPS * BATCH * ACCUMULATION)],
        data_collator=lambda rows: {name: pad(rows, 0)[name] for name in ("input_ids", "labels")},
    )
    trainer.train()
    theirs = [event["loss"] for event in trainer.state.log_history if "loss" in event]
    assert [event["loss"] for event in events] == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0]
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    state = trainer.model.state_dict()
    assert max((state[name] - value).abs().max().item() for name, value in weights.items()) < 1e-4
