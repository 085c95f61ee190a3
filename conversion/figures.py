"""The figures of a converted model on held-out text, beside its original and, for a language model, its controls.

The control that a language model has to beat is an exact window of the same bytes, with the weights of the teacher: it
forgets what leaves it and costs nothing to make, and a state that does no better with as many bytes is not worth its
training (arXiv 2608.28444).

- window_alone: the student's own window, where it has one, with the weights of the teacher
- same_bytes: the window of as many bytes as the student's state, with the weights of the teacher
- healed: the same window after the student's training: its stages and tokens

Embedding models are measured by their likeness to the original, by pairs with scores and by retrieval.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention import convert
from hf_linear_attention._common.folders import staging
from hf_linear_attention.configuration_linear_attention import entries_of, max_length_of
from hf_linear_attention.conversion.plan import growing_bytes, state_bytes
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training
from hf_linear_attention.conversion.quality import HeldOut, held_out_text, load_models
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.packing import Examples, Tokens
from hf_linear_attention.training.data.processors import DEFAULT_MAX_LENGTH, load_tokenizer, pad_token_id
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.evaluation.embeddings import (
    at_dimensions,
    compare_embeddings,
    compare_pairs,
    embed,
    retrieval_test,
    with_teacher,
)
from hf_linear_attention.training.evaluation.retention import (
    SMALLEST_GAP,
    Settings,
    TokenFigures,
    batches_of,
    bucket_edges,
    continued,
    distance_edges,
    generation_figures,
    is_hybrid,
    longest_window,
    most_positions,
    nats_of,
    paired_difference,
    position_buckets,
    recall_buckets,
    recall_distances,
    repeats,
    running_text,
    score,
    separate_windows,
    summary,
    target_positions,
    window_settings,
)
from hf_linear_attention.training.losses.teacher import learned_positions, windows_for
from hf_linear_attention.training.recipe import Recipe, parse_dims
from hf_linear_attention.training.run import Run, run_stages


logger = logging.getLogger(__name__)


# A window without sinks is the better one beyond the trained length, one with sinks where sinks carry weight.
SINKS = (0, 4)
# Shorter texts would lie in the window for the most part, and it would be softmax attention there.
WINDOWS_OF_TEXT = 8
# Rare 4-grams are counted in so many tokens of the training text, which takes about a second for every 2 million.
MAX_COUNTED = 20_000_000
PAIRS = [("student", "window_alone"), ("student", "same_bytes"), ("student", "healed")]
# What a name stands for is computed once where it is kept: `cached(name, compute)`.
Cached = Callable[[str, Callable[[], Tensor]], Tensor]

NUM_SAMPLES = 3
PROMPT, WRITTEN = 64, 48  # tokens
MOST_CHARACTERS = 240


# ---- Controls


@dataclass(frozen=True)
class HeldOutText:
    """`examples` of up to `max_length` tokens (protocol S), and what is needed to cut their text otherwise.

    `max_eval_length`: the longest windows; `training`: documents of the training text, None where it is not known.
    """

    examples: Examples
    max_length: int
    bos_token_id: int | None
    padding: int
    max_eval_length: int
    training: list[Tokens] | None = None

    def batches(self) -> list[Batch]:
        """The padded batches of all examples."""
        return batches_of(self.examples, self.max_length, self.padding)


@dataclass(frozen=True)
class SameBytes:
    """A `window` as `convert` takes its `settings`, and the bytes of its state in all layers."""

    window_size: int
    num_sinks: int
    state_bytes: int
    settings: Settings

    @property
    def name(self) -> str:
        """Of its own among all windows of one teacher, whichever layers they are in."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:6]
        return f"window-{self.window_size}-{self.num_sinks}-{digest}"


@dataclass(frozen=True)
class Controls:
    """The untrained windows of the same bytes, and the healed model of the better one where there is one.

    `left_out` says why there are none.
    """

    windows: list[SameBytes]
    healed: PreTrainedModel | None = None
    left_out: str | None = None


