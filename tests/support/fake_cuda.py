"""Runs converted models on fake CUDA tensors, in a torch built for CPUs, and counts what a GPU would have to do.

`python fake_cuda.py GUARD.so` prints, as JSON, what `test_fake_cuda.py` compares with its table. Fake tensors have a
device and a shape and no memory, so that a mix-up of devices is an error as on a GPU. fla-core's kernels are stood in
for by functions that give results of the same shapes.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any


if __name__ == "__main__":  # before torch asks for devices
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# Operators that launch nothing.
VIEWS = frozenset(
    """view _unsafe_view reshape transpose permute expand slice select unsqueeze squeeze split split_with_sizes unbind t
    alias detach as_strided unfold movedim diagonal _reshape_alias lift_fresh narrow chunk unsafe_split tensor_split
    view_as expand_as empty empty_like new_empty empty_strided new_empty_strided is_same_size sym_size""".split()  # noqa: SIM905
)
# Operators whose number of results the host has to wait for.
WAITING = frozenset(["nonzero", "masked_select", "is_nonzero", "equal", "unique2", "_unique2"])
# Launches of our Triton operators, in whose form for fake tensors nothing runs: those of their launchers.
OF_TRITON = {
    **{"hybrid": 13, "hybrid_step": 3, "hybrid_step_": 3, "hybrid_backward": 22},  # with those of torch, such as sums
}
# Launches of fla-core 0.6's functions, forward and backward: estimates, which no GPU and no test has counted.
LAUNCHES = {"gla": (5, 7), "recurrent": (1, 2), "simple_gla": (2, 4), "delta": (7, 12)}


# One of each mechanism and of each kind of state, of the matrix.
ROWS = (
    *("aft-local", "aft-simple", "aft-full-factorised", "linear-elu1", "linear-decay", "linear-gated", "performer"),
    *("hybrid-exact-keys", "gated_delta-channel", "gated_delta-qwen3_5", "window", "linformer-headwise"),
    *("linformer_linear-exp", "latent", "nystrom-conv"),
)


class Counter(TorchDispatchMode):
    """Counts kernels, the bytes that they read and write, and the calls that wait for the device or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_counting = False
        self.reset()

    def reset(self) -> None:
        """Begin at 0."""
        self.kernels, self.bytes = 0, 0
        self.waits: collections.Counter[str] = collections.Counter()

    def launch(self, count: int, tensors: Any) -> None:
        """Count kernels that read or write these tensors once."""
        self.kernels += count
        self.bytes += sum(map(size_of, tensors))

    def wait(self, name: str) -> None:
        """Count a call, with the line of ours that made it."""
        frames = [frame for frame in traceback.extract_stack() if "/hf_linear_attention/" in frame.filename]
        if self.is_counting:
            place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else "not ours"
            self.waits[f"{name} in {place}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, name = func._schema.name.split("::")
        if name == "_local_scalar_dense" and args[0].device.type == "cuda":
            self.wait("item")
            return 0.0 if args[0].is_floating_point() else args[0].dtype != torch.bool and 0
        if not self.is_counting or library == "prim":
            return func(*args, **(kwargs or {}))
        if name in WAITING:
            self.wait(name)
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors}
        if name in ("_to_copy", "copy_", "lift_fresh_copy") and devices == {"cpu", "cuda"}:
            self.wait("copy")
        if "cuda" in devices and name not in VIEWS:
            self.launch(OF_TRITON.get(name, 1), [x for x in tensors if x.device.type == "cuda"])
        return out


def size_of(x: Tensor) -> int:
    """The bytes of a tensor; those of a row that is expanded count once."""
    numbers = [size for size, stride in zip(x.shape, x.stride()) if stride]
    return functools.reduce(lambda a, b: a * b, numbers, x.element_size())


COUNTER = Counter()


