/* SPDX-License-Identifier: Apache-2.0 */
/* Exact softmax attention to a window of places and to sinks: one block of queries after the other.

   Keys and values of a window lie in a ring of blocks, so that each is fetched once; the sinks stay behind them:

       columns   | block 3 | block 4 | block 2 | sinks |      of scores [BLOCK, columns], keys^T, values^T and `hidden`

   The backward pass makes the weights again from the logarithm of their sum, as FlashAttention (Dao 2022) does. */
#include "blocks.h"

typedef struct {
    work w;
    int64_t window, sinks, blocks, columns;
    int64_t split; /* up to this column logits are of the query, from it on of the sinks' own query */
    float *hidden; /* EMPTY where a place cannot be seen, else 0 */
    float *key, *key_t, *value, *value_t, *scores, *pairs, *grad_key, *grad_value, *sink_query, *grad_sink_query;
} window;

/* A block of keys and values from token n on; value_t is for the backward pass. */
static void load_places(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    float *key = v->key + column * w->input_row, *value = v->value + column * w->value_row;
    w->tokens = length < n ? 0 : length - n < BLOCK ? length - n : BLOCK;
    load(w, key, w->input_row, which, 0, n, w->sizes->inputs);
    load(w, value, w->value_row, which == KEY ? VALUE : SINK_VALUE, 0, n, w->sizes->width);
    for (int64_t t = 0; t < BLOCK; t++) {
        int is_visible = t < w->tokens && (which != KEY || *address_of(w, MASK, 0, n + t));
        v->hidden[column + t] = is_visible ? 0 : EMPTY;
        if (is_visible) continue;
        memset(key + t * w->input_row, 0, 4 * w->input_row);
        memset(value + t * w->value_row, 0, 4 * w->value_row);
    }
    transpose(v->key_t + column, v->columns, key, w->input_row, BLOCK, w->input_row);
    if (v->value_t) transpose(v->value_t + column, v->columns, value, w->value_row, BLOCK, w->value_row);
}

/* The gradients of such a block are complete. */
static void store_place_gradients(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    float *key = v->grad_key + column * w->input_row, *value = v->grad_value + column * w->value_row;
    w->tokens = length < n ? 0 : length - n < BLOCK ? length - n : BLOCK;
    store(w, key, w->input_row, w->ones, which, 0, n, w->sizes->inputs);
    store(w, value, w->value_row, w->ones, which + 1, 0, n, w->sizes->width);
    memset(key, 0, 4 * BLOCK * w->input_row);
    memset(value, 0, 4 * BLOCK * w->value_row);
}

/* Scaled logits of the query n + t, EMPTY where it sees nothing. */
static void mask_logits(const window *v, float *scores, int64_t n, int64_t t, float scaling) {
    const char *seen = v->sinks ? address_of(&v->w, SINK_SEEN, 0, n + t) : NULL;
    int_vector lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int64_t block = 0; block < v->blocks; block++) {
        int64_t column = (n / BLOCK + block) % v->blocks * BLOCK;
        for (int32_t j = 0; j < BLOCK; j += LANES) {
            vector *x = (vector *)(scores + column + j);
            int_vector offset = lane + (int32_t)(block * BLOCK + j - t);
            vector y = *x * scaling + *(vector *)(v->hidden + column + j);
            *x = blend((offset >= 0) & (offset < (int32_t)v->window), y, broadcast(EMPTY));
        }
    }
    float *sink = scores + v->blocks * BLOCK;
    for (int64_t j = 0; j < v->columns - v->blocks * BLOCK; j++)
        sink[j] = j < v->sinks && seen[j] ? sink[j] * scaling : EMPTY;
}

