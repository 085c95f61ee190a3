/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule: what a block of tokens does to the state, the forward pass, and a step of one token. */
#include "delta.h"

static int64_t block_rows(const delta *v) {
    return v->is_backward ? BLOCK : (v->w.tokens + ROWS - 1) / ROWS * ROWS;
}

void load_delta_block(delta *v, int64_t n) {
    work *w = &v->w;
    int64_t f = w->feature_row, left = w->sizes->keys - n;
    w->tokens = left < BLOCK ? left : BLOCK;
    load(w, v->key, f, KEY, 0, n, w->sizes->inputs);
    load(w, v->value, w->value_row, VALUE, 0, n, w->sizes->width);
    load_numbers(w, v->beta, DELTA_BETA, 0, n);
    if (v->by_feature)
        load(w, v->decay, f, DELTA_DECAY, 0, n, w->sizes->inputs);
    else
        load_numbers(w, v->step, DELTA_DECAY, 0, n);
    for (int64_t g = 0; g < w->sizes->groups; g++) load(w, v->query + g * BLOCK * f, f, QUERY, g, n, w->sizes->inputs);
}

/* E where all features decay alike, and what it does from the start and to the end of the block. */
static void fade_tokens(delta *v, float *from_start) {
    vector sum[BLOCK / LANES];
    int_vector column;
    float total = 0;
    for (int l = 0; l < LANES; l++) column[l] = l;
    memset(sum, 0, sizeof(sum));
    for (int32_t i = 0; i < BLOCK; i++) {
        from_start[i] = total += v->step[i];
        for (int32_t j = 0; j < BLOCK; j += LANES) {
            vector *x = sum + j / LANES;
            *x = blend(column + j < i, *x + v->step[i], (vector){0});
            *(vector *)(v->fade + i * BLOCK + j) = blend(column + j <= i, fade_of(*x), (vector){0});
        }
    }
    for (int64_t j = 0; j < BLOCK; j += LANES) {
        vector *x = (vector *)(from_start + j);
        *x = fade_of(*x);
    }
}

/* pairs[i, j] *= E_ij sign; the upper part becomes 0, whatever it was */
static void fade_pairs(const delta *v, float *pairs, float sign) {
    int_vector column;
    for (int l = 0; l < LANES; l++) column[l] = l;
    for (int32_t i = 0; i < BLOCK; i++)
        for (int32_t j = 0; j < BLOCK; j += LANES) {
            vector *x = (vector *)(pairs + i * BLOCK + j);
            *x = blend(column + j <= i, *x * *(vector *)(v->fade + i * BLOCK + j) * sign, (vector){0});
        }
}

static void scale_rows(float *out, const float *x, const float *scale, int64_t columns) {
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = 0; j < columns; j += LANES)
            *(vector *)(out + t * columns + j) = *(const vector *)(x + t * columns + j) * scale[t];
}

static void fill_rows(float *out, const float *x, int64_t columns) {
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = 0; j < columns; j++) out[t * columns + j] = x[t];
}

static void gate_tokens(delta *v) {
    int64_t f = v->w.feature_row, rows = block_rows(v);
    float from_start[BLOCK], *to_end = v->fade + (BLOCK - 1) * BLOCK;
    fade_tokens(v, from_start);
    transpose(v->key_out_t, BLOCK, v->key, f, BLOCK, f);
    if (v->erases) {
        product(v->pairs, BLOCK, v->key, f, 1, v->key_out_t, BLOCK, rows, f, BLOCK, 0, INTO_LOWER);
        fade_pairs(v, v->pairs, -1);
        scale_rows(v->key_in, v->key, from_start, f);
    }
    for (int64_t g = 0; g < v->w.sizes->groups; g++) {
        float *query = v->query + g * BLOCK * f, *pairs = v->query_pairs + g * BLOCK * BLOCK;
        product(pairs, BLOCK, query, f, 1, v->key_out_t, BLOCK, rows, f, BLOCK, 0, INTO_LOWER);
        fade_pairs(v, pairs, 1);
        scale_rows(v->query_in + g * BLOCK * f, query, from_start, f);
    }
    for (int64_t j = 0; j < f; j++) {
        for (int64_t t = 0; t < BLOCK; t += LANES) *(vector *)(v->key_out_t + j * BLOCK + t) *= *(vector *)(to_end + t);
        v->total[j] = from_start[BLOCK - 1];
    }
    if (!v->is_backward) return;
    fill_rows(v->start_rows, from_start, f);
    fill_rows(v->end_rows, to_end, f);
}

