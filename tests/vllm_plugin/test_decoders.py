"""Converted decoders in vLLM write the tokens that `generate` writes, however their requests are scheduled."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import CONFIGS, engine, expected, metric, prompts, written

from hf_linear_attention.vllm_plugin import states


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "hybrid"])  # which the next tests run
def test_many_requests_at_once_with_prompts_in_chunks(converted, name):
    folder, texts = converted(name), prompts(24)
    with engine(folder, max_num_batched_tokens=96, max_num_seqs=24) as llm:
        assert written(llm, texts) == expected(folder, texts)


def test_a_prompt_of_one_token_begins_where_the_state_of_another_request_was(converted):
    """A step has it beside tokens that continue a state."""
    folder, short = converted("hybrid"), [[number] for number in range(5, 17)]
    with engine(folder, num_gpu_blocks_override=40, max_num_seqs=12) as llm:
        written(llm, [text for text in prompts(40) if len(text) > 16][:12])
        assert written(llm, short) == expected(folder, short)


def test_requests_that_find_no_block_begin_again(converted):
    """Nine blocks of 128 tokens hold the prompts of some requests, but not what all of them write."""
    folder = converted("softmax layers")
    texts = [text[:100] for text in prompts(60, longest=120) if len(text) > 100][:8]
    with engine(folder, max_model_len=256, num_gpu_blocks_override=9, max_num_seqs=8) as llm:
        assert written(llm, texts, 100) == expected(folder, texts, 100)
        assert metric(llm, "num_preemptions") > 0


def test_a_state_takes_as_much_as_its_layers_need(converted):
    """And not as many blocks of the largest layer as there are layers."""
    folder = converted("keys by layer")
    with engine(folder, num_gpu_blocks_override=20) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        caches, sizes = [layer.kv_cache[0] for layer in layers], [sum(layer.sizes) for layer in layers]
        assert len(set(sizes)) == len(sizes) == 3
        assert [tuple(x.shape) for x in caches] == [(20, size) for size in sizes]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in caches}
        assert sum(memory.values()) == 20 * sum(sizes)


@pytest.mark.parametrize("name", ["hybrid", "keys by layer", "softmax layers"])
def test_prompts_that_begin_alike_are_read_once(converted, name):
    """vLLM keeps states at the ends of the chunks in which it reads a prompt."""
    folder = converted(name)
    shared = [number % 100 + 3 for number in range(700)]
    texts = [shared + text for text in prompts(8, 60)]
    with engine(folder, enable_prefix_caching=True, max_num_seqs=2, max_num_batched_tokens=256) as llm:
        first, hits = written(llm, texts), metric(llm, "prefix_cache_hits")
        assert hits > 0  # of the requests of one call
        assert first == written(llm, texts) == expected(folder, texts)
        assert metric(llm, "prefix_cache_hits") > 2 * hits


def test_inputs_beyond_the_trained_length_and_beyond_undivided_passes(converted):
    folder = converted("hybrid")
    texts = [[number % 100 + 3 for number in range(length)] for length in (1_500, 9_000)]
    with engine(folder, max_model_len=9_200, max_num_batched_tokens=16_384) as llm:
        assert written(llm, texts) == expected(folder, texts)


def test_what_prompts_need_on_the_device_is_made_once_for_all_layers(converted, monkeypatch):
    made, read = [], []
    make, read_one = states.Group.of, states.StateLayer.read
    monkeypatch.setattr(states.Group, "of", lambda *given: made.append(make(*given)) or made[-1])
    monkeypatch.setattr(states.StateLayer, "read", lambda *given: read.append(given[2]) or read_one(*given))
    with engine(converted("hybrid"), max_num_batched_tokens=128, enable_chunked_prefill=True) as llm:
        written(llm, prompts(8), 4)
    assert any(len(group.prompts) > 1 for group in made)
    assert len(read) == 3 * len(made)
    assert {id(group) for group in read} == {id(group) for group in made}


@pytest.mark.parametrize("mechanism", ["linear", "keys by layer"])
def test_bfloat16(converted, mechanism):
    folder, texts = converted(mechanism), prompts(12, 60)
    with engine(folder, dtype="bfloat16") as llm:
        found, wanted = written(llm, texts, 8), expected(folder, texts, 8, torch.bfloat16)
    # Rounding differs with the batch, so the likeliest of two close tokens may.
    assert sum(a == b for a, b in zip(found, wanted)) >= 10


def test_compiled_graphs(converted):
    folder, texts = converted("hybrid"), prompts(12)
    with engine(folder, enforce_eager=False) as llm:
        assert written(llm, texts) == expected(folder, texts)


def test_an_adapter(converted, tmp_path):
    import peft
    from vllm.lora.request import LoRARequest

    folder, texts = converted("hybrid"), prompts(8)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    with engine(folder, enable_lora=True, max_lora_rank=8) as llm:
        with_adapter = written(llm, texts, lora_request=LoRARequest("adapter", 1, str(tmp_path)))
        without = written(llm, texts)
    assert with_adapter == expected(tmp_path / "merged", texts)
    assert without == expected(folder, texts) != with_adapter


def test_two_processes_with_half_of_the_heads_each(converted):
    folder, texts = converted("softmax layers"), prompts(8, 120)
    with engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert written(llm, texts) == expected(folder, texts)


def test_what_states_do_not_allow_is_refused(converted):
    speculative = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="Speculative"), engine(converted("hybrid"), speculative_config=speculative):
        pass
