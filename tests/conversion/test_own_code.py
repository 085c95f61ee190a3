"""Models with code of their own are refused, since a converted checkpoint would not have it."""

from __future__ import annotations

import json
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


@pytest.fixture(params=["llama", "my_llama"])
def source(request, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    LlamaForCausalLM(stock_config("llama")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_my.MyConfig",
        "AutoModelForCausalLM": "modeling_my.MyForCausalLM",
    }
    config |= {"model_type": request.param, "architectures": ["MyForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_my.py").write_text(CONFIGURATION.format(request.param))
    (folder / "modeling_my.py").write_text(MODEL)
    return folder


@pytest.mark.parametrize("flags", [[], ["--trust_remote_code"]])
def test_the_command_refuses_it(flags: list[str], source: Path, tmp_path: Path) -> None:
    code, _, error = run("--model_name_or_path", source, "--output_dir", tmp_path / "out", *flags)
    assert code == 2
    last = error.splitlines()[-1]
    assert "code" in last
    assert "a converted checkpoint would not have it" in last
    assert not (tmp_path / "out").exists()


def test_python_refuses_it(source: Path) -> None:
    for options in ({}, {"trust_remote_code": True}):
        if options or json.loads((source / "config.json").read_text())["model_type"] == "llama":
            with pytest.raises(
                ValueError, match=r"code of (the checkpoint|its own).*a converted checkpoint would not have it"
            ):
                convert(str(source), from_pretrained=options)


def test_an_instance_of_such_a_class_is_refused_and_its_weights_are_not(tmp_path: Path) -> None:
    class Own(LlamaForCausalLM):
        pass

    model = Own(stock_config("llama"))
    with pytest.raises(ValueError, match=r"`Own` is code of the checkpoint itself"):
        convert(model, mechanism="linear")
    convert(model, model_class=LlamaForCausalLM, mechanism="linear").save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "LinearLlamaForCausalLM"
