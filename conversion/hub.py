"""`--push_to_hub`: the finished folder as one commit on the Hub, without the paths of the machine that made it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_linear_attention._common.errors import RunError, UsageError, one_line
from hf_linear_attention._common.model_card import HISTORY, REPORT, without_path
from hf_linear_attention.conversion.report import RECIPE


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
            path.write_text(_content(path.name, text), encoding="utf-8")
    return place


def _link(path: str, place: str) -> None:
    """A link to a file, or a copy where this user may make none, as on Windows."""
    try:
        os.symlink(path, place)
    except OSError:
        shutil.copyfile(path, place)


def _content(name: str, text: str) -> str:
    if name != RECIPE:
        values = without_paths(json.loads(text))
        return json.dumps(values, indent=2) + "\n"
    comments = [line for line in text.splitlines() if line.startswith("#")]
    values = yaml.safe_dump(without_paths(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    return "\n".join([*comments, values])


def without_paths(value: Any) -> Any:
    """The value with the last part of every absolute path in it."""
    return with_texts(value, without_path)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed, whatever lists and dicts it is made of."""
    if isinstance(value, Mapping):
        return {name: with_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
