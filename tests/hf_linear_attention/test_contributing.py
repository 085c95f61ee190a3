"""CONTRIBUTING.md is enough to add a mechanism or a feature map: its steps, done with toys in a copy of the repository.

The steps are read from the text. What a step of the test edits is what the step of the text names, file by file and
table by table, so neither can change without the other.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import save_twin


ROOT = Path(__file__).resolve().parents[2]
COPIED = ("hf_linear_attention", "conversion", "training", "model_cards", "tests", "docs")
CODE_SPAN = re.compile(r"`([^`]+)`")


class Edit(NamedTuple):
    """`code` at the end of a file, or above one of its tables, which also gets `line`."""

    path: str
    code: str
    table: str | None = None
    line: str = ""

    def apply(self, root: Path) -> None:
        file = root / self.path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if self.table is None:
            text += f"\n\n{self.code}"
        else:
            head, opening, tail = re.split(rf"(?m)^({self.table}\b.* = {{\n)", text)
            text = f"{head}{self.code}\n\n{opening}    {self.line}\n{tail}"
        file.write_text(text, encoding="utf-8")


MECHANISM = '''"""`toy`: kernel attention with two features, for a test."""

from __future__ import annotations

from typing import ClassVar

import torch

from .kernels_torch import accumulation_dtype
from .kernels import kernel_attention
from .mechanism import AttentionMechanism
from .mechanism import Option


class ToyAttention(AttentionMechanism):
    """Weights cosh(a (sum q + sum k)). Only a toy."""

    options: ClassVar[dict[str, Option]] = {"sharpness": Option(float, 1.0, "a", minimum=0)}
    supports_causal = supports_bidirectional = supports_padding = supports_state = True
    supports_gqa = supports_constants = True

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        query_features, key_features = (self._exponents(x, scaling) for x in (query, key))
        output, new_state = kernel_attention(
            query_features,
            key_features,
            value,
            log_features=True,
            is_causal=is_causal,
            key_mask=attention_mask,
            state=state[0] if state else None,
        )
        return output.transpose(1, 2).to(query.dtype), (new_state,)

    def _exponents(self, x, scaling):
        exponent = self.settings["sharpness"] * scaling**0.5 * x.to(accumulation_dtype(x)).sum(-1, keepdim=True)
        return torch.cat((exponent, -exponent), dim=-1)
'''
MECHANISM_ORACLE = '''def toy(query, key, value, key_mask, is_causal, sharpness, scaling):
    """Weights cosh(a (sum q + sum k))."""
    query, key = query.double().sum(-1), repeat_heads(key.double(), query.shape[1]).sum(-1)
    weights = (sharpness * math.sqrt(scaling) * (query.unsqueeze(-1) + key.unsqueeze(-2))).cosh()
    return attend(weights.log(), value, key_mask, is_causal)
'''
MECHANISM_ADAPTER = """def toy(mechanism, query, key, value, mask, is_causal, scaling):
    return reference.toy(query, key, value, mask, is_causal, mechanism.settings["sharpness"], scaling)
"""
FEATURE_MAP = """class SoftplusFeatureMap(ElementwiseFeatureMap):
    function = staticmethod(nn.functional.softplus)
"""
RANDOM_FEATURE_MAP = """class SoftplusRandomFeatureMap(GeneralizedRandomFeatureMap):
    function = staticmethod(torch.nn.functional.softplus)
"""
FEATURE_MAP_ORACLE = '''def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x))."""
    return x.double().exp().log1p()
