"""Lengths from which linear attention is faster are quoted where they were measured, and say on what."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from checkpoints import convert_folder, run, save_twin

import hf_linear_attention
from hf_linear_attention import kernels_cpu
from hf_linear_attention.conversion import break_even
from hf_linear_attention.conversion.break_even import current_backend, difference_here, faster_from
from hf_linear_attention.conversion.plan import make_plan
from hf_linear_attention.conversion.source import open_source


QUOTED = "faster than softmax attention from"


def computes(monkeypatch, name, instruction_set, reason="Because."):
    backend = SimpleNamespace(name=name, instruction_set=instruction_set, reason=reason)
    monkeypatch.setattr(hf_linear_attention, "kernel_backend", lambda: backend, raising=False)


@pytest.fixture(scope="module")
def measured_llama(tmp_path_factory):
    """With heads of 64, as those that were measured."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    save_twin(folder, "llama", head_dim=64)
    return folder


@pytest.fixture(scope="module")
def measured_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "bert"
    save_twin(folder, "bert", hidden_size=128, num_attention_heads=2)
    return folder


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A file of measurements of its own; returns its content, of which the rows can be replaced by calling it."""
    rows = [
        {"name": "a 1", "settings": {"mechanism": "a", "size": 1}, "bidirectional": 128, "causal": 256},
        {"name": "a 2", "settings": {"mechanism": "a", "size": 2}, "bidirectional": None},
    ]
    content = {
        "rows": rows,
        "longest": 4096,
        "conditions": "on a thread",
        "backend": {"name": "c", "instruction_set": "avx512"},
        "environment": {"processor": "A processor"},
    }

    def write(**changes):
        (tmp_path / "measured.json").write_text(json.dumps(content | changes))

    write()
    monkeypatch.setattr(break_even, "MEASURED", tmp_path / "measured.json")
    return write


def test_the_figure_says_what_was_measured_and_on_what(measured):
    one, two = ({"mechanism": "a", "size": size} for size in (1, 2))
    on = "on a thread, C kernels for AVX-512, A processor"
    assert faster_from(one, True) == f"256 tokens (measured: a 1, {on})"
    assert faster_from(one, None) == f"128 tokens in the encoder, 256 tokens in the decoder (measured: a 1, {on})"
    assert faster_from(two, False) == f"more than 4,096 tokens (measured: a 2, {on})"
    assert faster_from(two, True) is None
    measured(backend={"name": "torch", "instruction_set": None})
    assert faster_from(one, True) == "256 tokens (measured: a 1, on a thread, plain torch, A processor)"


@pytest.mark.parametrize(
    "settings",
    [
        {"mechanism": "a", "size": 3},
        {"mechanism": "b", "size": 1},
        {"mechanism": "a"},
        {"mechanism": "a", "size": 1, "other": 0},
        {},
    ],
)
def test_other_settings_have_no_figure(measured, settings):
    assert faster_from(settings, True) is None


@pytest.mark.parametrize("device", ["cuda", "xpu", "backends.mps"])
def test_where_there_is_a_gpu_nothing_is_quoted(measured, monkeypatch, device):
    monkeypatch.setattr(f"torch.{device}.is_available", lambda: True)
    assert faster_from({"mechanism": "a", "size": 1}, True) is None


# As in review: each of these was quoted with figures of other sizes.
@pytest.mark.parametrize(
    ("words", "is_measured"),
    [
        ("linear --feature_map exp", True),  # 128 features are its default with heads of 64
        ("linear --feature_map exp --num_features 128", True),
        ("linear --feature_map exp --num_features 4096", False),
        ("linear --feature_map exp --num_features 64", False),
        ("linear --feature_map elu1", True),
        ("linear --feature_map elu1 --decay learned", False),
        ("performer", True),
        ("performer --seed 3", True),
        ("performer --num_features 2048", False),
        ("performer --features relu --num_features 16", False),
        ("performer --orthogonal false", False),
        ("hybrid", True),
        ("hybrid --window_size 2048", False),
        ("hybrid --num_sinks 0", False),
        ("hybrid --normalization separate", False),
        ("hybrid --far gated_delta", False),
        ("aft --variant simple", True),
    ],
)
def test_what_a_dry_run_quotes(measured_llama, words, is_measured):
    code, out, err = run("--model_name_or_path", measured_llama, "--dry_run", "--attention", *words.split())
    assert code == 0, err
    assert (QUOTED in out) == is_measured
    assert (f"{json.loads(break_even.MEASURED.read_text())['environment']['processor']})" in out) == is_measured
    assert ("not measured for these settings; `hf-linear-attention compare` measures it here" in out) != is_measured


def test_an_encoder_quotes_its_own_form(measured_bert):
    rows = {row["name"]: row for row in json.loads(break_even.MEASURED.read_text())["rows"]}
    for words, name in (("nystrom --num_landmarks 64", "nystrom 64"), ("linear --feature_map elu1", "linear elu1")):
        _, out, _ = run("--model_name_or_path", measured_bert, "--dry_run", "--attention", *words.split())
        assert f"{QUOTED} {rows[name]['bidirectional']:,} tokens (measured: {name}, " in out
    for words in ("nystrom --num_landmarks 32", "performer --features trig --num_features 2048"):
        code, out, _ = run("--model_name_or_path", measured_bert, "--dry_run", "--attention", *words.split())
        assert code == 0
        assert QUOTED not in out


def test_heads_of_another_size_have_no_figure(llama, measured_llama):
    assert "not measured for heads of 8 (only of 64); " in run("--model_name_or_path", llama, "--dry_run")[1]
    settings = {"mechanism": "linear", "feature_map": "exp", "num_features": 128}
    plans = [make_plan(open_source(str(source)), settings) for source in (measured_llama, llama)]
    assert plans[0].cost_settings == plans[1].cost_settings | {"head_dim": 64}
    assert [faster_from(plan.cost_settings, True) is None for plan in plans] == [False, True]
    assert make_plan(open_source(str(llama)), {"layers": "none"}).cost_settings == {}


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (("c", "avx512"), None),
        (
            ("torch", None),
            "measured with the C kernels for AVX-512; this process uses torch, which is slower. Because.",
        ),
        (("c", "avx2"), "this process uses the C kernels for AVX2, so the length differs"),
        (("c", "base"), "this process uses the C kernels for any processor, so the length differs"),
    ],
)
def test_another_backend_than_was_measured_is_said(measured, monkeypatch, measured_llama, here, said):
    computes(monkeypatch, *here)
    found = difference_here()
    assert (found is None) == (said is None)
    assert said is None or found.endswith(said)
    assert (current_backend().name, current_backend().instruction_set) == here
    measured(backend={"name": "torch", "instruction_set": None})
    if here[0] == "c":
        assert difference_here().startswith("measured with plain torch; this process uses the C kernels for")
    else:
        assert difference_here() is None


def test_the_packages_reason_says_what_to_do_where_there_is_no_kernel(monkeypatch, measured, tmp_path):
    monkeypatch.setattr("hf_linear_attention.kernels_cpu.package_folder", lambda: tmp_path)  # without a library
    kernels_cpu._loaded.cache_clear()
    try:
        assert "this process uses torch, which is slower. " in difference_here()
        assert "C compiler" in difference_here()
    finally:
        kernels_cpu._loaded.cache_clear()


@pytest.mark.parametrize(("num_features", "is_measured"), [("128", True), ("64", False)])
def test_a_checkpoint_quotes_a_length_with_its_settings_or_none(measured_llama, tmp_path, num_features, is_measured):
    report = convert_folder(
        measured_llama, tmp_path / "out", "--attention", "linear", "--num_features", num_features, "--no_verify"
    )
    row = next(row for row in json.loads(break_even.MEASURED.read_text())["rows"] if row["name"] == "linear exp 128")
    assert (report["faster_from"] is not None) == is_measured
    for path in (tmp_path / "out").iterdir():
        text = path.read_bytes().decode("utf-8", errors="replace")
        quoted = re.findall(r"(?i)faster than softmax.*|break.even.*", text)
        assert len(quoted) == (is_measured and path.name in ("README.md", "report.html")), path
        assert all(f"{row['causal']:,} tokens (measured: {row['name']}, " in line for line in quoted)


def test_dry_run_report_and_card_agree(measured_llama, tmp_path, monkeypatch):
    kept = json.loads(break_even.MEASURED.read_text())
    for name, instruction_set in (("torch", None), tuple(kept["backend"].values())):
        computes(monkeypatch, name, instruction_set)
        _, out, _ = run("--model_name_or_path", measured_llama, "--dry_run", "--attention", "linear")
        assert ("this process uses torch, which is slower" in out) == (name == "torch")
    computes(monkeypatch, "torch", None)
    report = convert_folder(measured_llama, tmp_path / "out", "--attention", "linear")
    assert report["backend"] == {"name": "torch", "instruction_set": None, "reason": "Because."}
    assert f"{QUOTED} {report['faster_from']}\n" in out
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{QUOTED} {report['faster_from']}." in card
    assert "Its speed on a GPU was not measured." in card
    assert "C kernels for" in report["faster_from"]
    assert kept["environment"]["processor"] in report["faster_from"]


def test_what_was_not_measured_is_in_no_card(llama, tmp_path):
    report = convert_folder(llama, tmp_path / "out")
    assert report["faster_from"] is None
    assert QUOTED not in (tmp_path / "out" / "README.md").read_text()


def test_the_backend_is_that_of_the_package():
    found, backend = current_backend(), hf_linear_attention.kernel_backend()
    assert (found.name, found.instruction_set, found.reason) == (backend.name, backend.instruction_set, backend.reason)
    assert (found.name == "torch") == (found.instruction_set is None)
