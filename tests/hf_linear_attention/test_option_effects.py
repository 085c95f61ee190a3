"""Every option of every mechanism, set to a second value in rows of each kind: another function, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matrix import KINDS, MECHANISM_ROWS, sample_inputs, stock_model, supports

from hf_linear_attention import convert
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.mechanisms.settings import Option


MORE = (
    *("aft-simple", "linear-exp", "performer-geometry-favor++", "hybrid-no-sinks", "linformer-random"),
    "gated_delta-qwen3_5",
)
ROWS = {row: MECHANISM_ROWS[row] for row in (*KINDS, *MORE)}
CASES = [(mechanism, name) for mechanism, attention in MECHANISMS.items() for name in attention.options]


# Numbers that mean something in 40 tokens and four rotary frequencies, and what must be set beside them.
NUMBERS = {"trained_length": 12, "rope_frequencies": 1}
BESIDE = {"trained_length": {"rope": "partial"}, "rope_frequencies": {"rope": "partial"}}


def other_values(name: str, option: Option, now: Any) -> list[Any]:
    """Values that the option takes, and not the present one: every choice, or one number."""
    if name in NUMBERS:
        return [NUMBERS[name]]
    if option.choices:
        return [choice for choice in option.choices if choice != now]
    if option.kind is bool:
        return [not now]
    if option.kind is float:
        return [(now + 1) / 2]  # stays below 1
    return [60 if now is None else now + 2]  # odd numbers stay odd; longer than the inputs, shorter than the model's


@pytest.fixture(scope="module")
def stock():
    return {name: stock_model(name, num_hidden_layers=2) for name in ("llama", "bert")}


@pytest.fixture(scope="module")
def function_of(stock):
    """A function: a model with these settings, as its weights and its output on 40 tokens; made once."""
    made: dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}

    def build(family: str, settings: dict[str, Any]):
        key = repr((family, settings))
        if key not in made:
            model = convert(stock[family], **settings)
            with torch.no_grad():
                made[key] = model.state_dict(), model(**sample_inputs(family, length=40)).logits
        return made[key]

    return build


def is_other(mine, yours) -> bool:
    if [(name, x.shape) for name, x in mine[0].items()] != [(name, x.shape) for name, x in yours[0].items()]:
        return True
    return not torch.equal(mine[1], yours[1]) or not all(torch.equal(x, yours[0][name]) for name, x in mine[0].items())


@pytest.mark.parametrize(("mechanism", "name"), CASES)
def test_an_option_changes_the_function_or_is_refused(mechanism: str, name: str, function_of) -> None:
    """In one row at least it is taken."""
    option, taken = MECHANISMS[mechanism].options[name], []
    for row, settings in ROWS.items():
        if settings["mechanism"] != mechanism:
            continue
        family = "llama" if supports(row, "causal") else "bert"
        if name in BESIDE and (family == "bert" or "form" in settings):  # which have no rotary positions
            continue
        beside = BESIDE.get(name, {}) if "rope" in MECHANISMS[mechanism].options else {}
        settings = {**settings, **beside}
        before = function_of(family, settings)
        for value in other_values(name, option, settings.get(name, option.default)):
            error, after = "", before
            try:
                after = function_of(family, {**settings, name: value})
            except ValueError as raised:
                error = str(raised)
            assert f"`{name}`" in error or is_other(before, after), f"{name} = {value} in {row}: {error or 'ignored'}"
            taken += [] if error else [row]
    assert taken, "every row refuses it"
