"""Each mechanism of the matrix in float64, from `reference.py` and the mechanism's own parameters.

An oracle takes `(mechanism, query, key, value, mask, is_causal, scaling)` and returns `[B, H, N, D]`.
"""

from __future__ import annotations

import math

import torch

from hf_linear_attention import reference


def linear(mechanism, query, key, value, mask, is_causal, scaling):
    features = FEATURES[mechanism.settings.get("feature_map", "favor")](mechanism.feature_map, query, key, scaling)
    return reference.kernel_attention(*features, value, key_mask=mask, is_causal=is_causal, log_features=True)


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


def favor(feature_map, query, key, scaling):
    return tuple(reference.favor(x, feature_map.projection, scaling) for x in (query, key))


def linformer(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row without its padding, so that no masking can be wrong."""
    rows = []
    for row in range(query.shape[0]):
        real = slice(None) if mask is None else mask[row]
        projections = [projection[:, :, : key[row, 0, real].shape[0]] for projection in mechanism._projections]
        full = [projection.double().abs().sum(2) for projection in mechanism._projections]
        rows.append(
            reference.linformer(
                query[row : row + 1],
                key[row : row + 1, :, real],
                value[row : row + 1, :, real],
                *projections,
                scaling,
                mechanism.max_length,
                full,
            )
        )
    return torch.cat(rows)


def hybrid(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row without its padding, whose queries get 0."""
    features = FEATURES[mechanism.settings["feature_map"]](mechanism.feature_map, query, key, scaling)
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    rows = []
    for row in range(query.shape[0]):
        real = torch.arange(query.shape[2]) if mask is None else mask[row].nonzero().squeeze(1)
        norm = query.double().square().sum(-1, keepdim=True) * scaling / 2
        scale, weight = (w.double()[:, None, None] for w in (mechanism.far_log_scale, mechanism.query_norm_weight))
        parts = (query, key, value, *features, scale - weight * norm)
        parts = [x[row : row + 1].index_select(2, real) for x in parts]
        sizes = (mechanism.window_size, mechanism.num_sinks)
        result = reference.hybrid(*parts, scaling, *sizes)
        rows.append(output[row : row + 1].index_copy(2, real, result))
    return torch.cat(rows)


def nystrom(mechanism, query, key, value, mask, is_causal, scaling):
    """Row by row: the landmarks of its real tokens, read by all of its queries."""
    conv = None if mechanism.conv_weight is None else mechanism.conv_weight.flatten(1)
    return without_padding(
        lambda q, k, v: reference.nystrom(q, k, v, mechanism.num_landmarks, mechanism.pinv_iterations, scaling, conv),
        *(query, key, value, mask),
    )


def without_padding(compute, query, key, value, mask):
    """`compute(query, key, value)` of each row's real tokens; queries at padding get 0."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    rows = []
    for row in range(query.shape[0]):
        real = torch.arange(query.shape[2]) if mask is None else mask[row].nonzero().squeeze(1)
        parts = [x[row : row + 1].index_select(2, real) for x in (query, key, value)]
        rows.append(output[row : row + 1].index_copy(2, real, compute(*parts)))
    return torch.cat(rows)


# The features' logarithms: the features themselves would underflow where an oracle must not.
FEATURES = {"elu1": elu1, "relu": relu, "exp": exp, "hedgehog": hedgehog, "favor": favor}
ORACLES = {"linear": linear, "hybrid": hybrid, "performer": linear, "linformer": linformer, "nystrom": nystrom}
