"""Comparison of the result with its source: the tensors in the files, and the outputs of linear and softmax attention.

The teacher is the converted model itself with its original attention (`softmax_attention`). If the base tensors are
equal, this is the source model, without a second model in memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention import softmax_attention
from hf_linear_attention._common.errors import ConversionError
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.conversion.head_figures import head_figures
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.samples import samples_of
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.default_settings import direction_of
from hf_linear_attention.training.recipe import MECHANISM


LM_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
LOGITS = ("logits", "prediction_logits", "start_logits")


def verify(folder: Path, source: Source, plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Reload the result on the CPU and measure it.

    Returns:
        `tensors` (how many were compared and equal), `student_against_teacher` (errors relative to the norm of the
        teacher's output, KL in nats per token) and `heads` (`head_figures`).

    Raises:
        ConversionError: if a tensor of the source changed on the way, or the result computes no finite numbers.
    """
    tensors = compare_tensors(folder, source, plan)
    model = plan.linear_class.from_pretrained(folder).eval()
    outputs = compare_outputs(model, tokenizer)
    return {"tensors": tensors, "student_against_teacher": outputs, "heads": head_figures(model, tokenizer)}


def compare_tensors(folder: Path, source: Source, plan: Plan) -> dict[str, int]:
    """Compare every mapped tensor in the files of both folders, with the source's tensor cast to the result's dtype.

    Returns:
        The numbers of tensors that were `compared`, are `equal`, were `not_compared`, or belong to the `mechanism`.

    Raises:
        ConversionError: if a tensor changed, or none could be compared.
    """
    result = open_source(str(folder))
    compared, not_compared, changed = 0, 0, []
    for tensor in progress(plan.mapped, "verifying"):
        # Saving restores the names of the checkpoint format, which may differ from those in the model.
        names = [name for name in (tensor.source, tensor.target) if name in result.tensors]
        if tensor.source is None or not names:
            not_compared += tensor.source is not None
            continue  # it was merged from several tensors, or is tied to another tensor and not stored
        written, original = result.read(names[0]), source.read(tensor.source)
        compared += 1
        if plan.extension is not None and tensor.target in plan.extension.tables:
            is_equal = plan.extension.has_grown_from(str(tensor.target), written, original)
        else:
            is_equal = torch.equal(written, original.to(written.dtype))
        if not is_equal:
            changed.append(names[0])
    if not compared:
        raise ConversionError(
            f"none of the {not_compared} tensors that come from {source.name} could be compared, because the result "
            "has no tensor with the same name; if `--dry_run` shows tensors as mapped, report this, and convert with "
            "`--no_verify` only if you compare the weights yourself"
        )
    if changed:
        raise ConversionError(f"{len(changed)} tensors of the source have changed, the first is `{changed[0]}`")
    new = sum(MECHANISM in name for name in result.tensors)
    return {"compared": compared, "equal": compared, "not_compared": not_compared, "mechanism": new}


@torch.no_grad()
def compare_outputs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, float]:
    """Compare student and teacher on each built-in sample, and the student on a padded batch of the samples."""
    samples = samples_of(model, tokenizer)
    is_text = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    student, logits = zip(*(_outputs(model, sample) for sample in samples))
    with softmax_attention(model):
        teacher, teacher_logits = zip(*(_outputs(model, sample) for sample in samples))
    if not all(torch.isfinite(output).all() for output in student):
        raise ConversionError("the outputs of the converted model on the built-in samples are not finite")
    figures = {"hidden_state_error": _relative_error(student, teacher)}
    if is_text and direction_of(model.config) != "causal":
        means = zip(student, teacher)
        cosines = [F.cosine_similarity(a.mean(1), b.mean(1)).item() for a, b in means]
        figures["mean_embedding_cosine"] = sum(cosines) / len(cosines)
    if logits[0] is not None:
        figures["logits_error"] = _relative_error(logits, teacher_logits)
        if type(model).__name__.endswith(LM_HEADS):
            figures["kl_to_teacher"], figures["top1_agreement"] = _distribution_figures(logits, teacher_logits)
    if is_text:
        figures["padding_difference"] = _padding_difference(model, samples, student)
    return figures


def _inputs(model: PreTrainedModel, sample: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs of a model; the decoder of an encoder-decoder gets the same text, or a few tokens if that is sound."""
    inputs = {model.main_input_name: sample}
    if model.config.is_encoder_decoder:
        start = special_token(model.config, "decoder_start_token_id")
        inputs["decoder_input_ids"] = sample if sample.dtype == torch.long else torch.full((1, 4), start)
    return inputs


def _outputs(model: PreTrainedModel, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The last hidden state `[1, N, hidden]` of the base model and the logits of its head, if any, in float32."""
    inputs = _inputs(model, sample)
    choices = {model.main_input_name: sample.unsqueeze(1)} if type(model).__name__.endswith("ForMultipleChoice") else {}
    seen: list[Any] = []
    with model.base_model.register_forward_hook(lambda module, args, output: seen.append(output)):
        output = model(**{**inputs, **choices}, output_hidden_states=True)
    if len(seen) != 1:  # the head calls parts of the base model (OPT, BART's decoder)
        seen = [model.base_model(**inputs, output_hidden_states=True)]
    logits = next((output[name].float() for name in LOGITS if output.get(name) is not None), None)
    if "last_hidden_state" in seen[0]:
        return seen[0].last_hidden_state.float(), logits
    return seen[0].decoder_hidden_states[-1].float(), logits  # T5's model with a head contains no base model


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`[...]`: KL(teacher || student) in nats of logits `[..., V]`, computed in float32."""
    log_q, log_p = (logits.float().log_softmax(-1) for logits in (student, teacher))
    return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)


def _distribution_figures(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The mean of KL(teacher || student) over all tokens, and the share of tokens with the same most likely token."""
    pairs = list(zip(student, teacher, strict=True))
    nats = torch.cat([divergence(s, t).flatten() for s, t in pairs])
    same = torch.cat([(s.argmax(-1) == t.argmax(-1)).flatten() for s, t in pairs])
    return nats.double().mean().item(), same.double().mean().item()


def _relative_error(student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor]) -> float:
    """|student - teacher| / |teacher| over all samples; exactly 0.0 if nothing differs."""
    difference = sum((a - b).square().sum().item() for a, b in zip(student, teacher))
    return math.sqrt(difference / max(sum(b.square().sum().item() for b in teacher), 1e-30))


def _padding_difference(model: PreTrainedModel, samples: list[torch.Tensor], alone: Sequence[torch.Tensor]) -> float:
    """How far padding changes the outputs of real tokens, relative to their norm.

    Causal models that accept `position_ids` are padded on the left, as for generation; padding on the right would not
    test anything, because causal attention does not see it.
    """
    pad = special_token(model.config, "pad_token_id")
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    left = takes_positions and direction_of(model.config) == "causal"
    width = max(sample.shape[1] for sample in samples)
    ids = torch.full((len(samples), width), pad)
    mask = torch.zeros_like(ids)
    places = []
    for row, sample in enumerate(samples):
        size = sample.shape[1]
        place = slice(width - size, width) if left else slice(0, size)
        ids[row, place], mask[row, place] = sample[0], 1
        places.append(place)
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if left else {}
    output = model.base_model(input_ids=ids, attention_mask=mask, **positions).last_hidden_state.float()
    return _relative_error([output[row : row + 1, place] for row, place in enumerate(places)], alone)
