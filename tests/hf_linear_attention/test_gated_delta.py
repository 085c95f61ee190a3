"""What only `gated_delta` has: what its state recalls, its start, its convolution; and the rule as in Qwen3-Next."""

from __future__ import annotations

import pytest
import torch
from matrix import attend, mechanism_of, qkv, stock_config, stock_model
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hf_linear_attention import convert
from hf_linear_attention.conversion.plan import state_bytes
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.torch_kernels.delta import gated_delta


def build(**settings):
    return mechanism_of({"mechanism": "gated_delta", **settings}, is_causal=True)


def test_it_is_the_rule_of_qwen3_next():
    """Of transformers' own fallback, which also takes keys of length 1 and scales queries."""
    query, key, value = (torch.randn(2, 4, 33, 16) for _ in range(3))
    log_decay, beta = -torch.rand(2, 4, 33), torch.rand(2, 4, 33)
    state = torch.randn(2, 4, 16, 16)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    theirs = [x.transpose(1, 2) for x in (query, key, value, log_decay, beta)]
    expected = torch_recurrent_gated_delta_rule(*theirs, initial_state=state, output_final_state=True)
    actual = gated_delta(query / 4, key, value, log_decay, beta, state=state)
    # float32 sums in another order
    torch.testing.assert_close(actual[0].transpose(1, 2), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("erase", [True, False])
def test_the_state_recalls_the_newest_value_of_a_key_or_the_sum_of_all(erase):
    """With beta = 1, no decay and orthogonal keys, of which each comes twice."""
    mechanism = build(decay="none", erase=erase)
    key = torch.eye(8)[[*range(8), *range(8)]].expand(2, 2, -1, -1) * 3
    value, query = torch.randn(2, 2, 16, 8), key[:, :1].expand(-1, 4, -1, -1)
    output, _ = attend(mechanism, query, key, value, gates=torch.ones(2, 16, 2))
    first, second = value[:, :, :8], value[:, :, 8:]
    expected = torch.cat((first, second if erase else first + second), dim=2).repeat_interleave(2, dim=1)
    torch.testing.assert_close(output.transpose(1, 2), expected, rtol=1e-4, atol=1e-5)  # lengths have an epsilon


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_the_start_does_not_depend_on_the_hidden_states(decay):
    mechanism = build(decay=decay, trained_length=100)
    gates = mechanism.gates(torch.randn(3, 7, 16))
    width = {"none": 0, "head": 2, "channel": 16}[decay]
    torch.testing.assert_close(gates[..., :2], torch.full((3, 7, 2), 0.5))
    torch.testing.assert_close(gates[..., 2:], torch.full((3, 7, width), -1 / 20))  # whatever the trained length is
    assert torch.equal(mechanism.rule.features.key_projection, torch.eye(8).expand(2, -1, -1))


def test_the_convolution_starts_as_the_identity_and_sees_only_its_tokens():
    plain, mechanism = build(), build(conv_size=4)
    query, key, value = qkv(30)
    gates = plain.gates(torch.randn(2, 30, 16))
    outputs = [attend(each, query, key, value, gates=gates)[0] for each in (mechanism, plain)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    with torch.no_grad():
        for convolution in mechanism.convolutions:
            convolution.weight.normal_()
    _, state = attend(mechanism, query, key, value, gates=gates)
    assert [tuple(x.shape) for x in state] == [(2, 2, 8, 8), (2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
    assert torch.equal(state[1], query[:, :, 27:])
    # three tokens back a change of a key is in the state, four back it is not in the newest key
    convolve = mechanism.convolutions[1]
    line = torch.cat((torch.zeros(2, 2, 3, 8), key), dim=2)
    changed = line.clone()
    changed[:, :, 10] += 1
    difference = (convolve(changed, None) - convolve(line, None)).abs().amax(dim=(0, 1, 3)) > 1e-6
    assert difference.nonzero().flatten().tolist() == [7, 8, 9, 10]


def test_its_state_is_as_large_as_a_conversion_says():
    for settings in ({}, {"num_features": 12, "decay": "channel"}, {"conv_size": 3}):
        model = convert(stock_model("llama"), mechanism="gated_delta", **settings)
        with torch.no_grad():
            cache = model(torch.randint(3, 64, (1, 20)), use_cache=True).past_key_values
        modules = linear_attention_modules(model).values()
        assert [layer.state_bytes() for layer in cache.layers] == [state_bytes(module) for module in modules]
        floats = 2 * settings.get("num_features", 8) * 8 + (settings.get("conv_size", 1) - 1) * 8 * (4 + 2 + 2)
        assert cache.layers[0].state_bytes() == 4 * floats


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="`gated_delta` has no bidirectional form"):
        convert_config(stock_config("bert"), mechanism="gated_delta")
    with pytest.raises(ValueError, match="`conv_size` = 1 would see no earlier token; use 0 or at least 2"):
        build(conv_size=1)
    with pytest.raises(ValueError, match="needs `gates`; compute them with the method of that name"):
        attend(build(), *qkv(3))
