/* SPDX-License-Identifier: Apache-2.0 */
/* Features of a block of queries or keys, the sums of what comes before it, and the working space of a head.

   Exponents (EXP) become features in [0, 1] by a running maximum per feature that is constant within a block: the block
   ends early where the features of its first token could underflow beside those of its last. */
#ifndef FEATURES_H
#define FEATURES_H

#include "bfloat16.h"

static inline int64_t image_columns(const sizes *s) {
    return s->map == HEDGEHOG ? s->features / 2 : s->features;
}

/* out[C, f] = [log softmax(u), log softmax(-u)] for the rows u of w->image; softmax[2][C, i] are the two themselves. */
static inline void log_softmaxes(work *w, float *out, float *softmax) {
    int64_t i = w->image_row, columns = image_columns(w->sizes);
    float largest[BLOCK], total[BLOCK];
    memset(out, 0, 4 * BLOCK * w->feature_row);
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = columns; j < i; j++) w->image[t * i + j] = w->image[t * i];
    for (int part = 0; part < 2; part++, softmax += BLOCK * i) {
        float sign = part ? -1 : 1;
        for (int64_t j = 0; j < BLOCK * i; j++) softmax[j] = sign * w->image[j];
        reduce_rows(largest, softmax, NULL, 0, i, 1);
        for (int64_t t = 0; t < BLOCK; t++)
            for (int64_t j = 0; j < i; j += LANES) {
                vector *x = (vector *)(softmax + t * i + j);
                *x = exp_of_negative(*x - largest[t]);
            }
        row_dot_products(total, softmax, w->is_real, 0, i);
        for (int64_t t = 0; t < BLOCK; t++) {
            float *row = out + t * w->feature_row + part * columns, less = largest[t] + __builtin_logf(total[t]);
            for (int64_t j = 0; j < columns; j++) row[j] = sign * w->image[t * i + j] - less;
            for (int64_t j = 0; j < i; j++) softmax[t * i + j] /= total[t];
        }
    }
}

/* w->image = its gradient, from that of what `log_softmaxes` made of it, w->grad[C, f]. */
static inline void gradient_of_image(work *w, const float *softmax) {
    int64_t i = w->image_row, columns = image_columns(w->sizes);
    memset(w->image, 0, 4 * BLOCK * i);
    for (int part = 0; part < 2; part++, softmax += BLOCK * i)
        for (int64_t t = 0; t < w->tokens; t++) {
            const float *grad = w->grad + t * w->feature_row + part * columns;
            float *to = w->image + t * i, total = 0, sign = part ? -1 : 1;
            for (int64_t j = 0; j < columns; j++) total += grad[j];
            for (int64_t j = 0; j < columns; j++) to[j] += sign * (grad[j] - softmax[t * i + j] * total);
        }
}

/* What the feature map takes: rows of queries or keys, or their affine images. */
static inline void load_inputs(work *w, float *out, float *input, int which, int64_t g, int64_t n, const affine *m) {
    const float *factor = which == KEY ? w->key_factor : w->query_factor;
    if (!m->weight) {
        load_mapped(w, out, w->feature_row, which, g, n, w->sizes->inputs, w->sizes->map >= EXP ? NULL : factor);
        return;
    }
    float half[BLOCK];
    load(w, input, w->input_row, which, g, n, w->sizes->inputs);
    turn_rows(w, input, w->input_row, which == KEY ? KEY_TURN : QUERY_TURN, n, 1);
    product(w->image ? w->image : out, w->image_row, input, w->input_row, 1, m->weight, w->image_row, BLOCK,
            w->sizes->inputs, w->image_row, 0, FULL);
    if (w->image) log_softmaxes(w, out, which == QUERY ? w->query_softmax : w->key_softmax);
    int is_added = which == KEY && (m->bias || m->norm);
    for (int64_t t = 0; t < w->tokens && which == KEY && w->decay && w->tensors[KEY_AGE].data; t++) {
        float faded = w->decay * *(float *)address_of(w, KEY_AGE, 0, n + t);
        for (int64_t j = 0; j < w->feature_row; j++) out[t * w->feature_row + j] += faded;
    }
    if (is_added) row_dot_products(half, input, input, w->input_row, w->input_row);
    for (int64_t t = 0; t < BLOCK && is_added; t++)
        for (int64_t j = 0; j < w->feature_row; j++)
            out[t * w->feature_row + j] += (m->bias ? m->bias[j] : 0) - half[t] * m->norm / 2;
    for (int64_t t = 0; t < w->tokens && w->sizes->map < EXP; t++)
        for (int64_t j = 0; j < w->feature_row; j += LANES) {
            vector *x = (vector *)(out + t * w->feature_row + j);
            *x = apply_map(w, *x, factor[t]);
        }
}

