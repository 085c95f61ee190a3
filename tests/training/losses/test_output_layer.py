"""Logits by row are those of the model, their gradients too, and no more of them are alive than was allowed."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from recipes import recipe_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import rank_layers
from hf_linear_attention.conversion.verification import compare_outputs
from hf_linear_attention.training.data.packing import StreamWindows
from hf_linear_attention.training.evaluation import retention
from hf_linear_attention.training.evaluation.evaluator import Evaluator
from hf_linear_attention.training.evaluation.recall import RecallProbe
from hf_linear_attention.training.losses import output_layer as of_rows
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.objectives import OBJECTIVES, StudentWithObjectives, build_objectives
from hf_linear_attention.training.losses.output_layer import ByRow, Rows, output_layer
from hf_linear_attention.training.losses.teacher import Teacher


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = {**SIZES, "num_key_value_heads": 1, "vocab_size": 300, "pad_token_id": 0}
T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
BART = {
    **{"vocab_size": 300, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0, "max_position_embeddings": 64},
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}


def stock(name: str, sizes: dict[str, Any], **more: Any) -> Any:
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**sizes, **more))


def biased(model: Any) -> Any:
    model.final_logits_bias.normal_()
    return model


MODELS = {
    "llama": lambda: stock("LlamaForCausalLM", DECODER),
    "scaled before": lambda: stock("T5ForConditionalGeneration", T5, decoder_start_token_id=0),
    "with a transform": lambda: stock("BertForMaskedLM", SIZES, vocab_size=300),
    "with a bias": lambda: biased(stock("BartForConditionalGeneration", BART)),
    "capped": lambda: stock("Gemma2ForCausalLM", DECODER, head_dim=8, final_logit_softcapping=3.0),
    "divided": lambda: stock("GraniteForCausalLM", DECODER, logits_scaling=3.0),
    "multiplied": lambda: stock("CohereForCausalLM", DECODER, logit_scale=0.3),
}


def batch_of(model: PreTrainedModel, rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    ids = torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "index": torch.arange(rows)}
    return batch | ({"decoder_attention_mask": mask} if model.config.is_encoder_decoder else {})


def whole_logits(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    decoder = {"labels": batch["labels"]} if model.config.is_encoder_decoder else {}
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **decoder).logits.flatten(0, -2)


@pytest.mark.parametrize("name", MODELS)
def test_logits_by_row_are_those_of_the_model(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    by_row, batch = ByRow(model), batch_of(model)
    assert by_row.layer is not None
    assert model.training
    model.eval()
    expected = whole_logits(model, batch)
    rows = torch.tensor([3, 0, 7])
    torch.testing.assert_close(by_row.rows(batch)(rows), expected[rows])
    torch.testing.assert_close(whole_logits(model, batch), expected)  # nothing is left in the model


def test_what_is_not_known_is_computed_as_a_whole(caplog, monkeypatch):
    class Squared(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * outputs.logits.abs()
            return outputs

    model = Squared(Squared.config_class(**DECODER)).eval()
    assert output_layer(model) is None
    batch = batch_of(model)
    torch.testing.assert_close(ByRow(model).rows(batch)(torch.tensor([3, 0])), whole_logits(model, batch)[[3, 0]])
    assert not caplog.records
    monkeypatch.setattr(of_rows, "MEGABYTES", 0.01)
    ByRow(model).rows(batch)
    assert "Squared does something with the results of its output layer" in caplog.text
    classifier = stock("BertForSequenceClassification", SIZES, vocab_size=300).eval()
    assert output_layer(classifier) is None
    expected = classifier(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(ByRow(classifier).rows(batch)(torch.tensor([1, 0])), expected[[1, 0]])


@pytest.mark.parametrize("frozen", [None, "lm_head", "body"])
@pytest.mark.parametrize("name", ["llama", "capped", "scaled before"])
def test_gradients_of_chunks_are_those_of_the_whole(name, frozen, monkeypatch):
    """Both losses in float64, chunks of one row."""
    monkeypatch.setattr(of_rows, "MEGABYTES", 1e-9)
    torch.manual_seed(0)
    task = "seq2seq_lm" if name == "scaled before" else "causal_lm"
    student, teacher = MODELS[name]().double().eval(), MODELS[name]().double().eval()
    head = student.get_output_embeddings()
    for parameter in student.parameters():
        is_head = any(parameter is own for own in head.parameters())
        parameter.requires_grad_(frozen is None or is_head == (frozen == "body"))
    weights = {f"{other}_weight": 0.0 for other in OBJECTIVES} | {"task_loss_weight": 0.7, "logits_kl_weight": 2.0}
    objectives = build_objectives(recipe_of(task, **weights, temperature=1.5))
    batch = batch_of(student)
    scales = {
        name: torch.tensor(scale, dtype=torch.float64) for name, scale in (("task_loss", 0.3), ("logits_kl", 0.2))
    }
    module = StudentWithObjectives(student, objectives, None)
    module.gradient_scale = lambda: 3.0
    loss, figures = module(batch, Teacher(teacher, nullcontext, None)(batch), scales)
    (1.3 * loss).backward()
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]

    shifted = batch["labels"] if task == "seq2seq_lm" else F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    mine, yours = whole_logits(student, batch), whole_logits(teacher, batch).detach()
    nats = F.cross_entropy(mine, shifted.flatten(), ignore_index=-100, reduction="sum") * scales["task_loss"]
    kl = 1.5**2 * divergence(mine, yours, 1.5)[batch["attention_mask"].flatten() > 0].sum() * scales["logits_kl"]
    torch.testing.assert_close(loss.detach(), (0.7 * nats + 2 * kl).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(figures["task_loss"], nats.detach(), rtol=1e-12, atol=0)
    expected = torch.autograd.grad(1.3 * (0.7 * nats + 2 * kl), trained, allow_unused=True)
    for mine, yours in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if yours is None else yours, rtol=1e-9, atol=1e-12)


def test_what_overflows_in_float16_follows_the_scale():
    """A `GradScaler` makes its scale smaller until nothing overflows, which it could not do for a fixed one."""
    torch.manual_seed(0)
    head = nn.Linear(16, 40).half()
    inputs = (60 * torch.randn(8, 16)).half().requires_grad_()
    targets, found = torch.arange(8), {}
    for scale in (2.0**16, 8.0):
        logits = Rows(inputs, head, 40)

        def loss(some: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return F.cross_entropy(some.float(), targets[rows], reduction="sum"), {}

        total, _ = logits.summed(logits.all(), head.parameters(), loss, scale)
        (found[scale],) = torch.autograd.grad(scale * total, [head.weight])
    assert not found[2.0**16].isfinite().all()
    assert found[8.0].isfinite().all()
    assert found[8.0].abs().max() > 0


@pytest.mark.parametrize("name", ["llama", "scaled before"])
def test_chunks_in_mixed_precision(name, monkeypatch):
    """Casts of weights, which autocast keeps, serve all chunks; sums over chunks are in the dtype of the weights."""
    torch.manual_seed(0)
    task = "seq2seq_lm" if name == "scaled before" else "causal_lm"
    model = MODELS[name]().eval()
    batch, gradients = batch_of(model), []
    weights = {f"{other}_weight": 0.0 for other in OBJECTIVES} | {"task_loss_weight": 1.0}
    for megabytes in (1e-9, 256):
        monkeypatch.setattr(of_rows, "MEGABYTES", megabytes)
        module = StudentWithObjectives(model, build_objectives(recipe_of(task, **weights)), None)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = module(batch, None, {"task_loss": torch.tensor(0.1)})
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    # bfloat16 has 8 bits, and the products of a chunk are rounded to it before they are summed.
    assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[1].norm()


# ---- Bytes

CLASSES = 6007  # a prime, so that only what has as many columns as there are classes is counted


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages, alive together, of tensors whose last dimension has `CLASSES` entries."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and CLASSES in tensor.shape:
                self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        # Weights and their gradients [classes, D] are no logits.
        if storage.nbytes() == 0 or key in self.sizes or tensor.shape[0] == CLASSES or tensor.shape[-2] == CLASSES:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


LENGTH, LIMIT = 192, 4.0  # a matrix of logits [4, LENGTH, CLASSES] has 17.6 megabytes


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    teacher = stock("LlamaForCausalLM", {**DECODER, "vocab_size": CLASSES}, max_position_embeddings=512).eval()
    return convert(teacher, mechanism="hybrid", window_size=8, num_sinks=1, num_features=8).eval(), teacher


def stream() -> Any:
    return torch.randint(5, CLASSES, (8 * LENGTH,), generator=torch.Generator().manual_seed(1)).numpy()


def trained(student: PreTrainedModel, teacher: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    weights = {f"{name}_weight": 0.0 for name in OBJECTIVES} | {"task_loss_weight": 1.0, "logits_kl_weight": 1.0}
    objectives = build_objectives(recipe_of("causal_lm", **weights))
    module = StudentWithObjectives(student, objectives, None)
    scales = {name: torch.tensor(0.01) for name in objectives}
    module(batch, Teacher(teacher, nullcontext, None)(batch), scales)[0].backward()


def evaluated(student: PreTrainedModel, teacher: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    Evaluator(Accelerator(cpu=True), "causal_lm", Teacher(teacher, nullcontext, None))(student, [batch])


def recalled(student: PreTrainedModel, teacher: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    assert RecallProbe(StreamWindows(stream(), LENGTH, None), LENGTH, None, None)(student, nullcontext)


WORK = {
    "training": trained,
    "evaluation": evaluated,
    "recall": recalled,
    "scores": lambda student, teacher, batch: retention.score(teacher, student, [batch]),
    "verification": lambda student, teacher, batch: compare_outputs(student, None),
    "layers": lambda student, teacher, batch: rank_layers(student, teacher, [batch]),
}


@pytest.mark.parametrize("name", WORK)
def test_no_more_than_the_limit_is_alive(name, pair, monkeypatch):
    monkeypatch.setattr(of_rows, "MEGABYTES", LIMIT)
    student, teacher = pair
    batch = batch_of(student, 4, LENGTH)
    with Alive() as alive:
        WORK[name](student, teacher, batch)
    assert 0 < alive.peak <= LIMIT * 2**20
    assert alive.peak > LIMIT * 2**20 / 8  # of what is allowed, no small part is used
