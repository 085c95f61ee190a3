"""One table of damaged input: a command, its file or option, the damage, and words of the message.

Every row ends with exit code 2 and one line of our own, within limits of time and memory, and nothing is written.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import save_twin
from faults import (
    assert_nothing_written,
    assert_refused,
    change_json,
    command,
    convert,
    copy_of,
    finetune,
    train,
    without_privileges,
)
from safetensors.torch import load_file, save_file


HUGE = 10**12
ROW = b'{"text": "the quick words of a row that is long enough", "label": 1}\n'
KEY = "model.layers.1.mlp.up_proj.weight"


class Case(NamedTuple):
    """A row.

    Attributes:
        by: a command of `commands` or `run_with`; after a colon the model to damage, if it is not that of OF_MODELS.
        name: the file that is damaged, or the option that has a bad value.
        damage: of a file its content, changes of its JSON, or a function of its path. Of an option its value, or a
            dict of several options; a list has words of the command line. Names of models stand for their folders.
        said: words of the message; SOURCE is the folder and PATH the file. The name, if there are none.
    """

    by: str
    name: str
    damage: Any
    said: tuple[str, ...] = ()

    def __str__(self) -> str:
        damage = getattr(self.damage, "__name__", None) or str(self.damage)[:24]
        return f"{self.by} {self.name} {damage}".encode("ascii", "replace").decode()


def rows(by: str, name: str, damages: Iterable[Any], *said: str) -> Iterator[Case]:
    """Rows that differ in their damage alone."""
    return (Case(by, name, damage, said) for damage in damages)


# ---- Damage of a file


def not_a_file(kind: str) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        {
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "loop": lambda: path.symlink_to(path),
            "dangling": lambda: path.symlink_to("nowhere"),
            "missing": lambda: None,
        }[kind]()

    damage.__name__ = kind
    return damage


def forbidden(path: Path) -> None:
    """A file that this user may not read, where the tests run without the privileges of root."""
    path.write_bytes(path.read_bytes() if path.exists() else ROW)
    path.chmod(0)


def hidden(path: Path) -> None:
    """A file in a folder that this user may not read."""
    path.parent.chmod(0)


def header(**changes: Any) -> Callable[[Path], None]:
    """Other entries of the first tensor in the header of a weight file."""

    def damage(path: Path) -> None:
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        content = json.loads(data[8 : 8 + size])
        content[next(key for key in content if key != "__metadata__")] |= changes
        text = json.dumps(content).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    damage.__name__ = f"header {changes}"
    return damage


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Other tensors in a weight file."""

    def damage(path: Path) -> None:
        content = load_file(path)
        change(content)
        save_file(content, path, metadata={"format": "pt"})

    damage.__name__ = name
    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def index(content: Any) -> Callable[[Path], None]:
    """An index with this content beside a part that has one tensor."""

    def damage(path: Path) -> None:
        weights = path.with_name("model.safetensors")
        save_file({KEY: load_file(weights)[KEY]}, path.with_name("part.safetensors"), metadata={"format": "pt"})
        weights.unlink()
        path.write_text(json.dumps(content))

    damage.__name__ = f"index {str(content)[-30:]}"
    return damage


class Evil:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def evil_pickle(path: Path) -> None:
    path.with_name("model.safetensors").unlink()
    path.write_bytes(pickle.dumps(Evil(path.parent.parent / "ran")))


def evil_torch(path: Path) -> None:
    path.with_name("model.safetensors").unlink()
    torch.save({"a": Evil(path.parent.parent / "ran")}, path)


def foreign_code(place: str, is_run: bool = False) -> Callable[[Path], None]:
    """A config that names code, which would create a file unless it may be run."""

    def damage(path: Path) -> None:
        change_json(path, model_type="foreign", auto_map={"AutoConfig": place})
        code = "x = 1\n" if is_run else f"open({str(path.parent.parent / 'ran')!r}, 'w')\n"
        path.with_name("configuration.py").write_text(code)

    damage.__name__ = f"code {place}"
    return damage


def no_tokenizer(path: Path) -> None:
    for file in path.parent.glob("*token*"):
        file.unlink()