/* rows = exp(rows + add - less[t]), at most 1 */
static inline void exponentiate(work *w, float *rows, const float *less) {
    for (int64_t t = 0; t < w->tokens; t++, rows += w->feature_row)
        for (int64_t j = 0; j < w->feature_row; j += LANES) {
            vector *x = (vector *)(rows + j);
            *x = exp_of_negative(*x - less[t]);
        }
}

/* By how much any feature rises within the block above what its first query sees, the first key or, where that one is
   hidden, what was carried; `top` is the new maximum. */
static inline float largest_rise(const work *w, float *top) {
    int64_t f = w->sizes->features, is_first = 1;
    float largest = 0, base[f];
    memcpy(top, w->maximum, 4 * w->feature_row);
    for (int64_t t = 0; t < w->tokens; t++) {
        if (!w->key_factor[t]) continue;
        const float *x = w->key + t * w->feature_row;
        for (int64_t j = 0; j < f; j++) top[j] = x[j] > top[j] ? x[j] : top[j];
        for (int64_t j = 0; j < f && is_first; j++) base[j] = t && w->maximum[j] > EMPTY / 2 ? w->maximum[j] : top[j];
        is_first = 0;
    }
    for (int64_t j = 0; j < f && !is_first; j++) largest = top[j] - base[j] > largest ? top[j] - base[j] : largest;
    return largest;
}

/* Where each token of a block stands among the real ones, and what a decay makes of that; at most `limit` tokens.
   The carried sums count from the last real token before the block, steps from its first one. Hidden tokens before that
   one are a block of their own where exp(decay) would underflow, and sums do not fade there. */
static inline void count_steps(work *w, int64_t n, int64_t limit) {
    int64_t length = w->sizes->keys - n, count = 0;
    int is_apart = w->decay && w->sizes->map < EXP, is_steep = is_apart && -w->decay > LIMIT;
    w->tokens = length < limit ? length : limit, w->first_step = 1;
    memset(w->steps, 0, sizeof(w->steps));
    for (int64_t t = 0; t < w->tokens; t++) {
        int is_real = !w->tensors[MASK].data || *address_of(w, MASK, 0, n + t);
        if (is_steep && is_real && !count && t) {
            w->tokens = t;
            break;
        }
        count += is_real;
        w->steps[t] = is_steep && !count ? 0 : count - 1;
        w->query_factor[t] = 1;
        w->key_factor[t] = is_real;
        if (!is_apart) continue;
        if (t && -w->decay * w->steps[t] > LIMIT) {
            w->tokens = t;
            break;
        }
        w->query_factor[t] = __builtin_expf(w->decay * w->steps[t]);
        w->key_factor[t] = is_real ? __builtin_expf(-w->decay * w->steps[t]) : 0;
    }
    if (is_steep && !count) w->first_step = 0;
}

/* Exponents of keys become features; the maximum over those so far is new, unless `known`. */
static inline void exponentiate_keys(work *w, int64_t known) {
    int64_t f = w->sizes->features;
    float top[w->feature_row];
    for (int64_t t = 0; t < w->tokens && w->decay; t++)
        for (int64_t j = 0; j < f; j++) w->key[t * w->feature_row + j] -= w->decay * w->steps[t];
    if (!known) {
        for (int64_t j = 0; j < f; j++) w->maximum[j] += w->decay;
        while (largest_rise(w, top) > LIMIT && w->sizes->causal && w->tokens > 1) w->tokens = (w->tokens + 1) / 2;
        for (int64_t j = 0; j < w->feature_row; j += LANES)
            *(vector *)(w->rescale + j) = exp_of_negative(*(vector *)(w->maximum + j) - *(vector *)(top + j));
        memcpy(w->maximum, top, 4 * f);
    }
    for (int64_t t = 0; t < w->tokens; t++)
        for (int64_t j = 0; j < w->feature_row; j += LANES) {
            vector *y = (vector *)(w->key + t * w->feature_row + j);
            *y = exp_of_negative(*y - *(vector *)(w->maximum + j));
        }
}

/* Features and values of a block of keys: C of them, or fewer where the first features could underflow beside the
   largest. `known` are its tokens, when the maximum is known too. */
