"""`--push_to_hub`: the finished folder as one commit on the Hub, without the paths of the machine that made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_linear_attention._common.errors import RunError, UsageError, one_line
from hf_linear_attention._common.model_card import HISTORY, REPORT, without_path
from hf_linear_attention.conversion.recipe_file import RECIPE


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
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_of_a_run(path.relative_to(folder)))
    operations = [
        CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=_content(path))
        for path in paths
    ]
    try:
        api = HfApi()
        url = api.create_repo(name, exist_ok=True)
        api.create_commit(url.repo_id, operations, commit_message="Upload converted model")
    except Exception as error:  # whatever it is, such as an error of the HTTP library, it must not hide the model
        known = isinstance(error, (HfHubHTTPError, ValueError))
        what = "failed" if known else f"could not reach the Hub ({constants.ENDPOINT})"
        raise RunError(
            f"the model is complete in {folder}, but `--push_to_hub {name}` {what}: {one_line(error)}; "
            f"`hf upload {name} {folder}` tries again"
        ) from error
    return str(url)


def _is_of_a_run(path: Path) -> bool:
    return len(path.parts) > 1 and (path.parts[0] == "stages" or path.parts[0].startswith("checkpoint-"))


def _content(path: Path) -> str | bytes:
    """The file, or the content of a report or recipe in which paths have become names."""
    if path.name in (REPORT, HISTORY):
        values = without_paths(json.loads(path.read_text(encoding="utf-8")))
        return (json.dumps(values, indent=2) + "\n").encode()
    if path.name == RECIPE:
        text = path.read_text(encoding="utf-8")
        comments = [line for line in text.splitlines() if line.startswith("#")]
        values = yaml.safe_dump(without_paths(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
        return "\n".join([*comments, values]).encode()
    return str(path)


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
