"""The folder that is written: whether it may be, the files in it beside the model, and `--push_to_hub`.

Beside the model are its tokenizer and processors, the files of sentence-transformers, and the code of the model. The
finished folder is pushed as one commit, without the paths of the machine that made it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import ConversionError, RunError, UsageError, one_line
from hf_linear_attention._common.folders import file_above
from hf_linear_attention._common.model_card import HISTORY, REPORT, without_path
from hf_linear_attention._common.reading import reading
from hf_linear_attention.conversion.arguments import RECIPE
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.conversion.verification import TEXTS


logger = logging.getLogger(__name__)


# If any of these exists, the checkpoint has a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SENTENCE_FILES = ("sentence_bert_config.json", "config_sentence_transformers.json")
# The first class that loads is used; image processors and feature extractors share a file name.
PROCESSORS: tuple[Any, ...] = (AutoImageProcessor, AutoFeatureExtractor)


def load_source_tokenizer(source: Source, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The source's tokenizer; None if there is none, or it cannot be loaded here."""
    if not _present(source, TOKENIZER_FILES):
        return None
    if not (source.folder / "tokenizer.json").is_file():  # other formats may need libraries that are not installed
        return _try_loading(AutoTokenizer, source.folder, trust_remote_code)
    with reading(f"the tokenizer of {source.name} (tokenizer.json)"):
        try:
            return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
        except ImportError as error:
            logger.debug("the tokenizer of %s: %s", source.folder, error)
            return None


def save_tokenizer(source: Source, folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Write a tokenizer that AutoTokenizer finds without this package.

    Returns:
        The tokenizer; None if the source has none, or it cannot be loaded here (its files are then copied).

    Raises:
        ConversionError: if the written tokenizer gives different ids.
    """
    present = _present(source, TOKENIZER_FILES)
    if not present:
        return None
    original = load_source_tokenizer(source, trust_remote_code)
    if original is None:
        logger.warning("the tokenizer of %s cannot be loaded here; its files are copied unchanged", source.name)
        _copy(source.folder, present, folder)
        return None
    original.save_pretrained(folder)
    if not _same_ids(original, folder, trust_remote_code):
        _copy(source.folder, present, folder)
        if not _same_ids(original, folder, trust_remote_code):
            raise ConversionError(f"the tokenizer of {source.name} gives different ids after it was saved to {folder}")
    return original


def _same_ids(original: PreTrainedTokenizerBase, folder: Path, trust_remote_code: bool) -> bool:
    moved = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return moved(list(TEXTS)).input_ids == original(list(TEXTS)).input_ids


def save_processors(source: Source, folder: Path, trust_remote_code: bool) -> None:
    """Write the image processor or feature extractor; its files are copied if it cannot be loaded here."""
    present = _present(source, PROCESSOR_FILES)
    if not present:
        return
    _copy(source.folder, present, folder)
    for auto_class in PROCESSORS:
        processor = _try_loading(auto_class, source.folder, trust_remote_code)
        if processor is not None:
            processor.save_pretrained(folder)
            return


def _try_loading(auto_class: Any, folder: Path, trust_remote_code: bool) -> Any:
    try:
        return auto_class.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # A library that it needs (such as sentencepiece or torchvision) may be missing; the files are then copied.
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.debug("%s of %s: %s", auto_class.__name__, folder, error)
        return None


def copy_sentence_files(source: Source, folder: Path) -> None:
    """Make the result a sentence-transformers model if the source is one.

    The transformer is in the root of `folder`; all other modules are copied unchanged.
    """
    for name in SENTENCE_FILES:
        for place in (source.root, source.folder):
            if (place / name).is_file():
                shutil.copyfile(place / name, folder / name)
    if source.modules is None:
        return
    modules = [{**source.modules[0], "path": ""}, *source.modules[1:]]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    for module in modules[1:]:
        if module["path"] and (source.root / module["path"]).is_dir():
            shutil.copytree(source.root / module["path"], folder / module["path"])


def _present(source: Source, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (source.folder / name).is_file()]


def _copy(source: Path, names: list[str], folder: Path) -> None:
    for name in names:
        shutil.copyfile(source / name, folder / name)


# ---- The folder itself


def check_output(output_dir: str, overwrite: bool, source: Path | None) -> Path:
    """The absolute path of the folder to write.

    Raises:
        UsageError: if something exists there that must not be replaced.
    """
    path = Path(output_dir).expanduser().resolve()
    if (problem := _problem_of_output(path, overwrite, source)) is not None:
        raise UsageError(f"`--output_dir` = {output_dir!r} {problem}; choose another name")
    return path


def _problem_of_output(path: Path, overwrite: bool, source: Path | None) -> str | None:
    if source is not None and (path == source or path in source.parents):
        return "contains the checkpoint to convert"
    if source is not None and source in path.parents:
        return "is inside of the checkpoint to convert"
    if (file := file_above(path)) is not None:
        return f"is below {file}, which is a file"
    if not path.exists():
        return None
    if not path.is_dir():
        return "is a file"
    if not overwrite:
        return "exists, and `--overwrite`, which replaces it, was not given"
    if (folder := next(_kept_by_others(path), None)) is not None:
        return f"cannot be replaced, because this user may not remove what is in {folder}"
    if any(path.iterdir()) and not (path / "config.json").is_file():
        return "has no config.json, so it is not a model folder and is not overwritten"
    return None


def _kept_by_others(path: Path) -> Iterator[Path]:
    """The folders in `path`, or itself, in which this user may not remove everything."""
    folders = (os.path.join(parent, name) for parent, names, _ in os.walk(path) for name in names)
    for folder in map(Path, [str(path), *folders]):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            yield folder


def share_permissions(folder: Path) -> None:
    """Give the weight files, which only their owner can read at first, the permissions of the other files."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


# ---- `--push_to_hub`

# The weights of an earlier model there go if this one has none of their name: they could be loaded in place of these.
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]


