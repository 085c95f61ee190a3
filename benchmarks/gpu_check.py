"""What a GPU has to answer about this project, in one run of at most ten minutes.

    python -m benchmarks.gpu_check --output_dir outputs/gpu_check
    python -m benchmarks.gpu_check --device cpu      # small shapes, everywhere: to test this script itself

The questions come in the order of their value: which machine is this; are values and gradients those of float64; does a
decoding step wait for the host, and can a CUDA graph capture it; how fast are attention, a decoding step, a training
step and whole models beside torch's fused softmax (SDPA, FlashAttention on CUDA), FlexAttention and fla; how much
memory do they take. It needs no network, no checkpoint and no file beside the package.

Every question is a process of its own with its own limit, because an error on a GPU breaks all that follows it in the
same process. Each answer is at once a line of gpu_check.jsonl, and of gpu_check.txt. No answer is an assertion: BAD
marks a value that its dtype does not explain, FAILED what raised or took too long. Speed on a CPU means nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


# `torch.cuda.is_available` must not start CUDA in the process that forks the others.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, StaticCache

import hf_linear_attention
from benchmarks.gpu_runs import START, Job, Run, together
from hf_linear_attention.kernels import fla
from hf_linear_attention.mechanisms.base import AttentionMechanism, MechanismInputs


class Sizes(NamedTuple):
    """How large everything is. The sizes of the default follow from the trained length."""

    shape: tuple[int, int, int, int]  # query heads, key/value heads, their dimension, the hidden size
    trained_length: int
    lengths: tuple[int, ...]  # of inputs to one layer
    value_length: int  # of those that are compared with float64
    steps: tuple[tuple[int, int], ...]  # batches and tokens before a decoding step
    model_layers: int
    vocabulary: int
    long: int


GPU_LENGTHS = (1024, 4096, 16384, 32768, 131072)
ON_GPU = Sizes((32, 8, 64, 2048), 32768, GPU_LENGTHS, 3000, ((1, 8192), (64, 8192)), 16, 128256, 131072)
ON_CPU = Sizes((4, 2, 16, 64), 512, (130,), 200, ((2, 150),), 2, 128, 300)
# The aims of issue X on an H100: how many times as fast as SDPA.
AIMS = {("forward", 4096): 1.0, ("forward", 32768): 4.0, ("forward", 131072): 15.0}
AIMS |= {("training", 4096): 0.8, ("training", 32768): 3.0, ("step", 8192): 3.0}
MECHANISMS: dict[str, dict[str, Any]] = {
    "hybrid": {},  # the default
    "hybrid, no exact keys": {"mechanism": "hybrid", "window_size": 64, "num_features": 32, "rope": "partial"},
    "window": {"mechanism": "window", "window_size": 512, "num_sinks": 4},
    "linear exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 64, "decay": "learned"},
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "performer": {"mechanism": "performer", "num_features": 64},
    "gated_delta": {"mechanism": "gated_delta"},
    "gated_delta, convolution": {"mechanism": "gated_delta", "conv_size": 4},
}
TIMED = ("hybrid", "window", "linear exp", "gated_delta")
SOFTMAX = "sdpa"
LIMITS = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 2e-3}


# --- mechanisms -------------------------------------------------------------------------------------------------------


def mechanism_of(
    run: Run, name: str, shape: tuple[int, int, int, int] | None = None, trained_length: int | None = None
) -> AttentionMechanism:
    """The mechanism of one layer as a conversion makes it, its parameters moved away from where they start."""
    heads, kv_heads, dim, hidden = shape or run.sizes.shape
    config = LlamaConfig(
        vocab_size=8, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=trained_length or run.sizes.trained_length,
    )  # fmt: skip
    # The default's sizes follow from the dtype of the checkpoint.
    model = hf_linear_attention.convert(LlamaForCausalLM(config).to(torch.bfloat16), **MECHANISMS[name])
    mechanism = model.model.layers[0].self_attn.linear_attention.float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            size = parameter.abs().mean().clamp(min=0.01)
            parameter += 0.1 * size * torch.randn(parameter.shape, generator=generator)
    return mechanism


def inputs_of(
    mechanism: AttentionMechanism, length: int, dtype: torch.dtype, device: str, batch: int = 1, first: int = 0,
    seed: int = 0, mask: Tensor | None = None,
) -> MechanismInputs:  # fmt: skip
    """Random inputs that are alike in every dtype, heads beside tokens in memory as in a model.

    They are rounded to bfloat16 first, and the scores of exact keys are random themselves, because a rounded score
    would choose another key.
    """
    shape, generator = mechanism.shape, torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16).to(device, dtype)

    heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    inputs = MechanismInputs(
        *(random(batch, length, n, shape.head_dim).transpose(1, 2) for n in heads), mask, shape.head_dim**-0.5, True
    )
    if getattr(mechanism, "num_exact_keys", 0):
        inputs = inputs._replace(gates=random(batch, length, shape.num_key_value_heads).float())
    elif mechanism.needs_gates:
        hidden = random(batch, length, shape.hidden_size or 0)
        inputs = inputs._replace(gates=mechanism.gates(hidden).detach())
    if mechanism.needs_positions:
        places = torch.arange(first, first + length, dtype=torch.int32, device=device)
        inputs = mechanism.prepare(inputs._replace(positions=places.expand(batch, -1)))
    return inputs


def relative(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm; infinity if a number is not finite."""
    actual, expected = (x.detach().double().cpu() for x in (actual, expected))
    if not actual.isfinite().all():
        return math.inf
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def computed(mechanism: AttentionMechanism, dtype: torch.dtype, device: str, length: int, mask: Any) -> dict[str, Any]:
    """The output of two rows with its gradients and without, and after it those of three decoding steps, and of further
    tokens that are read at once.
    """
    mask = None if mask is None else mask.to(device)
    given = inputs_of(mechanism, length, dtype, device, batch=2, mask=mask)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    output, state = mechanism(given._replace(query=leaves[0], key=leaves[1], value=leaves[2]))
    output = output if mask is None else output * mask[:, :, None, None]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(device, output.dtype)
    parameters = [x for x in mechanism.parameters() if x.requires_grad]
    grads = torch.autograd.grad((output * weight).double().sum(), leaves + parameters, allow_unused=True)
    found = {"output": output} | {f"grad_{name}": grad for name, grad in zip(("query", "key", "value"), grads)}
    found["grad_parameters"] = torch.cat([x.double().flatten() for x in grads[3:] if x is not None] or [grads[0][:0]])
    with torch.no_grad():  # which other kernels compute
        prompt, state = mechanism(given)
        found["prompt"] = prompt if mask is None else prompt * mask[:, :, None, None]
        more = inputs_of(mechanism, length // 2, dtype, device, batch=2, first=length, seed=7)
        found["continued"] = mechanism(more, tuple(state))[0]
        for number in range(3):
            token = inputs_of(mechanism, 1, dtype, device, batch=2, first=length + number, seed=9 + number)
            found[f"step_{number + 1}"], state = mechanism(token, tuple(state))
    return found


def values(run: Run, name: str, width: int = 64) -> None:
    """Outputs, gradients and decoding steps against float64 on the CPU, of heads of this width on a GPU."""
    shape = run.sizes.shape if run.device == "cpu" else (4, 2, width, 128)
    own = mechanism_of(run, name, shape)
    exact, length = copy.deepcopy(own).double(), run.sizes.value_length
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, : length // 3] = False
    for given in (None, mask):
        expected = computed(exact, torch.float64, "cpu", length, given)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)[:: 1 if run.device == "cuda" else 2]:
            about = {"case": name, "width": shape[2], "dtype": str(dtype)[6:], "padding": given is not None}
            try:
                actual = computed(copy.deepcopy(own).to(run.device, dtype), dtype, run.device, length, given)
            except Exception as error:
                run.failed("values", str(about), error)
                continue
            errors = {key: float(f"{relative(x, expected[key]):.1e}") for key, x in actual.items()}
            run.note("values", **about, status="ok" if max(errors.values()) <= LIMITS[dtype] else "BAD", **errors)


