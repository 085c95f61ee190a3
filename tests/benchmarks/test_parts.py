"""What the benchmarks compute by themselves: data, formulas, rivals."""

from __future__ import annotations

import importlib
import json
import statistics
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import models, real, real_attention, rivals, speed
from benchmarks.papers import copy_task, recall_bytes, recall_tasks
from hf_linear_attention import convert
from hf_linear_attention.mechanisms.registry import MECHANISMS


def test_real_heads():
    """What stock MiniLM says its attention weights are."""
    from transformers import AutoModel, AutoTokenizer

    text, folder = real_attention.documentation(), real_attention.minilm_folder()
    (layers,) = real_attention.minilm_heads(text, 32, 1)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    (ids,) = real_attention.windows(AutoTokenizer.from_pretrained(folder), text, 32, 1)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for heads, weights in zip(layers, expected, strict=True):
        torch.testing.assert_close(heads.weights(), weights)


def test_every_rival_computes_what_its_row_says():
    calls, tensors = rivals.performer_pytorch(), rivals.attention_inputs(100)
    ours = rivals.mechanism_call(**speed.DECODERS["linear elu1"])
    query, key, value = (x.double() for x in tensors)
    weights = ((F.elu(query) + 1) @ (F.elu(key) + 1).transpose(-1, -2)).tril()
    exact = weights / weights.sum(-1, keepdim=True) @ value
    # float32 sums of 100 terms; performer-pytorch adds an epsilon of 1e-6 to the sum
    for call in (ours, rivals.in_torch(ours), *calls.values()):
        torch.testing.assert_close(call(*tensors).double(), exact, rtol=1e-4, atol=1e-4)
    weights = (query @ key.transpose(-1, -2) / 8).softmax(-1)
    torch.testing.assert_close(rivals.sdpa(*tensors, is_causal=False).double(), weights @ value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_delta_rule_is_the_one_of_transformers(rule):
    tensors = rivals.delta_inputs(70)
    state = torch.randn(1, rivals.DELTA_HEADS, rivals.DELTA_DIM, rivals.DELTA_DIM)
    theirs = rivals.transformers_delta(rule)
    exact = theirs(*(x.double() for x in tensors), state=state.double())
    for call in (theirs, rivals.our_delta, rivals.in_torch(rivals.our_delta)):
        for a, e in zip(call(*tensors, state=state), exact, strict=True):
            # float32 on both sides (transformers computes in it whatever it is given): sums of 128 terms, 70 times
            assert (a.double() - e.double()).abs().max() <= 1e-5 * e.abs().max()


def test_a_cell_has_the_median_the_quartiles_and_the_aim():
    assert speed.cell([2, 4, 9, 8, 6], [1, 2, 3, 2, 1], None) == "3.00 (2.00-4.00)"
    assert speed.cell([2, 4, 9, 8, 6], [1, 2, 3, 2, 1], 3) == "3.00 (2.00-4.00), aim 3"
    assert speed.cell([2, 4, 9, 8, 6], [1, 2, 3, 2, 1], 3.2) == "3.00 (2.00-4.00), aim 3.2 missed"
    assert speed.cell([0.994], [1], 1) == "0.994 (0.994-0.994) missed"


def test_layers_can_be_timed_without_attention():
    model = models.without_attention(convert(models.minilm())).eval()
    layer, hidden_states = model.encoder.layer[0].attention.self, torch.randn(2, 5, 384)
    assert torch.equal(layer(hidden_states)[0], layer.query(hidden_states))


def test_all_mechanisms_are_timed():
    assert {row["mechanism"] for row in (speed.ENCODERS | speed.DECODERS).values()} == set(MECHANISMS)


def test_copy_batch():
    """0 w 0 w, with a target for the second w alone."""
    tokens, target = copy_task.copy_batch(3, 8, torch.Generator().manual_seed(0))
    count = tokens.shape[1] // 2
    assert 4 <= count <= 8
    assert not tokens[:, [0, count + 1]].any()
    assert torch.equal(tokens[:, 1:count], tokens[:, count + 2 :])
    assert (target[:, : count + 1] == -100).all()
    assert torch.equal(target[:, count + 1 :], tokens[:, 1 : count + 1])


def documents(task: str, length: int) -> tuple[list[list[str]], list[int]]:
    tokens, counts = recall_tasks.TASKS[task](20, length, torch.Generator().manual_seed(0))
    assert tokens.shape == counts.shape == (20, length)
    words = [[recall_tasks.WORDS[token] for token in document] for document in tokens.tolist()]
    return words, counts[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("length", [9, 1025])
def test_mqar(length):
    """Pairs of different keys, then the same pairs in another order; the values of the second half count."""
    pairs = (length - 1) // 4
    words, counts = documents("mqar", length)
    assert counts == list(range(2 * pairs + 2, length, 2))
    for document in words:
        stored = list(zip(document[1 : 2 * pairs + 1 : 2], document[2 : 2 * pairs + 1 : 2]))
        asked = list(zip(document[2 * pairs + 1 :: 2], document[2 * pairs + 2 :: 2]))
        assert len(dict(stored)) == pairs == len(asked)
        assert sorted(stored) == sorted(asked)
    assert any(document[1] != document[2 * pairs + 1] for document in words)


@pytest.mark.parametrize(("length", "copied"), [(9, 2), (1025, 24)])
def test_copying(length, copied):
    """The symbols after the last GO, which are different, are those after the first."""
    words, counts = documents("copying", length)
    assert counts == list(range(length - copied, length))
    for document in words:
        first, symbols = document.index("GO"), document[-copied:]
        assert document[-copied - 1] == "GO"
        assert document[first + 1 : first + 1 + copied] == symbols
        assert len(set(symbols)) == copied


def test_files_give_the_tokens_back(tmp_path):
    """Blocks of joined documents are the documents, because all of them have the same length."""
    recall_tasks.write_documents(tmp_path / "rows.jsonl", recall_tasks.TASKS["mqar"], 33, 100, seed=3)
    expected, _ = recall_tasks.TASKS["mqar"](4, 33, torch.Generator().manual_seed(3))
    texts = [json.loads(line)["text"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    tokenizer = recall_tasks.tokenizer()
    assert [[tokenizer.bos_token_id, *ids] for ids in tokenizer(texts)["input_ids"]] == expected.tolist()


def test_the_answers_alone_are_right_or_not():
    tokens, counts = recall_tasks.mqar(6, 33, torch.Generator().manual_seed(0))

    class Oracle(torch.nn.Module):
        """It is right about answers, except in the first 3 documents, and wrong about all other tokens."""

        seen = 0

        def forward(self, inputs, use_cache):
            chosen = slice(self.seen, self.seen + len(inputs))
            right = counts[chosen, 1:] & (torch.arange(6)[chosen, None] >= 3)
            self.seen += len(inputs)
            found = torch.where(right, tokens[chosen, 1:], (tokens[chosen, 1:] + 1) % len(recall_tasks.WORDS))
            return SimpleNamespace(logits=torch.nn.functional.one_hot(found, len(recall_tasks.WORDS)).float())

    right = recall_tasks.is_right(Oracle(), (tokens, counts), tokens_at_once=70)
    assert right.tolist() == [[row >= 3] * 8 for row in range(6)]


@pytest.mark.benchmarks
def test_a_teacher_learns(monkeypatch):
    """From chance (1 of 64 values) to more than a third of the answers of two pairs, in seconds."""
    monkeypatch.setattr(recall_tasks, "STEP_TOKENS", 1152)
    torch.manual_seed(0)
    model = recall_tasks.new_teacher("llama", 9, 64, 2, 2)
    given = recall_tasks.mqar(200, 9, torch.Generator().manual_seed(1))
    assert recall_tasks.is_right(model, given).float().mean() < 0.1
    recall_tasks.train_teacher(model, "mqar", 0, most_steps=150)
    assert recall_tasks.is_right(model, given).float().mean() > 1 / 3  # to copy any value that was stored gives half
    assert recall_tasks.curriculum(100) == [9, 17, 33, 65, 100]


@pytest.mark.benchmarks
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_every_form_uses_the_bytes(share):
    """At most the budget, and the next size would exceed it; the bytes are those of the state that decoding keeps."""
    teacher = recall_tasks.new_teacher("llama", 129, 64, 2, 2)
    assert recall_bytes.cache_bytes(teacher) == 2 * 2 * 64 * 129 * 4  # layers, keys and values, width, tokens, float32
    budget = int(share * recall_bytes.cache_bytes(teacher))
    for name, form in recall_bytes.ALONE.items():
        settings = recall_bytes.sized(teacher, form, budget)
        # two exact keys are 6 % of the smallest one
        assert 0.93 * budget < recall_bytes.bytes_of(teacher, settings) <= budget, name
    assert recall_bytes.sized(teacher, recall_bytes.LINEAR, 100) is None


def test_what_keeps_softmax_counts_in_full():
    teacher = recall_tasks.new_teacher("llama", 129, 64, 2, 2)
    whole, settings = recall_bytes.cache_bytes(teacher), {"mechanism": "linear", "num_features": 8}
    state = recall_bytes.bytes_of(teacher, settings)
    assert recall_bytes.bytes_of(teacher, {**settings, "layers": [0]}) == (state + whole) / 2


@pytest.mark.parametrize("mechanism", ["window", "linear", "gated_delta"])
def test_without_memory_every_token_is_alone(mechanism):
    torch.manual_seed(0)
    student = convert(recall_tasks.new_teacher("llama", 33, 32, 2, 2), mechanism=mechanism).eval()
    tokens, _ = recall_tasks.mqar(2, 33, torch.Generator().manual_seed(0))
    before = student(tokens).logits
    with recall_bytes.memory_off(student):
        found = student(tokens, use_cache=False).logits
    # float32 in another order
    for place in (0, 1, 20):
        own = student(tokens[:, place : place + 1], position_ids=torch.tensor([[place]])).logits[:, 0]
        torch.testing.assert_close(found[:, place], own, rtol=1e-4, atol=1e-4)
    assert (before - found)[:, 20].abs().max() > 1e-2
    torch.testing.assert_close(student(tokens).logits, before)


def test_without_memory_hybrids_keep_their_window_and_what_is_softmax_stays():
    torch.manual_seed(0)
    teacher = recall_tasks.new_teacher("llama", 33, 32, 2, 2).eval()
    tokens, _ = recall_tasks.mqar(2, 33, torch.Generator().manual_seed(0))
    window = {"window_size": 3, "num_sinks": 2}
    for settings, left in (
        ({"mechanism": "hybrid", **window, "num_exact_keys": 4}, {"mechanism": "window", **window}),
        (
            {"mechanism": "linear", "layers": [1]},
            {"mechanism": "window", "window_size": 1, "num_sinks": 0, "layers": [1]},
        ),
    ):
        student = convert(teacher, **settings).eval()
        with recall_bytes.memory_off(student):
            found = student(tokens, use_cache=False).logits
        torch.testing.assert_close(found, convert(teacher, **left).eval()(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_model_of_the_demo_looks_up_what_stood_before():
    """Pages of held-out text; a window that reads half as far back as they stood knows as many as by chance."""
    demo = importlib.import_module("benchmarks.demo")
    tokenizer = AutoTokenizer.from_pretrained(demo.OWN_MODEL)
    text = demo.with_notes(demo.prose(held_out=True)[:1500], 0)
    ids, pages = demo.look_ups(text, tokenizer)
    assert all(ids[first:end] == ids[first - distance : end - distance] for first, end, distance in pages)
    model = AutoModelForCausalLM.from_pretrained(demo.OWN_MODEL, dtype=torch.float32).eval()
    window = convert(model, mechanism="window", window_size=128)
    (_, *far), (near, *none) = (demo.looked_up(each, tokenizer, text, 512) for each in (model, window))
    assert min(map(len, far)) >= 20
    assert all(statistics.fmean(part) > 0.9 for part in (*far, near))
    assert all(statistics.fmean(part) < 0.2 for part in none)


def test_key_tokens_need_the_context():
    nats = {
        "original": torch.tensor([1.0, 1.0, 3.0, 0.5]),
        "window of 9 tokens": torch.tensor([4.0, 2.9, 9.0, 2.6]),
        "student": torch.tensor([2.0, 1.0, 8.0, 1.0]),
    }
    kl = {name: torch.zeros(4) for name in nats}
    rows = real.table({"position": torch.arange(4), "nats": nats, "kl": kl, "found": defaultdict(dict)}, 4)
    assert [row["key tokens"] for row in rows] == [0.75, pytest.approx(3.3), 1.5]


def test_the_interval_of_a_gap_is_that_of_blocks_of_tokens():
    """Of one student a quarter is left everywhere; of the other on average, but in each block all or nothing."""
    original, window, blocks = torch.zeros(64 * 100), torch.ones(64 * 100), (torch.rand(100) < 0.25).float()
    same = real.gap_left(window / 4, window, original)
    assert same == {name: pytest.approx(0.25) for name in ("gap", "low", "high")}
    found = real.gap_left(blocks.repeat_interleave(64), window, original)
    share, error = blocks.mean().item(), blocks.std().item() / 10
    assert found["gap"] == pytest.approx(share)
    # Quantiles of 1,000 draws are known to some .15 of the standard error.
    assert found["low"] == pytest.approx(share - 1.96 * error, abs=0.3 * error)
    assert found["high"] == pytest.approx(share + 1.96 * error, abs=0.3 * error)
