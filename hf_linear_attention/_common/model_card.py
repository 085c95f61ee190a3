"""The model card: model_cards/template.md filled with facts; a section without facts is left out."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import yaml

from hf_linear_attention import model_cards
from hf_linear_attention._common.heads import head_of_config, is_without_head
from hf_linear_attention._common.safe_yaml import load_yaml
from hf_linear_attention.layer_ranges import ranges_of


if TYPE_CHECKING:
    from huggingface_hub import EvalResult


TEMPLATE = Path(next(iter(model_cards.__path__))) / "template.md"
REPORT = "conversion_report.json"
# The training runs of the weights, oldest first, with their options and final figures.
HISTORY = "training_report.json"
PLOT = "loss.png"
PAGE = "report.html"
LAST_CHOICE = ("AutoModelForPreTraining", "AutoModelWithLMHead")
# The metadata of the source's card that also holds for the result.
KEPT = ("license", "license_name", "license_link", "language")


class Markdown(str):
    """A text that is Markdown already; any other text that the template gets is escaped where it is written."""

    __slots__ = ()


def _written(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markdown) else value


def _table(rows: Sequence[Sequence[str]], *header: str) -> Markdown:
    lines = [header, ["---"] * len(header), *rows]
    return Markdown("\n".join(f"| {' | '.join(map(escaped, cells))} |" for cells in lines))


def _prose(text: str) -> Markdown:
    """A sentence in which code between backticks, which can hold no other markup, stays code."""
    return Markdown(re.sub(r"\\`([^`\\]+)\\`", r"`\1`", escaped(text)))


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATE.parent),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
    autoescape=False,  # of HTML alone
    finalize=_written,
)
ENVIRONMENT.filters |= {"table": _table, "prose": _prose}


def write_model_card(output_dir: str | Path, facts: Mapping[str, Any], name: str | None = None) -> None:
    """Write README.md into a folder that already holds config.json.

    Args:
        facts: `base_model` (str), and where known `settings` (of linear attention), `conversion` (figures), `training`
        (recipe), `is_in_python` (whether only the report of a conversion in Python is known, and not what followed it),
        `earlier_training` (recipes of the earlier runs, oldest first), `metrics`, `comparison` (a table of
        texts: `header`, `rows` and `notes`) and `dataset` (str); for a converted model that was exported, `stock` (its
        `architecture` in transformers, and `engines`, what loads it). Every figure in the card comes from here, or
        from conversion_report.json if there is no `conversion`.
        name: the title; by default the folder's name.
    """
    folder = Path(output_dir)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = folder / REPORT
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    # A trained model was trained from a converted checkpoint, whose report names the original model.
    base_model = report.get("base_model_name") or report.get("base_model", facts["base_model"])
    title = name or folder.name
    conversion = facts.get("conversion") or report.get("figures") or {}
    dataset, auto_class = str(facts.get("dataset") or ""), _auto_class(config)
    is_sentence_model = is_without_head(config) and (folder / "modules.json").is_file()
    metadata = _metadata(config, report, facts, base_model, title, is_sentence_model)
    text = ENVIRONMENT.get_template(TEMPLATE.name).render(
        metadata=Markdown(_front_matter(metadata)),
        title=title,
        name=Markdown(json.dumps(title, ensure_ascii=False)[1:-1]),  # in code, where nothing is markup
        source=_source(base_model),
        auto_class=auto_class,
        needs_code=bool(config.get("auto_map")),
        stock=facts.get("stock") or report.get("stock"),
        is_exported="stock" in facts,
        preprocessor=_preprocessor(folder, config),
        is_sentence_model=is_sentence_model,
        other_weights=_other_weights(facts),
        settings=_rows(_settings(facts.get("settings"))),
        conversion=_rows(conversion),
        dropped_features=report.get("dropped_features") or [],
        training=_rows(facts.get("training") or {}),
        earlier_training=[_rows(run) for run in facts.get("earlier_training") or ()],
        metrics=_rows(facts.get("metrics") or {}),
        comparison=facts.get("comparison"),
        dataset=without_path(dataset),
        is_in_python=bool(facts.get("is_in_python")),
        fitted_to=_fitted_to(facts.get("settings"), conversion),
        plot=PLOT if (folder / PLOT).is_file() else None,
    )
    (folder / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def _fitted_to(settings: Any, conversion: Mapping[str, Any]) -> str | None:
    """The text to which the scores of exact keys were fitted, and None where there are none."""
    entries = settings if isinstance(settings, Sequence) else [settings or {}]
    found, is_kept = conversion.get("calibrated on"), any(entry.get("num_exact_keys") for entry in entries)
    return found if is_kept and found != "nothing" else None


def _source(base_model: str) -> Markdown:
    """The base model as a link to the Hub, or else as code on one line."""
    if is_hub_name(base_model):
        return Markdown(f"[{base_model}](https://huggingface.co/{base_model})")
    return Markdown(f"`{' '.join(without_path(base_model).replace('`', '').split())}`")


def _other_weights(facts: Mapping[str, Any]) -> str:
    """The sentence about the weights outside the mechanisms, which a run may have trained."""
    runs = [*(facts.get("earlier_training") or ()), *([facts["training"]] if facts.get("training") else [])]
    if all(run.get("trainable") == "mechanism" for run in runs):
        return "All other weights and their names are those of the base model."
    if runs[-1].get("use_peft"):
        return "Adapters were trained and merged into other weights; all names are those of the base model."
    return "The other weights were trained as well (see Training), and began as those of the base model."


def _metadata(
    config: Mapping[str, Any],
    report: Mapping[str, Any],
    facts: Mapping[str, Any],
    base_model: str,
    title: str,
    is_sentence_model: bool,
) -> dict[str, Any]:
    """The front matter, which the Hub reads."""
    from huggingface_hub import ModelCardData  # `--help` does without it

    dataset = str(facts.get("dataset") or "")
    task = "sentence-similarity" if is_sentence_model else head_of_config(config).pipeline_tag
    held_out = (report.get("quality") or {}).get("validation_file", "held-out data")
    results = _results(str(task), held_out, facts.get("metrics") or {})
    fields: dict[str, Any] = {
        **(report.get("card_metadata") or source_metadata(Path(facts["base_model"]))),
        "library_name": "transformers",
        **({"base_model": base_model, "base_model_relation": "finetune"} if is_hub_name(base_model) else {}),
        "datasets": [dataset] if is_hub_name(dataset) and not Path(dataset).suffix else None,
        "pipeline_tag": task,
        "tags": _tags(facts.get("settings"), is_sentence_model),
        **({"model_name": title, "eval_results": results} if results else {}),
    }
    return ModelCardData(**fields).to_dict()


def _front_matter(metadata: Mapping[str, Any]) -> str:
    """As YAML, each value on one line, so that none holds the line `---` at which readers end it."""

    def flat(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {flat(key): flat(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [flat(inner) for inner in value]
        return " ".join(value.split()) if isinstance(value, str) else value

    return yaml.safe_dump(flat(metadata), sort_keys=False, allow_unicode=True, width=10**9).strip()


def is_hub_name(name: str) -> bool:
    """Whether this could be the name of a model on the Hub, and no file here has it."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists()


