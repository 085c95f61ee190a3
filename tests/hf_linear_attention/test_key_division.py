"""How exact keys are divided between layers."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_linear_attention import calibrate, convert, divide_exact_keys, key_division
from hf_linear_attention.key_division import divided, scaled
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, softmax_attention
from hf_linear_attention.state_size import state_bytes


COUNTS = [1, 2, 4, 8]


@pytest.mark.parametrize("seed", range(8))
def test_no_division_has_a_smaller_sum_of_errors(seed):
    """Of errors that fall ever more slowly; at any number between those that were measured, they are on a line."""
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.rand(3, len(COUNTS) - 1, generator=generator).sort(dim=1, descending=True).values
    widths = torch.tensor(COUNTS).diff()
    errors = torch.cat((torch.zeros(3, 1), -(slopes * widths).cumsum(1)), dim=1) + 20

    def at(layer: int, number: int) -> float:
        place = max(i for i, count in enumerate(COUNTS[:-1]) if count <= number)
        return errors[layer, place].item() - slopes[layer, place].item() * (number - COUNTS[place])

    total = 13
    all_of_them = [way for way in itertools.product(range(1, 9), repeat=3) if sum(way) == total]
    best = min(sum(map(at, range(3), way)) for way in all_of_them)
    found = divided(errors.tolist(), COUNTS, total)
    assert sum(found) == total
    assert sum(map(at, range(3), found)) == pytest.approx(best, abs=1e-5)


def test_keys_that_lower_no_error_are_divided_evenly():
    first, last = COUNTS[0], COUNTS[-1]
    for total in (3 * first, 3 * first + 4, 3 * last):
        found = divided([[5.0] * len(COUNTS)] * 3, COUNTS, total)
        assert sum(found) == total
        assert max(found) - min(found) <= 1
    gains = [float(len(COUNTS) - place) for place in range(len(COUNTS))]
    assert divided([gains, [5.0] * len(COUNTS), [5.0] * len(COUNTS)], COUNTS, last + 2 * first + 2) == [
        last,
        first + 1,
        first + 1,
    ]


@pytest.mark.parametrize("numbers", [[1, 1, 1], [20, 3, 500, 77], [7]])
@pytest.mark.parametrize("total", [3 * 353, 1_000, 40])
def test_numbers_are_scaled_to_another_sum(numbers, total):
    found = scaled(numbers, total)
    assert sum(found) == total
    for one, number in zip(found, numbers, strict=True):
        assert abs(one - total * number / sum(numbers)) < 1


def test_costs_are_measured_where_keys_are_scarce(model, monkeypatch):
    """A row of 64 tokens says little of a state with 12 of them; so 4 and its shares are tried."""
    tried = []
    monkeypatch.setattr(key_division, "_costs", lambda _, modules, __, counts: [tried.append(counts) or [3, 1] * 2] * 3)
    monkeypatch.setattr(key_division, "SHARES", (1 / 4, 1 / 2, 1, 2))
    divide_exact_keys(model, [{"input_ids": torch.ones(2, 64, dtype=torch.long)}])
    assert tried == [[1, 2, 4, 8]]
    divide_exact_keys(model, [{"input_ids": torch.ones(2, 192, dtype=torch.long)}])
    assert tried[1:] == [[3, 6, 12, 24]]


def test_a_layer_whose_errors_rise_for_a_while_is_measured_by_its_hull():
    assert divided([[8, 9, 9, 0], [8, 7, 6.5, 6.4]], COUNTS, 10) == [8, 2]


@pytest.fixture
def model():
    """The first layer attends to everything alike, and the second nearly to one key at a time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=32, max_position_embeddings=128, **sizes))
    for layer, scale in enumerate((0.0, 40.0, 1.0)):
        for name in ("q_proj", "k_proj"):
            getattr(stock.model.layers[layer].self_attn, name).weight.data.mul_(scale)
    return convert(stock.eval(), mechanism="hybrid", window_size=8, num_sinks=1, num_exact_keys=12)


def test_keys_move_and_the_bytes_stay(model, tmp_path):
    rows = [{"input_ids": torch.randint(64, (2, 96), generator=torch.Generator().manual_seed(1))}]
    calibrate(model, rows)
    modules = linear_attention_modules(model).values()
    before = sum(state_bytes(module) for module in modules)
    numbers = divide_exact_keys(model, rows)
    assert sum(numbers) == 36
    assert len(set(numbers)) > 1
    assert max(numbers) <= 34
    assert numbers == model.config.linear_attention["num_exact_keys"]
    assert sum(state_bytes(module) for module in modules) == before
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    others = linear_attention_modules(again).values()
    assert [module.linear_attention.num_exact_keys for module in others] == numbers
    # Either continues a state of the other.
    signatures = [{module.linear_attention.signature for module in part} for part in (modules, others)]
    assert signatures[0] == signatures[1]
    expected = model.generate(rows[0]["input_ids"], max_new_tokens=4, do_sample=False)
    assert torch.equal(again.generate(rows[0]["input_ids"], max_new_tokens=4, do_sample=False), expected)


