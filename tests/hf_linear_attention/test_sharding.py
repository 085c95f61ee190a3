"""Mechanisms of some heads each, as vLLM's tensor parallelism has them."""

from __future__ import annotations

import pytest
import torch
from matrix import PATHS, attend, build_mechanism, forms, hidden_states_of, qkv

from hf_linear_attention.vllm_plugin.sharding import shard


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 2), (2, 4)], ids=["divided", "repeated"])
@pytest.mark.parametrize("row", PATHS)
@torch.no_grad()
def test_parts_compute_the_heads_of_the_whole(row, kv_heads, size):
    """With fewer key/value heads than processes, several processes have the same one."""
    whole = build_mechanism(row, num_heads=8, num_key_value_heads=kv_heads)
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    query, key, value = qkv(41, heads=(8, kv_heads), std=0.5)
    keys, values = (x.repeat_interleave(max(1, size // kv_heads), dim=1).chunk(size, dim=1) for x in (key, value))
    found = {is_causal: [] for is_causal in forms(row)}
    for rank, own in enumerate(zip(query.chunk(size, dim=1), keys, values)):
        part = shard(whole, rank, size, {}, "cpu")
        for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
            tensor.weight_loader(tensor, tensors[name])
        given = {"gates": part.gates(hidden_states_of(key))} if part.needs_gates else {}
        for is_causal, outputs in found.items():
            outputs.append(attend(part, *own, is_causal=is_causal, **given)[0])
    for is_causal, outputs in found.items():
        wanted = attend(whole, query, key, value, is_causal=is_causal)[0]
        # Kernels sum other heads at a time, in float32.
        torch.testing.assert_close(torch.cat(outputs, dim=2), wanted, atol=1e-5, rtol=1e-4)


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