def model_state_bytes(model: PreTrainedModel, length: int = 0) -> int:
    """Bytes of the decoding state of all converted layers, per sequence; 0 where they have none.

    Heads with softmax attention (`softmax_heads`) add the keys and values of `length` tokens.
    """
    modules = linear_attention_modules(model).values()
    return sum((state_bytes(module) or 0) + length * growing_bytes(module) for module in modules)


def windows_of_same_bytes(teacher: PreTrainedModel, student: PreTrainedModel, trained_length: int) -> list[SameBytes]:
    """Per number of sinks the largest window, in the layers that the student converts, whose state takes no more bytes
    than the student's at the trained length; none where the student has no state, or no window fits."""
    budget, settings = model_state_bytes(student, trained_length), student.config.linear_attention
    found = []
    for sinks in SINKS if budget else ():
        sizes = [_window(teacher, settings, size, sinks, trained_length).state_bytes for size in (1, 2)]
        largest = 1 + (budget - sizes[0]) // (sizes[1] - sizes[0])
        if largest >= 1:
            found.append(_window(teacher, settings, largest, sinks, trained_length))
    return found


def _window(
    teacher: PreTrainedModel, settings: Settings, window_size: int, num_sinks: int, trained_length: int
) -> SameBytes:
    sizes = {"window_size": window_size, "num_sinks": num_sinks, "trained_length": trained_length}
    own = window_settings(settings, **sizes, softmax_heads=[])
    with torch.device("meta"):
        model: Any = linear_model_class(type(teacher))(convert_config(teacher.config, own))
    return SameBytes(window_size, num_sinks, model_state_bytes(model), own)