/* The factors of the group of tokens from `first` on. */
static void fade_group(delta *v, int64_t first) {
    int64_t f = v->w.feature_row;
    float *factors = v->factors + first / GROUP * FACTORS * f;
    const float *decay = v->decay + first * f;
    for (int64_t j = 0; j < f; j += LANES) {
        vector start = {0};
        for (int64_t t = 0; t < GROUP; t++) {
            vector sum = {0};
            start += *(const vector *)(decay + t * f + j);
            *(vector *)(factors + t * f + j) = fade_of(start);
            for (int64_t s = t - 1; s >= 0; s--) {
                sum += *(const vector *)(decay + (s + 1) * f + j);
                *(vector *)(factors + factor_index(s, t) * f + j) = fade_of(sum);
            }
        }
    }
}

INLINE float weighted_dot(const float *a, const float *b, const float *weight, int64_t n) {
    vector sum = {0};
    for (int64_t j = 0; j < n; j += LANES) {
        vector x = *(const vector *)(a + j) * *(const vector *)(b + j);
        if (weight) x *= *(const vector *)(weight + j);
        sum += x;
    }
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sum[l];
    return total;
}

/* Pairs of rows with the keys of the same group, one by one. */
static void pair_group(const delta *v, float *pairs, const float *rows, int64_t first, float sign) {
    int64_t f = v->w.feature_row;
    const float *factors = v->factors + first / GROUP * FACTORS * f;
    for (int64_t t = first; t < first + GROUP; t++)
        for (int64_t s = first; s <= t; s++) {
            const float *factor = s < t ? factors + factor_index(s - first, t - first) * f : NULL;
            pairs[t * BLOCK + s] = sign * weighted_dot(rows + t * f, v->key + s * f, factor, f);
        }
}

/* Pairs of a group of rows with all keys, and these rows decayed from the start of the block. `start` is the decay from
   there to the group; key_out_t holds the keys before the group, decayed to it. */
static void pair_rows(delta *v, float *pairs, float *rows_in, const float *rows, const float *start, int64_t first,
                      float sign) {
    int64_t f = v->w.feature_row, earlier = (first + LANES - 1) / LANES * LANES;
    const float *factors = v->factors + first / GROUP * FACTORS * f;
    for (int64_t t = 0; t < GROUP; t++)
        for (int64_t j = 0; j < f; j += LANES)
            *(vector *)(rows_in + (first + t) * f + j) =
                *(const vector *)(rows + (first + t) * f + j) * *(const vector *)(factors + t * f + j) * sign;
    if (earlier)
        product(pairs + first * BLOCK, BLOCK, rows_in + first * f, f, 1, v->key_out_t, BLOCK, GROUP, f, earlier, 0,
                FULL);
    pair_group(v, pairs, rows, first, sign);
    for (int64_t t = first; t < first + GROUP; t++) {
        for (int64_t j = t + 1; j < BLOCK; j++) pairs[t * BLOCK + j] = 0;
        for (int64_t j = 0; j < f; j += LANES) *(vector *)(rows_in + t * f + j) *= *(const vector *)(start + j) * sign;
    }
}

/* key_out_t goes on to the end of the group, whose keys enter it. */
static void fade_keys(delta *v, int64_t first) {
    int64_t f = v->w.feature_row, earlier = (first + LANES - 1) / LANES * LANES;
    const float *factors = v->factors + first / GROUP * FACTORS * f, *last = factors + (GROUP - 1) * f;
    for (int64_t j = 0; j < f; j++) {
        float *row = v->key_out_t + j * BLOCK;
        for (int64_t t = 0; t < earlier; t += LANES) *(vector *)(row + t) *= last[j];
        for (int64_t s = 0; s < GROUP; s++) {
            float factor = s < GROUP - 1 ? factors[factor_index(s, GROUP - 1) * f + j] : 1;
            row[first + s] = v->key[(first + s) * f + j] * factor;
        }
    }
}

