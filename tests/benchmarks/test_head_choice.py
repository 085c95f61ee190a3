"""head_choice.py: the gates are what they are said to be, and a quick run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from checkpoints import save_twin
from transformers import AutoModelForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import set_softmax_heads


@pytest.fixture
def benchmark(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    from benchmarks import head_choice

    return head_choice


@pytest.mark.parametrize(("gate", "kept"), [(0.0, []), (1.0, "all")])
def test_a_gate_chooses_between_both(benchmark, tmp_path, gate, kept):
    """0 is the mechanism and 1 is softmax, in every head."""
    save_twin(tmp_path / "llama", "llama")
    model = convert(AutoModelForCausalLM.from_pretrained(tmp_path / "llama"), mechanism="linear").eval()
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    ids = torch.arange(40).view(2, 20) % model.config.vocab_size
    with torch.no_grad():
        with benchmark.gated(model, torch.full((layers, heads), gate)):
            found = model(ids).logits
        set_softmax_heads(model, [[x, y] for x in range(layers) for y in range(heads)] if kept else [])
        expected = model(ids).logits
        set_softmax_heads(model, [])
        assert (gate == 1) == (not torch.equal(model(ids).logits, expected))
    # Both are float32 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_quick(benchmark, tmp_path):
    save_twin(tmp_path / "llama", "llama")
    lines = [json.dumps({"text": topics[name]}) for name in sorted(topics)[:20]]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    words = ["--quick", "--teacher", tmp_path / "llama", "--text_file", tmp_path / "text.jsonl", "--heads", "2"]
    benchmark.main([*map(str, words), "--output_dir", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out" / "head_choice.json").read_text())["choices"]
    assert set(found) == {"ablation", "gates, penalty 1", "random", "none", "all"}
    assert all(len(found[name]["heads"].split()) == 2 for name in ("ablation", "gates, penalty 1"))
    assert found["none"]["text"] != found["all"]["text"]
