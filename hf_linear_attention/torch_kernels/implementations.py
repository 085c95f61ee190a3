# SPDX-License-Identifier: Apache-2.0
"""The registry of faster implementations of the functions in this folder.

The package registers its operators, C kernels and CUDA kernels here (`hf_linear_attention.kernels`). The code in a
checkpoint registers none, so that torch computes everything. Each function of this folder asks for its implementation
by name, and computes in torch if there is none or if the implementation does not take its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


# Raised whenever the name, the arguments or the result of an implementation changes.
INTERFACE = 5
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
# Functions that register implementations, called once, before the first one is needed.
PROVIDERS: list[Callable[[], Any]] = []


def register_implementations(interface: int, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add implementations, by the names under which the functions of this folder ask for them.

    Each returns None for arguments that it does not take. ValueError for those of another version of the interface.
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
