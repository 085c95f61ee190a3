"""Options of the loop: recomputed activations, trackers and the plot, adapters."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
import types

import pytest
import torch
from accelerate.utils import LoggerType
from runs import changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attention.training import checkpoints, models
from hf_linear_attention.training.models import add_adapters, merged_state_dict, share_frozen_weights
from hf_linear_attention.training.recipe import ModelArguments
from hf_linear_attention.training.tracking import plot_metrics


@pytest.fixture
def student(converted, llama_teacher):
    return converted(llama_teacher, mechanism="hybrid", window_size=4, num_features=8)


@pytest.fixture
def causal(student, files):
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_steps", 4, "--logging_steps", 1]
    return ["--model_name_or_path", student, "--task", "causal_lm", *data, "--learning_rate", "1e-2"]


DISTILLATION = ["--logits_kl_weight", 1, "--hidden_state_weight", 1]
TRANSFER = ["--attention_transfer_weight", 1, "--trainable", "mechanism"]


@pytest.mark.long
@pytest.mark.parametrize("objectives", [DISTILLATION, TRANSFER], ids=["distillation", "transfer"])
def test_recomputed_activations_change_nothing(objectives, finetune, causal, llama, tmp_path, monkeypatch):
    """Bit by bit, because recomputation does the same operations. Attention transfer sees every layer once, and keeps
    nothing that could be recomputed."""
    teacher = ["--teacher_name_or_path", llama] if objectives is DISTILLATION else []
    recomputed: list[int] = []
    checkpointed = torch.utils.checkpoint.checkpoint
    count = lambda *a, **k: recomputed.append(1) or checkpointed(*a, **k)  # noqa: E731 (one line of bookkeeping)
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", count)
    plain = finetune(*causal, *objectives, *teacher, output_dir=tmp_path / "plain")
    assert not recomputed
    lean = finetune(*causal, *objectives, *teacher, "--gradient_checkpointing", output_dir=tmp_path / "lean")
    assert len(recomputed) == (4 * 2 if objectives is DISTILLATION else 0)  # steps x layers
    for mine, yours in zip(lean, plain, strict=True):
        assert {**mine, "tokens_per_second": 0} == {**yours, "tokens_per_second": 0}
    assert not changed(tmp_path / "plain", tmp_path / "lean")


def test_the_losses_go_to_trackio_and_are_drawn(finetune, causal, tmp_path, monkeypatch):
    """By accelerate's own tracker, on a module with the four things of trackio that it calls."""
    runs, logged, settings, finished = [], [], {}, []
    module = types.ModuleType("trackio")
    module.config = types.SimpleNamespace(update=lambda values, allow_val_change: settings.update(values))
    run = types.SimpleNamespace(
        log=lambda values, step=None: logged.append({"step": step, **values}), finish=lambda: finished.append(True)
    )
    module.init = lambda project: runs.append(project) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [LoggerType.TRACKIO])
    monkeypatch.setattr(checkpoints, "plot_metrics", plot_metrics)  # which other tests leave out
    events = finetune(*causal, "--report_to", "trackio")
    assert logged == events
    assert (runs, finished, settings["max_length"]) == (["out"], [True], 32)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "![Loss by tokens](loss.png)" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_merging_adapters_keeps_the_function_and_leaves_the_model_alone(student):
    pytest.importorskip("peft")
    inputs = {"input_ids": torch.arange(5, 25)[None]}
    model, merged = (AutoModelForCausalLM.from_pretrained(student).eval() for _ in range(2))
    add_adapters(model, ModelArguments("m", "causal_lm", lora_target_modules="attention"))
    before = model(**inputs).logits
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts as 0
            parameter.data.normal_(std=0.05)
    expected = model(**inputs).logits
    assert (expected - before).abs().max() > 1e-3
    merged.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-4, atol=1e-4)  # W x + B A x in another order
    assert torch.equal(model(**inputs).logits, expected)


