/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax attention with few keys (the slots of `linformer`, landmarks) or few queries. Forward only.

   Keys come by the hundred, transposed once, and meet all blocks of queries; with more keys than that the sums of each
   block wait in memory for the next hundred, rescaled to a running maximum (FlashAttention 2022, algorithm 1). */
#include "blocks.h"

#define SLOTS 128 /* keys at a time */

typedef struct {
    work w;
    int64_t columns, hides; /* keys at hand in whole vectors, and whether any of them is hidden */
    float *key_t, *value, *hidden, *scores, *sums, *largest, *total;
} slots;

/* Up to SLOTS keys from `first` on; 0 and hidden where there are none. */
static void load_slots(slots *v, int64_t first) {
    work *w = &v->w;
    int64_t left = w->sizes->keys - first;
    v->columns = round_up(left < SLOTS ? left : SLOTS), v->hides = left < v->columns;
    for (int64_t j = 0; j < v->columns; j += BLOCK) {
        w->tokens = left < j ? 0 : left - j < BLOCK ? left - j : BLOCK;
        load(w, w->key, w->input_row, KEY, 0, first + j, w->sizes->inputs);
        load(w, v->value + j * w->value_row, w->value_row, VALUE, 0, first + j, w->sizes->width);
        for (int64_t t = 0; t < BLOCK; t++) {
            int is_hidden = t >= w->tokens || (w->tensors[MASK].data && !*address_of(w, MASK, 0, first + j + t));
            v->hidden[j + t] = is_hidden ? EMPTY : 0;
            if (!is_hidden) continue;
            v->hides |= j + t < v->columns;
            memset(w->key + t * w->input_row, 0, 4 * w->input_row); /* what is hidden may be anything */
            memset(v->value + (j + t) * w->value_row, 0, 4 * w->value_row);
        }
        transpose(v->key_t + j, SLOTS, w->key, w->input_row, BLOCK, w->input_row);
    }
    for (int which = KEY; which <= VALUE; which++) {
        prefetch_rows(w, which, which, 0, first + SLOTS, w->sizes->keys);
        prefetch_streams[which].left = left < SLOTS ? 0 : left < 2 * SLOTS ? left - SLOTS : SLOTS;
    }
}

/* Weights exp(score - less) and their sums. */
static void exponentiate_slots(slots *v, const float *less, float *total) {
    float parts[BLOCK * LANES];
    for (int64_t t = 0; t < BLOCK; t++) {
        vector sum = {0};
        for (int64_t j = 0; j < v->columns; j += LANES) {
            vector *x = (vector *)(v->scores + t * v->columns + j);
            sum += *x = exp_of_negative(*x - less[t]);
        }
        *(vector *)(parts + t * LANES) = sum;
    }
    row_dot_products(total, parts, v->w.ones, 0, LANES);
}

static void attend_slots(slots *v, int64_t g, int64_t n, int64_t first) {
    work *w = &v->w;
    int64_t number = g * (w->sizes->queries + BLOCK) + n, count = v->columns, is_only = w->sizes->keys <= SLOTS;
    float *sums = v->sums + (is_only ? 0 : number * w->value_row), *largest = v->largest + (is_only ? 0 : number);
    float *all_total = v->total + (is_only ? 0 : number), top[BLOCK], total[BLOCK];
    w->tokens = w->sizes->queries - n < BLOCK ? w->sizes->queries - n : BLOCK;
    load(w, w->query, w->input_row, QUERY, g, n, w->sizes->inputs);
    prefetch_rows(w, 3, SLOT_OUTPUT, g, n, n + w->tokens);
    product(v->scores, count, w->query, w->input_row, 1, v->key_t, SLOTS, BLOCK, w->input_row, count, 0, FULL);
    for (int64_t t = 0; t < BLOCK && v->hides; t++)
        for (int64_t j = 0; j < count; j += LANES) *(vector *)(v->scores + t * count + j) += *(vector *)(v->hidden + j);
    reduce_rows(top, v->scores, NULL, 0, count, 1);
    for (int64_t t = 0; t < w->tokens && first; t++) {
        float now = top[t] > largest[t] ? top[t] : largest[t], factor = __builtin_expf(largest[t] - now);
        for (int64_t j = 0; j < w->value_row; j++) sums[t * w->value_row + j] *= factor;
        all_total[t] *= factor, top[t] = now;
    }
    exponentiate_slots(v, top, total);
    int64_t rows = (w->tokens + ROWS - 1) / ROWS * ROWS;
    product(sums, w->value_row, v->scores, count, 1, v->value, w->value_row, rows, count, w->value_row, first > 0,
            FULL);
    for (int64_t t = 0; t < w->tokens; t++) {
        largest[t] = top[t];
        all_total[t] = total[t] + (first ? all_total[t] : 0);
    }
    if (first + SLOTS < w->sizes->keys) return;
    for (int64_t t = 0; t < w->tokens; t++) total[t] = 1 / all_total[t];
    store(w, sums, w->value_row, total, SLOT_OUTPUT, g, n, w->sizes->width);
}

int slots_forward(const sizes *s, const tensor *x) {
    slots space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->sizes = s, w->tensors = x, w->input_row = round_up(s->inputs), w->value_row = round_up(s->width),
    w->next_offset = BLOCK;
    int64_t rows = s->keys <= SLOTS ? BLOCK : s->groups * (s->queries + BLOCK);
    int64_t floats = BLOCK * (2 * w->input_row + SLOTS) + SLOTS * (w->input_row + w->value_row + 1) +
                     rows * (w->value_row + 2) + LANES;
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 1024)) return 1;
    char *m = memory;
    w->query = allocate(&m, BLOCK * w->input_row), w->key = allocate(&m, BLOCK * w->input_row),
    v->scores = allocate(&m, BLOCK * SLOTS);
    v->key_t = allocate(&m, SLOTS * w->input_row), v->value = allocate(&m, SLOTS * w->value_row);
    v->hidden = allocate(&m, SLOTS), w->ones = allocate(&m, LANES);
    v->sums = allocate(&m, rows * w->value_row), v->largest = allocate(&m, rows), v->total = allocate(&m, rows);
    for (int64_t j = 0; j < LANES; j++) w->ones[j] = 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        w->batch = i / s->heads, w->head = i % s->heads;
        for (int64_t first = 0; first < s->keys; first += SLOTS) {
            load_slots(v, first);
            for (int64_t g = 0; g < s->groups; g++)
                for (int64_t n = 0; n < s->queries; n += BLOCK) attend_slots(v, g, n, first);
        }
    }
    free(memory);
    return 0;
}
