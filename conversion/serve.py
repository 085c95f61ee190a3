r"""Serve a converted model with an OpenAI-compatible API: by the server of transformers, or by vLLM.

    hf-linear-attention serve OUT --port 8000
    transformers chat OUT http://localhost:8000
    hf-linear-attention serve OUT --engine vllm --max-model-len 32768

All options but --engine are those of the server: `transformers serve --help`, or `serve OUT --engine vllm --help=all`.
Both listen on localhost, port 8000.

--engine transformers (default) starts `transformers serve`, which by itself cannot find the classes of a converted
model. It has no API key, so --host can only be this machine. It needs `pip install "hf-linear-attention[serve]"`.

--engine vllm needs `pip install "hf-linear-attention[vllm]"` with a GPU; docs/serve.md says what to install without
one. A prompt and its answer have at most --max-model-len tokens, by default as many as the original was trained on.
More are allowed where the positions are rotary: this sets VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, unless it is set already. On
a CPU, states and keys get 1 GiB, unless --kv-cache-memory-bytes, --gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE
says otherwise; vLLM alone would take most of the memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.command_line import Parser, run_command, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import reading


INSTALL_VLLM = 'run `pip install "hf-linear-attention[vllm]"`; docs/serve.md says what to install without a GPU'
LOCAL = ("localhost", "127.0.0.1", "::1")
# What only a server that others may reach needs; `transformers serve` has nothing of it.
KEYS_AND_LIMITS = (
    *("--api_key", "--api-key", "--allowed_host", "--allowed-host"),
    *("--max_request_mb", "--max-request-mb", "--request_timeout", "--request-timeout"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"usage: {typed_name('serve.py')} OUT [--engine transformers|vllm] [options]\n\n{__doc__}")
        raise SystemExit(0)
    return run_command("serve.py", lambda: _serve(words), stopped="the server has stopped")


def _serve(words: Sequence[str]) -> None:
    if not words or words[0].startswith("-"):
        given = f"`{words[0]}` is not an option here" if words else "there is no model"
        raise UsageError(f"{given}; give the folder or name of a converted model first, then options of the server")
    parser = Parser([], add_help=False)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--host", default="localhost")
    ours, others = parser.parse_known_args([word for word in words if word != "--"])
    start = start_vllm if ours.engine == "vllm" else start_transformers
    start(others[0], ours.host, others[1:])


def start_transformers(name: str, host: str, words: Sequence[str]) -> None:
    """Run `transformers serve` in this process until it is stopped.

    Args:
        name: the folder or name of a converted model.
        host: the address to listen on.
        words: further options of `transformers serve`.

    Raises:
        UsageError: if the libraries of the server are missing, if other machines are to reach it, or for a model that
            it cannot serve.
    """
    from transformers.utils.import_utils import is_serve_available

    if unsafe := [word for word in words if word.split("=")[0] in KEYS_AND_LIMITS] or [host] * (host not in LOCAL):
        raise UsageError(
            f"`{unsafe[0].split('=')[0]}`: the server of transformers has no key and no limits, so it listens on "
            "localhost alone; `--engine vllm --api-key KEY` serves others"
        )
    if not is_serve_available():
        raise UsageError('the server needs more libraries; run `pip install "hf-linear-attention[serve]"`')
    from transformers.cli.transformers import app

    register_model(name)
    app(["serve", name, "--host", host, *words], prog_name="transformers")


def register_model(name: str) -> type:
    """Let the server of transformers find the class of this model; returns the class.

    It looks classes up by name in the module `transformers`, whatever code the checkpoint carries. The class is put
    there in this process alone: importing this package changes nothing of transformers.

    Raises:
        UsageError: if there is no such model, or it is not a converted one.
    """
    from hf_linear_attention.attention.transformers_internals import server_namespace
    from hf_linear_attention.modeling_linear_attention import linear_model_class

    config = _config_of(name, "transformers serve")
    architecture = (config.architectures or [""])[0]
    namespace = server_namespace()
    stock = getattr(namespace, architecture.removeprefix("Linear"), None)
    if stock is None:
        raise UsageError(f"config.json of {name!r} names no class of transformers in `architectures`")
    found = linear_model_class(stock)
    setattr(namespace, architecture, found)
    return found


def _config_of(name: str, other: str) -> Any:
    """The config of a converted model; `other` is the command that serves models which are not converted.

    Raises:
        UsageError: if there is no such model, or it is not a converted one.
    """
    from transformers import AutoConfig

    with reading(f"`{name}`", "give the folder or name of a converted model"):  # `~nosuchuser`
        folder = Path(name).expanduser()
    if folder.is_dir():
        check_checkpoint(folder)
    with reading(f"config.json of {name!r}", "give the folder or name of a converted model"):
        config: Any = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name)
    if not hasattr(config, "linear_attention"):
        raise UsageError(f"{name!r} is no converted model ({config.model_type}); `{other} {name}` serves it")
    return config


def start_vllm(name: str, host: str, words: Sequence[str]) -> None:
    """Run `vllm serve` in this process until it is stopped; our plugin registers the classes.

    The command `vllm` fails in builds for CPUs: they are called `vllm-cpu`, and it looks up its version as `vllm`.

    Args:
        name: the folder or name of a converted model.
        host: the address to listen on.
        words: further options of `vllm serve`.

    Raises:
        UsageError: if vLLM is missing or too old, or for a model that is not converted.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UsageError(f"vLLM is not installed; {INSTALL_VLLM}") from error
    from hf_linear_attention.vllm_plugin import TESTED, is_too_old

    if is_too_old(vllm.__version__):
        oldest = ".".join(map(str, TESTED))
        raise UsageError(f"vLLM {vllm.__version__} is older than {oldest}, which converted models need; {INSTALL_VLLM}")
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    arguments = parser.parse_args([name, "--host", host, *words])
    arguments.model = arguments.model_tag
    validate_parsed_serve_args(arguments)
    if getattr(_config_of(name, "vllm serve"), "rope_parameters", None):
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    memory = ("kv_cache_memory_bytes", "gpu_memory_utilization")
    if current_platform.is_cpu() and all(getattr(arguments, key) == parser.get_default(key) for key in memory):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # in GiB
    cli_env_setup()
    configure_logging_from_args(arguments)
    uvloop.run(run_server(arguments))


if __name__ == "__main__":
    sys.exit(main())