def check_hub_name(name: str) -> None:
    """Refuse what could not be pushed after the work.

    Raises:
        UsageError: for an impossible name, without a login, or offline.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"`--push_to_hub {name}`: {reason}; give a name such as user/model") from error
    if constants.is_offline_mode():
        raise UsageError(f"`--push_to_hub {name}` needs the Hub, and HF_HUB_OFFLINE is set; unset it, or push later")
    if get_token() is None:
        raise UsageError(f"`--push_to_hub {name}` needs a login; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str) -> str:
    """Create the repository unless it exists, upload the folder as one commit, and return its address.

    Checkpoints for resuming and the models of earlier stages stay where they are.

    Raises:
        RunError: if the Hub refuses; the folder is complete and stays.
    """
    try:
        api = HfApi()
        url = api.create_repo(name, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            shown = _without_paths_in(folder.resolve(), Path(scratch) / "model")
            message = "Upload converted model"
            api.upload_folder(repo_id=url.repo_id, folder_path=shown, commit_message=message, delete_patterns=WEIGHTS)
    except Exception as error:  # whatever it is, such as an error of the HTTP library, it must not hide the model
        known = isinstance(error, (HfHubHTTPError, ValueError))
        what = "failed" if known else f"could not reach the Hub ({constants.ENDPOINT})"
        raise RunError(
            f"the model is complete in {folder}, but `--push_to_hub {name}` {what}: {one_line(error)}; "
            f"`hf upload {name} {folder}` tries again"
        ) from error
    return str(url)


def _without_paths_in(folder: Path, place: Path) -> Path:
    """Links in `place` to the files of a folder, with reports and recipes in which paths have become names."""
    shutil.copytree(folder, place, copy_function=_link, ignore=shutil.ignore_patterns("stages", "checkpoint-*"))
    for path in place.rglob("*"):
        if path.name in (REPORT, HISTORY, RECIPE):
            text = path.read_text(encoding="utf-8")
            path.unlink()  # only the link
            path.write_text(with_texts(path.name, text, without_path), encoding="utf-8")
    return place


def _link(path: str, place: str) -> None:
    """A link to a file, or a copy where this user may make none, as on Windows."""
    try:
        os.symlink(path, place)
    except OSError:
        shutil.copyfile(path, place)


def with_texts(name: str, content: str, change: Callable[[str], str]) -> str:
    """The content of a report or of a recipe with every text in it changed; comments of a recipe stay."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return change(value) if isinstance(value, str) else value

    if name != RECIPE:
        return json.dumps(changed(json.loads(content)), indent=2) + "\n"
    comments = [line for line in content.splitlines() if line.startswith("#")]
    values = yaml.safe_dump(changed(yaml.safe_load(content)), sort_keys=False, allow_unicode=True)
    return "\n".join([*comments, values])
