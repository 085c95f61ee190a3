"""Calibration of mechanisms (FAVOR++) during a conversion; the fitting itself is `hf_linear_attention.calibrate`."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from hf_linear_attention import calibrate
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import progress
from hf_linear_attention.configuration_linear_attention import entries_of, mechanisms_of
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.options import ConversionArguments
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.softmax_choice import chooses_heads, is_automatic
from hf_linear_attention.mechanisms.registry import MECHANISMS


logger = logging.getLogger(__name__)


CALIBRATION_TOKENS = 4096


def needs_calibration(plan: Plan) -> bool:
    """Whether a mechanism of the layers to convert has constants to fit."""
    entries = entries_of(plan.settings)
    return bool(plan.layers) and any(MECHANISMS[entry["mechanism"]].needs_calibration(entry) for entry in entries)


def check_options(arguments: ConversionArguments, plan: Plan) -> None:
    """Refuse a `--calibration_file` that would have no effect.

    Raises:
        UsageError: if nothing reads it.
    """
    is_read = needs_calibration(plan) or is_automatic(arguments) or chooses_heads(arguments)
    if arguments.calibration_file is not None and not is_read:
        has = "has" if len(mechanisms_of(plan.settings)) == 1 else "have"
        raise UsageError(
            f"`--calibration_file` is given, but {plan.mechanisms} with these settings {has} nothing to calibrate; "
            "leave it out"
        )


def calibrate_on(model: PreTrainedModel, inputs: RealInputs | None) -> dict[str, Any]:
    """Calibrate a model in place; returns the entry of the report, `inputs` and `tokens`.

    Args:
        inputs: what to calibrate on; if None, the model keeps its initial constants and a warning is logged.

    Raises:
        UsageError: if the attention of this model cannot be observed.
    """
    if inputs is None:
        logger.warning(
            "not calibrated, because there are no texts or images to calibrate on; give `--calibration_file`. "
            "Without calibration the features are those of FAVOR+"
        )
        return {"inputs": None, "tokens": 0}
    logger.info("calibrating on %s", inputs.name)
    try:
        tokens = calibrate(model, progress(inputs.batches(CALIBRATION_TOKENS), "calibrating"))
    except NotImplementedError as error:
        names = " and ".join(f"`{name}`" for name in sorted(mechanisms_of(model.config.linear_attention)))
        raise UsageError(f"{names} with these settings needs calibration, but {error}") from error
    return {"inputs": inputs.name, "tokens": tokens}