def larger_vocabulary(path: Path) -> None:
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"word{number}": 64 + number for number in range(40)}
    path.write_text(json.dumps(content))


def png(width: int, height: int, length: int | None = None) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (start + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b""))[:length]


def picture(content: bytes) -> Callable[[Path], None]:
    """Rows with a picture each, and the pictures with this content."""

    def damage(path: Path) -> None:
        for label in ("bright", "dark"):
            (path.parent / "train" / label).mkdir(parents=True)
            (path.parent / "train" / label / "1.png").write_bytes(content)
        lines = [{"image": f"train/{label}/1.png", "label": label} for label in ("bright", "dark")]
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))

    damage.__name__ = f"picture {content[16:24]!r} {len(content)}"
    return damage


def labels(*values: Any) -> bytes:
    return b"".join(json.dumps({"text": "some good text", "label": value}).encode() + b"\n" for value in values)


# ---- The table

# Each value is impossible for a Llama whose weights are those of hidden_size 16, 3 layers and 4 heads: another type,
# below the least, beyond every memory, or not what the weights have.
FIELDS: dict[str, list[Any]] = {
    "hidden_size": ["32", 0, None, True, HUGE, 17, float("nan")], "num_hidden_layers": [2, 4, 10**7],
    "num_attention_heads": [3], "num_key_value_heads": [3], "vocab_size": [63], "intermediate_size": [5],
    "head_dim": [-3, 5], "max_position_embeddings": ["many", 0], "hidden_act": ["nosuch", None],
    "rope_parameters": [{"rope_type": "unknown", "rope_theta": 1e4}, {"rope_type": "default", "rope_theta": "1e4"}],
    "model_type": [None, "nosuch", "../../x"], "architectures": ["LlamaForCausalLM", [3], ["NoSuchModel"]],
    "dtype": ["float33", "os", 3], "rope_theta": [-1], "rms_norm_eps": [-1.0], "attention_dropout": [2.0],
    "initializer_range": ["x"], "pad_token_id": [10**9], "tie_word_embeddings": ["maybe"], "sliding_window": ["x"],
    "quantization_config": [3, {"quant_method": "awq"}], "auto_map": [3, {"AutoModelForCausalLM": 3}],
    "is_encoder_decoder": [True], "output_attentions": [3],
}  # fmt: skip
# Of a converted model.
SETTINGS = [
    3, {}, None, {"mechanism": "nosuch"}, {"mechanism": 3}, {"mechanism": "linear", "foo": 1},
    {"mechanism": "linear", "num_features": 10**15}, {"mechanism": "linear", "format_version": 99},
    {"mechanism": "linear", "layers": [99]}, {"mechanism": "linear", "rotary": {"a": 1}},
    {"mechanism": "linear", "feature_map": "elu1"}, {"mechanism": "nystrom"},
]  # fmt: skip
WEIGHTS: list[Any] = [
    b"", cut, longer, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", pickle.dumps({"a": 1}),
    struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"{x",
    header(shape=[10**9, 10**9]), header(dtype="F99"), header(data_offsets=[0, 10**12]),
    tensors("none", dict.clear),
    tensors("other names", lambda x: [x.update({f"x.{key}": x.pop(key)}) for key in list(x)]),
    one_missing := tensors("one missing", lambda x: x.pop(KEY)),
    nan := tensors("NaN", lambda x: x[KEY][0].fill_(float("nan"))),
    tensors("infinite", lambda x: x[KEY][0].fill_(float("inf"))),
    tensors("another shape", lambda x: x.update({KEY: x[KEY][:-1].clone()})),
    tensors("one layer more", lambda x: x.update({k.replace("s.1.", "s.3."): x[k].clone() for k in list(x)})),
]  # fmt: skip
SHARDS = [
    "../model.safetensors", "/etc/passwd", ".", "model-1.safetensors", 3, "config.json", "a\0.safetensors",
    "..\\model.safetensors", "m" * 5000 + ".safetensors", "part.safetensors",
]  # fmt: skip
CHECKPOINT = [
    *(Case("convert", "config.json", {name: value}) for name, values in FIELDS.items() for value in values),
    Case("convert", "config.json", {"vocab_size": 65}, ("is [64, 32] in the file, [65, 32]",)),
    *(Case("train:linear_llama", "config.json", {"linear_attention": value}) for value in SETTINGS),
    Case("train:llama", "config.json", {"rope_parameters": 3}),
    *rows("convert", "config.json", [
        b"", b"[]", b'{"model_type": "lla', b'{"model_type": "\xff\xfe"}', b"[" * 100_000, b"{}", b'{"a": 1}\x00',
    ]),
    *rows("convert", "tokenizer.json", [
        b"[]", b'{"version": "1.0", "model": null}', b'{"version": "1.0", "model": {"type": "Nosuch"}}',
    ]),
    *rows("convert", "tokenizer_config.json", [
        b"[]", b'{"tokenizer_class": 3}', b'{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}',
        b'{"tokenizer_class": "TokenizersBackend", "pad_token": 3}',
    ], "tokeni"),
    Case("convert", "special_tokens_map.json", b"3"),
    Case("convert", "added_tokens.json", b"[1]"),
    *rows("convert", "generation_config.json", [b"[]", b'{"num_return_sequences": 4, "do_sample": false}']),
    *rows("convert:bert", "modules.json", [
        b"{}", b"[]", b"[1]", b'[{"path": 3, "type": "x"}]', b'[{"path": "0_Transformer", "type": "x"}]',
        b'[{"path": "", "type": "x"}, {"path": "../evil", "type": "y"}]', b'[{"path": "a\\u0000", "type": "x"}]',
    ]),
    Case("train:bert", "modules.json", b"{}"),
    Case("train:llama", "tokenizer.json", b"[]"),
    *(Case(by, "config.json", b"[]") for by in ("train:llama", "teacher")),
    *(Case(by, name, not_a_file(kind))
      for name in ("config.json", "tokenizer.json", "model.safetensors")
      for kind, by in (("pipe", "convert"), ("loop", "convert"), ("folder", "train:llama"))),
    *rows("convert", "model.safetensors", WEIGHTS, "SOURCE"),
    *(Case(by, "model.safetensors", x, ("SOURCE",)) for x in (one_missing, nan) for by in ("train:llama", "teacher")),
    *rows("convert", "model.safetensors.index.json", [
        index([]), index({"weight_map": {}}), *(index({"weight_map": {KEY: shard}}) for shard in SHARDS),
    ], "SOURCE"),
    *(Case(by, "pytorch_model.bin", evil, ("SOURCE",)) for evil in (evil_pickle, evil_torch)
      for by in ("convert", "convert --allow_pickle", "train:llama")),
    *(Case(by, "config.json", foreign_code(place), ("SOURCE",))
      for place, by in (("configuration.Evil", "convert"), ("nobody/evil--configuration.Config", "train:llama"),
                        ("../../evil.Config", "convert"))),
    *rows("convert --trust_remote_code", "config.json", [
        foreign_code("configuration.Evil", is_run=True), foreign_code("../../evil.Config", is_run=True),
    ], "SOURCE"),
    Case("train:llama", "tokenizer.json", no_tokenizer, ("SOURCE", "tokenizer.json")),
    Case("train:llama", "tokenizer.json", larger_vocabulary, ("SOURCE", "104", "64")),
    *rows("train:linear_llama", "training_report.json", [b"[]", b'{"runs": [{}]}']),
    Case("train:linear_llama", "conversion_report.json", b'{"base_model": "x", "figures": []}'),
    Case("evaluate", "conversion_report.json", b'{"base_model": 3}'),
    Case("evaluate", "conversion_report.json", b'{"base_model": "/nowhere/x"}', ("/nowhere/x",)),
    Case("evaluate", "config.json", b"[1]"),
    *rows("convert", "model.safetensors", [forbidden]),
    *rows("train:linear_llama", "config.json", [forbidden]),
    *rows("convert", "config.json", [hidden], "SOURCE"),
    *rows("serve", "config.json", [{"architectures": ["x"]}, {"architectures": 3}, b"[]"], "SOURCE"),
]  # fmt: skip
BAD_DATA: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", ""),
    "latin.txt": (b"one good line\ncaf\xe9 is not UTF-8\n", "line 2"),
    "utf16.txt": ("some text\n".encode("utf-16"), ""),
    "latin.jsonl": (ROW + b'{"text": "caf\xe9"}\n', "line 2"),
    "cut.jsonl": (ROW + b'{"text": "a', "line 2"),
    "other.jsonl": (b'{"body": "a b"}\n', "body"),
    "mixed.jsonl": (ROW + b'{"text": 3}\n', "line 2"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", ""),
    "some blank.jsonl": (ROW + b'{"text": " "}\n', "line 2"),
    "header.csv": (b"text,label\n", ""),
    "latin.csv": (b"text,label\ngood one,1\ncaf\xe9,0\n", "line 3"),
    "more.csv": (b"text,label\ngood row,1\none,two,three\n", "line 3"),
    "fewer.csv": (b"text,label\ngood row,1\nlonely\n", "line 3"),
    "other.csv": (b"body,label\na b,1\n", "body"),
    "quote.csv": (b'text,label\n"never closed,1\n', ""),
    "commas.tsv": (b"text,label\na,1\n", "text,label"),
    "lying.parquet": (b"PAR1" + b"\x00" * 40 + struct.pack("<I", 2**31) + b"PAR1", ""),
    "no type": (b"text", ""),
}


