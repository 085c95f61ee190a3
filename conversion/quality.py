"""How much of the original a converted model has kept on held-out text, beside its original and its controls.

The control that a language model has to beat is an exact window of the same bytes, with the weights of the teacher: it
forgets what leaves it and costs nothing to make, and a state that does no better with as many bytes is not worth its
training (arXiv 2608.28444).

- window_alone: the student's own window, where it has one, with the weights of the teacher
- same_bytes: the window of as many bytes as the student's state, with the weights of the teacher
- healed: the same window after the student's training: its stages and tokens

Embedding models are measured by their likeness to the original and by pairs with scores.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.devices import computing_device
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.heads import head_of_config
from hf_linear_attention._common.model_card import REPORT, training_facts, training_history, write_model_card
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.configuration_linear_attention import entries_of, max_length_of
from hf_linear_attention.conversion.arguments import ConversionArguments, EvaluationArguments
from hf_linear_attention.conversion.calibration_data import PAIR_COLUMNS, check_text_file, data_recipe
from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.model_speed import model_speed
from hf_linear_attention.conversion.page import write_page
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training, check_measuring
from hf_linear_attention.conversion.report import settings_of
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.conversion.verification import head_figures
from hf_linear_attention.extensions import PREFIX
from hf_linear_attention.model_conversion import convert_config
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class
from hf_linear_attention.state_size import state_bytes
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.packing import Examples
from hf_linear_attention.training.data.processors import (
    DEFAULT_MAX_LENGTH,
    bos_of,
    load_config,
    load_tokenizer,
    pad_token_id,
    sequence_length,
)
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.distributed import first_alone
from hf_linear_attention.training.evaluation import retention
from hf_linear_attention.training.evaluation.embeddings import compare_embeddings, compare_pairs, embed
from hf_linear_attention.training.evaluation.recall import RECALL, RecallProbe
from hf_linear_attention.training.evaluation.retention import Settings, TokenFigures, separate_windows
from hf_linear_attention.training.models import checkpoint_dtype, load_student, load_teacher
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.run import Run, run_stages
from hf_linear_attention.training.tasks import MESSAGES


logger = logging.getLogger(__name__)

# The options that say what is measured on which data.
Options = ConversionArguments | EvaluationArguments

MEASURED_TASKS = ("causal_lm", "embedding")
# A window without sinks is the better one beyond the trained length, one with sinks where sinks carry weight.
SINKS = (0, 4)
# Shorter texts would lie in the window for the most part, and it would be softmax attention there.
WINDOWS_OF_TEXT = 4
PAIRS = [("student", "window_alone"), ("student", "same_bytes"), ("student", "healed")]


# ---- The command `evaluate`, and the measurement at the end of a training


def evaluate(arguments: EvaluationArguments) -> str:
    """Measure a converted model, and write the figures into its folder; returns the text to print.

    Raises:
        UsageError: if there is no converted model that could be measured.
    """
    check_text_file("validation_file", str(arguments.validation_file), instead=MESSAGES)
    if arguments.controls == "healed":
        raise UsageError("`--controls healed` trains a window as `convert --preset` does; this command trains nothing")
    folder = Path(arguments.model_name_or_path).expanduser().resolve()
    task = _task_of(folder)
    source = open_source(str(arguments.teacher_name_or_path), arguments.allow_pickle, "teacher_name_or_path")
    _check_original(source, folder, task)
    check_measuring(arguments, task, folder)
    quality = measure(folder, source, task, arguments)
    record(folder, source, quality, folder.name)
    return figures_of(quality).text()


def _task_of(folder: Path) -> str:
    path = folder / "config.json"
    if folder.is_dir():
        check_checkpoint(folder)
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "linear_attention" not in config:
        raise UsageError(f"`--model_name_or_path` = {str(folder)!r} holds no converted model; convert first")
    name = (config.get("architectures") or [""])[0]
    task = head_of_config(config).task
    if task not in MEASURED_TASKS:
        raise UsageError(f"There are figures for {', '.join(MEASURED_TASKS)}, and {name} is none of these")
    return str(task)


def _check_original(source: Source, folder: Path, task: str) -> None:
    original, ours = read_json(source.config_file), read_json(folder / "config.json")
    kind, own = original.get("model_type"), str(ours.get("model_type")).removeprefix(PREFIX)
    given = f"`--teacher_name_or_path` = {source.name!r}"
    if "linear_attention" in original:
        raise UsageError(f"{given} is converted itself; give the original, with softmax attention")
    if task == "causal_lm" and kind != own:  # an embedding model may be compared with another one
        raise UsageError(f"{given} is a `{kind}`, but the converted model was made from a `{own}`; give its original")


def measure(folder: Path, source: Source, task: str, data: Options, healed: Path | None = None) -> dict[str, Any]:
    """The figures of `training.evaluation` for the model in `folder`, None where one means nothing for it.

    Everything is computed in float32, from the weights as they lie there.

    Args:
        data: what is measured; there is a `validation_file`.
        healed: the folder of the trained control of a language model.
    """
    logger.info("measuring on %s", data.validation_file)
    with torch.no_grad():
        if task == "causal_lm":
            figures = _measure_language(folder, source, data, healed)
        else:
            figures = _measure_embeddings(folder, source, data)
    facts = {"validation_file": Path(str(data.validation_file)).name, "max_tokens": data.max_eval_tokens}
    if data.pairs_file is not None:
        facts["pairs_file"] = Path(data.pairs_file).name
    return {**facts, **finite(figures)}


def _measure_language(folder: Path, source: Source, data: Options, healed: Path | None) -> dict[str, Any]:
    recipe, text = held_out_text(folder, source, data)
    student, teacher = load_models(recipe, folder)
    controls = Controls([], left_out="`--controls none` was given")
    if data.controls != "none":
        controls = possible_controls(teacher, student, text)
    if healed is not None and controls.windows:
        controls = replace(controls, healed=load_student(recipe, str(healed), None).to(student.device).eval())
    figures = language_figures(teacher, student, text, controls)
    if controls.healed is not None:
        figures["control"]["healed_tokens"] = sum(run["training"]["tokens"] for run in training_history(str(healed)))
    return {**figures, **_costs_and_heads(student, teacher, load_tokenizer(recipe), writes=True)}


def held_out_text(folder: Path, source: Source, data: Options) -> tuple[Recipe, HeldOutText]:
    """The recipe of `training` that reads it for the model in `folder`, and the text as `language_figures` takes it."""
    files = {"max_eval_tokens": data.max_eval_tokens, "validation_file": data.validation_file}
    recipe = data_recipe(str(folder), "causal_lm", source.loadable, data.trust_remote_code, **files)
    return recipe, read_text(recipe, data.max_eval_length)


def read_text(recipe: Recipe, max_eval_length: int) -> HeldOutText:
    """The validation file of a recipe, as `language_figures` takes it."""
    tokenizer = load_tokenizer(recipe)
    examples: Any = load_data(recipe, tokenizer).validation
    length = sequence_length(recipe, tokenizer, load_config(recipe))
    dtype = checkpoint_dtype(recipe.model.task, recipe.model.model_name_or_path, recipe.model.trust_remote_code)
    padding = pad_token_id(tokenizer)
    return HeldOutText(examples, length, bos_of(tokenizer), padding, max_eval_length, getattr(torch, dtype))


def load_models(recipe: Recipe, folder: Path) -> tuple[Any, Any]:
    """Student and teacher, ready to be measured."""
    device = computing_device()
    student: Any = load_student(recipe, str(folder), None)
    teacher: Any = load_teacher(recipe, student)
    return student.to(device).eval(), teacher.to(device).eval()


def _measure_embeddings(folder: Path, source: Source, data: Options) -> dict[str, Any]:
    texts = {"validation_file": data.validation_file, "max_eval_tokens": data.max_eval_tokens}
    pairs = None if data.pairs_file is None else {"validation_file": data.pairs_file, **PAIR_COLUMNS}
    recipes = [
        data_recipe(str(folder), "embedding", source.loadable, data.trust_remote_code, **files)
        for files in (texts, pairs)
        if files is not None
    ]
    student, teacher = load_models(recipes[0], folder)
    figures = embedding_figures(student, teacher, *recipes)
    return {**figures, **_costs_and_heads(student, teacher, load_tokenizer(recipes[0]), writes=False)}


def _costs_and_heads(student: Any, teacher: Any, tokenizer: Any, writes: bool) -> dict[str, Any]:
    """The errors of the heads and, on a CPU, the times of the whole model."""
    speed = None
    if student.device.type == "cpu":
        logger.info("timing both models")
        speed = model_speed(student, teacher, retention.most_positions(teacher), writes)
    return {"heads": head_figures(student, tokenizer), "speed": speed}


def finite(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record(folder: Path, source: Source, quality: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """Write the figures into conversion_report.json, report.html and the model card of `folder`; returns the report."""
    path = folder / REPORT
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"base_model": source.name}
    report["quality"] = quality
    written = path.with_name(f"{REPORT}.tmp")  # a kill must not cost the report
    written.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {"metrics": {}, **training_facts(training_history(str(folder)))}
    if quality is not None:
        figures = figures_of(quality)
        facts["metrics"] = {**facts["metrics"], **figures.rows}
        facts["comparison"] = figures.by_position
    facts |= {"base_model": source.name, "settings": settings_of(config, report)}
    write_model_card(folder, facts, name=name)
    write_page(folder, name)
    return report


# ---- Controls


@dataclass(frozen=True)
class HeldOutText:
    """`examples` of up to `max_length` tokens (protocol S), and what is needed to cut their text otherwise.

    `max_eval_length`: the longest windows; `dtype`: that of the checkpoint, in which bytes are counted.
    """

    examples: Examples
    max_length: int
    bos_token_id: int | None
    padding: int
    max_eval_length: int
    dtype: torch.dtype = torch.float32

    def batches(self) -> list[Batch]:
        """The padded batches of all examples."""
        return retention.batches_of(self.examples, self.max_length, self.padding)


@dataclass(frozen=True)
class SameBytes:
    """A `window` as `convert` takes its `settings`, and the bytes of its state in all layers."""

    window_size: int
    num_sinks: int
    state_bytes: int
    settings: Settings


@dataclass(frozen=True)
class Controls:
    """The untrained windows of the same bytes, and the healed model of the better one where there is one.

    `left_out` says why there are none.
    """

    windows: list[SameBytes]
    healed: PreTrainedModel | None = None
    left_out: str | None = None


def model_state_bytes(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the decoding state of all converted layers, per sequence; 0 where they have none."""
    return sum(state_bytes(module, dtype) or 0 for module in linear_attention_modules(model).values())


