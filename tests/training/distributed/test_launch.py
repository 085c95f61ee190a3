"""Launch files, and launches that would train something else than they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from recipes import recipe_of

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.distributed import start_processes
from hf_linear_attention.training.recipe import Recipe


ROOT = Path(__file__).resolve().parents[3]
LAUNCH = sorted((ROOT / "training" / "launch").glob("*.yaml"))
RECIPES = sorted((ROOT / "training" / "configs").glob("*.yaml"))
PRESETS = sorted((ROOT / "training" / "presets").glob("*.yaml"))


def test_no_yaml_of_the_project_is_left_out() -> None:
    places = ("training", "conversion", "benchmarks", "hf_linear_attention", "model_cards")
    found = sorted(path for place in places for path in (ROOT / place).rglob("*.y*ml") if "papers" not in path.parts)
    assert found == sorted([*LAUNCH, *RECIPES, *PRESETS])
    assert (len(LAUNCH), len(RECIPES)) == (7, 11)
    assert PRESETS


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: path.stem)
def test_launch_files_are_what_accelerate_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by accelerate's loader and taken by its launcher, which ends up with what the file says."""
    monkeypatch.setattr("accelerate.commands.launch.is_deepspeed_available", lambda: True)
    text, content = path.read_text(encoding="utf-8"), yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config_from_file(str(path))
    assert config.num_processes == content["num_processes"]
    assert f"accelerate launch --config_file training/launch/{path.name}" in text.split("compute_environment")[0]
    for section in ("fsdp_config", "deepspeed_config"):
        assert getattr(config, section) == content.get(section, {})
    words = ["--config_file", str(path), "training/finetune.py"]
    args, defaults, mixed_precision = _validate_launch_command(launch_command_parser().parse_args(words))
    assert defaults is not None
    assert (args.num_processes, args.num_machines) == (content["num_processes"], content["num_machines"])
    assert mixed_precision
    kind = content["distributed_type"]
    assert bool(args.use_fsdp) == (kind == "FSDP")
    assert bool(args.use_deepspeed) == (kind == "DEEPSPEED")
    assert bool(args.multi_gpu) == (kind == "MULTI_GPU")


@pytest.fixture
def recipe() -> Recipe:
    return recipe_of(task_loss_weight=1.0)


def test_processes_that_are_not_connected(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(cpu: bool, **options: Any) -> Accelerator:
        return Accelerator(cpu=False, **options)  # what a script without cpu=True gets on a machine without GPU

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("hf_linear_attention.training.distributed.Accelerator", apart)
    with pytest.raises(TrainingError, match=r"WORLD_SIZE is 2.*connected 1.*launch/cpu2\.yaml"):
        start_processes(recipe)


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("ACCELERATE_USE_FSDP", "true", r"asks for FSDP, which needs a GPU.*launch/cpu2\.yaml"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", r"fp8.*allowed are no, fp16 and bf16"),
        ("ACCELERATE_USE_DEEPSPEED", "true", r"asks for DeepSpeed.*pip install deepspeed"),
    ],
)
def test_launches_that_are_not_what_they_say(
    variable: str, value: str, word: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("hf_linear_attention.training.distributed.is_deepspeed_available", lambda: False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(TrainingError, match=word):
        start_processes(recipe)


@pytest.mark.parametrize(
    ("available", "name"), [("torch.backends.mps.is_available", "Apple"), ("torch.xpu.is_available", "Intel")]
)
def test_a_gpu_that_is_not_used_is_named(
    available: str, name: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert start_processes(recipe).device.type == "cpu"
    assert not caplog.records
    monkeypatch.setattr(available, lambda: True)
    assert start_processes(recipe).device.type == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{name} GPU" in record.getMessage()
    assert "run on the CPU" in record.getMessage()


def test_shards_and_what_does_not_go_with_them(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "ACCELERATE_MIXED_PRECISION": "fp16",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe.model.use_peft = True
    recipe.objective.attention_map_weight = 1.0
    words = ("fsdp_version: 1", "efficient_loading", "fp16", "attention transfer", "--use_peft")
    with pytest.raises(TrainingError, match=".*".join(words) + r".*ddp\.yaml"):
        start_processes(recipe)


def test_deepspeed_and_what_does_not_go_with_it(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_linear_attention.training.distributed.is_deepspeed_available", lambda: True)
    settings = {"ZERO_STAGE": "1", "CONFIG_FILE": "own.json", "OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ACCELERATE_DEEPSPEED_{name}", value)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    recipe.optimization.weight_decay = 0.1
    recipe.objective.task_loss_weight = 0.0
    words = ("zero_stage: 1", "deepspeed_config_file", "offloading", "--weight_decay", "fp16")
    with pytest.raises(TrainingError, match=".*".join(words) + r".*ddp\.yaml"):
        start_processes(recipe)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(TrainingError, match="zero3_init_flag: true"):
        start_processes(recipe)
