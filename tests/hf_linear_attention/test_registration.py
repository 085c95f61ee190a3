"""Importing the package is cheap and leaves every native model type alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from architectures import tiny_config
from checkpoints import save_twin
from matrix import stock_config
from transformers import AutoConfig, AutoFeatureExtractor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from hf_linear_attention import convert_config
from hf_linear_attention.registration import LinearConfigs


def run_python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


NATIVE = """
def native():
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    names = [name for name in CONFIG_MAPPING.keys() if not name.startswith("linear_")]
    tiny = transformers.AutoModel.from_config(transformers.BertConfig(num_hidden_layers=1, vocab_size=9))
    interfaces = sorted({*transformers.AttentionInterface().valid_keys()} - {"linear_attention"})
    llama = type(transformers.AutoConfig.for_model("llama")), transformers.LlamaForCausalLM.__mro__
    return len(names), names[:3], *llama, type(tiny), interfaces
"""


def test_the_import_needs_no_torch():
    code = "import sys, hf_linear_attention.vllm_plugin; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    assert run_python(code) == "set()\n"


def test_configs_load_by_model_type_alone(tmp_path):
    """Those outside the table of tested ones too; unknown ones do not."""
    for model_type in ("llama", "bert", "vit"):
        convert_config(stock_config(model_type), mechanism="performer").save_pretrained(tmp_path / model_type)
        config = AutoConfig.from_pretrained(tmp_path / model_type)
        assert type(config).__name__ == "Linear" + type(stock_config(model_type)).__name__
    assert AutoConfig.for_model("linear_gemma").stock_model_type == "gemma"
    assert "linear_no_such_model" not in LinearConfigs()
    assert "llama" not in LinearConfigs()
    with pytest.raises(ValueError, match="Unrecognized model identifier"):
        AutoConfig.for_model("linear_no_such_model")


def test_tokenizer_and_processors_of_the_stock_family_are_found(tmp_path):
    """Also by the model type alone: `preprocessor_config.json` of old checkpoints names no class."""
    mappings = {"bert": TOKENIZER_MAPPING, "vit": IMAGE_PROCESSOR_MAPPING, "whisper": PROCESSOR_MAPPING}
    for model_type, mapping in (*mappings.items(), ("wav2vec2", FEATURE_EXTRACTOR_MAPPING)):
        assert mapping[type(convert_config(tiny_config(model_type)))] == mapping[CONFIG_MAPPING[model_type]]
    convert_config(tiny_config("wav2vec2")).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"sampling_rate": 8000}')
    assert AutoFeatureExtractor.from_pretrained(tmp_path).sampling_rate == 8000


STRANGER = """
import torch
from hf_linear_attention.features.maps import ElementwiseFeatureMap
from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.settings import Option
from hf_linear_attention.torch_kernels.attention import kernel_attention
from hf_linear_attention.torch_kernels.blocks import accumulation_dtype


class ToyAttention(AttentionMechanism):
    \"\"\"Weights cosh(a (sum q + sum k)).\"\"\"

    options = {"sharpness": Option(float, 1.0, "a", minimum=0)}
    supports_causal = supports_padding = supports_state = supports_gqa = True

    def forward(self, inputs, state=None):
        query, key = (self.exponents(x, inputs.scaling) for x in (inputs.query, inputs.key))
        options = {"log_features": True, "is_causal": inputs.is_causal, "key_mask": inputs.attention_mask}
        output, new = kernel_attention(query, key, inputs.value, state=state and state[0], **options)
        return output.transpose(1, 2).to(inputs.query.dtype), (new,)

    def exponents(self, x, scaling):
        exponent = self.settings["sharpness"] * scaling**0.5 * x.to(accumulation_dtype(x)).sum(-1, keepdim=True)
        return torch.cat((exponent, -exponent), dim=-1)


class SoftplusFeatureMap(ElementwiseFeatureMap):
    function = staticmethod(torch.nn.functional.softplus)


hf_linear_attention.register_mechanism("toy", ToyAttention)
hf_linear_attention.register_feature_map("softplus", SoftplusFeatureMap)
"""


@pytest.mark.long
def test_a_mechanism_and_a_feature_map_are_registered_from_outside(tmp_path):
    """In a process of its own, because the registries are those of the process.

    The package is imported after transformers: that loads no model, and leaves every native model type as it was.
    """
    (tmp_path / "stranger.py").write_text("import hf_linear_attention\n" + STRANGER)
    save_twin(tmp_path / "source", "llama")
    code = """
import sys
import transformers.models.auto.modeling_auto
before, known = native(), set(sys.modules)
import hf_linear_attention
new = set(sys.modules) - known
assert all(name.startswith("hf_linear_attention") for name in new)
assert not {"hf_linear_attention.modeling_linear_attention", "hf_linear_attention.mechanisms.base"} & new
assert native() == before
# peft, which is imported after the config was made, adapts the modules that it adapts in the stock model
config = transformers.AutoConfig.for_model("linear_llama", linear_attention={"mechanism": "linear"})
assert "peft" not in sys.modules
from peft.utils import constants
config.to_dict()
targets = [table for name, table in vars(constants).items() if name.endswith("MODULES_MAPPING") and "llama" in table]
assert len(targets) > 20 and all(table["linear_llama"] is table["llama"] for table in targets)

sys.path.insert(0, sys.argv[1])
import stranger, torch
from transformers import AutoModelForCausalLM, DynamicCache
from hf_linear_attention.attention.transformers_internals import cache_argument
from hf_linear_attention.conversion.convert_checkpoint import main
for words in (["toy", "--sharpness=0.5"], ["linear", "--feature_map=softplus"]):
    folder = f"{sys.argv[1]}/{words[0]}"
    given = [f"--model_name_or_path={sys.argv[1]}/source", f"--output_dir={folder}", "--no_verify", "--attention"]
    assert main([*given, *words]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 29).view(2, 13)
    whole = model(ids).logits
    cache = DynamicCache(config=model.config)
    arguments = cache_argument(model, cache)
    model(ids[:, :12], **arguments)
    torch.testing.assert_close(model(ids[:, 12:], **arguments).logits, whole[:, 12:])
print("done")
"""
    assert run_python(NATIVE + code, str(tmp_path)).split()[-1] == "done"
