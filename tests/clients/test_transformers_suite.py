"""transformers' own common model, configuration and training tests, run against our classes.

    pytest -m clients tests/clients/test_transformers_suite.py
    pytest -m clients tests/clients/test_transformers_suite.py -k gpt2                  # one row
    pytest -m clients tests/clients/test_transformers_suite.py -n 2 --dist loadscope    # rows in parallel

All rows take about 2 minutes of one core. The first run downloads transformers' source distribution (10 MB).
A new mechanism is one more row of `ROWS`, a new family one of `FAMILIES`.

The stock model is the baseline: a test that is skipped for our class must be skipped for the stock class too. What
does not apply to linear attention is listed in `OVERRIDDEN` with its reason, and must still fail: an entry that is no
longer needed is an error.
"""

from __future__ import annotations

import copy
import os
import re
import unittest
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.testing_utils import torch_device
from transformers_tests import SourceUnavailableError, source_module

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings, linear_config_class, model_heads
from hf_linear_attention.model_conversion import convert_config
from hf_linear_attention.modeling_linear_attention import linear_model_class


# Before the import of transformers' test utilities, which read it.
os.environ.setdefault("RUN_TRAINING_TESTS", "1")

try:
    common = source_module("test_modeling_common")
    ConfigTester = source_module("test_configuration_common").ConfigTester
    TrainingTesterMixin = source_module("test_training_mixin").TrainingTesterMixin
except SourceUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.clients

BATCH, LENGTH, CHOICES = 13, 7, 4

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {"vocab_size": 99, **_SIZES, "max_position_embeddings": 512, **_ENDS}

# The stock config class, its tiny sizes, and what its test class of transformers sets.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_TEXT, "num_key_value_heads": 2}, {}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": 512}
        | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 98),
        {},
    ),
    "bert": ("BertConfig", {**_TEXT, "type_vocab_size": 16}, {}),
    "vit": (
        "ViTConfig",
        {**_SIZES, "image_size": 30, "patch_size": 2, "encoder_stride": 2},
        {"test_resize_embeddings": False},
    ),
}
DECODERS = ("llama", "gpt2")


class Row(NamedTuple):
    family: str
    linear_attention: dict[str, Any]


