"""The trained model as a folder that AutoModel, sentence-transformers and a reader of README.md can use."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_linear_attention._common import folders
from hf_linear_attention._common.model_card import HISTORY, REPORT, training_facts, training_history, write_model_card
from hf_linear_attention.training.checkpoints.checkpointing import MODEL_FOLDER
from hf_linear_attention.training.checkpoints.weights import save_model
from hf_linear_attention.training.data.processors import Processor
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import plot_metrics


logger = logging.getLogger(__name__)

# conversion_report.json says what the model was before it was converted; the card quotes it
SIDECARS = (REPORT, "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def save_final(
    recipe: Recipe,
    model: PreTrainedModel,
    processor: Processor,
    training: dict[str, Any],
    metrics: dict[str, float],
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model, code, processor, sidecars and card into output_dir; each file appears only when complete.

    Args:
        weights: as for `adapters.save_model`.
    """
    folder = folders.incomplete(recipe.output_dir / MODEL_FOLDER)
    folder.mkdir(parents=True)
    save_model(model, folder, weights)
    processor.save_pretrained(folder)
    copy_sidecars(recipe.model.model_name_or_path, folder)
    earlier = training_history(recipe.model.model_name_or_path)
    dataset = recipe.data.dataset_name or Path(str(recipe.data.train_file)).name
    this = {"dataset": dataset, "training": training, "metrics": metrics}
    (folder / HISTORY).write_text(json.dumps({"runs": [*earlier, this]}, indent=1) + "\n", encoding="utf-8")
    facts = {
        "base_model": recipe.model.model_name_or_path,
        "settings": getattr(model.config, "linear_attention", None),
        **training_facts([*earlier, this]),
    }
    plot_metrics(recipe.output_dir, folder)
    write_model_card(folder, facts, name=recipe.output_dir.name)
    _move_into(folder, recipe.output_dir)
    logger.info("saved %s", recipe.output_dir)


def copy_sidecars(source: str, target: Path) -> None:
    """Copy what belongs beside the model, when the source (folder or hub name) has it."""
    for name in [*SIDECARS, *_module_files(source)]:
        found = _find(source, name)
        if found is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target / name)
    if (report := target / REPORT).is_file():  # the figures of the model before this training are not this one's
        content = json.loads(report.read_text(encoding="utf-8"))
        if content.pop("quality", None) is not None:
            report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _module_files(source: str) -> list[str]:
    """Files of the modules behind the transformer, such as `1_Pooling/config.json`."""
    modules = _find(source, "modules.json")
    if modules is None:
        return []
    paths = [module["path"] for module in json.loads(Path(modules).read_text(encoding="utf-8")) if module["path"]]
    return [f"{path}/{name}" for path in paths for name in ("config.json", "model.safetensors")]


def _find(source: str, name: str) -> str | None:
    return cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )


def _move_into(folder: Path, target: Path) -> None:
    """Rename every file into `target`, replacing older ones; the content is on the disk before.

    The report, by which a stage counts as finished (`stages.py`), comes last; that of an older model goes first.
    """
    folders.flush(folder)
    (target / HISTORY).unlink(missing_ok=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path == folder / HISTORY, path)):
        destination = target / path.relative_to(folder)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if path == folder / HISTORY:
            folders.flush_names(target)
        path.replace(destination)
    folders.flush_names(target)
    shutil.rmtree(folder)
