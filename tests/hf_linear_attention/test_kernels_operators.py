"""The kernels as operators of torch: opcheck, and the thread of their gradients."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path

import pytest
import torch
from kernel_calls import Maker
from matrix import attend, build_mechanism, qkv
from operators import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import operators as kernels_operators


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native"))
import fuzz  # in another folder of tests, which pytest imports by their paths


HAVE_GRADIENTS = ("attention", "window_attention", "hybrid", "gated_delta")


class Recorder(TorchDispatchMode):
    """Our operators that are called first, and their arguments, by name."""

    def __init__(self, calls=None):
        super().__init__()
        self.calls = {} if calls is None else calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), args)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "hf_linear_attention":
            self.calls.setdefault(function._schema.name.partition("::")[2], (function, kept))
        return result


@functools.cache
def recorded() -> dict[str, tuple]:
    """A call of every operator as the fuzzer makes them, none of whose tensors is large."""
    calls, seed = {}, 0
    while calls.keys() < vars(OPERATORS).keys() and seed < 2000:
        call, seed = Maker(seed).call(), seed + 1
        if call.misfit or any(x is not None and x.numel() > 2000 for x in call.tensors.values()):
            continue
        with Recorder(calls), contextlib.suppress(NotImplementedError):
            fuzz.values_and_gradients(call, call.clean, {})
    return calls


@pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")
@pytest.mark.parametrize("name", vars(OPERATORS))
def test_opcheck(name):
    function, given = recorded()[name]
    for x in given if name in HAVE_GRADIENTS else ():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    is_compiled = name in [f"{other}_backward" for other in HAVE_GRADIENTS]  # in test_graphs.py
    checks = {"test_utils": ("test_schema", "test_faketensor")} if is_compiled else {}
    torch.library.opcheck(function, given, **checks)


def test_what_turns_and_packs_is_checked():
    """Each head has its weights, frequencies are float32 on one axis, and packed sequences have exact keys alone."""
    calls = (Maker(seed).call() for seed in range(2000))
    calls = (x for x in calls if not x.misfit and x.options.get("turns", (None,))[0] is not None)
    found = {x.entry: x for x in calls if x.tensors["key"].shape[1] > 1 and x.tensors.get("state") is None}
    call, step = found["hybrid"], found["hybrid_step"]
    given = fuzz.arguments_of(call.tensors, call.options)._replace(spans=None)
    length = torch.zeros(2, *given.query.shape[::2][:2], dtype=torch.int32)
    wrong = {
        "key_weight": given.key_weight[:1],
        "query_weight": given.query_weight[:1],
        "frequencies": given.frequencies.double(),
        "spans": length.long(),
    }
    for name, x in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}` has"):
            OPERATORS.hybrid(*given._replace(**{name: x}))
    with pytest.raises(ValueError, match="Packed sequences have no keys before them, no sinks"):
        OPERATORS.hybrid(*given._replace(spans=length, score=None, num_exact_keys=0, kept_key=None))
    options = step.options
    for frequencies in (options["turns"][0].double(), options["turns"][0][None]):
        turns = frequencies, *options["turns"][1:]
        with pytest.raises(ValueError, match="`frequencies` has"):
            fuzz.hybrid_step(step.tensors, {**options, "turns": turns}, {})


@pytest.mark.parametrize(("row", "mode"), [("hybrid", Recorder), ("gated_delta", contextlib.nullcontext)])
def test_gradients_in_torch_are_computed_by_the_thread_that_asks(row, mode, monkeypatch):
    """Another thread has neither the device nor the stream of CUDA that is current here."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    threads = {threading.get_ident()}
    gradients_of = kernels_operators.gradients_of
    record = lambda *given: threads.add(threading.get_ident()) or gradients_of(*given)  # noqa: E731
    monkeypatch.setattr(kernels_operators, "gradients_of", record)
    mechanism, inputs = build_mechanism(row), [x.requires_grad_() for x in qkv(70)]
    torch._dynamo.reset()
    output = torch.compile(lambda *given: attend(mechanism, *given)[0], fullgraph=True, backend="aot_eager")(*inputs)
    with mode():
        torch.autograd.grad(output.square().sum(), inputs)
    assert threads == {threading.get_ident()}
