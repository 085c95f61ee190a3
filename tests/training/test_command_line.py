"""Options, YAML files and every refusal: one line on stderr, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.training import finetune
from hf_linear_attention.training.finetune import main
from hf_linear_attention.training.recipe import GROUPS
from hf_linear_attention.training.recipe_parser import build_parser, parse_options


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def base(files, tmp_path):
    train = str(files / "train.jsonl")
    return ["--model_name_or_path", "m", "--task", "causal_lm", "--train_file", train, "--output_dir", f"{tmp_path}/o"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "translation"], ["translation", "causal_lm", "embedding"]),
        (["--logits_kl_weight", "1"], ["--logits_kl_weight 1.0", "--teacher_name_or_path"]),
        (["--task_loss_weight", "0"], ["nothing to learn from", "--task_loss_weight"]),
        (["--teacher_name_or_path", "t", "--logits_kl_weight", "0", "--task_loss_weight", "1"], ["is not used"]),
        (["--task", "embedding"], ["--task embedding", "--teacher_name_or_path"]),
        (["--task", "embedding", "--teacher_name_or_path", "t", "--task_loss_weight", "1"], ["has no logits"]),
        (["--train_file", "a.xlsx"], ["a.xlsx", "*.jsonl"]),
        (["--dataset_name", "d"], ["--dataset_name", "--train_file", "exclude"]),
        (["--task", "ctc"], ["`--task ctc`", "`Trainer` of transformers"]),
        (["--dataset_config_name", "d"], ["--dataset_config_name", "is not an option any more", "`datasets`"]),
        (["--warmup_ratio", "0.1", "--lr_scheduler_type", "constant"], ["constant_with_warmup"]),
        (["--resume_from_checkpoint", "/no/where"], ["/no/where", "latest"]),
        (["--resume_from_checkpoint", "latest", "--overwrite_output_dir"], ["exclude"]),
        (["--trainable", "mechanism", "--learning_rate", "1", "--mechanism_learning_rate", "1"], ["has no effect"]),
        (["--attention_transfer_weight", "1"], ["--attention_transfer_weight 1.0", "--trainable mechanism"]),
        (["--attention_transfer_weight", "1", "--task_loss_weight", "1"], ["--task_loss_weight", "the transfer first"]),
        (["--attention_transfer_weight", "1", "--teacher_name_or_path", "t"], ["its own teacher"]),
        (["--trainable", "adapter", "--lora_r", "4"], ["adapter` needs `--use_peft`", "--lora_r 4` needs"]),
        (["--report_to", "paper"], ["`--report_to paper`: give one or more of"]),
        (["--train_file", "", "--dataset_name", ""], ["`--train_file` is empty"]),
    ],
)
def test_refusals(base, options, words, capsys):
    assert main([*base, *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_all_problems_are_listed_at_once(base):
    options = ["--learning_rate", "-1", "--logits_kl_weight", "1", "--eval_steps", "0", "--save_total_limit", "1"]
    with pytest.raises(UsageError) as caught:
        parse_options([*base, *options])
    assert len(caught.value.problems) >= 5
    assert "(5)" in str(caught.value)


def test_defaults_follow_task_and_teacher(base):
    def weights(*options: str) -> tuple[float | None, ...]:
        found = parse_options([*base, *options]).objective
        return found.task_loss_weight, found.logits_kl_weight, found.hidden_state_weight, found.embedding_weight

    assert weights() == (1, 0, 0, 0)
    assert weights("--teacher_name_or_path", "t") == (0, 1, 0, 0)
    assert weights("--teacher_name_or_path", "t", "--task_loss_weight", "0.5") == (0.5, 1, 0, 0)
    assert weights("--teacher_name_or_path", "t", "--task", "embedding") == (0, 0, 1, 1)


def test_help_describes_every_option():
    text = build_parser().format_help()
    for name, field in ((name, f) for group in GROUPS for name, f in group.__dataclass_fields__.items()):
        assert f"--{name}" in text
        assert field.metadata["help"].endswith("."), name


def test_help_shows_the_examples_as_they_can_be_pasted(capsys):
    """A command over several lines keeps its backslashes and its lines."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--output_dir OUT \\\n        --learning_rate 1e-3" in text
    source = Path(str(finetune.__file__)).read_text(encoding="utf-8").split('"""')[1]
    assert source.strip().replace("%(prog)s", "python training/finetune.py") in text
