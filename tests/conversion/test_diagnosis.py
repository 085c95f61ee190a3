"""`--spectrum`: the figures, computed again from a stock model, and what is printed and written."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import convert_folder, files, run, save_twin
from matrix import stock_model

from hf_linear_attention import convert
from hf_linear_attention.conversion.head_figures import cumulative_shares, diagnose


def inputs(length: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(3, 64, (1, length), generator=generator)} for _ in range(2)]


@pytest.mark.parametrize(
    ("family", "settings", "changes"),
    [
        ("bert", {"mechanism": "nystrom", "num_landmarks": 8}, {}),
        ("llama", {"mechanism": "linear", "num_features": 16}, {}),
        ("llama", {"mechanism": "linear", "num_features": 16, "rope": "none"}, {}),
        ("mistral", {"mechanism": "linear", "num_features": 16, "drop": ["sliding_window"]}, {"sliding_window": 9}),
    ],
)
def test_the_spectrum_is_that_of_the_stock_models_matrices(family, settings, changes):
    stock = stock_model(family, **changes)
    model = convert(stock, **settings)
    implementation = model.config._attn_implementation
    found = diagnose(model, inputs())
    assert model.config._attn_implementation == implementation
    stock.set_attn_implementation("eager")
    stock.double()
    with torch.no_grad():
        matrices = [stock(**batch, output_attentions=True).attentions for batch in inputs()]
    assert [layer.layer for layer in found] == [0, 1, 2]
    for layer in found:
        values = torch.stack([torch.linalg.svdvals(attentions[layer.layer][0]) for attentions in matrices])
        shares = (values.cumsum(-1) / values.sum(-1, keepdim=True)).mean(0)
        # The matrices are float32 there, and small singular values have its absolute error.
        torch.testing.assert_close(layer.shares.double(), shares, rtol=0, atol=1e-5)
        assert layer.errors.shape == (4,)


def test_the_errors_are_those_of_the_head_outputs():
    """In the first layer, where the converted model's own queries, keys and values are the stock model's."""
    stock = stock_model("llama")
    model = convert(stock, mechanism="linear", num_features=16)
    outputs: list[list[torch.Tensor]] = [[], []]
    for kept, owner in zip(outputs, (stock, model)):
        projection = owner.model.layers[0].self_attn.o_proj
        projection.register_forward_hook(lambda module, args, output, kept=kept: kept.append(args[0][0]))
        with torch.no_grad():
            for batch in inputs():
                owner(**batch)
    exact, ours = (torch.stack(kept).unflatten(-1, (4, 8)) for kept in outputs)  # [inputs, N, H, D]
    expected = ((ours - exact).norm(dim=(1, 3)) / exact.norm(dim=(1, 3))).mean(0)
    errors = diagnose(model, inputs())[0].errors
    # Eager and sdpa attention round differently.
    torch.testing.assert_close(errors, expected, rtol=1e-4, atol=0)
    assert (errors > 0.05).all()
    exact_hybrid = convert(stock, mechanism="hybrid", window_size=64, num_features=8)
    # A window over the whole input is softmax attention itself.
    assert all((layer.errors < 1e-5).all() for layer in diagnose(exact_hybrid, inputs()))


def test_shares_of_known_matrices():
    uniform, identity = torch.full((6, 6), 1 / 6), torch.eye(6)
    # svdvals in float32 leaves the zeros of the uniform matrix near 1e-8.
    torch.testing.assert_close(cumulative_shares(uniform), torch.ones(6), rtol=0, atol=1e-6)
    torch.testing.assert_close(cumulative_shares(identity), torch.arange(1, 7) / 6)


def test_only_looking_needs_no_output_and_writes_nothing(llama, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    before = files(llama)
    monkeypatch.chdir(tmp_path)
    outputs = []
    for words in (
        ("--spectrum",),
        ("--spectrum", "--calibration_file", text),
        ("--spectrum", "--dry_run", "--verbose"),
    ):
        code, out, err = run("--model_name_or_path", llama, "--attention", "linear", "--num_features", 16, *words)
        assert code == 0, err
        # The twin takes 48 tokens: no rank but 32 is below.
        assert "of 48 tokens" in out
        rows = [
            line.split()
            for line in out.splitlines()
            if line.startswith(("  layer  ", "  0 ", "  1 ", "  2 ", "  all "))
        ]
        assert rows[0] == ["layer", "largest", "32", "error", "worst", "head"]
        assert [row[0] for row in rows[1:]] == ["0", "1", "2", "all"]
        assert all(0 < float(row[1]) <= 1 and 0 < float(row[2]) <= float(row[3]) for row in rows[1:])
        outputs.append(out)
    assert "3 inputs of 48 tokens (text.txt)" in outputs[1]
    assert outputs[0].rstrip().endswith("Nothing was written (no --output_dir).")
    assert "mapped     model.norm.weight" in outputs[2]
    assert outputs[2].rstrip().endswith("Nothing was written (--dry_run).")
    assert (files(llama), files(tmp_path)) == (before, ["text.txt"])


def test_the_report_has_every_head(bert, tmp_path):
    words = (
        "--attention",
        "performer",
        "--features",
        "favor++",
        "--num_features",
        16,
        "--layers",
        "0,2",
        "--no_verify",
    )
    diagnosis = convert_folder(bert, tmp_path / "out", "--spectrum", *words)["diagnosis"]
    assert diagnosis["inputs"] == "built-in sentences"
    assert (diagnosis["length"], diagnosis["ranks"]) == (48, [32])
    assert [layer["layer"] for layer in diagnosis["layers"]] == [0, 2]
    assert all(len(layer["spectrum"]["32"]) == len(layer["error"]) == 4 for layer in diagnosis["layers"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "eager" not in json.dumps(config)
    assert convert_folder(bert, tmp_path / "plain", *words)["diagnosis"] is None


def test_what_there_is_nothing_to_look_at_is_refused(llama, tmp_path):
    save_twin(tmp_path / "vit", "vit")
    for source, words, said in (
        (llama, ("--layers", "none"), "but `--layers` selects none"),
        (tmp_path / "vit", (), "there are no built-in inputs"),
        (tmp_path / "vit", ("--calibration_file", llama / "config.json"), "a vision model needs a folder of images"),
        (tmp_path / "vit", ("--calibration_file", llama), "contains no images"),
    ):
        code, out, err = run("--model_name_or_path", source, "--spectrum", *words)
        assert (code, out) == (2, "")
        assert said in err
