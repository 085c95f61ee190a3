"""The figures of the report, computed again from two models, and damage that must be noticed."""

from __future__ import annotations

import functools
import json
import shutil
from pydoc_data.topics import topics

import pytest
import torch
from architectures import tiny_model
from checkpoints import tiny_tokenizer
from matrix import stock_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention._common.errors import ConversionError
from hf_linear_attention.conversion.plan import make_plan
from hf_linear_attention.conversion.result_text import describe_checks
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.conversion.verification import (
    TEXTS,
    compare_outputs,
    compare_tensors,
    exact_length,
    text_samples,
    verify,
)
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


SETTINGS = {"mechanism": "linear", "num_features": 16}


def test_the_figures_are_those_of_two_separate_models(llama, linear_llama):
    figures = json.loads((linear_llama / "conversion_report.json").read_text())["checks"]["student_against_teacher"]
    teacher = AutoModelForCausalLM.from_pretrained(llama)
    student = AutoModelForCausalLM.from_pretrained(linear_llama)
    tokenizer = tiny_tokenizer()
    errors, norms, divergence, same, tokens = 0.0, 0.0, 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, return_tensors="pt").input_ids
        with torch.no_grad():
            p, q = teacher(ids).logits, student(ids).logits
        errors += (p - q).square().sum().item()
        norms += p.square().sum().item()
        divergence += (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        tokens += ids.numel()
    assert figures["logits_error"] == pytest.approx((errors / norms) ** 0.5, rel=1e-3)
    assert figures["kl_to_teacher"] == pytest.approx(divergence / tokens, rel=1e-3)
    assert figures["top1_agreement"] == pytest.approx(same / tokens)
    assert "mean_embedding_cosine" not in figures


@pytest.fixture
def damaged(llama, linear_llama, tmp_path):
    """A function: change the weights of a result; returns its folder, its source and the plan."""

    def damage(change):
        folder = shutil.copytree(linear_llama, tmp_path / "out", dirs_exist_ok=True)
        weights = load_file(linear_llama / "model.safetensors")
        save_file(change(weights) or weights, folder / "model.safetensors", metadata={"format": "pt"})
        source = open_source(str(llama))
        return folder, source, make_plan(source, SETTINGS)

    return damage


def test_a_changed_base_tensor_is_noticed(damaged):
    folder, source, plan = damaged(lambda weights: None)
    counts = compare_tensors(folder, source, plan)
    assert (counts["equal"], counts["mechanism"]) == (len(plan.mapped), len(plan.new))
    with pytest.raises(ConversionError, match=r"1 tensors .* `model.norm.weight`"):
        compare_tensors(
            *damaged(lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"] + 1e-6}))
        )


def test_a_comparison_of_nothing_is_no_success(damaged):
    """No tensor of the source is in the result: whatever it holds, it is not the source's."""
    result = damaged(lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(ConversionError, match=rf"none of the {len(result[2].mapped)} tensors .* could be compared"):
        compare_tensors(*result)


def test_tensors_that_were_not_compared_or_were_cast_are_counted(damaged):
    def change(weights):
        del weights["model.norm.weight"]
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})

    folder, source, plan = damaged(change)
    counts = compare_tensors(folder, source, plan)
    assert (counts["equal"], counts["not_compared"]) == (len(plan.mapped) - 1, 1)
    assert counts["cast_to"] == ["bfloat16"]
    (line, *_) = describe_checks({"tensors": counts, "student_against_teacher": {}}, has_layers=True)
    assert "base tensors are equal after the cast to bfloat16, 1 not compared" in line


@torch.no_grad()
def test_the_figures_of_tokens_beyond_the_windows_are_given_apart():
    """Each built-in sample fits into the largest window, where the model is its original."""
    sizes = {"mechanism": "hybrid", "window_size": {"0": 120, "1-": 40}, "num_sinks": 2, "num_exact_keys": 0}
    stock, tokenizer = stock_model("llama", max_position_embeddings=512), tiny_tokenizer(512)
    assert exact_length(convert(stock, **sizes).config.linear_attention) == 122
    whole = convert(stock, mechanism="window", window_size=128, num_sinks=0)
    figures = compare_outputs(whole, tokenizer)
    assert figures["longest_sample"] <= 128
    assert figures["kl_to_teacher"] < 1e-6
    beyond = figures["beyond"]
    assert (beyond["first"], beyond["last"]) == (128, 383)
    text = "\n".join(text for _, text in sorted(topics.items()))
    ids = tokenizer(text[-40 * 384 :], return_tensors="pt").input_ids[:, :384]
    log_q, log_p = (m(ids).logits[0, 128:].double().log_softmax(-1) for m in (whole, stock.eval()))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert kl > 1e-5
    assert beyond["kl_to_teacher"] == pytest.approx(kl, rel=1e-3)  # float32
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    assert beyond["top1_agreement"] == pytest.approx(same)
    assert "beyond" not in compare_outputs(convert(stock, mechanism="linear"), tokenizer)


@torch.no_grad()
def test_what_a_fit_of_scores_gains_is_given():
    stock, tokenizer = stock_model("llama", max_position_embeddings=512), tiny_tokenizer(512)
    model = convert(stock, mechanism="hybrid", window_size=20, num_sinks=2, num_exact_keys=30)
    before = compare_outputs(model, tokenizer)["beyond"]
    assert "kl_with_newest_keys" not in before
    for layer in model.model.layers:
        layer.self_attn.linear_attention.score_projection.normal_()
    fitted = {name: x.clone() for name, x in model.state_dict().items()}
    after = compare_outputs(model, tokenizer)["beyond"]
    assert after["kl_with_newest_keys"] == pytest.approx(before["kl_to_teacher"], rel=1e-5)
    assert after["kl_to_teacher"] != pytest.approx(before["kl_to_teacher"], rel=1e-3)
    assert all(torch.equal(x, fitted[name]) for name, x in model.state_dict().items())


def test_numbers_that_are_not_finite_are_noticed(damaged):
    def spoil(weights):
        weights[next(key for key in weights if ".linear_attention." in key)].fill_(float("nan"))

    with pytest.raises(ConversionError, match="not finite"):
        verify(*damaged(spoil), None)


def test_padding_that_leaks_shows_in_the_figure(linear_llama, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(linear_llama)
    model.config.pad_token_id = -1  # the exports of LLaMA 1 have -1
    assert compare_outputs(model, tiny_tokenizer())["padding_difference"] < 1e-5
    stock = type(model.base_model).forward

    @functools.wraps(stock)  # its signature decides on which side the padding goes
    def without_mask(self, *args, attention_mask=None, **kwargs):
        return stock(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(type(model.base_model), "forward", without_mask)
    assert compare_outputs(model, tiny_tokenizer())["padding_difference"] > 1e-3


@pytest.mark.parametrize(
    ("model_type", "auto_class", "passes"),
    [
        # student and teacher on four samples, and the padded batch
        ("bart", "AutoModelForSeq2SeqLM", 2 * 4 + 1),
        ("opt", "AutoModelForCausalLM", 4 * 4 + 2),  # its head goes round the base model, which runs by itself then
    ],
)
def test_one_forward_pass_gives_hidden_states_and_logits(model_type, auto_class, passes, tmp_path):
    tiny_model(model_type, auto_class).save_pretrained(tmp_path)
    model = convert(str(tmp_path), **SETTINGS)
    calls = []
    last = list(linear_attention_modules(model).values())[-1]
    last.register_forward_hook(lambda module, args, output: calls.append(module))
    figures = compare_outputs(model, None)
    assert len(calls) == passes
    inputs = [{"input_ids": sample} for sample in text_samples(model.config, None)]
    if model.config.is_encoder_decoder:
        inputs = [{**texts, "decoder_input_ids": texts["input_ids"]} for texts in inputs]
    with torch.no_grad():
        student = torch.cat([model(**texts).logits for texts in inputs], dim=1)
        with softmax_attention(model):
            teacher = torch.cat([model(**texts).logits for texts in inputs], dim=1)
    # The same sums of squares in float32, taken text by text there.
    assert figures["logits_error"] == pytest.approx(((student - teacher).norm() / teacher.norm()).item(), rel=1e-4)
    assert figures["hidden_state_error"] != figures["logits_error"]
