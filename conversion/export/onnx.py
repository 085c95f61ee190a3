"""A graph for ONNX Runtime that computes what a converted model computes, for any batch and length.

The graph of a decoder reads prompts and further tokens alike, in parts of any length. Its inputs are

    input_ids                   `[B, N]`, the newest tokens
    attention_mask              int64 `[B, P + N]`, also of the P tokens before them; padding is 0 and on the left
    past_key_values.I.state_J   what layer I keeps of the tokens before, or in a softmax layer
    past_key_values.I.key       `[B, Hkv, P, D]`, and likewise `.value`

and its outputs `logits [B, N, V]` and `present.I...`, which is the past of the next call. The first past is zeros, with
the sizes that the graph names and P = 0. Positions follow from the mask, as in `generate`. The graph of an encoder
takes `input_ids` and `attention_mask`, and returns `last_hidden_state` or `logits`.

In causal layers, and for the far keys of encoders, the operator `LinearAttention` of the domain `com.microsoft`
(onnxruntime 1.30 and later) reads a state token by token:

    linear        S <- S + k v^T                    o = S^T q
    gated         S <- exp(g) S + k v^T
    gated_delta   S <- exp(g) S,  S <- S + beta k (v - S^T k)^T

The denominator of kernel attention is one more channel of the values, whose value is 1. Where features are exponents,
the change of the running maximum is a decay per feature: with m_t = max(m_(t-1) + g_t, l_t), the state fades by
exp(g_t + m_(t-1) - m_t), the features of a key are exp(l_t - m_t), and a query with the exponents u takes those of
u + m_t. Every exponent is at most 0, so nothing overflows, and what is in the state is what our cache holds.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, F features, W width of the values.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan  # torch has no public name for it yet
from torch.export import Dim
from transformers import AutoConfig, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.errors import ConversionError, UsageError, one_line
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.reading import reading
from hf_linear_attention.attention.cache import state_layer
from hf_linear_attention.attention.transformers_internals import cache_among, cache_argument
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.export.command import ExportRequest
from hf_linear_attention.conversion.output_folder import TOKENIZER_FILES, share_permissions
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.modeling_linear_attention import linear_model_class
from hf_linear_attention.torch_kernels.blocks import EMPTY_MAXIMUM, EXP, pack_state, unpack_state
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS, load_implementations


# The oldest versions: `torch.onnx.ops` is new in torch 2.8, and the operator in onnxruntime 1.30.
NEEDED = {"torch": "2.8", "onnx": "1.19", "onnxruntime": "1.30", "onnxscript": "0.5"}
PLAIN_RUNTIME = "1.23"
DOMAIN, OPERATOR = "com.microsoft", "LinearAttention"
# Of values whose width is no multiple of this, the operator takes up to twice the time (onnxruntime 1.31).
LANES = 32
GRAPH = "model.onnx"
BESIDE = (*TOKENIZER_FILES, "config.json", "generation_config.json")
BATCH, LENGTH, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
# torch.export takes sizes of 0 and 1, and sizes that are equal, for what they are, so those of the example are others.
EXAMPLE = {BATCH: 3, LENGTH: 7, PAST: 5, TOTAL: 12}
# The largest difference of two logits, as a share of their standard deviation. Float32 rounds sums of another order in
# every layer: 3e-5 was measured in models of two layers. A state or a mask that is wrong by one token costs 1e-2.
TOLERANCE = 1e-3
# Rows and tokens of what the graph is checked with, and the steps after it.
CHECKED, STEPS = ((1, 5), (3, 67)), 8


@dataclass(frozen=True)
class Port:
    """An input or output of a graph; free sizes have names."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    def zeros(self, **sizes: int) -> Tensor:
        """A tensor of zeros with these free sizes."""
        shape = [size if isinstance(size, int) else sizes[size] for size in self.shape]
        return torch.zeros(shape, dtype=self.dtype, device="cpu")