def data(role: str, *names: str) -> Iterator[Case]:
    for name in names:
        content, said = BAD_DATA[name]
        yield Case(role, name, content, ("PATH", said))


DATA = [
    *data("train_file", *BAD_DATA),
    *data("labels", "other.jsonl", "fewer.csv"),
    *data("validation_file", "latin.txt"),
    *data("calibration_file", "more.csv", "empty.txt"),
    *data("preset", "more.csv"),
    *rows("labels", "rows.jsonl", [labels(0.5, 0.25), labels([1], [0]), labels(None, None), labels("x", "x")], "label"),
    *(Case(role, "x.jsonl", not_a_file(kind)) for role, kinds in {
        "train_file": ("folder", "pipe", "device", "loop", "missing"), "calibration_file": ("pipe",),
        "config": ("pipe", "dangling"), "validation_file": ("dangling",),
    }.items() for kind in kinds),
    *(Case(by, "five.jsonl", b'{"text": 5}\n{"text": "a b"}\n', ("five.jsonl': `text` is 5, not a text",))
      for by in ("calibration_file", "compare")),
    *(Case(role, "x.jsonl", damage, ("PATH",)) for role, damage in (
        ("train_file", forbidden), ("config", forbidden), ("validation_file", hidden),
    )),
    *rows("pictures", "rows.jsonl", [picture(png(100_000, 100_000)), picture(b""), picture(png(16, 16, 60))], "image"),
    Case("pictures in a folder", "rows.jsonl", picture(png(16, 16, 60)), ("image",)),
]  # fmt: skip
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)
# What `tests/_common/test_command_line.py` does not have: files that would take a parser endless time, or run code.
RECIPES = [
    *rows("recipe", "options.yaml", [
        BOMB + b"seed: *j\n", b"seed: " + b"[" * 5000, b"&a seed: *a", b"seed: 1\nseed: 2\n",
        b"seed: !!python/object/apply:os.system ['x']", bytes(range(256)), b"~: 4", b"# comment\n" * 2_000_000,
    ]),
    Case("recipe", "options.yaml", b"seed: 2020-01-01", ("seed",)),
    Case("config", "options.yaml", b"seed: 1\nseed: 2\n"),
    *(Case(by, "empty.yaml", x, ("empty.yaml` has no options",))
      for by in ("recipe alone", "config alone") for x in (b"", b"# task: causal_lm")),
]  # fmt: skip
# One value of each kind that the shared reader knows, and what single options refuse on top; the usual mistakes are in
# the tests of both command lines.
TRAINING: dict[str, list[Any]] = {
    "learning_rate": ["nan", "1e400", ""], "num_train_epochs": ["1e300"], "max_train_steps": ["1.5"],
    "per_device_train_batch_size": ["0", 10**15], "max_length": ["1", 10**15], "seed": ["-1", 2**32],
    "resume_from_checkpoint": ["/etc"], "overwrite_output_dir": ["perhaps"],
    "text_column_name": ["nosuch", "a" * 2000],
}  # fmt: skip
CONVERSION: dict[str, list[Any]] = {
    "layers": ["x", "0-99999999999", "", "\u0661"], "softmax_layers": ["auto:x"], "drop": ["nosuch", ","],
    "num_features": ["0", "1.5", 10**11, 10**30], "state_tokens": ["1", 10**30], "preset": ["../default"],
    "no_verify": ["perhaps"], "config": ["nowhere.yaml", ""],
    "window_size": [{"attention": "hybrid", "window_size": HUGE}],
    "redraw_interval": [{"attention": "performer", "redraw_interval": -1}],
    "rope_frequencies": [{"attention": "linear", "rope_frequencies": 10**15}],
}  # fmt: skip
OPTIONS = [
    *(Case("finetune", name, value) for name, values in TRAINING.items() for value in values),
    *(Case("finetune", "model_name_or_path", name, (name[:40],))
      for name in ("./nowhere", "nobody/nothing", "two words", "a" * 300, "")),
    *rows("finetune", "teacher_name_or_path", ["/nowhere/model"], "/nowhere/model"),
    *(Case("conversion", name, value) for name, values in CONVERSION.items() for value in values),
    *rows("conversion", "attention", [
        "nosuch", "0-99999999999:linear", "0-:nosuch", ":linear", "linear,linear", "0:linear,0:hybrid",
    ], ""),
    Case("conversion", "feature_map", "elu1", ("feature_map", "`--attention linear`")),
    Case("conversion", "redraw_interval", "3", ("redraw_interval", "`--attention performer`")),
    *(Case(by, "stray", words, ("",)) for by in ("conversion", "finetune")
      for words in (["word"], ["--", "x"], ["-x"], ["--seed", "--overwrite"])),
    *rows("comparing", "mechanisms", ["", ",", "nosuch"]),
    Case("comparing", "tokens", "1k", ("--train_file",)),
    Case("comparing", "train_file", "/nowhere.txt", ("/nowhere.txt",)),
    # What does not fit together: E of 16, and 64 tokens.
    Case("finetune", "teacher_name_or_path", "wide_vocabulary", ("vocab_size",)),
    Case("finetune", "hidden_size", {"teacher_name_or_path": "wide", "hidden_state_weight": 1}),
    Case("finetune", "teacher_name_or_path", "bert", ("both sides",)),
    Case("finetune", "teacher_name_or_path", "vit", ("",)),
    Case("finetune", "model_name_or_path", "bert", ("masked_lm",)),
    Case("finetune", "lora_target_modules", {"use_peft": "true", "lora_target_modules": "nothing"}),
    Case("finetune", "trainable", {"model_name_or_path": "llama", "trainable": "mechanism"}, ("trainable mechanism",)),
    Case("evaluating", "teacher_name_or_path", "linear_llama", ("converted itself",)),
    Case("evaluating", "teacher_name_or_path", "bert", ("`bert`",)),
    Case("evaluating", "teacher_name_or_path", "vit", ("`vit`",)),
    Case("evaluating", "model", {"model_name_or_path": "llama", "teacher_name_or_path": "llama"}, ("no converted",)),
    Case("comparing", "model_name_or_path", "linear_llama", ("converted already",)),
]  # fmt: skip


