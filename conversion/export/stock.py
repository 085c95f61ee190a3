"""Checkpoints of architectures of transformers that compute what a converted model computes."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import not_essential
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention._common.folders import saving, staging
from hf_linear_attention._common.model_card import REPORT, training_facts, training_history, write_model_card
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.conversion.export.command import PACKAGE, ExportRequest
from hf_linear_attention.conversion.output_folder import TOKENIZER_FILES, share_permissions


logger = logging.getLogger(__name__)

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
        refuse("--to", request.target, AutoConfig.from_pretrained(request.folder))
    with staging(request.output_dir, replaces=request.overwrite) as folder:
        for name in BESIDE:
            if (request.folder / name).is_file():
                shutil.copyfile(request.folder / name, folder / name)
        found = write_stock(request.target, request.folder, folder)
        with not_essential("the model card"):
            write_card(request, folder, found)
    return (
        f"{request.output_dir} is a {found['architecture']}, which needs no code of this package. Its logits, of "
        f"{TOKENS} tokens at once and of a greedy text of {NEW_TOKENS}, differ by at most {found['difference']:.1e} of "
        "their standard deviation."
    )


def write_card(request: ExportRequest, folder: Path, found: Mapping[str, Any]) -> None:
    """Write the README.md of the stock checkpoint in `folder`, with what is known of the converted model."""
    facts = {
        "base_model": request.folder.name,
        "settings": AutoConfig.from_pretrained(request.folder).linear_attention,
        **training_facts(training_history(str(request.folder))),
        "stock": found,
    }
    write_model_card(folder, facts, name=request.output_dir.name)


def finish_stock(folder: Path, target: str) -> dict[str, Any]:
    """Write the stock checkpoint in place of the converted model in a folder; returns what is new in its report.

    Raises:
        ConversionError: if the result would compute something else; the folder has not changed then.
    """
    with staging(folder / target) as written:
        found = write_stock(target, folder, written)
    for path in (*folder.glob("*.safetensors*"), *folder.glob("*_linear_attention.py")):
        path.unlink()
    for path in (folder / target).iterdir():
        path.replace(folder / path.name)
    (folder / target).rmdir()
    report = {**read_json(folder / REPORT), "stock": found}
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return {"stock": found}


def write_stock(target: str, source: Path, folder: Path) -> dict[str, Any]:
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
    stock, difference = stock_model(target, model, dtype)
    with saving(folder):
        stock.save_pretrained(folder)
    share_permissions(folder)
    return {"architecture": type(stock).__name__, "difference": difference, "engines": host_of(target).ENGINES}


def host_of(target: str) -> ModuleType:
    """The module that rewrites models for an architecture."""
    return importlib.import_module(f"{PACKAGE}.{target}")


def refuse(option: str, target: str, config: object, **later: Any) -> None:
    """Refuse a converted model that the architecture cannot hold.

    Args:
        option: what asks for the architecture.
        target: the architecture.
        config: of the model.
        **later: what will still change, see `obstacles` of the architecture.

    Raises:
        UsageError: with every reason.
    """
    if not hasattr(config, "linear_attention"):
        raise UsageError(f"`{option} {target}` takes a converted model, and this one is none; convert it first")
    if problems := host_of(target).obstacles(config, **later):
        raise UsageError(*(f"`{option} {target}`: {problem}" for problem in problems))


def stock_model(target: str, model: PreTrainedModel, dtype: torch.dtype) -> tuple[PreTrainedModel, float]:
    """The stock model that computes the same, in this dtype, and the largest difference of their logits in float32.

    Raises:
        ConversionError: if it computes something else.
    """
    stock = host_of(target).rewritten(model.eval(), dtype).eval()
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