static inline void load_keys(work *w, int64_t n, int64_t known) {
    count_steps(w, n, known ? known : BLOCK);
    if (w->is_packed) {
        load_packed_keys(w, n);
        return;
    }
    load_inputs(w, w->key, w->key_input, KEY, 0, n, w->maps);
    if (w->sizes->map >= EXP) exponentiate_keys(w, known);
    for (int64_t t = 0; t < w->tokens; t++)
        if (!w->key_factor[t])
            memset(w->key + t * w->feature_row, 0, 4 * w->feature_row);
        else if (w->feature_row > w->sizes->features)
            memset(w->key + t * w->feature_row + w->sizes->features, 0, 4 * (w->feature_row - w->sizes->features));
    memset(w->key + w->tokens * w->feature_row, 0, 4 * w->feature_row * (BLOCK - w->tokens));
    if (w->sizes->causal) transpose(w->key_t, BLOCK, w->key, w->feature_row, BLOCK, w->feature_row);
    load(w, w->value, w->value_row, VALUE, 0, n, w->sizes->width);
    for (int64_t t = 0; t < w->tokens; t++)
        if (!w->key_factor[t]) {
            memset(w->value + t * w->value_row, 0, 4 * w->value_row);
            if (w->maps->weight) memset(w->key_input + t * w->input_row, 0, 4 * w->input_row);
            for (int part = 0; part < 2 && w->image; part++)
                memset(w->key_softmax + (part * BLOCK + t) * w->image_row, 0, 4 * w->image_row);
        }
}

/* Features of a block of queries, and the logarithm of what they are divided by. */
static inline void load_queries(work *w, int64_t g, int64_t n, float *scale) {
    int64_t f = w->feature_row;
    load_inputs(w, w->query, w->query_input, QUERY, g, n, w->maps + 1 + g);
    if (w->sizes->map < EXP) {
        round_numbers(w, w->query, BLOCK * f);
        return;
    }
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = 0; j < f; j++) w->query[t * f + j] += w->maximum[j] + w->decay * w->steps[t];
    reduce_rows(scale, w->query, NULL, 0, f, 1);
    exponentiate(w, w->query, scale);
    memset(w->query + w->tokens * f, 0, 4 * f * (BLOCK - w->tokens));
    round_numbers(w, w->query, BLOCK * f);
    const affine *m = w->maps + 1 + g;
    float half[BLOCK];
    if (m->norm) row_dot_products(half, w->query_input, w->query_input, w->input_row, w->input_row);
    for (int64_t t = 0; t < BLOCK; t++) scale[t] += m->constant - (m->norm ? half[t] * m->norm / 2 : 0);
}

/* Before a block the sums fade by one token, or move to the new maximum. `by_rows`: features are rows of `sums`. */
static inline void before_block(work *w, float *sums, float *z, int by_rows) {
    int64_t f = w->sizes->features, d = w->value_row;
    if (w->sizes->map < EXP && !w->decay) return;
    int is_same = 1;
    float scale[w->feature_row], plain = w->sizes->map >= EXP ? 1 : __builtin_expf(w->decay * w->first_step);
    for (int64_t j = 0; j < w->feature_row; j++) { /* like `fade`, columns that fill up a row too */
        scale[j] = w->sizes->map >= EXP && j < f ? w->rescale[j] : plain;
        is_same &= scale[j] == 1;
        z[j] *= scale[j];
    }
    if (is_same) return;
    if (by_rows)
        for (int64_t j = 0; j < w->feature_row; j++)
            for (int64_t i = 0; i < d; i++) sums[j * d + i] *= scale[j];
    else
        for (int64_t i = 0; i < d; i++)
            for (int64_t j = 0; j < w->feature_row; j++) sums[i * w->feature_row + j] *= scale[j];
}

/* Plain sums fade from the first real token of a block to its last one. */
static inline void fade(const work *w, float *sums, float *z) {
    if (!w->decay || w->sizes->map >= EXP) return;
    float factor = __builtin_expf(w->decay * w->steps[w->tokens - 1]);
    for (int64_t j = 0; j < w->feature_row; j++) z[j] *= factor;
    for (int64_t j = 0; j < w->feature_row * w->value_row; j++) sums[j] *= factor;
}

/* After a block the sums, or the maximum of exponents, fade to its last token. */
static inline void after_block(work *w, float *sums, float *z) {
    fade(w, sums, z);
    if (!w->decay || w->sizes->map < EXP) return;
    for (int64_t j = 0; j < w->feature_row; j++) w->maximum[j] += w->decay * w->steps[w->tokens - 1];
}