# ---- The runner


@pytest.fixture
def commands(request, files, tmp_path) -> dict[str, Callable[[Path], Any]]:
    """What reads a file, by name; a checkpoint is given by the folder of the file, and everything else by the file."""
    out, good = tmp_path / "out", files / "good.txt"

    def of(name: str) -> Path:
        return request.getfixturevalue(name)

    def converting(path: object, *words: object, **options: object) -> Any:
        more = [word for name, value in options.items() for word in (f"--{name}", value)]
        return convert("--model_name_or_path", path, "--output_dir", out, *more, *words)

    performer = ("--attention", "performer", "--features", "favor++")
    return {
        "convert": lambda path: converting(path.parent, num_features=8),
        "convert --allow_pickle": lambda path: converting(path.parent, "--allow_pickle"),
        "convert --trust_remote_code": lambda path: converting(path.parent, "--trust_remote_code"),
        "train": lambda path: train(path.parent, files, out),
        "teacher": lambda path: train(of("linear_llama"), files, out, teacher_name_or_path=path.parent),
        "evaluate": lambda path: command("evaluate", "--model_name_or_path", path.parent, "--validation_file", good),
        "serve": lambda path: command("serve", path.parent),
        "train_file": lambda path: train(of("linear_llama"), files, out, train_file=path),
        "validation_file": lambda path: train(of("linear_llama"), files, out, validation_file=path),
        "labels": lambda path: train(of("bert"), path, out, task="sequence_classification"),
        "calibration_file": lambda path: converting(of("llama"), *performer, calibration_file=path),
        "preset": lambda path: converting(of("llama"), preset="default", train_file=path, validation_file=good),
        "compare": lambda path: command("compare", "--model_name_or_path", of("llama"), "--train_file", path),
        "pictures": lambda path: train(of("vit"), path, out, task="image_classification"),
        "pictures in a folder": lambda path: train(
            of("vit"), None, out, task="image_classification", dataset_name=path.parent
        ),
        "recipe": lambda path: converting(of("llama"), config=path),
        "recipe alone": lambda path: convert("--config", path),
        "config": lambda path: train(of("linear_llama"), files, out, config=path),
        "config alone": lambda path: finetune("--config", path),
    }


