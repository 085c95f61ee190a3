"""Mechanisms of some heads each, as vLLM's tensor parallelism has them."""

from __future__ import annotations

import pytest
import torch
from matrix import MECHANISM_ROWS, attend, build_mechanism, forms, hidden_states_of, qkv

from hf_linear_attention.vllm_plugin.sharding import shard


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4)], ids=["divided", "repeated"])
@pytest.mark.parametrize("row", MECHANISM_ROWS)
@torch.no_grad()
def test_parts_compute_the_heads_of_the_whole(row, kv_heads, size):
    """With fewer key/value heads than processes, several processes have the same one."""
    whole = build_mechanism(row, num_heads=8, num_key_value_heads=kv_heads)
    query, key, value = qkv(41, heads=(8, kv_heads), std=0.5)
    tensors, given = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}, {}
    found = []
    for rank in range(size):
        part = shard(whole, rank, size, {}, "cpu")
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            tensor.weight_loader(tensor, tensors[name])
        if part.needs_gates:
            given = {"gates": part.gates(hidden_states_of(key))}
        own = slice(rank * kv_heads // size, rank * kv_heads // size + max(1, kv_heads // size))
        own_query = query[:, rank * 8 // size : (rank + 1) * 8 // size]
        for is_causal in forms(row):
            found.append(
                (is_causal, attend(part, own_query, key[:, own], value[:, own], None, is_causal=is_causal, **given)[0])
            )
    for is_causal in forms(row):
        wanted = attend(whole, query, key, value, is_causal=is_causal)[0]
        parts = torch.cat([output for kind, output in found if kind == is_causal], dim=2)
        # Sums of a few more or fewer heads at a time, in float32.
        torch.testing.assert_close(parts, wanted, atol=1e-5, rtol=1e-4)


def test_layers_that_share_parameters_share_them_in_their_parts_too():
    whole = build_mechanism("linear-hedgehog", num_heads=8, num_key_value_heads=4)
    made = {}
    parts = [shard(whole, 0, 2, made, "cpu") for _ in range(2)]
    for first, second in zip(parts[0].parameters(), parts[1].parameters()):
        assert first is second


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 3), (8, 3), (4, 16)])
def test_heads_that_cannot_be_divided_are_refused(kv_heads, size):
    whole = build_mechanism("linear-elu1", num_heads=8, num_key_value_heads=kv_heads)
    with pytest.raises(ValueError, match=f"`tensor_parallel_size` = {size} for 8 heads and {kv_heads}"):
        shard(whole, 0, size, {}, "cpu")
