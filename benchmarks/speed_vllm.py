"""Converted models in vLLM against vLLM's own softmax and against `generate` (one thread, CPU time).

    python -m benchmarks.speed_vllm
    python -m benchmarks.speed_vllm --model SRC --students OUT... --dtype bfloat16     those, and no `generate`

Tokens per CPU second of the process, of a Llama with 16 million random weights: prompts of one length are read together
(prefill), then all of them are continued (decode). The engines are processes of their own, all alive at once, that take
turns in every round; `generate` runs in this process. Medians over rounds and their range; ratios are medians of the
rounds' ratios. Needs an environment with vLLM. About a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StoppingCriteria

from benchmarks.common import Table, Times, median_ratio, parse, save, table
from hf_linear_attention import convert


SOFTMAX = "softmax"
SETTINGS: dict[str, dict[str, Any]] = {"hybrid": {"mechanism": "hybrid"}, "linear": {"mechanism": "linear"}}
CASES = [(64, 64), (512, 8), (4096, 4), (16384, 2)]  # tokens of a prompt, prompts
LONG_CASES = [(512, 1), (8192, 4), (16384, 2)]  # of a given model
QUICK_CASES = [(16, 2), (32, 1)]
NEW_TOKENS = 24  # for each prompt
VOCABULARY = 8192
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 3}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process whose CPU time is measured
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SPAWN = multiprocessing.get_context("spawn")
Marks = list[float]
"""CPU seconds of a process: before the prompts, after they are read, and after each further token of all of them."""


def save_models(folder: Path) -> dict[str, Path]:
    """The same random Llama with softmax and converted, each in a folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, intermediate_size=1024, head_dim=64, max_position_embeddings=32768, **SIZES
    )
    LlamaForCausalLM(config).save_pretrained(folder / SOFTMAX)
    for name, settings in SETTINGS.items():
        convert(LlamaForCausalLM.from_pretrained(folder / SOFTMAX), **settings).save_pretrained(folder / name)
    return {name: folder / name for name in (SOFTMAX, *SETTINGS)}


def random_prompts(length: int, count: int) -> list[list[int]]:
    """Prompts that all processes make alike."""
    draw = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (count, length), generator=draw).tolist()


