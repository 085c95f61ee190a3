"""transformers' own Trainer, on the same model, data and settings, ends where our loop does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from hf_linear_attention import convert
from hf_linear_attention.training.data.batches import pad, stream_of
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.recipe_parser import parse_options


STEPS, BATCH = 8, 4


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)


@pytest.mark.parametrize("accumulation", [2])
def test_the_stock_trainer_reaches_the_same_loss(
    accumulation: int, finetune, llama_teacher: str, files: Path, tmp_path: Path
) -> None:
    """Packed documents, a linear schedule, clipped gradients, ragged last blocks.

    Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; a loss averaged in another way or a
    rate that is a step late would be off in the third digit.
    """
    source = tmp_path / "source"
    convert(llama_teacher, mechanism="hybrid", window_size=8, num_features=8).save_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(llama_teacher)
    tokenizer.save_pretrained(source)
    words = ["--model_name_or_path", source, "--task", "causal_lm", "--train_file", files / "train.jsonl"]
    words += ["--max_length", 32, "--learning_rate", "1e-3", "--max_train_steps", STEPS, "--logging_steps", 1]
    words += ["--per_device_train_batch_size", BATCH, "--gradient_accumulation_steps", accumulation]
    events = finetune(*words, output_dir=tmp_path / "ours")

    recipe = parse_options([*map(str, words), "--output_dir", str(tmp_path / "unused")])
    stream = stream_of(load_data(recipe, tokenizer).train, recipe, tokenizer, shuffle=True)
    settings = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    # without a mask, transformers sees the packed documents by their positions; a full block needs none
    names = ("input_ids", "labels", "position_ids")
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        args=settings,
        train_dataset=[stream[position] for position in range(STEPS * BATCH * accumulation)],
        data_collator=lambda rows: {name: value for name, value in pad(rows, 0).items() if name in names},
    )
    trainer.train()
    theirs = [event["loss"] for event in trainer.state.log_history if "loss" in event]
    assert [event["loss"] for event in events] == pytest.approx(theirs, rel=1e-4)
    assert theirs[-1] < theirs[0]
    weights = load_file(tmp_path / "ours" / "model.safetensors")
    state = trainer.model.state_dict()
    assert max((state[name] - value).abs().max().item() for name, value in weights.items()) < 1e-4