class ModelTester:
    """What the common tests call `model_tester`. Without `linear_attention` it is the stock model's. (transformers has
    one in the test file of every model, and its source distribution leaves those files out.)
    """

    def __init__(self, family, linear_attention):
        name, self.fields, _ = FAMILIES[family]
        self.family, self.linear_attention, self.is_vision = family, linear_attention, family == "vit"
        self.stock_config_class = getattr(transformers, name)
        self.batch_size, self.num_choices, self.is_training = BATCH, CHOICES, True
        config = self.stock_config_class(**self.fields)
        self.hidden_size = config.hidden_size
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads
        if self.is_vision:
            self.image_size, self.patch_size = config.image_size, config.patch_size
            self.mask_length = (config.image_size // config.patch_size) ** 2
            self.seq_length = self.mask_length + 1
            self.num_masks = self.seq_length // 2
        else:
            self.seq_length = LENGTH
            self.causal_lm_class = self._ours(model_heads(family).get("AutoModelForCausalLM"))

    def _ours(self, stock: str | None):
        if stock is None or self.linear_attention is None:
            return stock and getattr(transformers, stock)
        return linear_model_class(getattr(transformers, stock))

    def all_model_classes(self) -> tuple[type, ...]:
        """Every head that an Auto class knows for the family, the base model first."""
        return tuple(self._ours(stock) for stock in dict.fromkeys(model_heads(self.family).values()))

    def get_config(self):
        config = self.stock_config_class(**copy.deepcopy(self.fields))
        return config if self.linear_attention is None else convert_config(config, **self.linear_attention)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        if self.is_vision:
            shape = (BATCH, config.num_channels, config.image_size, config.image_size)
            return config, {"pixel_values": torch.rand(shape, device=torch_device)}
        mask = torch.randint(0, 2, (BATCH, LENGTH), device=torch_device)
        mask[:, 0] = 1
        # Without special tokens: RoBERTa takes padding for a reason to shift positions, which `inputs_embeds` lacks.
        ids = torch.randint(3, config.vocab_size - 1, (BATCH, LENGTH), device=torch_device)
        return config, {"input_ids": ids, "attention_mask": mask}


# Every family and every mechanism once, with default settings but for sizes: what both do together is the subject of
# tests/hf_linear_attention.
ROWS = {
    # a window shorter than the inputs, which have 7 tokens
    "llama_hybrid": Row("llama", {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1}),
    "gpt2_linear": Row("gpt2", {"mechanism": "linear"}),
    "bert_performer": Row("bert", {"mechanism": "performer"}),
    "vit_linformer": Row("vit", {"mechanism": "linformer", "projection_size": 16}),
}

# {name of the test: (rows; why it cannot hold)}, both names patterns
OVERRIDDEN: dict[str, tuple[str, str]] = {
    "test_sdpa_can_dispatch_non_composite_models": (
        ".*",
        "asserts that the default implementation is `sdpa`; where every layer is linear ours is `linear_attention`, so "
        "that masks are linear in the length too (`attn_implementation` still takes `sdpa` and `eager`)",
    ),
    "test_model_get_set_embeddings": (
        "vit_.*",
        "asks for an `nn.Embedding`, and an image model has none: stock ViT fails it and replaces it in its own tests",
    ),
}


def left_out(family: str) -> list[str]:
    """Tests that run no line of ours twice: which of torch's softmax kernels may be used, where no layer has softmax;
    the side of padding where there is none; and masks in half precision and the names of the argument `dtype`, of which
    one decoder and one encoder are enough.
    """
    twice = ".*_sdpa_kernels|.*_pad_right_no_attn_mask"
    twice += {"gpt2": "|.*_[bf][fp]16_.*", "vit": "|.*_[bf][fp]16_.*|.*_pad_(left|right)"}.get(family, "")
    names = re.compile(f"test_eager_matches_sdpa_inference_({twice})")
    found = [name for name in dir(common.ModelTesterMixin) if names.fullmatch(name)]
    return found if family == "llama" else [*found, "test_bc_torch_dtype"]


def reason_of_override(row: str, test: str) -> str | None:
    for pattern, (rows, reason) in OVERRIDDEN.items():
        if re.fullmatch(pattern, test) and re.fullmatch(rows, row):
            return reason
    return None


def suite(row: Row, linear: bool) -> type[unittest.TestCase]:
    """The common tests on the classes of a row, or on the stock classes."""
    settings = dict(LinearAttentionSettings(row.linear_attention, max_length=512)) if linear else None
    tester = ModelTester(row.family, row.linear_attention if linear else None)

    def setUp(self):
        self.model_tester = ModelTester(row.family, row.linear_attention if linear else None)

    def test_config(self):
        config_class = linear_config_class(row.family) if linear else tester.stock_config_class
        width = {config_class.attribute_map.get("hidden_size", "hidden_size"): 96}
        extra = {"linear_attention": settings} if linear else {}
        ConfigTester(
            self, config_class=config_class, has_text_modality=not tester.is_vision, **width, **extra
        ).run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = common.ModelTesterMixin._prepare_for_class(self, inputs_dict, model_class, return_labels)
        if return_labels and model_class.__name__.endswith("ForPreTraining"):
            ids = inputs["input_ids"]
            inputs["labels"], inputs["next_sentence_label"] = ids.new_zeros(ids.shape), ids.new_zeros(ids.shape[0])
        return inputs

    classes = tester.all_model_classes()
    bases: list[type] = [common.ModelTesterMixin]
    if row.family in DECODERS:
        bases.append(TrainingTesterMixin)
    if any(model_class.can_generate() for model_class in classes):
        bases.append(common.GenerationTesterMixin)
    namespace = {
        "setUp": setUp,
        "test_config": test_config,
        "_prepare_for_class": _prepare_for_class,
        "all_model_classes": classes,
        # Overfitting by a third of the steps at three times the rate.
        "training_overfit_steps": 100,
        "training_overfit_learning_rate": 3e-3,
        # Stock BERT, GPT-2 and others of before 2023 are exempt from it; we are not.
        "test_can_init_all_missing_weights_before_2023": linear,
        **FAMILIES[row.family][2],
        **dict.fromkeys(left_out(row.family)),
    }
    return type(f"{'Linear' if linear else 'Stock'}Suite", (*bases, unittest.TestCase), namespace)


def outcome(case: type[unittest.TestCase], test: str) -> str:
    """`passed`, `skipped` or `failed`."""
    result = unittest.TestResult()
    case(test).run(result)
    return "failed" if not result.wasSuccessful() else "skipped" if result.skipped else "passed"


class AgainstStock:
    """Mixed in before the suite of a row."""

    row: str
    linear: type[unittest.TestCase]
    stock: type[unittest.TestCase]

    def _callTestMethod(self, method):
        test = self._testMethodName
        if (reason := reason_of_override(self.row, test)) is not None:
            if outcome(self.linear, test) != "failed":
                self.fail(f"`{test}` passes for `{self.row}` now: remove it from OVERRIDDEN")
            self.skipTest(f"overridden: {reason}")
        try:
            super()._callTestMethod(method)
        except unittest.SkipTest as skip:
            if (baseline := outcome(self.stock, test)) != "skipped":
                self.fail(f"skipped ({skip}), but the stock model's own test {baseline}")
            raise


def _test_class(name: str, row: Row) -> type[unittest.TestCase]:
    linear, stock = suite(row, linear=True), suite(row, linear=False)
    attributes = {"row": name, "linear": linear, "stock": stock}
    return type(f"Test_{name}", (AgainstStock, linear), {"__module__": __name__, **attributes})


for _name, _row in ROWS.items():
    globals()[f"Test_{_name}"] = _test_class(_name, _row)