def stand_in(name: str) -> Any:
    """A function that takes and gives tensors like fla's `name`, with gradients."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            q, k, v = tensors[:3]
            found = torch.empty_like(v), q.new_empty(q.shape[0], *k.shape[2:], v.shape[3], dtype=torch.float32)
            COUNTER.launch(LAUNCHES[name][0], [x for x in (*tensors, *found) if x is not None])
            return found

        @staticmethod
        def backward(ctx, *grads):
            tensors = [x for x in ctx.saved_tensors if x is not None]
            COUNTER.launch(LAUNCHES[name][1], [*tensors, *tensors, *(x for x in grads if x is not None)])
            return tuple(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)

    def function(q, k, v, *, g=None, gk=None, beta=None, scale=None, initial_state=None, output_final_state=True):
        return Function.apply(q, k, v, gk if g is None else g, beta, initial_state)

    return function


def treat_as_real() -> None:
    """Let the package treat fake CUDA tensors as it treats real ones where fla-core is installed."""
    from hf_linear_attention.kernels import fla, triton_hybrid
    from hf_linear_attention.mechanisms import hybrid, window
    from hf_linear_attention.torch_kernels import blocks, implementations

    implementations.load_implementations()
    plain, real = blocks.needs_plain, torch.zeros(1, dtype=torch.float32, device="cpu")
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_linear_attention") and hasattr(module, "needs_plain"):
            module.needs_plain = lambda x: plain(real if isinstance(x, FakeTensor) else x)
    triton_hybrid.shared_memory = functools.cache(lambda device: 101_376)
    recurrent = stand_in("recurrent")
    fla.is_on_cuda = hybrid.is_on_cuda = window.is_on_cuda = lambda x: x.device.type == "cuda"
    fla._kernels = lambda gated: (recurrent, stand_in("gla" if gated else "simple_gla"))
    fla._delta_kernels = lambda by_feature: (recurrent, stand_in("delta"))
    fla.refuses_decay_per_head = lambda: False


def without_kernels() -> None:
    """From now on, neither fla-core nor Triton is installed."""
    from hf_linear_attention.kernels import fla, triton_hybrid

    fla._kernels = fla._delta_kernels = lambda _: None
    triton_hybrid.shared_memory = lambda device: 0


def to_fake(model: nn.Module, dtype: torch.dtype, device: str = "cuda") -> nn.Module:
    """Replace parameters and buffers by fake ones on CUDA."""

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device=device)

    for module in model.modules():
        for name, x in list(module._parameters.items()):
            if x is not None:
                module._parameters[name] = nn.Parameter(fake(x), requires_grad=x.requires_grad)
        for name, x in list(module._buffers.items()):
            if x is not None:
                module._buffers[name] = fake(x)
    return model


def count_attention_only(model: nn.Module) -> None:
    """Count what `attend` and the gates of converted layers do, and what runs backwards."""

    def counted(function):
        def call(*args, **kwargs):
            COUNTER.is_counting = True
            try:
                return function(*args, **kwargs)
            finally:
                COUNTER.is_counting = False

        return call

    for module in model.modules():
        if hasattr(module, "linear_attention_enabled"):
            module.attend, module._gates = counted(module.attend), counted(module._gates)


def run(model: Any, mode: str, length: int) -> None:
    """One pass of a decoder or encoder over fake tokens."""
    from transformers import DynamicCache

    def ids(count: int) -> Tensor:
        return torch.zeros(1, count, dtype=torch.long, device="cuda")

    with torch.no_grad():
        model(ids(3))  # a layer's first call may copy constants to the device
    # As `linear_attention_mask` numbers packed sequences.
    masks = {"padded": (1, length), "packed": (1, 1, 1, length), "packed train": (1, 1, 1, length)}
    mask = torch.ones(masks[mode], dtype=torch.long, device="cuda") if mode in masks else None
    # A cache would get the state of the last one.
    without_state = {"use_cache": False} if mode.startswith("packed") else {}
    if mode.endswith("train"):
        model.train()
        COUNTER.reset()
        torch.set_autocast_enabled("cuda", True)  # `torch.autocast` asks for a real device
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            output = model(ids(length), attention_mask=mask, **without_state)[0]
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()
        COUNTER.is_counting = True
        output.float().sum().backward()
        COUNTER.is_counting = False
        model.eval()
        return
    with torch.no_grad():
        cache = DynamicCache(config=model.config) if model.can_generate() and not without_state else None
        given = without_state if cache is None else {"cache": cache, "use_cache": True}
        COUNTER.reset()
        model(ids(length), attention_mask=mask, **given)
        if mode == "step":
            COUNTER.reset()
            model(ids(1), **given)


def measure(model: Any, cases: dict[str, int]) -> dict[str, Any]:
    """Kernels, kilobytes and waits of the attention of a converted model in each mode at a length, or the error."""
    found: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        count_attention_only(model)
        for mode, length in cases.items():
            try:
                with COUNTER:
                    run(to_fake(model, torch.float32 if mode == "train" else torch.bfloat16), mode, length)
            except Exception:
                COUNTER.is_counting = False
                found[mode] = {"error": traceback.format_exc(limit=-4)}
                continue
            amounts = {"kernels": COUNTER.kernels, "kilobytes": round(COUNTER.bytes / 1e3)}
            found[mode] = amounts | {"waits": dict(COUNTER.waits)}
    return found


def step_of_requests(model: Any) -> dict[str, Any]:
    """Kernels and waits of one token of each of three requests, whose states stand in blocks as in the vLLM plugin."""
    from hf_linear_attention.mechanisms.base import MechanismInputs

    mechanism = model.model.layers[0].self_attn.linear_attention
    layout, sizes = mechanism.state_layout(torch.bfloat16), mechanism.shape
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), COUNTER:
        to_fake(model, torch.bfloat16)

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        states = tuple(zeros(5, *shape[1:], dtype=dtype) for shape, dtype in layout)
        hidden, rows = zeros(3, 1, sizes.hidden_size or 1), zeros(3, dtype=torch.long)
        query, key, value = (
            zeros(3, n, 1, sizes.head_dim) for n in (sizes.num_heads, *[sizes.num_key_value_heads] * 2)
        )
        inputs = MechanismInputs(query, key, value, None, 0.1, True, zeros(3, 1, dtype=torch.int32))
        for _ in range(2):  # the first call copies constants to the device
            COUNTER.reset()
            COUNTER.is_counting = True
            gates = mechanism.gates(hidden) if mechanism.needs_gates else None
            given = mechanism.prepare(inputs._replace(gates=gates))
            mechanism.step_in_rows(given, states, rows)
            COUNTER.is_counting = False
    return {"kernels": COUNTER.kernels, "waits": dict(COUNTER.waits)}


def run_on_two_devices(model: Any) -> None:
    """A prompt and two tokens of a model of two layers, each on a device of its own as by `device_map="auto"`."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    layers = model.model.layers
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), COUNTER:
        to_fake(model, torch.bfloat16)
        to_fake(layers[1], torch.bfloat16, "cuda:1")
        for device, layer in enumerate(layers):
            add_hook_to_module(layer, AlignDevicesHook(execution_device=device, io_same_device=True))
        ids, cache = torch.zeros(2, 40, dtype=torch.long, device="cuda:0"), None
        for length in (40, 1, 1):
            cache = model(ids[:, :length], cache=cache, use_cache=True).past_key_values
        devices = [{x.device.index for x in layer.state} for layer in cache.layers]
        assert devices == [{0}, {1}], devices


