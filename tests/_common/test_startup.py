"""What starts at once: help, versions and refusals import neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys

from hf_linear_attention.conversion.commands import COMMANDS


RUN = """
import contextlib, io, json, sys
from hf_linear_attention.conversion.commands import main
found = {}
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(line.split())
        except SystemExit as error:
            code = error.code or 0
    heavy = {"torch", "transformers", "numpy", "datasets", "accelerate"} & sys.modules.keys()
    found[line] = [code, sorted(heavy)]
print(json.dumps(found))
"""
LINES = {
    "--version": 0,
    **{f"{name} --help": 0 for name in COMMANDS},
    **{f"{name} --banana": 2 for name in COMMANDS},
    "convert --model_name_or_path m --output_dir o --window_size many": 2,
    "finetune --task causal_lm --model_name_or_path m --output_dir o": 2,
}


def test_they_import_no_large_library() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *LINES], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {line: [code, []] for line, code in LINES.items()}
