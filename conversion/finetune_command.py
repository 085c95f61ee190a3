"""`hf-linear-attention finetune`: training/finetune.py, then report.html of its result, and `--push_to_hub NAME`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linear_attention._common.command_line import not_essential, run_command, typed_name
from hf_linear_attention._common.errors import RunError
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention.training import finetune


logger = logging.getLogger(__name__)

NAME = "finetune.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog=typed_name(NAME), add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--push_to_hub", metavar="NAME")
    own, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    name = own.push_to_hub
    if name is not None and (code := run_command(NAME, lambda: _check(name), stopped="nothing was written")):
        return code
    return finetune.main(words, lambda folder: finish(folder, name))


def _check(name: str) -> None:
    from hf_linear_attention.conversion.hub import check_hub_name  # it imports what `--help` does without

    check_hub_name(name)


def finish(folder: Path, name: str | None) -> None:
    """Write report.html into the folder of a trained model that was converted before, and push it if it has a `name`.

    Raises:
        RunError: if there is no model to push, or the Hub refuses.
    """
    from hf_linear_attention.conversion.hub import push
    from hf_linear_attention.conversion.page import PAGE, write_page

    has_model = (folder / "config.json").is_file()
    if has_model and (folder / REPORT).is_file():
        with not_essential(PAGE):
            write_page(folder)
    if name is None:
        return
    if not has_model:
        raise RunError(f"`--push_to_hub {name}`: nothing was trained, so {folder} has no model; give a `--train_file`")
    logger.info("pushed to %s", push(folder, name))


if __name__ == "__main__":
    sys.exit(main())
