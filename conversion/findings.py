"""What `doctor` finds in this installation and in a folder with a converted model."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.constants import HF_HOME, HF_HUB_OFFLINE
from transformers import AutoConfig
from transformers.utils.versions import require_version

import hf_linear_attention
from hf_linear_attention import convert_config, modeling_linear_attention
from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.checkpoint_code import checkpoint_code
from hf_linear_attention.configuration_linear_attention import CODE_FILES, code_in, max_length_of, mechanisms_of
from hf_linear_attention.conversion.layer_speed import layer_times
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class


OK, NOTE, BROKEN = "ok", "note", "broken"
# Library: the versions that work, the tested one, and what it is for ("" if nothing works without it).
LIBRARIES = {
    "torch": (">=2.7", "2.13.0", ""),
    "transformers": (">=5.16,<6", "5.24.0", ""),
    "safetensors": (">=0.8", "0.8.0", ""),
    "jinja2": (">=3", "3.1.6", ""),
    "accelerate": (">=1.6", "1.15.0", "training"),
    "datasets": (">=3.0", "5.2.0", "training and text files"),
    "evaluate": (">=0.4", "0.4.6", "training"),
}
COMPILERS = ("cc", "gcc", "clang")
# The kernel call that is timed: causal, elu1, float32.
TIMED_HEADS, HEAD_DIM, TOKENS = 8, 64, 2048
# What a process does that has only torch and transformers: it loads the model with the code in the folder.
LOAD_ALONE = """
import sys
sys.modules["hf_linear_attention"] = None
import transformers
transformers.utils.logging.set_verbosity_error()
getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2], trust_remote_code=True)
"""


class Finding(NamedTuple):
    """One line of the answer: `ok`, `note` or `broken`, what it is about, and a sentence."""

    kind: str
    topic: str
    text: str


def environment_findings() -> Iterator[Finding]:
    """What is known of this machine and installation."""
    yield Finding(OK, "package", f"hf-linear-attention {hf_linear_attention.__version__}, Python "
                  f"{platform.python_version()}, {platform.system()} {platform.machine()}")  # fmt: skip
    yield from map(_library, LIBRARIES)
    yield _kernels()
    yield Finding(OK, "threads", f"torch computes with {torch.get_num_threads()} of {os.cpu_count()} cores"
                  f" (OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')})")  # fmt: skip
    yield from _gpu()
    yield _caches()
    yield _speed()


def _library(name: str) -> Finding:
    wanted, tested, needed_for = LIBRARIES[name]
    try:
        require_version(name + wanted)
    except importlib.metadata.PackageNotFoundError:
        if needed_for:
            text = f'not installed, but needed for {needed_for}: `pip install "hf-linear-attention[train]"`'
            return Finding(NOTE, name, text)
        return Finding(BROKEN, name, f"not installed; nothing works without it: `pip install {name}`")
    except ImportError:
        found = importlib.metadata.version(name)
        return Finding(BROKEN, name, f'{found}, but {name}{wanted} is needed: `pip install "{name}{wanted}"`')
    found = importlib.metadata.version(name)
    is_tested = found.split(".")[:2] == tested.split(".")[:2]
    return Finding(OK, name, found if is_tested else f"{found} (the tests ran with {tested})")


def _kernels() -> Finding:
    backend = hf_linear_attention.kernel_backend()
    if backend.name == "c":
        return Finding(OK, "kernels", f"C kernels ({backend.instruction_set}): {backend.reason}")
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    text = f"torch computes in place of the C kernels, which is slower: {backend.reason}"
    if "`torch`" not in backend.reason:  # the variable, which whoever set it knows
        has = f"a C compiler ({compiler})" if compiler else "no C compiler (cc, gcc, clang)"
        text += f" This machine has {has}."
    return Finding(NOTE, "kernels", text)


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(OK, "GPU", "none that torch can use; everything runs on the CPU")
        return
    yield Finding(OK, "GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    if importlib.util.find_spec("fla") is None:
        advice = '`pip install "hf-linear-attention[gpu]"` adds faster kernels for causal attention'
        yield Finding(NOTE, "GPU kernels", f"fla-core is not installed; torch computes on the GPU. {advice}")


def _caches() -> Finding:
    folder = Path(HF_HOME)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding(BROKEN, "cache", f"{folder} cannot be written; set HF_HOME to a folder that can")
    free = shutil.disk_usage(existing).free / 1e9
    offline = ", and the hub is not asked (HF_HUB_OFFLINE is set)" if HF_HUB_OFFLINE else ""
    return Finding(NOTE if free < 1 else OK, "cache", f"{folder}, {free:.1f} GB free{offline}")


def _speed() -> Finding:
    """One call of linear attention, timed beside torch's softmax attention."""
    try:
        linear, softmax = layer_times(_timed_layer(), TOKENS, torch.float32)
    except (RuntimeError, OSError) as error:
        return Finding(BROKEN, "speed", f"a call of linear attention failed: {' '.join(str(error).split())}")
    threads = torch.get_num_threads()
    text = (
        f"linear attention takes {1000 * linear:.1f} ms and torch's softmax attention {1000 * softmax:.1f} ms "
        f"({TIMED_HEADS} heads of {HEAD_DIM}, {TOKENS:,} tokens, causal, {threads} thread{'s' * (threads > 1)})"
    )
    if linear < softmax:
        return Finding(OK, "speed", text)
    return Finding(NOTE, "speed", f"{text}; it pays off at greater lengths only, or with the C kernels (see kernels)")


