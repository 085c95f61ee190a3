"""Models, teachers and options that do not fit together: the user gave them, so the exit code is 2."""

from __future__ import annotations

import pytest
from checkpoints import save_twin
from faults import assert_nothing_written, assert_refused, convert, finetune


@pytest.fixture(scope="session")
def others(tmp_path_factory, bert, vit):
    """Teachers that do not suit a Llama with 64 tokens and an E of 16."""
    folder = tmp_path_factory.mktemp("others")
    save_twin(folder / "vocabulary", "llama", vocab_size=80)
    save_twin(folder / "width", "llama", hidden_size=24)
    return {"vocabulary": folder / "vocabulary", "width": folder / "width", "encoder": bert, "images": vit}


ASKED = {
    "a teacher with other tokens": (["--teacher_name_or_path", "vocabulary"], "vocab_size"),
    "a wider teacher": (["--teacher_name_or_path", "width", "--hidden_state_weight", 1], "hidden_size"),
    "a teacher that sees both sides": (["--teacher_name_or_path", "encoder"], "both sides"),
    "a teacher for images": (["--teacher_name_or_path", "images"], ""),
    "no modules to adapt": (["--use_peft", "--lora_target_modules", "nothing"], "lora_target_modules"),
    "a pattern for nothing": (["--freeze_pattern", "nothing"], "freeze_pattern"),
    "a pattern for everything": (["--freeze_pattern", "."], "freeze_pattern"),
    "no learned mechanism": (["--trainable", "mechanism"], "trainable mechanism"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), ASKED.values(), ids=ASKED.keys())
def test_training(linear_llama, llama, others, files, tmp_path, words, said):
    model = llama if said == "trainable mechanism" else linear_llama
    words = [others.get(word, word) for word in words]
    given = ["--task", "causal_lm", "--model_name_or_path", model, "--train_file", files / "good.jsonl"]
    assert_refused(finetune(*given, "--output_dir", tmp_path / "out", "--max_train_steps", 1, *words), said)
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "attention"),
    [("feature_map", "elu1", "linear"), ("redraw_interval", 3, "performer"), ("features", "favor++", "performer")],
)
def test_an_option_of_another_mechanism_is_suggested(llama, tmp_path, option, value, attention):
    result = convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", f"--{option}", value)
    assert_refused(result, option, f"`--attention {attention}`")
    assert_nothing_written(tmp_path)
