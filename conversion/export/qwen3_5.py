"""Qwen3.5 (`qwen3_5_text`), the stock form of `gated_delta` with `form` = `qwen3_5`.

Its linear layers are those of the student. Its softmax layers hold those of the original: their gate is always
sigmoid(0) = 1/2, which a doubled output projection undoes. Where the original has no norm of queries and keys, that of
Qwen3.5 becomes a constant: its input is made so small that only the epsilon of the norm counts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import not_essential
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention._common.folders import saving, staging
from hf_linear_attention._common.model_card import REPORT, training_facts, training_history, write_model_card
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.export.command import ExportRequest
from hf_linear_attention.conversion.output_folder import TOKENIZER_FILES, share_permissions
from hf_linear_attention.layer_ranges import ranges_of
from hf_linear_attention.mechanisms.settings import QWEN3_5
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


# Decoders whose layers are those of Llama, with or without a norm of queries and keys, and with biases or without.
SOURCES = ("llama", "mistral", "qwen2", "qwen3")
ENGINES = (
    "vLLM on a CPU computes it in bfloat16, with heads of 64 or 128; MLX wants softmax layers at equal distances, and "
    "llama.cpp no biases in them."
)
# The settings that mean the same in these decoders and in Qwen3.5.
SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "max_position_embeddings",
    "initializer_range", "rms_norm_eps", "tie_word_embeddings", "attention_dropout", "pad_token_id", "bos_token_id",
    "eos_token_id", "rope_parameters", "use_cache",
)  # fmt: skip
# A power of 2, so that no digit is lost: queries of 100 become 2e-8, whose square is 1e-9 of the epsilon.
SMALL = 2.0**-32
# What the names of the matrices that read a layer's hidden states begin with.
READ_HIDDEN = ("in_proj", "q_proj.weight", "k_proj.weight", "v_proj.weight")
# The largest difference of two logits, as a share of their standard deviation: a few times what float32 rounds in the
# sums of another order that two ways to compute the same model take (1.5e-5 was measured in models of three layers).
TOLERANCE = 1e-4
# More than the chunks of 64 or 256 tokens in which stock layers compute; a prompt of a few; and what follows it.
TOKENS, PROMPT, NEW_TOKENS = 300, 16, 40
BESIDE = (*TOKENIZER_FILES, "generation_config.json", "conversion_report.json", "training_report.json", "recipe.yaml")


def write(request: ExportRequest) -> str:
    """Write the stock checkpoint that the request asks for, and return the text to print.

    Raises:
        UsageError: naming the options of the conversion that the architecture cannot hold.
        ConversionError: if the result computes something else.
    """
    with reading(f"{request.folder} (config.json and weights)"):
        refuse("--to", AutoConfig.from_pretrained(request.folder))
    with staging(request.output_dir, replaces=request.overwrite) as folder:
        for name in BESIDE:
            if (request.folder / name).is_file():
                shutil.copyfile(request.folder / name, folder / name)
        found = write_stock(request.folder, folder)
        with not_essential("the model card"):
            facts = {
                "base_model": request.folder.name,
                "settings": AutoConfig.from_pretrained(request.folder).linear_attention,
                **training_facts(training_history(str(request.folder))),
                "stock": found,
            }
            write_model_card(folder, facts, name=request.output_dir.name)
    return (
        f"{request.output_dir} is a {found['architecture']}, which needs no code of this package. Its logits, of "
        f"{TOKENS} tokens at once and of a greedy text of {NEW_TOKENS}, differ by at most {found['difference']:.1e} of "
        "their standard deviation."
    )


def finish_stock(folder: Path) -> dict[str, Any]:
    """Write the stock checkpoint in place of the converted model in a folder; returns what is new in its report.

    Raises:
        ConversionError: if the result would compute something else; the folder has not changed then.
    """
    with staging(folder / QWEN3_5) as written:
        found = write_stock(folder, written)
    for path in (*folder.glob("*.safetensors*"), *folder.glob("*_linear_attention.py")):
        path.unlink()
    for path in (folder / QWEN3_5).iterdir():
        path.replace(folder / path.name)
    (folder / QWEN3_5).rmdir()
    report = {**read_json(folder / REPORT), "stock": found}
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return {"stock": found}


def write_stock(source: Path, folder: Path) -> dict[str, Any]:
    """Write the weights and the config of the stock model that computes what the converted model in `source` does.

    Returns:
        `architecture`; `difference`, the largest of two logits as a share of their standard deviation; and `engines`, a
        sentence about what loads it.

    Raises:
        ConversionError: if the result computes something else.
    """
    with reading(f"{source} (config.json and weights)"):
        dtype = AutoConfig.from_pretrained(source).dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    stock, difference = stock_model(model, dtype)
    with saving(folder):
        stock.save_pretrained(folder)
    share_permissions(folder)
    return {"architecture": type(stock).__name__, "difference": difference, "engines": ENGINES}


def refuse(option: str, config: object, **later: Any) -> None:
    """Refuse a converted model that the architecture cannot hold.

    Args:
        option: what asks for the architecture.
        config: of the model.
        **later: what will still change, see `obstacles`.

    Raises:
        UsageError: with every reason.
    """
    if not hasattr(config, "linear_attention"):
        raise UsageError(f"`{option} {QWEN3_5}` takes a converted model, and this one is none; convert it first")
    if problems := obstacles(config, **later):
        raise UsageError(*(f"`{option} {QWEN3_5}`: {problem}" for problem in problems))


def stock_model(model: PreTrainedModel, dtype: torch.dtype) -> tuple[PreTrainedModel, float]:
    """The stock model that computes the same, in this dtype, and the largest difference of their logits in float32.

    Raises:
        ConversionError: if it computes something else.
    """
    stock = rewritten(model.eval(), dtype).eval()
    stock.generation_config = model.generation_config
    difference = largest_difference(model, stock)
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"{type(stock).__name__} does not compute what the converted model computes: the largest difference of two "
            f"logits is {difference:.1e} of their standard deviation, and {TOLERANCE} is allowed; nothing was written"
        )
    return stock.to(dtype), difference


@torch.no_grad()
def largest_difference(model: PreTrainedModel, stock: PreTrainedModel) -> float:
    """The largest difference of two logits as a share of their standard deviation.

    They are those of `TOKENS` random tokens at once, and of the steps of a greedy text as long as both texts are equal:
    where two tokens are almost as likely, the texts may part.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, TOKENS), generator=generator)
    expected, found = (m(ids, use_cache=False).logits for m in (model, stock))
    prompt = ids[:, :PROMPT]
    steps: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "output_logits": True,
    }
    steps |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    models: tuple[Any, Any] = (model, stock)
    first, second = (m.generate(prompt, **steps) for m in models)
    is_equal = (first.sequences == second.sequences)[:, PROMPT - 1 : -1].long().cumprod(1).bool()
    texts = [torch.stack(text.logits, dim=1)[is_equal] for text in (first, second)]
    difference = max((found - expected).abs().max(), (texts[0] - texts[1]).abs().max())
    return float(difference / expected.std())


