"""lm-evaluation-harness on a converted folder, by its own command line, against our own metric."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attention.training.evaluation.evaluator import Evaluator


pytest.importorskip("lm_eval", reason="needs the extra `clients`")
pytestmark = pytest.mark.clients

# Within the 64 positions of the twin: longer ones are cut into windows by the harness.
TEXTS = [topics[name][100 : 105 + 2 * place] for place, name in enumerate(sorted(topics)[:12])]
TASK = """
task: local_text
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""


def harness(folder, work) -> float:
    (work / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (work / "tasks").mkdir()
    (work / "tasks" / "local_text.yaml").write_text(TASK.format(data=work / "texts.jsonl"))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "local_text", "--include_path"]
    command += [str(work / "tasks"), "--device", "cpu", "--batch_size", "4", "--output_path", str(work / "results")]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32"]
    # Away from this repository: the code of the checkpoint must do.
    subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
    (results,) = (work / "results").rglob("results_*.json")
    return json.loads(results.read_text())["results"]["local_text"]["bits_per_byte,none"]


def ours(folder) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    def batches():
        for index, text in enumerate(TEXTS):
            ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
            assert ids.shape[1] <= 64
            mask = torch.ones_like(ids)
            yield {"index": torch.tensor([index]), "input_ids": ids, "attention_mask": mask, "labels": ids}

    figures = Evaluator(Accelerator(cpu=True), "causal_lm", None)(model, batches())
    nats = figures["eval_nats_per_token"] * figures["eval_tokens"]
    return nats / sum(len(text.encode()) for text in TEXTS) / math.log(2)


def test_the_harness_finds_our_number(folders, tmp_path):
    # float32 logits of padded batches against those of single texts
    assert harness(folders["llama"], tmp_path) == pytest.approx(ours(folders["llama"]), rel=1e-5)
