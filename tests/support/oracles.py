"""Each mechanism of the matrix in float64, from `reference.py` and the mechanism's own parameters.

An oracle takes `(mechanism, query, key, value, mask, is_causal, scaling)` and returns `[B, H, N, D]`.
"""

from __future__ import annotations

import math

import reference
import torch
from matrix import MECHANISM_ROWS, SCALING, hidden_states_of


def linear(mechanism, query, key, value, mask, is_causal, scaling):
    features = FEATURES[mechanism.settings["feature_map"]](mechanism.feature_map, query, key, scaling)
    options = {"key_mask": mask, "is_causal": is_causal, "log_decay": log_decay(mechanism)}
    return reference.kernel_attention(*features, value, **options, log_gates=log_gates(mechanism, key, mask))


def elu1(feature_map, query, key, scaling):
    return reference.elu1(query).log(), reference.elu1(key).log()


def relu(feature_map, query, key, scaling):
    return reference.relu(query).log(), reference.relu(key).log()


def hedgehog(feature_map, query, key, scaling):
    return (
        reference.hedgehog(query, feature_map.query_projection, scaling),
        reference.hedgehog(key, feature_map.key_projection, scaling),
    )


def exp(feature_map, query, key, scaling):
    query_features = query.double() * math.sqrt(scaling) @ feature_map.query_projection.double()
    parameters = (feature_map.key_projection, feature_map.key_bias, feature_map.key_norm_weight)
    return query_features, reference.exp_keys(key, *parameters, scaling)


def performer(mechanism, query, key, value, mask, is_causal, scaling):
    features = mechanism.settings["features"]
    oracle = RANDOM_FEATURES[features]
    if mechanism.geometry is not None:
        query, key = (
            reference.head_maps(x, maps.weight, maps.log_scale, maps.bias)
            for x, maps in ((query, mechanism.geometry.query), (key, mechanism.geometry.key))
        )
    inputs = [x.double() * math.sqrt(scaling) for x in (query, reference.repeat_heads(key, query.shape[1]))]
    arguments = [mechanism.feature_map.projection]
    if features == "favor++":
        groups = query.shape[1] // key.shape[1]
        arguments.append(mechanism.feature_map.norm_weight.double().repeat_interleave(groups)[:, None, None])
    phi_query, phi_key = (oracle(x, *arguments) for x in inputs)
    if features == "trig":
        return reference.attend_weights(phi_query @ phi_key.transpose(-1, -2), value, mask, is_causal)
    options = {"key_mask": mask, "is_causal": is_causal, "log_decay": log_decay(mechanism)}
    return reference.kernel_attention(phi_query, phi_key, value, **options)


