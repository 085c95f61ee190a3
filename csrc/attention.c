/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel attention, causal or not, forward and backward.

   Forward: O = (phi(q) S) / (phi(q) Z) block by block (Katharopoulos 2020, equations 9 and 18-20). Backward (equations
   13-15): forwards over the blocks for the gradients of queries, then backwards for those of keys and values. Features
   are made from queries and keys a block at a time, and again in the backward pass: they never reach memory. */
#include "features.h"

/* 0 where there is nothing to see */
INLINE float inverse_of(float x) {
    return x < TINY && x > -TINY ? 0 : 1 / x;
}

static void add_block_to_sums(work *w) {
    if (w->is_packed) {
        add_packed_block(w);
        return;
    }
    int64_t f = w->feature_row, d = w->value_row;
    if (w->sizes->causal)
        product(w->sums, d, w->key_t, BLOCK, 1, w->value, d, f, BLOCK, d, 1, FULL);
    else
        product(w->sums, d, w->key, 1, f, w->value, d, f, BLOCK, d, 1, FULL);
    add_rows(w->z, w->key, w->tokens, w->feature_row);
}

/* Output of a block of queries, from the sums and, in the causal form, the keys of the same block. */
static void attend_block(work *w, int64_t n) {
    int64_t f = w->feature_row, d = w->value_row;
    float total[BLOCK], inverse[BLOCK], scale[BLOCK], zeros[BLOCK] = {0}, z[f];
    for (int64_t g = 0; g < w->sizes->groups; g++) {
        prefetch_rows(w, 3, OUTPUT, g, n, n + w->tokens);
        if (w->is_packed)
            attend_packed_block(w, total, g, n);
        else {
            load_queries(w, g, n, scale);
            half_product(w, w->out, d, w->query, f, 1, w->sums, d, BLOCK, f, d, 0, FULL);
            memcpy(z, w->z, 4 * f);
            round_numbers(w, z, f);
            row_dot_products(total, w->query, z, 0, f);
        }
        if (w->sizes->causal && !w->is_packed) {
            half_product(w, w->scores, BLOCK, w->query, f, 1, w->key_t, BLOCK, BLOCK, f, BLOCK, 0, INTO_LOWER);
            add_and_clear_upper(w->scores, zeros);
            round_numbers(w, w->scores, BLOCK * BLOCK);
            half_product(w, w->out, d, w->scores, BLOCK, 1, w->value, d, BLOCK, BLOCK, d, 1, LOWER);
            row_dot_products(inverse, w->scores, w->ones, 0, BLOCK);
            for (int64_t t = 0; t < BLOCK; t++) total[t] += inverse[t];
        }
        for (int64_t t = 0; t < BLOCK; t++) inverse[t] = inverse_of(total[t]);
        if (w->is_packed)
            store_packed(w, inverse, g, n);
        else
            store(w, w->out, d, inverse, OUTPUT, g, n, w->sizes->width);
        store_numbers(w, total, DENOMINATOR, g, n);
        store_numbers(w, scale, SCALE, g, n);
    }
}

/* Heads go on block by block in turns: what lies beside each other in memory is read together. */
static void interleave_heads(work *w, int64_t count, int (*next_block)(work *)) {
    for (int64_t i = 0; i < count; i++) w[i].position = 0, w[i].other = count > 1 ? w + (i + 1) % count : NULL;
    for (int is_going = 1; is_going;) {
        is_going = 0;
        for (int64_t i = 0; i < count; i++) is_going |= next_block(w + i);
    }
}

static int forward_block(work *w) {
    if (w->position >= w->sizes->keys) return 0;
    load_keys(w, w->position, 0);
    before_block(w, w->sums, w->z, 1);
    if (w->is_packed && w->sizes->causal) pack_sums(w);
    if (w->sizes->causal) attend_block(w, w->position);
    add_block_to_sums(w);
    after_block(w, w->sums, w->z);
    w->position += w->tokens;
    return 1;
}

static int forward_queries(work *w) {
    if (w->position >= w->sizes->queries) return 0;
    begin_query_block(w, w->position);
    if (w->is_packed) pack_sums(w);
    attend_block(w, w->position);
    w->position += w->tokens;
    return 1;
}

