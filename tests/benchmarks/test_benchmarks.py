"""Every benchmark with `--quick`: it runs, writes its JSON and PNG, and its figures stand in plausible relations."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "attention_spectrum",
    "autoregressive_images",
    "copy_task",
    "linformer_plus_linear",
    "peers",
    "performer_error",
    "recall",
    "training_free_swap",
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)


def quick(name: str, folder: Path, *arguments: str) -> dict:
    """The JSON of a quick run; the script runs in this process."""
    script = importlib.import_module(f"benchmarks.{name}")
    script.main(["--quick", "--output_dir", str(folder), *arguments])
    assert (folder / f"{name}.png").stat().st_size > 10_000
    result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    assert result["benchmark"] == name
    assert {"date", "torch", "transformers", "cores", "threads"} <= set(result["environment"])
    return result


def numbers(value) -> list[float]:
    """Every number anywhere inside."""
    if isinstance(value, dict):
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list):
        return [number for entry in value for number in numbers(entry)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_is_documented(name):
    assert f"python benchmarks/{name}.py" in importlib.import_module(f"benchmarks.{name}").__doc__


def test_training_free_swap(tmp_path, capsys):
    result = quick("training_free_swap", tmp_path)
    assert all(map(math.isfinite, numbers(result)))
    errors = {(row["row"], row["size"]): row["error"] for row in result["rows"]}
    # float32 and an iterated inverse against the float64 formula
    assert errors["nystrom", 16] == pytest.approx(errors["textbook Nystromformer", 16], rel=1e-4)
    assert errors["linformer mean-pool", 16] == pytest.approx(errors["textbook Linformer, mean-pool", 16], rel=1e-4)
    for row in ("truncated SVD", "nystrom", "linformer mean-pool", "performer exp"):
        assert errors[row, 64] < errors[row, 16]
    # On this input: the best of rank 16 < the best swap < the mean of the values < random projections.
    assert errors["truncated SVD", 16] < errors["nystrom", 16] < errors["mean of the values", None]
    assert errors["linformer random", 16] > errors["mean of the values", None]
    assert "nystrom" in capsys.readouterr().out


def test_training_free_swap_has_every_mechanism_for_encoders():
    from hf_linear_attention.mechanisms import MECHANISMS

    variants = importlib.import_module("benchmarks.training_free_swap").variants()
    expected = {name for name, mechanism in MECHANISMS.items() if mechanism.supports_bidirectional}
    assert {name for _, name, _, _ in variants} == expected


def test_attention_spectrum(tmp_path):
    result = quick("attention_spectrum", tmp_path)
    shares = {int(rank): numbers(share) for rank, share in result["share"].items()}
    assert all(len(share) == 6 * 12 for share in shares.values())  # MiniLM's layers and heads
    assert all(0 < low < high <= 1 + 1e-6 for low, high in zip(shares[16], shares[64]))


def test_real_heads():
    """What stock MiniLM says its attention weights are."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from benchmarks.real_attention import documentation, minilm_folder, minilm_heads, windows

    (layers,) = minilm_heads(documentation(), 32, 1)
    model = AutoModel.from_pretrained(minilm_folder(), attn_implementation="eager").eval()
    (ids,) = windows(AutoTokenizer.from_pretrained(minilm_folder()), documentation(), 32, 1)
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    assert len(layers) == len(expected) == 6
    for heads, weights in zip(layers, expected):
        torch.testing.assert_close(heads.weights(), weights)


def test_linformer_plus_linear(tmp_path, capsys):
    result = quick("linformer_plus_linear", tmp_path)
    rows = {(row["form"], row["projection"], row["k"]): row for row in result["rows"]}
    for size in (16, 64):
        # phi(q) times the sum of k segment means, over phi(q) times the sum of n keys; segments are a little uneven.
        assert rows["slides", "mean-pool", size]["row_sum_median"] == pytest.approx(size / 96, rel=0.05)
        assert rows["slides", "gaussian", size]["negative_share"] > 0.2
        for kind in ("mean-pool", "|gaussian|"):
            row = rows["valid", kind, size]
            assert row["row_sum_5%"] == pytest.approx(1) == row["row_sum_95%"]
            assert row["negative_share"] == 0
    assert result["conclusion"] in capsys.readouterr().out


