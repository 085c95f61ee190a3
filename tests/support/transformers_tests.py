"""transformers' own common model tests, taken at test time from its source distribution; none of it lies here.

The source distribution of the installed version is downloaded with pip once and its `tests/*.py` kept in
`~/.cache/hf_linear_attention` (or `$HF_LINEAR_ATTENTION_CACHE`). It carries `tests/test_*.py` alone: no folder below
`tests/`, so neither `GenerationTesterMixin` nor `ExportTesterMixin`, nor the test class of any model. Empty classes
stand in for the first two (our tests of generation are in `tests/hf_linear_attention`), and that of
`test_transformers_suite.py` for the last.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from pathlib import Path

import transformers


PACKAGE = "transformers_source_tests"

# Values that differ from the defaults of every config, for the test that configs take the common arguments.
COMMON_CONFIG_ARGUMENTS = {
    **{"return_dict": False, "output_hidden_states": True, "output_attentions": True, "dtype": "float16"},
    **{"chunk_size_feed_forward": 5, "architectures": ["SomeModel"], "problem_type": "regression"},
    **{"id2label": {0: "first", 1: "second", 2: "third"}, "label2id": {"first": 0, "second": 1, "third": 2}},
}


class SourceUnavailableError(RuntimeError):
    """The source distribution cannot be had here; the tests are skipped with this message."""


def source_tests() -> Path:
    """The folder of transformers' test files, downloaded if it is not in the cache yet.

    Raises:
        SourceUnavailableError: if pip cannot download the source distribution of the installed version.
    """
    default = Path.home() / ".cache" / "hf_linear_attention"
    cache = Path(os.environ.get("HF_LINEAR_ATTENTION_CACHE", default)).expanduser()
    folder = cache / f"transformers-{transformers.__version__}-tests"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            unpacked = _unpack(_download(Path(temporary)), Path(temporary) / "tests")
            # Renamed when complete: another process may be doing the same.
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _download(folder: Path) -> Path:
    requirement = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps"]
    command += ["--no-binary", "transformers", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("transformers-*.tar.gz"))
    if result.returncode != 0 or not archives:
        reason = (result.stderr.strip() or "no archive came").splitlines()[-1]
        raise SourceUnavailableError(f"pip could not download the source distribution of {requirement}: {reason}")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> Path:
    """The files `tests/*.py` of the archive, in `folder`."""
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and len(parts) == 3 and parts[1] == "tests" and parts[2].endswith(".py"):
                with tar.extractfile(member) as source, open(folder / parts[2], "wb") as target:
                    shutil.copyfileobj(source, target)
    # One of the files imports its own folder as if it were the transformers package.
    (folder / "__init__.py").touch()
    return folder


def source_module(name: str) -> types.ModuleType:
    """A module of transformers' tests, such as `test_modeling_common`, which knows our classes by name too."""
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(source_tests())]
        sys.modules[PACKAGE] = package
        _stand_in("exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {}))
        _stand_in("generation.test_utils", GenerationTesterMixin=type("GenerationTesterMixin", (), {}))
        _stand_in("utils.test_configuration_utils", config_common_kwargs=COMMON_CONFIG_ARGUMENTS)
    is_new = f"{PACKAGE}.{name}" not in sys.modules
    module = importlib.import_module(f"{PACKAGE}.{name}")
    if is_new:
        _name_our_classes(module)
    return module


def _stand_in(name: str, **attributes) -> None:
    """Put a module in the place of one that the source distribution lacks."""
    parent = f"{PACKAGE}.{name.split('.')[0]}"
    for path in (parent, f"{PACKAGE}.{name}"):
        sys.modules.setdefault(path, types.ModuleType(path))
    sys.modules[parent].__path__ = []
    vars(sys.modules[f"{PACKAGE}.{name}"]).update(attributes)


def _name_our_classes(module: types.ModuleType) -> None:
    """The tests look up by name which head a class is: `LinearBertForMaskedLM` gets the entry of `BertForMaskedLM`."""
    for name, mapping in vars(module).items():
        if name.endswith("_MAPPING_NAMES"):
            ours = {}
            for model_type, classes in mapping.items():
                stock = (classes,) if isinstance(classes, str) else tuple(classes)
                ours[f"linear_{model_type}"] = stock + tuple(f"Linear{class_name}" for class_name in stock)
            setattr(module, name, type(mapping)({**mapping, **ours}))