/* `pass` over all heads, as many at a time as take turns; 1 where there is no memory. */
static int run_heads(const sizes *s, const tensor *x, int is_backward, void (*pass)(work *, int64_t)) {
    work w[MOST_HEADS];
    int64_t most = begin_heads(w, s, x, is_backward);
    if (most) begin_tiles(w);
    for (int64_t first = s->start; first < s->stop && most; first += most) {
        int64_t count = s->stop - first < most ? s->stop - first : most;
        for (int64_t i = 0; i < count; i++) {
            enter_head(w + i, first + i);
            load_state(w + i, STATE, w[i].sums, w[i].z, w[i].maximum);
        }
        pass(w, count);
    }
    if (most) end_tiles(w);
    if (most) free(w->memory);
    return !most;
}

static void forward_pass(work *w, int64_t count) {
    interleave_heads(w, count, forward_block);
    if (!w->sizes->causal) interleave_heads(w, count, forward_queries);
    for (int64_t i = 0; i < count; i++) store_state(w + i, NEW_STATE, w[i].sums, w[i].z, w[i].maximum);
}

int attention_forward(const sizes *s, const tensor *x) {
    return run_heads(s, x, 0, forward_pass);
}

/* Gradients of numerator, w->out[C, d], and denominator, e[C], of a block of queries, in units of exp(scale). A forward
   pass in parts has other blocks, and so denominators in other units. */
static void load_gradients_of_sums(work *w, float *e, const float *scale, int64_t g, int64_t n) {
    int64_t d = w->value_row;
    float total[BLOCK], grad[BLOCK], saved[BLOCK], *output = w->output;
    load(w, w->out, d, GRAD_OUTPUT, g, n, w->sizes->width);
    load(w, output, d, OUTPUT, g, n, w->sizes->width);
    load_numbers(w, total, DENOMINATOR, g, n);
    load_numbers(w, grad, GRAD_DENOMINATOR, g, n);
    load_numbers(w, saved, SCALE, g, n);
    for (int64_t t = 0; t < BLOCK; t++) {
        float inverse = inverse_of(total[t]), other = scale[t] - saved[t];
        if (w->sizes->map >= EXP && t < w->tokens && inverse && other) { /* beyond e^80 all features are 0 */
            float size = other - __builtin_logf(total[t]);
            inverse = __builtin_expf(size < 80 ? size : 80);
            grad[t] *= __builtin_expf(other < 80 ? other : 80);
        }
        for (int64_t j = 0; j < d; j++) w->out[t * d + j] *= inverse;
    }
    row_dot_products(e, w->out, output, d, d);
    for (int64_t t = 0; t < BLOCK; t++) e[t] = grad[t] - e[t];
}

/* The gradient of a block of features, w->grad[C, f], goes back through the map. */
static void gradient_through_map(work *w, const float *features, const float *input, const float *factor, int is_query,
                                 int64_t g, int64_t n) {
    int64_t f = w->feature_row, p = w->input_row;
    int to = is_query ? GRAD_QUERY : GRAD_KEY;
    affine *m = w->maps + (is_query ? 1 + g : 0);
    float total[BLOCK], half[BLOCK];
    for (int64_t t = 0; t < w->tokens; t++)
        for (int64_t j = 0; j < f; j++) {
            float x = features[t * f + j], below = x < factor[t] ? x : factor[t];
            w->grad[t * f + j] *= w->sizes->map >= EXP ? x : w->sizes->map == ELU ? below : factor[t];
        }
    if (!m->weight) {
        store(w, w->grad, f, w->ones, to, g, n, w->sizes->inputs);
        return;
    }
    if (w->image) gradient_of_image(w, is_query ? w->query_softmax : w->key_softmax);
    float *grad = w->image ? w->image : w->grad;
    int64_t i = w->image_row;
    memset(grad + w->tokens * i, 0, 4 * i * (BLOCK - w->tokens));
    if (w->tensors[is_query ? GRAD_QUERY_MAP : GRAD_KEY_MAP].data)
        product(m->grad_weight, i, input, 1, p, grad, i, p, BLOCK, i, 1, FULL);
    if (!is_query) add_rows(m->grad_bias, grad, w->tokens, i);
    product(w->grad_input, p, grad, i, 1, m->weight_t, p, BLOCK, i, p, 0, FULL);
    row_dot_products(total, w->grad, w->ones, 0, f);
    row_dot_products(half, input, input, p, p);
    for (int64_t t = 0; t < w->tokens; t++) {
        m->grad_constant += total[t];
        if (!is_query && w->tensors[KEY_AGE].data)
            w->grad_decay += total[t] * *(float *)address_of(w, KEY_AGE, 0, n + t);
        m->grad_norm -= (double)total[t] * half[t] / 2;
        for (int64_t j = 0; j < p && m->norm; j++) w->grad_input[t * p + j] -= m->norm * total[t] * input[t * p + j];
    }
    turn_rows(w, w->grad_input, p, is_query ? QUERY_TURN : KEY_TURN, n, -1);
    store(w, w->grad_input, p, w->ones, to, g, n, w->sizes->inputs);
}

