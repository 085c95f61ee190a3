"""The stock Trainer on converted models."""

from __future__ import annotations

import pytest
import torch
from matrix import sample_inputs, stock_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf_linear_attention import convert


pytestmark = pytest.mark.clients

# Dropout on, where the family has it: what is computed twice must draw the same.
MODELS = {
    "hybrid": ("llama", {"mechanism": "hybrid", "window_size": 4, "num_features": 16}),
    # Not GPT-2: stock GPT-2 rounds the gradients of its softmax layers differently when it recomputes them.
    "softmax between": ("llama", {"mechanism": "linear", "num_features": 16, "layers": [0, 2]}),
    "redrawn": ("llama", {"mechanism": "performer", "num_features": 16, "redraw_interval": 1}),
    "linformer": ("bert", {"mechanism": "linformer", "projection_size": 8}),
}


def loss_and_gradients(model, checkpointing):
    ids = sample_inputs("llama")["input_ids"]
    if checkpointing:
        model.gradient_checkpointing_enable()
    set_seed(1)
    for _ in range(2):  # the second forward is the one that redraws
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing_changes_no_bit(name):
    family, settings = MODELS[name]
    source = stock_model(family)
    loss, gradients = loss_and_gradients(convert(source, **settings), checkpointing=False)
    again, recomputed = loss_and_gradients(convert(source, **settings), checkpointing=True)
    assert torch.equal(again, loss)
    assert gradients.keys() == recomputed.keys()
    assert any(".linear_attention." in name for name in gradients) or name == "redrawn"  # performer learns nothing
    assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)


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
