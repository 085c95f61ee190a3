"""Rotary positions in mechanisms: what the feature map sees, and how far away a sink may be."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from matrix import attend, mechanism_of, move, qkv

from hf_linear_attention.features.maps import half_squared_norm
from hf_linear_attention.mechanisms.base import MechanismInputs, Rotary


DIM, WINDOW, SINKS, TRAINED, SCALING = 12, 5, 2, 20, 0.3
# Wavelengths of 6, 21, 70 and 628 tokens.
FREQUENCIES = (1.0, 0.3, 0.09, 0.01)
KEPT = 2
SETTINGS = [
    {"mechanism": "hybrid", "rope": "partial", "rope_frequencies": KEPT, "trained_length": TRAINED},
    {"mechanism": "hybrid", "rope": "partial", "rope_frequencies": KEPT, "decay": "learned"},
    {"mechanism": "hybrid", "rope": "none"},
    {"mechanism": "hybrid", "trained_length": TRAINED},
    {"mechanism": "hybrid", "rope": "partial", "rope_frequencies": KEPT, "trained_length": TRAINED}
    | {"decay": "learned", "num_exact_keys": 4},
    {"mechanism": "window", "trained_length": TRAINED},
]


def build(settings, is_interleaved=False, is_causal=True):
    common = {"window_size": WINDOW, "num_sinks": SINKS} if settings["mechanism"] in ("hybrid", "window") else {}
    rotary = Rotary(FREQUENCIES, is_interleaved)
    mechanism = mechanism_of({**common, **settings}, head_dim=DIM, rotary=rotary, is_causal=is_causal)
    if getattr(mechanism, "decay", None) is not None:
        torch.nn.init.constant_(mechanism.decay.rate, -2.0)
    return mechanism


def rotated(x, positions, frequencies=FREQUENCIES, is_interleaved=False):
    return reference.rotated(x, positions, frequencies, is_interleaved)


def scores_of(positions):
    """Scores `[B, N, Hkv]` that follow from positions; some keys that are kept are old, and some are new."""
    return torch.stack(((1.7 * positions).sin() - positions / 40, (2.3 * positions).cos() + positions / 60), dim=-1)


def run(mechanism, query, key, value, positions, mask=None, state=None, is_causal=True):
    gates = scores_of(positions) if mechanism.needs_gates else None
    inputs = MechanismInputs(query, key, value, mask, SCALING, is_causal, positions, gates)
    return mechanism(mechanism.prepare(inputs), state)


def oracle(mechanism, query, key, value, positions, *, is_causal=True, is_interleaved=False):
    """From queries and keys before rotation, without padding, `[B, H, N, D]` in float64, every logit formed."""
    settings, length = mechanism.settings, query.shape[2]
    kept = {"before_map": 4, "partial": settings.get("rope_frequencies"), "none": 0}[settings.get("rope", "none")]
    seen = FREQUENCIES[:kept] + (0.0,) * (4 - kept)
    groups = query.shape[1] // key.shape[1]
    full, part = (
        [rotated(x, positions, frequencies, is_interleaved) for x in (query, key)]
        for frequencies in (FREQUENCIES, seen)
    )
    exact = SCALING * full[0] @ full[1].repeat_interleave(groups, dim=1).transpose(-1, -2)
    if settings["trained_length"]:
        clamped = positions.clamp(max=TRAINED - 1)
        near, moved = (rotated(x, clamped, FREQUENCIES, is_interleaved) for x in (query, key))
        moved = moved.repeat_interleave(groups, dim=1)
        exact[..., :SINKS] = SCALING * near @ moved[:, :, :SINKS].transpose(-1, -2)
        if not is_causal:
            exact[:, :, :SINKS] = SCALING * full[0][:, :, :SINKS] @ moved.transpose(-1, -2)
    place = torch.arange(length)
    distance = (place[:, None] - place).abs()
    is_near = (distance < WINDOW) | (place < SINKS)
    if settings.get("num_exact_keys"):
        scores = scores_of(positions).transpose(1, 2) + mechanism.score_slope[:, None] * (place + 1) / 64
        kept = reference.kept_keys(scores, WINDOW, SINKS, settings["num_exact_keys"])
        farthest, moved = (
            rotated(x, torch.full_like(positions, place), FREQUENCIES, is_interleaved)
            for x, place in ((query, TRAINED - 1), (key, 0))
        )
        farthest = SCALING * farthest @ moved.repeat_interleave(groups, dim=1).transpose(-1, -2)
        is_near = is_near | kept.repeat_interleave(groups, dim=1)
        exact = torch.where((distance >= TRAINED) & (place >= SINKS), farthest, exact)
    if not is_causal:
        is_near = is_near | (place < SINKS)[:, None]
    if settings["mechanism"] == "window":
        far = torch.full_like(exact, -torch.inf)
    else:
        mechanism = mechanism.double()
        features = (
            mechanism.feature_map.forward_queries(part[0], SCALING),
            mechanism.feature_map.forward_keys(part[1], SCALING).repeat_interleave(groups, dim=1),
        )
        far = (features[0].unsqueeze(-2) + features[1].unsqueeze(-3)).logsumexp(dim=-1)
        if mechanism.decay is not None:
            far = far + (distance - WINDOW) * mechanism.decay().repeat_interleave(groups)[:, None, None]
        scale, weight = (p.view(-1, 1, 1) for p in (mechanism.mix.far_log_scale, mechanism.mix.query_norm_weight))
        far = far + scale - weight * half_squared_norm(full[0], SCALING)
        if not is_causal and settings["trained_length"]:
            far = far - math.log(max(1, length / settings["trained_length"]))
        mechanism.float()
    logits = torch.where(is_near, exact, far)
    logits = logits.masked_fill(distance.new_ones(length, length).triu(1).bool(), -torch.inf) if is_causal else logits
    return (logits.softmax(dim=-1) @ value.double().repeat_interleave(groups, dim=1)).transpose(1, 2)


# Sums of 40 terms of the size of 1 in float32, whose angles of up to 100 are rounded at 4e-6.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@torch.no_grad()
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_many_tokens_and_every_split_are_the_oracle(backend, settings, is_interleaved):
    mechanism, (query, key, value) = build(settings, is_interleaved), qkv(40, dim=DIM)
    positions = torch.stack((torch.arange(40), torch.arange(40) + 3)).int()
    expected = oracle(mechanism, query, key, value, positions, is_interleaved=is_interleaved)
    queries, keys = (rotated(x, positions, is_interleaved=is_interleaved).float() for x in (query, key))
    for sizes in ([40], [1] * 40, [3, 1, 1, 20, 1, 14]):
        state, outputs = None, []
        for q, k, v, p in zip(*(x.split(sizes, dim=2) for x in (queries, keys, value)), positions.split(sizes, dim=1)):
            output, state = run(mechanism, q, k, v, p, state=state)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[4]], ids=str)
def test_steps_far_from_the_start_are_the_form_of_many_tokens(settings, backend):
    """After a million tokens, float32 angles are 1e-3 of a turn apart, so turns have to be reduced in float64."""
    mechanism, inputs, state, outputs = build(settings), qkv(14, dim=DIM), None, []
    positions = (torch.arange(14) + 1_000_003).expand(2, -1).int()
    for *one, place in zip(*(x.split(1, dim=2) for x in inputs), positions.split(1, dim=1)):
        output, state = run(mechanism, *one, place, state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), run(mechanism, *inputs, positions)[0], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("settings", [row for row in SETTINGS if "decay" not in row], ids=str)  # nor exact keys
def test_the_bidirectional_form_is_the_oracle(backend, settings):
    mechanism, (query, key, value) = build(settings, is_causal=False), qkv(40, dim=DIM)
    positions = torch.arange(40).int().expand(2, -1)
    queries, keys = (rotated(x, positions).float() for x in (query, key))
    output, _ = run(mechanism, queries, keys, value, positions, is_causal=False)
    expected = oracle(mechanism, query, key, value, positions, is_causal=False)
    torch.testing.assert_close(output.double(), expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_padding_moves_nothing(backend, settings):
    """Left, right and in between; `position_ids` count the real tokens, as `generate` gives them."""
    mechanism, (query, key, value) = build(settings), qkv(40, dim=DIM, batch=3)
    mask = torch.ones(3, 40, dtype=torch.bool)
    mask[0, :9], mask[1, 33:], mask[2, 10:17] = False, False, False
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0).int()
    queries, keys = (rotated(x, positions).float() for x in (query, key))
    state, outputs = None, []
    for part in (slice(0, 14), slice(14, 36), slice(36, 40)):
        inputs = [x[:, :, part] for x in (queries, keys, value)]
        output, state = run(mechanism, *inputs, positions[:, part], mask[:, part], state)
        outputs.append(output)
    whole, _ = run(mechanism, queries, keys, value, positions, mask)
    torch.testing.assert_close(torch.cat(outputs, dim=1)[mask], whole[mask], **TOLERANCE)
    for row in range(3):
        real = [x[row : row + 1, :, mask[row]] for x in (query, key, value)]
        expected = oracle(mechanism, *real, positions[row : row + 1, mask[row]])
        torch.testing.assert_close(whole[row : row + 1, mask[row]].double(), expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("rope", ["partial", "none"])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("mechanism", ["linear", "performer"])
def test_feature_maps_see_the_kept_frequencies(mechanism, rope, is_interleaved):
    """A map of what was never rotated, or rotated in the kept frequencies only; a learned geometry maps that too."""
    settings = {"mechanism": mechanism, "decay": "learned"}
    settings |= {"geometry": "learned"} if mechanism == "performer" else {}
    kept = KEPT if rope == "partial" else None
    moved = move(build({**settings, "rope": rope, "rope_frequencies": kept}, is_interleaved))
    plain = build(settings)
    plain.load_state_dict(moved.state_dict())
    query, key, value = qkv(40, dim=DIM)
    positions = (torch.arange(40) + 7).int().expand(2, -1)
    seen = FREQUENCIES[: kept or 0] + (0.0,) * (4 - (kept or 0))
    expected, _ = attend(
        plain, *(rotated(x, positions, seen, is_interleaved).float() for x in (query, key)), value, scaling=SCALING
    )
    queries, keys = (rotated(x, positions, is_interleaved=is_interleaved).float() for x in (query, key))
    state, outputs = None, []
    for part in (slice(0, 23), slice(23, 24), slice(24, 40)):
        given = (x[:, :, part] for x in (queries, keys, value))
        output, state = run(moved, *given, positions[:, part], state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, **TOLERANCE)
