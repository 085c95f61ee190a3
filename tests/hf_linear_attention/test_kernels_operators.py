"""The kernels as operators of torch: opcheck, and the thread of their gradients."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path

import pytest
import torch
from kernel_calls import HYBRID_STATE, KEPT, SPECIFICATIONS, Maker
from matrix import attend, build_mechanism, qkv
from operators import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import operators as kernels_operators
from hf_linear_attention.kernels.triton_hybrid import OPERATORS as CUDA_OPERATORS
from hf_linear_attention.torch_kernels.blocks import EXP


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


def said_of(operator, given) -> str:
    """The error of a call that does not fit."""
    with pytest.raises(ValueError, match=r"`|Got|have|must") as found:
        operator(*given)
    return str(found.value)


def prefill_on_cuda(call) -> tuple:
    """The arguments of `hybrid_on_cuda` for those of `hybrid`."""
    t, (frequencies, *turns) = call.tensors, call.options["turns"]
    names = (*fuzz.HYBRID[:7], "score", "position", "key_position", *fuzz.HYBRID[9:13], "log_decay", "state")
    kept, turn = [t[name] for name in KEPT if t.get(name) is not None], torch.tensor(frequencies)
    how = call.options["window"], call.options["number"], *turns, call.options["scaling"], False
    return (*map(t.get, names), kept, t["log_scale"], t["norm_weight"], turn, None, *how)


def test_on_cuda_what_does_not_fit_is_the_same_error():
    """No kernel runs: the checks see CPU tensors here. Parameters may have any floating-point dtype on CUDA."""
    refused = []
    for seed in range(2500):
        call = Maker(seed).call()
        if not call.misfit or call.entry not in ("hybrid", "hybrid_step") or call.options["function"] != EXP:
            continue
        refused.append(call.entry)
        if call.entry == "hybrid":
            expected = said_of(OPERATORS.hybrid, fuzz.arguments_of(call.tensors, call.options))
            assert said_of(CUDA_OPERATORS.hybrid_on_cuda, prefill_on_cuda(call)) == expected, call
            continue
        t, (frequencies, *turns), scaling = call.tensors, call.options["turns"], call.options["scaling"]
        names = [x for x in SPECIFICATIONS["hybrid_step"] if x not in (*HYBRID_STATE, "log_scale", "norm_weight")]
        state, mix = [t[name] for name in HYBRID_STATE if name in t], [t["log_scale"], t["norm_weight"]]
        given = [t.get(name) for name in names]
        expected = said_of(OPERATORS.hybrid_step, (*given, state, *mix, frequencies, *turns, EXP, scaling))
        given += [state, *mix, torch.tensor(frequencies), None, *turns, scaling, 1.0, False]
        assert said_of(CUDA_OPERATORS.hybrid_step_on_cuda, given) == expected, call
        assert said_of(CUDA_OPERATORS.hybrid_step_on_cuda_, given) == expected, call
    assert min(map(refused.count, ("hybrid", "hybrid_step"))) > 10


def test_on_cuda_each_head_has_its_weights_and_frequencies_are_float32():
    """Which is more than torch asks for, whose map may be one for all heads."""
    calls = (Maker(seed).call() for seed in range(1000))
    calls = (x for x in calls if x.entry == "hybrid" and x.options["function"] == EXP and not x.misfit)
    call = next(x for x in calls if x.tensors["key"].shape[1] > 1 and x.options["turns"][0])
    given = list(prefill_on_cuda(call))
    wrong = {10: (given[10][:1], "key_weight"), 13: (given[13][:1], "query_weight"), 19: (given[19].double(), "freq")}
    for place, (x, name) in wrong.items():
        said = said_of(CUDA_OPERATORS.hybrid_on_cuda, [*given[:place], x, *given[place + 1 :]])
        assert said.startswith(f"`{name}")


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