/* Logits of a block of queries; the number of its rows, in whole fours. */
static int64_t block_logits(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    int64_t rows = (w->tokens + ROWS - 1) / ROWS * ROWS, count = v->columns;
    load(w, w->query, w->input_row, QUERY, g, n, w->sizes->inputs);
    product(v->scores, count, w->query, w->input_row, 1, v->key_t, count, rows, w->sizes->inputs, v->split, 0, FULL);
    if (v->split < count) {
        load(w, v->sink_query, w->input_row, SINK_QUERY, g, n, w->sizes->inputs);
        product(v->scores + v->split, count, v->sink_query, w->input_row, 1, v->key_t + v->split, count, rows,
                w->sizes->inputs, count - v->split, 0, FULL);
    }
    float scaling = *(float *)address_of(w, SCALING, 0, 0);
    for (int64_t t = 0; t < w->tokens; t++) mask_logits(v, v->scores + t * count, n, t, scaling);
    memset(v->scores + w->tokens * count, 0, 4 * (BLOCK - w->tokens) * count);
    return rows;
}

/* scores[t] = exp(scores[t] - less[t]) */
static void exponentiate_logits(window *v, const float *less) {
    for (int64_t t = 0; t < v->w.tokens; t++)
        for (int64_t j = 0; j < v->columns; j += LANES) {
            vector *x = (vector *)(v->scores + t * v->columns + j), y = *x - less[t];
            *x = blend(y < -LIMIT, (vector){0}, exp_of_negative(y)); /* products with denormal numbers are slow */
        }
}

static void attend_window(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float largest[BLOCK], less[BLOCK], total[BLOCK], inverse[BLOCK];
    int64_t count = v->columns, rows = block_logits(v, g, n);
    reduce_rows(largest, v->scores, NULL, 0, count, 1);
    for (int64_t t = 0; t < BLOCK; t++) less[t] = largest[t] < EMPTY / 2 ? 0 : largest[t]; /* then all weights are 0 */
    exponentiate_logits(v, less);
    product(w->out, w->value_row, v->scores, count, 1, v->value, w->value_row, rows, count, w->value_row, 0, FULL);
    row_dot_products(total, v->scores, w->ones, 0, count);
    for (int64_t t = 0; t < w->tokens; t++) {
        int is_empty = largest[t] < EMPTY / 2;
        inverse[t] = is_empty ? 0 : 1 / total[t];
        total[t] = is_empty ? EMPTY : largest[t] + __builtin_logf(total[t]);
    }
    store(w, w->out, w->value_row, inverse, NEAR_OUTPUT, g, n, w->sizes->width);
    store_numbers(w, total, LOG_SIZE, g, n);
    store_numbers(w, largest, LARGEST, g, n);
}

static void window_gradients(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float size[BLOCK], e[BLOCK], grad_size[BLOCK], scaling = *(float *)address_of(w, SCALING, 0, 0);
    int64_t count = v->columns, rows = block_logits(v, g, n);
    load(w, w->out, w->value_row, GRAD_NEAR, g, n, w->sizes->width);
    load(w, w->output, w->value_row, NEAR_OUTPUT, g, n, w->sizes->width);
    load_numbers(w, size, LOG_SIZE, g, n);
    load_numbers(w, grad_size, GRAD_LOG_SIZE, g, n);
    for (int64_t t = 0; t < BLOCK; t++) size[t] = size[t] > EMPTY ? size[t] : 0; /* then all weights are 0 */
    exponentiate_logits(v, size);
    row_dot_products(e, w->out, w->output, w->value_row, w->value_row);
    product(v->pairs, count, w->out, w->value_row, 1, v->value_t, count, rows, w->sizes->width, count, 0, FULL);
    for (int64_t t = 0; t < rows; t++) {
        float *pairs = v->pairs + t * count, *weights = v->scores + t * count, add = grad_size[t] - e[t];
        for (int64_t j = 0; j < count; j++) pairs[j] = (pairs[j] + add) * weights[j] * scaling;
    }
    int64_t row = w->input_row, split = v->split;
    product(w->grad, row, v->pairs, count, 1, v->key, row, rows, split, row, 0, FULL);
    product(v->grad_key, row, v->pairs, 1, count, w->query, row, split, rows, row, 1, FULL);
    if (split < count) {
        product(v->grad_sink_query, row, v->pairs + split, count, 1, v->key + split * row, row, rows, count - split,
                row, 0, FULL);
        product(v->grad_key + split * row, row, v->pairs + split, 1, count, v->sink_query, row, count - split, rows,
                row, 1, FULL);
        store(w, v->grad_sink_query, row, w->ones, GRAD_SINK_QUERY, g, n, w->sizes->inputs);
    }
    product(v->grad_value, w->value_row, v->scores, 1, count, w->out, w->value_row, count, rows, w->value_row, 1, FULL);
    store(w, w->grad, w->input_row, w->ones, GRAD_NEAR_QUERY, g, n, w->sizes->inputs);
}

