"""`export --to granitemoehybrid` and `--to falcon_h1`: stock models that compute what a converted one computes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from checkpoints import run, tiny_tokenizer
from matrix import stock_config, stock_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_linear_attention import convert, convert_config
from hf_linear_attention.conversion import commands
from hf_linear_attention.conversion.export import mamba
from hf_linear_attention.conversion.export.stock import stock_model as rewritten


T2R = {"mechanism": "linear", "feature_map": "t2r", "rope": "none"}
LEARNED = {"decay": "learned"}
GRANITE, FALCON = "granitemoehybrid", "falcon_h1"
FACTORS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
# name: target, family, changes of the source, settings of the conversion
CASES = {
    "grouped heads": (GRANITE, "llama", {}, {"layers": [0, 2], **LEARNED}),
    "biases of q, k, v": (GRANITE, "qwen2", {}, {"layers": [1, 2]}),
    "all biases": (GRANITE, "llama", {"attention_bias": True, "head_dim": 20}, {"layers": [1], **LEARNED}),
    "tied embeddings": (GRANITE, "mistral", {"tie_word_embeddings": True}, {"layers": [0], "num_features": 5}),
    "factors": (GRANITE, "granite", FACTORS, {"layers": [0, 1], **LEARNED}),
    "all linear": (FALCON, "llama", {}, LEARNED),
    "softmax heads": (FALCON, "llama", {}, {"softmax_heads": [[0, 3], [2, 0], [2, 1]], **LEARNED}),
    "a softmax layer": (FALCON, "qwen2", {}, {"layers": [0, 2], "softmax_heads": [[0, 1]]}),
    "biases everywhere": (
        FALCON,
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
        {"softmax_heads": [[1, 2]]},
    ),
    "two settings": (
        FALCON,
        "mistral",
        {},
        {"mechanism": {"0": "linear", "1-2": "linear"}, "num_features": {"0": 5, "1-2": 12}, "softmax_heads": [[1, 1]]},
    ),
}
IDS = torch.randint(3, 64, (2, 30), generator=torch.Generator().manual_seed(0))


def source(family, **changes):
    """A random twin whose norms and biases are not those of the start."""
    if family == "granite":
        torch.manual_seed(0)
        fields = {**stock_config("llama").to_diff_dict(), **changes, "model_type": "granite"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()
    else:
        model = stock_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def converted(family, changes, settings):
    """A converted twin whose feature maps and decays are not those of the start."""
    model = convert(source(family, **changes), **{**T2R, **settings}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("feature_map.bias"):
                parameter.normal_(std=0.3)
            elif name.endswith("decay.rate"):
                parameter.uniform_(-5, 0)
    return model


@pytest.fixture(scope="module")
def models():
    """A converted model of each target, and its stock model."""
    found = {}
    for target, name in ((GRANITE, "grouped heads"), (FALCON, "softmax heads")):
        model = converted(*CASES[name][1:])
        found[target] = model, rewritten(target, model, torch.float32)[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_converted_model_computes(case):
    target, *given = CASES[case]
    model = converted(*given)
    stock, difference = rewritten(target, model, torch.float32)  # of 300 tokens at once, and of a text step by step
    assert type(stock).__module__.startswith(f"transformers.models.{target}.")
    assert difference < 6e-5  # float32, twice: the converted model differs by 2e-5 from itself in float64
    assert (stock.config.tie_word_embeddings, stock.dtype) == (model.config.tie_word_embeddings, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("target", [GRANITE, FALCON])
def test_padding_on_the_left_and_prompts_of_one_token(models, target):
    model, stock = models[target]
    mask = torch.ones_like(IDS)
    mask[0, :11] = 0
    given = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    text = stock.generate(IDS, **given)
    assert torch.equal(text, model.generate(IDS, **given))
    alone = stock.generate(IDS[:1, 11:], **{**given, "attention_mask": mask[:1, 11:]})
    assert torch.equal(text[:1, 11:], alone)
    one = {**given, "attention_mask": mask[:, -1:]}
    assert torch.equal(stock.generate(IDS[:, :1], **one), model.generate(IDS[:, :1], **one))


@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "bias", "values", "norm"), [(1e-6, 1, 1e4, 1), (1e6, 1, 1e-5, 1), (30, 1, 1, 300), (1, 1e6, 1, 1)]
)
def test_the_scales_follow_from_the_weights(size, bias, values, norm):
    """Sums that would overflow, or vanish beside the epsilon of the norm, and features near 0; all in float64 too."""
    model = converted("qwen2", {}, LEARNED)
    for layer in model.model.layers:
        attention = layer.self_attn
        layer.input_layernorm.weight[::5] *= norm
        attention.linear_attention.feature_map.bias *= size * bias
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight *= size
            projection.bias *= size * bias
        attention.v_proj.weight *= values
        attention.v_proj.bias *= values
        attention.o_proj.weight /= values
    stock, _ = rewritten(FALCON, model, torch.float32)
    expected = copy.deepcopy(model).double()(IDS).logits
    assert (stock(IDS).logits - expected).abs().max() < 2e-5 * expected.std()


@torch.no_grad()
def test_a_key_that_has_faded_is_read_where_it_alone_shares_features():
    """The weight of the first key falls to e^-30, and the output stays its value."""
    model = converted("llama", {"num_key_value_heads": 4}, LEARNED)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.copy_(-attention.q_proj.weight)  # no token shares features with itself
    attention.linear_attention.feature_map.bias.zero_()
    attention.linear_attention.decay.rate.fill_(0.5413)  # softplus is 1
    norm = model.model.layers[0].input_layernorm.weight
    hidden = torch.nn.functional.normalize(torch.randn(1, 1, 32), dim=-1) * 32**0.5 * norm
    tokens = torch.cat((-hidden, hidden.expand(1, 30, -1)), dim=1)
    stock, _ = rewritten(FALCON, model, torch.float32)
    found, value = stock.model.layers[0].mamba(tokens), attention.o_proj(attention.v_proj(-hidden))
    torch.testing.assert_close(found[:, 1:], value.expand(1, 30, -1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("target", [GRANITE, FALCON])
def test_bfloat16_is_as_exact_as_in_the_converted_model(models, target):
    expected = models[target][0](IDS).logits
    own, stock = (
        (copy.deepcopy(model).bfloat16()(IDS).logits.float() - expected).abs().mean() for model in models[target]
    )
    assert stock < 1.3 * own


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """`{target: (folder, what the command printed)}`."""
    found = {}
    for target, (model, _) in models.items():
        folder = tmp_path_factory.mktemp(target)
        model.save_pretrained(folder / "student")
        tiny_tokenizer().save_pretrained(folder / "student")
        words = ("export", folder / "student", f"--to={target}", f"--output_dir={folder / 'out'}")
        code, out, err = run(*words, command=commands.main)
        assert code == 0, err
        found[target] = folder / "out", out
    return found


def test_the_checkpoints_need_no_code(models, exported):
    alone = f"""
