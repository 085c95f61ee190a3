"""What starts at once: help, versions and refusals import neither torch nor transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_linear_attention.conversion.commands import COMMANDS


RUN = """
import sys
from hf_linear_attention.conversion.commands import main
code = 2
try:
    code = main(sys.argv[1:])
finally:
    heavy = {"torch", "transformers", "numpy", "datasets", "accelerate"} & sys.modules.keys()
    sys.stderr.write(f"imported: {sorted(heavy)}")
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--version"], 0),
        *(([name, "--help"], 0) for name in COMMANDS),
        *(([name, "--banana"], 2) for name in COMMANDS),
        (["convert", "--model_name_or_path", "m", "--output_dir", "o", "--window_size", "many"], 2),
        (["finetune", "--task", "causal_lm", "--model_name_or_path", "m", "--output_dir", "o"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_it_imports_no_large_library(words: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith("imported: []"), done.stderr
