r"""Serve a converted model with an OpenAI-compatible API: by the server of transformers, or by vLLM.

    hf-linear-attention serve OUT --port 8000
    transformers chat OUT http://localhost:8000
    hf-linear-attention serve OUT --engine vllm --max-model-len 32768

`transformers chat`, /v1/chat/completions and /v1/responses need a tokenizer with a chat template, which base models do
not have; /v1/completions needs none. Only OUT is served. The server of transformers answers one request after the
other, and vLLM many at once.

Options of this command:
  --engine NAME            transformers (default) or vllm
  --api_key KEY            clients must send it as a Bearer token (default: the variable HF_LINEAR_ATTENTION_API_KEY)
  --allowed_host NAMES     names in the `Host` header of requests besides localhost and --host, with commas; *: any
  --max_request_mb N       the largest request, in MB (default: 4)
  --request_timeout N      seconds until a request must be answered (default: 600)

The last three are for the engine transformers alone. All other options are those of `transformers serve`
(`transformers serve --help`), which by itself cannot find the classes of a converted model. This engine needs
`pip install "hf-linear-attention[serve]"`.

With `--engine vllm`, all other options are those of `vllm serve` (`serve OUT --engine vllm --help=all`), whose --host
and --port are localhost and 8000 here. It needs `pip install "hf-linear-attention[vllm]"` with a GPU; docs/serve.md
says what to install without one. A prompt and its answer have at most --max-model-len tokens, by default as many as
the original was trained on. More are allowed where the positions are rotary: this sets VLLM_ALLOW_LONG_MAX_MODEL_LEN=1,
unless it is set already. On a CPU, states and keys get 1 GiB, unless --kv-cache-memory-bytes,
--gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE says otherwise; vLLM alone would take most of the memory.

Exit codes: 0 stopped, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM. When vLLM listens already,
it ends with 0 after either signal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.command_line import Parser, run_command, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import reading


# What a converted decoder cannot do in the server; see `init_continuous_batching` of the model.
REFUSED = ("--continuous-batching", "--continuous_batching")
ENGINES = ("transformers", "vllm")
# The options that only our application around the server of transformers has, and their defaults.
LIMITS = {"allowed_host": "", "max_request_mb": 4.0, "request_timeout": 600.0}
API_KEY = "HF_LINEAR_ATTENTION_API_KEY"
LOCAL = ("localhost", "127.0.0.1", "[::1]")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"usage: {typed_name('serve.py')} OUT [options of `transformers serve`]\n\n{__doc__}")
        raise SystemExit(0)
    return run_command("serve.py", lambda: _serve(words), stopped="the server has stopped")


def _serve(words: Sequence[str]) -> None:
    if not words or words[0].startswith("-"):
        given = f"`{words[0]}` is not an option here" if words else "there is no model"
        raise UsageError(f"{given}; give the folder or name of a converted model first, then options of the server")
    if found := [word for word in words if word in REFUSED]:
        raise UsageError(f"`{found[0]}` keeps paged keys and values, which linear layers do not have; leave it out")
    ours, others = parse(words)
    if ours.engine == "vllm":
        from hf_linear_attention.conversion.serve_vllm import start_vllm

        start_vllm(ours, others)
    else:
        start(ours, others)


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that this command reads itself, and the words for `transformers serve` or `vllm serve`.

    Raises:
        UsageError: for a value that is impossible, or an option that the engine does not have.
    """
    parser = Parser([], add_help=False)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--api_key", "--api-key", default=os.environ.get(API_KEY) or None)
    for name, usual in LIMITS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=type(usual), default=None)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    ours, others = parser.parse_known_args(list(words))
    problems = [
        f"`--{name}` is an option of our own server, which `--engine vllm` does not start; leave it out"
        for name in LIMITS
        if ours.engine == "vllm" and getattr(ours, name) is not None
    ]
    for name, usual in LIMITS.items():
        if getattr(ours, name) is None:
            setattr(ours, name, usual)
    problems += [
        f"`--{name}` is {getattr(ours, name):g}; give a number above 0"
        for name in ("max_request_mb", "request_timeout")
        if not 0 < getattr(ours, name) < float("inf")
    ]
    if not 0 <= ours.port <= 65535:
        problems.append(f"`--port` is {ours.port}; give a whole number from 0 to 65535 (0: any free port)")
    if ours.api_key == "":
        problems.append("`--api_key` is empty; give a key, or leave the option out")
    if wrong := [name for name in _names(ours) if "*" in name.removeprefix("*.") and name != "*"]:
        problems.append(f"`--allowed_host` is {wrong[0]!r}; give a name such as host.example.org, *.example.org or *")
    if problems:
        raise UsageError(*problems)
    return ours, [*others, "--host", ours.host, "--port", str(ours.port)]


