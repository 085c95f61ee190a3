"""What an Apple GPU could not compute: there is none here, so the torch code runs on a CPU and its operators are read.

torch's own table of operators says which have a kernel for MPS; a float64 tensor cannot exist there at all.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torchgen
import yaml
from matrix import MECHANISM_ROWS, stock_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention import convert
from hf_linear_attention.kernels import cpu as kernels_cpu


TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
# One that the CPU chooses for softmax attention of stock code; on an Apple GPU that is another one.
OF_THE_CPU = "_scaled_dot_product_flash_attention_for_cpu"
EVERYWHERE = {"MPS", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"}
DECODERS = ("linear-elu1", "performer", "hybrid-decay", "gated_delta-conv", "aft-local")
# `nystrom` asks for the device before it takes float64.
ENCODERS = ("linear-hedgehog", "hybrid", "linformer-stretched", "latent")


@functools.cache
def operators() -> dict[str, dict]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(TABLE.read_text(encoding="utf-8"), Loader=loader)
    return {entry["func"].split("(")[0]: entry for entry in entries}


def runs_on_mps(name: str) -> bool:
    entry = operators().get(name)
    if entry is None:
        return False
    if "structured_delegate" in entry:
        return runs_on_mps(entry["structured_delegate"])
    keys = {key.strip() for keys in entry.get("dispatch", ()) for key in keys.split(",")}
    return not keys or bool(keys & EVERYWHERE)


class Spy(TorchDispatchMode):
    """Collects the operators that are called, and those that return float64."""

    def __init__(self):
        super().__init__()
        self.called, self.wide = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        overload = function._schema.overload_name
        self.called.add(f"{name}.{overload}" if overload else name)
        if any(x.dtype == torch.float64 for x in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(x)):
            self.wide.add(name)
        return result


@pytest.mark.parametrize(("family", "row"), [*(("llama", x) for x in DECODERS), *(("bert", x) for x in ENCODERS)])
def test_every_operator_has_a_kernel_for_mps(family, row, monkeypatch):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    model = convert(stock_model(family), **MECHANISM_ROWS[row])
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with Spy() as spy:
        model(ids, attention_mask=mask).logits.sum().backward()
        if family == "llama":
            model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert len(spy.called) > 20
    assert not spy.wide
    assert sorted(x for x in spy.called if not runs_on_mps(x) and not x.startswith(OF_THE_CPU)) == []