def windows_of_same_bytes(
    teacher: PreTrainedModel, student: PreTrainedModel, trained_length: int, dtype: torch.dtype = torch.float32
) -> list[SameBytes]:
    """Per number of sinks the largest window, in the layers that the student converts, whose state takes no more bytes
    than the student's, with keys and values of this dtype; none where the student has no state, or no window fits."""
    budget, settings = model_state_bytes(student, dtype), student.config.linear_attention
    found = []
    for sinks in SINKS if budget else ():
        sizes = [_window(teacher, settings, size, sinks, trained_length, dtype).state_bytes for size in (1, 2)]
        largest = 1 + (budget - sizes[0]) // (sizes[1] - sizes[0])
        if largest >= 1:
            found.append(_window(teacher, settings, largest, sinks, trained_length, dtype))
    return found


def _window(
    teacher: PreTrainedModel,
    settings: Settings,
    window_size: int,
    num_sinks: int,
    trained_length: int,
    dtype: torch.dtype,
) -> SameBytes:
    sizes = {"window_size": window_size, "num_sinks": num_sinks, "trained_length": trained_length}
    own = retention.window_settings(settings, **sizes)
    with torch.device("meta"):
        model: Any = linear_model_class(type(teacher))(convert_config(teacher.config, own))
    return SameBytes(window_size, num_sinks, model_state_bytes(model, dtype), own)


