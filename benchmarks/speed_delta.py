"""Time of the gated delta rule against N, beside transformers' own torch code of Qwen3-Next (one thread, CPU time).

    python -m benchmarks.speed_delta

B = 1, 16 heads of 128 (features and values), float32, queries and keys of norm 1. `C` is the kernel that the
installation built, `torch` the same without it, `C, by feature` and `torch, by feature` with a decay per feature (Kimi
Delta Attention), which `transformers` has no torch code for. `transformers` is `torch_chunk_gated_delta_rule`, and in
the table of a decoding step, which continues a state, `torch_recurrent_gated_delta_rule`. All take turns in every
round; ratios are medians over rounds. The last table has whole layers of stock models, hidden size 1,024, with and
without `accelerate_stock_models`. About two minutes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.common import Times, median_ratio, medians, parse, save, table, times_in_turns
from benchmarks.speed_kernels import MODES, in_torch
from hf_linear_attention import accelerate_stock_models
from hf_linear_attention.torch_kernels.delta import gated_delta


HEADS, DIM = 16, 128
OURS, PEER = "C", "transformers"
Call = Callable[..., torch.Tensor]
# Beyond these lengths one round with the backward pass takes too long.
LONGEST_BACKWARD = {PEER: 4096, "torch": 4096, "torch, by feature": 1024}


def inputs(length: int) -> dict[str, torch.Tensor]:
    """Tokens before heads, as models hold them; `gates` are log decays by head and by feature."""
    torch.manual_seed(0)
    query, key = (F.normalize(torch.randn(1, length, HEADS, DIM), dim=-1) for _ in range(2))
    tensors = {"query": query, "key": key, "value": torch.randn(1, length, HEADS, DIM)}
    gates = {"beta": torch.rand(1, length, HEADS), "by head": -torch.rand(1, length, HEADS) / 10}
    return tensors | gates | {"by feature": -torch.rand(1, length, HEADS, DIM) / 10}


def ours(decay: str) -> Call:
    """Our kernel with the decay by head or by feature."""

    def call(tensors, state=None):
        query, key, value, beta = (tensors[name].transpose(1, 2) for name in ("query", "key", "value", "beta"))
        log_decay = tensors[decay].transpose(1, 2)
        output, new_state = gated_delta(query * DIM**-0.5, key, value, log_decay, beta, state=state)
        return output.transpose(1, 2), new_state

    return call


@contextlib.contextmanager
def torch_code(modeling: ModuleType) -> Iterator[None]:
    """Leave out flash-linear-attention, which transformers takes where it is installed, and which needs a GPU."""
    functions = {name: value for name, value in vars(modeling).items() if inspect.isfunction(value)}
    own = {name: function for name, function in functions.items() if function.__module__ == modeling.__name__}
    with mock.patch.multiple(modeling, **{name: inspect.unwrap(function) for name, function in own.items()}):
        yield


def transformers(name: str) -> Call:
    """transformers' torch code of Qwen3-Next."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    with torch_code(modeling_qwen3_next):
        rule = getattr(modeling_qwen3_next, name)

    def call(tensors, state=None):
        given = (tensors[name] for name in ("query", "key", "value", "by head", "beta"))
        return rule(*given, initial_state=state, output_final_state=True)

    return call


def calls(rule: str) -> dict[str, Call]:
    """Every method, by the name of its column."""
    by_head, by_feature = ours("by head"), ours("by feature")
    by_name = {OURS: by_head, "torch": in_torch(by_head), PEER: transformers(rule)}
    return by_name | {"C, by feature": by_feature, "torch, by feature": in_torch(by_feature)}


def run(
    call: Call, tensors: dict[str, torch.Tensor], state: torch.Tensor | None, gradient: torch.Tensor | None
) -> None:
    """One call, with the backward pass if there is a gradient."""
    if gradient is None:
        with torch.no_grad():
            call(tensors, state)
        return
    call({name: x.detach().requires_grad_() for name, x in tensors.items()}, state)[0].backward(gradient)


