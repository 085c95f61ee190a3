"""Options with impossible values, and sizes that no machine has, for both commands."""

from __future__ import annotations

import pytest
from faults import assert_nothing_written, assert_refused, convert, finetune


HUGE = 10**15
NUMBERS = {
    "learning_rate": ["nan", "inf", "-1", "0", "x", "1e400", "-inf", "", "1,5"],
    "weight_decay": ["nan", "-1", "inf"],
    "max_grad_norm": ["nan", "-1", "inf"],
    "num_train_epochs": ["nan", "inf", "0", "-1", "1e300", "x"],
    "max_train_steps": ["0", "-1", "1.5", "nan", "x"],
    "max_train_tokens": ["0", "-1", "x", "1e3"],
    "per_device_train_batch_size": ["0", "-1", "x", HUGE],
    "gradient_accumulation_steps": ["0", "-2", "x", HUGE],
    "max_length": ["0", "1", "-5", "x", HUGE],
    "seed": ["-1", "x", "1.5", HUGE * HUGE, 2**32],
    "warmup_ratio": ["nan", "1", "-0.1", "2"],
    "logging_steps": ["0", "-1", "x"],
    "checkpointing_steps": ["0", "-1", "x"],
    "task_loss_weight": ["nan", "-1", "inf"],
    "temperature": ["0", "nan", "-1", "inf"],
    "transfer_layers": ["x", "-1", "3-1", "0-99999999999", "1.5", "99999999999999999999"],
    "freeze_pattern": ["[", "(", "*"],
    "report_to": ["nosuch"],
    "mixed_precision": ["fp8", "x"],
    "lr_scheduler_type": ["nosuch"],
    "task": ["nosuch", "CAUSAL_LM"],
    "trainable": ["nothing"],
    "resume_from_checkpoint": ["nowhere", "/etc"],
    "overwrite_output_dir": ["perhaps"],
    "text_column_name": ["nosuch", "a" * 2000],
    "on_bad_rows": ["ignore"],
}
BESIDE = {"transfer_layers": ["--attention_transfer_weight", 1, "--trainable", "mechanism"]}


def _cases(table):
    return [
        pytest.param(name, value, id=f"{name}={str(value)[:20]}") for name, values in table.items() for value in values
    ]


@pytest.mark.parametrize(("name", "value"), _cases(NUMBERS))
def test_training(linear_llama, files, tmp_path, name, value):
    words = {"task": "causal_lm", "model_name_or_path": linear_llama, "train_file": files / "good.txt"}
    words |= {"output_dir": tmp_path / "out", "max_train_steps": 1, name: value}
    options = [word for key, entry in words.items() for word in (f"--{key}={entry}",)]
    assert_refused(finetune(*options, *BESIDE.get(name, [])), name)
    assert_nothing_written(tmp_path)


CONVERSION = {
    "attention": ["nosuch", "", "0-99999999999:linear", "0-:nosuch", "5-:linear", ":linear", "linear,linear",
                  "0:linear,0:hybrid"],
    "layers": ["x", "-1", "3-1", "0-99999999999", "99", "0,1,99999999999999999999", "", ",", "1-", "0.5", "\u0661"],
    "softmax_layers": ["auto:0", "auto:-1", "auto:x", "auto:99", "x", "0-99999999999", "9", "auto:", "auto:\u0661"],
    "softmax_heads": ["0", "0.99", "99.0", "x.y", "auto:0", "auto:9999999999999", "-1.0", "0.0.0", "auto:x"],
    "num_features": ["0", "-1", "x", "nan", "1.5", HUGE, 10**11, 10**30],
    "state_bytes": ["0", "-1", "1", "x", 10**30],
    "dtype": ["int8", "float8", "", "FLOAT32"],
    "seed": ["x", "-1", "1.5", 10**40],
    "tokens": ["0", "x", "-1", "1e9", "nan", "M", "infM"],
    "drop": ["nosuch", "", ","],
    "preset": ["nosuch", "../default", ""],
    "max_eval_tokens": ["0", "-1", "x"],
    "checkpointing_steps": ["0", "x"],
    "no_verify": ["perhaps"],
    "feature_map": ["nosuch", ""],
    "controls": ["nosuch"],
    "config": ["nowhere.yaml", ""],
    "stray": ["word"],
}  # fmt: skip
OTHERS = {
    "window_size": ("hybrid", ["0", "-1", "x", HUGE, 10**12, 10**30]),
    "num_sinks": ("hybrid", ["-1", "x", HUGE]),
    "trained_length": ("hybrid", ["0", "-1", "x"]),
    "uniform_mixing": ("performer", ["nan", "-1", "2", "inf"]),
    "redraw_interval": ("performer", ["-1", "x"]),
    "rope_frequencies": ("linear", ["-1", "x", HUGE]),
}  # fmt: skip


SAID = {"attention": "", "stray": ""}


@pytest.mark.parametrize(("name", "value"), _cases(CONVERSION))
def test_conversion(llama, tmp_path, name, value):
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out"]
    needed = ["--preset", "default", "--train_file", llama / "x.txt"] if name == "tokens" else []
    assert_refused(convert(*words, f"--{name}={value}", *needed), SAID.get(name, name))
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("name", "attention", "value"), [(name, kind, value) for name, (kind, values) in OTHERS.items() for value in values]
)
def test_options_of_mechanisms(llama, tmp_path, name, attention, value):
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--attention", attention]
    assert_refused(convert(*words, f"--{name}={value}"), name)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("words", [["stray"], ["--", "x"], ["-x"], ["--"], ["--layers"], ["--seed", "--overwrite"]])
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


@pytest.mark.parametrize("content", YAML.values(), ids=YAML.keys())
@pytest.mark.parametrize("command", [convert, finetune])
def test_recipes(llama, files, tmp_path, content, command):
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    given = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--config", path]
    given += ["--task", "causal_lm", "--train_file", files / "good.txt"] if command is finetune else []
    assert_refused(command(*given), "seed" if content == YAML["date"] else str(path))
    assert_nothing_written(tmp_path, "options.yaml")