def test_performer_error(tmp_path):
    result = quick("performer_error", tmp_path)
    assert all(map(math.isfinite, numbers(result)))
    small = result["panels"]["|x| = 0.5"]
    errors = {(row["features"], row["rows"], row["size"]): row["mse"] for row in small["rows"]}
    for features in ("exp", "cosh", "trig"):
        assert errors[features, "orthogonal", 128] < errors[features, "orthogonal", 16] < small["target_mean_square"]
    # At small norms cosh and trig gain most from orthogonal rows, and are the best.
    for features in ("cosh", "trig"):
        assert errors[features, "orthogonal", 128] < errors[features, "iid", 128]
        assert errors[features, "orthogonal", 128] < errors["exp", "orthogonal", 128]
    large = result["panels"]["|x| = 2.0"]
    trig = [row["mse"] for row in large["rows"] if row["features"] == "trig"]
    assert min(trig) > large["target_mean_square"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_autoregressive_images(tmp_path, family):
    result = quick("autoregressive_images", tmp_path, "--family", family)
    figures = result["images"]["tiny"]
    assert all(math.isfinite(number) and number > 0 for number in numbers(figures))
    assert set(figures["seconds"]) == {"softmax", "softmax, fused", "softmax, cached", "linear"}


@pytest.mark.parametrize("is_linear", [False, True])
def test_the_compiled_decoder_decodes_the_same(is_linear):
    import torch

    from benchmarks import autoregressive_images as script
    from hf_linear_attention import convert

    torch._dynamo.reset()
    model = script.softmax_model("gpt2", 24, 2)
    model = convert(model, mechanism="linear", feature_map="elu1") if is_linear else model
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    decoders = script.Decoder(model), script.CompiledDecoder(model, graph, 24)
    decoders[0].advance(1)  # the other has taken its first step already
    for _ in range(20):
        pixels = []
        for decoder in decoders:
            decoder.advance(1)
            pixels.append(decoder.pixel)
        assert torch.equal(*pixels)


def test_the_integral_of_uncached_decoding():
    """Where a step of n tokens costs n, however few of the steps are timed."""
    import torch

    from benchmarks import autoregressive_images as script

    class Clock(torch.nn.Module):
        def forward(self, pixels, **kwargs):
            self.now += pixels.shape[1]
            return type("Output", (), {"logits": torch.zeros(1, 1, 4)})

    clock = Clock()
    clock.now = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.time, "process_time", lambda: clock.now)
        assert script.uncached_seconds(clock, 9, 9) == sum(range(1, 10))
        assert script.uncached_seconds(clock, 9, 3) == sum(range(1, 10))


def test_copy_task(tmp_path):
    result = quick("copy_task", tmp_path)
    assert set(result["curves"]) == {"softmax", "elu1", "performer", "hybrid"}
    for curve in result["curves"].values():
        assert all(map(math.isfinite, numbers(curve)))
        assert curve["loss"][-1] < curve["loss"][0]


def test_who_reaches_softmax():
    reaches = importlib.import_module("benchmarks.copy_task").reaches_softmax
    curves = {name: {"final_loss": loss} for name, loss in (("softmax", 0.01), ("elu1", 0.0105), ("hybrid", 0.02))}
    assert reaches(curves) == {"elu1": True, "hybrid": False}
    assert reaches({"elu1": {"final_loss": 0.0}}) == {}


def test_copy_batch():
    """0 w 0 w, with a target for the second w alone."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens, target = importlib.import_module("benchmarks.copy_task").copy_batch(3, 8, generator)
    count = tokens.shape[1] // 2
    assert 4 <= count <= 8
    assert not tokens[:, 0].any()
    assert not tokens[:, count + 1].any()
    assert torch.equal(tokens[:, 1:count], tokens[:, count + 2 :])
    assert (target[:, : count + 1] == -100).all()
    assert torch.equal(target[:, count + 1 :], tokens[:, 1 : count + 1])


def test_peers(tmp_path, capsys):
    """Without the packages it says how to get them; with them, ours is the exact one."""
    result = quick("peers", tmp_path)
    if result["missing"]:
        assert "pip install " + " ".join(result["missing"]) in capsys.readouterr().out
    for content in result["peers"].values():
        assert all(row["ours"] < 1e-5 for row in content["errors"])


def test_peers_alone(tmp_path, capsys, monkeypatch):
    for module in ("performer_pytorch", "linformer", "nystrom_attention", "aft_pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    result = quick("peers", tmp_path)
    assert result["peers"] == {}
    assert "pip install performer-pytorch linformer nystrom-attention aft-pytorch" in capsys.readouterr().out


def test_without_matplotlib_results_end_in_one_line(monkeypatch, tmp_path, capsys):
    from benchmarks.common import argument_parser, save_results

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    save_results(argument_parser("").parse_args(["--output_dir", str(tmp_path)]), "some", {"a": 1}, None)
    assert (tmp_path / "some.json").is_file()
    assert capsys.readouterr().out.endswith("some.json; for a plot, `pip install matplotlib`\n")
