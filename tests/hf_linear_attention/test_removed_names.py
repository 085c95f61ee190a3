"""Models work in a transformers without the names that 5.24 deprecates and 5.40 removes (`past_key_values`).

In one that is newer than the tested version, errors say so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from caches import NAME
from matrix import stock_config

from hf_linear_attention import convert_config
from hf_linear_attention._common.command_line import run_command
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention.attention import transformers_internals
from hf_linear_attention.modeling_linear_attention import linear_model_class


HERE = Path(__file__).parent
# Caches of decoders and encoder-decoders, decoding, chunks of long inputs, prompt states.
TESTS = (
    "test_cache.py::test_an_encoder_decoder",
    "test_generation.py::test_every_split_of_prefill_and_decoding_gives_the_logits_of_one_forward[hybrid]",
    "test_generation.py::test_assisted_decoding_as_target_and_as_assistant[linear]",
    "test_long_inputs.py::test_logits_are_those_of_one_pass[linear]",
    "test_prompt_state.py::test_a_restored_prompt_goes_on_as_the_cache_does[softmax-left]",
)


@pytest.mark.long
@pytest.mark.skipif(NAME != "cache", reason="an older transformers knows the old names only")
def test_nothing_needs_the_old_names():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "removed_names", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-W", "error:.past_key_values. is deprecated", *(str(HERE / name) for name in TESTS)]
    found = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]


def test_the_tested_version_is_the_pinned_one():
    pinned = (HERE.parents[1] / "constraints.txt").read_text().split("\ntransformers==")[1].split()[0]
    assert tuple(map(int, pinned.split(".")[:2])) == transformers_internals.TESTED


def test_an_error_names_a_newer_version(monkeypatch, capsys):
    said = 'transformers 5.99.0.dev0 is newer than 5.24, .*; if that is why, `pip install "transformers<=5.24.99"`, or'
    monkeypatch.setattr(f"{transformers_internals.__name__}.transformers.__version__", "5.99.0.dev0")
    monkeypatch.setattr("hf_linear_attention.modeling_linear_attention.CLASSES", {})
    model = linear_model_class(transformers.LlamaForCausalLM)(convert_config(stock_config("llama")))
    with pytest.raises(TypeError) as found:
        model("no ids")
    assert any(re.match(said, note) for note in found.value.__notes__)

    def fail(error):
        raise error

    assert run_command("convert", lambda: fail(ConversionError("no such name")), stopped="") == 1
    assert re.search(f"failed: no such name. {said}", capsys.readouterr().err)
    assert run_command("convert", lambda: fail(UsageError("no such option")), stopped="") == 2
    assert "newer" not in capsys.readouterr().err
