"""Float64 oracles, written as in the papers and as slowly: the N x N weights are formed. The tests compare with them.

Axes: B batch, H query heads, Hkv key/value heads, N queries, S keys, D head dimension, F features.
"""

from __future__ import annotations

import itertools
import math

import torch


def repeat_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[B, Hkv, S, D]` -> `[B, H, S, D]`: each key/value head serves H / Hkv query heads."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies, is_interleaved: bool = False) -> torch.Tensor:
    """`x [B, heads, N, D]`, its first channels turned as complex numbers by their frequency; 0 turns by nothing."""
    x, size = x.double(), 2 * len(frequencies)
    pairs = x[..., :size].unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    pairs = pairs if is_interleaved else pairs.transpose(-1, -2)
    angle = positions.double()[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    turned = turned if is_interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), x[..., size:]), dim=-1)


def attend(log_weights: torch.Tensor, value: torch.Tensor, key_mask=None, is_causal: bool = False) -> torch.Tensor:
    """Normalised attention from the logarithms of its weights `[B, H, N, S]`; 0 for a query that sees no key."""
    queries, keys = log_weights.shape[-2:]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        visible = visible.tril(keys - queries)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    log_weights = log_weights.masked_fill(~visible, -math.inf)
    weights = log_weights.softmax(dim=-1).nan_to_num(0.0)
    return weights @ repeat_heads(value.double(), log_weights.shape[1])


def attend_weights(weights: torch.Tensor, value: torch.Tensor, key_mask=None, is_causal: bool = False) -> torch.Tensor:
    """Attention normalised from weights `[B, H, N, S]` of any sign; 0 for a query whose weights sum to 0."""
    weights = weights.double()
    if is_causal:
        weights = weights.tril(weights.shape[-1] - weights.shape[-2])
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :]
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / total.masked_fill(total == 0, 1.0)) @ repeat_heads(value.double(), weights.shape[1])


def kernel_attention(
    query_features,
    key_features,
    value,
    *,
    log_features=True,
    key_mask=None,
    is_causal=False,
    log_decay=None,
    log_gates=0.0,
):
    """Katharopoulos 2020, equation 4: weights phi(q_i)·phi(k_j), from features or their logarithms.

    With `log_decay [H]` the logarithm of a weight changes by that much for every real token between key and query.
    `log_gates [B, H, N, S]` are added to the logarithms of the weights.
    """
    query_features = query_features.double()
    key_features = repeat_heads(key_features.double(), query_features.shape[1])
    if log_features:
        logs = (query_features.unsqueeze(-2) + key_features.unsqueeze(-3)).logsumexp(dim=-1)
    else:
        logs = (query_features @ key_features.transpose(-1, -2)).log()
    if log_decay is not None:
        length = logs.shape[-1]
        count = torch.arange(length)[None] if key_mask is None else key_mask.cumsum(dim=1)
        logs = logs + (count[:, None, :, None] - count[:, None, None, :]) * log_decay[:, None, None]
    return attend(logs + log_gates, value, key_mask, is_causal)


def elu1(x: torch.Tensor) -> torch.Tensor:
    """Katharopoulos 2020, equation 7."""
    x = x.double()
    return torch.where(x > 0, x + 1, x.exp())


def relu(x: torch.Tensor) -> torch.Tensor:
    """Performer 2020, section 4: generalised attention with f = ReLU and the kernel epsilon 1e-3."""
    return x.double().clamp(min=0) + 1e-3


def hedgehog(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Logarithms of [softmax(x W), softmax(-x W)] per head (Hedgehog 2024, section 4.2).

    x `[B, H, N, D]`, weight `[H, D, F / 2]`.
    """
    projected = torch.einsum("bhnd,hdf->bhnf", x.double() * math.sqrt(scaling), weight.double())
    return torch.cat((projected.log_softmax(-1), (-projected).log_softmax(-1)), dim=-1)


def favor(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Logarithms of FAVOR+ (Performer 2020, Lemma 1): w·x - |x|^2 / 2 - log(F) / 2, x times sqrt(scaling) already."""
    x, projection = x.double(), projection.double()
    return x @ projection.T - x.square().sum(-1, keepdim=True) / 2 - math.log(projection.shape[0]) / 2


def head_maps(x: torch.Tensor, weight: torch.Tensor, log_scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """exp(t) x A + b per head; x `[B, heads, N, D]`, A `[heads, D, D]`, t `[heads, 1, 1]`, b `[heads, 1, D]`."""
    mapped = torch.einsum("bhnd,hde->bhne", x.double(), weight.double())
    return log_scale.double().exp() * mapped + bias.double()


def favor_cosh(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Logarithms of the hyperbolic features (Performer 2020, Lemma 1): FAVOR+ with W and -W."""
    return favor(x, torch.cat((projection, -projection)))


def favor_trig(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """exp(|x|^2 / 2) [sin(w·x), cos(w·x)] / sqrt(M) (Performer 2020, section 2.3); not logarithms."""
    x, projection = x.double(), projection.double()
    phases = x @ projection.T
    scale = (x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(projection.shape[0])
    return scale * torch.cat((phases.sin(), phases.cos()), dim=-1)


def favor_relu(x: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """Logarithms of relu(w·x) + 1e-3 (Performer 2020, section 2.2, generalised attention; kernel epsilon 1e-3)."""
    return relu(x.double() @ projection.double().T).log()


def favor_optimal(x: torch.Tensor, projection: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Logarithms of FAVOR++ (Likhosherstov 2022) with C = -1/2, B = sqrt(1 - 4 A), D = (1 - 4 A)^(d/4)."""
    x, projection = x.double(), projection.double()
    exponent = a * projection.square().sum(-1) + (1 - 4 * a).sqrt() * (x @ projection.T)
    constant = (1 - 4 * a).log() * x.shape[-1] / 4 - math.log(projection.shape[0]) / 2
    return constant + exponent - x.square().sum(-1, keepdim=True) / 2


def exp_keys(x, weight, bias, norm_weight, scaling: float) -> torch.Tensor:
    """Logarithms of the learned exponential features of keys: x W + b - a |x|^2 / 2, x scaled by sqrt(scaling)."""
    x = x.double() * math.sqrt(scaling)
    return x @ weight.double() + bias.double() - norm_weight.double() * x.square().sum(-1, keepdim=True) / 2


def linformer(query, key, value, key_projection, value_projection, scaling: float, max_length=None, full=None):
    """Linformer 2020, equation 7: softmax(q (E K)^T) (F V), for one unpadded input.

    Without `full`, E and F `[1 or Hkv, k, n]` are used as they are. With it (the whole of E's and F's absolute weight,
    `[1 or Hkv, k]` each), E and F are the first columns of wider ones: each slot is divided by the share of its weight
    that is left, and slots with less than half of one token's share take no part.
    """
    heads = query.shape[1]
    compressed, empty = [], []
    for x, projection, total in zip((key, value), (key_projection, value_projection), full or (None, None)):
        projection = projection.double()
        mass = projection.abs().sum(-1)
        least = mass - 1 if total is None else total * 0.5 * projection.shape[-2] / max_length
        scale = 1.0 if total is None else (total / torch.maximum(mass, least)).unsqueeze(-1)
        empty.append(mass <= least)
        compressed.append((projection @ x.double()) * scale)
    key, value = compressed
    logits = scaling * query.double() @ repeat_heads(key, heads).transpose(-1, -2)
    hidden = empty[0].expand(key.shape[1], -1).repeat_interleave(heads // key.shape[1], dim=0)
    logits = logits.masked_fill(hidden.unsqueeze(1), -math.inf)
    return logits.softmax(dim=-1) @ repeat_heads(value, heads)


def hybrid(
    query, key, value, query_features, key_features, scaling, window_size, num_sinks, far_log_scale, *,
    log_decay=None, alibi=None, is_causal=True, trained_length=None, kept=None
):  # fmt: skip
    """Exact logits near by, logarithms of kernel weights far away, for one unpadded input.

    Near are tokens less than `window_size` away and the first `num_sinks`, which in the bidirectional form also see
    everything exactly; features are logarithms. With `log_decay [H]` a far key loses that much for every token since it
    left the window; with `alibi [H]` (negative slopes) every key loses that much for every token. In the
    bidirectional form, far keys weigh trained_length / N of that in an input of N tokens, if it is less than 1. `kept`,
    bool `[B, H, N, N]`, are further keys that a query sees exactly. It is one softmax over exact logits and far
    logarithms plus `far_log_scale [B, H, N, 1]`.
    """
    heads, length = query.shape[1:3]
    exact = scaling * query.double() @ repeat_heads(key.double(), heads).transpose(-1, -2)
    key_features = repeat_heads(key_features.double(), heads)
    far = (query_features.double().unsqueeze(-2) + key_features.unsqueeze(-3)).logsumexp(dim=-1)
    if trained_length is not None and not is_causal:
        far = far - math.log(max(1, length / trained_length))
    position = torch.arange(length)
    distance = (position[:, None] - position).abs()
    if alibi is not None:
        exact = exact + distance * alibi.double()[:, None, None]
    if log_decay is not None:
        far = far + (distance - window_size) * log_decay.double()[:, None, None]
        if alibi is not None:
            far = far + window_size * alibi.double()[:, None, None]
    near = (distance < window_size) | (position < num_sinks)
    if not is_causal:
        near = near | (position < num_sinks)[:, None]
    if kept is not None:
        near = near | kept
    return attend(torch.where(near, exact, far + far_log_scale), value, is_causal=is_causal)


def kept_keys(scores, window_size: int, num_sinks: int, count: int):
    """Bool `[B, Hkv, N, N]`: for each query, the `count` largest of `scores [B, Hkv, N]` behind window and sinks."""
    kept = torch.zeros(*scores.shape, scores.shape[2], dtype=torch.bool)
    for row, head, query in itertools.product(*map(range, scores.shape)):
        behind = range(num_sinks, query - window_size + 1)
        best = sorted(behind, key=lambda place: (-scores[row, head, place].item(), place))[:count]
        kept[row, head, query, best] = True
    return kept


def nystrom(query, key, value, num_landmarks: int, iterations: int, scaling: float, conv_weight=None):
    """Nystromformer 2021, equations 11 to 15, for one unpadded input of n tokens.

    Landmark s is the mean of the tokens t with floor(t M / n) = s. At most M tokens: exact softmax, since A A^+ A = A.
    conv_weight `[H, width]`: a convolution along the length of the values, one kernel per head, is added.
    """
    heads, length = query.shape[1:3]
    query, key, value = query.double(), repeat_heads(key.double(), heads), repeat_heads(value.double(), heads)
    if length <= num_landmarks:
        output = attend(scaling * query @ key.transpose(-1, -2), value)
    else:
        owner = torch.arange(length) * num_landmarks // length
        landmarks = [
            torch.stack([x[:, :, owner == s].mean(dim=2) for s in range(num_landmarks)], dim=2) for x in (query, key)
        ]
        pairs = ((query, landmarks[1]), (landmarks[0], landmarks[1]), (landmarks[0], key))
        first, middle, last = ((scaling * q @ k.transpose(-1, -2)).softmax(dim=-1) for q, k in pairs)
        inverse = torch.stack([_newton_schulz(a, iterations) for a in middle.flatten(0, 1)]).view_as(middle)
        output = first @ inverse @ last @ value
    if conv_weight is not None:
        half = conv_weight.shape[1] // 2
        for shift in range(-half, half + 1):
            moved = torch.zeros_like(value)
            here, there = slice(max(0, -shift), length - max(0, shift)), slice(max(0, shift), length + min(0, shift))
            moved[:, :, here] = value[:, :, there]
            output = output + conv_weight.double()[:, shift + half, None, None] * moved
    return output


def _newton_schulz(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from Z = A^T / (|A|_1 |A|_inf), one matrix `[M, M]`."""
    inverse = matrix.T / (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, math.inf))
    identity = torch.eye(matrix.shape[0], dtype=matrix.dtype)
    for _ in range(iterations):
        az = matrix @ inverse
        inverse = inverse @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return inverse


def latent(query, key, value, latents, scaling: float, key_mask=None):
    """softmax(s Q (C K)^T) C V with C = softmax(s Lambda K^T): Perceiver's cross-attention, Set Transformer's ISAB.

    latents Lambda `[Hkv, L, D]`; the weights `[N, S]` of every head are formed.
    """
    heads = query.shape[1]
    key, latents = repeat_heads(key.double(), heads), repeat_heads(latents.double()[None], heads)
    gather = scaling * latents @ key.transpose(-1, -2)
    if key_mask is not None:
        gather = gather.masked_fill(~key_mask[:, None, None, :], -math.inf)
    gather = gather.softmax(dim=-1).nan_to_num(0.0)
    weights = (scaling * query.double() @ (gather @ key).transpose(-1, -2)).softmax(dim=-1) @ gather
    return weights @ repeat_heads(value.double(), heads)


def aft(query, key, value, bias) -> torch.Tensor:
    """AFT (Zhai 2021, equation 2): sigmoid(q_t) sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), channel by channel.

    bias w `[Hkv, N, S]`, -inf where a query must not look.
    """
    heads = query.shape[1]
    key, value = repeat_heads(key.double(), heads), repeat_heads(value.double(), heads)
    bias = bias.double().repeat_interleave(heads // bias.shape[0], dim=0)
    weights = (key.unsqueeze(2) + bias[:, :, :, None]).softmax(dim=3)  # [B, H, N, S, D]
    return query.double().sigmoid() * (weights * value.unsqueeze(2)).sum(dim=3)


def stretched(change, length: int):
    """E `[1 or Hkv, min(k, length), length]`: means of segments plus `change [1 or Hkv, k, n]`, shared out by overlap.

    Column c of `change` is the interval [c, c + 1), and token r is [r n / length, (r + 1) n / length). With at most k
    tokens, E is the identity.
    """
    change = change.double()
    slots, columns = change.shape[1:]
    if length <= slots:
        return torch.eye(length, dtype=torch.float64).expand(change.shape[0], -1, -1)
    pool = torch.nn.functional.one_hot(torch.arange(length) * slots // length, slots).T.double()
    overlap = torch.zeros(columns, length, dtype=torch.float64)
    for column in range(columns):
        for token in range(length):
            start, end = token * columns / length, (token + 1) * columns / length
            overlap[column, token] = max(0.0, min(end, column + 1) - max(start, column))
    return pool / pool.sum(1, keepdim=True) + change @ overlap


def linformer_linear(query_features, key_features, value, key_projection, value_projection):
    """Phi(Q)[(E Phi(K))^T (F V)] / Phi(Q)[(E Phi(K))^T (F 1)] from logarithms of the features, weights `[N, S]` formed.

    E and F `[1 or Hkv, k, S]` are non-negative.
    """
    heads, kv_heads = query_features.shape[1], key_features.shape[1]
    parts = [p.double().expand(kv_heads, -1, -1)[None] for p in (key_projection, value_projection)]
    compress, gather = (repeat_heads(part, heads) for part in parts)
    keys = repeat_heads(key_features.double(), heads)
    slots = (compress.log().unsqueeze(-1) + keys.unsqueeze(2)).logsumexp(dim=3)  # log E Phi(K) [B, H, k, F]
    weights = (query_features.double().unsqueeze(3) + slots.unsqueeze(2)).logsumexp(dim=-1)  # [B, H, N, k]
    weights = (weights - weights.amax(dim=-1, keepdim=True)).exp() @ gather
    return weights / weights.sum(dim=-1, keepdim=True) @ repeat_heads(value.double(), heads)


def gated_delta(query, key, value, log_decay, beta, *, erases: bool = True, key_mask=None, state=None):
    """The gated delta rule token by token (Yang 2024, "Gated Delta Networks", eq. 10; Kimi Linear 2025, eq. 1).

    Shapes as in `kernels_delta.gated_delta`. Padding changes nothing, a new number in the mask empties the state, and
    the token of a negative number only reads.
    """
    query, key, value, beta = (x.double() for x in (query, key, value, beta))
    decay = log_decay.double().exp()
    decay = decay if decay.ndim == 4 else decay.unsqueeze(3)
    batch, kv_heads, length, features = key.shape
    sums = key.new_zeros(batch, kv_heads, features, value.shape[3]) if state is None else state.double()
    numbers = torch.ones(batch, length).long() if key_mask is None else key_mask.long()
    current, outputs = torch.zeros(batch).long(), []
    for t in range(length):
        number = numbers[:, t].abs()
        is_new = ((number != current) & (number > 0) & (current > 0)).view(-1, 1, 1, 1)
        writes = (numbers[:, t] > 0).view(-1, 1, 1, 1)
        k, v, b = (x[:, :, t].unsqueeze(3) for x in (key, value, beta.unsqueeze(3)))
        sums = torch.where(is_new, 0.0, sums)
        before = sums * decay[:, :, t].unsqueeze(3)
        read = (before * k).sum(dim=2).unsqueeze(3) if erases else 0.0
        sums = torch.where(writes, before + b * k * (v - read).transpose(2, 3), sums)
        queries = query[:, :, t].masked_fill((number == 0)[:, None, None], 0.0).unflatten(1, (kv_heads, -1))
        outputs.append((queries @ sums).flatten(1, 2))
        current = torch.where(number > 0, number, current)
    output = torch.stack(outputs, dim=2) if outputs else value.new_zeros(batch, query.shape[1], 0, value.shape[3])
    return output, sums
