"""What tests of kernels and mechanisms share."""

from __future__ import annotations

import pytest

from hf_linear_attention.kernels import cpu as kernels_cpu


@pytest.fixture(params=["C", "torch"])
def backend(request, monkeypatch) -> str:
    """Both, where there are C kernels."""
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip(kernels_cpu.kernel_backend().reason)
    return request.param
