# SPDX-License-Identifier: Apache-2.0
"""Which families vLLM's Transformers backend runs as transformers does.

To that backend the tokens of all requests are one text: the numbers of their places go with them, and attention keeps
the requests apart. A model that looks at neighbours in any other way computes something else there, without an error.
So families are served that were compared with transformers: the encoders named here, and all decoders of
tested_architectures.py but those with a reason here.
"""

from __future__ import annotations

import sys
from typing import Any

from ..attention.transformers_internals import is_masked_lm
from ..configuration_linear_attention import is_causal_config
from ..positions.limit import PositionLimit
from ..tested_architectures import ARCHITECTURES


ENCODERS = frozenset(
    {
        *("bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert", "modernbert", "roberta"),
        *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
_RENAMED = "vLLM does not rename and split the weights of its checkpoints as transformers does"
_OTHER_INPUTS = "it reads more of a document than numbers of tokens, which vLLM cannot pass"
_EXPERTS = "vLLM's layers for experts cannot take its router"
_RECURRENT = "it has recurrent layers of its own, whose states would mix the requests of a step"
REASONS = {
    "albert": "all its layers are one module, and vLLM wants one for each layer",
    "aria_text": _EXPERTS,
    "esm": "it counts masked tokens and places over all requests of a step",
    "falcon_h1": _RECURRENT,
    "gte": _RENAMED,
    "hy_v3": _EXPERTS,
    "jina_embeddings_v3": _RENAMED,
    "layoutlm": _OTHER_INPUTS,
    "lfm2": _RECURRENT,
    "lfm3": _RECURRENT,
    "llama4_text": _EXPERTS,
    "markuplm": _OTHER_INPUTS,
    "minimax_m2": _EXPERTS,
    "mobilebert": "it joins the embeddings of neighbouring tokens, which may belong to different requests",
    "modernbert-decoder": "it has more between its last hidden state and its output layer than vLLM computes",
    "mpt": "it asks for an attention mask, and vLLM makes none",
    "nemotron_h": _RECURRENT,
    "nomic_bert": _RENAMED,
    "olmo_hybrid": _RECURRENT,
    "phimoe": _EXPERTS,
    "roc_bert": _OTHER_INPUTS,
}


def is_encoder(config: Any) -> bool:
    """Whether the tokens of a model with this config see later ones."""
    return not is_causal_config(config, config.stock_model_type)


def refuse_family(config: Any) -> None:
    """Refuse (ValueError) a model that would compute something else in vLLM than in transformers."""
    family = config.stock_model_type
    reason = REASONS.get(family)
    if is_encoder(config):
        if family not in ENCODERS and reason is None:
            reason = "this encoder was not compared with transformers there"
        if (config.architectures or [""])[0].endswith("ForTokenClassification"):
            reason = "of encoders it has embeddings and classes of texts, and not of tokens"
        instead = "encode with transformers"
    else:
        if is_masked_lm(family):
            reason = "as a decoder (`is_decoder`) it was not compared with transformers there"
        elif family not in ARCHITECTURES["decoders"]:
            reason = "this decoder was not compared with transformers there"
        instead = "serve it with `hf-linear-attention serve`"
    if reason is not None:
        raise ValueError(f"vLLM cannot serve a converted `{family}`: {reason}; {instead}.")


def counts_after_padding(model: Any) -> bool:
    """Whether the positions of this encoder begin after the number of its padding token, as in RoBERTa."""
    function, stock = "create_position_ids_from_input_ids", type(model).stock_class
    owners = [sys.modules[stock.__module__], *map(type, model.modules())]
    return any(hasattr(owner, function) for owner in owners)


def check_positions(model: Any, longest: int) -> None:
    """Raise ValueError if the `longest` text exceeds a table of learned positions, once and not in each pass.

    A pass has the tokens of many texts, so its length says nothing, and to look at positions would wait for a GPU.
    """
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if not isinstance(hook, PositionLimit):
                continue
            if longest > hook.limit:
                raise ValueError(
                    f"Got `max_model_len` = {longest:,}, but {type(module).__name__} has learned positions for "
                    f"{hook.limit:,}; pass `--max-model-len {hook.limit}`."
                )
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def refuse_other_values(module: Any) -> None:
    """Refuse (ValueError) multi-head latent attention, whose values are not as wide as its keys."""
    width, value_width = module.linear_attention.shape.head_dim, getattr(module, "v_head_dim", None)
    if value_width not in (None, width):
        raise ValueError(
            f"{type(module).__name__} has values of {value_width} numbers and keys of {width}, and the states in "
            "vLLM's cache are laid out for equal ones; serve it with `hf-linear-attention serve`."
        )
