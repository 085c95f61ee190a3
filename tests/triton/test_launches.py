"""What the launchers launch: the numbers that `test_fake_cuda.py`, where no launcher runs, counts for each operator."""

from __future__ import annotations

import contextlib

import pytest
import torch
import triton_interpreter
from fake_cuda import OF_TRITON, VIEWS
from hybrid_calls import EXACT, ROTARY, mechanisms, on_cuda, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from hf_linear_attention.kernels import triton_backward, triton_prefill, triton_step


assert triton_interpreter


class Launches(TorchDispatchMode):
    """The names of our kernels, and of the operators of torch beside them that launch something."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names: list[str] = []
        get = InterpretedFunction.__getitem__

        def launch(kernel, grid):
            def run(*given, **others):
                before = [*self.names, kernel.fn.__name__]
                get(kernel, grid)(*given, **others)
                self.names = before  # without what the interpreter does

            return run

        monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        self.names += [] if name in VIEWS else [name]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("operator", "module", "length", "trains"),
    [
        ("hybrid", triton_prefill, 140, False),
        ("hybrid_step", triton_step, 1, False),
        ("hybrid", triton_prefill, 140, True),
        ("hybrid_backward", triton_backward, 140, True),
    ],
)
def test_an_operator_is_as_many_launches_as_fake_cuda_counts(operator, module, length, trains, monkeypatch):
    for each in (triton_prefill, triton_backward):
        monkeypatch.setattr(each, "GROUP", 1)
    mechanism, _ = mechanisms(EXACT | ROTARY | {"trained_length": 12}, torch.float32)
    with torch.set_grad_enabled(trains):
        state = None if trains else mechanism(tokens(mechanism, 0, 14, torch.float32))[1]
        more = tokens(mechanism, 14, 14 + length, torch.float32)
        on_cuda(monkeypatch)
        launch, launches, names = module.run, Launches(monkeypatch), []

        def run(*given, **others):
            launches.names = []
            with launches:
                found = launch(*given, **others)
            names.extend(launches.names)
            return found

        monkeypatch.setattr(module, "run", run)
        output, _ = mechanism(more, state)
        if trains:
            output.sum().backward()
    assert len(names) == OF_TRITON[operator], " ".join(names)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """A model may be on several GPUs, of which one is current."""
    entered, launched = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    def launch(kernel, grid):
        def run(*given, **others):
            launched.append((kernel.fn.__name__, len(entered)))
            get(kernel, grid)(*given, **others)

        return run

    mechanism, _ = mechanisms(EXACT | ROTARY | {"trained_length": 12}, torch.float32)
    on_cuda(monkeypatch)
    get = InterpretedFunction.__getitem__
    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    mechanism(tokens(mechanism, 0, 20, torch.float32))[0].sum().backward()
    with torch.no_grad():
        _, state = mechanism(tokens(mechanism, 0, 14, torch.float32))
        mechanism(tokens(mechanism, 14, 15, torch.float32), state)
    assert {"_scores", "_begin", "_outputs", "_of_keys"} <= {name for name, _ in launched}
    assert {number for _, number in launched} == {1}
