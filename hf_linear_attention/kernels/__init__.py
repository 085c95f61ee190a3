# SPDX-License-Identifier: Apache-2.0
"""The kernels: registered operators, their checks, and the implementations in C and on CUDA. No checkpoint has them."""

from __future__ import annotations

from typing import Any


def register_kernels() -> None:
    """Register all kernels of this package as implementations of the functions in `torch_kernels`."""
    from ..torch_kernels.implementations import register_implementations
    from .checks import check_attention
    from .cpu import in_large_pages
    from .delta import check_arguments, delta, delta_step
    from .fla import gpu_kernel
    from .hybrid import hybrid, sinks_as_exact_keys, spans_of, takes_hybrid, window_on_cuda
    from .hybrid_step import hybrid_step, takes_hybrid_step
    from .operators import attention, attention_step, elu_plus_one, makes_features, slot_attention
    from .triton_hybrid import scores
    from .window import window, window_both_ways

    functions: dict[str, Any] = {
        "attention": attention,
        "attention_step": attention_step,
        "check_attention": check_attention,
        "check_delta": check_arguments,
        "elu_plus_one": elu_plus_one,
        "gated_delta": delta,
        "gated_delta_step": delta_step,
        "gpu_kernel": gpu_kernel,
        "hybrid": hybrid,
        "hybrid_step": hybrid_step,
        "in_large_pages": in_large_pages,
        "makes_features": makes_features,
        "scores_on_cuda": scores,
        "sinks_as_exact_keys": sinks_as_exact_keys,
        "slot_attention": slot_attention,
        "spans_of": spans_of,
        "takes_hybrid": takes_hybrid,
        "takes_hybrid_step": takes_hybrid_step,
        "window": window,
        "window_both_ways": window_both_ways,
        "window_on_cuda": window_on_cuda,
    }
    register_implementations(5, functions)
