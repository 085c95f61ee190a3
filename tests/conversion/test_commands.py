"""The one command: its subcommands, its help, and errors and hints in the words that were typed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attention import __version__
from hf_linear_attention._common.command_line import typed_as, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.commands import COMMANDS, main
from hf_linear_attention.training import recipe_parser


THERE = [name for name, command in COMMANDS.items() if importlib.util.find_spec(command.place.partition(":")[0])]


def test_without_a_command_it_explains_itself(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("hf-linear-attention convert --model") < out.index("Commands:")  # examples come first
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().err == out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"hf-linear-attention {__version__} (torch ")
    assert main(["convrt"]) == 2
    assert capsys.readouterr().err == "hf-linear-attention: error: `convrt` is not a command; did you mean `convert`?\n"


@pytest.mark.parametrize("name", THERE)
def test_every_command_speaks_of_itself(name, capsys):
    assert main([name, "--banana", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"hf-linear-attention {name}: error: `--banana` is not an option")
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: hf-linear-attention {name} ")
    assert ".py" not in text
    assert {"convert", "finetune", "evaluate"} <= set(THERE)


def test_an_installed_script_keeps_its_name(monkeypatch):
    assert typed_name("finetune.py") == "finetune.py"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hf-linear-attention-finetune"])
    assert typed_name("finetune.py") == "hf-linear-attention-finetune"
    with typed_as("hf-linear-attention finetune"):
        assert typed_name("finetune.py") == "hf-linear-attention finetune"


def test_a_config_of_the_package_needs_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Some text.\n")
    shared = ["--model_name_or_path=x", "--teacher_name_or_path=y", "--train_file=text.txt", "--output_dir=z"]
    for name in ("distil_causal_lm", "distil_causal_lm.yaml", "training/configs/distil_causal_lm.yaml"):
        assert recipe_parser.parse_options(["--config", name, *shared]).data.max_length == 256
    with pytest.raises(UsageError, match=r"`--config distil`: there is no such file.* has distil_causal_lm, distil_cl"):
        recipe_parser.parse_options(["--config", "distil", *shared])
    (tmp_path / "distil_causal_lm").write_text("task: causal_lm\nlogits_kl_weight: 1.0\nmax_length: 8\n")
    assert recipe_parser.parse_options(["--config", "distil_causal_lm", *shared]).data.max_length == 8


TEXT = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model_name_or_path", "OUT"], "`--validation_file` is missing"),
        (["--model_name_or_path", "OUT", "--validation_file", str(TEXT)], "give a `--teacher_name_or_path`"),
        (
            ["--model_name_or_path", "OUT", "--validation_file", str(TEXT), "--teacher_name_or_path", "x"],
            "`--model_name_or_path` = '.*OUT' holds no converted model; convert first",
        ),
        (["--model_name_or_path", "OUT", "--output_dir", "x"], "`--output_dir` is not an option"),
    ],
)
def test_evaluate_names_its_own_options(words, said, capsys):
    assert main(["evaluate", *words]) == 2
    err = capsys.readouterr().err
    assert re.search(said, err), err
    assert err.startswith("hf-linear-attention evaluate: error: ")


def test_ctrl_c_after_the_end_is_no_traceback():
    """Python cleans up for a while after the command has said that it is done."""
    code = "import atexit, os, signal, sys; from hf_linear_attention.conversion.commands import main\n"
    code += "atexit.register(os.kill, os.getpid(), signal.SIGINT); sys.argv[1:] = ['--version']; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hf-linear-attention ")
