"""All figures of a converted causal language model, on one held-out text, beside its teacher and its controls.

window_alone   the student's own window, where it has one, with the weights of the teacher
same_bytes     the window of as many bytes as the student's state, with the weights of the teacher
healed         the same window after the student's training: its stages and tokens
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import entries_of, max_length_of
from hf_linear_attention.conversion.controls import WINDOWS_OF_TEXT, SameBytes, windows_of_same_bytes
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.packing import Examples, Tokens
from hf_linear_attention.training.evaluation.generation_figures import generation_figures
from hf_linear_attention.training.evaluation.retention import (
    SMALLEST_GAP,
    SeparateWindows,
    Settings,
    TokenFigures,
    batches_of,
    bucket_edges,
    distance_edges,
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
    summary,
    target_positions,
    window_settings,
)


logger = logging.getLogger(__name__)


# Of the training text, so many tokens tell which 4-grams are rare: a second for every 2 million.
MAX_COUNTED = 20_000_000
PAIRS = [("student", "window_alone"), ("student", "same_bytes"), ("student", "healed")]
# What a name stands for is computed once where it is kept: `cached(name, compute)`.
Cached = Callable[[str, Callable[[], Tensor]], Tensor]


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
class Controls:
    """The untrained windows of the same bytes, and the healed model of the better one where there is one.

    `left_out` says why there are none.
    """

    windows: list[SameBytes]
    healed: PreTrainedModel | None = None
    left_out: str | None = None


def compute(_: str, what: Callable[[], Tensor]) -> Tensor:
    """Nothing is kept."""
    return what()


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
    return {
        **summary(inside, student.config.linear_attention),
        **_against_controls(inside),
        "control": control,
        "positions": _positions(teacher, student, text, window, controls.healed, cached),
        "recall": _recall(inside, text),
        "generation": _generation(teacher, student, text),
    }


def _against_controls(inside: TokenFigures) -> dict[str, Any]:
    """Of the whole text what the buckets of positions have too, and `closed`: the student's share of the way from the
    window of the same bytes to the teacher, None where there is no gap."""
    found: dict[str, Any] = {"targets": len(inside["student"])}
    for mine, other in PAIRS:
        if other in inside:
            found[f"{mine}_minus_{other}"] = paired_difference(inside[mine], inside[other])
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
    trained_length = trained_length_of(teacher, student, text)
    length, ended_by = window_length(teacher, trained_length, text)
    windows = SeparateWindows(running_text(text.examples), max(length, 2), text.bos_token_id)
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
    """Of the targets inside the trained length: beyond it the teacher is none."""
    if text.training is None:
        return {"left_out": "which 4-grams are rare is counted on the training text: give a `--train_file`"}
    documents = list(_first_tokens(text.training, MAX_COUNTED))
    distance = recall_distances(repeats(text.examples), documents)
    models = ("teacher", "student", "same_bytes", "healed")
    nats: dict[str, Tensor] = {name: inside[name] for name in models if name in inside}
    buckets = recall_buckets(distance, nats, distance_edges(text.max_length), "same_bytes")
    return {"counted_tokens": sum(map(len, documents)), "buckets": buckets}


def _first_tokens(documents: Iterable[Tokens], count: int) -> Iterable[Tokens]:
    """Documents until they have `count` tokens."""
    for document in documents:
        if count <= 0:
            return
        yield document[:count]
        count -= len(document)


def _generation(teacher: PreTrainedModel, student: PreTrainedModel, text: HeldOutText) -> list[dict[str, Any]]:
    longest = min(text.max_eval_length, most_positions(teacher) or text.max_eval_length)
    logger.info("samples of both models")
    return generation_figures(
        teacher,
        student,
        running_text(text.examples),
        text.bos_token_id,
        trained_length_of(teacher, student, text),
        longest,
    )
