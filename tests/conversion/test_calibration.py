"""What is fitted to the queries and keys of the source model: FAVOR++ in closed form, padding, files, the report."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import convert_folder, run, save_twin, tiny_tokenizer
from matrix import stock_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from hf_linear_attention import calibrate, convert, key_division
from hf_linear_attention._common import devices
from hf_linear_attention.conversion import calibration_data, pipeline
from hf_linear_attention.conversion.verification import TEXTS
from hf_linear_attention.key_division import SHARES
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


FAVOR = ("--attention", "performer", "--features", "favor++", "--num_features", 16)
SETTINGS = {"mechanism": "performer", "features": "favor++", "num_features": 16}


def norm_weights(model) -> list[torch.Tensor]:
    """A of every layer, `[Hkv]`."""
    return [module.linear_attention.feature_map.norm_weight for module in linear_attention_modules(model).values()]


def padded_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for lengths, side in (((19, 7, 12), "right"), ((5, 30), "left"), ((11,), "right")):
        longest = max(lengths)
        ids = torch.randint(3, 64, (len(lengths), longest), generator=generator)
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        batches.append({"input_ids": ids, "attention_mask": (real if side == "right" else real.flip(1)).long()})
    return batches


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (theta 10,000, halves paired) of `[B, N, heads, D]`, as in RoFormer."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(x[..., :half], x[..., half:])
    return torch.cat((turned.real, turned.imag), dim=-1)


def expected_norm_weights(stock, batches, layers, names, head_dim, rotate) -> list[torch.Tensor]:
    """Likhosherstov 2022, from what hooks see of the projections of the stock model in float64."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    for number, layer in enumerate(layers(stock.double())):
        for name in names:

            def hook(module, inputs, output, place=(number, name)):
                seen.setdefault(place, []).append(output)

            layer.get_submodule(name).register_forward_hook(hook)
    with torch.no_grad():
        for batch in batches:
            stock(**batch)
    masks = [batch["attention_mask"].bool() for batch in batches]
    result = []
    for number in range(len(seen) // 2):
        query, key = (
            torch.cat(
                [rotate(x.unflatten(-1, (-1, head_dim)))[mask] for x, mask in zip(seen[number, name], masks)]
            )  # [T, heads, D]
            for name in names
        )
        query = query.unflatten(1, (key.shape[1], -1))  # [T, Hkv, group, D]
        f = query.square().sum(-1).mean((0, 2)) + key.square().sum(-1).mean(0)
        f = (f + 2 * (query.mean((0, 2)) * key.mean(0)).sum(-1)) / head_dim**0.5
        rho = (((2 * f + head_dim) ** 2 + 8 * head_dim * f).sqrt() - 2 * f - head_dim) / (4 * f)
        result.append((1 - 1 / rho) / 8)
    return result


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_it_is_the_closed_form_of_the_moments_of_the_stock_model(family):
    batches, stock = padded_batches(), stock_model(family)
    if family == "llama":  # those of a stock model, which are given, so that they do not start behind the padding
        batches = [{**x, "position_ids": torch.arange(x["input_ids"].shape[1])[None]} for x in batches]
    model = convert(stock, **SETTINGS)
    assert all(not weight.any() for weight in norm_weights(model))
    total = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert calibrate(model, batches) == total == 84
    if family == "bert":
        layers, names, rotate = (
            lambda stock: [layer.attention.self for layer in stock.bert.encoder.layer],
            ("query", "key"),
            lambda x: x,
        )
    else:
        layers, names, rotate = (
            lambda stock: [layer.self_attn for layer in stock.model.layers],
            ("q_proj", "k_proj"),
            rotated,
        )
    expected = expected_norm_weights(stock, batches, layers, names, 8, rotate)
    for ours, theirs in zip(norm_weights(model), expected, strict=True):
        assert ours.shape == theirs.shape == ((4,) if family == "bert" else (2,))
        assert (theirs < -1e-3).all()
        # The model that is calibrated computes its queries and keys in float32.
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


def test_a_model_without_constants_is_not_run(monkeypatch):
    model = convert(stock_model("llama"), mechanism="performer", num_features=16)
    other = convert(stock_model("llama"), **SETTINGS)
    monkeypatch.setattr(type(model.base_model), "forward", None)
    assert calibrate(model, padded_batches()) == 0
    with pytest.raises(ValueError, match="no token to calibrate on"):
        calibrate(other, [])


def test_a_text_that_is_too_short_for_scores_is_said_not_to_be_fitted_to(llama, tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--no_verify"]
    code, text, err = run(*words, "--calibration_file", tmp_path / "text.txt")
    assert code == 0
    assert "warning: In 3 of 3 layers the scores of exact keys stay as they are" in err
    assert "with fewer the scores" not in err
    assert "Its scores are fitted" not in text
    report = json.loads((tmp_path / "out/conversion_report.json").read_text())
    assert report["calibration"] == {"inputs": None, "tokens": 0}
    assert "were fitted, to" not in (tmp_path / "out/README.md").read_text()


def test_convert_fits_the_scores_of_exact_keys_to_what_it_is_given(llama, tmp_path):
    """Python's documentation, or a file; fitted, they are no longer those of the newest keys."""
    (tmp_path / "text.txt").write_text("keys that later tokens look for are kept\n" * 200)
    fitted = {}
    for name, words in {"documentation": [], "file": ["--calibration_file", tmp_path / "text.txt"]}.items():
        report = convert_folder(llama, tmp_path / name, "--no_verify", *words)
        said = f"were fitted, to\n{report['figures']['calibrated on']}. `hf-linear-attention evaluate`"
        assert said in (tmp_path / name / "README.md").read_text()
        assert report["calibration"]["tokens"] >= 4 * 64
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        mechanism = model.model.layers[0].self_attn.linear_attention
        fitted[name] = torch.cat((mechanism.score_projection, mechanism.score_slope[:, None]), dim=1)
        assert fitted[name][:, :-1].abs().max() > 0.01
        assert not torch.equal(fitted[name][:, -1], torch.ones_like(fitted[name][:, -1]))
    assert not torch.allclose(fitted["documentation"], fitted["file"], rtol=0.1)


@pytest.mark.parametrize(("tokens", "rows"), [(16384, [4096] * 4), (4096, [1024] * 4), (600, [512, 512])])
def test_scores_are_fitted_on_long_rows(tokens, rows, tmp_path):
    """Where there are tokens for four; nothing asks for keys that are older than a row."""
    text, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    text.write_text("keys that later tokens look for are kept\n" * 4000)
    tokenizer.model_max_length = 8192
    config = convert(stock_model("llama", max_position_embeddings=8192), window_size=4, num_exact_keys=3).config
    found = calibration_data._text_batches(config, tokenizer, str(text), tokens)
    assert [length for batch in found for length in batch["attention_mask"].sum(1).tolist()] == rows
    config.linear_attention["num_exact_keys"] = 0
    found = calibration_data._text_batches(config, tokenizer, str(text), tokens)
    assert max(batch["input_ids"].shape[1] for batch in found) == 512


@pytest.mark.parametrize(("lines", "is_short"), [(200, True), (2000, False)])
def test_a_short_text_gets_a_warning(lines, is_short, llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("keys that later tokens look for are kept\n" * lines)
    words = ("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--no_verify")
    code, _, err = run(*words, "--calibration_file", text)
    assert code == 0
    assert ("with fewer the scores of exact keys fit other texts worse: give a longer text" in err) is is_short


def test_rows_without_memory_are_halved(llama, tmp_path, monkeypatch):
    """The fit starts again, with the same tokens; if no row fits, that is said, and nothing is left."""
    lengths, counts, fit = [], [], pipeline.calibrate

    def calibrate_in_little(model, batches):
        batches = list(batches)
        lengths.append(max(batch["input_ids"].shape[1] for batch in batches))
        counts.append(sum(int(batch["attention_mask"].sum()) for batch in batches))
        tokens = fit(model, batches[:1] if lengths[-1] > most else batches)
        if lengths[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return tokens

    monkeypatch.setattr(pipeline, "calibrate", calibrate_in_little)
    monkeypatch.setattr(pipeline, "SHORTEST_ROW", 16)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("keys that later tokens look for are kept\n" * 200)
    words = ("--model_name_or_path", llama, "--output_dir", out, "--no_verify", "--calibration_file", text)
    most = 0
    code, _, err = run(*words)
    assert code == 1
    assert "no memory for a row of 24 tokens: CUDA out of memory" in err
    assert not out.exists()
    most = 24
    del lengths[:], counts[:]
    code, _, err = run(*words)
    assert code == 0
    assert "no memory for a row of 48 tokens; rows are half as long now" in err
    assert lengths == [48, 24]
    assert counts[0] == counts[1]
    assert AutoModelForCausalLM.from_pretrained(out)(torch.arange(3, 43)[None]).logits.isfinite().all()


def test_keys_are_divided_between_layers_unless_their_number_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(key_division, "SHARES", SHARES)  # all of them
    llama = tmp_path / "long"
    save_twin(llama, "llama", max_position_embeddings=512)
    report = convert_folder(llama, tmp_path / "divided", "--no_verify")
    numbers = report["settings"]["num_exact_keys"]
    assert AutoConfig.from_pretrained(tmp_path / "divided").linear_attention["num_exact_keys"] == numbers
    assert len(numbers) == report["num_layers"]
    assert len({layer["state_bytes"] for layer in report["layers"]}) == len(set(numbers)) > 1
    given = convert_folder(llama, tmp_path / "given", "--no_verify", "--num_exact_keys", round(sum(numbers) / 3))
    assert given["settings"]["num_exact_keys"] == round(sum(numbers) / 3)


def test_a_model_computes_in_a_dtype_that_the_machine_has():
    """The weights are the same before and after, and so are scores that were fitted to a copy in float32."""
    model = convert(stock_model("llama"), window_size=4, num_sinks=1, num_exact_keys=3, num_features=8).bfloat16()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with devices.ready_to_compute(model):
        native = devices.multiplies_bfloat16(devices.computing_device())
        assert model.dtype == (torch.bfloat16 if native else torch.float32)
    assert model.state_dict().keys() == before.keys()
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_the_command_calibrates_and_a_reload_keeps_it(bert, tmp_path):
    report = convert_folder(bert, tmp_path / "out", *FAVOR)
    tokenizer = tiny_tokenizer()
    batches = [tokenizer(text, truncation=True, max_length=48, return_tensors="pt") for text in TEXTS]
    by_hand = convert(str(bert), **SETTINGS)
    tokens = calibrate(by_hand, [{"input_ids": batch.input_ids} for batch in batches])
    assert report["calibration"] == {"inputs": "built-in sentences", "tokens": tokens}
    assert f"| calibrated on | {tokens:,} tokens (built-in sentences) |" in (tmp_path / "out/README.md").read_text()
    result = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    for ours, theirs in zip(norm_weights(result), norm_weights(by_hand), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours < 0).all()
    again = tmp_path / "again"
    result.save_pretrained(again)
    assert torch.equal(torch.cat(norm_weights(AutoModel.from_pretrained(again))), torch.cat(norm_weights(result)))


def test_a_file_is_read_as_training_reads_it(llama, bert, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "CALIBRATION_TOKENS", 100)
    texts = [f"The number {number} follows the number {number - 1}." for number in range(1, 40)]
    rows = tmp_path / "texts.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--calibration_file", rows, "--no_verify")
    report = convert_folder(bert, tmp_path / "bert", *FAVOR, *words)
    tokenizer = tiny_tokenizer()
    ids, count = [], 0
    for text in texts:
        if count < 100:
            ids.append({"input_ids": tokenizer(text, return_tensors="pt").input_ids})
            count += ids[-1]["input_ids"].numel()
    assert report["calibration"] == {"inputs": "texts.jsonl", "tokens": count}
    by_hand = convert(str(bert), **SETTINGS)
    calibrate(by_hand, ids)
    result = AutoModelForMaskedLM.from_pretrained(tmp_path / "bert")
    # One padded batch there, text by text here.
    torch.testing.assert_close(torch.cat(norm_weights(result)), torch.cat(norm_weights(by_hand)), rtol=1e-5, atol=0)
    # A decoder reads a stream in blocks of its longest input, 48 tokens: three of them reach 100.
    report = convert_folder(llama, tmp_path / "llama", *FAVOR, *words)
    assert report["calibration"]["tokens"] == 144
    assert all((weight < 0).all() for weight in norm_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "llama")))


def test_a_vision_model_is_calibrated_on_images(tmp_path):
    from PIL import Image

    source, rows = tmp_path / "vit", tmp_path / "images.jsonl"
    save_twin(source, "vit", "AutoModelForImageClassification")
    words = ("--model_name_or_path", source, *FAVOR)
    code, text, err = run(*words, "--output_dir", tmp_path / "without")
    assert code == 0
    assert "warning: not calibrated" in err
    assert "calibrated  on nothing" in text
    for name, color in (("1.png", "red"), ("2.png", "blue"), ("3.jpg", "white")):
        Image.new("RGB", (20, 16), color).save(tmp_path / name)
    rows.write_text("".join(json.dumps({"image": name}) + "\n" for name in ("1.png", "2.png", "3.jpg")))
    report = convert_folder(source, tmp_path / "with", *FAVOR, "--calibration_file", rows)
    # 12 x 12 pixels in patches of 2 x 2, and the class token.
    assert report["calibration"] == {"inputs": "images.jsonl", "tokens": 3 * 37}
    without, with_ = (AutoModel.from_pretrained(tmp_path / name) for name in ("without", "with"))
    assert not torch.cat(norm_weights(without)).any()
    assert (torch.cat(norm_weights(with_)) < 0).all()
