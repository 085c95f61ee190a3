"""The command line: what is refused, how it is said, where it can be started from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoints import run, save_twin
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from hf_linear_attention.conversion.arguments import ConversionArguments, mechanism_arguments, parse
from hf_linear_attention.conversion.commands import main
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.training.recipe_parser import parse_options


CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--feature_mapp", "exp", "--foo=1"], ["`--feature_mapp`", "did you mean `feature_map`?", "`--foo`"]),
        (["--lay", "all"], ["`--lay` is not an option", "did you mean `layers`?"]),
        (["--attention", "flash"], ["'flash'", "linear", "linformer", "performer"]),
        (["--num_features", "many"], ["`--num_features many`", "a whole number"]),
        (["--dtype", "int8"], ["`--dtype int8`", "bfloat16"]),
        (["--layers", "4-2"], ["'4-2'", "backwards"]),
        (
            ["--attention", "linear", "--calibration_file", CONSTRAINTS],
            ["`linear` with these settings has nothing to calibrate"],
        ),
        (["--layers", "1,9"], ["`layers` names [9]", "0 to 2"]),
        (["--attention", "linformer"], ["`linformer` has no causal form", "`linear`, `performer`"]),
        (["--projection_size", "3", "--max_length", "3"], ["`projection_size`", "`max_length`"]),
        (["--attention", "0-1:hybrid,1-:linear"], ["`mechanism` names layer 1 more than once"]),
        (["--attention", "0:hybird,1-:lineer"], ["'hybird', 'lineer' must be one of aft, gated_delta, hybrid"]),
        (["--attention", "0:hybrid,1-:linear", "--window_size", "0:four"], ["`--window_size 0:four`: give a whole"]),
        (["--attention", "hybrid", "--state_tokens", "50"], ["`state_tokens` = 50", "at least 96"]),
        (["--attention", "linear", "--state_tokens", "96"], ["`linear` has no window; use `hybrid`"]),
        (["--softmax_layers", "auto:1"], ["`--calibration_file`"]),
        (["--softmax_layers", "auto:3", "--calibration_file", __file__], ["auto:3", "K must be from 1 to 2"]),
        (["--softmax_layers", "0,7"], ["[7]", "[0, 1, 2]"]),
        (["--softmax_layers", "last"], ["`--softmax_layers last`", "auto:K"]),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(llama, tmp_path, words, said):
    code, out, err = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out", *words)
    assert (code, out) == (2, "")
    assert err.startswith("convert_checkpoint.py: error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in said), err
    assert not list(tmp_path.iterdir())


def test_sources_that_cannot_be_converted(llama, linear_llama, tmp_path):
    empty, adapter = tmp_path / "empty", tmp_path / "adapter"
    empty.mkdir()
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    for source, said in (
        (tmp_path / "absent", "there is no such folder"),
        (empty, "contains no config.json"),
        (adapter, "merge it"),
        (llama / "config.json", "is a file"),
        ("nobody/such-a-model", "could not be fetched from the hub: Cannot reach http"),  # the tests are offline
        ("two words", "no model on the hub: Repo id must use"),
        (linear_llama, "already converted"),
    ):
        code, _, err = run("--model_name_or_path", source, "--output_dir", tmp_path / "out")
        assert code == 2
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [(RepositoryNotFoundError, "no model on the hub"), (GatedRepoError, "could not be fetched from the hub")],
)
def test_what_the_hub_answers_is_said(tmp_path, monkeypatch, error, said):
    def answer(*args, **kwargs):
        raise error("404 Client Error. (Request ID: 1)\n\nNothing at\nthat url. Log in.", response=Mock())

    monkeypatch.setattr("hf_linear_attention.conversion.source.snapshot_download", answer)
    code, _, err = run("--model_name_or_path", "nobody/such-a-model", "--output_dir", tmp_path / "out")
    assert code == 2
    assert f"is not a folder, and {said}: Nothing at that url\n" in err


def test_every_mechanism_option_is_a_flag_and_only_given_ones_are_settings(tmp_path):
    names = {name for mechanism in MECHANISMS.values() for name in mechanism.options}
    flags = set(mechanism_arguments().__dataclass_fields__) | set(ConversionArguments.__dataclass_fields__)
    assert names <= flags
    words = ["--model_name_or_path", "x", "--output_dir", "y"]
    assert parse(words).settings_over({}) == {"mechanism": "linear", "layers": "all"}
    given = parse([*words, "--attention", "linformer", "--projection-size", "9", "--layers", "0,2-3"]).settings_over({})
    assert given == {"mechanism": "linformer", "layers": [0, 2, 3], "projection_size": 9}
    assert parse([*words, "--seed", "5"]).settings_over({}) == {"mechanism": "linear", "layers": "all"}
    assert parse([*words, "--seed", "5", "--attention", "performer"]).settings_over({})["seed"] == 5
    linformer = [*words, "--seed", "5", "--attention", "linformer", "--projection"]
    assert parse([*linformer, "random"]).settings_over({})["seed"] == 5
    assert "seed" not in parse([*linformer, "mean-pool"]).settings_over({})


def test_the_hints_of_the_summary_run(llama, tmp_path):
    out_dir, text = tmp_path / "out", tmp_path / "text.txt"
    words = ("--model_name_or_path", llama, "--output_dir", out_dir, "--num_features", 16)
    code, out, err = run("convert", *words, command=main)
    assert code == 0
    # Nothing of transformers' report about "newly initialized" weights, nor its bars.
    *said, explained, dividing, divided, last = err.splitlines()
    assert said == [
        f"loading {llama}",
        "calibrating on Python's documentation; text of the kind that will be read, as `--calibration_file`, is "
        "better: .07 nats for a 0.5B and code",
    ]
    assert re.fullmatch(r"The scores of exact keys explain \d+% of what outputs lose .*", explained)
    assert dividing == "dividing exact keys between the layers"
    assert re.fullmatch(r"exact keys by layer: \d+, \d+, \d+", divided)
    assert last == "verifying"
    assert "Its scores are fitted. To bring it nearer to the original:" in out
    start = out.index("  from transformers")
    scope: dict = {}
    exec("\n".join(line.strip() for line in out[start:].splitlines()[:2]), scope)
    assert type(scope["model"]).__name__ == "LinearLlamaForCausalLM"
    words = out[out.index("  hf-linear-attention finetune") :].split("\n\n")[0].replace("\\\n", " ").split()[2:]
    assert words[words.index("--teacher_name_or_path") + 1] == str(llama)
    words[words.index("TEXT.jsonl")] = str(text)
    text.write_text("Some text.\n")
    assert parse_options(words).objective.logits_kl_weight == 1.0


def test_a_missing_head_is_said_in_our_own_words(tmp_path):
    save_twin(tmp_path / "base", "bert", "AutoModel")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    words = ("--model_name_or_path", tmp_path / "base", "--output_dir", tmp_path / "out")
    code, _, err = run(*words)
    assert code == 2
    assert "does not contain `cls.predictions" in err
    code, out, err = run(*words, "--allow_missing")
    assert code == 0
    assert "warning: the checkpoint does not contain cls.predictions.bias" in err
    assert "class       BertForMaskedLM -> LinearBertForMaskedLM" in out
    assert "not in the checkpoint" in out