def linear_layers(config: Any) -> list[int]:
    """The numbers of the converted layers."""
    found: set[int] = set()
    for entry in entries_of(config.linear_attention):
        layers = entry["layers"]
        if layers == "full_attention":
            layers = [number for number, name in enumerate(config.layer_types) if name == layers]
        found |= set(range(config.num_hidden_layers) if layers == "all" else () if layers == "none" else layers)
    return sorted(found)


def softmax_layers(config: Any) -> list[int]:
    """The numbers of the layers that keep softmax."""
    return sorted(set(range(config.num_hidden_layers)) - set(linear_layers(config)))


def obstacles(config: Any, kept: Collection[int] | None = None, dtype: torch.dtype | None = None) -> list[str]:
    """Why the architecture cannot hold this converted model, each with what to do.

    Args:
        config: of the converted model.
        kept: the layers that may keep softmax in the end; by default those that the config does not convert.
        dtype: that of the weights to write; by default that in the config.
    """
    kept = softmax_layers(config) if kept is None else kept
    source, problems = config.stock_model_type, []
    if source not in SOURCES:
        allowed = ", ".join(f"`{name}`" for name in SOURCES)
        return [f"a `{source}` model has other layers; only those of {allowed} can be rewritten"]
    if config.hidden_act != "silu":
        problems.append(
            f"`hidden_act` = `{config.hidden_act}` is not possible: linear layers have the same, which must be `silu`"
        )
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windowed = [layer for layer in kept if (types[layer] == "sliding_attention" if types else window)]
    if windowed and window < config.max_position_embeddings:
        problems.append(
            f"`sliding_window` = {window} in the softmax layers {ranges_of(windowed)} is not possible; convert them too"
        )
    settings = entries_of(config.linear_attention)
    if any((entry["mechanism"], entry.get("form")) != ("gated_delta", QWEN3_5) for entry in settings):
        problems.append(f"convert with `--attention gated_delta --form {QWEN3_5}` in all layers that are converted")
    if getattr(config, "mlp_bias", False):
        problems.append("`mlp_bias` is true, and Qwen3.5 has no biases there")
    if has_output_bias(config) and linear_layers(config):
        problems.append("`attention_bias` is true, and the output projection of a linear layer of Qwen3.5 has no bias")
    if not kept:
        problems.append(
            "no softmax layer is left, and transformers cannot generate with such a model; give `--softmax_layers`"
        )
    if kept and config.stock_model_type != "qwen3" and (dtype or config.dtype) == torch.float16:
        problems.append("float16 cannot hold softmax layers without a norm of queries; give `--dtype bfloat16`")
    return problems