def compiled(model: Any) -> dict[str, list[str]]:
    """Our operators in the graphs of torch.compile, of which each call of the model must be one."""
    from transformers import DynamicCache, StaticCache

    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo detected a call to a `functools.lru_cache`")
        to_fake(model, torch.bfloat16)
        ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=128)):
            if isinstance(cache, StaticCache):
                model(ids, cache=cache, use_cache=True)
            call = torch.compile(model, backend=backend, fullgraph=True)
            for length in (1,) if isinstance(cache, StaticCache) else (64, 1):
                call(ids[:, :length], cache=cache, use_cache=True)
            torch.compiler.reset()
    names = ([str(node.target).split(".")[-1] for node in graph.graph.nodes] for graph in graphs)
    ours = ("hybrid", "hybrid_step", "scores_on_cuda")
    found = [[name for name in every if name.rstrip("_") in ours] for every in names]
    return dict(zip(("prompt", "step", "step of a static cache"), found, strict=True))


def build_guard(compiler: str, folder: Path) -> Path:
    """Compile the device guard."""
    found, torch_folder = folder / "guard.so", Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-O0", "-shared", "-fPIC", "-std=c++20", abi, f"-I{torch_folder / 'include'}"]
    libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, *options, str(source), "-o", str(found), *libraries], check=True)
    return found


def main() -> None:
    """Print the measurements of all cases."""
    import matrix
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_linear_attention import convert

    treat_as_real()
    found: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    for row in ROWS:
        is_causal = matrix.supports(row, "causal")
        stock = matrix.stock_model("llama" if is_causal else "bert", num_hidden_layers=1)
        modes = ("train", "padded", "step") if is_causal else ("train", "padded")
        modes += ("packed", "packed train") if row.startswith("hybrid") else ()
        found[row] = measure(convert(stock, **matrix.MECHANISM_ROWS[row]), dict.fromkeys(modes, 20))
        if "step" in modes:
            requests[row] = step_of_requests(convert(stock, **matrix.MECHANISM_ROWS[row]))
    # One layer of Llama 1B, trained on 4,096 or 32,768 tokens.
    for name, trained, cases in (
        ("default", 4096, {"prefill": 4096, "packed": 4096, "train": 4096, "packed train": 4096, "step": 300}),
        ("long default", 32768, {"prefill": 32768}),
        ("divided default", 32768, {"prefill": 65536}),
    ):
        sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 64}
        config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, max_position_embeddings=trained)
        found[name] = measure(convert(LlamaForCausalLM(config)), cases)
    found["requests"] = requests | {"default": step_of_requests(convert(LlamaForCausalLM(config)))}
    found["compiled"] = compiled(convert(LlamaForCausalLM(config)))
    for row in requests:
        run_on_two_devices(convert(matrix.stock_model("llama", num_hidden_layers=2), **matrix.MECHANISM_ROWS[row]))
    without_kernels()
    found["requests in torch"] = {}
    for row in requests:
        model = convert(matrix.stock_model("llama", num_hidden_layers=1), **matrix.MECHANISM_ROWS[row])
        found["requests in torch"][row] = step_of_requests(model)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
