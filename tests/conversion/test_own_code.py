"""Models with code of their own are refused, since a converted checkpoint would not have it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import run
from matrix import stock_config
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_linear_attention import convert


CONFIGURATION = "from transformers import LlamaConfig\nclass MyConfig(LlamaConfig):\n    model_type = '{}'\n"
MODEL = """
from transformers import LlamaForCausalLM
from .configuration_my import MyConfig
class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = -outputs.logits
        return outputs
"""


@pytest.mark.parametrize("model_type", ["llama", "my_llama"])
def test_it_is_refused(model_type: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    LlamaForCausalLM(stock_config("llama")).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    code_of = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"}
    config |= {"auto_map": code_of, "model_type": model_type, "architectures": ["MyForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config))
    (source / "configuration_my.py").write_text(CONFIGURATION.format(model_type))
    (source / "modeling_my.py").write_text(MODEL)
    for flags in ([], ["--trust_remote_code"]):
        code, _, error = run("--model_name_or_path", source, "--output_dir", tmp_path / "out", *flags)
        assert code == 2
        assert re.search(r"code.*a converted checkpoint would not have it", error.splitlines()[-1])
        assert not (tmp_path / "out").exists()
    for options in ({}, {"trust_remote_code": True}):
        if options or model_type == "llama":
            said = r"code of (the checkpoint|its own).*a converted checkpoint would not have it"
            with pytest.raises(ValueError, match=said):
                convert(str(source), from_pretrained=options)


def test_an_instance_of_such_a_class_is_refused_and_its_weights_are_not(tmp_path: Path) -> None:
    class Own(LlamaForCausalLM):
        pass

    model = Own(stock_config("llama"))
    with pytest.raises(ValueError, match=r"`Own` is code of the checkpoint itself"):
        convert(model, mechanism="linear")
    convert(model, model_class=LlamaForCausalLM, mechanism="linear").save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "LinearLlamaForCausalLM"