static void gate_features(delta *v) {
    int64_t f = v->w.feature_row, groups = v->w.sizes->groups;
    memset(v->key_out_t, 0, 4 * f * BLOCK);
    for (int64_t j = 0; j < f; j++) v->total[j] = 1;
    for (int64_t first = 0; first < BLOCK; first += GROUP) {
        const float *factors = v->factors + first / GROUP * FACTORS * f;
        fade_group(v, first);
        if (v->erases) pair_rows(v, v->pairs, v->key_in, v->key, v->total, first, -1);
        for (int64_t g = 0; g < groups; g++)
            pair_rows(v, v->query_pairs + g * BLOCK * BLOCK, v->query_in + g * BLOCK * f, v->query + g * BLOCK * f,
                      v->total, first, 1);
        fade_keys(v, first);
        for (int64_t t = 0; t < GROUP && v->is_backward; t++)
            for (int64_t j = 0; j < f; j++) v->start_rows[(first + t) * f + j] = v->total[j] * factors[t * f + j];
        for (int64_t j = 0; j < f; j++) v->total[j] *= factors[(GROUP - 1) * f + j];
    }
    if (!v->is_backward) return;
    float after[f];
    for (int64_t j = 0; j < f; j++) after[j] = 1;
    for (int64_t first = BLOCK - GROUP; first >= 0; first -= GROUP) {
        const float *factors = v->factors + first / GROUP * FACTORS * f;
        for (int64_t s = 0; s < GROUP; s++)
            for (int64_t j = 0; j < f; j++)
                v->end_rows[(first + s) * f + j] =
                    after[j] * (s < GROUP - 1 ? factors[factor_index(s, GROUP - 1) * f + j] : 1);
        for (int64_t j = 0; j < f; j++) after[j] *= factors[(GROUP - 1) * f + j];
    }
}

void gate_block(delta *v) {
    if (v->by_feature)
        gate_features(v);
    else
        gate_tokens(v);
}

/* `corrected` and U of a block, by substitution in fours of rows. */
void solve_block(delta *v) {
    int64_t f = v->w.feature_row, d = v->w.value_row, rows = block_rows(v);
    float *y = v->corrected;
    if (v->erases) product(y, d, v->key_in, f, 1, v->sums, d, rows, f, d, 0, FULL);
    for (int64_t i = 0; i < rows * d; i += LANES) {
        vector read = v->erases ? *(vector *)(y + i) : (vector){0};
        *(vector *)(y + i) = *(vector *)(v->value + i) - read;
    }
    for (int64_t i = 0; i < rows; i += ROWS) {
        if (i && v->erases) product(y + i * d, d, v->pairs + i * BLOCK, BLOCK, 1, v->new, d, ROWS, i, d, 1, FULL);
        for (int64_t j = 0; j < d; j += LANES)
            for (int64_t r = i; r < i + ROWS; r++) {
                vector x = *(vector *)(y + r * d + j) * v->beta[r];
                *(vector *)(v->new + r *d + j) = x;
                for (int64_t s = r + 1; s < i + ROWS && v->erases; s++)
                    *(vector *)(y + s * d + j) += x * v->pairs[s * BLOCK + r];
            }
    }
}

/* The state behind the block. */
void add_delta_block(delta *v) {
    int64_t d = v->w.value_row, f = v->w.feature_row;
    for (int64_t j = 0; j < f; j++)
        for (int64_t i = 0; i < d; i += LANES) *(vector *)(v->sums + j * d + i) *= v->total[j];
    product(v->sums, d, v->key_out_t, BLOCK, 1, v->new, d, f, block_rows(v), d, 1, FULL);
}

