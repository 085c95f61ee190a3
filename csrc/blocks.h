/* SPDX-License-Identifier: Apache-2.0 */
/* What one call works with, and how it reads and writes blocks of tokens: any strides, float32 or bfloat16. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "matrices.h"

#define EMPTY -1e30f /* the running maximum before the first key */
#define LIMIT 60.0f  /* nats that the features of one block may differ by */

/* x W + b - norm |x|^2 / 2, and the gradients of the three; `b` of queries is the number `constant` */
typedef struct {
    float *weight, *copy, *weight_t, *bias, norm, constant, *grad_weight, *grad_bias;
    double grad_norm, grad_constant;
} affine;

typedef struct work {
    const sizes *sizes;
    const tensor *tensors;
    const struct work *other; /* whose block at `position` comes next, NULL where it is of the same head */
    int64_t batch, head;
    int64_t input_row, image_row, feature_row, value_row; /* floats of a row, in whole vectors */
    int64_t position, tokens, next_offset; /* of the block: its first token, how many; where the next one is */
    int64_t block_number, block_end; /* in the backward pass: blocks so far; where the block behind this one begins */
    float decay, first_step;         /* by how many real tokens the block begins after what came before */
    float *maximum, *rescale, steps[BLOCK], query_factor[BLOCK], key_factor[BLOCK];
    float *query, *key, *value, *query_input, *key_input, *key_t, *scores, *out, *sums, *z, *ones;
    float *image, *is_real, *query_softmax, *key_softmax; /* of HEDGEHOG */
    int in_tiles;                                         /* see tiles.h */
    char tiles_before[64];                                /* how the caller had configured tiles */
    /* of the forward pass where `is_packed`, see bfloat16.h */
    int is_packed;
    uint32_t *packed_query, *packed_key, *packed_key_t, *packed_value, *packed_sums, *packed_z, *packed_scores;
    /* of the backward pass */
    float *grad, *grad_value, *output, *grad_input, *grad_sums, *grad_z, *value_t, *pairs, *sums_t, *maxima;
    int64_t *starts;
    /* Sums in which a key counts as often as real tokens have come since its block: for the derivative by the decay. */
    float *aged_sums, *aged_z, *aged;
    double grad_decay;
    affine *maps; /* of keys, then of each group of queries */
    char *memory;
} work;

static inline char *address_of(const work *w, int which, int64_t g, int64_t n) {
    const tensor *x = w->tensors + which;
    return x->data + w->batch * x->batch + w->head * x->head + g * x->group + n * x->token;
}

/* Fetch up to C rows of a tensor from token n on while the next products are at work. */
static inline void prefetch_rows(const work *w, int stream, int which, int64_t g, int64_t n, int64_t length) {
    const tensor *x = w->tensors + which;
    int64_t left = n < 0 ? 0 : length - n;
    prefetch_streams[stream].row = address_of(w, which, g, n), prefetch_streams[stream].step = x->token,
    prefetch_streams[stream].left = left < BLOCK ? left : BLOCK;
    prefetch_streams[stream].bytes = (which < VALUE ? w->sizes->inputs : w->sizes->width) * x->bytes;
    prefetch_streams[stream].at_once = w->sizes->causal ? 2 : 4; /* fewer products follow in the other form */
}

/* The rows that follow those from token n on. */
static inline void prefetch_following(const work *w, int which, int64_t g, int64_t n) {
    int64_t length = which == KEY || which == VALUE ? w->sizes->keys : w->sizes->queries;
    int stream = which < VALUE ? which : which == OUTPUT ? 3 : which == GRAD_OUTPUT ? 4 : 2;
    if (w->other)
        prefetch_rows(w->other, stream, which, g, w->other->position, length);
    else
        prefetch_rows(w, stream, which, g, n + w->next_offset, length);
}

INLINE vector apply_map(const work *w, vector x, float factor) {
    return (w->sizes->map == ELU ? elu_of(x) : x) * factor;
}

/* out[C, ld] = c rows of a tensor from token n on, 0 elsewhere; with a factor for each row, mapped to features. */
INLINE void load_mapped(const work *w, float *out, int64_t ld, int which, int64_t g, int64_t n, int64_t columns,
                        const float *factor) {
    const char *row = address_of(w, which, g, n);
    if (!w->tensors[which].data) {
        memset(out, 0, 4 * ld * BLOCK);
        return;
    }
    prefetch_following(w, which, g, n);
    int64_t step = w->tensors[which].token, is_whole = columns % LANES == 0 && ld == columns;
    for (int64_t t = 0; t < w->tokens; t++, out += ld, row += step) {
        if (is_whole) {
            for (int64_t j = 0; j < columns; j += LANES) {
                vector x = w->tensors[which].bytes == 4 ? *(const vector *)(row + 4 * j) : widen(row + 2 * j);
                *(vector *)(out + j) = factor ? apply_map(w, x, factor[t]) : x;
            }
            continue;
        }
        if (w->tensors[which].bytes == 4)
            memcpy(out, row, 4 * columns);
        else {
            int64_t j = 0;
            for (; j + LANES <= columns; j += LANES) *(vector *)(out + j) = widen(row + 2 * j);
            for (; j < columns; j++) {
                union {
                    uint32_t bits;
                    float value;
                } x = {(uint32_t)((const uint16_t *)row)[j] << 16};
                out[j] = x.value;
            }
        }
        if (ld > columns) memset(out + columns, 0, 4 * (ld - columns));
        for (int64_t j = 0; factor && j < ld; j += LANES)
            *(vector *)(out + j) = apply_map(w, *(vector *)(out + j), factor[t]);
    }
    memset(out, 0, 4 * ld * (BLOCK - w->tokens));
}

