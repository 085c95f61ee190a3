# SPDX-License-Identifier: Apache-2.0
"""Registration of the configs, model classes and tokenizers of the `linear_<x>` model types on import of the package.

No modelling file is imported here: the model classes of a family are registered when its first config is built. Native
model types are not changed.
"""

from __future__ import annotations

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .attention.transformers_internals import replace_extra_configs
from .extensions import PREFIX


class LinearConfigs(dict):
    """`{"linear_llama": LinearLlamaConfig, ...}` for every model type of transformers, each made on first access.

    Importing all stock config classes at once would take a second (`LlamaConfig` alone imports torch's compiler).
    """

    def __contains__(self, model_type: object) -> bool:
        stock = model_type.removeprefix(PREFIX) if isinstance(model_type, str) else None
        return super().__contains__(model_type) or (stock != model_type and stock in CONFIG_MAPPING_NAMES)

    def __missing__(self, model_type: str) -> type:
        if model_type not in self:
            raise KeyError(model_type)
        # `register` runs while transformers is imported, which may be the work of this file.
        from .configuration_linear_attention import linear_config_class

        return self.setdefault(model_type, linear_config_class(model_type.removeprefix(PREFIX)))


def register() -> None:
    """Register the `linear_<x>` model types with AutoConfig; called once, on import of the package.

    `AutoConfig.register` would need the classes themselves. It writes into the dict `_extra_content`, so this replaces
    that dict by one that makes the classes on demand and keeps what others have registered.
    """
    replace_extra_configs(LinearConfigs)


def register_heads(config_class: type) -> None:
    """Register every head of a family with its Auto class, and the tokenizer and processors of the family."""
    # These imports take over a second, with torch's compiler and every image library, so they are not at the top.
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    from .configuration_linear_attention import model_heads
    from .modeling_linear_attention import linear_model_class

    for auto_class, stock in model_heads(config_class.stock_model_type).items():
        model_class = linear_model_class(getattr(transformers, stock))
        getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
    stock_config = config_class.__mro__[2]
    for mapping in (TOKENIZER_MAPPING, IMAGE_PROCESSOR_MAPPING, FEATURE_EXTRACTOR_MAPPING, PROCESSOR_MAPPING):
        if stock_config in mapping:
            mapping.register(config_class, mapping[stock_config], exist_ok=True)