def test_costs_are_those_of_the_fisher_information(model):
    """Of the layers' outputs before their output projections, computed by hooks on a model that keeps all layers."""
    rows = {"input_ids": torch.randint(64, (2, 96), generator=torch.Generator().manual_seed(1))}
    calibrate(model, [rows])
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    modules, counts = list(linear_attention_modules(model).values()), [4, 40]
    found: dict[tuple, torch.Tensor] = {}

    def keep(place):
        return lambda _, arguments: found.__setitem__(place, arguments[0])

    for layer, module in enumerate(modules):
        module.o_proj.register_forward_pre_hook(keep((layer, "original")))
        module.register_forward_pre_hook(
            lambda _, arguments, given, layer=layer: found.__setitem__((layer, "given"), given), with_kwargs=True
        )
    with softmax_attention(model):
        loss = key_division._sampled_loss(model, rows)
    originals = [found[layer, "original"] for layer in range(3)]
    gradients = torch.autograd.grad(loss, originals)
    model.requires_grad_(False)
    costs = key_division._costs(model, modules, [rows], counts)
    with torch.no_grad():
        for layer, module in enumerate(modules):
            module.o_proj.register_forward_pre_hook(keep("changed"))
            for place, count in enumerate(counts):
                module.linear_attention.num_exact_keys = count
                module(**found[layer, "given"])
                change = (found["changed"] - originals[layer])[:, 48:]
                expected = (gradients[layer][:, 48:] * change).sum(-1).square().sum() / 2
                # float32 sums in another order
                assert costs[layer][place] == pytest.approx(expected.item(), rel=1e-3)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_an_error_leaves_the_model_as_it_was(model, monkeypatch):
    """Such as one row too many for the memory, after which `convert` tries shorter ones."""
    module = list(linear_attention_modules(model).values())[1]
    monkeypatch.setattr(module, "_attend", Mock(side_effect=torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        divide_exact_keys(model, [{"input_ids": torch.ones(2, 96, dtype=torch.long)}])
    assert [m.linear_attention.num_exact_keys for m in linear_attention_modules(model).values()] == [12] * 3
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


def test_logits_of_some_tokens_are_enough(model, monkeypatch):
    """Costs are the same where a model computes the others, too."""
    rows, modules = {"input_ids": torch.arange(64)[None].repeat(2, 1)}, [*linear_attention_modules(model).values()]
    monkeypatch.setattr(key_division, "LOGITS", 64 * 2 * 9)
    asked = []
    model.register_forward_pre_hook(lambda _, __, given: asked.append(given.get("logits_to_keep")), with_kwargs=True)
    some = key_division._costs(model, modules, [rows], [2, 8])
    monkeypatch.setattr(key_division, "signature", lambda _: Mock(parameters={}))
    every = key_division._costs(model, modules, [rows], [2, 8])
    assert len(asked[0]) == 9
    assert min(asked[0]) >= 32
    assert asked[1] is None
    torch.testing.assert_close(torch.tensor(every), torch.tensor(some), rtol=1e-4, atol=0)  # sums in another order


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_logits_of_tokens_is_divided_too(model, tmp_path, auto_class):
    model.save_pretrained(tmp_path)
    other = auto_class.from_pretrained(tmp_path)
    numbers = divide_exact_keys(other, [{"input_ids": torch.arange(64)[None].repeat(2, 1)}])
    assert sum(numbers) == 36
    assert len(set(numbers)) > 1


def test_padding_does_not_count(model):
    ids = torch.randint(64, (1, 96), generator=torch.Generator().manual_seed(1))
    padded = {"input_ids": torch.cat((ids, ids[:, :48] * 0), dim=1), "attention_mask": torch.ones(1, 144).long()}
    padded["attention_mask"][:, 96:] = 0
    other = {**padded, "input_ids": torch.cat((ids, ids[:, :48]), dim=1)}
    numbers = [divide_exact_keys(model, [rows]) for rows in (padded, other)]
    assert numbers[0] == numbers[1]


def test_one_layer_has_nothing_to_divide():
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    assert divide_exact_keys(convert(stock, mechanism="hybrid", window_size=8, num_exact_keys=4), []) == []
