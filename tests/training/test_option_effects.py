"""Every option of `finetune.py`, set to a second value: something is otherwise, or it is refused by its name.

The options, what they need and the second values come from their metadata, so that a new option which nothing looks at
fails here. `SECOND` and `BESIDE` hold what metadata cannot know: names of files, and where an effect can be seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections import Counter
from dataclasses import MISSING, Field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from accelerate.state import AcceleratorState
from runs import write_lines
from task_twins import TWINS
from torch import nn

from hf_linear_attention.training.evaluation.evaluator import Selection
from hf_linear_attention.training.finetune import main
from hf_linear_attention.training.recipe import FACTS, GROUPS


FIELDS: dict[str, Field] = {name: field for group in GROUPS for name, field in group.__dataclass_fields__.items()}
TYPES = {name: kind for group in GROUPS for name, kind in get_type_hints(group).items()}
Options = dict[str, Any]
TRANSFER = {"attention_transfer_weight": 1, "trainable": "mechanism"}
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    """Tables with the columns text, label and other; the last is a second text and other classes."""
    folder = tmp_path_factory.mktemp("tables")
    names = ("short", "long")
    for name, part in (("train", texts[:24]), ("valid", texts[60:68])):
        rows = [
            {"text": " ".join(text.split())[:150], "label": names[n % 2], "other": names[n % 3 == 0]}
            for n, text in enumerate(part)
        ]
        write_lines(folder / f"{name}.jsonl", rows)
        (folder / f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")
    (folder / "data").mkdir()
    shutil.copy(folder / "train.jsonl", folder / "data")
    return folder


@pytest.fixture(scope="module")
def student(converted, llama):
    return converted(llama, mechanism="hybrid", window_size=4, num_features=8)


@pytest.fixture(scope="module")
def with_code(llama, folder):
    """A model that loads with its own code alone."""
    path = folder / "with_code"
    shutil.copytree(llama, path)
    (path / "own.py").write_text(CODE, encoding="utf-8")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cases(
    folder, student, with_code, llama_teacher, masked, bert, bert_teacher,
    named_classifier, vision_teacher, pictures, twin,
):  # fmt: skip
    """`base`: of every run. `task`: what a task changes. `second`: values that no metadata tell. `beside`: where an
    option has an effect."""
    images = {"train_file": pictures / "train.jsonl"}
    return {
        "base": {
            "model_name_or_path": student,
            "task": "causal_lm",
            "train_file": folder / "train.jsonl",
            "validation_file": folder / "valid.jsonl",
            "output_dir": "out",
            "max_length": 24,
            "max_train_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 3,
            "learning_rate": 1e-2,
        },
        "task": {
            "causal_lm": {},
            "masked_lm": {"model_name_or_path": masked},
            "sequence_classification": {"model_name_or_path": named_classifier},
            "embedding": {"model_name_or_path": bert, "teacher_name_or_path": bert_teacher},
            **{
                task: {
                    "model_name_or_path": twin(task) / "original",
                    "train_file": twin(task) / "train.jsonl",
                    "validation_file": twin(task) / "valid.jsonl",
                }
                for task in TWINS
            },
            "image_classification": {
                "model_name_or_path": vision_teacher,
                **images,
                "validation_file": pictures / "valid.jsonl",
                "max_length": None,
            },
        },
        "second": {
            "model_name_or_path": llama_teacher,
            "task": "sequence_classification",
            "teacher_name_or_path": llama_teacher,
            "trainable": "mechanism",
            "lora_target_modules": "q_proj",
            "train_file": folder / "valid.jsonl",
            "validation_file": folder / "train.jsonl",
            "dataset_name": folder / "data",
            "text_column_name": "other",
            "image_column_name": "other",
            "text_pair_column_name": "other",
            "label_column_name": "other",
            "max_eval_tokens": 40,
            "max_grad_norm": 0.01,
            "per_device_eval_batch_size": 3,
            "num_train_epochs": 0.01,
            "max_train_tokens": 20,
            "output_dir": "elsewhere",
            "resume_from_checkpoint": "latest",
            "report_to": "tensorboard",
        },
        "beside": {
            "trust_remote_code": {"model_name_or_path": with_code},
            "dataset_name": {"train_file": None},
            "attention_transfer_weight": {"trainable": "mechanism"},
            "group_by_length": {"max_train_steps": 3, "per_device_train_batch_size": 2, "max_length": 64},
            "label_column_name": {"task": "sequence_classification"},
            "overwrite_output_dir": {"used": True},
            "resume_from_checkpoint": {"used": True},
        },
    }


def second_value(name: str, now: Any) -> Any:
    """A value that is allowed, and not the present one."""
    kind, bounds = TYPES[name], FACTS[name].bounds
    kinds = [part for part in get_args(kind) if part is not type(None)] if get_origin(kind) is not Literal else [kind]
    kind = kinds[0] if kinds else kind
    if get_origin(kind) is Literal:
        return next(choice for choice in reversed(get_args(kind)) if choice != now)
    if kind is bool:
        return not now
    if kind in (int, float):
        candidates = ((now or 0) + 1, 0.5) if kind is int else ((now or 1) / 2, (now or 0) + 0.5)
        return next(value for value in candidates if value != now and (bounds is None or bounds.hold(value)))
    raise AssertionError(f"give a second value of --{name}")


def default_of(name: str) -> Any:
    return None if FIELDS[name].default is MISSING else FIELDS[name].default


def base_of(name: str, cases: dict[str, dict[str, Options]]) -> Options:
    """Options with which this one can do something."""
    facts, beside = FACTS[name], cases["beside"].get(name, {})
    task = beside.get("task") or ("causal_lm" if "causal_lm" in (facts.tasks or ("causal_lm",)) else facts.tasks[0])
    options = {**cases["base"], "task": task, **cases["task"][task], **beside}
    needed, more = facts.needs, {}
    while needed and not any(options.get(other) is not None for other in needed):
        first = needed[0]
        more |= TRANSFER if first in TRANSFER else {first: value_of(first, options, cases)}
        needed = FACTS[first].needs
    return {**options, **more, **beside}  # which also decides what is needed


def value_of(name: str, options: Options, cases: dict[str, dict[str, Options]]) -> Any:
    return cases["second"].get(name) or second_value(name, options.get(name, default_of(name)))


@pytest.fixture(scope="module")
def observe(tmp_path_factory):
    """A function: run these options in an empty folder; returns all that can be seen of the run but their names."""
    calls: Counter[tuple[Any, ...]] = Counter()
    seen: dict[str, dict[str, Any]] = {}

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        shapes = tuple(tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor))
        calls[type(module).__name__, module.training, shapes] += 1

    def run(options: Options) -> dict[str, Any]:
        key = json.dumps(options, default=str, sort_keys=True)
        if key not in seen:
            seen[key] = _run(dict(options))
        return seen[key]

    def _run(options: Options) -> dict[str, Any]:
        root, metrics = tmp_path_factory.mktemp("run"), []
        if options.get("output_dir") is not None:
            options["output_dir"] = root / options["output_dir"]
        if options.pop("used", False):
            main(words(options | {"checkpointing_steps": 1}))
        calls.clear()
        choices: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            note = Selection.note
            patch.setattr(Selection, "note", lambda self, *more: choices.append(self.name) or note(self, *more))
            AcceleratorState._reset_state(reset_partial_state=True)
            code = main(words(options))
        out = options["output_dir"]
        if (out / "metrics.jsonl").is_file():
            lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = [{k: v for k, v in json.loads(line).items() if "per_second" not in k} for line in lines]
        weights = out / "model.safetensors"
        return {
            "code": code,
            "metrics": metrics,
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None,
            "files": sorted(str(path.relative_to(root)) for path in root.rglob("*") if "events.out" not in path.name),
            "calls": dict(calls),
            "choices": choices,
        }

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    yield run
    handle.remove()


def words(options: Options) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


# `tests/faults/test_places.py` trains with `allow_missing`; the last are those of evaluation alone.
CASES = [(name, True) for name in FIELDS if name != "allow_missing"]
CASES += [(name, False) for name in ("max_length", "max_eval_tokens", "seed")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "is_trained"), CASES)
def test_an_option_does_something(name, is_trained, cases, observe, capsys):
    base = base_of(name, cases)
    if not is_trained:  # the seed is that of the masks
        masked = {**base, "task": "masked_lm", **cases["task"]["masked_lm"]}
        base = {key: value for key, value in masked.items() if FACTS[key].for_evaluation}
    value = value_of(name, base, cases)
    before, after = observe(base), observe({**base, name: value})
    error = capsys.readouterr().err
    if name == "report_to" and not importlib.util.find_spec("tensorboard"):
        assert "`--report_to tensorboard` needs a package" in error
        return
    assert 0 in (before["code"], after["code"]), f"--{name} {value} is not looked at where a run succeeds: {error}"
    assert before != after, f"--{name} {value} changes nothing"
