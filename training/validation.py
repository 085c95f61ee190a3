"""Defaults that depend on other options, and every combination that cannot work. All problems are found at once."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from hf_linear_attention.training.recipe import (
    SELECTING,
    DataArguments,
    ObjectiveArguments,
    OptimizationArguments,
    Recipe,
    RunArguments,
    parse_layer_numbers,
    parse_rates,
)
from hf_linear_attention.training.tracking import tracker_problems


FILE_TYPES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TEACHER_WEIGHTS = ("logits_kl_weight", "hidden_state_weight", "embedding_weight")
# The student computes softmax attention for these, and is its own teacher.
TRANSFER_WEIGHTS = ("attention_transfer_weight", "attention_map_weight")
TRANSFER_OPTIONS = {"transfer_layers", "layer_patience", "offload_folder"}
WEIGHTS = (*TRANSFER_WEIGHTS, "task_loss_weight", *TEACHER_WEIGHTS)
# Images are counted in steps, epochs and samples.
TEXT_OPTIONS = {
    *("tokenizer_name", "text_column_name", "max_length", "max_train_tokens", "max_eval_tokens", "untie_embeddings"),
    "embedding_weight",
}
EVALUATION_OPTIONS = (
    *("eval_steps", "per_device_eval_batch_size", "max_eval_tokens", "max_eval_samples"),
    *("load_best_model_at_end", "early_stopping_patience"),
)
# What still means something when nothing is trained.
EVALUATION_ONLY = {
    *("model_name_or_path", "task", "teacher_name_or_path", "tokenizer_name", "trust_remote_code", "config"),
    *(
        "validation_file",
        "text_column_name",
        "text_pair_column_name",
        "image_column_name",
        "on_bad_rows",
        "label_column_name",
        "max_length",
        "mlm_probability",
        "max_eval_tokens",
    ),
    *("max_eval_samples", "max_eval_chars", "per_device_eval_batch_size", "output_dir", "overwrite_output_dir", "seed"),
    "mixed_precision",
}


def fill_defaults(recipe: Recipe) -> None:
    """Replace the `None` of objective weights by what the task and the teacher suggest (in place)."""
    has_teacher = recipe.model.teacher_name_or_path is not None
    embedding = recipe.model.task == "embedding"
    is_transfer = any(getattr(recipe.objective, name) for name in TRANSFER_WEIGHTS)
    suggested = {
        "task_loss_weight": not has_teacher and not embedding and not is_transfer,
        "logits_kl_weight": has_teacher and not embedding and not is_transfer,
        "hidden_state_weight": has_teacher and embedding and not is_transfer,
        "embedding_weight": has_teacher and embedding and not is_transfer,
    }
    for name, use in suggested.items():
        if getattr(recipe.objective, name) is None:
            setattr(recipe.objective, name, float(use))
    if recipe.objective.disable_dropout is None:  # the teacher's answer has none
        weights = (getattr(recipe.objective, name) for name in (*TRANSFER_WEIGHTS, *TEACHER_WEIGHTS))
        recipe.objective.disable_dropout = any(weights)


def find_problems(recipe: Recipe) -> list[str]:
    """One sentence a problem: the option and value got, what is allowed, what to do."""
    checks = (
        _numbers,
        _files,
        _streaming,
        _columns,
        _evaluation,
        _objectives,
        _adapters,
        _schedule,
        _folder,
        _selection,
        _pattern,
        tracker_problems,
        _modes,
    )
    return [problem for check in checks for problem in check(recipe)]


def _numbers(recipe: Recipe) -> Iterator[str]:
    at_least_one = {
        DataArguments: ("max_eval_tokens", "max_eval_samples", "max_eval_chars"),
        OptimizationArguments: (
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("max_train_steps", "max_train_tokens"),
        ),
        RunArguments: (
            "logging_steps",
            "eval_steps",
            "checkpointing_steps",
            "save_total_limit",
            "early_stopping_patience",
        ),
        ObjectiveArguments: ("layer_patience",),
    }
    values = recipe.flat()
    for name in (name for names in at_least_one.values() for name in names):
        if values[name] is not None and values[name] < 1:
            yield f"`--{name} {values[name]}`: allowed is 1 or more"
    for name in ("learning_rate", "mechanism_learning_rate", "num_train_epochs", "temperature"):
        if values[name] is not None and not values[name] > 0:
            yield f"`--{name} {values[name]}`: allowed is a number above 0"
    for name in ("weight_decay", "max_grad_norm", "warmup_steps", "seed", *WEIGHTS):
        if not values[name] >= 0:
            yield f"`--{name} {values[name]}`: allowed is 0 or more"
    if values["max_length"] is not None and values["max_length"] < 2:
        yield f"`--max_length {values['max_length']}`: allowed is 2 or more"
    if not 0 < values["mlm_probability"] < 1:
        yield f"`--mlm_probability {values['mlm_probability']}`: allowed is a number between 0 and 1"
    if values["ema_decay"] is not None and not 0 < values["ema_decay"] < 1:
        yield f"`--ema_decay {values['ema_decay']}`: allowed is a number between 0 and 1, such as 0.999"
    if not 0 <= values["warmup_ratio"] < 1:
        yield f"`--warmup_ratio {values['warmup_ratio']}`: allowed is a number from 0 to below 1"


def _files(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    for name in ("train_file", "validation_file"):
        path = getattr(data, name)
        if path is None:
            continue
        if Path(path).suffix not in FILE_TYPES:
            yield f"`--{name} {path}`: allowed are files named {', '.join('*' + kind for kind in FILE_TYPES)}"
        elif not Path(path).is_file():
            yield f"`--{name} {path}`: there is no such file"
        elif Path(path).suffix == ".txt" and recipe.is_classification:
            yield f"`--{name} {path}`: a .txt has no classes; use .jsonl, .csv, .tsv or .parquet with a label column"
    if data.dataset_name is not None and data.train_file is not None:
        yield "`--dataset_name` and `--train_file` exclude each other; give one"
    if data.dataset_config_name is not None and data.dataset_name is None:
        yield "`--dataset_config_name` needs `--dataset_name`"
    if not recipe.has_training and data.validation_file is None:
        yield "no data: give `--train_file` or `--dataset_name` to train, `--validation_file` alone to evaluate"


def _streaming(recipe: Recipe) -> Iterator[str]:
    if not recipe.data.streaming:
        return
    if recipe.data.join_documents:
        yield "`--join_documents` and `--streaming` exclude each other; drop one"
    if recipe.is_classification:
        yield f"`--streaming` reads unlabelled text; drop it for {recipe.model.task}"
    if (recipe.data.train_file or "").endswith(".txt"):
        yield f"`--streaming`: {recipe.data.train_file} is one text; use .jsonl, .csv, .tsv or `--dataset_name`"
    limits = {"num_train_epochs", "max_train_tokens"} & recipe.given
    if limits or recipe.optimization.max_train_steps is None:
        yield "`--streaming`: the length of a stream is not known; give `--max_train_steps` and no other limit"


def _columns(recipe: Recipe) -> Iterator[str]:
    given, task, data = recipe.given, recipe.model.task, recipe.data
    only_txt = all(path is None or path.endswith(".txt") for path in (data.train_file, data.validation_file))
    if "text_column_name" in given and only_txt and data.dataset_name is None:
        yield "`--text_column_name` does nothing for .txt files; drop it"
    has_scores = task == "embedding" and data.text_pair_column_name is not None
    if "label_column_name" in given and not recipe.is_classification and not has_scores:
        yield f"`--label_column_name` does nothing for `--task {task}`; drop it or use sequence_classification"
    if data.text_pair_column_name is not None and task not in ("sequence_classification", "embedding"):
        yield f"`--text_pair_column_name` does nothing for `--task {task}`; drop it"
    if recipe.run.metric_for_best_model in ("spearman", "eval_spearman") and data.text_pair_column_name is None:
        yield "`--metric_for_best_model spearman` needs pairs with scores: give `--text_pair_column_name`"
    if data.join_documents and task != "causal_lm":
        yield f"`--join_documents` does nothing for `--task {task}`; drop it"
    if "mlm_probability" in given and task != "masked_lm":
        yield f"`--mlm_probability` does nothing for `--task {task}`; drop it or use masked_lm"
    if task != "image_classification" and "image_column_name" in given:
        yield f"`--image_column_name` does nothing for `--task {task}`; drop it or use image_classification"
    if task == "image_classification":
        for name in sorted(given & TEXT_OPTIONS):
            yield f"`--{name}` is about text and does nothing for `--task {task}`; drop it"


def _evaluation(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if data.validation_file is None and data.dataset_name is None:
        for name in recipe.given.intersection(EVALUATION_OPTIONS):
            yield f"`--{name}` needs data to evaluate on: give `--validation_file` or drop it"
    if data.max_eval_chars is not None and not (data.validation_file or "").endswith(".txt"):
        yield f"`--max_eval_chars` needs a .txt `--validation_file`, got {data.validation_file}"


def _objectives(recipe: Recipe) -> Iterator[str]:
    weights, task = recipe.objective, recipe.model.task
    teacher = recipe.model.teacher_name_or_path
    if task == "embedding":
        if teacher is None:
            yield "`--task embedding` learns from a teacher: give `--teacher_name_or_path`"
        for name in ("task_loss_weight", "logits_kl_weight"):
            if getattr(weights, name):
                yield f"`--{name} {getattr(weights, name)}`: an embedding model has no logits; set it to 0"
    if not recipe.has_training:
        return
    used = [name for name in TEACHER_WEIGHTS if getattr(weights, name)]
    if teacher is None:
        for name in used:
            yield f"`--{name} {getattr(weights, name)}` needs `--teacher_name_or_path`"
    if not any(getattr(weights, name) for name in WEIGHTS):
        yield f"nothing to learn from: every weight is 0; set one of {', '.join('--' + name for name in WEIGHTS)}"
    elif used_here := [name for name in TRANSFER_WEIGHTS if getattr(weights, name)]:
        yield from _transfer(recipe, used_here[0], [name for name in WEIGHTS[2:] if getattr(weights, name)])
    elif teacher is not None and not used and task != "embedding":
        yield f"`--teacher_name_or_path {teacher}` is not used: set one of {', '.join(TEACHER_WEIGHTS)} above 0"
    try:
        parse_rates(weights.window_dropout)
    except ValueError:
        yield (
            f"`--window_dropout {weights.window_dropout}`: allowed is a probability, or several with commas between, "
            "such as 0.9,0.75,0.5"
        )
    yield from _unused_details(recipe, weights)


def _transfer(recipe: Recipe, used: str, others: list[str]) -> Iterator[str]:
    """The student computes softmax attention then: no other objective could learn anything from its output."""
    weight = f"`--{used} {getattr(recipe.objective, used)}`"
    for name in others:
        yield f"{weight} and `--{name}` exclude each other; train twice, the transfer first"
    if recipe.model.trainable != "mechanism":
        yield f"{weight} trains the mechanisms alone: add `--trainable mechanism`"
    if recipe.model.teacher_name_or_path is not None and recipe.model.task != "embedding":
        yield f"{weight}: the model is its own teacher; drop `--teacher_name_or_path`"


def _unused_details(recipe: Recipe, weights: ObjectiveArguments) -> Iterator[str]:
    if "attention_transfer_error" in recipe.given and not weights.attention_transfer_weight:
        yield "`--attention_transfer_error` belongs to `--attention_transfer_weight`, which is 0; set it or drop this"
    for name in sorted(recipe.given & TRANSFER_OPTIONS):
        if not any(getattr(weights, weight) for weight in TRANSFER_WEIGHTS):
            yield f"`--{name}` belongs to `--attention_transfer_weight`, which is 0; drop it or set the weight"
    try:
        parse_layer_numbers(weights.transfer_layers or "0")
    except ValueError:
        yield f"`--transfer_layers {weights.transfer_layers}`: allowed is a list such as 0,2,4-7"
    if "temperature" in recipe.given and not weights.logits_kl_weight:
        yield "`--temperature` belongs to `--logits_kl_weight`, which is 0; drop it or set the weight"
    if "hidden_state_layers" in recipe.given and not weights.hidden_state_weight:
        yield "`--hidden_state_layers` belongs to `--hidden_state_weight`, which is 0; drop it or set the weight"


def _adapters(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.use_peft:
        if importlib.util.find_spec("peft") is None:
            yield "`--use_peft` needs peft: `pip install peft`"
        if model.trainable == "mechanism":
            yield "`--use_peft` and `--trainable mechanism` exclude each other; use `--trainable all` or `adapter`"
        if model.untie_embeddings is not None:
            yield "`--use_peft` does not train the embeddings that `--untie_embeddings` takes apart; drop one"
        if model.lora_r < 1:
            yield f"`--lora_r {model.lora_r}`: allowed is 1 or more"
        if not 0 <= model.lora_dropout < 1:
            yield f"`--lora_dropout {model.lora_dropout}`: allowed is a number from 0 to below 1"
        return
    if model.trainable == "adapter":
        yield "`--trainable adapter` needs `--use_peft`"
    for name in sorted(recipe.given & {"use_dora", *(name for name in recipe.flat() if name.startswith("lora_"))}):
        yield f"`--{name}` needs `--use_peft`"


def _schedule(recipe: Recipe) -> Iterator[str]:
    plan = recipe.optimization
    if plan.warmup_ratio and plan.warmup_steps:
        yield "`--warmup_ratio` and `--warmup_steps` exclude each other; give one"
    if plan.lr_scheduler_type == "constant" and (plan.warmup_ratio or plan.warmup_steps):
        yield "`--lr_scheduler_type constant` has no warmup; use constant_with_warmup or drop the warmup"
    if recipe.model.trainable == "adapter" and "mechanism_learning_rate" in recipe.given:
        yield "`--mechanism_learning_rate` does nothing with `--trainable adapter`; drop it"
    if recipe.model.trainable == "mechanism" and recipe.model.untie_embeddings is not None:
        yield "`--trainable mechanism` does not train the embeddings that `--untie_embeddings` takes apart; drop one"
    if recipe.model.trainable == "mechanism" and {"learning_rate", "mechanism_learning_rate"} <= recipe.given:
        yield "`--learning_rate` does nothing with `--trainable mechanism` and `--mechanism_learning_rate`; drop one"


def _folder(recipe: Recipe) -> Iterator[str]:
    run, path = recipe.run, recipe.output_dir
    resume = run.resume_from_checkpoint
    if resume is not None and run.overwrite_output_dir:
        yield "`--resume_from_checkpoint` and `--overwrite_output_dir` exclude each other; give one"
    if resume not in (None, "latest") and not (Path(str(resume)) / "trainer_state.json").is_file():
        yield f"`--resume_from_checkpoint {resume}`: not a checkpoint folder of this script; allowed: latest or a path"
    if path.exists() and not path.is_dir():
        yield f"`--output_dir {path}` is a file; give a folder"
    elif path.is_dir() and any(path.iterdir()) and resume is None and not run.overwrite_output_dir:
        yield (
            f"`--output_dir {path}` is not empty; give another folder, `--resume_from_checkpoint latest` to go on, "
            "or `--overwrite_output_dir` to start over"
        )
    if run.save_total_limit is not None and run.checkpointing_steps is None and not run.load_best_model_at_end:
        yield "`--save_total_limit` needs `--checkpointing_steps` or `--load_best_model_at_end`"


def _pattern(recipe: Recipe) -> Iterator[str]:
    try:
        re.compile(recipe.model.freeze_pattern or "")
    except re.error as error:
        yield f"`--freeze_pattern {recipe.model.freeze_pattern}` is no regular expression: {error}"


def _selection(recipe: Recipe) -> Iterator[str]:
    run, allowed = recipe.run, SELECTING[recipe.model.task]
    if (run.load_best_model_at_end or run.early_stopping_patience) and run.eval_steps is None:
        yield "`--load_best_model_at_end` and `--early_stopping_patience` compare evaluations: add `--eval_steps`"
    if run.metric_for_best_model is None:
        return
    if run.metric_for_best_model.removeprefix("eval_") not in allowed:
        yield f"`--metric_for_best_model {run.metric_for_best_model}`: allowed is one of {', '.join(allowed)}"
    if not run.load_best_model_at_end and run.early_stopping_patience is None:
        yield "`--metric_for_best_model` needs `--load_best_model_at_end` or `--early_stopping_patience`"


def _modes(recipe: Recipe) -> Iterator[str]:
    if recipe.has_training:
        return
    for name in sorted(recipe.given - EVALUATION_ONLY):
        yield f"`--{name}` does nothing without training data; give `--train_file` or drop it"
    if recipe.model.teacher_name_or_path is not None and recipe.model.task != "embedding":
        yield "`--teacher_name_or_path` is not used when a language model or classifier is only evaluated; drop it"
