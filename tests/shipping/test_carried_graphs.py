"""The code of a checkpoint alone, without the package: compiled, exported, pickled and copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from matrix import stock_model

from hf_linear_attention import convert


SCRIPT = """
import copy, io, json, pickle, sys
sys.modules["hf_linear_attention"] = None
sys.path[:] = [path for path in sys.path if path not in ("", json.loads(sys.argv[3]))]
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import output_capturing

torch.set_grad_enabled(False)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


model = load(sys.argv[1])
ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0))
expected = model(ids).logits
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)


def run():
    cache = StaticCache(config=model.config, max_cache_len=64)
    prefill = compiled(ids[:, :-2], past_key_values=cache, use_cache=True).logits
    steps = [compiled(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in (38, 39)]
    return torch.cat([prefill, *steps], dim=1)


for _ in range(2):  # the second cache is another object
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
graphs = counters["stats"]["unique_graphs"]
# Graphs of any model depend on this table of transformers, which grows with every class of models.
classes = dict(output_capturing._CAN_RECORD_REGISTRY)
load(sys.argv[2])(ids)
output_capturing._CAN_RECORD_REGISTRY.clear()
output_capturing._CAN_RECORD_REGISTRY.update(classes)
torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
assert counters["stats"]["unique_graphs"] == graphs, (graphs, counters["stats"])
exported = torch.export.export(model, (ids,), {"use_cache": False})
torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
    assert torch.equal(again(ids).logits, expected)
assert type(model).__module__.startswith("transformers_modules")
print("done")
"""


def test_graphs_and_copies(tmp_path):
    stock = stock_model("llama", num_hidden_layers=1)
    for name, settings in (("hybrid", {"window_size": 4, "num_sinks": 2}), ("performer", {"num_features": 16})):
        convert(stock, mechanism=name, **settings).save_pretrained(tmp_path / name)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "hybrid"), str(tmp_path / "performer"), json.dumps(root)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.split()[-1:] == ["done"], done.stderr