def test_what_adapters_freeze_stays_in_bfloat16(finetune, causal, student, llama_teacher, monkeypatch, tmp_path):
    """Where the device multiplies it, and teacher and merged weights are the same tensors; the rest is float32."""
    pytest.importorskip("peft")
    for folder in (source := tmp_path / "source", half := tmp_path / "half"):
        model = AutoModelForCausalLM.from_pretrained(llama_teacher if folder == source else student)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(folder)
    monkeypatch.setattr(models, "multiplies_bfloat16", lambda device: True)
    loaded = []
    share = lambda student, teacher: share_frozen_weights(student, teacher) or loaded.append((student, teacher))  # noqa: E731
    monkeypatch.setattr("hf_linear_attention.training.run.share_frozen_weights", share)
    options = ["--model_name_or_path", half, "--teacher_name_or_path", source, "--logits_kl_weight", 1]
    options += ["--lora_target_modules", "attention", "--dtype", "float32"]
    events = finetune(*causal, *options, "--use_peft", output_dir=tmp_path / "out")
    assert all(math.isfinite(event["loss"]) for event in events if "loss" in event)
    ((trained, teacher),) = loaded
    dtypes = {(x.requires_grad, x.dtype) for x in trained.parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    base = trained.model.layers[0].self_attn.q_proj.base_layer.weight
    assert base.data_ptr() == teacher.model.layers[0].self_attn.q_proj.weight.data_ptr()
    merged, frozen = merged_state_dict(trained), trained.model.layers[0].mlp.up_proj.weight
    assert merged["model.layers.0.mlp.up_proj.weight"].data_ptr() == frozen.data_ptr()
    assert merged["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    state = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(half / "model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert state.keys() == before.keys()  # tied weights once
    for name, value in before.items():
        if "mlp" in name:
            assert torch.equal(state[name], value.float())
    adapter = trained.model.layers[0].self_attn.q_proj
    product = adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight * adapter.scaling["default"]
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(state[name], before[name].float() + product)
    assert product.any()


def test_what_is_frozen_has_one_dtype_with_the_rest_elsewhere(student, monkeypatch, tmp_path):
    """In float32: without adapters, in shards of FSDP2, of a checkpoint in float32, where bfloat16 is emulated."""
    AutoModelForCausalLM.from_pretrained(student).bfloat16().save_pretrained(tmp_path)
    found = {}
    for path, has_adapters, native, is_fsdp2 in itertools.product((tmp_path, student), *[(True, False)] * 3):
        monkeypatch.setattr(models, "multiplies_bfloat16", lambda device, native=native: native)
        recipe = types.SimpleNamespace(model=ModelArguments(str(path), "causal_lm", use_peft=has_adapters))
        found[path, has_adapters, native, is_fsdp2] = models.frozen_dtype(recipe, "cpu", is_fsdp2)
    assert found.pop((tmp_path, True, True, False)) == torch.bfloat16
    assert set(found.values()) == {torch.float32}


def test_a_resumed_run_is_the_same_bit_by_bit_and_saves_the_best_adapters(
    finetune, causal, student, files, tmp_path, monkeypatch
):
    """The figures are replaced, the weights are the runs' own: step 2 of 4 is best, and its checkpoint is merged."""
    pytest.importorskip("peft")
    figures = iter([9.0, 1.0, 2.0, 2.0])  # before training, which does not count, and of steps 2, 4 and again 4
    compute = lambda *_, **__: {"nats_per_token": next(figures)}  # noqa: E731 (one line of bookkeeping)
    monkeypatch.setattr("hf_linear_attention.training.evaluation.scores.TokenLoss._compute", compute)
    options = [*causal, "--use_peft", "--trainable", "adapter", "--lora_target_modules", "attention"]
    options += ["--validation_file", files / "valid.txt", "--max_eval_tokens", 60]
    options += ["--checkpointing_steps", 2, "--eval_steps", 2, "--load_best_model_at_end"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    finetune(*options, output_dir=whole)
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    finetune(*options, "--resume_from_checkpoint", "latest", output_dir=parted)
    assert not changed(whole / "checkpoint-4", parted / "checkpoint-4")
    projections = {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in "qkvo"}
    assert changed(student, whole) == projections
    for out in (whole, parted):
        assert not changed(out / "checkpoint-2", out)
        assert changed(out / "checkpoint-4", out)
        report = json.loads((out / "training_report.json").read_text(encoding="utf-8"))
        assert report["runs"][-1]["metrics"]["eval_nats_per_token"] == 1.0
