"""The window of the same bytes, trained as the student was: the same stages, tokens, seed and text.

A window has no parameters of its own, so that stages of attention transfer give their tokens to the others.
"""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion.controls import SameBytes
from hf_linear_attention.conversion.language_figures import better_window, possible_controls
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training
from hf_linear_attention.conversion.quality import HeldOut, held_out_text, load_models
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.training.presets.stages import Run, run_stages


logger = logging.getLogger(__name__)


def heal_control(source: Source, training: Training, data: HeldOut, run: Run) -> None:
    """Train it in the work folder, or go on with that; nothing where the text is too short for a control.

    Args:
        run: what runs one stage, as for the student.
    """
    work = training.work / CONTROL
    if not (work / CONVERTED).is_dir():
        student = training.work / TRAINED
        recipe, text = held_out_text(student, source, data)
        model, teacher = load_models(recipe, student)
        controls = possible_controls(teacher, model, text)
        if not controls.windows:
            logger.warning("no window of the same bytes is healed: %s", controls.left_out)
            return
        window, _ = better_window(teacher, controls.windows, text.batches())
        work.mkdir(exist_ok=True)
        with staging(work / CONVERTED) as folder:
            save_window(teacher, window, student, folder, data.trust_remote_code)
    logger.info("the control: %s", work)
    given = {**training.given, "model_name_or_path": work / CONVERTED, "output_dir": work / TRAINED}
    run_stages(training.preset, given, run)


def save_window(
    teacher: PreTrainedModel, window: SameBytes, student: Path, folder: Path, trust_remote_code: bool = False
) -> None:
    """The untrained window, with the tokenizer of the student's folder."""
    convert(teacher, settings=window.settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(student, trust_remote_code=trust_remote_code).save_pretrained(folder)
