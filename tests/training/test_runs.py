"""Whole runs on tiny models: what is learned, equality of splits, what is written."""

from __future__ import annotations

import json
import logging
import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe_of
from runs import changed, losses
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from hf_linear_attention import convert
from hf_linear_attention._common.folders import write_checksums
from hf_linear_attention.training import run as run_module
from hf_linear_attention.training.evaluation.evaluator import Evaluator
from hf_linear_attention.training.loop import OutOfMemoryError
from hf_linear_attention.training.losses.objectives import StudentWithObjectives
from hf_linear_attention.training.models import disable_dropout, parameter_groups


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def causal(llama, files):
    data = ["--train_file", f"{files}/train.jsonl", "--validation_file", f"{files}/valid.txt"]
    return ["--model_name_or_path", llama, "--task", "causal_lm", *data, "--max_length", "32"]


@pytest.mark.parametrize("family", [BertForSequenceClassification, GPT2LMHeadModel])
def test_without_dropout_a_model_in_training_mode_says_what_it_says_in_evaluation(family):
    model = family(family.config_class(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=50))
    inputs = {"input_ids": torch.arange(1, 20)[None]}
    expected = model.eval()(**inputs).logits
    model.train()
    assert not torch.equal(model(**inputs).logits, expected)
    disable_dropout(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert (getattr(model.config, "hidden_dropout_prob", None) or model.config.resid_pdrop) == 0.1


def test_another_learning_rate_and_length_hold_from_the_checkpoint_on(finetune, causal, caplog):
    """The schedule of the new options, at the step of the checkpoint; that of the old ones had ended there."""
    steps = ["--checkpointing_steps", 4, "--logging_steps", 1]
    finetune(*causal, *steps, "--max_train_steps", 4, "--learning_rate", "1e-2")
    events = finetune(
        *causal, *steps, "--max_train_steps", 8, "--learning_rate", 8e-3, "--resume_from_checkpoint=latest"
    )
    assert [event["learning_rate"] for event in losses(events)][4:] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
    assert "learning_rate: 0.01 -> 0.008" in caplog.text


def test_an_optimizer_of_another_form_is_refused(finetune, causal, tmp_path, capsys):
    finetune(*causal, "--max_train_steps", 1, "--checkpointing_steps", 1)
    checkpoint = tmp_path / "out" / "checkpoint-1"
    for content in ({"optimizer": {"state": 3}}, [1], {"optimizer": {"state": {}, "param_groups": []}}):
        torch.save(content, checkpoint / "optimizer.pt")
        write_checksums(checkpoint)
        finetune(*causal, "--max_train_steps", 2, "--resume_from_checkpoint=latest", expect=2)
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert re.search(r"checkpoint-1 cannot be used .*; resume from another checkpoint, or remove this one", error)


@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_weights_have_the_dtype_of_their_model_and_are_float32_until_then(
    asked, finetune, causal, llama_teacher, tmp_path, monkeypatch
):
    """In mixed precision too; `test_every_causal_preset_runs` has stages."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as `accelerate launch` does
    student, out = tmp_path / "student", tmp_path / "out"
    convert(llama_teacher, mechanism="linear").bfloat16().save_pretrained(student)
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(student)
    config = json.loads((student / "config.json").read_text())
    assert config.pop("dtype") == "bfloat16"  # where the config does not tell it, the weights do
    (student / "config.json").write_text(json.dumps(config))
    models = ["--model_name_or_path", student, "--teacher_name_or_path", llama_teacher, "--max_eval_tokens", 40]
    options = ["--max_train_steps", 6, "--checkpointing_steps", 6, "--learning_rate", "1e-2", "--logging_steps", 2]
    options += ["--dtype", asked] * (asked == "float32")
    events = losses(finetune(*causal, *models, *options))
    assert events[-1]["loss"] < events[0]["loss"]
    assert {value.dtype for value in weights(out).values()} == {getattr(torch, asked)}
    assert AutoConfig.from_pretrained(out).dtype == getattr(torch, asked)
    assert {value.dtype for value in weights(out / "checkpoint-6").values()} == {torch.float32}
    trained = AutoModelForCausalLM.from_pretrained(out / "checkpoint-6").to(getattr(torch, asked)).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in weights(out).items())


def test_where_there_is_no_memory_rows_take_turns_and_then_get_shorter(
    finetune, causal, tmp_path, monkeypatch, caplog, capsys
):
    """The run is the one that asks for what was left, also when it resumes."""
    forward = StudentWithObjectives.forward

    def in_little(self, batch, *args):
        if batch["input_ids"].numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, *args)

    monkeypatch.setattr(StudentWithObjectives, "forward", in_little)
    monkeypatch.setattr("hf_linear_attention.training.loop.SHORTEST_ROW", 8)
    steps = ["--max_train_steps", 4, "--checkpointing_steps", 2, "--logging_steps", 1, "--per_device_train_batch_size"]
    folders = [tmp_path / name for name in ("asked", "left", "resumed", "never", "later")]
    most = 16
    events = finetune(*causal, *steps, 4, output_dir=folders[0])
    turns = "there is no memory for 4 rows at once; a step takes 2 at a time now"
    shorter = "there is no memory for a row of 32 tokens; rows are half as long now"
    assert [turns in caplog.text, shorter in caplog.text] == [True, True]
    assert [event["step"] for event in events] == [0, 1, 2, 3, 4, 4]
    left = [*steps, 1, "--gradient_accumulation_steps", 8, "--max_length", 16]
    assert losses(finetune(*causal, *left, output_dir=folders[1])) == losses(events)
    shutil.copytree(folders[0] / "checkpoint-2", folders[2] / "checkpoint-2")
    caplog.clear()
    finetune(*causal, *steps, 4, "--resume_from_checkpoint", "latest", output_dir=folders[2])
    assert "there is no memory" not in caplog.text
    assert not changed(folders[0], folders[1])
    assert not changed(folders[0], folders[2])
    assert "| max_length | 16 |" in (folders[0] / "README.md").read_text(encoding="utf-8")
    most = 4
    finetune(*causal, *steps, 4, output_dir=folders[3], expect=1)
    assert "not enough memory (CUDA out of memory" in capsys.readouterr().err
    resume, most = ["--checkpointing_steps", 2, "--resume_from_checkpoint", "latest"], 256
    finetune(*causal, "--max_train_steps", 2, *resume[:2], output_dir=folders[4])
    caplog.clear()
    most = 32
    finetune(*causal, "--max_train_steps", 4, *resume, output_dir=folders[4])
    assert "there is no memory for 8 rows at once" in caplog.text
    most = 16  # another length is another run
    finetune(*causal, "--max_train_steps", 6, *resume, output_dir=folders[4], expect=1)
    assert "not enough memory (CUDA out of memory" in capsys.readouterr().err


def test_on_several_processes_a_lack_of_memory_is_an_error(tmp_path, monkeypatch):
    """One that began again alone would wait for the others."""
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    accelerator = types.SimpleNamespace(num_processes=2)

    def without_memory(*_):
        raise OutOfMemoryError(cause, rows=8, length=512)

    monkeypatch.setattr(run_module, "start_processes", lambda recipe: accelerator)
    monkeypatch.setattr(run_module, "_prepare_folder", lambda *_: None)
    monkeypatch.setattr(run_module, "_run", without_memory)
    with pytest.raises(torch.OutOfMemoryError) as found:
        run_module.run(recipe_of("causal_lm", output_dir=str(tmp_path / "out")))
    assert found.value is cause


def test_rows_stay_longer_than_what_is_exact(finetune, converted, llama_teacher, files, monkeypatch, caplog, capsys):
    """In shorter ones nothing would be learnt of far keys."""
    monkeypatch.setattr("hf_linear_attention.training.loop.SHORTEST_ROW", 8)
    monkeypatch.setattr(StudentWithObjectives, "forward", lambda *_: torch.empty(2**60))
    student = converted(llama_teacher, mechanism="hybrid", window_size=20, num_sinks=0, num_exact_keys=0)
    data = ["--train_file", f"{files}/train.jsonl", "--max_length", "96", "--per_device_train_batch_size", 1]
    finetune("--model_name_or_path", student, "--task", "causal_lm", *data, "--max_train_steps", 1, expect=1)
    assert "not enough memory" in capsys.readouterr().err
    assert [f"row of {length} tokens" in caplog.text for length in (96, 48, 24)] == [True, True, False]


def test_a_text_shorter_than_a_row_is_named(finetune, causal, tmp_path, caplog):
    (tmp_path / "few.txt").write_text("few words", encoding="utf-8")
    finetune(*causal, "--train_file", tmp_path / "few.txt", "--max_train_steps", 1)
    assert "fewer than the 32 of a row, so nothing is learnt of longer inputs" in caplog.text
    caplog.clear()
    finetune(*causal, "--max_train_steps", 1, "--overwrite_output_dir")
    assert "of a row" not in caplog.text


def test_where_there_is_no_memory_fewer_rows_are_evaluated_at_once(finetune, causal, monkeypatch, caplog):
    evaluate, sizes = Evaluator.__call__, []

    def in_little(self, model, batches):
        batches = list(batches)
        sizes.append(max(len(batch["input_ids"]) for batch in batches))
        if sizes[-1] > 2:
            model.eval()
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return evaluate(self, model, batches)

    whole = finetune(*causal, "--max_train_steps", 2)
    monkeypatch.setattr(Evaluator, "__call__", in_little)
    parted = finetune(*causal, "--max_train_steps", 2, "--overwrite_output_dir")
    assert sizes == [8, 4, 2, 2]
    assert "there is no memory to evaluate 8 rows at once; evaluations take 4 now" in caplog.text
    for one, other in zip(whole, parted, strict=True):
        for name in one.keys() - {"tokens_per_second"}:
            assert other[name] == pytest.approx(one[name], rel=1e-5)  # float32 in batches of other sizes


def test_overwriting_forgets_the_earlier_run(finetune, causal, tmp_path):
    small = ["--max_train_steps", 2, "--checkpointing_steps", 1, "--max_eval_tokens", 20]
    finetune(*causal, *small)
    (tmp_path / "out" / "notes.txt").write_text("mine", encoding="utf-8")
    events = finetune(*causal, "--max_train_steps", 1, "--max_eval_tokens", 20, "--overwrite_output_dir")
    assert [event["step"] for event in events] == [0, 1, 1]
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert (tmp_path / "out" / "notes.txt").exists()


def test_final_folder_loads_and_holds_sidecars(finetune, bert, bert_teacher, files, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(bert, source)
    (source / "1_Pooling").mkdir()
    converted = {"base_model": "bert", "figures": {"weights": 3}, "quality": {"cosine": 0.123}}
    sidecars = {
        "modules.json": [{"path": "", "type": "T"}, {"path": "1_Pooling", "type": "P"}],
        "sentence_bert_config.json": {"max_seq_length": 64},
        "1_Pooling/config.json": {},
    }
    for name, content in {**sidecars, "conversion_report.json": converted}.items():
        (source / name).write_text(json.dumps(content), encoding="utf-8")
    models = ["--model_name_or_path", source, "--teacher_name_or_path", bert_teacher, "--task", "embedding"]
    data = ["--train_file", files / "train.txt", "--validation_file", files / "valid.txt"]
    events = finetune(*models, *data, "--max_train_steps", 12, "--learning_rate", "6e-3")
    cosines = [event["eval_cosine"] for event in events if "eval_cosine" in event]
    assert cosines[-1] > cosines[0] + 0.1
    out = tmp_path / "out"
    for name in sidecars:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    del converted["quality"]  # of the model before this training
    assert json.loads((out / "conversion_report.json").read_text(encoding="utf-8")) == converted
    assert not list(out.glob(".incomplete*"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("# out", "cosine", "train.txt", "hidden_state_weight", "max_train_steps"))
    assert not any(word in card for word in ("mlm_probability", "task_loss_weight", "output_dir"))
    inputs = AutoTokenizer.from_pretrained(out)("hello there", return_tensors="pt")
    model = AutoModel.from_pretrained(out)
    assert torch.equal(
        model.state_dict()["embeddings.word_embeddings.weight"], weights(out)["embeddings.word_embeddings.weight"]
    )
    assert model(**inputs).last_hidden_state.shape[-1] == 32


def test_a_new_classifier_learns_and_keeps_its_class_names(finetune, bert, files, tmp_path):
    data = ["--train_file", files / "train.tsv", "--validation_file", files / "valid.tsv"]
    options = ["--task", "sequence_classification", "--max_train_steps", 24, "--learning_rate", "3e-3"]
    events = finetune("--model_name_or_path", bert, *data, *options)
    assert events[-1]["eval_samples"] == 21
    assert events[-1]["eval_accuracy"] > 0.7
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.label2id == {"long": 0, "short": 1}


def test_a_run_that_would_learn_its_data_by_heart_is_warned_of(finetune, causal, tmp_path, caplog):
    (tmp_path / "short.txt").write_text("A text of a few words.")
    words = [*causal, "--train_file", tmp_path / "short.txt", "--max_eval_tokens", 20]
    words += ["--per_device_train_batch_size", 1]
    with caplog.at_level(logging.WARNING):
        finetune(*words, "--max_train_tokens", 100, output_dir=tmp_path / "few")
        assert "by heart" not in caplog.text
        finetune(*words, "--max_train_tokens", 2000, output_dir=tmp_path / "many")
    (said,) = [text for text in caplog.messages if "by heart" in text]
    data, budget, epochs = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said))
    assert epochs > 20
    assert 2000 <= budget < 2000 + data
    assert data * epochs == budget


def test_few_tokens_are_divided_into_enough_steps(finetune, causal, tmp_path):
    limits = ["--max_train_tokens", 1000, "--per_device_train_batch_size", 16, "--logging_steps", 1]
    limits += ["--max_eval_tokens", 20]

    def steps(name: str, *more: Any) -> int:
        return len(losses(finetune(*causal, *limits, *more, output_dir=tmp_path / name)))

    few = steps("few")
    assert few < 8 <= steps("enough", "--min_train_steps", 8) <= 16
    assert steps("with two to accumulate", "--min_train_steps", 8, "--gradient_accumulation_steps", 2) in range(8, 17)
    assert steps("still few", "--min_train_steps", 1) == few  # batches do not grow
    alone = steps("alone", "--min_train_steps", 10**6)
    assert alone == steps("one text", "--per_device_train_batch_size", 1)
    finetune(*causal, "--min_train_steps", 8, expect=2)  # without a number of tokens


def test_mechanism_parameters_have_their_own_rate_and_can_be_trained_alone(llama):
    def groups(**options: Any) -> list[dict[str, Any]]:
        model = LlamaForCausalLM.from_pretrained(llama)
        model.model.layers[0].self_attn.linear_attention = nn.Linear(4, 4)
        plan = {"learning_rate": 1e-4, "mechanism_learning_rate": 1e-2, "weight_decay": 0.1}
        found = parameter_groups(model, recipe_of(**plan, **options))
        assert sum(len(group["params"]) for group in found) == sum(p.requires_grad for p in model.parameters())
        return found

    for group in groups():
        assert group["lr"] == (1e-2 if group["mechanism"] else 1e-4)
        assert group["weight_decay"] == (0.1 if group["params"][0].dim() > 1 else 0)
        assert len({p.dim() > 1 for p in group["params"]}) == 1
    assert sum(len(group["params"]) for group in groups(trainable="mechanism")) == 2