class Clock(StoppingCriteria):
    """Notes the CPU time when `generate` begins and after each token; stops nothing."""

    def __init__(self) -> None:
        self.marks: Marks = [time.process_time()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.marks.append(time.process_time())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    """`generate` in this process."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, length: int, count: int) -> Marks:
        """Continue prompts."""
        clock, prompts = Clock(), torch.tensor(random_prompts(length, count))
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            self.model.generate(prompts, attention_mask=torch.ones_like(prompts), stopping_criteria=[clock], **options)
        return clock.marks


class Worker:
    """vLLM's engine in a process of its own, which answers a question at a time; `recv` fails if it has died."""

    def __init__(self, folder: Path, cases: list[tuple[int, int]], dtype: str) -> None:
        self.pipe, end = SPAWN.Pipe()
        SPAWN.Process(target=work, args=(end, str(folder), cases, dtype), daemon=True).start()
        end.close()

    def run(self, length: int, count: int) -> Marks:
        """Continue prompts; for no prompts, the bytes of a cache of this length."""
        self.pipe.send((length, count))
        return self.pipe.recv()


def work(pipe: Any, folder: str, cases: list[tuple[int, int]], dtype: str) -> None:
    """What the process of a `Worker` does."""
    from vllm import LLM

    torch.set_num_threads(1)
    longest, most = max(length for length, _ in cases) + NEW_TOKENS, max(count for _, count in cases)
    options = {"max_model_len": longest, "max_num_seqs": most, "max_num_batched_tokens": 2048}
    options |= {"dtype": dtype, "enforce_eager": True, "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    engine: Any = LLM(folder, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30, **options).llm_engine
    with contextlib.suppress(EOFError):  # when there are no more questions
        for number in itertools.count():
            length, count = pipe.recv()
            pipe.send(step_through(engine, number, length, count) if count else bytes_of_cache(engine, length))


def step_through(engine: Any, number: int, length: int, count: int) -> Marks:
    """Continue prompts, step by step; the steps in which not all of them write are one mark."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    for row, prompt in enumerate(random_prompts(length, count)):
        engine.add_request(f"{number}-{row}", {"prompt_token_ids": prompt}, sampling)
    marks, writing = [time.process_time()], False
    while engine.has_unfinished_requests():
        writing = len(engine.step()) == count or writing
        if writing:
            marks.append(time.process_time())
    return marks


def bytes_of_cache(engine: Any, length: int) -> int:
    """What one sequence takes of vLLM's cache after so many tokens: blocks of keys and values, or one of states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    config, found = engine.vllm_config, 0
    for layer in config.compilation_config.static_forward_context.values():
        spec = layer.get_kv_cache_spec(config)
        found += spec.page_size_bytes * (1 if isinstance(spec, MambaSpec) else -(-length // spec.block_size))
    return found


def measure(runners: dict[str, Any], cases: list[tuple[int, int]], rounds: int) -> dict[str, dict[str, Times]]:
    """CPU seconds a token by phase, case and engine, a number for each round, after one short round unmeasured."""
    found: dict[str, dict[str, Times]] = {"prefill": {}, "decode": {}}
    for runner in runners.values():
        runner.run(*cases[0])
    for _ in range(rounds):
        for length, count in cases:
            for name, runner in runners.items():
                begin, read, *marks = runner.run(length, count)
                steps = [after - before for before, after in zip([read, *marks], marks)]
                # In vLLM's last steps some prompts are finished already, because others were read later.
                seconds = {"prefill": (read - begin) / length, "decode": statistics.median(steps[: len(steps) // 2])}
                for phase, value in seconds.items():
                    times = found[phase].setdefault(f"{length:,} x {count}", {})
                    times.setdefault(name, []).append(value / count)
    return found


def speeds(phase: str, found: dict[str, Times]) -> Table:
    """A row for each case: tokens a CPU second, the median and the range, and ratios."""
    names = [*next(iter(found.values()))]
    converted = [name for name in names if name != SOFTMAX and not name.startswith("generate ")]
    pairs = [(name, other) for name in converted for other in (SOFTMAX, f"generate {name}") if other in names]
    rows: list[list[Any]] = []
    for case, times in found.items():
        cells = [
            f"{1 / statistics.median(times[name]):,.0f} ({1 / max(times[name]):,.0f}-{1 / min(times[name]):,.0f})"
            for name in names
        ]
        rows.append([case, *cells, *(median_ratio(times[other], times[name]) for name, other in pairs)])
    return table([f"{phase}, tokens a CPU s", *names, *(f"{name} / {other}" for name, other in pairs)], rows)


def main(argv: list[str] | None = None) -> None:
    """Measure all cases."""
    arguments = parse(__doc__, argv, {"rounds": 1}, rounds=5, model="", students=[""], dtype="float32")
    cases = QUICK_CASES if arguments.quick else LONG_CASES if arguments.model else CASES
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("This benchmark needs an environment with vLLM; see the page on serving.")
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model:
            folders = {SOFTMAX: Path(arguments.model), **{Path(path).name: Path(path) for path in arguments.students}}
        else:
            folders = save_models(Path(folder))
        workers = {name: Worker(path, cases, arguments.dtype) for name, path in folders.items()}
        beside = () if arguments.model else SETTINGS
        runners = workers | {f"generate {name}": Transformers(folders[name]) for name in beside}
        found = measure(runners, cases, arguments.rounds)
        memory = [[f"{length:,}", *(worker.run(length, 0) for worker in workers.values())] for length, _ in cases]
    tables = [speeds(phase, times) for phase, times in found.items()]
    tables.append(table(["tokens of context, bytes of cache a sequence", *workers], memory))
    save(arguments, "speed_vllm", tables, seconds_per_token=found)


if __name__ == "__main__":
    main()