static void window_of_head(window *v, int is_backward) {
    work *w = &v->w;
    int64_t sinks = v->blocks * BLOCK, queries = w->sizes->queries, last = (queries - 1) / BLOCK * BLOCK;
    w->next_offset =
        -BLOCK; /* nothing comes after the sinks; what their block has beyond the columns, the places overwrite */
    for (int64_t n = 0; n < v->sinks; n += BLOCK) load_places(v, SINK_KEY, n, v->sinks, sinks + n);
    w->next_offset = BLOCK;
    for (int64_t n = 0; n < queries; n += BLOCK) {
        for (int64_t place = n ? n + sinks - BLOCK : 0; place < n + sinks; place += BLOCK)
            load_places(v, KEY, place, w->sizes->keys, place % sinks);
        w->tokens = queries - n < BLOCK ? queries - n : BLOCK;
        for (int64_t g = 0; g < w->sizes->groups; g++)
            if (is_backward)
                window_gradients(v, g, n);
            else
                attend_window(v, g, n);
        for (int64_t place = n; is_backward && place < (n == last ? n + sinks : n + BLOCK); place += BLOCK)
            store_place_gradients(v, GRAD_PLACE, place, w->sizes->keys, place % sinks);
    }
    for (int64_t n = 0; is_backward && n < v->sinks; n += BLOCK)
        store_place_gradients(v, GRAD_SINK, n, v->sinks, sinks + n);
}

/* `features` is how many places a query sees, `map` how many sinks. */
static int run_window(const sizes *s, const tensor *x, int is_backward) {
    window space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->sizes = s, w->tensors = x, w->input_row = round_up(s->inputs), w->value_row = round_up(s->width);
    v->window = s->features, v->sinks = s->map;
    v->blocks = (v->window + 2 * BLOCK - 2) / BLOCK;
    v->columns = v->blocks * BLOCK + round_up(v->sinks);
    v->split = v->sinks && x[SINK_QUERY].data ? v->blocks * BLOCK : v->columns;
    int64_t columns = v->columns + BLOCK, floats = columns * (3 * w->input_row + 3 * w->value_row + 2 * BLOCK + 2) +
                                                   BLOCK * (4 * w->input_row + 2 * w->value_row);
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 1024)) return 1;
    char *m = memory;
    memset(m, 0, 4 * floats + 1024);
    w->query = allocate(&m, BLOCK * w->input_row), w->grad = allocate(&m, BLOCK * w->input_row);
    v->sink_query = allocate(&m, BLOCK * w->input_row), v->grad_sink_query = allocate(&m, BLOCK * w->input_row);
    w->out = allocate(&m, BLOCK * w->value_row), w->output = allocate(&m, BLOCK * w->value_row);
    v->key = allocate(&m, columns * w->input_row), v->key_t = allocate(&m, columns * w->input_row),
    v->scores = allocate(&m, columns * BLOCK);
    v->value = allocate(&m, columns * w->value_row), v->hidden = allocate(&m, columns), w->ones = allocate(&m, columns);
    v->grad_key = allocate(&m, columns * w->input_row), v->grad_value = allocate(&m, columns * w->value_row);
    v->pairs = allocate(&m, columns * BLOCK), v->value_t = is_backward ? allocate(&m, columns * w->value_row) : NULL;
    for (int64_t j = 0; j < columns; j++) w->ones[j] = 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        w->batch = i / s->heads, w->head = i % s->heads;
        window_of_head(v, is_backward);
    }
    free(memory);
    return 0;
}

int window_forward(const sizes *s, const tensor *x) {
    return run_window(s, x, 0);
}

int window_backward(const sizes *s, const tensor *x) {
    return run_window(s, x, 1);
}
