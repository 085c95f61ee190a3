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
    facts_of,
    option,
    without_needs,
)
from hf_linear_attention.conversion.arguments import CONVERSION_FACTS
from hf_linear_attention.training.recipe import FACTS
from hf_linear_attention.training.tasks import TASKS


@dataclass
class Arguments:
    teacher: str | None = option("Model to learn from.", None)
    weight: float | None = option("Weight.", None, needs=("teacher", "file"), off=0)
    file: str | None = option("Data.", None)
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


def test_what_an_option_needs_is_said_where_it_is_on() -> None:
    values = {"teacher": None, "weight": 0.5, "file": None, "is_fast": True}
    assert list(without_needs(KNOWN, values, KNOWN)) == [
        "`--is_fast` needs `--file`; give that as well, or leave out `--is_fast`",
        "`--weight 0.5` needs `--teacher` or `--file`; give that as well, or leave out `--weight`",
    ]
    assert not list(without_needs(KNOWN, {**values, "file": "a"}, KNOWN))
    assert not list(without_needs(KNOWN, {**values, "weight": 0.0, "is_fast": False}, KNOWN))


@pytest.mark.parametrize("facts", [FACTS, CONVERSION_FACTS], ids=["training", "conversion"])
def test_what_an_option_needs_is_an_option(facts) -> None:
    for name, fact in facts.items():
        assert facts.keys() >= set(fact.needs), name
        assert set(fact.tasks) <= set(TASKS), name
