"""Blocks, windows and what is scored."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from recipes import recipe_of
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedModel,
)

from hf_linear_attention import convert
from hf_linear_attention.training.data.batches import EvaluationBatches, Stream, loader, pad
from hf_linear_attention.training.data.packing import IGNORED, Documents, PackedBlocks, StreamWindows, shorten
from hf_linear_attention.training.evaluation.evaluator import Evaluator
from hf_linear_attention.training.losses.objectives import StudentWithObjectives, build_objectives
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.run import keeps_documents_apart


@pytest.mark.parametrize("length", [1, 8, 9, 12, 97])
@pytest.mark.parametrize("max_length", [2, 8, 9])
@pytest.mark.parametrize("bos", [None, 1])
def test_windows_score_each_token_once_with_half_a_window_of_context(length: int, max_length: int, bos) -> None:
    stream = np.arange(100, 100 + length)
    windows = StreamWindows(stream, max_length, bos)
    scored = []
    for example in map(windows.__getitem__, range(len(windows))):
        ids, labels = example["input_ids"], example["labels"]
        assert len(ids) <= max_length
        assert bos is None or ids[0] == bos
        assert (np.diff(ids[int(bos is not None) :]) == 1).all()
        places = np.flatnonzero(labels != IGNORED)
        assert (labels[places] == ids[places]).all()
        scored += labels[places].tolist()
        if ids[int(bos is not None)] != 100:  # not the first window
            assert places[0] >= max_length - max_length // 2 - 1
    assert scored == stream.tolist()
    assert windows.lengths.sum() == length


def naive_nats(model: LlamaForCausalLM, tokens: list[int], context: int, bos: int) -> float:
    """Protocol S, one token at a time, straight from its definition."""
    total, end = 0.0, 0
    while end < len(tokens):
        new_end = min(len(tokens), end + (context - 1 if end == 0 else context // 2))
        window = [bos, *tokens[max(0, new_end - (context - 1)) : new_end]]
        logits = model(torch.tensor([window])).logits[0].double()
        for place in range(len(window) - (new_end - end), len(window)):
            total -= math.log(logits[place - 1].softmax(-1)[window[place]].item())
        end = new_end
    return total / len(tokens)


@torch.no_grad()
def test_evaluation_equals_the_protocol_token_by_token(llama_teacher: str) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    tokens = torch.randint(5, 300, (131,)).tolist()
    stream = Stream(StreamWindows(np.array(tokens), 16, 1), seed=0, shuffle=False)
    batches = loader(stream, EvaluationBatches(len(stream), 5, 0, 1), pad_token_id=0)
    figures = Evaluator(Accelerator(cpu=True), "causal_lm", None)(model, batches)
    expected = naive_nats(model, tokens, 16, 1)
    assert figures["eval_nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert figures["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert figures["eval_tokens"] == 131


def test_blocks_hold_the_whole_stream() -> None:
    blocks = PackedBlocks([np.arange(23)], 10)
    assert [example.tolist() for example in (blocks[i]["input_ids"] for i in range(len(blocks)))] == [
        list(range(10)),
        list(range(10, 20)),
        [20, 21, 22],
    ]
    assert blocks.lengths.tolist() == [10, 10, 3]
    assert PackedBlocks([np.arange(21)], 10).lengths.tolist() == [10, 10]  # a block of one token is left out


def test_shorten_takes_the_first_examples() -> None:
    documents = Documents([np.arange(n) for n in (4, 3, 5, 6)], None)
    assert shorten(documents, 7).lengths.tolist() == [4, 3]
    assert shorten(documents, 8).lengths.tolist() == [4, 3, 5]
    assert shorten(documents, 99) is shorten(documents, None) is documents


def test_packed_documents_start_anew() -> None:
    blocks = PackedBlocks([np.arange(10, 13), np.arange(20, 29), np.arange(30, 32)], 6)
    assert [blocks[i]["input_ids"].tolist() for i in range(3)] == [
        [10, 11, 12, 20, 21, 22],
        [23, 24, 25, 26, 27, 28],
        [30, 31],
    ]
    assert blocks[0]["labels"].tolist() == [10, 11, 12, IGNORED, 21, 22]
    assert blocks[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert "position_ids" not in blocks[1]
    batch = pad([{**blocks[index], "index": index} for index in (0, 2)], 0)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]
    single = blocks.unpacked()
    assert [single[i]["input_ids"].tolist() for i in range(len(single))] == [
        [10, 11, 12],
        [20, 21, 22, 23, 24, 25],
        [26, 27, 28],
        [30, 31],
    ]


def stock(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **sizes))
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2))


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"mechanism": "hybrid", "window_size": 4, "num_features": 8}),
        ("gpt2", {"mechanism": "linear"}),
        ("gpt2", None),
    ],
)
def test_packed_documents_cost_what_they_cost_apart(family: str, settings: dict[str, Any] | None) -> None:
    """Cross-entropy and KL to a teacher. Tolerance: float32 sums in another order, 3e-7 a term on some 5 nats."""
    student, teacher = stock(family, 0).eval(), stock(family, 1).eval()
    student = student if settings is None else convert(student, **settings).eval()
    assert keeps_documents_apart(student)
    random = np.random.default_rng(0)
    documents = [random.integers(5, 300, length) for length in (3, 17, 2, 9, 14)]
    recipe = recipe_of(task_loss_weight=1.0, logits_kl_weight=1.0)
    module = StudentWithObjectives(student, build_objectives(recipe), None)
    packed, apart = PackedBlocks(documents, 64), Documents(documents, "tokens")
    results = []
    for examples in (packed, apart):
        batch = pad([{**examples[index], "index": index} for index in range(len(examples))], 0)
        units = {name: objective.units(batch) for name, (_, objective) in module.objectives.items()}
        assert units == {"task_loss": 40, "logits_kl": 45}
        yours = Teacher(teacher, nullcontext, layers=None)(batch)
        results.append(module(batch, yours, {name: 1 / count for name, count in units.items()})[1])
    assert results[0]["task_loss"] > 1
    for name in units:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-6, atol=0)


def test_a_model_that_mixes_documents_is_found_out() -> None:
    class Deaf(LlamaForCausalLM):
        def forward(self, position_ids=None, **inputs):
            return super().forward(**inputs)

    assert not keeps_documents_apart(Deaf(LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1)))
    mpt = MptForCausalLM(MptConfig(vocab_size=300, d_model=32, n_heads=4, n_layers=1))
    assert not keeps_documents_apart(mpt)