def head_dim(config: Any) -> int:
    """The head dimension, which configs of Qwen2 lack."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def has_output_bias(config: Any) -> bool:
    """Whether the output projection of attention has a bias; in Qwen2 only the others have one."""
    return config.stock_model_type != "qwen2" and bool(getattr(config, "attention_bias", False))


def stock_config(config: Any) -> Any:
    """The config of the Qwen3.5 model for that of a converted model."""
    from transformers import Qwen3_5TextConfig

    kept, layers = softmax_layers(config), config.num_hidden_layers
    interval = min(kept) + 1  # some engines know only layers at equal distances, by this number
    is_periodic = kept == list(range(interval - 1, layers, interval))
    heads, size, third = config.num_attention_heads, head_dim(config), head_dim(config) // 6
    # Text has one position, so the sections for the three of images may be any.
    positions = {
        "partial_rotary_factor": 1.0,
        "mrope_section": [size // 2 - 2 * third, third, third],
        "mrope_interleaved": True,
    }
    fields: dict[str, Any] = {
        **{name: value for name, value in config.to_dict().items() if name in SAME},
        "rope_parameters": {**config.rope_parameters, **positions},
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": size,
        "layer_types": ["full_attention" if layer in kept else "linear_attention" for layer in range(layers)],
        "attention_bias": config.stock_model_type == "qwen2" or has_output_bias(config),
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
        "mamba_ssm_dtype": "float32",  # vLLM's name for the dtype of the state
        **({"full_attention_interval": interval} if is_periodic else {}),
    }
    return Qwen3_5TextConfig(**fields)


def rewritten(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The `Qwen3_5ForCausalLM` that computes what the converted model computes, in float32.

    Args:
        model: the converted model, in float32.
        dtype: that in which the weights will be stored. The norms of Qwen3.5 store w - 1, which 16 bits would round.
    """
    from transformers import Qwen3_5ForCausalLM

    weights: dict[str, Tensor] = dict(model.state_dict())
    converted = linear_attention_modules(model)
    for layer in range(model.config.num_hidden_layers):
        place = f"model.layers.{layer}."
        attention = {name: weights.pop(name) for name in list(weights) if name.startswith(f"{place}self_attn.")}
        attention = {name.removeprefix(f"{place}self_attn."): weight for name, weight in attention.items()}
        module = converted.get(f"{place}self_attn")
        if module is None:
            kind, mixer = "self_attn", softmax_layer(attention, model.config)
        else:
            kind, mixer = "linear_attn", linear_layer(attention, module.linear_attention)
        weights |= {f"{place}{kind}.{name}": weight for name, weight in mixer.items()}
        inputs = [f"{place}{kind}.{name}" for name in mixer if name.startswith(READ_HIDDEN)]
        _shift_norm(weights, f"{place}input_layernorm.weight", inputs, dtype)
        inputs = [f"{place}mlp.{name}_proj.weight" for name in ("gate", "up")]
        _shift_norm(weights, f"{place}post_attention_layernorm.weight", inputs, dtype)
    is_tied = model.config.tie_word_embeddings
    _shift_norm(weights, "model.norm.weight", [] if is_tied else ["lm_head.weight"], dtype)
    stock = Qwen3_5ForCausalLM(stock_config(model.config)).float()
    stock.load_state_dict(weights, strict=True)
    return stock