# The damaged model of a command that reads one; the others read a file.
OF_MODELS = {"convert": "llama", "teacher": "llama", "evaluate": "linear_llama",
             "serve": "linear_llama"}  # fmt: skip


@pytest.mark.parametrize("case", [*CHECKPOINT, *DATA, *RECIPES], ids=str)
def test_a_damaged_file(case: Case, commands, request, tmp_path):
    by, _, model = case.by.partition(":")
    place = tmp_path / "source"
    if model := model or OF_MODELS.get(by.split(" --")[0], ""):
        copy_of(request.getfixturevalue(model), place)
    else:
        place.mkdir()
    path = place / case.name
    if isinstance(case.damage, bytes):
        path.write_bytes(case.damage)
    elif isinstance(case.damage, dict):
        change_json(path, **case.damage)
    else:
        case.damage(path)
    named = {"SOURCE": str(place), "PATH": str(path)}
    may_read = case.damage not in (forbidden, hidden)
    result = commands[by](path) if may_read else without_privileges(commands[by], path)
    place.chmod(0o700)
    assert_refused(result, *(named.get(word, word) for word in case.said or (case.name,)))
    assert_nothing_written(tmp_path, "source")


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    """Teachers that do not suit a Llama with 64 tokens and an E of 16."""
    folder = tmp_path_factory.mktemp("others")
    save_twin(folder / "wide_vocabulary", "llama", vocab_size=80)
    save_twin(folder / "wide", "llama", hidden_size=24)
    return folder