def trained_length_of(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> int:
    """The trained length in the student's settings, or else the longest input of the teacher or of the text."""
    known = [entry.get("trained_length") for entry in entries_of(student.config.linear_attention)]
    return int(next(filter(None, known), None) or max_length_of(teacher.config) or text.max_length)


def window_length(teacher: PreTrainedModel, trained_length: int, text: HeldOutText) -> tuple[int, str]:
    """The length up to which figures by position go, and what ends it."""
    count = len(retention.running_text(text.examples))
    return retention.longest_window(trained_length, count, text.max_eval_length, retention.most_positions(teacher))


def possible_controls(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> Controls:
    """The windows of the student's bytes for which the text is long enough."""
    trained_length = trained_length_of(teacher, student, text)
    windows = windows_of_same_bytes(teacher, student, trained_length, text.dtype)
    if not windows:
        return Controls([], left_out="the model has no state of constant size that a window could be compared with")
    length, _ = window_length(teacher, trained_length, text)
    largest = max(window.window_size for window in windows)
    if length < WINDOWS_OF_TEXT * largest:
        return Controls(
            [],
            left_out=f"a window of the same bytes has {largest:,} tokens, and the text is read {length:,} tokens at a "
            f"time: less than {WINDOWS_OF_TEXT} windows",
        )
    return Controls(windows)


def better_window(
    teacher: PreTrainedModel, windows: list[SameBytes], batches: list[Batch]
) -> tuple[SameBytes, list[Tensor]]:
    """The window with the fewer nats per token on the batches, and the nats `[targets]` of every window."""
    nats = [_untrained(teacher, window.settings, batches) for window in windows]
    return windows[min(range(len(windows)), key=lambda place: nats[place].mean().item())], nats


def _untrained(teacher: PreTrainedModel, settings: Settings, batches: list[Batch]) -> Tensor:
    return retention.nats_of(convert(teacher, settings=settings), batches)


def heal_control(source: Source, training: Training, data: Options, run: Run) -> None:
    """Train the window of the same bytes as the student was trained (the same stages, tokens, seed and text) in the
    work folder, or go on with that; nothing where the text is too short for a control.

    A window has no parameters of its own, so that stages of attention transfer give their tokens to the others.

    Args:
        run: what runs one stage, as for the student.
    """
    work = training.work / CONTROL
    if not first_alone(CONTROL, lambda: _has_control(source, training, data)):
        return
    logger.info("the control: %s", work)
    given = {**training.given, "model_name_or_path": str(work / CONVERTED), "output_dir": str(work / TRAINED)}
    stages = [stage["training"] for stage in training_history(str(training.work / TRAINED))]
    if lengths := [stage["max_length"] for stage in stages if "max_length" in stage]:
        given["max_length"] = min(lengths)  # shorter than asked for where there was no memory
    run_stages(training.preset, given, run)


def _has_control(source: Source, training: Training, data: Options) -> bool:
    """Write the untrained window into the work folder if it is not there; False if the text is too short for one."""
    work = training.work / CONTROL
    if (work / CONVERTED).is_dir():
        return True
    student = training.work / TRAINED
    recipe, text = held_out_text(student, source, data)
    model, teacher = load_models(recipe, student)
    controls = possible_controls(teacher, model, text)
    if not controls.windows:
        logger.warning("no window of the same bytes is healed: %s", controls.left_out)
        return False
    window, _ = better_window(teacher, controls.windows, text.batches())
    work.mkdir(exist_ok=True)
    with staging(work / CONVERTED) as folder:
        save_window(teacher, window, student, folder, data.trust_remote_code)
    return True


def save_window(
    teacher: PreTrainedModel, window: SameBytes, student: Path, folder: Path, trust_remote_code: bool = False
) -> None:
    """The untrained window, with the tokenizer of the student's folder."""
    convert(teacher, settings=window.settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(student, trust_remote_code=trust_remote_code).save_pretrained(folder)


# ---- Language models


def language_figures(
    teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText, controls: Controls
) -> dict[str, Any]:
    """The figures of `training.evaluation` with their controls, as conversion_report.json holds them: `quality`."""
    batches = text.batches()
    inside = retention.score(teacher, student, batches)
    control: dict[str, Any] = {"left_out": controls.left_out}
    window = None
    if controls.windows:
        window, nats = better_window(teacher, controls.windows, batches)
        control = describe_control(window, controls.windows, nats)
        if window.window_size + window.num_sinks < text.max_length:  # else it would be the teacher there
            inside["same_bytes"] = nats[controls.windows.index(window)]
            if controls.healed is not None:
                inside["healed"] = retention.nats_of(controls.healed, batches)
    return {
        **retention.summary(inside, student.config.linear_attention),
        **_against_controls(inside),
        **_recall(teacher, student, text),
        "control": control,
        "positions": _positions(teacher, student, text, window, controls.healed),
    }


def _against_controls(inside: TokenFigures) -> dict[str, Any]:
    """Of the whole text what the buckets of positions have too, and `closed`: the student's share of the way from the
    window of the same bytes to the teacher, None where there is no gap."""
    found: dict[str, Any] = {"targets": len(inside["student"])}
    for model, other in PAIRS:
        if other in inside:
            found[f"{model}_minus_{other}"] = retention.paired_difference(inside[model], inside[other])
    if "same_bytes" in inside:
        control, student, teacher = (inside[name].mean().item() for name in ("same_bytes", "student", "teacher"))
        found["closed"] = (
            (control - student) / (control - teacher) if control - teacher > retention.SMALLEST_GAP else None
        )
    return found


def describe_control(window: SameBytes, windows: list[SameBytes], nats: Sequence[Tensor]) -> dict[str, Any]:
    """What the report says of the control: its size, and those that were not taken."""
    sizes = ("window_size", "num_sinks", "state_bytes")
    entries = [
        {**{name: getattr(other, name) for name in sizes}, "nats": values.mean().item()}
        for other, values in zip(windows, nats, strict=True)
    ]
    return {**entries.pop(windows.index(window)), "others": entries}


def _positions(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: HeldOutText,
    window: SameBytes | None,
    healed: PreTrainedModel | None,
) -> dict[str, Any]:
    """The nats per token of all models by position, in windows that are longer than the trained length."""
    trained_length = trained_length_of(teacher, student, text)
    length, ended_by = window_length(teacher, trained_length, text)
    windows = separate_windows(retention.running_text(text.examples), max(length, 2), text.bos_token_id)
    facts = {"trained_length": trained_length, "length": length, "ended_by": ended_by, "windows": len(windows)}
    if len(windows) == 0:
        return {**facts, "buckets": []}
    logger.info("nats by position, in %d windows of %d tokens", len(windows), length)
    batches = retention.batches_of(windows, length, text.padding)
    nats = {"teacher": retention.nats_of(teacher, batches), "student": retention.nats_of(student, batches)}
    settings = student.config.linear_attention
    if retention.is_hybrid(settings):
        nats["window_alone"] = _untrained(teacher, retention.window_settings(settings), batches)
    if window is not None:
        nats["same_bytes"] = _untrained(teacher, window.settings, batches)
    if healed is not None:
        nats["healed"] = retention.nats_of(healed, batches)
    edges = retention.bucket_edges(trained_length, length)
    return {**facts, "buckets": retention.position_buckets(retention.target_positions(batches), nats, edges, PAIRS)}


def _recall(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> dict[str, float]:
    """The recall of both models inside the trained length; nothing where the text is too short for it."""
    probe = RecallProbe(text.examples, text.max_length, text.max_length, text.bos_token_id)
    models = {"recall_teacher": teacher, "recall": student}
    return {
        name: found[RECALL]
        for name, model in models.items()
        if RECALL in (found := probe(model, contextlib.nullcontext))
    }


# ---- Embedding models


@torch.no_grad()
def embedding_figures(
    student: PreTrainedModel, teacher: PreTrainedModel, texts: Recipe, pairs: Recipe | None = None
) -> dict[str, Any]:
    """The figures of `training/evaluation/embeddings.py`.

    Args:
        texts: a recipe that reads the held-out texts.
        pairs: a recipe that reads pairs with scores.
    """
    batches = _batches(texts)  # which also completes the recipe
    length = texts.data.max_length or DEFAULT_MAX_LENGTH

    def embedded(part: Any) -> tuple[Tensor, Tensor]:
        return embed(student, part, texts.pooling), embed(teacher, part, texts.pooling)

    figures: dict[str, Any] = {**compare_embeddings(*embedded(batches))}
    if pairs is not None:
        batches = _batches(pairs)
        both, scores = embedded(batches), torch.cat([batch["labels"] for batch in batches]).tolist()[::2]
        figures |= compare_pairs(*both, scores)
    return {**figures, "max_length": length}


def _batches(recipe: Recipe) -> Sequence[Batch]:
    tokenizer = load_tokenizer(recipe)
    examples: Any = load_data(recipe, tokenizer).validation
    plan = EvaluationBatches(len(examples), recipe.optimization.per_device_eval_batch_size, 0, 1)
    batches: Any = loader(Stream(examples, recipe.run.seed, shuffle=False), plan, pad_token_id(tokenizer))
    return batches
