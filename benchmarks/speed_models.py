"""Whole models with random weights: prefill, encoding and training steps in time and memory (one thread).

    python -m benchmarks.speed_models

Tokens a CPU second of the forward pass and of a training step (forward and backward), the models of a line taking turns
in every round, ratios as medians over rounds; and the peak of the memory that one such call takes beside weights and
gradients. About five minutes.

`--long` measures only prefills of 8,192 and 32,768 tokens, once each (six minutes or more, half of it softmax).
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks import common
from benchmarks.common import medians, parse, save, table, times_as_fast, times_in_turns
from hf_linear_attention import convert
from hf_linear_attention.default_settings import DEFAULTS


SOFTMAX = "softmax"
LONGEST_INPUT = 65536


def gpt2() -> Any:
    """A small GPT-2."""
    config = GPT2Config(
        vocab_size=256, n_positions=4096, n_embd=256, n_layer=8, n_head=8, bos_token_id=0, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def llama(hidden: int, layers: int, heads: int, intermediate: int) -> Any:
    """A Llama of this size."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=LONGEST_INPUT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def minilm() -> Any:
    """MiniLM's layers, with positions for long inputs."""
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536, max_position_embeddings=LONGEST_INPUT
    )
    return BertModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2, 8 layers of 256": gpt2,
    "Llama 15M": lambda: llama(288, 6, 6, 768),
    "Llama 125M": lambda: llama(768, 12, 12, 2048),
    "MiniLM": minilm,
}
LINEAR = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp": {"mechanism": "linear", "num_features": 64},
}
HYBRID: dict[str, dict[str, Any]] = {"hybrid": {}}  # the default of the model
ENCODERS = {
    **LINEAR,
    "default": DEFAULTS["bidirectional"],
    "window 64 + 1": {"mechanism": "window", "window_size": 64, "num_sinks": 1},
    "hybrid 64 + 1": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 1},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128, "projection": "mean-pool"},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
}
SHORT = {"default": DEFAULTS["bidirectional"]}
READING = {("MiniLM", length): SHORT for length in (64, 128, 256)} | {
    **{("MiniLM", length): ENCODERS for length in (512, 2048, 8192)},
    ("Llama 125M", 2048): LINEAR | HYBRID,
}
LONG_READING = {("Llama 125M", 8192): LINEAR | HYBRID, ("Llama 125M", 32768): LINEAR | HYBRID}
TRAINING = {("MiniLM", 512): LINEAR, ("MiniLM", 2048): LINEAR} | {
    ("Llama 125M", 512): HYBRID,
    ("Llama 125M", 1024): HYBRID,
}
LONGEST_WARMED = 2048  # longer calls take seconds, in which a first call is like any other


def variants(name: str, settings: dict[str, dict[str, Any]], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model with softmax, and converted with each of the settings, with the same weights."""
    torch.manual_seed(0)
    base = MODELS[name]().to(dtype).eval()
    converted = {key: convert(copy.deepcopy(base), **values) for key, values in settings.items()}
    return {SOFTMAX: copy.deepcopy(base), **converted}  # a copy too, of whose weights reading may take longer


def forward_pass(model: Any, length: int) -> Callable[[], Any]:
    """One call without a cache."""
    tokens = torch.randint(0, 256, (1, length))
    arguments = {} if isinstance(model, BertModel) else {"logits_to_keep": 1, "use_cache": False}
    return torch.inference_mode()(lambda: model(tokens, **arguments))


def training_step(model: Any, length: int) -> Callable[[], Any]:
    """Forward and backward of a language model's loss, or of a sum for an encoder."""
    tokens = torch.randint(0, 256, (1, length))

    def step() -> None:
        if isinstance(model, BertModel):
            loss = model(tokens).last_hidden_state.square().mean()
        else:
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    return step


def peak_bytes(call: Callable[[], Any]) -> int:
    """New memory of a call at its peak; what only its first one takes must have been taken."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier calls have freed would be taken again unseen
    return common.peak_bytes(call)


def measure(call_of: Any, name: str, length: int, settings: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Speed and peak of each model; longer calls take seconds, in which a first call is like any other."""
    models = variants(name, settings)
    calls = {key: call_of(model, length) for key, model in models.items()}
    is_once = rounds == 1 or length > LONGEST_WARMED
    times: dict[str, list[float]] = {key: [] for key in calls} if is_once else times_in_turns(calls, rounds - 1)
    peaks = {}
    for key, call in calls.items():
        start = time.process_time()
        peaks[key] = peak_bytes(call)
        times[key].append(time.process_time() - start)
    speed = {"seconds": medians(times), "times as fast": times_as_fast(times, SOFTMAX)}
    return {"model": name, "tokens": length, "peak": peaks, **speed}


def speed_table(title: str, results: list[dict[str, Any]]) -> Any:
    """Tokens a second, with the speed over softmax's and the MB at the peak in brackets."""
    keys = list(dict.fromkeys(key for result in results for key in result["peak"]))

    def cell(result: dict[str, Any], key: str) -> str | None:
        if key not in result["peak"]:
            return None
        speed, megabytes = result["tokens"] / result["seconds"][key], result["peak"][key] / 1e6
        return f"{speed:,.0f} ({result['times as fast'][key]:.2f}x, {megabytes:,.0f})"

    rows = [[f"{r['model']}, {r['tokens']:,}", *(cell(r, key) for key in keys)] for r in results]
    return table([f"{title}, tokens/s (over softmax, MB at the peak)", *keys], rows)


def main(argv: list[str] | None = None) -> None:
    """Time the models, or with `--long` only the long prefills."""
    arguments = parse(__doc__, argv, {"rounds": 1}, rounds=2, long=False)
    rounds = arguments.rounds
    reading, training = (LONG_READING, {}) if arguments.long else (READING, TRAINING)
    if arguments.quick and arguments.long:
        reading = {("Llama 15M", 64): LINEAR | HYBRID}
    elif arguments.quick:
        reading, training = {("MiniLM", 128): ENCODERS}, {("MiniLM", 64): LINEAR, ("MiniLM", 128): LINEAR}
    read = [measure(forward_pass, *case, settings, rounds) for case, settings in reading.items()]
    trained = [measure(training_step, *case, settings, rounds) for case, settings in training.items()]
    tables = [speed_table("forward", read)]
    if trained:
        tables.append(speed_table("training step", trained))
    save(arguments, "speed_models", tables, forward=read, training=trained)


if __name__ == "__main__":
    main()