@pytest.fixture
def run_with(files, tmp_path):
    """Commands, and the options without which they do nothing."""
    out, good = {"output_dir": tmp_path / "out"}, files / "good.txt"
    to_train = {"task": "causal_lm", "model_name_or_path": "linear_llama", "train_file": good, "max_train_steps": 1}
    return {
        "finetune": (finetune, to_train | out),
        "conversion": (convert, {"model_name_or_path": "llama"} | out),
        "evaluating": (partial(command, "evaluate"), {"model_name_or_path": "linear_llama", "validation_file": good}),
        "comparing": (partial(command, "compare"), {"model_name_or_path": "llama"}),
    }


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_a_bad_value(case: Case, run_with, others, request, tmp_path):
    run, options = run_with[case.by]
    words = case.damage if isinstance(case.damage, list) else []
    if not words:
        options |= case.damage if isinstance(case.damage, dict) else {case.name: case.damage}
    for name, value in options.items():
        if value in ("llama", "linear_llama", "bert", "vit"):
            options[name] = request.getfixturevalue(value)
        elif value in ("wide", "wide_vocabulary"):
            options[name] = others / value
    assert_refused(run(*(f"--{name}={value}" for name, value in options.items()), *words), *(case.said or (case.name,)))
    assert_nothing_written(tmp_path)