def _names(ours: argparse.Namespace) -> list[str]:
    return [name.strip() for name in ours.allowed_host.split(",") if name.strip()]


def config_of(name: str, other: str) -> Any:
    """The config of a converted model.

    Args:
        name: its folder or name on the Hub.
        other: the command that serves models which are not converted.

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


def register_model(name: str) -> type:
    """Let the server of transformers find the class of this model; returns the class.

    It looks classes up by name in the module `transformers`, whatever code the checkpoint carries. The class is put
    there in this process alone: importing this package changes nothing of transformers.

    Raises:
        UsageError: if there is no such model, or it is not a converted one.
    """
    from hf_linear_attention.attention.transformers_internals import server_namespace
    from hf_linear_attention.modeling_linear_attention import linear_model_class

    config = config_of(name, "transformers serve")
    architecture = (config.architectures or [""])[0]
    namespace = server_namespace()
    stock = getattr(namespace, architecture.removeprefix("Linear"), None)
    if stock is None:
        raise UsageError(f"config.json of {name!r} names no class of transformers in `architectures`")
    found = linear_model_class(stock)
    setattr(namespace, architecture, found)
    return found


def start(ours: argparse.Namespace, words: Sequence[str]) -> None:
    """Run `transformers serve` with these words until it is stopped.

    Args:
        ours: the options of this command.
        words: the model, and the options of `transformers serve`.

    Raises:
        UsageError: if the libraries of the server are missing, or for what `transformers serve` does not know.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UsageError('the server needs more libraries; run `pip install "hf-linear-attention[serve]"`')
    import typer
    from transformers.cli.serve import Serve

    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    command = typer.main.get_command(app)
    try:
        context = command.make_context("transformers serve", list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer raises has it, whichever click it is built on
            raise
        raise UsageError(f"{error.format_message()} (`--help` and `transformers serve --help` list options)") from error
    register_model(words[0])
    with context, _our_app(ours):
        command.invoke(context)


@contextlib.contextmanager
def _our_app(ours: argparse.Namespace) -> Iterator[None]:
    """A context in which the server of transformers runs our application around its handlers."""
    from transformers.cli.serving import server

    from hf_linear_attention.conversion.serve_app import Limits, build_app

    host = f"[{ours.host}]" if ":" in ours.host else ours.host
    limits = Limits(
        hosts=(*LOCAL, host, *_names(ours)),
        max_request_bytes=int(ours.max_request_mb * 1e6),
        request_timeout=ours.request_timeout,
        api_key=ours.api_key,
    )

    def build(
        model_manager: Any,
        chat_handler: Any,
        completion_handler: Any,
        response_handler: Any,
        *_: Any,
        generation_state: Any,
        enable_cors: bool = False,
        **__: Any,
    ) -> Any:
        handlers = {"chat": chat_handler, "completion": completion_handler, "response": response_handler}
        return build_app(model_manager, handlers, limits, state=generation_state, enable_cors=enable_cors)

    module: Any = server
    theirs, module.build_server = module.build_server, build
    try:
        yield
    finally:
        module.build_server = theirs


if __name__ == "__main__":
    sys.exit(main())