def trained_length_of(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> int:
    """The trained length in the student's settings, or else the longest input of the teacher or of the text."""
    known = [entry.get("trained_length") for entry in entries_of(student.config.linear_attention)]
    return int(next(filter(None, known), None) or max_length_of(teacher.config) or text.max_length)


def window_length(teacher: PreTrainedModel, trained_length: int, text: HeldOutText) -> tuple[int, str]:
    """The length up to which figures by position go, and what ends it."""
    count = len(running_text(text.examples))
    return longest_window(trained_length, count, text.max_eval_length, most_positions(teacher))


def possible_controls(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> Controls:
    """The windows of the student's bytes for which the text is long enough."""
    trained_length = trained_length_of(teacher, student, text)
    windows = windows_of_same_bytes(teacher, student, trained_length)
    if not windows:
        return Controls([], left_out="the model has no state of constant size that a window could be compared with")
    length, _ = window_length(teacher, trained_length, text)
    largest = max(window.window_size for window in windows)
    if length < WINDOWS_OF_TEXT * largest:
        return Controls(
            [],
            left_out=f"a window of the same bytes has {largest:,} tokens, and the text is read {length:,} tokens at a "
            f"time: less than {WINDOWS_OF_TEXT} windows",
        )
    return Controls(windows)


def compute(_: str, what: Callable[[], Tensor]) -> Tensor:
    """Nothing is kept."""
    return what()


def better_window(
    teacher: PreTrainedModel, windows: list[SameBytes], batches: list[Batch], cached: Cached = compute
) -> tuple[SameBytes, dict[str, Tensor]]:
    """The window with the fewer nats per token on the batches, and the nats `[targets]` of all by name."""
    nats = {}
    for window in windows:
        nats[window.name] = cached(f"{window.name}-inside", partial(_untrained, teacher, window.settings, batches))
    return min(windows, key=lambda window: nats[window.name].mean().item()), nats


def _untrained(teacher: PreTrainedModel, settings: Settings, batches: list[Batch]) -> Tensor:
    return nats_of(convert(teacher, settings=settings), batches)


def heal_control(source: Source, training: Training, data: HeldOut, run: Run) -> None:
    """Train the window of the same bytes as the student was trained (the same stages, tokens, seed and text) in the
    work folder, or go on with that; nothing where the text is too short for a control.

    A window has no parameters of its own, so that stages of attention transfer give their tokens to the others.

    Args:
        run: what runs one stage, as for the student.
    """
    work = training.work / CONTROL
    if not (work / CONVERTED).is_dir():
        student = training.work / TRAINED
        recipe, text = held_out_text(student, source, data)
        model, teacher = load_models(recipe, student)
        controls = possible_controls(teacher, model, text)
        if not controls.windows:
            logger.warning("no window of the same bytes is healed: %s", controls.left_out)
            return
        window, _ = better_window(teacher, controls.windows, text.batches())
        work.mkdir(exist_ok=True)
        with staging(work / CONVERTED) as folder:
            save_window(teacher, window, student, folder, data.trust_remote_code)
    logger.info("the control: %s", work)
    given = {**training.given, "model_name_or_path": str(work / CONVERTED), "output_dir": str(work / TRAINED)}
    run_stages(training.preset, given, run)


def save_window(
    teacher: PreTrainedModel, window: SameBytes, student: Path, folder: Path, trust_remote_code: bool = False
) -> None:
    """The untrained window, with the tokenizer of the student's folder."""
    convert(teacher, settings=window.settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(student, trust_remote_code=trust_remote_code).save_pretrained(folder)


# ---- Language models


def language_figures(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: HeldOutText,
    controls: Controls,
    cached: Cached = compute,
) -> dict[str, Any]:
    """The figures of `training.evaluation` with their controls, as conversion_report.json holds them under `quality`.

    Args:
        cached: what keeps the nats of the untrained windows, for callers with several students of the same bytes.
    """
    batches = text.batches()
    inside = score(teacher, student, batches)
    control: dict[str, Any] = {"left_out": controls.left_out}
    window = None
    if controls.windows:
        window, nats = better_window(teacher, controls.windows, batches, cached)
        control = describe_control(window, controls.windows, nats)
        if window.window_size < text.max_length:  # else it would be the teacher there
            inside["same_bytes"] = nats[window.name]
            if controls.healed is not None:
                inside["healed"] = nats_of(controls.healed, batches)
    positions = _positions(teacher, student, text, window, controls.healed, cached)
    recall = _recall(inside, text)
    logger.info("samples of both models")
    longest = min(text.max_eval_length, most_positions(teacher) or text.max_eval_length)
    stream, trained_length = running_text(text.examples), trained_length_of(teacher, student, text)
    return {
        **summary(inside, student.config.linear_attention),
        **_against_controls(inside),
        "control": control,
        "positions": positions,
        "recall": recall,
        "generation": generation_figures(teacher, student, stream, text.bos_token_id, trained_length, longest),
    }


def _against_controls(inside: TokenFigures) -> dict[str, Any]:
    """Of the whole text what the buckets of positions have too, and `closed`: the student's share of the way from the
    window of the same bytes to the teacher, None where there is no gap."""
    found: dict[str, Any] = {"targets": len(inside["student"])}
    for model, other in PAIRS:
        if other in inside:
            found[f"{model}_minus_{other}"] = paired_difference(inside[model], inside[other])
    if "same_bytes" in inside:
        control, student, teacher = (inside[name].mean().item() for name in ("same_bytes", "student", "teacher"))
        found["closed"] = (control - student) / (control - teacher) if control - teacher > SMALLEST_GAP else None
    return found


def describe_control(window: SameBytes, windows: list[SameBytes], nats: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the report says of the control: its size, and those that were not taken."""
    entries = {
        other.name: {
            "window_size": other.window_size,
            "num_sinks": other.num_sinks,
            "state_bytes": other.state_bytes,
            "nats": nats[other.name].mean().item(),
        }
        for other in windows
    }
    return {**entries.pop(window.name), "others": list(entries.values())}


def _positions(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: HeldOutText,
    window: SameBytes | None,
    healed: PreTrainedModel | None,
    cached: Cached,
) -> dict[str, Any]:
    """The nats per token of all models by position, in windows that are longer than the trained length."""
    trained_length = trained_length_of(teacher, student, text)
    length, ended_by = window_length(teacher, trained_length, text)
    windows = separate_windows(running_text(text.examples), max(length, 2), text.bos_token_id)
    facts = {"trained_length": trained_length, "length": length, "ended_by": ended_by, "windows": len(windows)}
    if len(windows) == 0:
        return {**facts, "buckets": []}
    logger.info("nats by position, in %d windows of %d tokens", len(windows), length)
    batches = batches_of(windows, length, text.padding)
    nats = {"teacher": nats_of(teacher, batches), "student": nats_of(student, batches)}
    settings = student.config.linear_attention
    if is_hybrid(settings):
        nats["window_alone"] = _untrained(teacher, window_settings(settings), batches)
    if window is not None:
        key = f"{window.name}-{length}"
        nats["same_bytes"] = cached(key, partial(_untrained, teacher, window.settings, batches))
    if healed is not None:
        nats["healed"] = nats_of(healed, batches)
    edges = bucket_edges(trained_length, length)
    return {**facts, "buckets": position_buckets(target_positions(batches), nats, edges, PAIRS)}


def _recall(inside: TokenFigures, text: HeldOutText) -> dict[str, Any]:
    """Recall of the targets inside the trained length, beyond which the teacher is no measure."""
    if text.training is None:
        return {"left_out": "which 4-grams are rare is counted on the training text: give a `--train_file`"}
    documents = list(_first_tokens(text.training, MAX_COUNTED))
    distance = recall_distances(repeats(text.examples), documents)
    models = ("teacher", "student", "same_bytes", "healed")
    nats: dict[str, Tensor] = {name: inside[name] for name in models if name in inside}
    buckets = recall_buckets(distance, nats, distance_edges(text.max_length), "same_bytes")
    return {"counted_tokens": sum(map(len, documents)), "buckets": buckets}


def _first_tokens(documents: Iterable[Tokens], count: int) -> Iterator[Tokens]:
    """Documents until they have `count` tokens."""
    for document in documents:
        if count <= 0:
            return
        yield document[:count]
        count -= len(document)


def continuations(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    stream: Tokens,
    bos_token_id: int | None,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> list[dict[str, Any]]:
    """Three continuations of prompts that are spread evenly over the text: the end of the `prompt`, what is the `same`
    in both, and for `original` and `student` the `first` different token and the `rest`.

    Args:
        stream: the tokens of the text.
        longest: the most tokens that the models read.
    """
    length = min(PROMPT, longest // 2, len(stream) // NUM_SAMPLES)
    if length < 2:
        return []
    body = length - (bos_token_id is not None)
    starts = [round(number * (len(stream) - body) / NUM_SAMPLES) for number in range(NUM_SAMPLES)]
    texts = [list(stream[start : start + body]) for start in starts]
    first = [] if bos_token_id is None else [bos_token_id]
    prompts = torch.tensor([[*first, *text] for text in texts], device=student.device)
    count = min(WRITTEN, longest - length)
    likeliest = partial(torch.argmax, dim=-1)
    by_teacher, by_student = (continued(model, prompts, count, likeliest).tolist() for model in (teacher, student))
    return [_continuation(tokenizer, *parts) for parts in zip(texts, by_teacher, by_student, strict=True)]


def _continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], by_teacher: Sequence[int], by_student: Sequence[int]
) -> dict[str, Any]:
    pairs = enumerate(zip(by_teacher, by_student, strict=True))
    same = next((place for place, (a, b) in pairs if a != b), len(by_teacher))

    def text_of(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    def part(tokens: Sequence[int], first: int, last: int) -> str:
        """The text that these tokens add to what stands before them, which decides about spaces."""
        start, end = (text_of([*prompt, *tokens[:place]]) for place in (first, last))
        return end[len(start) :] if end.startswith(start) else text_of(tokens[first:last])

    sides = {
        name: {"first": part(tokens, same, same + 1), "rest": part(tokens, same + 1, len(tokens))}
        for name, tokens in (("original", by_teacher), ("student", by_student))
    }
    return {"prompt": text_of(prompt)[-MOST_CHARACTERS:], "same": part(by_student, 0, same), **sides}


# ---- Embedding models


@torch.no_grad()
def embedding_figures(
    student: PreTrainedModel, teacher: PreTrainedModel, texts: Recipe, pairs: Recipe | None = None
) -> dict[str, Any]:
    """The figures of `training/evaluation/embeddings.py`, for whole embeddings and as `<name>_dim_<d>` for the first
    `d` dimensions, and examples of nearest neighbours.

    If the student has more positions than its teacher, texts are as long as these, and the teacher reads windows.

    Args:
        texts: a recipe that reads the held-out texts, and names the retrieval file.
        pairs: a recipe that reads pairs with scores.
    """
    tokenizer = load_tokenizer(texts)
    for recipe in (texts, pairs):
        if recipe is not None:
            recipe.data.max_length = _extended_length(student, teacher)
    batches = _batches(texts)  # which also completes the recipe
    dims, length = parse_dims(texts.task_options.matryoshka_dims), texts.data.max_length or DEFAULT_MAX_LENGTH
    windows = windows_for(teacher, tokenizer, length)

    def embedded(part: Any) -> tuple[Tensor, Tensor]:
        return embed(student, part, texts.pooling), embed(teacher, part, texts.pooling, windows)

    of_student, of_teacher = embedded(batches)
    figures: dict[str, Any] = at_dimensions(lambda d: compare_embeddings(of_student[:, :d], of_teacher[:, :d]), dims)
    figures["neighbours"] = nearest_neighbours(of_student, of_teacher, batches, tokenizer)
    if pairs is not None:
        batches = _batches(pairs)
        both, scores = embedded(batches), torch.cat([batch["labels"] for batch in batches]).tolist()[::2]
        figures |= at_dimensions(lambda d: compare_pairs(both[0][:, :d], both[1][:, :d], scores), dims)
    if (test := retrieval_test(texts, tokenizer)) is not None:
        found = [test.figures(part) for part in embedded(test.batches(_batch_size(texts)))]
        figures |= with_teacher(*found)
        figures["retrieval"] = {
            "file": Path(str(texts.task_options.retrieval_file)).name,
            "queries": len(test.retrieval.queries),
            "documents": len(test.retrieval.documents),
        }
    return {**figures, "dims": list(dims), "max_length": length}


def _extended_length(student: PreTrainedModel, teacher: PreTrainedModel) -> int | None:
    """The number of learned positions of the student if it has more than its teacher, otherwise None."""
    of_student, of_teacher = (learned_positions(model) for model in (student, teacher))
    return of_student if of_student is not None and of_teacher is not None and of_student > of_teacher else None


def _batch_size(recipe: Recipe) -> int:
    return recipe.optimization.per_device_eval_batch_size


def _batches(recipe: Recipe) -> Sequence[Batch]:
    tokenizer = load_tokenizer(recipe)
    examples: Any = load_data(recipe, tokenizer).validation
    plan = EvaluationBatches(len(examples), _batch_size(recipe), 0, 1)
    batches: Any = loader(Stream(examples, recipe.run.seed, shuffle=False), plan, pad_token_id(tokenizer))
    return batches


def nearest_neighbours(
    of_student: Tensor, of_teacher: Tensor, batches: Iterable[Batch], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, str]]:
    """Three texts that are spread evenly over all of them, each with its nearest other text by the original and by this
    model.

    Args:
        of_student: the normalised embeddings of this model, `[texts, D]` in the order of the batches.
        of_teacher: those of the original.
    """
    if len(of_student) < NUM_SAMPLES:
        return []
    places = [number * len(of_student) // NUM_SAMPLES for number in range(NUM_SAMPLES)]
    chosen = torch.tensor(places, device=of_student.device)
    by_teacher, by_student = (
        (x[chosen] @ x.T).scatter(1, chosen[:, None], -math.inf).argmax(-1).tolist() for x in (of_teacher, of_student)
    )
    texts = [
        str(tokenizer.decode(ids[mask.bool()], skip_special_tokens=True))[:MOST_CHARACTERS]
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return [
        {"text": texts[text], "original": texts[original], "student": texts[student]}
        for text, original, student in zip(places, by_teacher, by_student, strict=True)
    ]
