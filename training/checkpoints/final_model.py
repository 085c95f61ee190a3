"""The folder of the trained model, with the files that AutoModel, sentence-transformers and readers of it need."""

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
from hf_linear_attention._common.command_line import not_essential
from hf_linear_attention._common.heads import is_without_head
from hf_linear_attention._common.model_card import HISTORY, REPORT, training_facts, training_history, write_model_card
from hf_linear_attention.training.checkpoints.checkpointing import MODEL_FOLDER
from hf_linear_attention.training.checkpoints.weights import save_model
from hf_linear_attention.training.data.processors import Processor
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import plot_metrics


logger = logging.getLogger(__name__)

SENTENCE_MODEL_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def save_final(
    recipe: Recipe,
    model: PreTrainedModel,
    processor: Processor,
    training: dict[str, Any],
    metrics: dict[str, float],
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model, code, processor, sidecar files and model card into `output_dir`; every file appears complete.

    Args:
        training: the settings of the training run, for report and card.
        metrics: the figures of the last evaluation.
        weights: see `weights.save_model`.
    """
    folder = folders.incomplete(recipe.output_dir / MODEL_FOLDER)
    folder.mkdir(parents=True)
    save_model(model, folder, weights)
    processor.save_pretrained(folder)
    earlier: list[dict[str, Any]] = []
    with not_essential("what describes the model it was trained from"):
        copy_sidecars(recipe.model.model_name_or_path, folder)
        earlier = training_history(recipe.model.model_name_or_path)
    dataset = recipe.data.dataset_name or Path(str(recipe.data.train_file)).name
    this = {"dataset": dataset, "training": training, "metrics": metrics}
    (folder / HISTORY).write_text(json.dumps({"runs": [*earlier, this]}, indent=1) + "\n", encoding="utf-8")
    with not_essential("the plot of the losses"):
        plot_metrics(recipe.output_dir, folder)
    with not_essential("the model card"):
        settings = getattr(model.config, "linear_attention", None)
        facts = {"base_model": recipe.model.model_name_or_path, "settings": settings}
        write_model_card(folder, facts | training_facts([*earlier, this]), name=recipe.output_dir.name)
    _move_into(folder, recipe.output_dir)
    logger.info("saved %s", recipe.output_dir)


def copy_sidecars(source: str, target: Path) -> None:
    """Copy the sidecar files that `source` (a folder or a name on the Hub) has into `target`, which holds a model.

    A classifier that was trained from a sentence-transformers model is no such model, and gets none of their files.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    sentence_files = [*SENTENCE_MODEL_FILES, *_module_files(source)] if is_without_head(config) else []
    for name in [REPORT, *sentence_files]:
        found = _find(source, name)
        if found is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target / name)
    if (report := target / REPORT).is_file():  # its figures of quality are those of the model before this training
        content = json.loads(report.read_text(encoding="utf-8"))
        if content.pop("quality", None) is not None:
            report.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _module_files(source: str) -> list[str]:
    """The files of the sentence-transformers modules after the transformer, such as `1_Pooling/config.json`."""
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
    """Move every file of `folder` into `target`, where it replaces an older one, after its content is on the disk.

    The training report, which marks a stage as finished (`stages.py`), is removed first and moved last.
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
