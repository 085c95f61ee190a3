"""The kernels' operators by name, whichever file registers them."""

from __future__ import annotations

from types import SimpleNamespace

from hf_linear_attention import kernels_delta, kernels_hybrid, kernels_joint, kernels_operators, kernels_slots


FAMILIES = (
    (kernels_operators.OPERATORS, kernels_operators.OPERATORS_OF_ATTENTION),
    (kernels_hybrid.OPERATORS, kernels_hybrid.OPERATORS_OF_HYBRID),
    (kernels_joint.OPERATORS, kernels_joint.OPERATORS_OF_JOINT),
    (kernels_slots.OPERATORS, kernels_slots.OPERATORS_OF_SLOTS),
    (kernels_delta.OPERATORS, kernels_delta.OPERATORS_OF_DELTA),
)
OPERATORS = SimpleNamespace(**{name: getattr(registered, name) for registered, names in FAMILIES for name in names})
