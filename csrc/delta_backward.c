/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule, backward: forwards for the state before each block, then backwards for the gradients.

   With W = dU (I + diag(beta) A)^-T, R = diag(beta) W and Y = V - K' S - A U (so that U = diag(beta) Y):

       dV = R,   dbeta_i = W_i Y_i,   dK' = -R S^T,   dA = -R U^T,   dQ' = dO S^T,   dP = dO U^T,   dK'' = U dS1^T
       dU = P^T dO + K'' dS1,   dS = exp(g_1 + ... + g_C) dS1 + Q'^T dO - K'^T R

   The log decay sums up what rows gain and keys lose: its sum up to token t has the gradient q_t dq_t + k_t (dk_t as a
   row - dk_t as a key), and the decay of the whole block that of K'' and S. */
#include "delta.h"

/* grad[C] = the sums over rows of a and b */
static void block_dot_products(float *grad, const float *a, const float *b, int64_t columns) {
    for (int64_t t = 0; t < BLOCK; t++) {
        grad[t] = 0;
        for (int64_t j = 0; j < columns; j++) grad[t] += a[t * columns + j] * b[t * columns + j];
    }
}

static void clear_upper(float *pairs, const float *fade, float sign, int is_strict) {
    for (int64_t i = 0; i < BLOCK; i++)
        for (int64_t j = 0; j < BLOCK; j++) {
            float *x = pairs + i * BLOCK + j;
            *x = j + is_strict <= i ? *x * sign * (fade ? fade[i * BLOCK + j] : 1) : 0;
        }
}

/* W in grad_new, R in grad_out. */
static void solve_transposed(delta *v) {
    int64_t d = v->w.value_row;
    float *w = v->grad_new, *r = v->grad_out;
    for (int64_t i = BLOCK - ROWS; i >= 0; i -= ROWS) {
        int64_t behind = i + ROWS;
        if (behind < BLOCK && v->erases)
            product(w + i * d, d, v->pairs + behind * BLOCK + i, 1, BLOCK, r + behind * d, d, ROWS, BLOCK - behind, d,
                    1, FULL);
        for (int64_t j = 0; j < d; j += LANES)
            for (int64_t t = i + ROWS - 1; t >= i; t--) {
                vector x = *(vector *)(w + t * d + j) * v->beta[t];
                *(vector *)(r + t * d + j) = x;
                for (int64_t s = i; s < t && v->erases; s++) *(vector *)(w + s * d + j) += x * v->pairs[t * BLOCK + s];
            }
    }
}

/* Gradients of A and P become those of rows and keys, with one decay for all features. */
static void gradients_of_token_pairs(delta *v) {
    int64_t f = v->w.feature_row;
    if (v->erases) {
        product(v->grad_key_row, f, v->grad_pairs, BLOCK, 1, v->key, f, BLOCK, BLOCK, f, 1, LOWER);
        product(v->grad_key, f, v->grad_pairs, 1, BLOCK, v->key, f, BLOCK, BLOCK, f, 1, LOWER_T);
    }
    for (int64_t g = 0; g < v->w.sizes->groups; g++) {
        float *pairs = v->grad_query_pairs + g * BLOCK * BLOCK;
        product(v->grad_query + g * BLOCK * f, f, pairs, BLOCK, 1, v->key, f, BLOCK, BLOCK, f, 1, LOWER);
        product(v->grad_key, f, pairs, 1, BLOCK, v->query + g * BLOCK * f, f, BLOCK, BLOCK, f, 1, LOWER_T);
    }
}

/* Pairs within a group, one by one: both gradients of rows_t key_s factor_st. */
static void gradients_within_group(const delta *v, const float *pairs, const float *rows, float *grad_rows,
                                   int64_t first) {
    int64_t f = v->w.feature_row;
    const float *factors = v->factors + first / GROUP * FACTORS * f;
    for (int64_t t = first; t < first + GROUP; t++)
        for (int64_t s = first; s <= t; s++) {
            const float *factor = factors + factor_index(s - first, t - first) * f;
            float grad = pairs[t * BLOCK + s];
            for (int64_t j = 0; j < f; j++) {
                float x = s < t ? grad * factor[j] : grad;
                grad_rows[t * f + j] += x * v->key[s * f + j];
                v->grad_key[s * f + j] += x * rows[t * f + j];
            }
        }
}