static void absorb_gradients(work *w, const float *e) {
    product(w->grad_sums, w->value_row, w->query, 1, w->feature_row, w->out, w->value_row, w->feature_row, BLOCK,
            w->value_row, 1, FULL);
    for (int64_t t = 0; t < w->tokens; t++) add_scaled(w->grad_z, w->query + t * w->feature_row, e[t], w->feature_row);
}

/* By the decay: weights times the real tokens between query and key. Here from the queries of a block, whose gradient
   by the carried sums is in w->grad, back to where the block of each key ended; `key_gradients` has the rest. Counted
   from blocks, digits do not get lost in long inputs. */
static void decay_gradient(work *w, const float *e) {
    int64_t f = w->feature_row, d = w->value_row;
    float carried[BLOCK], carried_z[BLOCK], aged[BLOCK], aged_z[BLOCK];
    row_dot_products(carried, w->grad, w->query, f, f);
    row_dot_products(carried_z, w->query, w->z, 0, f);
    product(w->aged, f, w->out, d, 1, w->aged_sums, f, BLOCK, d, f, 0, FULL);
    row_dot_products(aged, w->aged, w->query, f, f);
    row_dot_products(aged_z, w->query, w->aged_z, 0, f);
    for (int64_t t = 0; t < w->tokens; t++)
        w->grad_decay += aged[t] + e[t] * aged_z[t] + w->steps[t] * (carried[t] + e[t] * carried_z[t]);
}

/* out = out + steps * x, numbers */
static void age(float *out, const float *x, float steps, int64_t count) {
    if (steps) add_scaled(out, x, steps, count);
}

/* Gradients of a block of queries, which meet the sums of what lies before them and the keys of the block. */
static void query_gradients(work *w, int64_t n) {
    int64_t f = w->feature_row, d = w->value_row;
    float e[BLOCK], scale[BLOCK] = {0};
    for (int64_t g = 0; g < w->sizes->groups; g++) {
        load_queries(w, g, n, scale);
        load_gradients_of_sums(w, e, scale, g, n);
        product(w->grad, f, w->out, d, 1, w->sums_t, f, BLOCK, d, f, 0, FULL);
        if (w->aged) decay_gradient(w, e);
        if (w->sizes->causal) {
            product(w->pairs, BLOCK, w->out, d, 1, w->value_t, BLOCK, BLOCK, d, BLOCK, 0, INTO_LOWER);
            add_and_clear_upper(w->pairs, e);
            product(w->grad, f, w->pairs, BLOCK, 1, w->key, f, BLOCK, BLOCK, f, 1, LOWER);
        } else
            absorb_gradients(w, e);
        for (int64_t t = 0; t < w->tokens; t++) add_scaled(w->grad + t * f, w->z, e[t], f);
        gradient_through_map(w, w->query, w->query_input, w->query_factor, 1, g, n);
    }
}

/* The rest of `decay_gradient`: queries and keys of the same block. */
static void decay_gradient_within(work *w) {
    for (int64_t t = 0; t < w->tokens; t++) {
        const float *scores = w->scores + t * BLOCK, *pairs = w->pairs + t * BLOCK;
        float sum = 0;
        for (int64_t j = 0; j < BLOCK; j++) sum += (w->steps[t] - w->steps[j]) * scores[j] * pairs[j];
        w->grad_decay += sum;
    }
}

