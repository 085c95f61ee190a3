"""Options with impossible values, and sizes that no machine has, for both commands."""

from __future__ import annotations

import pytest
from faults import assert_nothing_written, assert_refused, convert, finetune


HUGE = 10**15
# One value of each kind that the shared reader knows, and what single options refuse on top.
TRAINING = {
    "learning_rate": ["nan", "inf", "-1", "0", "x", "1e400", ""],
    "weight_decay": ["nan"],
    "max_grad_norm": ["inf"],
    "num_train_epochs": ["0", "1e300"],
    "max_train_steps": ["0", "1.5"],
    "max_train_tokens": ["1e3"],
    "per_device_train_batch_size": ["0", HUGE],
    "gradient_accumulation_steps": [HUGE],
    "max_length": ["1", HUGE],
    "seed": ["-1", 2**32],
    "warmup_ratio": ["1"],
    "temperature": ["0"],
    "freeze_pattern": ["["],
    "report_to": ["nosuch"],
    "mixed_precision": ["fp8"],
    "lr_scheduler_type": ["nosuch"],
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
    options = [word for key, entry in words.items() for word in (f"--{key}={entry}",)]
    assert_refused(finetune(*options), name)
    assert_nothing_written(tmp_path)


CONVERSION = {
    "attention": ["nosuch", "0-99999999999:linear", "0-:nosuch", ":linear", "linear,linear", "0:linear,0:hybrid"],
    "layers": ["x", "3-1", "0-99999999999", "99", "", ",", "0.5", "\u0661"],
    "softmax_layers": ["auto:x"],
    "softmax_heads": ["99.0", "x.y", "auto:9999999999999"],
    "num_features": ["0", "x", "1.5", 10**11, 10**30],
    "state_bytes": ["1", 10**30],
    "dtype": ["int8"],
    "seed": [10**40],
    "drop": ["nosuch", ","],
    "preset": ["../default"],
    "max_eval_tokens": ["0"],
    "no_verify": ["perhaps"],
    "feature_map": ["nosuch"],
    "controls": ["nosuch"],
    "config": ["nowhere.yaml", ""],
    "stray": ["word"],
}  # fmt: skip
OTHERS = [
    ("window_size", "hybrid", "0"),
    ("window_size", "hybrid", 10**12),
    ("num_sinks", "hybrid", "-1"),
    ("num_sinks", "hybrid", HUGE),
    ("trained_length", "hybrid", "0"),
    ("redraw_interval", "performer", "-1"),
    ("rope_frequencies", "linear", HUGE),
]


SAID = {"attention": "", "stray": ""}


@pytest.mark.parametrize(("name", "value"), _cases(CONVERSION))
def test_conversion(llama, tmp_path, name, value):
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out"]
    assert_refused(convert(*words, f"--{name}={value}"), SAID.get(name, name))
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(("name", "attention", "value"), OTHERS)
def test_options_of_mechanisms(llama, tmp_path, name, attention, value):
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--attention", attention]
    assert_refused(convert(*words, f"--{name}={value}"), name)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("words", [["stray"], ["--", "x"], ["-x"], ["--seed", "--overwrite"]])
@pytest.mark.parametrize("command", [convert, finetune])
def test_stray_words(llama, files, tmp_path, words, command):
    given = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out"]
    given += ["--task", "causal_lm", "--train_file", files / "good.txt"] if command is finetune else []
    assert_refused(command(*given, *words))
    assert_nothing_written(tmp_path)


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)
YAML = {
    "empty list": b"[]", "text": b"hello", "number": b"3", "not UTF-8": b"seed: \xff", "tabs": b"\tseed: 1", "cut":
    b"seed: [1", "unknown": b"nosuch: 1", "nested": b"seed: {a: 1}", "bomb": BOMB + b"seed: *j\n", "deep": b"seed: " +
    b"[" * 5000, "NUL": b"seed: 1\0", "infinite": b"&a seed: *a", "self": b"seed: &a [*a]", "twice":
    b"seed: 1\nseed: 2\n",
    "tag": b"seed: !!python/object/apply:os.system ['x']", "date": b"seed: 2020-01-01", "binary": bytes(range(256)),
    "number as name": b"3: 4", "null name": b"~: 4", "large": b"# comment\n" * 2_000_000,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "command"), [(kind, convert) for kind in YAML] + [("cut", finetune)])
def test_recipes(llama, files, tmp_path, kind, command):
    path = tmp_path / "options.yaml"
    path.write_bytes(YAML[kind])
    given = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--config", path]
    given += ["--task", "causal_lm", "--train_file", files / "good.txt"] if command is finetune else []
    assert_refused(command(*given), "seed" if kind == "date" else str(path))
    assert_nothing_written(tmp_path, "options.yaml")
