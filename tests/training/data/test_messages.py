"""Conversations: what is learned of them, by which template, and whether answers end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attention import convert
from hf_linear_attention._common.errors import DataError, TrainingError
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.processors import load_processor
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.recipe_parser import parse_options


TEMPLATE = (
    "{% for message in messages %}{{ '<mask>' + message['role'] + ' ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<mask>assistant ' }}{% endif %}"
)
ROWS: list[list[tuple[str, str]]] = [
    [("user", "Hello."), ("assistant", "Good morning.")],
    [
        ("system", "Be short."),
        ("user", "Who?"),
        ("assistant", "Me."),
        ("user", "Where?"),
        ("assistant", "Here, there."),
    ],
    [("user", "What is a list?"), ("assistant", "A row of things.")],
]


@pytest.fixture
def chat(llama_teacher, tmp_path):
    """A converted model and its original with a chat template, and a file of conversations."""
    tokenizer = AutoTokenizer.from_pretrained(llama_teacher)
    tokenizer.chat_template = TEMPLATE
    paths = {name: tmp_path / name for name in ("original", "student", "data.jsonl")}
    original = AutoModelForCausalLM.from_pretrained(llama_teacher)
    original.save_pretrained(paths["original"])
    convert(original, mechanism="hybrid", window_size=4).save_pretrained(paths["student"])
    for name in ("original", "student"):
        tokenizer.save_pretrained(paths[name])
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in ROWS]
    write_lines(paths["data.jsonl"], rows)
    return paths


def examples_of(chat: dict[str, Path], *more: Any) -> Any:
    words = ["--task", "causal_lm", "--model_name_or_path", chat["student"], "--train_file", chat["data.jsonl"], *more]
    recipe = parse_options([str(word) for word in (*words, "--output_dir", "o")])
    return load_data(recipe, load_processor(recipe)).train


def test_answers_and_what_ends_them_are_learned(chat):
    tokenizer = AutoTokenizer.from_pretrained(chat["student"])
    found = examples_of(chat)
    for number, row in enumerate(ROWS):
        example = found[number]
        ids, labels = example["input_ids"], example["labels"]
        assert tokenizer.decode(ids) == "".join(f"<mask>{role} {text}</s>" for role, text in row)
        answers = "".join(f"{text}</s>" for role, text in row if role == "assistant")
        assert tokenizer.decode(labels[labels != IGNORED]) == answers
        assert (labels[1:] != IGNORED).tolist() == example["loss_mask"][:-1].astype(bool).tolist()


def test_the_loss_is_that_of_the_answers(chat, finetune):
    """KL and cross-entropy of the tokens that predict an answer, and of no other."""
    options = ["--task", "causal_lm", "--model_name_or_path", chat["student"], "--train_file", chat["data.jsonl"]]
    options += ["--teacher_name_or_path", chat["original"], "--logits_kl_weight", 1, "--task_loss_weight", 1]
    events = finetune(*options, "--max_train_steps", 1, "--per_device_train_batch_size", 3, "--logging_steps", 1)
    found, sums, count = examples_of(chat), {"task_loss": 0.0, "logits_kl": 0.0}, 0
    models = [AutoModelForCausalLM.from_pretrained(chat[name]).eval() for name in ("student", "original")]
    for number in range(len(found)):
        ids = torch.tensor(found[number]["input_ids"])[None]
        with torch.no_grad():
            mine, yours = (model(ids).logits[0].log_softmax(-1) for model in models)
        for place in (found[number]["labels"] != IGNORED).nonzero()[0]:
            sums["task_loss"] -= mine[place - 1, ids[0, place]].item()
            sums["logits_kl"] += F.kl_div(mine[place - 1], yours[place - 1], log_target=True, reduction="sum").item()
            count += 1
    for name, total in sums.items():
        assert next(event[name] for event in events if name in event) == pytest.approx(total / count, rel=1e-4)


def test_what_is_no_conversation_is_refused(chat, tmp_path):
    good = chat["data.jsonl"].read_text(encoding="utf-8")
    chat["data.jsonl"].write_text(good + '{"messages": [\n{"messages": "Hello."}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"2 bad row.*line 4: is not a JSON object; line 5: `messages` is 'Hello.'"):
        examples_of(chat)
    write_lines(chat["data.jsonl"], [{"messages": [{"role": "user", "content": "Hello."}]}])
    with pytest.raises(DataError, match="no message has the role `assistant`"):
        examples_of(chat)
    chat["data.jsonl"].write_text(good, encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(chat["student"])
    for template, problem in (("{{ messages | length }}", "changes earlier messages"), (None, "with a chat template")):
        tokenizer.chat_template = template
        (chat["student"] / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(chat["student"])
        with pytest.raises(TrainingError, match=problem):
            examples_of(chat)