def _timed_layer() -> Any:
    """An attention layer of a Llama with `linear`, elu1."""
    from transformers import LlamaConfig, LlamaModel  # which `--help` does without

    size = TIMED_HEADS * HEAD_DIM
    stock = LlamaConfig(
        vocab_size=8, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=TIMED_HEADS,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    model: Any = linear_model_class(LlamaModel)(convert_config(stock, mechanism="linear", feature_map="elu1"))
    return next(iter(linear_attention_modules(model.eval()).values()))


def folder_findings(folder: Path, runs_its_code: bool = False) -> Iterator[Finding]:
    """What is known of a converted model in `folder`.

    Args:
        runs_its_code: whether to load it with the code that it contains, too.

    Raises:
        UsageError: if the folder has no converted model.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is not a folder; name the folder of a converted model")
    if not path.is_file():
        raise UsageError(f"{str(folder)!r} has no config.json; name the folder of a converted model")
    try:
        content = read_json(path)
    except UsageError as error:
        yield Finding(BROKEN, "config.json", str(error))
        return
    if "linear_attention" not in content:
        raise UsageError(f"the model in {str(folder)!r} is not converted; `hf-linear-attention convert` does that")
    try:
        check_checkpoint(folder)
        with reading(path):
            config: Any = AutoConfig.from_pretrained(folder)
    except UsageError as error:
        yield Finding(BROKEN, "files", str(error))
        return
    names = ", ".join(sorted(mechanisms_of(config.linear_attention)))
    yield Finding(OK, "model", f"{config.model_type} with {names}; saved by transformers {config.transformers_version}")
    yield from _code(folder, config, content)
    yield from _weights(folder, content)
    if runs_its_code:
        yield _loads_alone(folder, content)
    yield from _companions(folder, config)


def _code(folder: Path, config: Any, content: dict[str, Any]) -> Iterator[Finding]:
    """Whether all files of the model's code are there, and differ from the installed ones."""
    if not content.get("auto_map"):
        yield Finding(
            NOTE, "code", "config.json names no code; the model loads only after `import hf_linear_attention`"
        )
        return
    found = code_in(folder)
    if missing := sorted(name for name, text in found.items() if text is None):
        advice = "without them the model loads only after `import hf_linear_attention`; export it again"
        yield Finding(BROKEN, "code", f"{', '.join(missing)} missing; {advice}")
        return
    ours = checkpoint_code(config)
    # Checkpoints from before had more files, and never left the work to the package.
    serves = "def installed_package" in (found[CODE_FILES[0]] or "")
    runs = "the installed package runs in their place" if serves else "with trust_remote_code=True they run"
    changed = sorted(name for name in {*found, *ours} if found.get(name) != ours.get(name))
    if not changed:
        yield Finding(OK, "code", f"both files are there, and equal to those of the installed package; {runs}")
        return
    if broken := [name for name in changed if not _is_code(found.get(name) or "")]:
        yield Finding(BROKEN, "code", f"{', '.join(broken)} empty or no Python; export the model again")
        return
    shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    yield Finding(
        NOTE,
        "code",
        f"{len(changed)} of {len(found)} files differ from the installed package: {shown}. They are of another "
        f"version, or were edited since the export; {runs}. `save_pretrained` of the loaded model writes the "
        "installed ones",
    )


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError):
        return False