/* Gradients of a block of keys and values, which meet the sums over the queries behind them and those of the block. */
static void key_gradients(work *w, int64_t n) {
    int64_t f = w->feature_row, d = w->value_row;
    float e[BLOCK], scale[BLOCK] = {0}, zeros[BLOCK] = {0};
    transpose(w->sums_t, f, w->grad_sums, d, f, d);
    product(w->grad, f, w->value, d, 1, w->sums_t, f, BLOCK, d, f, 0, FULL);
    product(w->grad_value, d, w->key, f, 1, w->grad_sums, d, BLOCK, f, d, 0, FULL);
    for (int64_t t = 0; t < BLOCK; t++) add_scaled(w->grad + t * f, w->grad_z, 1, f);
    if (w->aged) {
        float later[BLOCK];
        row_dot_products(later, w->grad, w->key, f, f);
        for (int64_t t = 0; t < w->tokens; t++) w->grad_decay += (w->steps[w->tokens - 1] - w->steps[t]) * later[t];
    }
    for (int64_t g = 0; g < w->sizes->groups && w->sizes->causal; g++) {
        load_queries(w, g, n, scale);
        load_gradients_of_sums(w, e, scale, g, n);
        product(w->scores, BLOCK, w->query, f, 1, w->key_t, BLOCK, BLOCK, f, BLOCK, 0, INTO_LOWER);
        add_and_clear_upper(w->scores, zeros);
        product(w->pairs, BLOCK, w->out, d, 1, w->value_t, BLOCK, BLOCK, d, BLOCK, 0, INTO_LOWER);
        add_and_clear_upper(w->pairs, e);
        product(w->grad, f, w->pairs, 1, BLOCK, w->query, f, BLOCK, BLOCK, f, 1, LOWER_T);
        product(w->grad_value, d, w->scores, 1, BLOCK, w->out, d, BLOCK, BLOCK, d, 1, LOWER_T);
        if (w->aged) decay_gradient_within(w);
        absorb_gradients(w, e);
    }
    gradient_through_map(w, w->key, w->key_input, w->key_factor, 0, 0, n);
    store(w, w->grad_value, d, w->ones, GRAD_VALUE, 0, n, w->sizes->width);
}

static void remember_block(work *w, int64_t number, int64_t n) {
    w->starts[number] = n;
    if (w->sizes->map < EXP) return;
    memcpy(w->maxima + 2 * number * w->feature_row, w->maximum, 4 * w->feature_row);
    memcpy(w->maxima + (2 * number + 1) * w->feature_row, w->rescale, 4 * w->feature_row);
}

static int64_t recall_block(work *w, int64_t number) {
    if (w->sizes->map >= EXP) {
        memcpy(w->maximum, w->maxima + 2 * number * w->feature_row, 4 * w->feature_row);
        memcpy(w->rescale, w->maxima + (2 * number + 1) * w->feature_row, 4 * w->feature_row);
    }
    return w->starts[number];
}

static void store_map_gradients(const work *w, int which, int64_t g, const affine *m) {
    const tensor *x = w->tensors + which;
    for (int64_t i = 0; i < w->sizes->inputs && x->data; i++)
        memcpy(address_of(w, which, g, i), m->grad_weight + i * w->image_row, 4 * image_columns(w->sizes));
    if (x[1].data && which == GRAD_KEY_MAP)
        memcpy(address_of(w, which + 1, g, 0), m->grad_bias, 4 * w->sizes->features);
    else if (x[1].data)
        *(float *)address_of(w, which + 1, g, 0) = m->grad_constant;
    if (x[2].data) *(float *)address_of(w, which + 2, g, 0) = m->grad_norm;
}

/* Forwards over the blocks, for the gradients of queries. */
static int backward_block(work *w) {
    int64_t f = w->feature_row, d = w->value_row;
    if (w->position >= w->sizes->keys) return 0;
    load_keys(w, w->position, 0);
    if (w->aged) {
        age(w->aged_sums, w->sums_t, w->first_step, f * d);
        age(w->aged_z, w->z, w->first_step, f);
        before_block(w, w->aged_sums, w->aged_z, 0);
    }
    before_block(w, w->sums_t, w->z, 0);
    transpose(w->value_t, BLOCK, w->value, d, BLOCK, d);
    if (w->sizes->causal) {
        remember_block(w, w->block_number++, w->position);
        query_gradients(w, w->position);
    }
    if (w->aged) {
        age(w->aged_sums, w->sums_t, w->steps[w->tokens - 1], f * d);
        age(w->aged_z, w->z, w->steps[w->tokens - 1], f);
        fade(w, w->aged_sums, w->aged_z);
    }
    product(w->sums_t, f, w->value_t, BLOCK, 1, w->key, f, d, BLOCK, f, 1, FULL);
    add_rows(w->z, w->key, w->tokens, f);
    after_block(w, w->sums_t, w->z);
    w->position += w->tokens;
    return 1;
}

