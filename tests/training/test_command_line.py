"""Options, YAML files and every refusal: one line on stderr, exit code 2."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.training import finetune
from hf_linear_attention.training.finetune import main
from hf_linear_attention.training.recipe import GROUPS
from hf_linear_attention.training.recipe_parser import build_parser, parse_options


ROOT = Path(__file__).resolve().parents[2]


TEACHER = ["--teacher_name_or_path", "t"]


@pytest.fixture
def base(files: Path, tmp_path: Path) -> list[str]:
    train = str(files / "train.jsonl")
    return ["--model_name_or_path", "m", "--task", "causal_lm", "--train_file", train, "--output_dir", f"{tmp_path}/o"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--taks", "causal_lm"], ["--taks", "did you mean `task`"]),
        (["--learn", "1"], ["--learn", "abbreviations are not allowed"]),
        (["--task", "translation"], ["translation", "causal_lm", "embedding"]),
        (["--learning_rate", "fast"], ["`--learning_rate fast`", "a number"]),
        (["--learning_rate", "-1"], ["--learning_rate -1.0", "above 0"]),
        (["--per_device_train_batch_size", "0"], ["--per_device_train_batch_size 0", "a number from 1"]),
        (["--warmup_ratio", "1.5"], ["--warmup_ratio 1.5", "from 0 to below 1"]),
        (["--mlm_probability", "0.2"], ["--mlm_probability", "causal_lm", "masked_lm"]),
        (["--label_column_name", "y"], ["--label_column_name", "sequence_classification"]),
        (["--logits_kl_weight", "1"], ["--logits_kl_weight 1.0", "--teacher_name_or_path"]),
        (["--task_loss_weight", "0"], ["nothing to learn from", "--task_loss_weight"]),
        (["--teacher_name_or_path", "t", "--logits_kl_weight", "0", "--task_loss_weight", "1"], ["is not used"]),
        (["--temperature", "2"], ["--temperature", "--logits_kl_weight"]),
        (["--hidden_state_layers", "all"], ["--hidden_state_layers", "--hidden_state_weight"]),
        (["--task", "embedding"], ["--task embedding", "--teacher_name_or_path"]),
        (["--task", "embedding", "--teacher_name_or_path", "t", "--task_loss_weight", "1"], ["has no logits"]),
        (["--train_file", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--train_file", "a.xlsx"], ["a.xlsx", "*.jsonl"]),
        (["--dataset_name", "d"], ["--dataset_name", "--train_file", "exclude"]),
        (["--dataset_config_name", "d"], ["--dataset_config_name", "is not an option any more", "`datasets`"]),
        (["--eval_steps", "5"], ["--eval_steps", "--validation_file"]),
        (["--warmup_ratio", "0.1", "--lr_scheduler_type", "constant"], ["constant_with_warmup"]),
        (["--save_total_limit", "3"], ["--save_total_limit", "--checkpointing_steps"]),
        (["--resume_from_checkpoint", "/no/where"], ["/no/where", "latest"]),
        (["--resume_from_checkpoint", "latest", "--overwrite_output_dir"], ["exclude"]),
        (["--trainable", "mechanism", "--learning_rate", "1", "--mechanism_learning_rate", "1"], ["has no effect"]),
        (["--config", "none.yaml"], ["none.yaml", "no such file"]),
        (["--attention_transfer_weight", "1"], ["--attention_transfer_weight 1.0", "--trainable mechanism"]),
        (["--attention_transfer_weight", "1", "--task_loss_weight", "1"], ["--task_loss_weight", "the transfer first"]),
        (["--attention_transfer_weight", "1", "--teacher_name_or_path", "t"], ["its own teacher"]),
        (
            ["--trainable", "adapter", "--lora_r", "4"],
            ["adapter` needs `--use_peft`", "--lora_r 4` needs"],
        ),
        (["--report_to", "paper"], ["`--report_to paper`: give one or more of"]),
        (["--output_dir", "."], ["is not empty", "--resume_from_checkpoint latest", "--overwrite_output_dir"]),
        (
            [*TEACHER, "--temperature", "2", "--task_loss_weight", "1", "--logits_kl_weight", "0"],
            ["--temperature 2.0` needs `--logits_kl_weight`"],
        ),
        (["--task", "image_classification", "--max_length", "8"], ["--max_length` has no effect for `--task image"]),
        (["--train_file", "", "--dataset_name", ""], ["`--train_file` is empty"]),
    ],
)
def test_refusals(base: list[str], options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_all_problems_are_listed_at_once(base: list[str]) -> None:
    options = ["--learning_rate", "-1", "--logits_kl_weight", "1", "--eval_steps", "0", "--save_total_limit", "1"]
    with pytest.raises(UsageError) as caught:
        parse_options([*base, *options])
    assert len(caught.value.problems) >= 5
    assert "(5)" in str(caught.value)


def test_defaults_follow_task_and_teacher(base: list[str]) -> None:
    def weights(*options: str) -> tuple[float | None, ...]:
        found = parse_options([*base, *options]).objective
        return found.task_loss_weight, found.logits_kl_weight, found.hidden_state_weight, found.embedding_weight

    assert weights() == (1, 0, 0, 0)
    assert weights("--teacher_name_or_path", "t") == (0, 1, 0, 0)
    assert weights("--teacher_name_or_path", "t", "--task_loss_weight", "0.5") == (0.5, 1, 0, 0)
    assert weights("--teacher_name_or_path", "t", "--task", "embedding") == (0, 0, 1, 1)


def test_yaml_gives_defaults_and_the_command_line_wins(base: list[str], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("learning_rate: 1e-3\nseed: 7\noverwrite_output_dir: true\nmax_train_steps:\n", encoding="utf-8")
    recipe = parse_options([*base, f"--config={config}", "--seed", "8"])
    assert (recipe.optimization.learning_rate, recipe.run.seed, recipe.run.overwrite_output_dir) == (1e-3, 8, True)
    assert recipe.optimization.max_train_steps is None


def test_help_describes_every_option() -> None:
    text = build_parser().format_help()
    for name, field in ((name, f) for group in GROUPS for name, f in group.__dataclass_fields__.items()):
        assert f"--{name}" in text
        assert field.metadata["help"].endswith("."), name


def test_help_shows_the_examples_as_they_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    """A command over several lines keeps its backslashes and its lines."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    command = "--learning_rate 1e-3 --max_train_tokens 1000000 --lr_scheduler_type cosine --warmup_ratio 0.05"
    assert f"--validation_file valid.txt --output_dir OUT \\\n        {command}\n" in text
    source = Path(str(finetune.__file__)).read_text(encoding="utf-8").split('"""')[1]
    assert source.strip().replace("%(prog)s", "python training/finetune.py") in text


