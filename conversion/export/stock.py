"""Checkpoints of architectures of transformers that compute what a converted model computes."""

from __future__ import annotations

import importlib
import logging
import shutil
from pathlib import Path
from types import ModuleType

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.reading import reading
from hf_linear_attention.conversion.export.command import PACKAGE, ExportRequest
from hf_linear_attention.conversion.output_folder import TOKENIZER_FILES, share_permissions


logger = logging.getLogger(__name__)

# The largest difference of two logits, as a share of their standard deviation: a few times what float32 rounds in the
# sums of another order that two ways to compute the same model take (1.5e-5 was measured in models of three layers).
TOLERANCE = 1e-4
TOKENS, NEW_TOKENS = 64, 40
BESIDE = (*TOKENIZER_FILES, "generation_config.json", "conversion_report.json", "training_report.json", "recipe.yaml")


def write(request: ExportRequest) -> str:
    """Write the stock checkpoint that the request asks for, and return the text to print.

    Raises:
        UsageError: naming the options of the conversion that the architecture cannot hold.
        ConversionError: if the result computes something else.
    """
    host = importlib.import_module(f"{PACKAGE}.{request.target}")
    with reading(f"{request.folder} (config.json and weights)"):
        config = AutoConfig.from_pretrained(request.folder)
        refuse(host, request.target, config)
        model = AutoModelForCausalLM.from_pretrained(request.folder, dtype=torch.float32)
    with staging(request.output_dir, replaces=request.overwrite) as folder:
        stock, difference = stock_model(host, model, config.dtype or torch.float32)
        stock.save_pretrained(folder)
        copy_beside(request.folder, folder)
        share_permissions(folder)
    return (
        f"{request.output_dir} is a {type(stock).__name__}, which needs no code of this package. Its logits differ by "
        f"at most {difference:.1e} of their standard deviation, and {NEW_TOKENS} greedy tokens are equal."
    )


def refuse(host: ModuleType, target: str, config: object) -> None:
    """Refuse a converted model that the architecture cannot hold.

    Raises:
        UsageError: with every reason.
    """
    if not hasattr(config, "linear_attention"):
        raise UsageError(f"`--to {target}` takes a converted model, and this one is none; convert it first")
    if problems := host.obstacles(config):
        raise UsageError(*(f"`--to {target}`: {problem}" for problem in problems))


def stock_model(host: ModuleType, model: PreTrainedModel, dtype: torch.dtype) -> tuple[PreTrainedModel, float]:
    """The stock model that computes the same, in this dtype, and the largest difference of their logits in float32.

    Raises:
        ConversionError: if it computes something else.
    """
    stock = host.rewritten(model.eval(), dtype).eval()
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
    """The largest difference of two logits as a share of their standard deviation; infinite if greedy text differs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (2, TOKENS), generator=generator)
    expected, found = (m(ids, use_cache=False).logits for m in (model, stock))
    texts = [
        m.generate(ids[:, : TOKENS // 4], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        for m in (model, stock)
    ]
    if not torch.equal(*texts):
        return float("inf")
    return float((found - expected).abs().max() / expected.std())


def copy_beside(source: Path, folder: Path) -> None:
    """Copy the files beside the weights that hold for the stock checkpoint too."""
    for name in BESIDE:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
