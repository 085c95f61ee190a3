"""The kernels' operators by name, whichever file registers them."""

from __future__ import annotations

from types import SimpleNamespace

from hf_linear_attention.kernels import delta as kernels_delta
from hf_linear_attention.kernels import hybrid as kernels_hybrid
from hf_linear_attention.kernels import hybrid_step as kernels_hybrid_step
from hf_linear_attention.kernels import operators as kernels_operators
from hf_linear_attention.kernels import window as kernels_window


FAMILIES = (
    (kernels_operators.OPERATORS, kernels_operators.OPERATORS_OF_ATTENTION),
    (kernels_window.OPERATORS, kernels_window.OPERATORS_OF_WINDOW),
    (kernels_hybrid.OPERATORS, kernels_hybrid.OPERATORS_OF_HYBRID),
    (kernels_hybrid_step.OPERATORS, kernels_hybrid_step.OPERATORS_OF_STEP),
    (kernels_delta.OPERATORS, kernels_delta.OPERATORS_OF_DELTA),
)
OPERATORS = SimpleNamespace(**{name: getattr(registered, name) for registered, names in FAMILIES for name in names})