/* Rows of a group and the keys before it, which `faded_key` holds decayed to its start. */
static void gradients_of_rows(delta *v, const float *pairs, const float *rows, float *grad_rows, float *space,
                              int64_t first) {
    int64_t f = v->w.feature_row;
    const float *factors = v->factors + first / GROUP * FACTORS * f;
    gradients_within_group(v, pairs, rows, grad_rows, first);
    if (!first) return;
    product(space, f, pairs + first * BLOCK, BLOCK, 1, v->faded_key, f, GROUP, first, f, 0, FULL);
    for (int64_t i = 0; i < GROUP * f; i++) grad_rows[first * f + i] += factors[i] * space[i];
}

/* Keys of a group and the rows behind it, `faded` from its end. */
static void gradients_of_keys(delta *v, const float *pairs, const float *faded, float *space, int64_t first) {
    int64_t f = v->w.feature_row, behind = first + GROUP;
    const float *factors = v->factors + first / GROUP * FACTORS * f;
    if (behind == BLOCK) return;
    product(space, f, pairs + behind * BLOCK + first, 1, BLOCK, faded + behind * f, f, GROUP, BLOCK - behind, f, 0,
            FULL);
    for (int64_t s = 0; s < GROUP; s++)
        for (int64_t j = 0; j < f; j++)
            v->grad_key[(first + s) * f + j] +=
                space[s * f + j] * (s < GROUP - 1 ? factors[factor_index(s, GROUP - 1) * f + j] : 1);
}

/* Rows behind a group go back to its start, and its own rows enter. */
static void fade_rows_back(const delta *v, float *faded, const float *rows, int64_t first) {
    int64_t f = v->w.feature_row;
    const float *factors = v->factors + first / GROUP * FACTORS * f, *last = factors + (GROUP - 1) * f;
    for (int64_t t = first + GROUP; t < BLOCK; t++)
        for (int64_t j = 0; j < f; j++) faded[t * f + j] *= last[j];
    for (int64_t i = 0; i < GROUP * f; i++) faded[first * f + i] = rows[first * f + i] * factors[i];
}

/* The same with a decay per feature. */
static void gradients_of_feature_pairs(delta *v) {
    int64_t f = v->w.feature_row, groups = v->w.sizes->groups;
    float space[GROUP * f];
    for (int64_t first = 0; first < BLOCK; first += GROUP) {
        const float *factors = v->factors + first / GROUP * FACTORS * f, *last = factors + (GROUP - 1) * f;
        if (v->erases) gradients_of_rows(v, v->grad_pairs, v->key, v->grad_key_row, space, first);
        for (int64_t g = 0; g < groups; g++)
            gradients_of_rows(v, v->grad_query_pairs + g * BLOCK * BLOCK, v->query + g * BLOCK * f,
                              v->grad_query + g * BLOCK * f, space, first);
        for (int64_t t = 0; t < first; t++)
            for (int64_t j = 0; j < f; j++) v->faded_key[t * f + j] *= last[j];
        for (int64_t s = 0; s < GROUP; s++)
            for (int64_t j = 0; j < f; j++)
                v->faded_key[(first + s) * f + j] =
                    v->key[(first + s) * f + j] * (s < GROUP - 1 ? factors[factor_index(s, GROUP - 1) * f + j] : 1);
    }
    for (int64_t first = BLOCK - GROUP; first >= 0; first -= GROUP) {
        if (v->erases) {
            gradients_of_keys(v, v->grad_pairs, v->faded_key, space, first);
            fade_rows_back(v, v->faded_key, v->key, first);
        }
        for (int64_t g = 0; g < groups; g++) {
            float *faded = v->faded_query + g * BLOCK * f;
            gradients_of_keys(v, v->grad_query_pairs + g * BLOCK * BLOCK, faded, space, first);
            fade_rows_back(v, faded, v->query + g * BLOCK * f, first);
        }
    }
}