def step(run: Run, name: str, batch: int, context: int) -> None:
    """A decoding step as a server makes it: states in blocks, chosen by a tensor; waits, capture and time."""
    mechanism, dtype = mechanism_of(run, name).to(run.device, torch.bfloat16), torch.bfloat16
    about = {"case": name, "batch": batch, "context": context}
    with torch.no_grad():
        one = mechanism(inputs_of(mechanism, min(context, 4096), dtype, run.device))[1]
        state = tuple(x.expand(batch, *x.shape[1:]).contiguous() for x in one)
        token = inputs_of(mechanism, 1, dtype, run.device, batch=batch, first=context, seed=1)
        expected = mechanism(token, state)[0]
        first, rows = [torch.cat((x[:1], x, x[:1])) for x in state], torch.arange(1, batch + 1, device=run.device)
        blocks = tuple(x.clone() for x in first)

        def call() -> Tensor:
            return mechanism.step_in_rows(token, blocks, rows)

        wrong = wrong_in_place(mechanism, first, rows, context)
        run.note("step", **about, status="BAD" if wrong else "ok", wrong_in_place=wrong)
        error = relative(call(), expected)
        about["roofline_ms"] = run.roofline(sum(x.numel() * x.element_size() for x in state))
        status = "ok" if error < LIMITS[dtype] else "BAD"
        run.note("step", **about, how="eager", status=status, error=error, **run.measured(call))
        if run.device != "cuda":
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as problem:
            run.note("step", **about, status="BAD", waits_for_host=str(problem)[:200])
        torch.cuda.set_sync_debug_mode("default")
        captured, outputs = captured_call(call)
        for block, x in zip(blocks, first):
            block.copy_(x)
        captured.replay()
        torch.cuda.synchronize()
        error = relative(outputs[0], expected)
        status = "ok" if error < LIMITS[dtype] else "BAD"
        run.note("step", **about, how="graph", status=status, error=error, ms=run.milliseconds(captured.replay, 50))