def write(request: ExportRequest) -> str:
    """Write the folder of a graph, and return the text to print.

    Raises:
        UsageError: if a library is missing, or there is no graph for such a model.
        ConversionError: if the graph computes something else.
    """
    is_plain = request.opset == "plain"
    refuse_without_libraries(is_plain)
    with reading(f"{request.folder} (config.json and weights)"):
        config = AutoConfig.from_pretrained(request.folder)
        name = (config.architectures or [""])[0].removeprefix("Linear")
        stock = getattr(transformers, name, None)
        if not hasattr(config, "linear_attention") or stock is None:
            raise UsageError("`--to onnx` takes a converted model, and this one is none; convert it first")
        model: Any = linear_model_class(stock).from_pretrained(request.folder, dtype=torch.float32).eval()
    with staging(request.output_dir, replaces=request.overwrite) as folder:
        write_graph(graph_of(model), folder / GRAPH, plain=is_plain)
        difference = checked(model, folder / GRAPH)
        for beside in BESIDE:
            if (request.folder / beside).is_file():
                shutil.copyfile(request.folder / beside, folder / beside)
        share_permissions(folder)
    engine = f"any ONNX runtime, tested in onnxruntime {_version('onnxruntime')}"
    if not is_plain:
        engine = f"onnxruntime {NEEDED['onnxruntime']} or later, with {DOMAIN}.{OPERATOR} in causal linear layers"
    return (
        f"{request.output_dir / GRAPH} is for {engine}. Its results differ from those of the model by at most "
        f"{difference:.1e} of their standard deviation."
    )


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_without_libraries(is_plain: bool) -> None:
    """Refuse to begin without the libraries.

    Raises:
        UsageError: with what to install.
    """
    needed = NEEDED | ({"onnxruntime": PLAIN_RUNTIME} if is_plain else {})
    missing = [
        f"{name}>={oldest}"
        for name, oldest in needed.items()
        if (found := _version(name)) is None or Version(found) < Version(oldest)
    ]
    if missing:
        words = " ".join(f'"{name}"' for name in missing)
        raise UsageError(f"`--to onnx` needs more libraries; run `pip install {words}`")