/* dP, dQ' (as dQ) and the parts of dU and dS of all queries. */
static void gradients_of_queries(delta *v, int64_t n) {
    work *w = &v->w;
    int64_t f = w->feature_row, d = w->value_row;
    for (int64_t g = 0; g < w->sizes->groups; g++) {
        float *pairs = v->query_pairs + g * BLOCK * BLOCK, *grad_pairs = v->grad_query_pairs + g * BLOCK * BLOCK;
        float *grad = v->grad_query + g * BLOCK * f;
        load(w, w->out, d, GRAD_DELTA_OUTPUT, g, n, w->sizes->width);
        product(v->grad_new, d, pairs, 1, BLOCK, w->out, d, BLOCK, BLOCK, d, 1, LOWER_T);
        product(grad, f, w->out, d, 1, v->state_t, f, BLOCK, d, f, 0, FULL);
        for (int64_t i = 0; i < BLOCK * f; i++) grad[i] *= v->start_rows[i];
        product(grad_pairs, BLOCK, w->out, d, 1, v->new_t, BLOCK, BLOCK, d, BLOCK, 0, INTO_LOWER);
        clear_upper(grad_pairs, v->by_feature ? NULL : v->fade, 1, 0);
        product(v->grad_sums, d, v->query_in + g * BLOCK * f, 1, f, w->out, d, f, BLOCK, d, 1, FULL);
    }
}

/* What remains of dU goes through the triangular system to values, beta, keys and dS. */
static void gradients_of_solution(delta *v, float *grad_beta) {
    int64_t f = v->w.feature_row, d = v->w.value_row;
    solve_transposed(v);
    block_dot_products(grad_beta, v->grad_new, v->corrected, d);
    memset(v->grad_key_row, 0, 4 * BLOCK * f);
    if (!v->erases) return;
    product(v->grad_key_row, f, v->grad_out, d, 1, v->state_t, f, BLOCK, d, f, 0, FULL);
    for (int64_t i = 0; i < BLOCK * f; i++) {
        v->grad_key_row[i] *= -v->start_rows[i];
        v->key_in[i] = -v->key_in[i];
    }
    product(v->grad_pairs, BLOCK, v->grad_out, d, 1, v->new_t, BLOCK, BLOCK, d, BLOCK, 0, INTO_LOWER);
    clear_upper(v->grad_pairs, v->by_feature ? NULL : v->fade, -1, 1);
    product(v->grad_sums, d, v->key_in, 1, f, v->grad_out, d, f, BLOCK, d, 1, FULL);
}

/* Of the log decay [C, f], from `last`, the gradient of the decay of the whole block. */
static void gradients_of_decay(delta *v, const float *last) {
    int64_t f = v->w.feature_row;
    for (int64_t j = 0; j < f; j++) {
        float sum = last[j];
        for (int64_t t = BLOCK - 1; t >= 0; t--) {
            int64_t i = t * f + j;
            sum += v->key[i] * (v->grad_key_row[i] - v->grad_key[i]);
            for (int64_t g = 0; g < v->w.sizes->groups; g++)
                sum += v->query[g * BLOCK * f + i] * v->grad_query[g * BLOCK * f + i];
            v->grad_decay[i] = sum;
        }
    }
}

static void store_gradients(delta *v, const float *grad_beta, int64_t n) {
    work *w = &v->w;
    int64_t f = w->feature_row, inputs = w->sizes->inputs;
    for (int64_t g = 0; g < w->sizes->groups; g++)
        store(w, v->grad_query + g * BLOCK * f, f, w->ones, GRAD_DELTA_QUERY, g, n, inputs);
    for (int64_t i = 0; i < BLOCK * f; i++) v->grad_key[i] += v->grad_key_row[i];
    store(w, v->grad_key, f, w->ones, GRAD_DELTA_KEY, 0, n, inputs);
    store(w, v->grad_out, w->value_row, w->ones, GRAD_DELTA_VALUE, 0, n, w->sizes->width);
    store_numbers(w, grad_beta, GRAD_DELTA_BETA, 0, n);
    if (v->by_feature) {
        store(w, v->grad_decay, f, w->ones, GRAD_DELTA_DECAY, 0, n, inputs);
        return;
    }
    float grad[BLOCK];
    for (int64_t t = 0; t < BLOCK; t++) {
        grad[t] = 0;
        for (int64_t j = 0; j < f; j++) grad[t] += v->grad_decay[t * f + j];
    }
    store_numbers(w, grad, GRAD_DELTA_DECAY, 0, n);
}

