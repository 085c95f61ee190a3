"""Importing the package is cheap and leaves every native model type alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import transformers
from matrix import stock_config, stock_model
from transformers import AutoConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from hf_linear_attention import convert_config, supported_model_types
from hf_linear_attention.registration import LinearConfigs


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_no_modelling_file_and_no_slow_module():
    code = (
        "import sys, transformers; from transformers import AutoConfig, PreTrainedConfig; before = set(sys.modules)\n"
        "import hf_linear_attention\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    )
    new = run_python(code).split()
    assert "hf_linear_attention" in new
    # What an import may bring in is our own light files and nothing of transformers or torch besides.
    assert [name for name in new if not name.startswith("hf_linear_attention")] == []
    assert not any("modeling" in name or "mechanism" in name for name in new)


def test_native_model_types_are_untouched():
    code = (
        "import transformers, json\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES\n"
        "from transformers import AttentionInterface\n"
        "{}\n"
        "keys = [k for k in CONFIG_MAPPING.keys() if not k.startswith('linear_')]\n"
        "print(len(keys), keys[:3], transformers.AutoConfig.for_model('llama').__class__, "
        "type(transformers.AutoModel.from_config(transformers.BertConfig(hidden_size=12, num_hidden_layers=1, "
        "vocab_size=9))), transformers.LlamaForCausalLM.__mro__, "
        "sorted(k for k in AttentionInterface().valid_keys() if k != 'linear_attention'))"
    )
    assert run_python(code.format("")) == run_python(code.format("import hf_linear_attention"))


def test_configs_load_by_model_type_alone(tmp_path):
    for model_type in supported_model_types():
        convert_config(stock_config(model_type), mechanism="performer").save_pretrained(tmp_path / model_type)
        config = AutoConfig.from_pretrained(tmp_path / model_type)
        assert type(config).__name__ == "Linear" + type(stock_config(model_type)).__name__


def test_model_types_outside_the_table_resolve_too_and_unknown_ones_do_not():
    assert AutoConfig.for_model("linear_gemma").stock_model_type == "gemma"
    assert "linear_no_such_model" not in LinearConfigs()
    assert "llama" not in LinearConfigs()
    with pytest.raises(ValueError, match="Unrecognized model identifier"):
        AutoConfig.for_model("linear_no_such_model")


def test_other_registrations_survive():
    class OtherConfig(transformers.PreTrainedConfig):
        model_type = "somebody_elses"

    AutoConfig.register("somebody_elses", OtherConfig)
    assert type(AutoConfig.for_model("somebody_elses")) is OtherConfig


def test_supported_model_types_are_those_of_transformers():
    for model_type in supported_model_types():
        assert stock_model(model_type).config.model_type == model_type


def test_tokenizer_of_the_stock_family_is_registered():
    config = convert_config(stock_config("bert"))
    assert TOKENIZER_MAPPING[type(config)] == TOKENIZER_MAPPING[type(stock_config("bert"))]
