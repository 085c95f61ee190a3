"""Comparison of the result with its source: the tensors in the files, and the outputs of linear and softmax attention.

The teacher is the converted model itself with its original attention (`softmax_attention`). If the base tensors are
equal, this is the source model, without a second model in memory. Both read a few inputs: built-in English text through
the model's tokenizer, or random ids, pixels or sound.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention import softmax_attention
from hf_linear_attention._common.errors import ConversionError
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.configuration_linear_attention import exact_tokens, max_length_of
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.default_settings import direction_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.score_fit import newest_keys
from hf_linear_attention.training.losses.divergence import divergence
from hf_linear_attention.training.losses.objectives import relative_head_error
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.recipe import MECHANISM


# Tokens on which a model is looked at beyond its windows, at most and at least.
TOKENS_BEYOND, FEWEST_BEYOND = 256, 16
LM_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")


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


def compare_tensors(folder: Path, source: Source, plan: Plan) -> dict[str, Any]:
    """Compare every mapped tensor in the files of both folders, with the source's tensor cast to the result's dtype.

    Returns:
        The numbers of tensors that were `compared`, are `equal`, were `not_compared`, or belong to the `mechanism`; and
        the dtypes to which some were `cast_to`.

    Raises:
        ConversionError: if a tensor changed, or none could be compared.
    """
    result = open_source(str(folder))
    compared, not_compared, changed, dtypes = 0, 0, [], set()
    for tensor in progress(plan.mapped, "verifying"):
        # Saving restores the names of the checkpoint format, which may differ from those in the model.
        names = [name for name in (tensor.source, tensor.target) if name in result.tensors]
        if tensor.source is None or not names:
            not_compared += tensor.source is not None
            continue  # it was merged from several tensors, or is tied to another tensor and not stored
        written, original = result.read(names[0]), source.read(tensor.source)
        compared += 1
        if written.dtype != original.dtype:
            dtypes.add(str(written.dtype).removeprefix("torch."))
        if not torch.equal(written, original.to(written.dtype)):
            changed.append(names[0])
    if not compared:
        raise ConversionError(
            f"none of the {not_compared} tensors that come from {source.name} could be compared: none has the same "
            "name in the result; report this"
        )
    if changed:
        raise ConversionError(f"{len(changed)} tensors of the source have changed, the first is `{changed[0]}`")
    new = sum(MECHANISM in name for name in result.tensors)
    counts = {"compared": compared, "equal": compared, "not_compared": not_compared, "mechanism": new}
    return counts | ({"cast_to": sorted(dtypes)} if dtypes else {})


@torch.no_grad()
def compare_outputs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Compare student and teacher on each built-in sample, and the student on a padded batch of the samples.

    Decoders with a window compute softmax attention as long as a text fits into it; `beyond` has the figures of the
    tokens after that.
    """
    samples = samples_of(model, tokenizer)
    is_text = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    by_row = ByRow(model)
    student, logits = zip(*(_outputs(by_row, sample) for sample in samples))
    with softmax_attention(model):
        teacher, teacher_logits = zip(*(_outputs(by_row, sample) for sample in samples))
    if not all(torch.isfinite(output).all() for output in student):
        raise ConversionError("the outputs of the converted model on the built-in samples are not finite")
    figures: dict[str, Any] = {"hidden_state_error": _relative_error(student, teacher)}
    if is_text and direction_of(model.config) != "causal":
        means = zip(student, teacher)
        cosines = [F.cosine_similarity(a.mean(1), b.mean(1)).item() for a, b in means]
        figures["mean_embedding_cosine"] = sum(cosines) / len(cosines)
    if logits[0] is not None:
        pairs = zip(logits, teacher_logits, strict=True)
        found = torch.cat([_logit_figures(mine, yours) for mine, yours in pairs])
        figures["logits_error"] = math.sqrt(found[:, 0].sum() / found[:, 1].sum().clamp(min=1e-30))
        if type(model).__name__.endswith(LM_HEADS):
            figures["kl_to_teacher"], figures["top1_agreement"] = found[:, 2:].mean(0).tolist()
            figures["longest_sample"] = max(sample.shape[1] for sample in samples)
            if (beyond := _beyond_window(by_row, tokenizer)) is not None:
                figures["beyond"] = beyond
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


