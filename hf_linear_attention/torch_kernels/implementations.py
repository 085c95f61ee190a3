# SPDX-License-Identifier: Apache-2.0
"""Who computes: the registry of faster implementations of the functions in this folder, and where we are.

The package registers its operators, C kernels and CUDA kernels here (`hf_linear_attention.kernels`). The code in a
checkpoint registers none, so that torch computes everything. Each function of this folder asks for its implementation
by name, and computes in torch if there is none or if the implementation does not take its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


# Raised whenever the name, the arguments or the result of an implementation changes.
INTERFACE = 2
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
# Functions that register implementations, called once, before the first one is needed.
PROVIDERS: list[Callable[[], Any]] = []


def register_implementations(interface: int, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add implementations, by the names under which the functions of this folder ask for them.

    Each returns None for arguments that it does not take.

    Raises:
        ValueError: if they were written for another version of the interface.
    """
    if interface != INTERFACE:
        raise ValueError(f"Got kernels for interface {interface}; this code has interface {INTERFACE}.")
    IMPLEMENTATIONS.update(functions)


def load_implementations() -> None:
    """Let every provider register its implementations; no graph of torch.compile may contain that."""
    while PROVIDERS:
        PROVIDERS.pop()()


def implemented(name: str, *given: Any) -> Any:
    """What the implementation `name` returns for these arguments; None if there is none that takes them."""
    if PROVIDERS:
        load_implementations()
    function = IMPLEMENTATIONS.get(name)
    return None if function is None else function(*given)


def in_large_pages(tensor: Any) -> Any:
    """A new, large `tensor`, for which the kernels may ask the system for large pages."""
    implemented("in_large_pages", tensor)
    return tensor


def is_tracing() -> bool:
    """Whether a graph is being built (torch.compile, torch.export, ONNX), in which no branch may depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def needs_plain(tensor: torch.Tensor) -> bool:
    """Whether only plain torch operations will do: in exported graphs, under torch.func, for tensor subclasses."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return True
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is not torch.Tensor or torch._C._functorch.maybe_current_level() is not None


def is_eager(tensor: torch.Tensor) -> bool:
    """Whether the computation runs immediately and on a plain tensor, so that code tuned for eager mode pays off."""
    return not torch.compiler.is_compiling() and not needs_plain(tensor)


def is_free(length: int) -> bool:
    """Whether a graph is being exported in which this length is a variable, so that nothing may depend on it."""
    return isinstance(length, torch.SymInt)
