"""Whether other engines write what transformers writes, from folders of stock architectures (greedy, on a CPU).

    python -m benchmarks.engines --folders OUT --pythons vllm=VLLM/bin/python mlx_lm=MLX/bin/python

Each engine runs in an environment of its own, by the python given for it, and continues the same prompts. The reference
is `generate` of this environment in float32. Numbers are equal tokens before the first other one, a number for each
prompt; an engine that fails shows its error. `--dtypes vllm=bfloat16` is for engines that do not compute in float32.

llama_cpp needs `--converter FOLDER`, with convert_hf_to_gguf.py, and what that imports; the source of
llama-cpp-python has it in vendor/llama.cpp. openvino needs optimum-intel.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


TOKENS = 40
TEXTS = ["Once upon a time", "The little dog saw a big red ball and", "Lily"]
Ids = list[list[int]]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
ENVIRONMENT["VLLM_PLUGINS"] = ""  # vLLM's own model, not the plugin of this package
KINDS = {"float32": ("f32", "fp32"), "bfloat16": ("bf16", "bf16")}
# llama.cpp's converter refuses a tokenizer whose hash it does not know; ids need none.
WITHOUT_WORDS = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1)); from conversion.base import TextModel
def none(self): self._set_vocab_none(); self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])
TextModel.set_vocab = TextModel._set_vocab_gpt2 = TextModel._set_vocab_sentencepiece = none
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def generated(model: Any, prompts: Ids) -> Ids:
    """What `generate` of a model of transformers, or one that looks like it, writes."""
    import torch

    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]


def transformers(job: Any) -> Ids:
    """Of another version, or in another dtype."""
    from transformers import AutoModelForCausalLM

    return generated(AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.dtype).eval(), job.prompts)


def vllm(job: Any) -> Ids:
    """All prompts at once."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, job.prompts)) + TOKENS
    options = {"enforce_eager": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 256 << 20}
    engine = LLM(job.folder, dtype=job.dtype, max_model_len=longest, **options)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    found = engine.generate([{"prompt_token_ids": ids} for ids in job.prompts], sampling, use_tqdm=False)
    return [list(row.outputs[0].token_ids) for row in found]


def llama_cpp(job: Any) -> Ids:
    """A GGUF file by llama.cpp's converter, read by llama-cpp-python."""
    from llama_cpp import Llama

    words = [sys.executable, "-c", WITHOUT_WORDS, job.converter, job.folder, "--outfile", f"{job.scratch}/model.gguf"]
    # Without --no-mtp it asserts that a Qwen3.5 predicts several tokens at once.
    mtp = ["--no-mtp"] if "Qwen3_5" in Path(job.folder, "config.json").read_text(encoding="utf-8") else []
    subprocess.run([*words, "--outtype", KINDS[job.dtype][0], *mtp], check=True)
    engine, found = Llama(f"{job.scratch}/model.gguf", n_ctx=max(map(len, job.prompts)) + TOKENS, n_threads=1), []
    for ids in job.prompts:
        engine.reset()
        found.append(list(itertools.islice(engine.generate(ids, temp=0.0, repeat_penalty=1.0), TOKENS)))
    return found


def mlx_lm(job: Any) -> Ids:
    """On MLX's CPU where there is no Apple GPU (`pip install "mlx[cpu]" mlx-lm`)."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, _ = load(job.folder)
    model.set_dtype(getattr(mx, job.dtype))
    return [[int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=TOKENS)] for ids in job.prompts]


def openvino(job: Any) -> Ids:
    """Exported and run by optimum-intel."""
    from optimum.intel import OVModelForCausalLM

    options = {"INFERENCE_PRECISION_HINT": KINDS[job.dtype][0], "INFERENCE_NUM_THREADS": 1}
    return generated(OVModelForCausalLM.from_pretrained(job.folder, export=True, ov_config=options), job.prompts)


def onnxruntime_genai(job: Any) -> Ids:
    """A graph by the library's own builder."""
    import onnxruntime_genai as library

    words = ["-i", job.folder, "-o", job.scratch, "-c", job.scratch, "-p", KINDS[job.dtype][1], "-e", "cpu"]
    subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words], check=True)
    model, found = library.Model(job.scratch), []
    for ids in job.prompts:
        options, length = library.GeneratorParams(model), len(ids) + TOKENS
        options.set_search_options(do_sample=False, min_length=length, max_length=length)
        writer = library.Generator(model, options)
        writer.append_tokens(ids)
        while not writer.is_done():
            writer.generate_next_token()
        found.append(writer.get_sequence(0)[len(ids) :].tolist())
    return found


ENGINES = {run.__name__: run for run in (transformers, vllm, llama_cpp, mlx_lm, openvino, onnxruntime_genai)}
"""What runs in an engine's environment, by the name of its library there."""


def work(name: str, folder: str, dtype: str, converter: str) -> None:
    """In an engine's environment: prompts from standard input, version and continuations as the last line."""
    job = SimpleNamespace(folder=folder, dtype=dtype, converter=converter, prompts=json.load(sys.stdin))
    with tempfile.TemporaryDirectory() as job.scratch:
        found = ENGINES[name](job)
    print("\n" + json.dumps([importlib.import_module(name).__version__, found]))


def row(name: str, python: str, folder: str, dtype: str, converter: str, prompts: Ids, expected: Ids) -> list[Any]:
    """An engine's row of a folder's table."""
    words = [python, "-P", __file__, name, folder, dtype, converter]  # -P: files of this folder hide no library
    options = {"input": json.dumps(prompts), "env": os.environ | ENVIRONMENT, "capture_output": True, "text": True}
    done = subprocess.run(words, **options)
    if done.returncode:
        errors = re.findall("^(?!.*CalledProcess).*(?:Error|error load|ASSERT).*$", done.stderr, re.MULTILINE)
        return [name, None, dtype, (errors or [done.stderr])[-1].strip()[:160]]
    found, tokens = json.loads(done.stdout.splitlines()[-1])
    equal = [sum(itertools.takewhile(bool, map(int.__eq__, *both))) for both in zip(expected, tokens)]
    return [name, found, dtype, f"{', '.join(map(str, equal))} of {TOKENS}"]


def main(argv: Sequence[str] | None = None) -> None:
    """See the docstring of the module."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.common import parse, save, table

    given = {"folders": [""], "pythons": [f"transformers={sys.executable}"], "dtypes": [""], "prompts": TEXTS}
    arguments = parse(__doc__, argv, {"prompts": TEXTS[:1]}, converter="", **given)
    if not all(arguments.folders):
        raise SystemExit("--folders: name the folders of stock models")
    dtypes, tables = dict(word.split("=", 1) for word in arguments.dtypes if word), []
    for folder in arguments.folders:
        prompts = AutoTokenizer.from_pretrained(folder)(arguments.prompts)["input_ids"]
        expected = generated(AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval(), prompts)
        rows = []
        for name, python in (word.split("=", 1) for word in arguments.pythons):
            dtype = dtypes.get(name, "float32")
            rows.append(row(name, python, folder, dtype, arguments.converter, prompts, expected))
        tables.append(table([Path(folder).name, "version", "dtype", "equal tokens, or the error"], rows))
    save(arguments, "engines", tables)


if __name__ == "__main__":
    if sys.flags.safe_path:
        work(*sys.argv[1:])
    else:
        main()