/* Working space, zeroed; 1 where there is none. */
int begin_delta(delta *v, const sizes *s, const tensor *x, int is_backward) {
    memset(v, 0, sizeof(*v));
    work *w = &v->w;
    int64_t f = round_up(s->inputs), d = round_up(s->width), groups = s->groups;
    int64_t rows = BLOCK * f, pairs = BLOCK * BLOCK, wide = BLOCK * d, state = f * d,
            end = (s->keys + BLOCK - 1) / BLOCK;
    w->sizes = s, w->tensors = x, w->feature_row = f, w->value_row = d, w->next_offset = BLOCK;
    v->erases = s->map, v->by_feature = s->features > 1, v->is_backward = is_backward;
    struct {
        float **place;
        int64_t floats;
    } parts[] = {
        {&v->key, rows},
        {&v->decay, rows},
        {&v->query, groups * rows},
        {&v->key_in, rows},
        {&v->query_in, groups * rows},
        {&v->key_out_t, rows},
        {&v->pairs, pairs},
        {&v->query_pairs, groups * pairs},
        {&v->fade, pairs},
        {&v->factors, BLOCK / GROUP * FACTORS * f},
        {&v->total, f},
        {&w->ones, BLOCK},
        {&v->value, wide},
        {&v->corrected, wide},
        {&v->new, wide},
        {&w->out, wide},
        {&v->sums, state},
        /* from here on for the backward pass */
        {&v->start_rows, rows},
        {&v->end_rows, rows},
        {&v->states, end * state},
        {&v->all_corrected, end * wide},
        {&v->grad_sums, state},
        {&v->state_t, state},
        {&v->grad_sums_t, state},
        {&v->new_t, wide},
        {&v->grad_new, wide},
        {&v->grad_out, wide},
        {&v->grad_pairs, pairs},
        {&v->grad_query_pairs, groups * pairs},
        {&v->grad_key, rows},
        {&v->grad_key_row, rows},
        {&v->grad_query, groups * rows},
        {&v->grad_decay, rows},
        {&v->faded_key, rows},
        {&v->faded_query, groups * rows},
    };
    int64_t count = is_backward ? sizeof(parts) / sizeof(*parts) : 17, floats = 0;
    for (int64_t i = 0; i < count; i++) floats += parts[i].floats + 16;
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats)) return 1;
    w->memory = memory;
    char *m = memory;
    for (int64_t i = 0; i < count; i++) {
        *parts[i].place = allocate(&m, parts[i].floats);
        if (parts[i].place != &v->states && parts[i].place != &v->all_corrected)
            memset(*parts[i].place, 0, 4 * parts[i].floats);
    }
    for (int64_t j = 0; j < BLOCK; j++) w->ones[j] = 1;
    return 0;
}

/* S and the place of a head. */
void enter_delta_head(delta *v, int64_t number) {
    work *w = &v->w;
    int64_t d = w->value_row, width = w->sizes->width;
    w->batch = number / w->sizes->heads, w->head = number % w->sizes->heads;
    memset(v->sums, 0, 4 * w->feature_row * d);
    for (int64_t j = 0; j < w->sizes->inputs && w->tensors[DELTA_STATE].data; j++)
        memcpy(v->sums + j * d, address_of(w, DELTA_STATE, 0, j), 4 * width);
}

static void read_block(delta *v, int64_t n) {
    work *w = &v->w;
    int64_t f = w->feature_row, d = w->value_row, rows = block_rows(v);
    for (int64_t g = 0; g < w->sizes->groups; g++) {
        product(w->out, d, v->query_in + g * BLOCK * f, f, 1, v->sums, d, rows, f, d, 0, FULL);
        product(w->out, d, v->query_pairs + g * BLOCK * BLOCK, BLOCK, 1, v->new, d, rows, rows, d, 1, LOWER);
        store(w, w->out, d, w->ones, DELTA_OUTPUT, g, n, w->sizes->width);
    }
}

int delta_forward(const sizes *s, const tensor *x) {
    delta space, *v = &space;
    if (begin_delta(v, s, x, 0)) return 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        enter_delta_head(v, i);
        for (int64_t n = 0; n < s->keys; n += BLOCK) {
            load_delta_block(v, n);
            gate_block(v);
            solve_block(v);
            read_block(v, n);
            add_delta_block(v);
        }
        for (int64_t j = 0; j < s->inputs; j++)
            memcpy(address_of(&v->w, DELTA_NEW_STATE, 0, j), v->sums + j * v->w.value_row, 4 * s->width);
    }
    free(v->w.memory);
    return 0;
}