import sys
sys.modules["hf_linear_attention"] = None
import torch
from transformers import AutoModelForCausalLM
for folder in {[str(folder) for folder, _ in exported.values()]}:
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {{"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}}
    print(type(model).__name__, model.generate(torch.arange(3, 20)[None], **options).tolist())
"""
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=False)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    expected = [
        f"{type(stock).__name__} {model.generate(torch.arange(3, 20)[None], **options).tolist()}"
        for model, stock in models.values()
    ]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(("target", "name"), [(GRANITE, "GraniteMoeHybrid"), (FALCON, "FalconH1")])
def test_the_folder_and_its_card(exported, target, name):
    folder, printed = exported[target]
    assert f"{name}ForCausalLM, which needs no code" in printed
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (target, [f"{name}ForCausalLM"])
    assert {"auto_map", "linear_attention"}.isdisjoint(config)
    assert not [*folder.glob("*.py")]
    assert (folder / "tokenizer.json").is_file()
    card = (folder / "README.md").read_text()
    assert f"with linear-cost attention, written as the architecture `{name}ForCausalLM`" in card
    assert 'AutoModelForCausalLM.from_pretrained("out")' in card
    assert "| feature_map | t2r |" in card
    assert "`--mamba-ssm-cache-dtype float32`" in card
    assert ("transformers 5.23" in card) == (target == GRANITE)
    assert "trust_remote_code" not in card


def test_what_computes_something_else_is_not_written(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(mamba, "FEATURE", 4)  # then silu is no relu
    student = exported[FALCON][0].parent / "student"
    words = ("export", student, f"--to={FALCON}", f"--output_dir={tmp_path / 'out'}")
    code, _, err = run(*words, command=commands.main)
    assert code == 1
    assert "FalconH1ForCausalLM does not compute what the converted model computes" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "family", "changes", "settings", "reasons"),
    [
        (FALCON, "qwen3", {}, {}, ["a `qwen3` model has other layers", "only those of `llama`, `mistral`, `qwen2`"]),
        (GRANITE, "gpt2", {}, {"rope": "before_map"}, ["a `gpt2` model has other layers"]),
        (
            GRANITE,
            "llama",
            {},
            {},
            ["no softmax layer is left", "`--to falcon_h1`, or convert with `--softmax_layers`"],
        ),
        (GRANITE, "llama", {}, {"layers": [0], "softmax_heads": [[0, 1]]}, ["`softmax_heads` is not possible"]),
        (GRANITE, "llama", {"mlp_bias": True}, {"layers": [0]}, ["`mlp_bias` is true"]),
        (FALCON, "llama", {"hidden_act": "gelu"}, {}, ["`hidden_act` = `gelu`"]),
        (FALCON, "llama", {"dtype": torch.float16}, {}, ["float16 is too narrow", "`--dtype bfloat16`"]),
        (FALCON, "mistral", {"sliding_window": 8}, {"layers": [0], "drop": ["sliding_window"]}, ["layers 1-2"]),
        (FALCON, "llama", {}, {"layers": "none"}, ["no layer is converted"]),
        (FALCON, "llama", {}, {"mechanism": "hybrid", "feature_map": "exp"}, ["`mechanism` = `hybrid`", "`exp`"]),
        (FALCON, "llama", {}, {"feature_map": "relu"}, ["`feature_map` = `relu`", "--feature_map t2r --rope none`"]),
        (FALCON, "llama", {}, {"rope": "partial"}, ["`rope` = `partial`"]),
        (
            FALCON,
            "llama",
            {},
            {"feature_map": "exp", "decay": "gated", "input_gate": True},
            ["`decay` = `gated`", "`--decay none` or `learned`", "`input_gate` = `True`"],
        ),
    ],
)
def test_what_the_architecture_cannot_hold_is_refused_before_weights_are_read(
    target, family, changes, settings, reasons, tmp_path
):
    config = convert_config(stock_config(family, **changes), **{**T2R, **settings})
    config.save_pretrained(tmp_path / "student")  # without weights
    words = ("export", tmp_path / "student", f"--to={target}", f"--output_dir={tmp_path / 'out'}")
    code, _, err = run(*words, command=commands.main)
    assert code == 2
    assert f"`--to {target}`" in err
    for reason in reasons:
        assert reason in err


def test_only_converted_models_are_exported(tmp_path):
    stock_config("llama").save_pretrained(tmp_path / "stock")
    words = ("export", tmp_path / "stock", f"--to={FALCON}", f"--output_dir={tmp_path / 'out'}")
    code, _, err = run(*words, command=commands.main)
    assert code == 2
    assert "takes a converted model, and this one is none" in err
