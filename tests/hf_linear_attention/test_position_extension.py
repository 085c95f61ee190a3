"""Longer tables of learned positions: what old inputs give, what the new rows are, and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from matrix import stock_model

from hf_linear_attention import convert


TOKENS = 150
# The embeddings module of each family, and the number of its first rows that are no positions.
FAMILIES = {
    "bert": ("embeddings.position_embeddings", 0),
    "roberta": ("embeddings.position_embeddings", 2),
    "gpt2": ("wpe", 0),
    "opt": ("decoder.embed_positions", 2),
    "bart": ("decoder.embed_positions", 2),
}
TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WIDE = {"max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
CONFIGS = {
    "roberta": lambda: transformers.RobertaConfig(**TINY, **WIDE | {"max_position_embeddings": 66}),
    "t5": lambda: transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
    "opt": lambda: transformers.OPTConfig(**TINY, **WIDE, ffn_dim=48, word_embed_proj_dim=32),
    "bart": lambda: transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, **WIDE,
    ),
}  # fmt: skip


def twin(family: str) -> transformers.PreTrainedModel:
    if family not in CONFIGS:
        return stock_model(family)
    torch.manual_seed(0)
    config = CONFIGS[family]()
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # an untrained twin hardly sees positions
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def table_of(model, family: str) -> torch.Tensor:
    return model.base_model.get_submodule(FAMILIES.get(family, FAMILIES["bert"])[0]).weight


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 60, (batch, length), generator=generator)


def hidden(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.base_model(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("family", FAMILIES)
def test_tiled_positions_change_no_input_that_the_original_can_read(family):
    stock = twin(family)
    before, after = convert(stock), convert(stock, max_position_embeddings=TOKENS)
    assert torch.equal(hidden(before, tokens(64)), hidden(after, tokens(64)))
    assert torch.isfinite(hidden(after, tokens(TOKENS))).all()
    # Only from the second tile on does a shifted input look the same to the table.
    reserved, old, new = FAMILIES[family][1], table_of(stock, family), table_of(after, family)
    assert len(new) == reserved + TOKENS
    assert torch.equal(new[: len(old)], old)
    assert torch.equal(new[reserved + 64 : reserved + 128], old[reserved:])
    assert torch.equal(new[reserved + 128 :], old[reserved : reserved + TOKENS - 128])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_beyond_the_last_position_is_refused_by_its_length(family):
    model = convert(twin(family), max_position_embeddings=TOKENS)
    assert torch.isfinite(hidden(model, tokens(TOKENS))).all()
    words = r"151 tokens.* learned positions for 150\. .*max_length=150.*`--max_position_embeddings 151` or more"
    for other in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(ValueError, match=words):
            hidden(other, tokens(TOKENS + 1))


def test_the_settings_follow():
    """Mechanisms get the new length, but the length that the model was trained on remains."""
    stock = twin("bert")
    linformer = convert(stock, mechanism="linformer", projection_size=8, max_position_embeddings=TOKENS)
    assert linformer.config.linear_attention["max_length"] in (None, TOKENS)
    assert torch.isfinite(hidden(linformer, tokens(TOKENS))).all()
    hybrid = convert(stock, mechanism="hybrid", window_size=8, max_position_embeddings=TOKENS)
    assert hybrid.config.linear_attention["trained_length"] == 64
    assert hybrid.config.max_position_embeddings == TOKENS
    assert stock.config.max_position_embeddings == 64
    roberta = convert(twin("roberta"), max_position_embeddings=TOKENS)
    assert roberta.config.max_position_embeddings == TOKENS + 2  # which also counts the rows before the first token


def test_sinusoids_go_on_instead_of_being_repeated():
    config = stock_model("distilbert").config
    config.sinusoidal_pos_embds = True
    stock = transformers.DistilBertModel(config).eval()
    longer = copy.deepcopy(config)
    longer.max_position_embeddings = TOKENS
    expected = transformers.DistilBertModel(longer).embeddings.position_embeddings.weight
    after = convert(stock, max_position_embeddings=TOKENS)
    torch.testing.assert_close(table_of(after, "distilbert"), expected)
    assert torch.equal(hidden(convert(stock), tokens(64)), hidden(after, tokens(64)))


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {"max_position_embeddings": 99}, "`llama` has no table of learned positions: its positions are rot"),
        ("vit", {"max_position_embeddings": 99}, "those of the patches of an image, and follow `image_size`"),
        ("t5", {"max_position_embeddings": 99, "drop": ["position_bias"]}, "the config of `t5` has no `max_position_"),
        ("bert", {"max_position_embeddings": 64}, "`bert` has positions for 64 tokens already"),
    ],
)
def test_what_cannot_be_extended(family, options, words):
    with pytest.raises(ValueError, match=words):
        convert(twin(family), **options)