static inline void load(const work *w, float *out, int64_t ld, int which, int64_t g, int64_t n, int64_t columns) {
    load_mapped(w, out, ld, which, g, n, columns, NULL);
}

/* c rows of a tensor from token n on = scale[t] rows[C, ld] */
static inline void store(const work *w, const float *rows, int64_t ld, const float *scale, int which, int64_t g,
                         int64_t n, int64_t columns) {
    for (int64_t t = 0; t < w->tokens; t++, rows += ld) {
        char *row = address_of(w, which, g, n + t);
        if (w->tensors[which].bytes == 4)
            for (int64_t j = 0; j < columns; j++) ((float *)row)[j] = scale[t] * rows[j];
        else
            for (int64_t j = 0; j < columns; j++) {
                union {
                    float value;
                    uint32_t bits;
                } x = {scale[t] * rows[j]};
                uint32_t nearest = (x.bits + 0x7fff + (x.bits >> 16 & 1)) >> 16;
                ((uint16_t *)row)[j] = x.value == x.value ? nearest : 0x7fc0;
            }
    }
}

INLINE void turn_row(float *restrict a, float *restrict b, const float *cosine, const float *sine, int64_t pairs,
                     int64_t step, float direction) {
    for (int64_t i = 0; i < pairs; i++) {
        float x = a[i * step], y = b[i * step], turn = direction * sine[i];
        a[i * step] = x * cosine[i] - y * turn;
        b[i * step] = x * turn + y * cosine[i];
    }
}

/* The cosines and then the sines that move the pairs of columns from number `first` on by so many positions. */
static inline void make_turn(float *turn, const float *frequencies, int64_t pairs, int64_t first, int64_t positions) {
    for (int64_t i = first; i < pairs; i++) { /* with functions of libm, this would take longer than a step's sums */
        double turns = (float)positions * frequencies[i] * 0.15915494309189535;
        turns -= __builtin_floor(turns + 0.5);
        float quarters = __builtin_floorf((float)turns * 4 + 0.5f);
        float r = (float)(turns * 4 - quarters) * 1.57079633f, square = r * r; /* at most pi / 4 in size */
        float sine = r * (1 + square * (-1 / 6.0f + square * (1 / 120.0f + square * (-1 / 5040.0f + square / 362880))));
        float cosine = 1 + square * (-0.5f + square * (1 / 24.0f + square * (-1 / 720.0f + square / 40320)));
        int32_t number = (int32_t)quarters;
        float a = number & 1 ? sine : cosine, b = number & 1 ? cosine : sine;
        turn[i] = (number + 1) & 2 ? -a : a;
        turn[pairs + i] = number & 2 ? -b : b;
    }
}

/* The pairs of columns of a row, from number `first` on, by the angles `turn [2 pairs]`. */
static inline void turn_pairs(float *row, const float *turn, int64_t pairs, int64_t first, int64_t step,
                              int64_t distance) {
    float *a = row + first * step;
    if (step == 1)
        turn_row(a, a + distance, turn + first, turn + pairs + first, pairs - first, 1, 1);
    else
        turn_row(a, a + distance, turn + first, turn + pairs + first, pairs - first, step, 1);
}

/* c rows[C, ld] from token n on are turned by their angles in the tensor `table`, or back by direction = -1. */
static inline void turn_rows(const work *w, float *rows, int64_t ld, int table, int64_t n, float direction) {
    const sizes *s = w->sizes;
    if (!w->tensors[table].data) return;
    for (int64_t t = 0; t < w->tokens; t++) {
        const float *cosine = (const float *)address_of(w, table, 0, n + t), *sine = cosine + s->pairs;
        float *a = rows + t * ld + s->pair_start, *b = a + s->pair_distance;
        if (s->pair_step == 1)
            turn_row(a, b, cosine, sine, s->pairs, 1, direction);
        else
            turn_row(a, b, cosine, sine, s->pairs, s->pair_step, direction);
    }
}

static inline void store_numbers(const work *w, const float *x, int which, int64_t g, int64_t n) {
    char *to = address_of(w, which, g, n);
    for (int64_t t = 0; t < w->tokens && w->tensors[which].data; t++)
        *(float *)(to + t * w->tensors[which].token) = x[t];
}

static inline void load_numbers(const work *w, float *x, int which, int64_t g, int64_t n) {
    memset(x, 0, 4 * BLOCK);
    if (w->tensors[which].data)
        for (int64_t t = 0; t < w->tokens; t++) x[t] = *(float *)address_of(w, which, g, n + t);
}

static inline float *allocate(char **memory, int64_t floats) {
    char *start = *memory;
    *memory += 4 * ((floats + 15) & ~15);
    return (float *)start;
}

static inline int64_t round_up(int64_t n) {
    return (n + 15) & ~15;
}

#endif