def without_path(text: str) -> str:
    """The last part of an absolute path, which tells a reader elsewhere nothing; other texts unchanged."""
    return Path(text).name if os.path.isabs(text) or text.startswith("~") else text


def escaped(text: str) -> str:
    """A text that somebody else chose, on one line and without what Markdown or HTML would make of it."""
    plain = html.escape(" ".join(text.split()), quote=False)
    plain = re.sub(r"([\[\]|`*\\]|^#)", r"\\\1", plain)
    return re.sub(r"(?i)\b(www)\.", r"\1&#46;", plain.replace("://", "&#58;//"))  # what becomes a link by itself


def _results(task: str, data: str, metrics: Mapping[str, Any]) -> list[EvalResult]:
    """The figures of held-out data in the form in which the Hub shows them; `eval_recall` may be of other texts."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(task, data, data, "_".join(re.findall(r"\w+", name.lower())), value, metric_name=name)
        for name, value in metrics.items()
        if type(value) in (int, float) and not name.startswith("eval_recall")
    ]


def training_history(source: str) -> list[dict[str, Any]]:
    """The training runs of a model (folder or hub name), oldest first; empty if it records none."""
    from transformers.utils import cached_file

    found = cached_file(
        source, HISTORY, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return json.loads(Path(found).read_text(encoding="utf-8"))["runs"] if found else []


def training_facts(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts about training from the runs in training_report.json, oldest first."""
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
    """License and language from the front matter of the source model's card, if it has one."""
    card = source / "README.md"
    if not card.is_file():
        return {}
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        metadata = load_yaml(parts[1])
    except yaml.YAMLError:  # the card of another author may be broken
        return {}
    kept = {key: metadata[key] for key in KEPT if key in metadata} if isinstance(metadata, dict) else {}
    # YAML also knows sets, dates and bytes, which no report can hold.
    return {key: value for key, value in kept.items() if all(isinstance(part, str) for part in _listed(value))}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _auto_class(config: Mapping[str, Any]) -> str:
    """The Auto class that `auto_map` lists for the saved class."""
    architecture = (config.get("architectures") or [""])[0]
    classes = (config.get("auto_map") or {}).items()
    found = [auto for auto, target in classes if str(target).endswith(f".{architecture}")]
    found.sort(key=lambda auto: auto in LAST_CHOICE)
    return found[0] if found else head_of_config(config).auto_class


def _preprocessor(folder: Path, config: Mapping[str, Any]) -> str | None:
    has_processor = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    if has_processor and (head := head_of_config(config)).inputs == "sound":
        return "AutoProcessor" if head.pipeline_tag == "automatic-speech-recognition" else "AutoFeatureExtractor"
    if (folder / "tokenizer_config.json").is_file():
        return "AutoTokenizer"
    return "AutoImageProcessor" if (folder / "preprocessor_config.json").is_file() else None


def _settings(settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """What somebody could have chosen; where layers differ, by the mechanism and its layers."""
    if isinstance(settings, Sequence):
        names = [f"{entry['mechanism']} in layers {ranges_of(entry['layers'])}" for entry in settings]
        return {name: _settings(entry) for name, entry in zip(names, settings, strict=True)}
    return {name: value for name, value in (settings or {}).items() if name not in ("format_version", "rotary")}


def _tags(settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, is_sentence_model: bool) -> list[str]:
    tags = ["linear-attention"] if settings else []
    entries = settings if isinstance(settings, Sequence) else [settings or {}]
    tags += sorted({str(entry["mechanism"]) for entry in entries if "mechanism" in entry} - {"linear"})
    return [*tags, "sentence-transformers"] if is_sentence_model else tags


def _rows(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """`{"a": {"b": 1.23456}}` -> `[("a.b", "1.235")]`; unknown values (None) are left out."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            rows += _rows(value, f"{prefix}{name}.")
        elif value is not None:
            rows.append((f"{prefix}{name}", format_value(value)))
    return rows


def format_value(value: Any) -> str:
    """The text of a figure or setting, on one line: numbers are rounded or grouped."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)) and len(value) > 2 and all(each == value[0] for each in value):
        return f"{format_value(value[0])} in each"
    text = (", ".join(map(str, value)) or "none") if isinstance(value, (list, tuple)) else str(value)
    return " ".join(without_path(text).split())
