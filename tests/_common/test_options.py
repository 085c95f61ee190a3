"""Facts beside options: what they say when they do not hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hf_linear_attention._common.options import (
    BELOW_ONE,
    COUNT,
    POSITIVE,
    PROBABILITY,
    Bounds,
    OnResume,
    facts_of,
    option,
    out_of_bounds,
    without_needs,
    without_task,
)
from hf_linear_attention.conversion.arguments import CONVERSION_FACTS
from hf_linear_attention.training.recipe import FACTS
from hf_linear_attention.training.tasks import TASKS


@dataclass
class Arguments:
    teacher: str | None = option("Model to learn from.", None)
    weight: float | None = option("Weight.", None, bounds=Bounds(least=0), needs=("teacher", "file"), off=0)
    file: str | None = option("Data.", None, tasks=("causal_lm", "masked_lm"), on_resume=OnResume.FREE)
    is_fast: bool = option("Fast.", False, needs=("file",))


KNOWN = facts_of(Arguments)


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused", "text"),
    [
        (COUNT, (1, 9), (0, -1), "1 or more"),
        (POSITIVE, (1e-9,), (0, -1, float("nan")), "a number above 0"),
        (BELOW_ONE, (0, 0.5), (1, -0.1, float("nan")), "a number from 0 to below 1"),
        (PROBABILITY, (0.5,), (0, 1), "a number between 0 and 1"),
    ],
)
def test_bounds(bounds: Bounds, allowed, refused, text: str) -> None:
    assert all(bounds.hold(value) for value in allowed)
    assert not any(bounds.hold(value) for value in refused)
    assert str(bounds) == text


def test_what_is_out_of_bounds_is_said() -> None:
    values = {"teacher": None, "weight": -1.0, "file": None, "is_fast": False}
    assert list(out_of_bounds(KNOWN, values)) == ["`--weight -1.0`: it must be 0 or more"]
    assert not list(out_of_bounds(KNOWN, {**values, "weight": None}))


def test_what_an_option_needs_is_said_where_it_is_on() -> None:
    values = {"teacher": None, "weight": 0.5, "file": None, "is_fast": True}
    assert list(without_needs(KNOWN, values, KNOWN)) == [
        "`--is_fast` needs `--file`; give that as well, or leave out `--is_fast`",
        "`--weight 0.5` needs `--teacher` or `--file`; give that as well, or leave out `--weight`",
    ]
    assert not list(without_needs(KNOWN, {**values, "file": "a"}, KNOWN))
    assert not list(without_needs(KNOWN, {**values, "weight": 0.0, "is_fast": False}, KNOWN))
    assert not list(without_needs(KNOWN, values, ["config"]))  # not an option of these dataclasses


def test_options_of_other_tasks_are_said() -> None:
    said = "`--file` has no effect for `--task embedding`; leave it out, or use causal_lm or masked_lm"
    assert list(without_task(KNOWN, ["file", "weight"], "embedding")) == [said]
    assert not list(without_task(KNOWN, ["file", "weight"], "causal_lm"))


def test_another_value_is_another_run_unless_an_option_says_otherwise() -> None:
    assert KNOWN["teacher"].meaning_on_resume({}) == OnResume.REFUSED
    assert KNOWN["file"].meaning_on_resume({}) == OnResume.FREE


@pytest.mark.parametrize("facts", [FACTS, CONVERSION_FACTS], ids=["training", "conversion"])
def test_what_an_option_needs_is_an_option(facts) -> None:
    for name, fact in facts.items():
        assert facts.keys() >= set(fact.needs), name
        assert set(fact.tasks) <= set(TASKS), name