static inline void begin_query_block(work *w, int64_t n) {
    int64_t length = w->sizes->queries - n;
    w->tokens = length < BLOCK ? length : BLOCK;
    for (int64_t t = 0; t < BLOCK; t++) w->query_factor[t] = 1, w->steps[t] = 0;
}

/* state[F, D + 1 (+ 1)] <-> sums[f, d], z[f], maximum[f] */
static inline void load_state(const work *w, int which, float *sums, float *z, float *maximum) {
    int64_t row = w->sizes->width + 1 + (w->sizes->map >= EXP);
    memset(sums, 0, 4 * w->feature_row * w->value_row);
    memset(z, 0, 4 * w->feature_row);
    for (int64_t j = 0; maximum && j < w->feature_row; j++) maximum[j] = EMPTY;
    if (!w->tensors[which].data) return;
    const float *state = (const float *)address_of(w, which, 0, 0);
    for (int64_t j = 0; j < w->sizes->features; j++, state += row) {
        memcpy(sums + j * w->value_row, state, 4 * w->sizes->width);
        z[j] = state[w->sizes->width];
        if (maximum && w->sizes->map >= EXP) maximum[j] = state[w->sizes->width + 1];
    }
}

static inline void store_state(const work *w, int which, const float *sums, const float *z, const float *maximum) {
    if (!w->tensors[which].data) return;
    float *state = (float *)address_of(w, which, 0, 0);
    for (int64_t j = 0; j < w->sizes->features; j++, state += w->sizes->width + 1 + (w->sizes->map >= EXP)) {
        memcpy(state, sums + j * w->value_row, 4 * w->sizes->width);
        state[w->sizes->width] = z[j];
        if (w->sizes->map >= EXP) state[w->sizes->width + 1] = maximum ? maximum[j] : 0;
    }
}

static inline void describe_work(work *w, const sizes *s, const tensor *x) {
    memset(w, 0, sizeof(*w));
    w->sizes = s, w->tensors = x, w->input_row = round_up(s->inputs), w->feature_row = round_up(s->features),
    w->value_row = round_up(s->width);
    w->image_row = round_up(image_columns(s));
}

/* Floats of `allocate_head`, at most; what is not used takes no memory. */
static inline int64_t floats_per_head(const work *w, int64_t blocks) {
    int64_t maps = 1 + w->sizes->groups;
    return 4 * w->feature_row * (w->value_row + 1) +
           maps * (3 * w->input_row * w->image_row + 2 * w->feature_row + 128) + blocks * (4 + 2 * w->feature_row) +
           256;
}

/* What a head keeps from block to block. */
static inline void allocate_head(work *w, char **memory, int64_t blocks, int is_backward) {
    int64_t p = w->input_row, i = w->image_row, f = w->feature_row, d = w->value_row, maps = 1 + w->sizes->groups;
    w->maximum = allocate(memory, f), w->sums = allocate(memory, f * d), w->z = allocate(memory, f);
    w->grad_sums = allocate(memory, f * d), w->grad_z = allocate(memory, f), w->sums_t = allocate(memory, f * d);
    w->maps = (affine *)allocate(memory, maps * sizeof(affine) / 4);
    memset(w->maps, 0, maps * sizeof(affine));
    for (int64_t g = 0; g < maps; g++) {
        if (!w->tensors[g ? QUERY_MAP : KEY_MAP].data) continue;
        affine *a = w->maps + g;
        a->weight = a->copy = allocate(memory, p * i);
        if (is_backward) a->weight_t = allocate(memory, p * i), a->grad_weight = allocate(memory, p * i);
        a->bias = !g && w->tensors[KEY_MAP + 1].data ? allocate(memory, f) : NULL, a->grad_bias = allocate(memory, f);
    }
    if (w->aged) w->aged_sums = allocate(memory, f * d), w->aged_z = allocate(memory, f);
    w->starts = (int64_t *)allocate(memory, 2 * blocks);
    w->maxima = allocate(memory, w->sizes->map >= EXP ? 2 * blocks * f : 0);
}

#define MOST_HEADS 16
#define FLOATS_IN_CACHE (1 << 19) /* floats */

/* Working space for as many heads as take turns: where they lie beside each other in memory, those whose sums stay in
   the cache together. Returns how many they are, 0 where there is no memory. */
