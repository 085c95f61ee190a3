"""The example of late chunking on a tiny converted model that was made longer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import torch
from checkpoints import convert_folder, save_twin
from transformers import AutoModel, AutoTokenizer


PATH = Path(__file__).resolve().parents[2] / "examples" / "late_chunking.py"


def test_chunks_of_one_pass(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("late_chunking", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    save_twin(tmp_path / "source", "bert", "AutoModel")
    out, text = tmp_path / "out", topics["in"][:400]
    convert_folder(tmp_path / "source", out, "--max_position_embeddings", 600, "--no_verify")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    model, tokenizer = AutoModel.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    chunks, embeddings = example.chunk_embeddings(model, tokenizer, text, 50)
    assert len(chunks) == len(embeddings) > 2
    assert "".join("".join(chunks).split()) == "".join(text.split())
    with torch.no_grad():  # the second chunk, after the special token at the start
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 51:101]
    torch.testing.assert_close(embeddings[1], torch.nn.functional.normalize(states.mean(0), dim=-1))
    words = ["--model", str(out), "--text", str(tmp_path / "text.txt"), "--query", "membership", "--top", "2"]
    example.main([*words, "--chunk_size", "50"])
    assert len(capsys.readouterr().out.splitlines()) == 2
