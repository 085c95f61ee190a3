"""Every option of `convert_checkpoint.py`, set to a second value: something is otherwise, or it is refused by its name.

As in the test of the same name for training; the options of the mechanisms have theirs in `hf_linear_attention`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_type_hints

import pytest
import torch
from accelerate.state import AcceleratorState
from checkpoints import evaluate, run, save_twin
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_linear_attention.conversion import pipeline
from hf_linear_attention.conversion.arguments import CONVERSION_FACTS, ConversionArguments


FIELDS = {field.name: field for field in fields(ConversionArguments)}
TYPES = get_type_hints(ConversionArguments)
Options = dict[str, Any]
RANDOM = {"attention": "performer", "num_features": 8}
FIGURES = ("checks", "calibration", "quality")
# A dry run shows their effect.
PRINTED = (
    "attention", "layers", "softmax_layers", "drop", "cross_attention", "state_tokens",
    "allow_pickle", "trust_remote_code",
)  # fmt: skip
FITTED = {**RANDOM, "features": "favor++"}


@pytest.fixture(scope="module")
def folder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    texts = [topics[name] for name in sorted(topics)]
    for name, part in (("train", texts[:3]), ("valid", texts[3:4])):
        (folder / f"{name}.txt").write_text("\n\n".join(part)[:2000], encoding="utf-8")
    rows = [("a dog", "one dog", 5.0), ("a cat", "the sea", 0.5), ("a tree", "trees", 4.0)]
    (folder / "pairs.tsv").write_text(
        "sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{score}\n" for a, b, score in rows), encoding="utf-8"
    )
    save_twin(folder / "other", "llama", intermediate_size=64)
    save_twin(folder / "embedding", "bert", "AutoModel")
    save_twin(folder / "vision", "vit", "AutoModel")
    (folder / "images.jsonl").write_text('{"image": "one.png"}\n', encoding="utf-8")
    shutil.copytree(llama, folder / "pickled")
    torch.save(LlamaForCausalLM.from_pretrained(llama).state_dict(), folder / "pickled" / "pytorch_model.bin")
    (folder / "pickled" / "model.safetensors").unlink()
    shutil.copytree(llama, folder / "with_code")
    config = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "with_code" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
    (folder / "with_code" / "own.py").write_text(code, encoding="utf-8")
    shutil.copytree(llama, folder / "lacking")
    tensors = load_file(llama / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "lacking" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def second(folder: Path) -> Options:
    """Values that no metadata tell."""
    return {
        "model_name_or_path": folder / "other",
        "output_dir": "elsewhere",
        "attention": "performer",
        "layers": "0",
        "softmax_layers": "0",
        "drop": "position_bias",
        "dtype": "bfloat16",
        "calibration_file": folder / "valid.txt",
        "preset": "default",
        "train_file": folder / "train.txt",
        "validation_file": folder / "valid.txt",
        "pairs_file": folder / "pairs.tsv",
        "tokens": "3k",
        "epochs": 2.0,
        "max_eval_tokens": 60,
        "max_eval_length": 40,
        "controls": "none",
        "checkpointing_steps": 7,
        "push_to_hub": "someone/model",  # these tests are offline, and that is said before the work
    }


@pytest.fixture(scope="module")
def beside(folder: Path) -> dict[str, Options]:
    """Where an option has an effect; `converted`: in the folder of a finished conversion."""
    preset = {"preset": "default", "train_file": folder / "train.txt", "dry_run": True, "num_features": 8}
    measured = {"evaluate": True, "converted": True, "validation_file": folder / "valid.txt"}
    images = {**preset, "model_name_or_path": folder / "vision", "train_file": folder / "images.jsonl"}
    images["attention"] = "hybrid"
    return {
        "epochs": images,
        "attention": {"layers": "all"},
        "cross_attention": {"attention": "linear"},
        "calibration_file": FITTED,
        "seed": RANDOM,
        "preset": {**preset, "preset": None},
        **dict.fromkeys(("train_file", "tokens", "checkpointing_steps", "validation_file"), preset),
        "pairs_file": {**measured, "model_name_or_path": folder / "embedding"},
        **dict.fromkeys(("max_eval_tokens", "max_eval_length", "controls"), measured),
        "overwrite": {"converted": True},
        "allow_missing": {"model_name_or_path": folder / "lacking"},
        "allow_pickle": {"model_name_or_path": folder / "pickled"},
        "trust_remote_code": {"model_name_or_path": folder / "with_code"},
    }


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Options], dict[str, Any]]:
    """A function: run these options in an empty folder; returns all that can be seen of it but their names."""
    seen: dict[str, dict[str, Any]] = {}

    def look(options: Options) -> dict[str, Any]:
        key = json.dumps(options, default=str, sort_keys=True)
        if key not in seen:
            seen[key] = _look(dict(options))
        return seen[key]

    def _look(options: Options) -> dict[str, Any]:
        root = tmp_path_factory.mktemp("run")
        options["output_dir"] = out = root / options["output_dir"]
        if options.pop("converted", False):
            assert run(*words({name: options[name] for name in ("model_name_or_path", "output_dir")}))[0] == 0
        trainings: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            plan = pipeline.plan_training
            keep = lambda *more: trainings.append(plan(*more)) or trainings[-1]  # noqa: E731
            patch.setattr(pipeline, "plan_training", keep)
            AcceleratorState._reset_state(reset_partial_state=True)
            code, text, error = (evaluate if options.pop("evaluate", False) else run)(*words(options))
        report, weights = out / "conversion_report.json", out / "model.safetensors"
        content = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        return {
            "code": code,
            "text": text.replace(str(root), "ROOT"),
            "error": error.replace(str(root), "ROOT"),
            "files": sorted(str(path.relative_to(root)) for path in root.rglob("*")),
            "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None,
            "config": (out / "config.json").read_text(encoding="utf-8") if (out / "config.json").is_file() else None,
            "figures": [content.get(name) for name in FIGURES],
            "training": [{k: str(v).replace(str(root), "ROOT") for k, v in t.given.items()} for t in trainings],
        }

    return look


def words(options: Options) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


def value_of(name: str, second: Options) -> Any:
    if name in second:
        return second[name]
    default, bounds = FIELDS[name].default, CONVERSION_FACTS[name].bounds
    if TYPES[name] is bool:
        return not default
    if TYPES[name] in (int, int | None):
        value = (0 if default in (None, MISSING) else default) + 1
        return value if bounds is None or bounds.hold(value) else value + 1
    raise AssertionError(f"give a second value of --{name}")


@pytest.mark.long
@pytest.mark.parametrize("name", FIELDS)
def test_an_option_of_conversion_does_something(
    name: str, llama: Path, second: Options, beside: dict[str, Options], observe: Callable[[Options], dict[str, Any]]
) -> None:
    needed = {other: value_of(other, second) for other in CONVERSION_FACTS[name].needs[:1]}
    base = {"model_name_or_path": llama, "output_dir": "out", **(beside.get(name) or needed)}
    base |= {"dry_run": True} if name in PRINTED else {}
    if name in base and name not in ("model_name_or_path", "output_dir"):
        base[name] = None
    value = value_of(name, second)
    before, after = observe(base), observe({**base, name: value})
    if name == "cross_attention":  # which no decoder has
        assert "`cross_attention` = true, but LinearLlamaForCausalLM has none" in after["error"]
    elif name != "trust_remote_code":  # whatever the code says then, it is no architecture of transformers
        assert 0 in (before["code"], after["code"]), f"--{name} {value} is not looked at: {after['error']}"
    assert before != after, f"--{name} {value} changes nothing"