class Decoder(nn.Module):
    """A decoder as a function: what its layers keep is an input and an output."""

    def __init__(self, model: PreTrainedModel, kept: Sequence[Sequence[Port]]) -> None:
        super().__init__()
        self.model, self.kept = model, kept
        self.is_softmax = [ports[0].name.endswith(".key") for ports in kept]
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        past = [port for ports in kept for port in ports]
        tokens = Port("input_ids", (BATCH, LENGTH), torch.long), Port("attention_mask", (BATCH, TOTAL), torch.long)
        self.inputs = [*tokens, *past]
        self.outputs = [Port("logits", (BATCH, LENGTH, model.config.get_text_config().vocab_size))]
        for port in past:
            shape = tuple(TOTAL if size == PAST else size for size in port.shape)
            self.outputs.append(Port(port.name.replace("past_key_values", "present"), shape, port.dtype))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The `outputs` for `inputs`."""
        input_ids, attention_mask, *past = tensors
        cache: Any = DynamicCache(config=self.model.config)
        rest, length = iter(past), input_ids.shape[1]
        has_softmax = any(self.is_softmax)
        # A state does not depend on how many tokens it has read, but the mask of a softmax layer does.
        seen = attention_mask.shape[1] - length if has_softmax else 0
        for number, (ports, is_softmax) in enumerate(zip(self.kept, self.is_softmax)):
            kept = tuple(next(rest) for _ in ports)
            if is_softmax:
                cache.layers[number].lazy_initialization(*kept)
                cache.layers[number].keys, cache.layers[number].values = kept
            else:
                state_layer(cache, number).restore(kept, seen)
        options: dict[str, Any] = {"attention_mask": attention_mask if has_softmax else attention_mask[:, -length:]}
        if self.takes_positions:
            positions = (attention_mask.cumsum(dim=1) - 1).masked_fill(attention_mask == 0, 0)
            options["position_ids"] = positions[:, -length:]
        options |= cache_argument(self.model, cache)
        logits = self.model(input_ids, use_cache=True, **options).logits
        present = [logits]
        for layer, is_softmax in zip(cache.layers, self.is_softmax):
            present += (layer.keys, layer.values) if is_softmax else layer.state
        return tuple(present)


class Encoder(nn.Module):
    """An encoder as a function of ids and mask: the first output of the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.inputs = [Port(name, (BATCH, LENGTH), torch.long) for name in ("input_ids", "attention_mask")]
        sizes = {name: port.zeros(**EXAMPLE) for name, port in zip(("input_ids", "attention_mask"), self.inputs)}
        name, found = next(iter(model(**sizes).items()))
        names = {EXAMPLE[BATCH]: BATCH, EXAMPLE[LENGTH]: LENGTH}
        shape = [names.get(size, size) if axis < 2 else size for axis, size in enumerate(found.shape)]
        self.outputs = [Port(name, tuple(shape))]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The `outputs` for `inputs`."""
        input_ids, attention_mask = tensors
        return (self.model(input_ids=input_ids, attention_mask=attention_mask)[0],)


@torch.no_grad()
def graph_of(model: Any) -> Decoder | Encoder:
    """What is exported of a model.

    Raises:
        UsageError: if there is no graph for such a model.
    """
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
        raise UsageError(
            f"`--to onnx` writes decoders and encoders of text; {type(model).__name__} reads {model.main_input_name}"
            + " with an encoder and a decoder" * model.config.is_encoder_decoder
        )
    if not model.can_generate():
        return Encoder(model)
    ids = torch.zeros(EXAMPLE[BATCH], EXAMPLE[LENGTH], dtype=torch.long, device="cpu")
    cache: Any = cache_among(model(ids, use_cache=True).values())
    return Decoder(model, [kept_by(number, layer) for number, layer in enumerate(cache.layers)])


def kept_by(number: int, layer: Any) -> list[Port]:
    """The ports of what one layer of a cache keeps.

    Raises:
        UsageError: if it is neither a state of ours, nor all keys and values.
    """
    is_softmax = type(layer) is DynamicLayer
    if not is_softmax and (not getattr(layer, "holds_linear_state", False) or layer.has_other_states):
        raise UsageError(
            f"`--to onnx`: layer {number} keeps states of the original model in a {type(layer).__name__}; a graph "
            "takes converted layers, and softmax layers that see all tokens"
        )
    tensors = (layer.keys, layer.values) if is_softmax else layer.state
    ports = []
    for place, x in enumerate(tensors):
        name = ("key", "value")[place] if is_softmax else f"state_{place}"
        shape: list[int | str] = [BATCH, *x.shape[1:]]
        if is_softmax:
            shape[2] = PAST
        ports.append(Port(f"past_key_values.{number}.{name}", tuple(shape), x.dtype))
    return ports


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context without the exporter's remarks about libraries that are missing and functions that will change."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def write_graph(graph: Any, path: Path, *, plain: bool) -> None:
    """Write the graph of a module whose `inputs` and `outputs` are ports.

    Raises:
        ConversionError: if torch cannot export it.
    """
    inputs, outputs = graph.inputs, graph.outputs
    free = [{axis: Dim.AUTO for axis, size in enumerate(port.shape) if isinstance(size, str)} for port in inputs]
    with _quietly(), torch.no_grad(), contextlib.nullcontext() if plain else operators_in_graphs():
        try:
            example = tuple(port.zeros(**EXAMPLE) for port in inputs)
            program = torch.export.export(graph, example, dynamic_shapes=(tuple(free),), strict=False)
            # The optimiser drops the reshapes around a product whenever the shapes happen to broadcast (onnxscript
            # 0.7.2, `_broadcast_to_matmul.py`), which is wrong where batch, heads and their groups are equal.
            options: dict[str, Any] = {"dynamo": True, "optimize": False, "verbose": False}
            options |= {"input_names": [port.name for port in inputs], "output_names": [port.name for port in outputs]}
            found: Any = torch.onnx.export(program, (), **options)
        except Exception as error:  # the exporter raises whatever it meets
            raise ConversionError(f"torch cannot export this model: {one_line(error)}") from error
    _name_sizes(found.model, [*inputs, *outputs])
    found.save(path)


def _name_sizes(model: Any, ports: Sequence[Port]) -> None:
    """Give free sizes their names, and drop what the exporter noted about this machine's files."""
    import onnx_ir

    for value, port in zip((*model.graph.inputs, *model.graph.outputs), ports):
        value.shape = onnx_ir.Shape(port.shape)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()


