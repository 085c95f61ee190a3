"""The model card: model_cards/template.md filled with facts. A section without facts is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from transformers.utils import cached_file

from hf_linear_attention import model_cards
from hf_linear_attention._common.heads import head_of


TEMPLATE = Path(next(iter(model_cards.__path__))) / "template.md"
REPORT = "conversion_report.json"
# Every run that the weights went through, oldest first, with its options and last figures.
HISTORY = "training_report.json"
PLOT = "loss.png"
LAST_CHOICE = ("AutoModelForPreTraining", "AutoModelWithLMHead")
# Of the source's card, what stays true of the result.
KEPT = ("license", "license_name", "license_link", "language")


def write_model_card(output_dir: str | Path, facts: Mapping[str, Any], name: str | None = None) -> None:
    """Write README.md into a folder that already holds config.json.

    Args:
        facts: `base_model` (str), and where known `settings` (of linear attention), `conversion` (figures), `training`
            (recipe), `earlier_training` (recipes of the runs before it, oldest first), `metrics`, `comparison` (a table
            of texts: `header`, `rows` and `notes`) and `dataset` (str).
            Every figure in the card comes from here, or from the conversion_report.json beside it when there is no
            `conversion`.
        name: the title; by default the folder's name.

    Raises:
        OSError: if config.json is missing or README.md cannot be written.
    """
    folder = Path(output_dir)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    report = _read_report(folder)
    # After training, what was trained is a converted checkpoint; the model it comes from is in the report.
    base_model = report.get("base_model", facts["base_model"])
    auto_class = _auto_class(config)
    head = head_of((config.get("architectures") or [""])[0], is_vision="patch_size" in config)
    is_sentence_model = (folder / "modules.json").is_file()
    metadata = {
        **(report.get("card_metadata") or source_metadata(Path(facts["base_model"]))),
        "library_name": "transformers",
        **({"base_model": base_model} if _is_hub_name(base_model) else {}),
        "pipeline_tag": "sentence-similarity" if is_sentence_model else head.pipeline_tag,
        "tags": _tags(facts.get("settings"), is_sentence_model),
    }
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip(),
        name=name or folder.name,
        source=f"[{base_model}](https://huggingface.co/{base_model})"
        if _is_hub_name(base_model)
        else f"`{base_model}`",
        auto_class=auto_class,
        needs_code=bool(config.get("auto_map")),
        preprocessor=_preprocessor(folder),
        is_sentence_model=is_sentence_model,
        settings=_rows({k: v for k, v in (facts.get("settings") or {}).items() if k != "format_version"}),
        faster_from=report.get("faster_from"),
        conversion=_rows(facts.get("conversion") or report.get("figures") or {}),
        dropped_features=report.get("dropped_features") or [],
        training=_rows(facts.get("training") or {}),
        earlier_training=[_rows(run) for run in facts.get("earlier_training") or ()],
        metrics=_rows(facts.get("metrics") or {}),
        comparison=facts.get("comparison"),
        dataset=facts.get("dataset"),
        plot=PLOT if (folder / PLOT).is_file() else None,
    )
    (folder / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and name.count("/") <= 1


def training_history(source: str) -> list[dict[str, Any]]:
    """The runs that a model (folder or hub name) has behind it; none if it does not say."""
    found = cached_file(
        source, HISTORY, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return json.loads(Path(found).read_text(encoding="utf-8"))["runs"] if found else []


def training_facts(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts about training, from the runs in training_report.json, oldest first."""
    if not runs:
        return {}
    *earlier, last = runs
    return {
        "training": last["training"],
        "earlier_training": [{"dataset": run["dataset"], **run["training"]} for run in earlier],
        "metrics": last["metrics"],
        "dataset": last["dataset"],
    }


def source_metadata(source: Path) -> dict[str, Any]:
    """License and language from the front matter of the source's own card, if there is one."""
    card = source / "README.md"
    if not card.is_file():
        return {}
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        metadata = yaml.safe_load(parts[1])
    except yaml.YAMLError:  # somebody else's card: a broken one has nothing to give
        return {}
    return {key: metadata[key] for key in KEPT if key in metadata} if isinstance(metadata, dict) else {}


def _read_report(folder: Path) -> dict[str, Any]:
    path = folder / REPORT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _auto_class(config: Mapping[str, Any]) -> str:
    """The Auto class under which `auto_map` has the class that was saved."""
    architecture = (config.get("architectures") or [""])[0]
    found = [
        auto for auto, target in (config.get("auto_map") or {}).items() if str(target).endswith(f".{architecture}")
    ]
    found.sort(key=lambda auto: auto in LAST_CHOICE)
    return found[0] if found else head_of(architecture).auto_class


def _preprocessor(folder: Path) -> str | None:
    if (folder / "tokenizer_config.json").is_file():
        return "AutoTokenizer"
    return "AutoImageProcessor" if (folder / "preprocessor_config.json").is_file() else None


def _tags(settings: Mapping[str, Any] | None, is_sentence_model: bool) -> list[str]:
    tags = ["linear-attention"] if settings else []
    if settings and settings.get("mechanism") not in (None, "linear"):
        tags.append(settings["mechanism"])
    return [*tags, "sentence-transformers"] if is_sentence_model else tags


def _rows(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    return list(_flatten(facts, prefix))


def _flatten(facts: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """`{"a": {"b": 1.23456}}` -> `("a.b", "1.235")`; what is None is not known and left out."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", format_value(value)


def format_value(value: Any) -> str:
    """A figure or setting as a table of the card, or the terminal, shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = (", ".join(map(str, value)) or "none") if isinstance(value, (list, tuple)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