static void gradients_of_block(delta *v, int64_t n) {
    int64_t f = v->w.feature_row, d = v->w.value_row;
    float grad_beta[BLOCK], last[f], *state = v->states + n / BLOCK * f * d;
    load_delta_block(v, n);
    gate_block(v);
    memcpy(v->corrected, v->all_corrected + n * d, 4 * BLOCK * d);
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t i = 0; i < d; i++) v->new[t * d + i] = v->beta[t] * v->corrected[t * d + i];
    transpose(v->new_t, BLOCK, v->new, d, BLOCK, d);
    transpose(v->state_t, f, state, d, f, d);
    transpose(v->grad_sums_t, f, v->grad_sums, d, f, d);
    product(v->grad_new, d, v->key_out_t, 1, BLOCK, v->grad_sums, d, BLOCK, f, d, 0, FULL);
    product(v->grad_key, f, v->new, d, 1, v->grad_sums_t, f, BLOCK, d, f, 0, FULL);
    for (int64_t j = 0; j < f; j++) {
        last[j] = 0;
        for (int64_t i = 0; i < d; i++) {
            last[j] += v->total[j] * state[j * d + i] * v->grad_sums[j * d + i];
            v->grad_sums[j * d + i] *= v->total[j];
        }
    }
    for (int64_t i = 0; i < BLOCK * f; i++) v->grad_key[i] *= v->end_rows[i];
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = 0; j < f; j++) last[j] += v->key[t * f + j] * v->grad_key[t * f + j];
    gradients_of_queries(v, n);
    gradients_of_solution(v, grad_beta);
    if (v->by_feature)
        gradients_of_feature_pairs(v);
    else
        gradients_of_token_pairs(v);
    gradients_of_decay(v, last);
    store_gradients(v, grad_beta, n);
}

static void backward_of_head(delta *v) {
    work *w = &v->w;
    int64_t f = w->feature_row, d = w->value_row, length = w->sizes->keys, width = w->sizes->width;
    w->next_offset = BLOCK;
    for (int64_t n = 0; n < length; n += BLOCK) {
        memcpy(v->states + n / BLOCK * f * d, v->sums, 4 * f * d);
        load_delta_block(v, n);
        gate_block(v);
        memset(v->corrected, 0, 4 * BLOCK * d);
        solve_block(v);
        memcpy(v->all_corrected + n * d, v->corrected, 4 * BLOCK * d);
        add_delta_block(v);
    }
    memset(v->grad_sums, 0, 4 * f * d);
    for (int64_t j = 0; j < w->sizes->inputs && w->tensors[GRAD_DELTA_STATE].data; j++)
        memcpy(v->grad_sums + j * d, address_of(w, GRAD_DELTA_STATE, 0, j), 4 * width);
    w->next_offset = -BLOCK;
    for (int64_t n = (length - 1) / BLOCK * BLOCK; n >= 0; n -= BLOCK) gradients_of_block(v, n);
    for (int64_t j = 0; j < w->sizes->inputs && w->tensors[GRAD_DELTA_FIRST_STATE].data; j++)
        memcpy(address_of(w, GRAD_DELTA_FIRST_STATE, 0, j), v->grad_sums + j * d, 4 * width);
}

int delta_backward(const sizes *s, const tensor *x) {
    delta space, *v = &space;
    if (begin_delta(v, s, x, 1)) return 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        enter_delta_head(v, i);
        backward_of_head(v);
    }
    free(v->w.memory);
    return 0;
}