static inline int64_t begin_heads(work *w, const sizes *s, const tensor *x, int is_backward) {
    describe_work(w, s, x);
    w->is_packed = !is_backward && takes_packed(s, x), w->in_tiles = !is_backward && takes_tiles(x);
    int64_t p = w->input_row, f = w->feature_row, d = w->value_row, blocks = is_backward && s->causal ? s->keys + 1 : 1;
    int64_t count = s->stop - s->start, most = x[KEY].head < x[KEY].token ? FLOATS_IN_CACHE / floats_per_head(w, 0) : 1;
    most = most < 1 ? 1 : most < MOST_HEADS ? most : MOST_HEADS;
    count = count < most ? count : most;
    int64_t i = w->image_row, of_image = s->map == HEDGEHOG ? 5 * BLOCK * i + i : 0;
    int64_t packed = w->is_packed ? BLOCK * (2 * f + 32 + d / 2 + BLOCK / 2) + f * (d + 1) / 2 + 128 : 0;
    int64_t floats = of_image + packed + f + BLOCK * (5 * f + 5 * d + 3 * p + 3 * BLOCK) + f + BLOCK + 256 +
                     count * floats_per_head(w, blocks);
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats)) return 0;
    char *m = w->memory = memory;
    w->rescale = allocate(&m, f);
    w->query = allocate(&m, BLOCK * f), w->key = allocate(&m, BLOCK * f), w->key_t = allocate(&m, BLOCK * f);
    w->value = allocate(&m, BLOCK * d), w->out = allocate(&m, BLOCK * d), w->scores = allocate(&m, BLOCK * BLOCK);
    w->query_input = allocate(&m, BLOCK * p), w->key_input = allocate(&m, BLOCK * p);
    w->grad = allocate(&m, BLOCK * f), w->grad_value = allocate(&m, BLOCK * d), w->output = allocate(&m, BLOCK * d);
    w->grad_input = allocate(&m, BLOCK * p);
    w->aged = is_backward && x[GRAD_DECAY].data ? allocate(&m, BLOCK * f) : NULL;
    w->value_t = allocate(&m, BLOCK * d), w->pairs = allocate(&m, BLOCK * BLOCK), w->ones = allocate(&m, f + BLOCK);
    for (int64_t j = 0; j < f + BLOCK; j++) w->ones[j] = 1;
    if (of_image) {
        w->image = allocate(&m, BLOCK * i), w->is_real = allocate(&m, i);
        w->query_softmax = allocate(&m, 2 * BLOCK * i), w->key_softmax = allocate(&m, 2 * BLOCK * i);
        for (int64_t j = 0; j < i; j++) w->is_real[j] = j < image_columns(s);
    }
    if (w->is_packed) allocate_packed(w, &m);
    for (int64_t number = count - 1; number >= 0; number--) {
        w[number] = *w;
        allocate_head(w + number, &m, blocks, is_backward);
    }
    return count;
}

static inline void enter_head(work *w, int64_t number) {
    const sizes *s = w->sizes;
    w->batch = number / s->heads, w->head = number % s->heads, w->grad_decay = 0;
    w->position = 0, w->block_number = 0, w->next_offset = BLOCK;
    if (w->aged) {
        memset(w->aged_sums, 0, 4 * w->feature_row * w->value_row);
        memset(w->aged_z, 0, 4 * w->feature_row);
    }
    w->decay = w->tensors[DECAY].data ? *(float *)address_of(w, DECAY, 0, 0) : 0;
    for (int64_t g = 0; g <= s->groups; g++) {
        affine *m = w->maps + g;
        int which = g ? QUERY_MAP : KEY_MAP, group = g ? g - 1 : 0;
        if (!m->weight) continue;
        int64_t columns = image_columns(s);
        if (columns == w->image_row && s->inputs == w->input_row && w->tensors[which].token == 4 * columns)
            m->weight = (float *)address_of(w, which, group, 0);
        else {
            memset(m->weight = m->copy, 0, 4 * w->input_row * w->image_row);
            for (int64_t i = 0; i < s->inputs; i++)
                memcpy(m->weight + i * w->image_row, address_of(w, which, group, i), 4 * columns);
        }
        if (m->weight_t) {
            transpose(m->weight_t, w->input_row, m->weight, w->image_row, w->input_row, w->image_row);
            memset(m->grad_weight, 0, 4 * w->input_row * w->image_row);
            memset(m->grad_bias, 0, 4 * w->feature_row);
        }
        m->constant = g && w->tensors[which + 1].data ? *(float *)address_of(w, which + 1, group, 0) : 0;
        if (m->bias) {
            memset(m->bias, 0, 4 * w->feature_row);
            memcpy(m->bias, address_of(w, which + 1, group, 0), 4 * s->features);
        }
        m->norm = w->tensors[which + 2].data ? *(float *)address_of(w, which + 2, group, 0) : 0;
        m->grad_norm = m->grad_constant = 0;
    }
}

#endif
