"""The gated delta rule where decays are strong, keys equal or sequences packed; in graphs and in threads."""

from __future__ import annotations

import pytest
import reference
import torch
from delta_calls import NAMES, assert_close, sample, values_and_gradients

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import delta as kernels_delta
from hf_linear_attention.torch_kernels.delta import gated_delta


needs_c = pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")


@pytest.mark.parametrize("per_feature", [False, True])
def test_strong_decays_are_exact(per_feature, backend):
    """Decays of 50 nats beside others near 0: a difference of their sums would have lost the small ones."""
    tensors = sample(150, per_feature, dim=16, width=16)
    is_strong = torch.rand(tensors["log_decay"].shape) < 0.3
    tensors["log_decay"] = torch.where(is_strong, -50.0, tensors["log_decay"] * 1e-3)
    actual = values_and_gradients(gated_delta, tensors)
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors))


def masks(length: int):
    """Packed sequences with padding between, tokens that only read, and none at all."""
    left, interior = torch.arange(length) >= torch.tensor([[5], [0]]), torch.rand(2, length) > 0.3
    numbers = torch.arange(length) // torch.tensor([[7], [40]]) + 1
    read = numbers * (2 * interior - 1) * left
    return {"packed and padded": numbers * interior, "only read": read, "none": torch.zeros_like(left)}


@pytest.mark.parametrize(("name", "per_feature"), [("packed and padded", False), ("only read", True), ("none", False)])
def test_masks(name, per_feature, backend):
    tensors, mask = sample(100, per_feature), masks(100)[name]
    exact = values_and_gradients(reference.gated_delta, tensors, key_mask=mask)
    for name in ("query", "key", "value", "log_decay", "beta"):  # padding may hold anything
        hidden = (mask == 0 if name == "query" else mask <= 0)[:, None]
        hidden = hidden.unsqueeze(3) if tensors[name].ndim == 4 else hidden
        tensors[name] = tensors[name].masked_fill(hidden, float("nan"))
    assert_close(values_and_gradients(gated_delta, tensors, key_mask=mask), exact)


def test_equal_keys_are_solved_exactly(backend):
    """The hardest system: with one key and beta 1 every token erases the one before it completely."""
    tensors = sample(128, False, decay=0.0)
    tensors["key"], tensors["beta"] = tensors["key"][:, :, :1].expand(-1, -1, 128, -1), torch.ones(2, 2, 128)
    assert_close(gated_delta(**tensors), reference.gated_delta(**tensors))


def test_gradients_are_those_of_finite_differences_and_can_be_differentiated():
    for per_feature in (False, True):
        tensors = sample(5, per_feature, dim=3, width=2, heads=(2, 1), dtype=torch.float64)
        leaves = [x.double().requires_grad_() for x in tensors.values()]

        def run(*leaves):
            return gated_delta(**dict(zip(NAMES, leaves)))

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@needs_c
def test_compiled_it_is_one_node_forward_and_one_backward():
    tensors, mask = sample(40, True), torch.arange(40) // torch.tensor([[7], [40]]) + 1
    nodes = []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes if "gated_delta" in str(node.target))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(gated_delta, fullgraph=True, backend=backend)
    actual = values_and_gradients(compiled, tensors, key_mask=mask)
    assert_close(actual, values_and_gradients(gated_delta, tensors, key_mask=mask))
    assert len(nodes) == 1
    torch.compiler.reset()
    compiled = torch.compile(gated_delta, fullgraph=True, backend="aot_eager")  # traces the backward pass too
    assert_close(values_and_gradients(compiled, tensors, key_mask=mask), actual)


def test_exported_it_is_operations_of_torch():
    tensors, mask = sample(20, True), torch.rand(2, 20) > 0.3

    class Layer(torch.nn.Module):
        def forward(self, *given):
            return gated_delta(**dict(zip(NAMES, given)), key_mask=mask)

    program = torch.export.export(Layer(), tuple(tensors.values()))
    assert not [node for node in program.graph.nodes if "hf_linear_attention" in str(node.target)]
    assert_close(program.module()(*tensors.values()), reference.gated_delta(**tensors, key_mask=mask))


@needs_c
def test_threads_share_the_columns_of_few_heads(monkeypatch):
    tensors = sample(70, False, heads=(2, 1), width=70)
    tensors = {name: x[:1] for name, x in tensors.items()}
    exact = values_and_gradients(reference.gated_delta, tensors)
    parts = []
    run_attention = kernels_delta.run_attention
    monkeypatch.setattr(
        kernels_delta, "run_attention", lambda *given: parts.append(len(given) - 2) or run_attention(*given)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert_close(values_and_gradients(gated_delta, tensors), exact)
    assert parts == [2, 2]  # 70 columns, at least 32 in each part
