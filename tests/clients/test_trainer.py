"""The stock Trainer on converted models."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


pytestmark = pytest.mark.clients


def train(folder, output, **options):
    set_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    arguments = TrainingArguments(
        str(output), max_steps=6, save_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
        gradient_checkpointing=True, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    ids = torch.randint(3, 64, (24, 15), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train(**options)
    return load_file(output / "checkpoint-6" / "model.safetensors"), trainer.state.log_history


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(folders, tmp_path):
    whole, history = train(folders["llama"], tmp_path / "whole")
    resumed, resumed_history = train(
        folders["llama"], tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses, resumed_losses = ([entry["loss"] for entry in h if "loss" in entry] for h in (history, resumed_history))
    assert resumed_losses == losses
    assert losses[-1] < losses[0]