def linformer(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row without its padding, so that no masking can be wrong."""
    rows = []
    for row in range(query.shape[0]):
        real = slice(None) if mask is None else mask[row]
        one = slice(row, row + 1)
        parts = (query[one], key[one, :, real], value[one, :, real])
        projections, rescaling = linformer_matrices(mechanism, parts[1].shape[2])
        rows.append(reference.linformer(*parts, *projections, scaling, *rescaling))
    return torch.cat(rows)


def stored_projections(mechanism):
    """E and F as the model stores them; F is E where they are shared."""
    shared = mechanism.settings["projection_sharing"] in ("key-value", "layerwise")
    return mechanism.key_projection, mechanism.key_projection if shared else mechanism.value_projection


def linformer_linear(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row without its padding; E is rescaled by the share of its weight that is left, F is not."""
    rows = []
    for row in range(query.shape[0]):
        one, real = slice(row, row + 1), slice(None) if mask is None else mask[row]
        features = FEATURES[mechanism.settings["feature_map"]](
            mechanism.feature_map, query[one], key[one, :, real], scaling
        )
        compress, gather = (  # absolute values, with a derivative of 1 at 0
            torch.where(projection < 0, -projection, projection)
            for projection in map(torch.Tensor.double, stored_projections(mechanism))
        )
        length = features[1].shape[2]
        total, mass = compress.sum(2, keepdim=True), compress[..., :length].sum(2, keepdim=True)
        least = total * 0.5 * compress.shape[1] / mechanism.max_length
        compress = compress[..., :length] * total / torch.maximum(mass, least)
        rows.append(reference.linformer_linear(*features, value[one, :, real], compress, gather[..., :length]))
    return torch.cat(rows)


def linformer_matrices(mechanism, length: int):
    """E and F `[1 or Hkv, k, length]`, and what `reference.linformer` rescales them by: `max_length` and `full`."""
    kind, slots = mechanism.settings["projection"], mechanism.num_slots
    if kind == "mean-pool":
        used = min(slots, length)
        pool = torch.nn.functional.one_hot(torch.arange(length) * used // length, used).T.double()
        return [(pool / pool.sum(1, keepdim=True))[None]] * 2, ()
    projections, max_length = [x.double() for x in stored_projections(mechanism)], mechanism.max_length
    if kind == "stretched":
        return [reference.stretched(projection, length) for projection in projections], ()
    if kind == "random":
        return [projection[..., :length] for projection in projections], ()
    if kind == "conv":
        width = projections[0].shape[1]
        slots = -(-max_length // width)
        max_length = slots * width
        eye = torch.eye(slots, dtype=torch.float64)
        projections = [torch.stack([torch.kron(eye, row[None]) for row in kernel]) for kernel in projections]
    full = [projection.abs().sum(2) for projection in projections]
    return [projection[..., :length] for projection in projections], (max_length, full)


def log_decay(mechanism, name: str = "decay"):
    """`[H]`, or None without decay; ALiBi where nothing else was asked for."""
    decay = getattr(mechanism, name) or getattr(mechanism, "alibi", None)
    if decay is None:
        return None
    groups = mechanism.shape.num_heads // mechanism.shape.num_key_value_heads
    return decay().double().repeat_interleave(groups)


def log_gates(mechanism, key, mask):
    """What the gates of `matrix.add_gates` add to the logarithms of the weights: `[B, H, N, S]`, or 0 without gates.

    It is a_j, and g of every real token after j up to i.
    """
    if mechanism.gate is None:
        return 0.0
    p = {name: parameter.double() for name, parameter in mechanism.gate.named_parameters()}
    hidden = hidden_states_of(key).double() / math.sqrt(mechanism.shape.hidden_size)
    total = torch.zeros(*key.shape[:3], key.shape[2], dtype=torch.float64)
    if "input_projection" in p:
        total = total + (hidden @ p["input_projection"].T).transpose(1, 2).unsqueeze(2)
    if "forget.rate" in p:
        rate = hidden @ p["forget.projection"].T + p["forget.rate"]
        forget = -(1 + rate.exp()).log()
        forget = forget if mask is None else forget * mask.unsqueeze(-1)
        until = forget.cumsum(dim=1).transpose(1, 2)
        total = total + until.unsqueeze(3) - until.unsqueeze(2)
    return reference.repeat_heads(total, mechanism.shape.num_heads)


def hybrid(mechanism, query, key, value, mask, is_causal, scaling):
    features = FEATURES[mechanism.settings["feature_map"]](mechanism.feature_map, query, key, scaling)
    options = {"log_decay": log_decay(mechanism), "alibi": log_decay(mechanism, "alibi"), "is_causal": is_causal}
    options["trained_length"] = mechanism.trained_length
    mix = {name: parameter.double() for name, parameter in mechanism.mix.named_parameters()}

    count = mechanism.num_exact_keys

    def compute(*parts):
        parts, scores = (parts[:-1], parts[-1].squeeze(-1)) if count else (parts, None)
        if scores is not None:
            place = torch.arange(1, scores.shape[2] + 1)
            scores = scores + mechanism.score_slope.detach().float()[:, None] * place / 64
            kept = reference.kept_keys(scores, mechanism.window_size, mechanism.num_sinks, count)
            options["kept"] = reference.repeat_heads(kept, parts[0].shape[1])
        norm = parts[0].double().square().sum(-1, keepdim=True) * scaling / 2
        scale, weight = (mix[name][:, None, None] for name in ("far_log_scale", "query_norm_weight"))
        sizes = mechanism.window_size, mechanism.num_sinks
        return reference.hybrid(*parts, scaling, *sizes, scale - weight * norm, **options)

    scores = ()
    if count:
        hidden = hidden_states_of(key).float() / math.sqrt(mechanism.shape.hidden_size)
        scores = ((hidden @ mechanism.score_projection.float().T).transpose(1, 2).unsqueeze(-1),)
    return without_padding(compute, mask, query, key, value, *features, *scores)


def window(mechanism, query, key, value, mask, is_causal, scaling):
    """Softmax with what lies outside the window hidden."""
    alibi = log_decay(mechanism, "alibi")

    def compute(q, k, v):
        place, heads = torch.arange(q.shape[2]), q.shape[1]
        distance, is_sink = (place[:, None] - place).abs(), place < mechanism.num_sinks
        logits = scaling * q.double() @ reference.repeat_heads(k.double(), heads).transpose(-1, -2)
        logits = logits if alibi is None else logits + distance * alibi[:, None, None]
        seen = (distance < mechanism.window_size) | is_sink
        seen = seen & (place <= place[:, None]) if is_causal else seen | is_sink[:, None]
        weights = logits.masked_fill(~seen, -math.inf).softmax(dim=-1)
        return weights @ reference.repeat_heads(v.double(), heads)

    return without_padding(compute, mask, query, key, value)


def nystrom(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row: the landmarks of its real tokens, read by all of its queries."""
    conv = None if mechanism.conv_weight is None else mechanism.conv_weight.flatten(1)
    how = (mechanism.num_landmarks, 6, scaling, conv)
    return without_padding(lambda *parts: reference.nystrom(*parts, *how), mask, query, key, value)


def latent(mechanism, query, key, value, mask, is_causal, scaling):
    return reference.latent(query, key, value, mechanism.latents, scaling, mask)


def without_padding(compute, mask, query, key, value, *others):
    """`compute(query, key, value, ...)` of each row's real tokens alone; queries at padding get 0.

    Every tensor has its tokens in its third axis.
    """
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    rows = []
    for row in range(query.shape[0]):
        real = torch.arange(query.shape[2]) if mask is None else mask[row].nonzero().squeeze(1)
        if not len(real):
            rows.append(output[row : row + 1])
            continue
        parts = [x[row : row + 1].index_select(2, real) for x in (query, key, value, *others)]
        rows.append(output[row : row + 1].index_copy(2, real, compute(*parts)))
    return torch.cat(rows)


def aft(mechanism, query, key, value, mask, is_causal, scaling):
    def compute(*parts):
        bias = aft_bias(mechanism, parts[0].shape[2])
        if is_causal:
            bias = bias.masked_fill(~torch.ones(bias.shape[1:], dtype=torch.bool).tril(), -math.inf)
        return reference.aft(*parts, bias)

    return without_padding(compute, mask, query, key, value)


def aft_bias(mechanism, length: int):
    """w `[Hkv, N, N]` in float64."""
    parameters = {name: parameter.double() for name, parameter in mechanism.named_parameters()}
    if mechanism.variant == "simple":
        return torch.zeros(mechanism.shape.num_key_value_heads, length, length, dtype=torch.float64)
    if "query_position" in parameters:
        return (parameters["query_position"] @ parameters["key_position"].mT)[:, :length, :length]
    bias = parameters["position_bias"]
    if mechanism.variant == "full":
        return bias[:, :length, :length]
    position = torch.arange(length)
    offset = position - position[:, None] + mechanism.window_size - 1
    inside = (offset >= 0) & (offset <= 2 * mechanism.window_size - 2)
    row = position[:, None] if mechanism.variant == "local" else torch.zeros_like(offset)
    return bias[:, row.expand_as(offset), offset.clamp(0, bias.shape[2] - 1)] * inside


def gated_delta(mechanism, query, key, value, mask, is_causal, scaling):
    """The gates are those of `matrix.add_gates`."""
    if getattr(mechanism, "is_qwen3_5", False):
        return qwen3_5(mechanism, query, key, value, mask)
    p = {name: parameter.double() for name, parameter in mechanism.named_parameters()}
    hidden = hidden_states_of(key).double() / math.sqrt(mechanism.shape.hidden_size)
    beta = (hidden @ p["rule.beta.projection"].T + p["rule.beta.bias"]).sigmoid().transpose(1, 2)
    if (kind := mechanism.rule.decay) == "none":
        alpha = torch.ones_like(beta)
    else:
        hidden = hidden @ p["rule.forget.reduction"].T if kind == "channel" else hidden
        rate = hidden @ p["rule.forget.projection"].T + p["rule.forget.rate"]
        alpha = (1 / (1 + rate.exp())).unflatten(2, (beta.shape[1], -1)).transpose(1, 2)  # exp(-softplus(rate))
    size = mechanism.rule.features.key_projection.shape[2]
    alpha = alpha.reshape(*beta.shape, -1).expand(*beta.shape, size)

    def features(x, side):
        x = x * math.sqrt(scaling) @ p[f"rule.features.{side}_projection"] + p[f"rule.features.{side}_bias"]
        x = x * x.sigmoid()
        return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()

    def compute(*parts):
        q, k, v, kept, write = (x.double() for x in parts)
        if getattr(mechanism, "conv_size", 0):
            q, k, v = (convolved(x, p[f"convolutions.{place}.weight"]) for place, x in enumerate((q, k, v)))
        given = features(q, "query"), features(k, "key"), v, kept.log(), write
        return reference.gated_delta(*given, erases=mechanism.rule.erases)[0] * p["rule.output_scale"]

    return without_padding(compute, mask, query, key, value, alpha, beta)


def qwen3_5(mechanism, query, key, value, mask):
    """The linear layer of Qwen3.5 without its output projection, of the hidden states in `key`."""
    p = {name.removeprefix("rule."): parameter.double() for name, parameter in mechanism.named_parameters()}
    heads, size = query.shape[1], query.shape[3]

    def unit(x):
        return x / (x.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()

    def compute(_, key, __):
        hidden = hidden_states_of(key).double()
        lines = [(hidden @ p[f"in_proj_{name}"].T).unflatten(2, (heads, size)).transpose(1, 2) for name in "qkv"]
        lines = [convolved(x, p[f"convolutions.{place}.weight"]) for place, x in enumerate(lines)]
        q, k, v = (x / (1 + (-x).exp()) for x in lines)
        rate = (1 + (hidden @ p["in_proj_a"].T + p["dt_bias"]).exp()).log() * p["A_log"].exp()
        beta = 1 / (1 + (-hidden @ p["in_proj_b"].T).exp())
        decay = -rate.transpose(1, 2)[..., None].expand(-1, -1, -1, size)
        output = reference.gated_delta(unit(q) / size**0.5, unit(k), v, decay, beta.transpose(1, 2))[0]
        z = (hidden @ p["in_proj_z"].T).unflatten(2, (heads, size)).transpose(1, 2)
        return output / (output.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * p["norm"] * z / (1 + (-z).exp())

    return without_padding(compute, mask, query, key, value)


def convolved(x, weight):
    """The causal convolution of `x [B, heads, N, D]` with `weight [W, heads, 1, D or 1]`, the newest token's first."""
    size, length = weight.shape[0], x.shape[2]
    kernel = weight.flip(0).expand(size, *x.shape[1:2], 1, x.shape[3]).permute(1, 3, 2, 0).flatten(0, 1)  # [h D, 1, W]
    line = x.transpose(2, 3).flatten(1, 2)
    line = torch.nn.functional.conv1d(line, kernel, padding=size - 1, groups=kernel.shape[0])[..., :length]
    return line.unflatten(1, (x.shape[1], -1)).transpose(2, 3)


# The features' logarithms: the features themselves would underflow where an oracle must not.
FEATURES = {"elu1": elu1, "relu": relu, "exp": exp, "hedgehog": hedgehog}
RANDOM_FEATURES = {
    "exp": reference.favor,
    "cosh": reference.favor_cosh,
    "trig": reference.favor_trig,
    "relu": reference.favor_relu,
    "favor++": reference.favor_optimal,
}
MECHANISMS = aft, linear, gated_delta, hybrid, performer, linformer, linformer_linear, latent, nystrom, window
ORACLES = {oracle.__name__: oracle for oracle in MECHANISMS}


def exact(row: str, mechanism, query, key, value, mask=None, is_causal=True):
    """What a row of the matrix must compute, in float64, `[B, N, H, D]`."""
    inputs = (x.double() for x in (query, key, value))
    oracle = ORACLES[MECHANISM_ROWS[row]["mechanism"]]
    return oracle(mechanism, *inputs, mask, is_causal, SCALING).transpose(1, 2)
