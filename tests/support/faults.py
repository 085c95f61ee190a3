"""Running both commands in this process on bad input, within limits of time and memory, and what a refusal must be."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState

from hf_linear_attention.conversion import commands, convert_checkpoint
from hf_linear_attention.training import finetune as finetuning


SECONDS = 30
BYTES = 8 * 2**30  # more than any refusal may take, and less than what would disturb the machine
Result = tuple[int, str, str]
NAME = r"(?:convert_checkpoint|finetune)\.py|hf-linear-attention(?: \w+)?"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A context that may take neither long nor much memory: what hangs, or allocates without end, fails instead."""

    def too_long(number: int, frame: object) -> None:
        raise AssertionError(f"this took more than {SECONDS} seconds")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run(main: Any, *words: object) -> Result:
    """A command in this process; returns exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


convert = functools.partial(_run, convert_checkpoint.main)
finetune = functools.partial(_run, finetuning.main)
command = functools.partial(_run, commands.main)


def words_of(**options: object) -> list[object]:
    """The words of a command line with these options, without those that are None."""
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", value)]


def train(model: Path, data: Path | None, out: Path, run: Any = finetune, **options: object) -> Result:
    """The result of one step of training on a file, or on `good.jsonl` of the fixture `files`; options win."""
    data = data / "good.jsonl" if data is not None and (data / "good.jsonl").is_file() else data
    given = {"task": "causal_lm", "model_name_or_path": model, "train_file": data, "output_dir": out}
    return run(*words_of(**(given | {"max_train_steps": 1} | options)))


def without_privileges(command: Any, *words: object) -> Result:
    """`command(*words)` in a forked process to which permissions apply, also where the tests run as root."""
    read, write = os.pipe()
    if (number := os.fork()) == 0:
        try:
            # struct __user_cap_header_struct and two of __user_cap_data_struct (capget(2)), all empty
            header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            if ctypes.CDLL(None, use_errno=True).capset(header, data) != 0:
                raise OSError(ctypes.get_errno(), "capset")
            os.write(write, json.dumps(command(*words)).encode())
        except BaseException as error:
            os.write(write, json.dumps((-1, "", repr(error))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        code, out, err = json.loads(file.read())
    os.waitpid(number, 0)
    return code, out, err


def assert_refused(result: Result, *said: str, code: int = 2) -> None:
    """The command ended with `code` and one line of our own that contains `said`; nothing went to stdout."""
    got, out, err = result
    line = (err.splitlines() or [""])[-1]
    assert "Traceback" not in err, err[-2000:]
    assert got == code, f"exit code {got}: {err[-1500:]}"
    word = {2: "error", 1: "failed"}[code]
    assert re.match(rf"({NAME}): {word}: \S", line), line
    assert len(re.findall(rf"^(?:{NAME}): ", err, flags=re.M)) == 1, err
    assert "HF_LINEAR_ATTENTION_DEBUG=1" not in line, f"a foreign error: {line}"
    assert out == ""
    assert all(part in line for part in said), f"{said} not in: {line}"


def assert_nothing_written(folder: Path, *expected: str) -> None:
    """`folder` holds what was expected, and nothing else."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


def copy_of(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint that a test may damage."""
    shutil.copytree(source, folder)
    return folder


def change_json(path: Path, **changes: Any) -> Path:
    """Change entries of a JSON file; `...` removes one."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            content.pop(name, None)
        else:
            content[name] = value
    path.write_text(json.dumps(content))
    return path
