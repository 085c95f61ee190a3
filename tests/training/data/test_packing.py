"""Blocks, windows and what is scored."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from hf_linear_attention.training.data.batches import EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.packing import IGNORED, Documents, StreamWindows, shorten
from hf_linear_attention.training.evaluation.evaluator import Evaluator


@pytest.mark.parametrize("length", [1, 8, 9, 12, 97])
@pytest.mark.parametrize("max_length", [2, 8, 9])
@pytest.mark.parametrize("bos", [None, 1])
def test_windows_score_each_token_once_with_half_a_window_of_context(length, max_length, bos):
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
def test_evaluation_equals_the_protocol_token_by_token(llama_teacher):
    model = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    tokens = torch.randint(5, 300, (131,)).tolist()
    stream = Stream(StreamWindows(np.array(tokens), 16, 1), seed=0, shuffle=False)
    batches = loader(stream, EvaluationBatches(len(stream), 5, 0, 1), pad_token_id=0)
    figures = Evaluator(Accelerator(cpu=True), "causal_lm", None)(model, batches)
    expected = naive_nats(model, tokens, 16, 1)
    assert figures["eval_nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert figures["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert figures["eval_tokens"] == 131


def test_shorten_takes_the_first_examples():
    documents = Documents([np.arange(n) for n in (4, 3, 5, 6)], None)
    assert shorten(documents, 7).lengths.tolist() == [4, 3]
    assert shorten(documents, 8).lengths.tolist() == [4, 3, 5]
    assert shorten(documents, 99) is shorten(documents, None) is documents