def session_of(path: Path) -> Any:
    """The graph in onnxruntime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def checked(model: Any, path: Path) -> float:
    """The largest difference from the model, as a share of the standard deviation of its results.

    Raises:
        ConversionError: if it is larger than what float32 explains, or the graph fails.
    """
    session, worst = session_of(path), 0.0
    generates = model.can_generate()
    longest = max_length_of(model.config)
    for rows, length in CHECKED:
        steps = STEPS if generates else 0
        length = length if longest is None or longest < 1 else max(1, min(length, longest - steps))
        generator = torch.Generator().manual_seed(length)
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (rows, length + steps), generator=generator)
        mask = torch.ones_like(ids)
        mask[-1, slice(2) if generates else slice(-2, None)] = 0
        options = {"position_ids": (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)}
        takes_positions = generates and "position_ids" in inspect.signature(model.forward).parameters
        expected = model(ids, attention_mask=mask, **(options if takes_positions else {}))
        expected = expected.logits if generates else expected.to_tuple()[0]
        try:
            found = _run(session, ids, mask, steps)
        except Exception as error:  # onnxruntime has no class for its errors
            raise ConversionError(f"onnxruntime cannot run the graph: {one_line(error)}") from error
        difference = (found - expected).abs()
        if difference.shape[:2] == mask.shape:
            difference = difference[mask > 0]
        worst = max(worst, float(difference.max() / expected.std()))
    if not worst <= TOLERANCE:
        raise ConversionError(
            f"the graph does not compute what the model computes: their largest difference is {worst:.1e} of the "
            f"standard deviation, and {TOLERANCE} is allowed; nothing was written"
        )
    return worst


def _run(session: Any, ids: Tensor, mask: Tensor, steps: int) -> Tensor:
    """The first output of the graph, the last `steps` tokens one at a time."""
    ports = [Port(x.name, tuple(x.shape), DTYPES[x.type]) for x in session.get_inputs()[2:]]
    past = [port.zeros(**{BATCH: len(ids), PAST: 0}).numpy() for port in ports]
    names, begin, outputs = [x.name for x in session.get_inputs()], 0, []
    for end in range(ids.shape[1] - steps, ids.shape[1] + 1):
        given = (ids[:, begin:end].numpy(), mask[:, :end].numpy(), *past)
        output, *past = session.run(None, dict(zip(names, given)))
        outputs.append(torch.from_numpy(output))
        begin = end
    return torch.cat(outputs, dim=1) if steps else outputs[0]


DTYPES = {"tensor(float)": torch.float32, "tensor(int64)": torch.long, "tensor(int32)": torch.int32,
          "tensor(int8)": torch.int8, "tensor(bool)": torch.bool}  # fmt: skip


# ---- The operator in place of torch's forms of causal attention


@contextlib.contextmanager
def operators_in_graphs() -> Iterator[None]:
    """A context in which exported graphs have the operator; what is not exported computes as before."""
    load_implementations()
    before = dict(IMPLEMENTATIONS)
    # `gated_delta_step` is asked for before anything is done for the padding.
    ours: dict[str, Callable[..., Any]] = {"attention": attention, "gated_delta_step": gated_delta}
    ours["gated_attention"] = gated_attention

    def chosen(name: str) -> Callable[..., Any]:
        def function(*given: Any) -> Any:
            found = ours[name](*given) if torch.compiler.is_exporting() else None
            return before[name](*given) if found is None and name in before else found

        return function

    IMPLEMENTATIONS.update({name: chosen(name) for name in ours})
    try:
        yield
    finally:
        IMPLEMENTATIONS.clear()
        IMPLEMENTATIONS.update(before)


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor] | None:
    """The implementation `attention` of causal layers, for features or exponents that are computed already."""
    query, key, value, key_mask, log_decay, state, *_, function, is_causal = arguments
    if not is_causal:
        return None
    if log_decay is not None:
        log_decay = log_decay[None, :, None].expand(key.shape[:3])
    given = (query, key, value, key_mask, log_decay, state, function >= EXP)
    output, denominator, scale, state = kernel_attention(*given)
    return output.to(query.dtype), denominator, scale, state


def gated_attention(
    mechanism: Any, inputs: MechanismInputs, weight: Tensor | None, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The implementation `gated_attention`: the output `[B, N, H, W]` and the state of a mechanism with gates."""
    query, key, value, mask, scaling, *_ = inputs
    feature_map = mechanism.feature_map
    query, key = feature_map.forward_queries(query, scaling), feature_map.forward_visible_keys(key, scaling, mask)
    key = key if weight is None else key + weight.unsqueeze(3)
    output, _, _, state = kernel_attention(query, key, value, mask, log_decay, state, feature_map.log_features)
    return output, state


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor | None,
    log_features: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Causal kernel attention, with a log decay `[B, Hkv, N]` of its own for every token, or None.

    Returns:
        The output `[B, N, H, W]`, the denominator and the log scale `[B, Hkv, G, N, 1]`, and the state.
    """
    visible = None if key_mask is None else (key_mask > 0)[:, :, None, None]
    query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))  # [B, N, heads, ...], as in the node
    decay = None if log_decay is None else log_decay.float().transpose(1, 2).unsqueeze(3)
    if visible is not None:
        value = value.masked_fill(~visible, 0.0)
        key = key.masked_fill(~visible, EMPTY_MAXIMUM if log_features else 0.0)
        decay = None if decay is None else decay.masked_fill(~visible, 0.0)
    sums, maximum = unpack_state(state, log_features)
    (batch, _, kv_heads, features), width = key.shape, value.shape[3]
    if sums is None:
        sums = value.new_zeros(batch, kv_heads, features, width + 1)
    scale = None
    if log_features:
        empty = sums.new_full(sums.shape[:3], EMPTY_MAXIMUM)
        # In a state of zeros, too, there are no tokens: after a token, Z is at least 1 for every feature.
        maximum = empty if maximum is None else torch.where(sums[..., -1] == 0, empty, maximum)
        key, decay, largest = below_running_maximum(key, decay, maximum)
        exponents = query.unflatten(2, (kv_heads, -1)) + largest.unsqueeze(3)
        query = exponents.softmax(dim=4)
        # The constant by which the softmax divides, from the largest entry of each row: a sum would take longer.
        scale = exponents.amax(dim=4, keepdim=True) - query.amax(dim=4, keepdim=True).log()
        query, scale, maximum = query.flatten(2, 3), scale.permute(0, 2, 3, 1, 4), largest[:, -1]
    fill = -(width + 1) % LANES
    one = torch.tensor([1.0] + [0.0] * fill, dtype=torch.float32, device=value.device).expand(*value.shape[:3], -1)
    value = torch.cat((value, one if visible is None else one * visible), dim=3)
    output, sums = linear_attention(query, key, value, F.pad(sums, (0, fill)), decay)
    denominator, sums = output[..., width : width + 1], sums[..., : width + 1]
    output = output[..., :width] / torch.where(denominator == 0, torch.inf, denominator)
    denominator = denominator.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return output, denominator, scale, pack_state(sums, maximum)


def below_running_maximum(exponents: Tensor, decay: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(m_(t-1) + g_t, l_t) from m_0 = `start [B, Hkv, F]`, for l = `exponents [B, N, Hkv, F]`.

    Args:
        decay: g, `[B, N, Hkv, 1]`, or None.

    Returns:
        The features exp(l_t - m_t), the decay g_t + m_(t-1) - m_t and m_t itself, all `[B, N, Hkv, F]`.
    """

    def step(carried: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        exponent, *faded = token
        largest = torch.maximum(carried + faded[0] if faded else carried, exponent)
        return largest, largest.clone()

    tokens = [x.transpose(0, 1) for x in (exponents, decay) if x is not None]
    start = start.clone(memory_format=torch.contiguous_format)
    largest = scan(step, start, tokens)[1]
    change = torch.cat((start.unsqueeze(0), largest[:-1])) - largest
    found = (tokens[0] - largest).exp(), change if decay is None else change + tokens[1], largest
    features, decay, largest = (x.transpose(0, 1) for x in found)
    return features, decay, largest


def gated_delta(given: tuple[Any, ...], key_mask: Tensor | None, rows: None) -> tuple[Tensor, Tensor]:
    """`torch_kernels.delta.gated_delta`; at padding the output is any number, and the state stays as it is."""
    *tensors, state, erases = given
    query, key, value, log_decay, beta = (x.float().transpose(1, 2) for x in tensors)
    if state is None:
        state = value.new_zeros(key.shape[0], *key.shape[2:], value.shape[3])
    decay, beta = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3), beta.unsqueeze(3)
    if key_mask is not None:
        is_hidden = (key_mask <= 0)[:, :, None, None]
        key, value, decay, beta = (x.masked_fill(is_hidden, 0.0) for x in (key, value, decay, beta))
    if not erases:
        value, beta = value * beta, None
    output, state = linear_attention(query, key, value, state, decay, beta)
    return output.transpose(1, 2), state


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, decay: Tensor | None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The node `LinearAttention`.

    Args:
        query: `[B, N, H, F]`.
        key, value: `[B, N, Hkv, F]` and `[B, N, Hkv, W]`.
        state: `[B, Hkv, F, W]`.
        decay: its logarithm, `[B, N, Hkv, F]` or `[B, N, Hkv, 1]`.
        beta: `[B, N, Hkv, 1]`, if what the state holds at a key is erased first.

    Returns:
        The output `[B, N, H, W]`, and the state after these tokens.
    """
    (batch, length, heads, _), width = query.shape, value.shape[3]
    rule = "linear" if decay is None else "gated" if beta is None else "gated_delta"
    packed: list[Any] = [None if x is None else x.flatten(2) for x in (query, key, value, None, decay, beta)]
    packed[3] = state
    while packed[-1] is None:
        packed.pop()
    output, state = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{OPERATOR}",
        packed,
        {"q_num_heads": heads, "kv_num_heads": key.shape[2], "update_rule": rule, "scale": 1.0},
        dtypes=(torch.float32, torch.float32),
        shapes=((batch, length, heads * width), state.shape),
        version=1,
    )
    return output.unflatten(2, (heads, width)), state