def _weights(folder: Path, content: dict[str, Any]) -> Iterator[Finding]:
    """Whether the files of the weights are complete and the model can be loaded from them by this package."""
    try:
        tensors = open_source(str(folder)).tensors
        model_class = getattr(modeling_linear_attention, _class_name(content))
        model, loading = model_class.from_pretrained(folder, output_loading_info=True)
    # Whatever loading raises, a user wants to read it here and not as a traceback.
    except Exception as error:
        yield Finding(BROKEN, "weights", " ".join(str(error).split()) or type(error).__name__)
        return
    if lost := sorted(loading["missing_keys"]):
        yield Finding(BROKEN, "weights", f"{len(lost)} missing, the first is {lost[0]}; export the model again")
        return
    broken = sorted(name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all())
    if broken:
        yield Finding(BROKEN, "weights", f"{len(broken)} with numbers that are not finite, the first is {broken[0]}")
        return
    yield Finding(OK, "weights", f"{len(tensors)} tensors, all finite; {model_class.__name__} loads from them")


def _class_name(content: dict[str, Any]) -> str:
    return (content.get("architectures") or [""])[0]


def _loads_alone(folder: Path, content: dict[str, Any]) -> Finding:
    """Whether torch and transformers alone load the model, in a process of its own."""
    name = _class_name(content)
    autos = [auto for auto, target in (content.get("auto_map") or {}).items() if str(target).endswith(f".{name}")]
    command = [sys.executable, "-c", LOAD_ALONE, (autos or ["AutoModel"])[0], str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Finding(OK, "alone", "it loads with torch and transformers alone, by the code in its folder")
    lines = done.stderr.strip().splitlines()
    return Finding(BROKEN, "alone", "it does not load without this package: " + (lines[-1] if lines else "it crashed"))


def _companions(folder: Path, config: Any) -> Iterator[Finding]:
    """The tokenizer, and the lengths at which the model was measured."""
    files = ("tokenizer_config.json", "preprocessor_config.json")
    if not any((folder / name).is_file() for name in files):
        yield Finding(NOTE, "tokenizer", "there is no tokenizer or image processor; users have to find the original's")
    path = folder / REPORT
    reads = max_length_of(config)
    text = "its config names no longest input" if reads is None else f"its config names {reads:,} positions"
    try:
        report = read_json(path) if path.is_file() else {}
        with reading(path):
            if positions := (report.get("quality") or {}).get("positions"):
                length, trained = positions["length"], positions["trained_length"]
                measured = f"measured up to {length:,} tokens (the trained length is {trained:,})"
                yield Finding(OK, "length", f"{measured}; {text}")
                return
    except UsageError as error:
        yield Finding(BROKEN, REPORT, str(error))
        return
    advice = "`hf-linear-attention evaluate` measures it" if report else f"there is no {REPORT}"
    yield Finding(NOTE, "length", f"{text}; nothing was measured by length yet: {advice}")