def _outputs(by_row: ByRow, sample: torch.Tensor) -> tuple[torch.Tensor, Rows | None]:
    """The last hidden state `[1, N, hidden]` of the base model in float32, and the logits of its head, if any."""
    model = by_row.model
    inputs = _inputs(model, sample)
    choices = {model.main_input_name: sample.unsqueeze(1)} if type(model).__name__.endswith("ForMultipleChoice") else {}
    seen: list[Any] = []
    with model.base_model.register_forward_hook(lambda module, args, output: seen.append(output)):
        _, logits = by_row.outputs(
            {"attention_mask": torch.ones_like(sample)},
            call=lambda: model(**{**inputs, **choices}, output_hidden_states=True),
        )
    if len(seen) != 1:  # the head calls parts of the base model (OPT, BART's decoder)
        seen = [model.base_model(**inputs, output_hidden_states=True)]
    if "last_hidden_state" in seen[0]:
        return seen[0].last_hidden_state.float(), logits
    return seen[0].decoder_hidden_states[-1].float(), logits  # a T5 model with a head has no base model


def _logit_figures(mine: Rows, yours: Rows) -> torch.Tensor:
    """`[R, 4]` in float64: the squares of the error and of the teacher, KL(teacher || student) in nats, and whether the
    likeliest class is the same, of every row of logits."""

    def look(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        s, t = logits.float(), yours(rows).float()
        same = (s.argmax(-1) == t.argmax(-1)).float()
        squares = (s - t).square().sum(-1), t.square().sum(-1)
        return torch.stack([*squares, divergence(s, t), same], dim=-1).double()

    return mine.read(mine.all(), look)


def exact_length(settings: Any) -> int | None:
    """The number of tokens up to which a decoder with these settings computes softmax attention; None without windows.

    It is that of the layer with the largest window, with its sinks and exact keys.
    """
    return max(exact_tokens(settings), default=None)


def _beyond_window(by_row: ByRow, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """The figures of tokens `first` to `last`, the first that no window holds whole, of the end of Python's
    documentation, whose beginning conversions are calibrated on.
    """
    model = by_row.model
    first = exact_length(model.config.linear_attention)
    if first is None or direction_of(model.config) != "causal" or built_in_text(model.config, tokenizer) is None:
        return None
    last = min(first + TOKENS_BEYOND, max_length_of(model.config) or first + TOKENS_BEYOND) - 1
    ids = cast(Any, tokenizer)(documentation()[-40 * (last + 1) :], return_tensors="pt").input_ids[:, : last + 1]
    if ids.shape[1] <= last or last - first < FEWEST_BEYOND:
        return None
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    mine = by_row.rows(batch)
    with softmax_attention(model):
        yours = by_row.rows(batch)
    nats, same = _logit_figures(mine, yours)[first:, 2:].mean(0).tolist()
    figures = {"first": first, "last": last, "kl_to_teacher": nats, "top1_agreement": same}
    mechanisms = (module.linear_attention for module in linear_attention_modules(model).values())
    fitted = [x for x in mechanisms if getattr(x, "num_exact_keys", 0) and x.score_projection.any()]
    if fitted:
        with newest_keys(fitted):
            figures["kl_with_newest_keys"] = _logit_figures(by_row.rows(batch), yours)[first:, 2].mean().item()
    return figures


def documentation() -> str:
    """The text that `help()` shows for topics; empty where Python was installed without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return ""
    return "\n".join(text for _, text in sorted(topics.items()))


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


# ---- The inputs

TEXTS = (
    "The river had risen in the night, and by morning the lower field was a lake.",
    "Once upon a time there was a little girl who wanted to play in the park. Her mother said that it was too cold, so "
    "they stayed at home, drew pictures of birds, and waited for the rain to stop. In the evening the sky was clear.",
    "A list comprehension builds a new list by applying an expression to each item of a sequence.",
    "Prices rose by two per cent in March.",
    "Where is the nearest station? It is behind the library, about ten minutes on foot, but the gate closes at nine.",
    "Water is made of hydrogen and oxygen; it freezes at zero degrees and boils at one hundred. Salt lowers the first "
    "and raises the second, which is why the sea rarely freezes near the coast, and why cooks add salt to the pot. "
    "None of this was known to the people who first built boats, yet they learned to read the colour of the ice.",
)
MAX_TOKENS = 128
RANDOM_LENGTHS = (7, 48, 17, 64)


def samples_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor]:
    """Main inputs of a model, each without padding."""
    if model.main_input_name == "input_ids":
        return text_samples(model.config, tokenizer)
    if model.main_input_name == "pixel_values":
        return pixel_samples(model.config)
    return sound_samples(model.config, model.main_input_name)


def text_samples(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor]:
    """Token ids, one tensor `[1, N]` per text, no longer than the model allows."""
    if (samples := built_in_text(config, tokenizer)) is not None:
        return samples
    generator = torch.Generator().manual_seed(0)
    sizes = (min(size, _max_tokens(config)) for size in RANDOM_LENGTHS)
    return [torch.randint(config.vocab_size, (1, size), generator=generator) for size in sizes]


def built_in_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor] | None:
    """`TEXTS` as token ids `[1, N]`; None without a tokenizer, or with one that does not belong to the model."""
    if tokenizer is None:
        return None
    length = _max_tokens(config)
    samples = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt").input_ids for text in TEXTS]
    is_its_own = all(ids.numel() > 1 and int(ids.max()) < config.vocab_size for ids in samples)
    return samples if is_its_own else None


def _max_tokens(config: PreTrainedConfig) -> int:
    # Some families (RoBERTa) cannot use a few of their positions because of an offset.
    return min(MAX_TOKENS, (max_length_of(config) or MAX_TOKENS) * 3 // 4)


def sound_samples(config: PreTrainedConfig, name: str) -> list[torch.Tensor]:
    """Random sound: `input_values [1, samples]`, or `input_features` in the shape that the model's encoder reads."""
    generator = torch.Generator().manual_seed(0)
    if name == "input_values":
        return [torch.randn(1, 400 * length, generator=generator) for length in RANDOM_LENGTHS]
    if (features := getattr(config, "input_feat_per_channel", None)) is not None:
        return [torch.randn(1, 4 * length, features, generator=generator) for length in RANDOM_LENGTHS]
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)  # Whisper accepts only this length
    return [torch.randn(*shape, generator=generator) for _ in range(2)]


def pixel_samples(config: PreTrainedConfig) -> list[torch.Tensor]:
    """Random images `[1, channels, height, width]`."""
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    generator = torch.Generator().manual_seed(0)
    channels = getattr(config, "num_channels", 3)
    return [torch.randn(1, channels, height, width, generator=generator) for _ in range(4)]


# ---- Figures of single heads: how far each is from its softmax attention

MOST_TOKENS = 512


@torch.no_grad()
def head_figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """The `inputs` in words, and `layers`: the `error` of each head.

    An error is |mechanism - softmax| / |softmax| of a head's output, on the same queries, keys and values.

    Returns:
        None where attention cannot be observed (ALiBi families), and for an encoder-decoder, in which two layers have
        the same number.
    """
    if model.config.is_encoder_decoder:
        return None
    inputs, name = one_input(model, tokenizer)
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = inputs.unsqueeze(1)
    layers: dict[int, dict[str, Any]] = {}

    def look(seen: ObservedAttention) -> None:
        mask = torch.ones(seen.softmax_output.shape[:2], dtype=torch.bool, device=seen.softmax_output.device)
        errors, layer = relative_head_error(seen, mask).sqrt().mean(0), seen.module.linear_attention.shape.layer
        if torch.isfinite(errors).all():
            layers[layer] = {"layer": layer, "error": errors.tolist()}

    with contextlib.suppress(NotImplementedError), observe_attention(model, look):
        model(**{model.main_input_name: inputs.to(model.device)})
    return {"inputs": name, "layers": [layer for _, layer in sorted(layers.items())]} if layers else None


def one_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[torch.Tensor, str]:
    """One input without padding, and its name: all built-in sentences together, so that it is longer than a window."""
    samples = samples_of(model, tokenizer)
    if model.main_input_name != "input_ids":
        name = "a random image" if model.main_input_name == "pixel_values" else "random sound"
        return samples[0].to(model.dtype), name
    ids = torch.cat(samples, dim=1)[:, : min(MOST_TOKENS, (max_length_of(model.config) or MOST_TOKENS) * 3 // 4)]
    name = "random tokens" if built_in_text(model.config, tokenizer) is None else "the built-in sentences"
    return ids, f"{name} ({ids.shape[1]} tokens)"
