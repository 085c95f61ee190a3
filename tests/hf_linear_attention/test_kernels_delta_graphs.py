"""The gated delta rule in graphs, under torch.func, with second derivatives, in threads, and in poisoned memory."""

from __future__ import annotations

import pytest
import reference
import torch
from delta_calls import GRADIENTS, NAMES, VALUES, assert_close, sample, values_and_gradients
from poison import poisoned_allocations

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import delta as kernels_delta
from hf_linear_attention.torch_kernels.delta import gated_delta


needs_c = pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")


def run(*tensors, **options):
    return gated_delta(**dict(zip(NAMES, tensors, strict=True)), **options)


@needs_c
@pytest.mark.parametrize("per_feature", [False, True])
def test_compiled_it_is_one_node_forward_and_one_backward(per_feature):
    tensors, mask = sample(40, per_feature), torch.arange(40) // torch.tensor([[7], [40]]) + 1
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


@pytest.mark.parametrize("per_feature", [False, True])
def test_exported_it_is_operations_of_torch(per_feature):
    tensors, mask = sample(20, per_feature), torch.rand(2, 20) > 0.3

    class Layer(torch.nn.Module):
        def forward(self, *given):
            return run(*given, key_mask=mask)

    program = torch.export.export(Layer(), tuple(tensors.values()))
    assert not [node for node in program.graph.nodes if "hf_linear_attention" in str(node.target)]
    assert_close(program.module()(*tensors.values()), reference.gated_delta(**tensors, key_mask=mask))


@pytest.mark.parametrize("per_feature", [False, True])
def test_second_derivatives_and_functional_transformations(per_feature):
    tensors = [x.double() for x in sample(6, per_feature, dim=4, width=5).values()]

    def loss(*leaves):
        return sum(x.square().sum() for x in run(*leaves))

    def grad_of_grad(inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    narrow = [x.float() for x in tensors]
    assert_close(grad_of_grad(narrow), grad_of_grad(tensors), [GRADIENTS] * 6)
    places = tuple(range(6))
    expected = torch.autograd.grad(loss(*(leaves := [x.clone().requires_grad_() for x in tensors])), leaves)
    assert_close(torch.func.grad(loss, argnums=places)(*narrow), expected, [GRADIENTS] * 6)
    stacked = [
        torch.stack((x, -x)) if name in ("query", "value") else torch.stack((x, x)) for name, x in zip(NAMES, narrow)
    ]
    rows = [run(*row)[0] for row in zip(*stacked)]
    assert_close([torch.func.vmap(run)(*stacked)[0]], [torch.stack(rows)], [VALUES])
    _, tangent = torch.func.jvp(loss, tuple(tensors), tuple(torch.ones_like(x) for x in tensors))
    assert_close([tangent], [sum(g.sum() for g in expected)], [1e-10])  # float64


@needs_c
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_columns_of_few_heads(per_feature, threads, monkeypatch):
    tensors = sample(70, per_feature, heads=(2, 1), width=70)
    tensors = {name: x[:1] for name, x in tensors.items()}
    exact = values_and_gradients(reference.gated_delta, tensors)
    parts = []
    run_attention = kernels_delta.run_attention
    monkeypatch.setattr(
        kernels_delta, "run_attention", lambda *given: parts.append(len(given) - 2) or run_attention(*given)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_close(values_and_gradients(gated_delta, tensors), exact)
    assert parts == [2, 2]  # 70 columns, at least 32 in each part


@needs_c
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("length", [1, 5, 33])
def test_all_memory_is_written_and_no_other(per_feature, length):
    tensors = sample(length, per_feature, dim=7, width=9)
    expected = values_and_gradients(gated_delta, tensors)
    with torch.no_grad():
        step = gated_delta(**tensors)
    with poisoned_allocations() as memory:
        placed = {name: memory.place(name, x, order) for name, x in tensors.items() for order in [range(x.ndim)]}
        placed["query"] = memory.place("query", tensors["query"], (0, 2, 1, 3))
        actual = values_and_gradients(gated_delta, placed)
        with torch.no_grad():
            assert_close(gated_delta(**placed), step, [0, 0])
        memory.check()
    assert_close(actual, expected, [0] * 8)


@needs_c
def test_a_step_is_one_operator_and_checks_like_the_rest():
    tensors = sample(1, False)
    with torch.no_grad():
        with pytest.raises(ValueError, match="`state`"):
            gated_delta(**{**tensors, "state": tensors["state"][:1]})
        with pytest.raises(ValueError, match="`state` is torch"):
            gated_delta(**{**tensors, "state": tensors["state"].bfloat16()})
        longer = sample(2, False)
        with pytest.raises(ValueError, match="Got 2 tokens"):
            kernels_delta.OPERATORS.gated_delta_step(*longer.values(), True)