def row(methods: dict[str, Call], length: int, with_backward: bool, rounds: int, with_state: bool = False) -> list[Any]:
    """Milliseconds of each method, and those of torch and transformers over ours."""
    tensors = inputs(length)
    gradient = torch.ones_like(tensors["value"]) if with_backward else None
    state = torch.randn(1, HEADS, DIM, DIM) if with_state else None
    chosen = [name for name in methods if not with_backward or length <= LONGEST_BACKWARD.get(name, length)]
    times = times_in_turns({n: lambda call=methods[n]: run(call, tensors, state, gradient) for n in chosen}, rounds)
    found = medians(times, 1e-3)
    slower = (median_ratio(times[name], times[OURS]) for name in ("torch", PEER))
    return [length, *(found.get(name) for name in methods), *slower]


def stock_layers() -> dict[str, torch.nn.Module]:
    """The linear layer of Qwen3-Next, whose decay is by head, and that of Kimi Linear, with one by feature."""
    from transformers import KimiLinearConfig, Qwen3NextConfig
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.qwen3_next import modeling_qwen3_next

    qwen = Qwen3NextConfig(hidden_size=1024, linear_num_key_heads=HEADS, linear_num_value_heads=HEADS)
    kimi = KimiLinearConfig(hidden_size=1024, linear_num_heads=HEADS, linear_head_dim=DIM)
    return {
        "Qwen3-Next": modeling_qwen3_next.Qwen3NextGatedDeltaNet(qwen, 0),
        "Kimi Linear": modeling_kimi_linear.KimiLinearDeltaAttention(kimi, 0),
    }


def layer_seconds(layer: torch.nn.Module, length: int, with_backward: bool, rounds: int) -> Times:
    """The CPU seconds of the stock layer, and of the accelerated one."""
    hidden_states = torch.randn(1, length, 1024, requires_grad=with_backward)

    def stock() -> None:
        with torch.set_grad_enabled(with_backward):
            output = layer(hidden_states)
        if with_backward:
            output.sum().backward()

    def accelerated() -> None:
        with accelerate_stock_models():
            stock()

    with torch_code(sys.modules[type(layer).__module__]):
        return times_in_turns({"stock": stock, "accelerated": accelerated}, rounds)


def layer_rows(lengths: list[int], rounds: int) -> list[list[Any]]:
    """Milliseconds of stock layers, and how many times as fast they are when accelerated."""
    rows = []
    for name, layer in stock_layers().items():
        for length, mode in itertools.product(lengths, MODES):
            times = layer_seconds(layer, length, mode != "forward", rounds)
            rows.append([name, mode, length, *medians(times, 1e-3).values(), median_ratio(*times.values())])
    return rows


def main(argv: list[str] | None = None) -> None:
    """Time the rule, its step and whole layers."""
    quick = {"lengths": [16, 48], "rounds": 1}
    arguments = parse(__doc__, argv, quick, lengths=[64, 256, 1024, 4096], rounds=3)
    lengths, rounds = arguments.lengths, arguments.rounds
    methods, steps = calls("torch_chunk_gated_delta_rule"), calls("torch_recurrent_gated_delta_rule")
    columns, tables = [*methods, "torch / C", f"{PEER} / C"], []
    for mode in MODES:
        rows = [row(methods, n, mode != "forward", rounds if n < 1024 else 1) for n in lengths]
        tables.append(table([f"{mode}, CPU ms", *columns], rows))
    tables.append(table(["step, CPU ms", *columns], [row(steps, 1, False, 200 * rounds, with_state=True)]))
    header = ["layer, CPU ms", "", "tokens", "stock", "accelerated", "stock / accelerated"]
    tables.append(table(header, layer_rows(lengths[-2:-1], rounds)))
    save(arguments, "speed_delta", tables)


if __name__ == "__main__":
    main()
