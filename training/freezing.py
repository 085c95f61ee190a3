"""`--freeze_pattern`: parameters that stay as they are, by a regular expression found in their names."""

from __future__ import annotations

import logging
import re

from torch import nn

from hf_linear_attention._common.errors import TrainingError


logger = logging.getLogger(__name__)


def freeze(model: nn.Module, pattern: str) -> None:
    """No gradients for parameters in whose name `pattern` is found.

    Raises:
        TrainingError: if it is found in none or in all of them.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name for name in names if re.search(pattern, name)}
    if not found or len(found) == len(names):
        raise TrainingError(
            f"`--freeze_pattern {pattern}` is found in {len(found)} of {len(names)} names of parameters, such as "
            f"{', '.join(names[:3])}; it has to leave some and freeze some"
        )
    for name in found:
        model.get_parameter(name).requires_grad_(False)
    logger.info("frozen: %d of %d parameters", len(found), len(names))
