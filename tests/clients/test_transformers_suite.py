"""transformers' own common model, configuration and training tests, run against our classes.

    pytest -m clients tests/clients/test_transformers_suite.py
    pytest -m clients tests/clients/test_transformers_suite.py -k "gpt2 and linear"     # one row
    pytest -m clients tests/clients/test_transformers_suite.py -n 2 --dist loadscope    # rows in parallel

All rows take about 3 minutes of one core. The first run downloads transformers' source distribution (10 MB).
A new model or mechanism is one more row of `ROWS`, a new family one of `FAMILIES` in `tests/support/model_testers.py`.

The stock model is the baseline: a test that is skipped for our class must be skipped for the stock class too. What
does not apply to linear attention is listed in `OVERRIDDEN` with its reason, and must still fail: an entry that is no
longer needed is an error.
"""

from __future__ import annotations

import os
import re
import unittest
from typing import Any, NamedTuple

import pytest
import transformers
from model_testers import DECODERS, FAMILIES, ModelTester
from packaging.version import Version
from transformers_tests import SourceUnavailableError, source_module

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings, linear_config_class


# Before the import of transformers' test utilities, which read it.
os.environ.setdefault("RUN_TRAINING_TESTS", "1")

try:
    common = source_module("test_modeling_common")
    ConfigTester = source_module("test_configuration_common").ConfigTester
    TrainingTesterMixin = source_module("test_training_mixin").TrainingTesterMixin
except SourceUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.clients

FLOORS_MEASURED_WITH = "5.23"


class Row(NamedTuple):
    family: str
    linear_attention: dict[str, Any]


# The default settings but for sizes.
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear"},
    "performer": {"mechanism": "performer"},
    # a window shorter than the inputs, which have 7 tokens
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1},
    "linformer": {"mechanism": "linformer", "projection_size": 16},
}

# So many tests passed in each row of the family with `FLOORS_MEASURED_WITH`, on a CPU.
FLOORS = {"llama": 112, "gpt2": 106, "bert": 106, "vit": 98}


# Every family with one mechanism, every mechanism with a family: what both do together is the subject of
# tests/hf_linear_attention.
OF_FAMILIES = {"linear": list(FLOORS), "performer": ["gpt2"], "hybrid": ["llama", "bert"], "linformer": ["vit"]}

ROWS = {
    f"{family}_{name}": Row(family, SETTINGS[name]) for name, families in OF_FAMILIES.items() for family in families
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
        # Stock BERT, GPT-2 and others of before 2023 are exempt from it; we are not.
        "test_can_init_all_missing_weights_before_2023": linear,
        **FAMILIES[row.family][2],
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
    started: set[str]
    passed: set[str]

    def _callTestMethod(self, method):
        test = self._testMethodName
        self.started.add(test)
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
        self.passed.add(test)

    def test_zz_enough_tests_passed(self):
        """Named so that it runs last: a row whose tests silently go missing is found out here."""
        collected = set(unittest.defaultTestLoader.getTestCaseNames(type(self)))
        skipped_by_decorator = {name for name in collected if getattr(getattr(self, name), "__unittest_skip__", False)}
        if missing := collected - skipped_by_decorator - self.started:
            self.skipTest(f"only with the whole row; {len(missing)} of its tests were not run")
        if Version(transformers.__version__) < Version(FLOORS_MEASURED_WITH):
            self.skipTest(f"transformers {transformers.__version__} has fewer tests than {FLOORS_MEASURED_WITH}")
        floor = FLOORS[ROWS[self.row].family]
        assert len(self.passed) >= floor, f"{len(self.passed)} tests passed for `{self.row}`, once {floor} did"


def _test_class(name: str, row: Row) -> type[unittest.TestCase]:
    linear, stock = suite(row, linear=True), suite(row, linear=False)
    attributes = {"row": name, "linear": linear, "stock": stock, "started": set(), "passed": set()}
    return type(f"Test_{name}", (AgainstStock, linear), {"__module__": __name__, **attributes})


for _name, _row in ROWS.items():
    globals()[f"Test_{_name}"] = _test_class(_name, _row)