static int backward_queries(work *w) {
    if (w->position >= w->sizes->queries) return 0;
    begin_query_block(w, w->position);
    query_gradients(w, w->position);
    w->position += w->tokens;
    return 1;
}

/* Backwards over the blocks, for the gradients of keys and values; `end` is where the last one began. */
static int backward_keys(work *w) {
    int is_causal = w->sizes->causal;
    if (is_causal ? !w->block_number : w->position >= w->sizes->keys) return 0;
    if (is_causal) w->position = recall_block(w, --w->block_number);
    load_keys(w, w->position, is_causal ? w->block_end - w->position : BLOCK);
    if (w->sizes->map < EXP) after_block(w, w->grad_sums, w->grad_z);
    if (is_causal) transpose(w->value_t, BLOCK, w->value, w->value_row, BLOCK, w->value_row);
    key_gradients(w, w->position);
    if (is_causal) before_block(w, w->grad_sums, w->grad_z, 1);
    w->block_end = w->position;
    w->position = !is_causal ? w->position + w->tokens : w->block_number ? w->starts[w->block_number - 1] : w->position;
    return 1;
}

static void reverse_direction(work *w) {
    for (int64_t j = 0; j < w->feature_row && w->aged; j++) {
        w->grad_decay += (double)w->aged_z[j] * w->grad_z[j];
        for (int64_t i = 0; i < w->value_row; i++)
            w->grad_decay += (double)w->aged_sums[i * w->feature_row + j] * w->grad_sums[j * w->value_row + i];
    }
    w->block_end = w->sizes->keys;
    if (w->sizes->causal) w->next_offset = -BLOCK;
}

static void finish_head(work *w) {
    const sizes *s = w->sizes;
    if (!s->causal && s->map >= EXP) { /* from the first maximum to the last */
        for (int64_t j = 0; j < w->feature_row; j += LANES)
            *(vector *)(w->rescale + j) = exp_of_negative(*(vector *)(w->maxima + j) - *(vector *)(w->maximum + j));
        before_block(w, w->grad_sums, w->grad_z, 1);
    }
    if (s->map >= EXP && w->tensors[STATE].data && w->tensors[GRAD_FIRST_STATE].data) {
        /* The state is sums times exp(maximum): so is the gradient of both. */
        load_state(w, STATE, w->sums, w->z, NULL);
        for (int64_t j = 0; j < w->feature_row; j++) {
            float grad = w->z[j] * w->grad_z[j];
            for (int64_t i = 0; i < w->value_row; i++)
                grad += w->sums[j * w->value_row + i] * w->grad_sums[j * w->value_row + i];
            w->maximum[j] = grad;
        }
    }
    store_state(w, GRAD_FIRST_STATE, w->grad_sums, w->grad_z, w->maximum);
    if (w->tensors[GRAD_DECAY].data) *(float *)address_of(w, GRAD_DECAY, 0, 0) = w->grad_decay;
    store_map_gradients(w, GRAD_KEY_MAP, 0, w->maps);
    for (int64_t g = 0; g < s->groups; g++) store_map_gradients(w, GRAD_QUERY_MAP, g, w->maps + 1 + g);
}

static void backward_pass(work *w, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        load_state(w + i, GRAD_STATE, w[i].grad_sums, w[i].grad_z, NULL);
        transpose(w[i].sums_t, w->feature_row, w[i].sums, w->value_row, w->feature_row, w->value_row);
        if (!w->sizes->causal) remember_block(w + i, 0, 0);
    }
    interleave_heads(w, count, backward_block);
    if (!w->sizes->causal) interleave_heads(w, count, backward_queries);
    for (int64_t i = 0; i < count; i++) reverse_direction(w + i);
    interleave_heads(w, count, backward_keys);
    for (int64_t i = 0; i < count; i++) finish_head(w + i);
}

int attention_backward(const sizes *s, const tensor *x) {
    return run_heads(s, x, 1, backward_pass);
}