def linear_layer(attention: Mapping[str, Tensor], mechanism: Any) -> dict[str, Tensor]:
    """The weights of a linear layer by their names in Qwen3.5."""
    rule = mechanism.rule.state_dict()
    taps = [convolution.weight.detach() for convolution in mechanism.convolutions]  # [4, H, 1, D], the newest first
    return {
        "in_proj_qkv.weight": torch.cat([rule[f"in_proj_{name}"] for name in "qkv"]),
        **{f"{name}.weight": rule[name] for name in ("in_proj_z", "in_proj_b", "in_proj_a", "norm")},
        **{name: rule[name] for name in ("dt_bias", "A_log")},
        "conv1d.weight": torch.cat([tap.flip(0).flatten(1).T for tap in taps]).unsqueeze(1),
        "out_proj.weight": attention["o_proj.weight"],
    }


def softmax_layer(attention: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The weights of a softmax layer by their names in Qwen3.5, from those of a model of `SOURCES`."""
    kept = dict(attention)
    for kind in "qk":
        name = f"{kind}_norm.weight"
        if name in kept:
            kept[name] = kept[name] - 1
            continue
        for part in ("weight", "bias"):
            if f"{kind}_proj.{part}" in kept:
                kept[f"{kind}_proj.{part}"] = kept[f"{kind}_proj.{part}"] * SMALL
        constant = config.rms_norm_eps**0.5 / SMALL - 1
        kept[name] = kept["o_proj.weight"].new_full((head_dim(config),), constant)
    for part in ("weight", "bias"):
        if (query := kept.get(f"q_proj.{part}")) is not None:
            query = query.unflatten(0, (config.num_attention_heads, -1))
            kept[f"q_proj.{part}"] = torch.cat((query, torch.zeros_like(query)), dim=1).flatten(0, 1)
    kept["o_proj.weight"] = 2 * kept["o_proj.weight"]
    if "q_proj.bias" in kept:
        kept.setdefault("o_proj.bias", kept["o_proj.weight"].new_zeros(config.hidden_size))
    return kept


def _shift_norm(weights: dict[str, Tensor], name: str, inputs: list[str], dtype: torch.dtype) -> None:
    """Turn the weight w of a norm into w - 1, in place.

    What rounding that to `dtype` loses, the matrices that read the output of the norm take in.
    """
    weight = weights[name]
    stored = weights[name] = weight - 1
    if inputs:
        # The nearest to -1 of what can be stored, so that no factor is 0.
        stored = torch.where(stored.to(dtype) == -1, torch.finfo(dtype).eps / 2 - 1, stored)
        stored = weights[name] = stored.to(dtype).to(weight.dtype)
    for matrix in inputs:
        weights[matrix] = weights[matrix] * (weight / (1 + stored))
