"""Launch files, and launches that would train something else than they say.

And two connected processes give what one gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command, launch_command_parser
from recipes import recipe_of
from safetensors.torch import load_file

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.distributed import start_processes
from hf_linear_attention.training.tracking import read_metrics


ROOT = Path(__file__).resolve().parents[3]
LAUNCH = sorted((ROOT / "training" / "launch").glob("*.yaml"))


def test_every_yaml_of_the_project_is_in_a_folder_whose_files_are_tested():
    """Here, in `test_tasks.py` and in `test_presets.py`."""
    places = ("training", "conversion", "benchmarks", "hf_linear_attention", "model_cards")
    found = {path for place in places for path in (ROOT / place).rglob("*.y*ml")}
    folders = ("launch", "configs", "presets")
    assert found == {path for folder in folders for path in (ROOT / "training" / folder).glob("*.yaml")}


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_launch_files_are_what_accelerate_reads(path, monkeypatch):
    """Read by accelerate's loader and taken by its launcher, which ends up with what the file says."""
    text, content = path.read_text(encoding="utf-8"), yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config_from_file(str(path))
    assert config.num_processes == content["num_processes"]
    assert f"accelerate launch --config_file training/launch/{path.name}" in text.split("compute_environment")[0]
    assert config.fsdp_config == content.get("fsdp_config", {})
    words = ["--config_file", str(path), "training/finetune.py"]
    args, defaults, mixed_precision = _validate_launch_command(launch_command_parser().parse_args(words))
    assert defaults is not None
    assert (args.num_processes, args.num_machines) == (content["num_processes"], content["num_machines"])
    assert mixed_precision
    kind = content["distributed_type"]
    assert bool(args.use_fsdp) == (kind == "FSDP")
    assert bool(args.multi_gpu) == (kind == "MULTI_GPU")


@pytest.fixture
def recipe():
    return recipe_of(task_loss_weight=1.0)


def test_processes_that_are_not_connected(recipe, monkeypatch):
    def apart(cpu: bool, **options: Any) -> Accelerator:
        return Accelerator(cpu=False, **options)  # what a script without cpu=True gets on a machine without GPU

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.Accelerator", apart)
    with pytest.raises(TrainingError, match=r"WORLD_SIZE is 2.*connected 1.*launch/cpu2\.yaml"):
        start_processes(recipe)


SHARDS = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


@pytest.mark.parametrize(
    ("has_gpu", "environment", "said"),
    [
        (False, SHARDS, r"asks for FSDP, which needs a GPU.*launch/cpu2\.yaml"),
        (False, {"ACCELERATE_MIXED_PRECISION": "fp8"}, r"fp8.*allowed are no, fp16 and bf16"),
        (False, {"ACCELERATE_USE_DEEPSPEED": "true"}, r"asks for DeepSpeed.*FSDP2.*launch/fsdp2\.yaml"),
        (
            True,
            {**SHARDS, "ACCELERATE_MIXED_PRECISION": "fp16"},
            r"fsdp_version: 1.*efficient_loading.*fp16.*ddp\.yaml",
        ),
    ],
)
def test_launches_that_are_not_what_they_say(has_gpu, environment, said, recipe, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=said):
        start_processes(recipe)


@pytest.mark.parametrize(
    ("available", "name"), [("torch.backends.mps.is_available", "Apple"), ("torch.xpu.is_available", "Intel")]
)
def test_a_gpu_that_is_not_used_is_named(available, name, recipe, monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert start_processes(recipe).device.type == "cpu"
    assert not caplog.records
    monkeypatch.setattr(available, lambda: True)
    assert start_processes(recipe).device.type == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{name} GPU" in record.getMessage()
    assert "run on the CPU" in record.getMessage()


@pytest.mark.long
def test_two_processes_equal_one(finetune, masked, masked_teacher, files, tmp_path, dataset_cache, monkeypatch, capfd):
    """Four objectives with units of their own, ragged texts, accumulation, 21 evaluation texts on 2 processes.

    Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; gradients that were averaged per
    process instead of per unit would move the logged losses in the second digit.
    """
    models = ["--model_name_or_path", masked, "--teacher_name_or_path", masked_teacher, "--task", "masked_lm"]
    models += [f"--{name}_weight=1" for name in ("task_loss", "logits_kl", "hidden_state", "embedding")]
    data = ["--train_file", f"{files}/train.txt", "--validation_file", f"{files}/valid.txt"]
    steps = ["--max_train_steps", "4", "--learning_rate", "1e-3", "--logging_steps", "1", "--eval_steps", "2"]
    options = [*models, *data, *steps]
    one, two = tmp_path / "one", tmp_path / "two"
    expected = finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    config = ROOT / "training" / "launch" / "cpu2.yaml"
    split = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2"]
    script = ["--main_process_port", "0", str(ROOT / "training" / "finetune.py")]
    words = ["--config_file", str(config), *script, *options, *split, "--output_dir", str(two)]
    monkeypatch.setenv("HF_DATASETS_CACHE", str(dataset_cache))
    launch_command(launch_command_parser().parse_args(words))  # `accelerate launch`, without its own ten seconds
    assert "2 process(es)" in capfd.readouterr().err
    got = read_metrics(two / "metrics.jsonl")
    assert len(got) == len(expected) == 7
    for mine, yours in zip(got, expected, strict=True):
        mine.pop("tokens_per_second", None)
        yours.pop("tokens_per_second", None)
        assert mine == pytest.approx(yours, rel=5e-5)
    weights, others = load_file(two / "model.safetensors"), load_file(one / "model.safetensors")
    assert all((weights[name] - others[name]).abs().max() < 5e-5 for name in others)
