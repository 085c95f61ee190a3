r"""Serve a converted model by the server of transformers, with an OpenAI-compatible API.

    hf-linear-attention serve OUT --port 8000
    transformers chat --model_name_or_path OUT localhost:8000

All options after OUT are those of `transformers serve` (`transformers serve --help`), which by itself cannot find the
classes of a converted model. It needs `pip install "transformers[serving]"`.

Exit codes: 0 stopped, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.command_line import run_command, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import reading


# What a converted decoder cannot do in the server; see `init_continuous_batching` of the model.
REFUSED = ("--continuous-batching", "--continuous_batching")


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
    register_model(words[0])
    start(words)


def register_model(name: str) -> type:
    """Let the server of transformers find the class of this model; returns the class.

    It looks classes up by name in the module `transformers`, whatever code the checkpoint carries. The class is put
    there in this process alone: importing this package changes nothing of transformers.

    Raises:
        UsageError: if there is no such model, or it is not a converted one.
    """
    from transformers import AutoConfig

    from hf_linear_attention.modeling_linear_attention import linear_model_class
    from hf_linear_attention.transformers_internals import server_namespace

    folder = Path(name).expanduser()
    if folder.is_dir():
        check_checkpoint(folder)
    with reading(f"config.json of {name!r}", "give the folder or name of a converted model"):
        config: Any = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name)
    architecture = (config.architectures or [""])[0]
    namespace = server_namespace()
    stock = getattr(namespace, architecture.removeprefix("Linear"), None)
    if not hasattr(config, "linear_attention") or stock is None:
        raise UsageError(f"{name!r} is no converted model ({config.model_type}); `transformers serve {name}` serves it")
    found = linear_model_class(stock)
    setattr(namespace, architecture, found)
    return found


def start(words: Sequence[str]) -> None:
    """Run `transformers serve` with these words until it is stopped.

    Raises:
        UsageError: if the libraries of the server are missing.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UsageError('the server needs more libraries; run `pip install "transformers[serving]"`')
    from transformers.cli.transformers import app

    app(["serve", *words], prog_name="transformers", standalone_mode=False)


if __name__ == "__main__":
    sys.exit(main())
