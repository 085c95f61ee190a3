"""fla-core's real kernels, as `kernels.fla` calls them, against the oracles in float64: values and gradients."""

from __future__ import annotations

import pytest
import reference
import torch
import triton_interpreter
from delta_calls import assert_close, sample, values_and_gradients

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import fla as kernels_fla
from hf_linear_attention.torch_kernels.attention import kernel_attention
from hf_linear_attention.torch_kernels.delta import gated_delta


# Of sums of 75 terms, relative to the norm: float32 in another order, and bfloat16, which rounds at 4e-3.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """CPU tensors go to fla as those on CUDA do, and float32 is multiplied exactly."""
    for kernels in (kernels_fla._kernels, kernels_fla._delta_kernels):
        assert None not in (kernels(False), kernels(True))
    triton_interpreter.with_scalars_in_loops("fla.ops")
    monkeypatch.setattr(kernels_fla, "is_on_cuda", lambda tensor: True)
    monkeypatch.setattr(kernels_fla, "is_tf32_allowed", lambda: True)
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)


@pytest.mark.parametrize(("dtype", "recurs"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize(("log_features", "has_decay"), [(True, True), (False, False)])
def test_linear_attention_is_the_oracle(dtype, recurs, log_features, has_decay, monkeypatch):
    """In two parts with a state between them, where the first part of a row is padding."""
    monkeypatch.setattr(kernels_fla, "LONGEST_RECURRENT", 64 if recurs else 0)
    length, split = 35, 16
    # Queries and keys of some tokens are large, so that the largest exponent rises by up to 100 at once.
    size = 1 + 20 * (torch.rand(length, 1) < 0.05)
    query, key = torch.randn(2, 2, length, 6) * size, torch.randn(2, 1, length, 6) * size
    value, direction = torch.randn(2, 1, length, 5).to(dtype), torch.randn(2, 2, length, 5)
    if not log_features:
        query, key = torch.randn(2, 2, length, 6).abs(), torch.randn(2, 1, length, 6).abs()
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :18], mask[1, 20:27] = False, False
    log_decay = torch.tensor([-0.3]) if has_decay else None
    tensors = {"query_features": query, "key_features": key, "value": value}
    tensors |= {"log_decay": log_decay} if has_decay else {}

    def results(function, dtype):
        leaves = {name: (x.to(dtype) if dtype else x).clone().requires_grad_() for name, x in tensors.items()}
        output = function(**leaves) * mask[:, None, :, None]
        return [output, *torch.autograd.grad((output * direction).sum(), list(leaves.values()))]

    def in_two_parts(query_features, key_features, value, log_decay=None):
        state, outputs = None, []
        for part in (slice(0, split), slice(split, length)):
            given = (x[:, :, part] for x in (query_features, key_features, value))
            options = {"log_features": log_features, "is_causal": True, "log_decay": log_decay}
            output, state = kernel_attention(*given, key_mask=mask[:, part], state=state, **options)
            outputs.append(output)
        return torch.cat(outputs, dim=2)

    def oracle(query_features, key_features, value, log_decay=None):
        options = {"log_features": log_features, "is_causal": True, "key_mask": mask, "log_decay": log_decay}
        return reference.kernel_attention(query_features, key_features, value, **options)

    for actual, expected in zip(results(in_two_parts, None), results(oracle, torch.float64), strict=True):
        assert (actual - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    ("per_feature", "dtype", "is_refused"),
    [
        *((False, torch.float32, False), (False, torch.bfloat16, False), (True, torch.float32, False)),
        (False, torch.float32, True),
    ],
)
def test_the_chunked_delta_rule_is_the_oracle(per_feature, dtype, is_refused, monkeypatch):
    """A decay per head is one per feature where fla refuses its gradients."""
    monkeypatch.setattr(kernels_fla, "refuses_decay_per_head", lambda: is_refused)
    if is_refused:
        monkeypatch.setattr("fla.ops.gated_delta_rule.chunk.chunk_bwd_dqkwg", None)
    # In the interpreter the kernels for a decay per feature take half a second per token.
    tensors = sample(20 if per_feature or is_refused else 70, per_feature, dtype=dtype, heads=(2, 1))
    expected = values_and_gradients(reference.gated_delta, tensors)
    bound = 1e-5 if dtype == torch.float32 else 1.5e-2
    assert_close(values_and_gradients(gated_delta, tensors), expected, [bound] * 8)


@pytest.mark.parametrize("per_feature", [False, True])
@torch.no_grad()
def test_the_recurrent_delta_rule_is_the_oracle(per_feature):
    length = 9
    tensors, mask = sample(length, per_feature, 50.0), torch.rand(2, length) > 0.3
    actual = gated_delta(**tensors, key_mask=mask)
    assert_close(actual, reference.gated_delta(**tensors, key_mask=mask), [2e-6, 2e-6])


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [("3.6.0", 9, True), ("3.3.1", 9, False), ("3.7.1", 9, False), ("3.6.0", 8, False)],
)
def test_where_gradients_of_a_decay_per_head_are_refused(version, capability, expected, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    assert kernels_fla.refuses_decay_per_head.__wrapped__() is expected
