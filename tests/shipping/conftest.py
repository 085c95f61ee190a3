"""Converted checkpoints, and one process without this package that loads them all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import convert_folder, save_twin
from matrix import sample_inputs
from shipping_cases import CONVERTED, ON_THE_HUB
from transformers import Trainer, TrainingArguments

from hf_linear_attention.kernels import cpu as kernels_cpu


REVISION = "0123456789abcdef0123456789abcdef01234567"
TEXT = "some text for the tokenizer"


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shipping")
    for name, (family, auto_class, words) in CONVERTED.items():
        save_twin(root / "sources" / name, family, auto_class)
        convert_folder(root / "sources" / name, root / name, "--no_verify", *words)
    return {name: root / name for name in CONVERTED}


@pytest.fixture(scope="session")
def trainer_checkpoint(converted, tmp_path_factory) -> Path:
    """checkpoint-1 of a stock Trainer after one step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(converted["gpt2"])
    ids = sample_inputs("gpt2")["input_ids"]
    arguments = TrainingArguments(
        str(tmp_path_factory.mktemp("trainer")), max_steps=1, save_steps=1, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
    return Path(arguments.output_dir) / "checkpoint-1"


@pytest.fixture(scope="session")
def hub(converted, tmp_path_factory) -> Path:
    """The cache of a hub on which checkpoints lie as `org/<name>`."""
    cache = tmp_path_factory.mktemp("hub")
    for name in ON_THE_HUB:
        repository = cache / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        shutil.copytree(converted[name], repository / "snapshots" / REVISION)
    return cache


@pytest.fixture(scope="session")
def results(converted, hub, trainer_checkpoint, tmp_path_factory) -> dict[str, str]:
    """`{job: result}` of alone.py, where torch computes: without the package there are no C kernels."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_cpu, "library", lambda: None)
        jobs = _jobs(root, converted, trainer_checkpoint)
    return _run_alone(jobs, root, hub)


@pytest.fixture(scope="session")
def results_with_the_package(converted, hub, trainer_checkpoint, tmp_path_factory) -> dict[str, str]:
    """The same where the package is installed, though not imported."""
    root = tmp_path_factory.mktemp("installed")
    jobs = _jobs(root, {name: converted[name] for name in ON_THE_HUB}, trainer_checkpoint)
    return _run_alone(jobs, root, hub, "hf_linear_attention")


@pytest.fixture(scope="session")
def run_alone():
    """`run_alone(jobs, folder for its files, folder of the hub's cache)`: `{job: result}` of alone.py."""
    return _run_alone


@pytest.fixture(scope="session")
def resaved(results, results_with_the_package, tmp_path_factory) -> dict[str, list[Path]]:
    """`{name: folders}` that alone.py wrote, over the checkpoint of another mechanism."""
    root = tmp_path_factory.getbasetemp()
    places = {name: ("alone", "installed") if name in ON_THE_HUB else ("alone",) for name in CONVERTED}
    return {name: [root / f"{place}0" / f"again-{name}" for place in places[name]] for name in CONVERTED}


def _jobs(root: Path, converted: dict[str, Path], trainer_checkpoint: Path) -> dict[str, dict]:
    """Jobs for alone.py, with what this process computes."""
    jobs = {}
    others = dict(zip(converted, [*list(converted)[1:], next(iter(converted))]))
    for name in converted:
        family, auto_class, _ = CONVERTED[name]
        for auto in (auto_class, "AutoModel") if name in ON_THE_HUB else (auto_class,):
            inputs = root / f"{name}-{auto}.pt"
            _expect(converted[name], family, auto, inputs)
            job = {"auto_class": auto, "inputs": str(inputs)}
            jobs[f"folder {name} {auto}"] = {**job, "checkpoint": str(converted[name])}
            if name in ON_THE_HUB:
                jobs[f"hub {name} {auto}"] = {**job, "checkpoint": f"org/{name}"}
        shutil.copytree(converted[others[name]], root / f"again-{name}")
        jobs[f"resaved {name}"] = {**jobs[f"folder {name} {auto_class}"], "resave": str(root / f"again-{name}")}
    jobs["untrusted"] = {**jobs["folder gpt2 AutoModel"], "untrusted": True}
    edited = shutil.copytree(converted["gpt2"], root / "edited") / "config.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "linear_attention": {"mechanism": "hybrid"}}))
    jobs["foreign"] = {"auto_class": "AutoModelForCausalLM", "checkpoint": str(edited.parent), "foreign": True}
    inputs = root / "trainer.pt"
    _expect(trainer_checkpoint, "gpt2", "AutoModelForCausalLM", inputs, has_tokenizer=False)
    jobs["trainer gpt2"] = {
        "auto_class": "AutoModelForCausalLM", "checkpoint": str(trainer_checkpoint), "inputs": str(inputs),
    }  # fmt: skip
    return jobs


def _expect(folder: Path, family: str, auto_class: str, path: Path, has_tokenizer: bool = True) -> None:
    """Write inputs, and what this process computes from them, to `path`."""
    model = getattr(transformers, auto_class).from_pretrained(folder).eval()
    saved = {"inputs": sample_inputs(family)}
    with torch.no_grad():
        saved["output"] = model(**saved["inputs"])[0]
    if auto_class == "AutoModelForCausalLM":
        saved["new_tokens"] = 5
        saved["tokens"] = model.generate(**saved["inputs"], max_new_tokens=5, do_sample=False)
    if family != "vit" and has_tokenizer:
        saved["text"] = TEXT
        saved["ids"] = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    torch.save(saved, path)


def _run_alone(jobs: dict, root: Path, hub: Path, *installed: str) -> dict[str, str]:
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(root / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("alone.py")), str(root / "jobs.json"), *installed],
        cwd=root, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