def test_runs_as_a_file_from_any_folder(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "training" / "finetune.py"), "--banana", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    # before it may be what installed libraries have to say when they are imported
    assert done.stderr.splitlines()[-1].startswith("finetune.py: error: `--banana` is not an option")
    assert done.stdout == ""


def test_what_libraries_refuse_is_one_line_too(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a model that has no tokenizer; the traceback is there for whoever asks."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    models = ["--model_name_or_path", str(tmp_path / "model"), "--task", "causal_lm"]
    command = [*models, "--train_file", str(files / "train.jsonl"), "--output_dir", f"{tmp_path}/o"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"finetune\.py: error: the tokenizer of .*ValueError: .*", error.splitlines()[-1])
    assert "Traceback" not in error
    monkeypatch.setattr(finetune, "_run", lambda asked: {}["tokenizer"])
    monkeypatch.setenv("LOCAL_RANK", "1")  # it may have happened to this process alone
    assert main([*command, "--overwrite_output_dir"]) == 1
    assert "tokenizer" in capsys.readouterr().err
    monkeypatch.setenv("HF_LINEAR_ATTENTION_DEBUG", "1")
    with pytest.raises(KeyError, match="tokenizer"):
        main([*command, "--overwrite_output_dir"])


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_before_the_training_is_one_line(
    number: int, word: str, base: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(finetune, "_run", lambda asked: signal.raise_signal(number))
    assert main(base) == 128 + number
    error = capsys.readouterr().err
    assert error.startswith(f"finetune.py: {word}; ")
    assert "--resume_from_checkpoint latest" in error
    assert error.count("\n") == 1
    assert signal.getsignal(signal.SIGTERM) == before
