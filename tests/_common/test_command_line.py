"""What both commands do alike: options with defaults in a YAML file, and one line for whatever goes wrong."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml

from hf_linear_attention._common.command_line import Parser, given_options, run_command
from hf_linear_attention._common.errors import ConversionError, RunError, TerminatedError, TrainingError, UsageError
from hf_linear_attention._common.options import option
from hf_linear_attention._common.safe_yaml import load_yaml


@dataclass
class Arguments:
    learning_rate: float = option("Rate.", 0.1)
    layers: str | None = option("Layers.", None)
    task: str = option("Task.", "a")
    dtype: Literal["float16", "float32"] | None = option("Type.", None)
    is_fast: bool = option("Fast.", False)


def fail(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            UsageError("`--a` is wrong", "so is `--b`"),
            2,
            "x.py: error: 2 problems: (1) `--a` is wrong; (2) so is `--b`",
        ),
        (RunError("no"), 1, "x.py: failed: no"),
        (ConversionError("not\n equal"), 1, "x.py: failed: not equal"),
        (TrainingError("no data"), 1, "x.py: failed: no data"),
        (TerminatedError("stopped at step 3"), 143, "x.py: terminated; stopped at step 3"),
        (OSError(28, "No space left on device"), 1, "x.py: failed: [Errno 28] No space left on device"),
        (ValueError("odd"), 1, "x.py: failed: odd (ValueError; HF_LINEAR_ATTENTION_DEBUG=1 shows where)"),
        (ValueError(), 1, "x.py: failed: ValueError (ValueError; HF_LINEAR_ATTENTION_DEBUG=1 shows where)"),
        (KeyboardInterrupt(), 130, "x.py: interrupted; nothing is lost"),
    ],
)
def test_every_end_is_one_line_and_an_exit_code(error, code, line, capsys) -> None:
    assert run_command("x.py", fail(error), stopped="nothing is lost") == code
    assert capsys.readouterr().err == f"{line}\n"


def test_debug_shows_where(monkeypatch) -> None:
    monkeypatch.setenv("HF_LINEAR_ATTENTION_DEBUG", "1")
    for error in (UsageError("a"), TrainingError("b"), ValueError("c")):
        with pytest.raises(type(error)):
            run_command("x.py", fail(error), stopped="")


def test_one_process_speaks_unless_it_may_be_another_that_knows(capsys) -> None:
    """What all processes of a launch meet is said once; what nobody expected may have happened to one of them."""
    for error in (UsageError("a"), TrainingError("b"), OSError("c"), KeyboardInterrupt()):
        assert run_command("x.py", fail(error), stopped="", speaks=False) > 0
    assert capsys.readouterr().err == ""
    assert run_command("x.py", fail(MemoryError("here alone")), stopped="", speaks=False) == 1
    assert capsys.readouterr().err.startswith("x.py: failed: not enough memory (here alone);")


def test_sigterm_is_one_line_after_the_way_out_and_the_handler_is_restored(capsys) -> None:
    cleared = []

    def action() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 5)
        except Exception:  # what libraries do must not stop it
            cleared.append("swallowed")
        finally:
            cleared.append("cleared")

    before = signal.getsignal(signal.SIGTERM)
    assert run_command("x.py", action, stopped="nothing is lost") == 143
    assert capsys.readouterr().err == "x.py: terminated; nothing is lost\n"
    assert cleared == ["cleared"]
    assert signal.getsignal(signal.SIGTERM) == before
    for error in (UsageError("a"), KeyboardInterrupt()):
        run_command("x.py", fail(error), stopped="")
        assert signal.getsignal(signal.SIGTERM) == before


def given(*argv: str) -> dict[str, object]:
    return given_options(Parser([Arguments], removed={"lost": "give `--task`"}), [Arguments], argv)


def test_unknown_options_are_listed_at_once_with_what_was_meant() -> None:
    with pytest.raises(UsageError) as caught:
        given("--learning-rat", "1", "--banana=2", "--task", "a", "--lost", "3")
    assert caught.value.problems == [
        "`--learning_rat` is not an option; did you mean `learning_rate`?",
        "`--banana` is not an option; `--help` lists the options, and abbreviations are not allowed",
        "`--lost` is not an option any more; give `--task`",
    ]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("learning_rate: 1e-3\nlayers: [0, 2]\ntask: a\ndtype:\n", encoding="utf-8")
    found = given("--config", str(file), "--task", "b", "--is-fast")
    assert found == {"learning_rate": 1e-3, "layers": "0,2", "task": "b", "is_fast": True}


def test_a_file_means_what_the_same_words_mean_on_the_command_line(tmp_path: Path) -> None:
    """`1:30` is 30 for layer 1, where YAML 1.1 reads 90; numbers and `true` stay what they are in every YAML."""
    file = tmp_path / "a.yaml"
    for text in ("1:30", "1:30.5", "-2:30", "0-3:64,4-:16", "010", "no", "on", "12", "0.5", "1e-3", "-3"):
        file.write_text(f"task: {text}\n", encoding="utf-8")
        assert given("--config", str(file)) == given(f"--task={text}") == {"task": text}
    typed = load_yaml("[12, -3, 1_000, 1.5, .5, 1.5e-3, .inf, true, False, null, 1:30, no]")
    assert typed == [12, -3, 1000, 1.5, 0.5, 0.0015, float("inf"), True, False, None, "1:30", "no"]
    written = {"window_size": "1:30", "task": "no", "layers": "010"}
    assert load_yaml(yaml.safe_dump(written)) == written


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a", "contains a list; it must map options to values"),
        (b"{", "is not valid YAML"),
        (b"\xff\xfe\xfa", "is not valid YAML"),
        (b"layers: {a: {b: 1}}", "give a single value, or values by layer"),
        (b"layers: [[1]]", "has lists in it"),
        (b"learning_rate: [1]", r"`--learning_rate \[1\]` in .*a.yaml: give a number"),
        (b"dtype: x", "`--dtype x` in .*a.yaml: it must be one of float16, float32"),
        (b"is_fast: 2", "`--is_fast 2` in .*a.yaml: give true or false"),
        (b"banana: 1\nlearning_rat: 2\nlost: 3", r"3 problems: .*banana.*did you mean `learning_rate`.*`--lost` in .*"),
        (b"3: 1", "`--3` in .* is not an option"),
    ],
)
def test_a_file_that_cannot_be_used(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        given("--config", str(file))
    with pytest.raises(UsageError, match="there is no such file"):
        given("--config", f"{file}.absent")
