"""The fields of config.json and tokenizer_config.json that libraries trust, and what they must be.

Everything else in these files is left to transformers, whose errors `reading.reading` reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import AGAIN, short


Check = Callable[[Any], bool]
MAX_COUNT = 2**31  # no dimension of a published model comes near it
MAX_LAYERS = 10_000
# The floating-point types of torch, which this file does without.
FLOATING_POINT = r"auto|(torch\.)?(b?float16|float32|float64|half|float|double|float8_\w+)"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any, most: int = MAX_COUNT) -> bool:
    return type(value) is int and 1 <= value <= most


def _count_or_list(value: Any, most: int = MAX_COUNT) -> bool:
    """A count; a list or an object has one per layer or modality, and is left to transformers."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return isinstance(value, (list, dict)) or _is_count(whole, most)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_class_name(value: Any) -> bool:
    """`file.Class`, with a repository in front where the code is elsewhere, or a list of such names (tokenizers)."""
    return all(
        name is None or (isinstance(name, str) and re.fullmatch(r"[\w./-]+", name) is not None)
        for name in _listed(value)
    )


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(FLOATING_POINT, value) is not None


def _are_tokens(value: Any) -> bool:
    """Whether this is a token id, a list of them, or -1, which some configs have for none."""
    return all(type(entry) is int and -1 <= entry < 2**24 for entry in _listed(value) or [None])


def _are_settings(value: Any) -> bool:
    """Settings of linear attention, as far as `LinearAttentionSettings` does not check them; PVT v2 has a flag."""
    if value is False:
        return True
    entries = _listed(value)
    if not entries or not all(isinstance(entry, dict) and entry for entry in entries):
        return False
    rotary = [part for entry in entries for part in _listed(entry.get("rotary") or [])]
    return all(
        isinstance(part, dict) and {"layers", "inverse_frequencies", "pairing"} <= part.keys() for part in rotary
    )


def _are_runs(value: Any) -> bool:
    kinds: dict[str, Any] = {"training": dict, "metrics": dict, "dataset": (str, type(None))}
    return isinstance(value, list) and all(
        isinstance(run, dict) and all(name in run and isinstance(run[name], kind) for name, kind in kinds.items())
        for run in value
    )


# The name of a field, as a pattern; what it must be; and the check. The first row that matches is used.
Row = tuple[str, str, Check]
CONFIG: list[Row] = [
    (
        "architectures",
        "a list with the name of a class",
        lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
    ),
    (
        "model_type",
        "the name of a model type, such as llama",
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None,
    ),
    (
        "auto_map",
        "an object of Auto classes and classes in files, such as modeling.Model",
        lambda value: isinstance(value, dict) and all(map(_is_class_name, value.values())),
    ),
    ("quantization_config", "an object", lambda value: isinstance(value, dict)),
    ("(torch_)?dtype", "a floating-point type of torch, such as float32", _is_dtype),
    (
        "linear_attention",
        "settings of a mechanism, or a list of them, in which `rotary` is a list of objects",
        _are_settings,
    ),
    (
        "linear_attention_classes",
        "an object of classes of attention, each with a list of causal, bidirectional and cross",
        lambda value: isinstance(value, dict) and all(isinstance(found, list) for found in value.values()),
    ),
    (
        "num_hidden_layers|n_layer|num_layers",
        f"a whole number from 1 to {MAX_LAYERS:,}",
        lambda value: _count_or_list(value, MAX_LAYERS),
    ),
    (
        "(vocab|hidden|intermediate)_size|num_(attention|key_value)_heads|n_(embd|head)|d_(model|ff)",
        f"a whole number from 1 to {MAX_COUNT:,}",
        _count_or_list,
    ),
    (
        "max_position_embeddings|n_positions",
        f"a whole number from 1 to {MAX_COUNT:,}",
        lambda value: not isinstance(value, (list, dict)) and _count_or_list(value),
    ),
    (
        "tie_word_embeddings|use_cache|is_encoder_decoder|is_decoder|attention_bias|output_(attentions|hidden_states)",
        "true or false",
        lambda value: isinstance(value, bool),
    ),
    ("sliding_window", "a whole number, or a list of them", lambda value: all(type(n) is int for n in _listed(value))),
    (r"\w+_token_id", "the number of a token", _are_tokens),
    (
        r"\w*(_dropout|dropout_prob)",
        "a number from 0 to 1",
        lambda value: not isinstance(value, str) and (not _is_number(value) or 0 <= value <= 1),
    ),
    (r"\w*(_eps|_epsilon)", "a number of at least 0", lambda value: not _is_number(value) or value >= 0),
]
TOKENIZER_CONFIG: list[Row] = [
    ("tokenizer_class", "the name of a class", lambda value: isinstance(value, str)),
    ("model_max_length", "a number of at least 1", lambda value: _is_number(value) and value >= 1),
    (r"\w+_token", "a text", lambda value: isinstance(value, (str, dict, bool))),
]
CONVERSION_REPORT: list[Row] = [
    ("base_model", "a text", lambda value: isinstance(value, str)),
    ("figures|card_metadata|quality|checks", "an object", lambda value: isinstance(value, dict)),
    ("dropped_features", "a list", lambda value: isinstance(value, list)),
]
TRAINING_REPORT: list[Row] = [("runs", "a list of runs, each with `training`, `metrics` and `dataset`", _are_runs)]
# Fields that are missing may be null as well, except for these.
NEVER_NULL = ("model_type", "linear_attention", "runs")


def _check(path: Path, content: Mapping[str, Any], rows: list[Row]) -> None:
    problems = [f"`{name}` = {short(value)} must be {said}" for name, value, said in _wrong(content, rows)]
    if problems:
        raise UsageError(f"{path}: {'; '.join(problems)}; {AGAIN}")


def _wrong(content: Mapping[str, Any], rows: list[Row]) -> Iterator[tuple[str, Any, str]]:
    for name, value in content.items():
        if isinstance(value, float) and math.isnan(value):
            yield name, value, "a number"
            continue
        for pattern, said, holds in rows:
            if re.fullmatch(pattern, name):
                if not holds(value) and (value is not None or name in NEVER_NULL):
                    yield name, value, said
                break


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Check the fields of config.json that every library trusts.

    Raises:
        UsageError: naming every field with an impossible value.
    """
    _check(path, config, CONFIG)
    model_type = str(config.get("model_type")).removeprefix("linear_")
    if config.get("is_encoder_decoder") and not _may_be_encoder_decoder(model_type):
        raise UsageError(f"{path}: `is_encoder_decoder` = true, but `{model_type}` is no encoder-decoder; {AGAIN}")


def _may_be_encoder_decoder(model_type: str) -> bool:
    """Whether a model type is an encoder-decoder, as the class of its config says, or one that is not known here."""
    from transformers import CONFIG_MAPPING  # takes seconds, and hardly any config needs it

    return model_type not in CONFIG_MAPPING or bool(CONFIG_MAPPING[model_type].is_encoder_decoder)


def check_tokenizer_config(path: Path, config: Mapping[str, Any]) -> None:
    """Check the fields of tokenizer_config.json that transformers takes over without looking at them.

    Raises:
        UsageError: naming every field with an impossible value.
    """
    _check(path, config, TOKENIZER_CONFIG)


# The checks of fields, by the name of the file.
CHECKS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    "config.json": check_config,
    "tokenizer_config.json": check_tokenizer_config,
    "conversion_report.json": lambda path, content: _check(path, content, CONVERSION_REPORT),
    "training_report.json": lambda path, content: _check(path, {"runs": None, **content}, TRAINING_REPORT),
}
