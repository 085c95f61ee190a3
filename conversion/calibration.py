"""Choosing what a conversion calibrates its mechanisms on (FAVOR++); the fitting is `hf_linear_attention.calibrate`."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from hf_linear_attention import calibrate
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.calibration_data import RealInputs
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.request import ConversionArguments
from hf_linear_attention.conversion.softmax_layers import is_automatic, ranking_file
from hf_linear_attention.mechanisms import MECHANISMS


logger = logging.getLogger(__name__)


CALIBRATION_TOKENS = 4096


def needs_calibration(plan: Plan) -> bool:
    """Whether the layers to convert have constants to fit."""
    settings = plan.settings
    return bool(plan.layers) and MECHANISMS[settings["mechanism"]].needs_calibration(settings)


def check_options(arguments: ConversionArguments, plan: Plan) -> None:
    """Raises `UsageError` for options of calibration and diagnosis that nothing would look at."""
    is_used, tokens = needs_calibration(plan), arguments.calibration_tokens
    problems = []
    is_used = is_used or is_automatic(arguments)
    if arguments.calibration_file is not None and not (is_used or arguments.spectrum):
        problems.append(
            f"`--calibration_file` is given, but `{plan.settings['mechanism']}` as set here has nothing to calibrate; "
            "leave it out, or add `--spectrum` to look at the attention on it"
        )
    file = ranking_file(arguments) if is_automatic(arguments) else arguments.calibration_file
    if tokens is not None and not (is_used and file is not None):
        reason = "has nothing to calibrate" if not is_used else "is calibrated on all built-in sentences"
        problems.append(
            f"`--calibration_tokens` is given, but `{plan.settings['mechanism']}` as set here {reason}; leave it out"
            + ("" if not is_used else ", or name a `--calibration_file`")
        )
    if arguments.spectrum and not plan.layers:
        problems.append("`--spectrum` looks at the layers to convert, and `--layers` leaves none")
    if problems:
        raise UsageError(*problems)


def calibrate_on(model: PreTrainedModel, inputs: RealInputs | None, max_tokens: int | None) -> dict[str, Any]:
    """Calibrate a model that needs it, in place; returns what the report says of it: `inputs` and `tokens`.

    Raises:
        UsageError: if the attention of this model cannot be observed.
    """
    if inputs is None:
        logger.warning(
            "not calibrated, because there is no text or image to do it on: give `--calibration_file`. Until then the "
            "features are those of FAVOR+"
        )
        return {"inputs": None, "tokens": 0}
    logger.info("calibrating on %s", inputs.name)
    try:
        tokens = calibrate(model, inputs.batches(max_tokens or CALIBRATION_TOKENS))
    except NotImplementedError as error:
        settings = model.config.linear_attention
        raise UsageError(f"`{settings['mechanism']}` as set here has to be calibrated, but {error}") from error
    return {"inputs": inputs.name, "tokens": tokens}
