# SPDX-License-Identifier: Apache-2.0
"""What importing the package registers: the configs, model classes and tokenizers of the `linear_<x>` model types.

No modelling file is imported here: the heads of a family are registered when its first config is built. Native model
types are not touched.
"""

from __future__ import annotations

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .configuration_linear_attention import FIRST_INSTANCE_HOOKS
from .configuration_linear_attention import PREFIX
from .configuration_linear_attention import linear_config_class
from .configuration_linear_attention import model_heads
from .transformers_internals import replace_extra_configs


class LinearConfigs(dict):
    """`{"linear_llama": LinearLlamaConfig, ...}` for every model type of transformers, each made when first asked for.

    Importing the stock config classes up front would cost a second (`LlamaConfig` alone imports torch's compiler).
    """

    def __contains__(self, model_type: object) -> bool:
        stock = model_type.removeprefix(PREFIX) if isinstance(model_type, str) else None
        return super().__contains__(model_type) or (stock != model_type and stock in CONFIG_MAPPING_NAMES)

    def __missing__(self, model_type: str) -> type:
        if model_type not in self:
            raise KeyError(model_type)
        return self.setdefault(model_type, linear_config_class(model_type.removeprefix(PREFIX)))


def register() -> None:
    """Make AutoConfig know the `linear_<x>` model types; called once, on import of the package.

    `AutoConfig.register` would need the classes themselves. It writes into `_extra_content`, which therefore becomes a
    dict that makes them on demand and keeps whatever others have registered.
    """
    FIRST_INSTANCE_HOOKS.append(register_heads)
    replace_extra_configs(LinearConfigs)


def register_heads(config_class: type) -> None:
    """Register every head of a family in its Auto class, and its tokenizer and processors."""
    # Here and not at the top: these import torch's compiler and every image library, over a second.
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    from .modeling_linear_attention import linear_model_class

    for auto_class, stock in model_heads(config_class.stock_model_type).items():
        model_class = linear_model_class(getattr(transformers, stock))
        getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
    stock_config = config_class.__mro__[2]
    for mapping in (TOKENIZER_MAPPING, IMAGE_PROCESSOR_MAPPING, FEATURE_EXTRACTOR_MAPPING, PROCESSOR_MAPPING):
        if stock_config in mapping:
            mapping.register(config_class, mapping[stock_config], exist_ok=True)
