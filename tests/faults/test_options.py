"""Options with impossible values, sizes that no machine has, and models and options that do not fit together."""

from __future__ import annotations

import pytest
from checkpoints import save_twin
from faults import assert_nothing_written, assert_refused, convert, finetune, train


HUGE = 10**15
# One value of each kind that the shared reader knows, and what single options refuse on top.
TRAINING = {
    "learning_rate": ["nan", "1e400", "0", "x", ""],
    "num_train_epochs": ["0", "1e300"],
    "max_train_steps": ["0", "1.5"],
    "max_train_tokens": ["1e3"],
    "per_device_train_batch_size": ["0", HUGE],
    "max_length": ["1", HUGE],
    "seed": ["-1", 2**32],
    "warmup_ratio": ["1"],
    "freeze_pattern": ["["],
    "report_to": ["nosuch"],
    "task": ["CAUSAL_LM"],
    "resume_from_checkpoint": ["nowhere", "/etc"],
    "overwrite_output_dir": ["perhaps"],
    "text_column_name": ["nosuch", "a" * 2000],
}


def _cases(table):
    return [
        pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, values in table.items() for value in values
    ]


@pytest.mark.parametrize(("name", "value"), _cases(TRAINING))
def test_training(linear_llama, files, tmp_path, name, value):
    words = {"task": "causal_lm", "model_name_or_path": linear_llama, "train_file": files / "good.txt"}
    words |= {"output_dir": tmp_path / "out", "max_train_steps": 1, name: value}
    assert_refused(finetune(*(f"--{option}={given}" for option, given in words.items())), name)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("content", ["", "# task: causal_lm"])
@pytest.mark.parametrize("command", [convert, finetune])
def test_a_file_without_options(command, content, tmp_path):
    (tmp_path / "empty.yaml").write_text(content)
    assert_refused(command("--config", tmp_path / "empty.yaml"), "empty.yaml` has no options")


CONVERSION = {
    "attention": ["nosuch", "0-99999999999:linear", "0-:nosuch", ":linear", "linear,linear", "0:linear,0:hybrid"],
    "layers": ["x", "3-1", "0-99999999999", "99", "", "0.5", "\u0661"],
    "softmax_layers": ["auto:x"],
    "num_features": ["0", "x", "1.5", 10**11, 10**30],
    "state_bytes": ["1", 10**30],
    "dtype": ["int8"],
    "drop": ["nosuch", ","],
    "preset": ["../default"],
    "no_verify": ["perhaps"],
    "feature_map": ["nosuch"],
    "config": ["nowhere.yaml", ""],
    "stray": ["word"],
}  # fmt: skip
SAID = {"attention": "", "stray": ""}
OF_MECHANISMS = [
    ("window_size", "hybrid", 10**12),
    ("num_sinks", "hybrid", "-1"),
    ("redraw_interval", "performer", "-1"),
    ("rope_frequencies", "linear", HUGE),
]


@pytest.mark.parametrize(
    ("name", "value", "attention"),
    [*((*case.values, None) for case in _cases(CONVERSION)), *((n, value, a) for n, a, value in OF_MECHANISMS)],
    ids=lambda value: str(value)[:20],
)
def test_conversion(llama, tmp_path, name, value, attention):
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out"]
    words += ["--attention", attention] if attention else []
    assert_refused(convert(*words, f"--{name}={value}"), SAID.get(name, name))
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("words", [["--", "x"], ["-x"], ["--seed", "--overwrite"]])
@pytest.mark.parametrize("command", [convert, finetune])
def test_stray_words(llama, files, tmp_path, words, command):
    given = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out"]
    given += ["--task", "causal_lm", "--train_file", files / "good.txt"] if command is finetune else []
    assert_refused(command(*given, *words))
    assert_nothing_written(tmp_path)


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)
# What `tests/_common/test_command_line.py` does not have: files that would take a parser endless time, or run code.
YAML = {
    "bomb": BOMB + b"seed: *j\n", "deep": b"seed: " + b"[" * 5000, "infinite": b"&a seed: *a",
    "twice": b"seed: 1\nseed: 2\n",
    "tag": b"seed: !!python/object/apply:os.system ['x']", "date": b"seed: 2020-01-01", "binary": bytes(range(256)),
    "null name": b"~: 4", "large": b"# comment\n" * 2_000_000,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "command"), [(kind, convert) for kind in YAML] + [("twice", finetune)])
def test_recipes(llama, files, tmp_path, kind, command):
    path = tmp_path / "options.yaml"
    path.write_bytes(YAML[kind])
    given = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--config", path]
    given += ["--task", "causal_lm", "--train_file", files / "good.txt"] if command is finetune else []
    assert_refused(command(*given), "seed" if kind == "date" else str(path))
    assert_nothing_written(tmp_path, "options.yaml")


@pytest.fixture(scope="session")
def others(tmp_path_factory, bert, vit):
    """Teachers that do not suit a Llama with 64 tokens and an E of 16."""
    folder = tmp_path_factory.mktemp("others")
    save_twin(folder / "vocabulary", "llama", vocab_size=80)
    save_twin(folder / "width", "llama", hidden_size=24)
    return {"vocabulary": folder / "vocabulary", "width": folder / "width", "encoder": bert, "images": vit}


ASKED = {
    "a teacher with other tokens": (["--teacher_name_or_path", "vocabulary"], "vocab_size"),
    "a wider teacher": (["--teacher_name_or_path", "width", "--hidden_state_weight", 1], "hidden_size"),
    "a teacher that sees both sides": (["--teacher_name_or_path", "encoder"], "both sides"),
    "a teacher for images": (["--teacher_name_or_path", "images"], ""),
    "a model that sees both sides": (["--model_name_or_path", "encoder"], "masked_lm"),
    "no modules to adapt": (["--use_peft", "--lora_target_modules", "nothing"], "lora_target_modules"),
    "a pattern for nothing": (["--freeze_pattern", "nothing"], "freeze_pattern"),
    "no learned mechanism": (["--trainable", "mechanism"], "trainable mechanism"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), ASKED.values(), ids=ASKED.keys())
def test_what_does_not_fit_together(linear_llama, llama, others, files, tmp_path, words, said):
    model = llama if said == "trainable mechanism" else linear_llama
    words = [others.get(word, word) for word in words]
    assert_refused(train(model, files, tmp_path / "out", lambda *given: finetune(*given, *words)), said)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "attention"),
    [("feature_map", "elu1", "linear"), ("redraw_interval", 3, "performer")],
)
def test_an_option_of_another_mechanism_is_suggested(llama, tmp_path, option, value, attention):
    result = convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", f"--{option}", value)
    assert_refused(result, option, f"`--attention {attention}`")
    assert_nothing_written(tmp_path)
