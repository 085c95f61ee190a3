"""The teacher's logits, asked for by row, are the teacher's logits.

Then a teacher of few positions teaches a student that reads longer texts: every window, every border, whole runs.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

from hf_linear_attention import convert
from hf_linear_attention.training.losses.teacher import Teacher, TeacherWindows, windows_for


def batch_of_two() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.randint(5, 290, (2, 9)), "attention_mask": mask}


def check(model: PreTrainedModel, separable: bool) -> None:
    teacher = Teacher(model, nullcontext, layers="all")
    batch = batch_of_two()
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True)
    outputs = teacher(batch)
    rows = torch.tensor([7, 0, 3, 1]) if expected.logits.dim() == 3 else torch.tensor([1, 0])
    assert outputs.logits is not None
    torch.testing.assert_close(outputs.logits(rows), expected.logits.flatten(0, -2)[rows])
    assert (teacher.by_row.layer is not None) == separable
    for mine, yours in zip(outputs.hidden_states, expected.hidden_states[1:], strict=True):
        torch.testing.assert_close(mine, yours)
    torch.testing.assert_close(model(**batch).logits, expected.logits)  # no hook is left behind


@pytest.mark.parametrize(
    ("model_class", "fixture", "separable"),
    [
        (LlamaForCausalLM, "llama_teacher", True),
        (BertForMaskedLM, "masked_teacher", True),
        (BertForSequenceClassification, "classifier", False),
    ],
)
def test_logits_by_row(model_class: type[PreTrainedModel], fixture: str, separable: bool, request) -> None:
    check(model_class.from_pretrained(request.getfixturevalue(fixture)).eval(), separable)


def test_teacher_never_trains(llama_teacher: str) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_teacher).train()
    teacher = Teacher(model, nullcontext, layers=None)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    outputs = teacher(batch_of_two())
    assert outputs.logits is not None
    assert not outputs.logits(torch.tensor([0])).requires_grad


SIZE, BEFORE, AFTER = 16, 1, 2  # the positions of the teacher; special tokens before and after every text


@pytest.fixture(scope="module")
def teacher() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertModel(BertConfig(vocab_size=50, max_position_embeddings=SIZE, initializer_range=0.3, **sizes)).eval()


def text(length: int) -> torch.Tensor:
    ids = torch.randint(10, 50, (length,), generator=torch.Generator().manual_seed(length))
    ids[:BEFORE], ids[-AFTER:] = 3, torch.tensor([4, 5])
    return ids


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([text(length) for length in lengths], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "index": torch.arange(len(lengths))}


def expected(teacher: BertModel, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states of one text, token by token from the window in which it is farthest from both ends."""
    most, inner = SIZE - BEFORE - AFTER, ids[BEFORE : len(ids) - AFTER]
    starts = [*range(0, max(0, len(inner) - most), most // 2), max(0, len(inner) - most)]
    runs = []
    for start in starts:
        part = torch.cat((ids[:BEFORE], inner[start : start + most], ids[-AFTER:]))
        with torch.no_grad():
            runs.append(teacher(input_ids=part[None]).last_hidden_state[0])
    rows = []
    for place in range(len(inner)):
        # How far the token is from the nearer end of each window; the ends of the text are no ends.
        margins = [
            min(
                place - start if start > 0 else len(ids),
                start + most - 1 - place if start + most < len(inner) else len(ids),
            )
            for start in starts
        ]
        best = max(margins)
        # Of two windows in which it is equally far, the later one.
        number = max(n for n, margin in enumerate(margins) if margin == best)
        rows.append(runs[number][BEFORE + place - starts[number]])
    first = torch.stack([run[:BEFORE] for run in runs]).mean(0)
    last = torch.stack([run[len(run) - AFTER :] for run in runs]).mean(0)
    return torch.cat((first, torch.stack(rows), last))


@pytest.mark.parametrize("lengths", [[17], [16, 29, 4], [23, 90, 41, 16]])
def test_every_token_takes_the_window_in_which_it_is_most_central(teacher: BertModel, lengths: list[int]) -> None:
    outputs = Teacher(teacher, nullcontext, "last", TeacherWindows(SIZE, BEFORE, AFTER))(batch_of(lengths))
    (states,) = outputs.hidden_states
    for row, length in enumerate(lengths):
        torch.testing.assert_close(states[row, :length], expected(teacher, text(length)), atol=2e-6, rtol=1e-5)
        assert not states[row, length:].any()


def test_texts_that_fit_are_read_as_they_are(teacher: BertModel) -> None:
    batch = batch_of([SIZE, 9])
    windows = TeacherWindows(SIZE, BEFORE, AFTER)
    mine, yours = (Teacher(teacher, nullcontext, "all", use)(batch) for use in (windows, None))
    for a, b in zip(mine.hidden_states, yours.hidden_states, strict=True):
        assert torch.equal(a, b)


def test_which_teacher_needs_windows(bert: str, llama: str) -> None:
    tokenizer, teacher = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert)
    assert windows_for(teacher, tokenizer, 128) is None
    assert windows_for(teacher, tokenizer, 129) == TeacherWindows(128, 0, 0)
    assert windows_for(AutoModel.from_pretrained(llama), tokenizer, 4096) is None  # rotary


def test_a_student_learns_beyond_the_positions_of_its_teacher(
    finetune, bert: str, bert_teacher: str, tmp_path: Path
) -> None:
    documents = [topics[name] for name in sorted(topics) if len(topics[name]) > 1500][:12]
    for name, part in (("train", documents[:8]), ("valid", documents[8:])):
        lines = "".join(json.dumps({"text": document[:1500]}) + "\n" for document in part)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    student = tmp_path / "student"
    convert(bert, max_position_embeddings=400).save_pretrained(student)
    shutil.copy(Path(bert, "tokenizer.json"), student)
    shutil.copy(Path(bert, "tokenizer_config.json"), student)
    models = ["--model_name_or_path", student, "--teacher_name_or_path", bert_teacher, "--task", "embedding"]
    data = ["--train_file", tmp_path / "train.jsonl", "--validation_file", tmp_path / "valid.jsonl"]
    options = ["--max_length", 400, "--max_train_steps", 12, "--per_device_train_batch_size", 2]
    events = finetune(*models, *data, *options, "--learning_rate", "3e-3")
    cosines = [event["eval_cosine"] for event in events if "eval_cosine" in event]
    assert cosines[-1] > cosines[0] + 0.05
    name = "embeddings.position_embeddings.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (student, tmp_path / "out"))
    assert ((before - after).abs().amax(1)[128:400] > 0).any()