def wrong_in_place(mechanism: AttentionMechanism, first: Sequence[Tensor], rows: Tensor, context: int) -> int:
    """How many numbers of all blocks are others after ten steps in place than after ten whose state is a new one.

    Keys move within global memory there, where racecheck does not see a race.
    """
    blocks, state = tuple(x.clone() for x in first), tuple(x[rows] for x in first)
    for place in range(context, context + 10):
        token = inputs_of(mechanism, 1, torch.bfloat16, str(rows.device), len(rows), first=place, seed=place)
        mechanism.step_in_rows(token, blocks, rows)
        state = mechanism(token, state)[1]
    expected = (x.index_copy(0, rows, new) for x, new in zip(first, state))
    # Keys and values are copies, and sums are computed in the same order; the tolerance is for a compiler.
    close = (x.float().isclose(y.float(), rtol=1e-3, atol=1e-3) for x, y in zip(blocks, expected))
    return sum(int((~x).sum()) for x in close)


def captured_call(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """The CUDA graph of a call, and what the call returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = [call()]
    return captured, outputs


def softmax_step(run: Run, batch: int, context: int) -> None:
    """A decoding step of softmax attention over its whole cache, the rival of `step`."""
    heads, kv_heads, dim, _ = run.sizes.shape
    sizes = ((heads, 1), (kv_heads, context), (kv_heads, context))
    query, key, value = (torch.randn(batch, *x, dim, dtype=torch.bfloat16, device=run.device) for x in sizes)
    # FlashAttention splits the keys, and is faster if the query heads of a key/value head are the rows of one head.
    grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
    attend = F.scaled_dot_product_attention
    calls = {"": lambda: attend(query, key, value, enable_gqa=True), ", grouped": lambda: attend(grouped, key, value)}
    about = {"case": SOFTMAX, "batch": batch, "context": context}
    with torch.no_grad():
        for name, call in calls.items():
            run.note("step", **about, how="eager" + name, **run.measured(call))
            if run.device == "cuda":
                ms = run.milliseconds(captured_call(call)[0].replay, 50)
                run.note("step", **about, how="graph" + name, ms=ms)


# --- attention of one layer -------------------------------------------------------------------------------------------


def call_of(run: Run, name: str, length: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Attention to an input of this length, and what it has gradients for; the length is the trained one, too.

    FlexAttention sees a window and sinks of the default's size alone, and fla sums 64 features alone.
    """
    heads, kv_heads, dim, _ = run.sizes.shape

    def random(number: int, size: int = dim) -> Tensor:
        return torch.rand(1, length, number, size, device=run.device, dtype=torch.bfloat16)

    if name in MECHANISMS:
        mechanism = mechanism_of(run, name, trained_length=length).to(run.device, torch.bfloat16)
        given = inputs_of(mechanism, length, torch.bfloat16, run.device)
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        given = given._replace(query=leaves[0], key=leaves[1], value=leaves[2])
        return lambda: mechanism(given)[0], [*leaves, *(x for x in mechanism.parameters() if x.requires_grad)]
    if name == "fla":
        from fla.ops.simple_gla import chunk_simple_gla

        leaves = [x.requires_grad_() for x in (random(heads, 64), random(heads, 64), random(heads))]
        return lambda: chunk_simple_gla(*leaves, scale=1.0)[0], leaves
    leaves = [random(n).transpose(1, 2).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    if name == SOFTMAX:
        return lambda: F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = mechanism_of(run, "hybrid", trained_length=length).settings["window_size"]
    near = create_block_mask(
        lambda batch, head, i, j: (i >= j) & ((i - j < size) | (j < 4)), None, None, length, length, device=run.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*leaves, block_mask=near, enable_gqa=True), leaves


def attention(run: Run, name: str, trains: bool) -> None:
    """Milliseconds, kernels and memory of one layer that reads a whole input, without or with gradients."""
    part = "training" if trains else "forward"
    for length in run.sizes.lengths[: -1 if trains and len(run.sizes.lengths) > 1 else None]:
        call, leaves = call_of(run, name, length)
        gradient = torch.randn_like(call()) if trains else None

        def train(call=call, leaves=leaves, gradient=gradient) -> None:
            for leaf in leaves:
                leaf.grad = None
            call().backward(gradient)

        top = 12 if name == "hybrid" and length == 4096 else 0
        answer = run.measured(train if trains else torch.no_grad()(call), top)
        run.note(part, case=name, tokens=length, roofline_ms=roofline_of(run, name, length, trains), **answer)


def roofline_of(run: Run, name: str, length: int, trains: bool) -> float | None:
    """Queries, keys, values and output in memory once, and the two products with every key and feature.

    The backward pass reads and writes twice as much, and has two and a half times the products.
    """
    if name not in MECHANISMS:
        return None
    settings = mechanism_of(run, name, trained_length=length).settings
    heads, kv_heads, dim, _ = run.sizes.shape
    sizes = ("window_size", "num_sinks", "num_exact_keys", "num_features")
    seen = min(length / 2, sum(settings.get(x) or 0 for x in sizes) or dim)
    read = 2 * length * dim * 2 * (heads + kv_heads)
    return run.roofline(read * (3 if trains else 1), 4 * length * heads * dim * seen * (3.5 if trains else 1))


# --- models -----------------------------------------------------------------------------------------------------------


def model_of(run: Run, name: str, converted: bool) -> Any:
    """A model of the shape of Llama 3.2 1B or Qwen2.5 0.5B with random weights."""
    heads, kv_heads, dim, hidden = run.sizes.shape
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": run.sizes.model_layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    if name == "0.5B":
        sizes |= {"num_key_value_heads": 2}
        if run.device == "cuda":
            sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
            sizes |= {"num_key_value_heads": 2}
    sizes |= {"vocab_size": run.sizes.vocabulary, "max_position_embeddings": run.sizes.trained_length}
    config, model_class = (LlamaConfig, LlamaForCausalLM) if name == "1B" else (Qwen2Config, Qwen2ForCausalLM)
    torch.manual_seed(0)
    with torch.device(run.device):
        model = model_class(config(**sizes, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0))
        model = model.to(torch.bfloat16).eval()
        return hf_linear_attention.convert(model).to(run.device) if converted else model


def tokens(run: Run, batch: int, length: int) -> Tensor:
    return torch.randint(1, run.sizes.vocabulary, (batch, length), device=run.device)


def reading_and_decoding(run: Run, name: str, converted: bool) -> None:
    """A whole model: reading, a decoding step, and one in a CUDA graph (`reduce-overhead`, as `generate` does)."""
    model, case = model_of(run, name, converted), f"{name} {'hybrid' if converted else SOFTMAX}"
    last: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    with torch.no_grad():
        for length in run.sizes.lengths[1:3] or run.sizes.lengths:
            read = functools.partial(model, tokens(run, 1, length), **last)
            run.note("model", case=case, what="reading", tokens=length, ms=run.milliseconds(read, 5))
        for batch, context in run.sizes.steps:
            cache: Any = DynamicCache(config=model.config)
            model(tokens(run, 1, context), past_key_values=cache, **last)
            cache.batch_repeat_interleave(batch)
            ms = run.milliseconds(functools.partial(model, tokens(run, batch, 1), past_key_values=cache), 20)
            about = {"batch": batch, "context": context, "ms": ms, "tokens_per_s": 1000 * batch / ms}
            run.note("model", case=case, what="step", **about)
        if run.device != "cuda":
            return
        cache, token = StaticCache(config=model.config, max_cache_len=4160), tokens(run, 1, 1)
        model(tokens(run, 1, 4096), past_key_values=cache, **last)
        plain = model(token, past_key_values=copy.deepcopy(cache)).logits.clone()
        compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        step = functools.partial(compiled, input_ids=token, past_key_values=cache, use_cache=True)
        error = relative(step().logits.clone(), plain)
        status = "ok" if error < 5e-2 else "BAD"
        run.note("model", case=case, what="compiled", status=status, error=error, ms=run.milliseconds(step, 20))


def training_steps(run: Run, converted: bool, how: str) -> None:
    """Steps of AdamW on the 1B model, in bfloat16 or in mixed precision."""
    model = model_of(run, "1B", converted).train()
    model = model if how == "bfloat16" else model.float()
    ids, losses = tokens(run, 1, (run.sizes.lengths[1:] or run.sizes.lengths)[0]), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(run.device, dtype=torch.bfloat16, enabled=how == "mixed"):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    answer = run.measured(step)
    first, last = losses[0].item(), losses[-1].item()
    status = "ok" if math.isfinite(last) and last < first else "BAD"
    case = f"1B {'hybrid' if converted else SOFTMAX} {how}"
    run.note("training", case=case, what="step of AdamW", length=ids.shape[1], status=status, loss=last, **answer)


def long_input(run: Run) -> None:
    """A converted 0.5B reads a long input: does it fit, and is all of it finite?"""
    model, ids, begin = model_of(run, "0.5B", True), tokens(run, 1, run.sizes.long), time.time()
    with torch.no_grad():
        logits = model(ids, use_cache=True, logits_to_keep=1).logits
    seconds, peak = time.time() - begin, torch.cuda.max_memory_allocated() / 1e6 if run.device == "cuda" else None
    status = "ok" if bool(logits.isfinite().all()) else "BAD"
    run.note("long", tokens=ids.shape[1], seconds=seconds, peak_mb=peak, status=status)


def machine(run: Run) -> None:
    """What is here, and the rates of memory, matrix products and launches."""
    versions = {}
    for name in ("torch", "triton", "fla-core", "transformers", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    run.note("machine", device=run.device, python=sys.version.split()[0], cpus=os.cpu_count(), **versions)
    if run.device != "cuda":
        return
    properties, small = torch.cuda.get_device_properties(0), torch.randn(64, device="cuda")
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        run.note("machine", nvidia_smi=found.stdout.strip())
    run.note(
        "machine", card=properties.name, cuda=torch.version.cuda, processors=properties.multi_processor_count,
        gib=properties.total_memory / 2**30, takes_fla=fla.takes(torch.empty(0, dtype=torch.bfloat16), 4096),
        copy_TB_per_s=run.rates[0] / 1e9, TFLOPS=run.rates[1] / 1e9,
        us_per_launch=run.milliseconds(lambda: [small.add_(1) for _ in range(1000)]),
    )  # fmt: skip


# --- processes --------------------------------------------------------------------------------------------------------

QUESTIONS = (machine, values, step, softmax_step, attention, reading_and_decoding, training_steps, long_input)


def jobs(run: Run) -> list[list[Job]]:
    """Groups of questions, in their order; those of one group run at the same time."""
    on_gpu, timed = run.device == "cuda", (SOFTMAX, *TIMED[:2])
    if on_gpu:
        timed = (SOFTMAX, "flex", "fla", *TIMED)
    return [
        [(machine, ())],
        [(values, (name,)) for name in MECHANISMS],
        *([[(values, ("hybrid", width)) for width in (80, 96, 128, 256)]] if on_gpu else []),
        *([(step, ("hybrid", *sizes))] for sizes in run.sizes.steps),
        *([(softmax_step, sizes)] for sizes in run.sizes.steps),
        *([(attention, (name, trains))] for trains in (False, True) for name in timed),
        *([(reading_and_decoding, (name, converted))] for name in ("1B", "0.5B") for converted in (True, False)),
        *([(training_steps, (converted, "bfloat16"))] for converted in (True, False)),
        *([[(training_steps, (True, "mixed"))]] if on_gpu else []),
        [(long_input, ())],
        *([(step, (name, *sizes))] for name in timed[-3:] for sizes in run.sizes.steps if on_gpu),
    ]


def summary(run: Run) -> tuple[str, int]:
    """Ratios to SDPA beside their aims, then what is BAD or FAILED; and how many of these there are."""
    found = [json.loads(line) for line in (run.folder / "gpu_check.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [x for x in found if x["part"] in ("forward", "training", "step") and "ms" in x and "what" not in x]
    base: dict[Any, float] = {}
    rows = ["", "part       case                     how   batch  tokens        ms  x SDPA   aim  roofline ms"]
    for x in sorted(timed, key=lambda x: x["case"] != SOFTMAX):
        size, how = x.get("tokens") or x.get("context"), x.get("how", "").split(",")[0]
        key = (x["part"], how, x.get("batch"), size)
        if x["case"] == SOFTMAX:
            base[key] = min(x["ms"], base.get(key, math.inf))
        elif key in base:
            aim = AIMS.get((x["part"], size), "") if x["case"] == "hybrid" and x.get("batch") != 1 else ""
            about = f"{x['part']:10s} {x['case']:24s} {how:6s}{x.get('batch', 1):5d} {size:7d}"
            times = f"{x['ms']:9.3f} {base[key] / x['ms']:7.2f} {aim:>5}  {x.get('roofline_ms') or ''}"
            rows.append(f"{about} {times}")
    bad = [x for x in found if x.get("status") in ("BAD", "FAILED")]
    rows.append(f"\n{len(bad)} problems of {len(found)} answers, {time.time() - START:.0f} s, in {run.folder}")
    return "\n".join([*rows, *("  ".join(f"{k}={v}" for k, v in x.items())[:300] for x in bad)]), len(bad)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu_check"))
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--seconds_each", type=float, help="for one question (60); compute-sanitizer needs more")
    parser.add_argument("--only", nargs="+", choices=[x.__name__ for x in QUESTIONS], help="these questions alone")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; `--device cpu` runs the small form, which tests this script")
    run = Run(options.device, ON_GPU if options.device == "cuda" else ON_CPU, options.output_dir)
    run.folder.mkdir(parents=True, exist_ok=True)
    for path in run.folder.glob("gpu_check.*"):
        path.unlink()
    for group in jobs(run):
        chosen = [job for job in group if not options.only or job[0].__name__ in options.only]
        at_once = 4 if run.device == "cuda" else 1
        together(run, chosen, START + options.seconds, at_once, options.seconds_each)
    text, problems = summary(run)
    with open(run.folder / "gpu_check.txt", "a", encoding="utf-8") as file:
        file.write(text + "\n")
    sys.stdout.write(text + "\n")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
