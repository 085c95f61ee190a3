"""The fields of config.json and other files that no library checks before it uses them, and what they must be.

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
MAX_LAYERS = 10_000


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_class_name(value: Any) -> bool:
    """`file.Class`, with a repository in front where the code is elsewhere, or a list of such names (tokenizers)."""
    return all(
        name is None or (isinstance(name, str) and re.fullmatch(r"[\w./-]+", name) is not None)
        for name in _listed(value)
    )


def _are_settings(value: Any) -> bool:
    """Settings of linear attention, as far as `LinearAttentionSettings` does not check them; PVT v2 has a flag."""
    if value is False:
        return True
    entries = _listed(value)
    if not entries or not all(isinstance(entry, dict) and entry for entry in entries):
        return False
    rotary = [part for entry in entries for part in _listed(entry.get("rotary") or [])]
    needed = {"layers", "inverse_frequencies", "pairing"}
    return all(isinstance(part, dict) and needed <= part.keys() for part in rotary)


def _is_rope(value: Any) -> bool:
    """Parameters of rotary positions, of which there may be one object for each type of layer."""
    if not isinstance(value, dict):
        return True
    base, factor = value.get("rope_theta", 1), value.get("factor", 1)
    return all(number is None or _is_number(number) for number in (base, factor)) and (base is None or base > 0)


def _are_runs(value: Any) -> bool:
    kinds: dict[str, Any] = {"training": dict, "metrics": dict, "dataset": (str, type(None))}
    return isinstance(value, list) and all(
        isinstance(run, dict) and all(name in run and isinstance(run[name], kind) for name, kind in kinds.items())
        for run in value
    )


# The name of a field, as a pattern; what it must be; and the check.
Row = tuple[str, str, Check]
CONFIG: list[Row] = [
    (
        "architectures",
        "a list with the name of a class",
        lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
    ),
    (
        "auto_map",
        "an object of Auto classes and classes in files, such as modeling.Model",
        lambda value: isinstance(value, dict) and all(map(_is_class_name, value.values())),
    ),
    ("linear_attention", "settings of a mechanism, or a list of them, with `rotary` a list of objects", _are_settings),
    (
        "linear_attention_classes",
        "an object of classes of attention, each with a list of causal, bidirectional and cross",
        lambda value: isinstance(value, dict) and all(isinstance(found, list) for found in value.values()),
    ),
    (
        "num_hidden_layers|n_layer|num_layers",
        f"a whole number from 1 to {MAX_LAYERS:,}",
        # A list has one number per stage.
        lambda value: isinstance(value, list) or (_is_number(value) and 1 <= value <= MAX_LAYERS),
    ),
    (
        "max_position_embeddings|n_positions",
        "a whole number of at least 1",
        lambda value: _is_number(value) and value >= 1,
    ),
    ("dtype|torch_dtype", "the name of a dtype, such as bfloat16", lambda value: isinstance(value, str)),
    (
        r"\w*rope_theta|rope_local_base_freq",
        "a number above 0",
        lambda value: all(_is_number(entry) and entry > 0 for entry in _listed(value)),
    ),
    (
        "rope_parameters|rope_scaling",
        "an object, in which `rope_theta` is a number above 0 and `factor` a number",
        lambda value: isinstance(value, dict) and all(map(_is_rope, [value, *value.values()])),
    ),
    ("output_(attentions|hidden_states)", "true or false", lambda value: isinstance(value, bool)),
    ("sliding_window", "a whole number, or a list of them", lambda value: all(type(n) is int for n in _listed(value))),
    (r"\w*(_dropout|dropout_prob)", "a number from 0 to 1", lambda value: not _is_number(value) or 0 <= value <= 1),
    (r"\w*(_eps|_epsilon)", "a number of at least 0", lambda value: not _is_number(value) or value >= 0),
]
TOKENIZER_CONFIG: list[Row] = [
    ("model_max_length", "a number of at least 1", lambda value: _is_number(value) and value >= 1),
    (r"\w+_token", "a text", lambda value: isinstance(value, (str, dict, bool))),
]
CONVERSION_REPORT: list[Row] = [
    ("base_model", "a text", lambda value: isinstance(value, str)),
    ("figures|card_metadata|quality|checks", "an object", lambda value: isinstance(value, dict)),
    ("dropped_features", "a list", lambda value: isinstance(value, list)),
]
TRAINING_REPORT: list[Row] = [("runs", "a list of runs, each with `training`, `metrics` and `dataset`", _are_runs)]
ROWS = {
    "config.json": CONFIG,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "conversion_report.json": CONVERSION_REPORT,
    "training_report.json": TRAINING_REPORT,
}
# Fields that are missing may be null as well, except for these.
NEVER_NULL = ("linear_attention", "runs")


def check_fields(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse (UsageError) impossible values in fields of a JSON file that would be used without a look at them."""
    content = {"runs": None, **content} if path.name == "training_report.json" else content
    wrong = _wrong(content, ROWS.get(path.name, []))
    problems = [f"`{name}` = {short(value)} must be {said}" for name, value, said in wrong]
    model_type = str(content.get("model_type")).removeprefix("linear_")
    if path.name == "config.json" and content.get("is_encoder_decoder") and not _may_be_encoder_decoder(model_type):
        problems.append(f"`is_encoder_decoder` = true, but `{model_type}` is no encoder-decoder")
    if problems:
        raise UsageError(f"{path}: {'; '.join(problems)}; {AGAIN}")


def _wrong(content: Mapping[str, Any], rows: list[Row]) -> Iterator[tuple[str, Any, str]]:
    for name, value in content.items():
        if isinstance(value, float) and math.isnan(value):
            yield name, value, "a number"
            continue
        for pattern, said, holds in rows:
            if re.fullmatch(pattern, name) and not holds(value) and (value is not None or name in NEVER_NULL):
                yield name, value, said


def _may_be_encoder_decoder(model_type: str) -> bool:
    """Whether a model type is an encoder-decoder, as the class of its config says, or one that is not known here."""
    from transformers import CONFIG_MAPPING  # takes seconds, and hardly any config needs it

    return model_type not in CONFIG_MAPPING or bool(CONFIG_MAPPING[model_type].is_encoder_decoder)
