"""An input that is longer than the tables of learned positions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from matrix import stock_model

from hf_linear_attention import convert


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
WIDE = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
# Some count the first rows of a table, which are not positions, and some do not; all read 64 tokens.
CONFIGS = {
    "roberta": lambda: transformers.RobertaConfig(**TINY, **WIDE, max_position_embeddings=66),
    "opt": lambda: transformers.OPTConfig(
        **TINY, **WIDE, max_position_embeddings=64, ffn_dim=48, word_embed_proj_dim=32
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **WIDE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "gpt2", *CONFIGS])
def test_an_input_beyond_the_last_position_is_refused_by_its_length(family):
    stock = transformers.AutoModel.from_config(CONFIGS[family]()) if family in CONFIGS else stock_model(family)
    model = convert(stock)
    ids = torch.randint(3, 60, (2, 65))
    with torch.no_grad():
        assert torch.isfinite(model.base_model(input_ids=ids[:, :64]).last_hidden_state).all()
    words = r"65 tokens.* learned positions for 64\. .*max_length=64"
    for other in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(ValueError, match=words):
            other.base_model(input_ids=ids)