'''
FEATURE_MAP_ADAPTER = """def softplus(feature_map, query, key, scaling):
    return reference.softplus(query).log(), reference.softplus(key).log()
"""

PACKAGE, SUPPORT = "hf_linear_attention", "tests/support"
STEPS = {
    "Add a mechanism": [
        [Edit(f"{SUPPORT}/reference.py", MECHANISM_ORACLE)],
        [Edit(f"{PACKAGE}/mechanism_toy.py", MECHANISM)],
        [
            Edit(
                f"{PACKAGE}/mechanisms.py",
                "from .mechanism_toy import ToyAttention",
                "MECHANISMS",
                '"toy": ToyAttention,',
            )
        ],
        [
            Edit(f"{SUPPORT}/matrix.py", "", "MECHANISM_ROWS", '"toy": {"mechanism": "toy", "sharpness": 0.3},'),
            Edit(f"{SUPPORT}/oracles.py", MECHANISM_ADAPTER, "ORACLES", '"toy": toy,'),
        ],
    ],
    "Add a feature map": [
        [Edit(f"{SUPPORT}/reference.py", FEATURE_MAP_ORACLE)],
        [
            Edit(f"{PACKAGE}/features.py", FEATURE_MAP, "FEATURE_MAPS", '"softplus": SoftplusFeatureMap,'),
            Edit(
                f"{PACKAGE}/features_random.py",
                RANDOM_FEATURE_MAP,
                "RANDOM_FEATURES",
                '"softplus": SoftplusRandomFeatureMap,',
            ),
        ],
        [
            Edit(
                f"{SUPPORT}/matrix.py",
                "",
                "MECHANISM_ROWS",
                '"linear-softplus": {"mechanism": "linear", "feature_map": "softplus"}, '
                '"performer-softplus": {"mechanism": "performer", "features": "softplus"},',
            ),
            Edit(f"{SUPPORT}/oracles.py", FEATURE_MAP_ADAPTER, "FEATURES", '"softplus": softplus,'),
            Edit(
                f"{SUPPORT}/oracles.py",
                "",
                "RANDOM_FEATURES",
                '"softplus": partial(reference.favor_generalized, function=reference.softplus),',
            ),
        ],
    ],
}
# Converts `source` with the words of each job and saves what the result computes, as `shipping/alone.py` expects it.
# In torch: where the package is missing there are no C kernels.
CONVERT = """
import json, os, sys, torch, transformers

os.environ["HF_LINEAR_ATTENTION_BACKEND"] = "torch"
from hf_linear_attention.conversion.convert_checkpoint import main

for job in json.loads(sys.argv[1]):
    assert main(job["words"]) == 0
    model = transformers.AutoModel.from_pretrained(job["checkpoint"]).eval()
    ids = torch.arange(3, 29).view(2, 13)
    with torch.no_grad():
        torch.save({"inputs": {"input_ids": ids}, "output": model(ids)[0]}, job["inputs"])
"""


def section(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.search(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", text)[1]


def steps(title: str) -> list[str]:
    """The numbered items of a section."""
    return re.findall(r"(?ms)^\d+\. (.*?)(?=^\d+\. |^\n|\Z)", section(title))


def test_the_tree_is_that_of_the_repository():
    """What it names is there, wherever in the repository; the flat files and the folders of both packages are named."""
    tree = re.search(r"(?s)```\n(.*?)```", section("How the pieces fit"))[1]
    names = set(re.findall(r"[\w<>]+\.py\b", tree)) | set(re.findall(r"\w+/", tree))
    paths = [
        path
        for name in (*COPIED, "csrc", "benchmarks", "examples")
        for path in (ROOT / name, *(ROOT / name).rglob("*"))
    ]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in paths if "__pycache__" not in path.parts}
    patterns = {name: re.compile(re.escape(name).replace("<name>", r"\w+")) for name in names}
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, there))] == []
    needed = {path.name for path in (ROOT / PACKAGE).glob("*.py")} - {"__init__.py"}
    for package in ("conversion", "training"):
        needed |= {f"{path.name}/" for path in (ROOT / package).iterdir() if path.is_dir()}
    unnamed = {name for name in needed if not any(pattern.fullmatch(name) for pattern in patterns.values())}
    assert unnamed - {"__pycache__/"} == set()


@pytest.mark.parametrize("title", STEPS)
def test_the_steps_of_the_text_are_those_of_the_test(title):
    *described, last = steps(title)
    assert len(described) == len(STEPS[title])
    for text, edits in zip(described, STEPS[title]):
        spans = {span.replace("<name>", "toy") for span in CODE_SPAN.findall(text)}
        assert {span for span in spans if re.fullmatch(r".*/.*\.py", span)} == {edit.path for edit in edits}
        assert {edit.table for edit in edits if edit.table} <= spans
    assert "`docs/mechanisms.md`" in last


def follow(root: Path, edits: Iterable[Edit]) -> None:
    for edit in edits:
        edit.apply(root)


def regenerate_table(root: Path) -> None:
    """The last step: a page, and the command that writes the tables of the documentation."""
    text = steps("Add a mechanism")[-1]
    page = next(span for span in CODE_SPAN.findall(text) if "<name>" in span).replace("<name>", "toy")
    (root / page).write_text("# toy\n\n| option |\n| --- |\n", encoding="utf-8")
    command = next(span for span in CODE_SPAN.findall(text) if span.startswith("python "))
    run(root, *shlex.split(command)[1:])
    assert "| `sharpness` |" in (root / page).read_text(encoding="utf-8")


def run(root: Path, *words: object, path: Path | None = None, check: bool = True):
    """Python in the copy: its packages come before those that are installed (`path` instead of the copy, if given)."""
    environment = {**os.environ, "PYTHONPATH": str(path or root), "HF_MODULES_CACHE": str(root / "modules")}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=root, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def failed_tests(root: Path, keywords: str) -> set[str]:
    """The names of the tests of the matrix and of the README that fail."""
    folder = "tests/hf_linear_attention"
    files = (f"{folder}/test_mechanisms.py", f"{folder}/test_properties.py", "tests/test_readme.py")
    done = run(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", keywords, check=False)
    assert re.search(r"\d+ (passed|failed)", done.stdout), done.stdout + done.stderr
    return set(re.findall(r"(?m)^(?:FAILED|ERROR) .*?::(\w+)", done.stdout))


def test_a_stranger_can_add_a_mechanism_and_a_feature_map(tmp_path):
    root = tmp_path / "repository"
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, root)

    *before, (row, oracle) = STEPS["Add a mechanism"]
    follow(root, [*chain(*before), row])
    *before, rows = STEPS["Add a feature map"]
    follow(root, chain(*before))
    guards = "every_mechanism_has_a_row or every_feature_map_has or capability_table or options_table"
    assert failed_tests(root, guards) == {
        "test_every_mechanism_has_a_row_and_an_oracle",
        "test_every_feature_map_has_a_row",
        "test_the_capability_table_is_generated",
        "test_the_options_table_is_generated",
    }

    follow(root, [oracle, *rows])
    regenerate_table(root)
    table = (root / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    assert "| [`toy`](mechanisms/toy.md) | Weights cosh(a (sum q + sum k)). Only a toy | yes | yes |" in table
    assert failed_tests(root, f"toy or softplus or {guards}") == set()

    assert loaded_alone(root, tmp_path) == {"toy": "equal", "linear": "equal", "performer": "equal", "imported": []}


def loaded_alone(root: Path, folder: Path) -> dict:
    """Convert a random GPT-2 with each toy; then load the results where the package is not installed."""
    save_twin(folder / "source", "gpt2")
    jobs = {}
    for words in ("toy --sharpness 0.5", "linear --feature_map softplus", "performer --features softplus"):
        name = words.split()[0]
        output = ["--model_name_or_path", str(folder / "source"), "--output_dir", str(folder / name), "--no_verify"]
        jobs[name] = {
            "words": [*output, "--attention", *words.split()],
            "auto_class": "AutoModel",
            "checkpoint": str(folder / name),
            "inputs": str(folder / f"{name}.pt"),
        }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run(root, "-c", CONVERT, json.dumps(list(jobs.values())))
    done = run(root, ROOT / "tests/shipping/alone.py", folder / "jobs.json", path=folder)
    return json.loads(done.stdout.splitlines()[-1])
