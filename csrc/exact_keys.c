/* SPDX-License-Identifier: Apache-2.0 */
/* Exact attention to few keys behind a window: those with the largest scores of all that have left it.

   Key n leaves the window before query n, and displaces one of the keys that are kept, or itself; see leaving_key in
   step.c. Slots hold kept keys and those that leave during a block of queries. One call gathers what is displaced, for
   the far sums, and what is kept in the end; another, which chooses the same, attends, and joins its part to what the
   window and the far keys have left in the output. Where there is nothing to join, a single call does both. The
   backward pass chooses again; the gradient of a key is complete when it is displaced, as is that of the far key it
   becomes. */
#include "tiles.h"

typedef struct {
    work w;
    int64_t count, slots, step;   /* of kept keys, of slots in whole vectors, of keys that have left the window */
    int is_long;                  /* whether some query is beyond the trained length */
    int64_t *kept, *left, *spare; /* the slots of kept keys in their order, which key a slot has, BLOCK other slots */
    int64_t *row;                 /* of the key that a slot has, in the tensors */
    float *score;                 /* of kept keys in their order, infinite behind them */
    int32_t *position;
    char *is_empty;
    float *key, *value, *key_t, *distant, *distant_t, *distant_query, *scores, *distant_scores, *now, *hidden;
    float *grad, *pairs, *value_t, *grad_query, *grad_key, *grad_value; /* of the backward pass */
} exact;

static void turn_to(const exact *v, float *row, int64_t first, int64_t positions) {
    const sizes *s = v->w.sizes;
    float turn[2 * s->pairs + 1];
    make_turn(turn, (const float *)v->w.tensors[FREQUENCIES].data, s->pairs, first, positions);
    turn_pairs(row, turn, s->pairs, first, s->pair_step, s->pair_distance);
}

static int32_t number_at(const exact *v, int which, int64_t n) {
    return v->w.tensors[which].data ? *(int32_t *)address_of(&v->w, which, 0, n) : 0;
}

/* Up to BLOCK keys and values from row n on, into these slots; 0 for those that are no ordinary tokens. */
static void fill_slots(exact *v, const int64_t *slots, int key, int64_t n, int64_t count) {
    work *w = &v->w;
    int64_t p = w->input_row, d = w->value_row;
    w->tokens = count;
    load(w, w->key, p, key, 0, n, w->sizes->inputs);
    load(w, w->value, d, key + 1, 0, n, w->sizes->width);
    for (int64_t t = 0; t < count; t++) {
        int64_t slot = slots[t];
        if (key == KEY && !*address_of(w, MASK, 0, n + t))
            memset(w->key + t * p, 0, 4 * p), memset(w->value + t * d, 0, 4 * d);
        memcpy(v->key + slot * p, w->key + t * p, 4 * p);
        memcpy(v->value + slot * d, w->value + t * d, 4 * d);
        if (!v->is_long) continue;
        memcpy(v->distant + slot * p, w->key + t * p, 4 * p);
        turn_to(v, v->distant + slot * p, 0, -(int64_t)v->position[slot]);
    }
}

/* The keys that were kept before the first query, or empty slots. */
static void load_kept(exact *v) {
    work *w = &v->w;
    int64_t queries = w->sizes->queries;
    memset(v->key, 0, 4 * v->slots * w->input_row), memset(v->value, 0, 4 * v->slots * w->value_row);
    memset(v->distant, 0, 4 * v->slots * w->input_row);
    v->step = 0, v->is_long = 0;
    for (int64_t n = 0; n < queries && w->sizes->map; n++)
        v->is_long |= number_at(v, QUERY_POSITION, n) >= w->sizes->map;
    for (int64_t j = 0; j < v->slots; j++) v->now[j] = EMPTY, v->is_empty[j] = 1, v->score[j] = __builtin_inff();
    for (int64_t j = 0; j < BLOCK; j++) v->spare[j] = v->count + j;
    for (int64_t j = 0; j < v->count; j++) {
        int32_t age = number_at(v, OLD_KEPT + 3, j);
        v->kept[j] = j, v->is_empty[j] = !age, v->left[j] = 1 - (int64_t)age, v->now[j] = age ? 0 : EMPTY;
        v->position[j] = number_at(v, OLD_KEPT + 4, j);
        v->score[j] = age ? *(float *)address_of(w, OLD_KEPT + 2, 0, j) : -__builtin_inff();
    }
    for (int64_t j = 0; j < v->count && w->tensors[OLD_KEPT].data; j += BLOCK)
        fill_slots(v, v->kept + j, OLD_KEPT, j, v->count - j < BLOCK ? v->count - j : BLOCK);
}

/* The slot of what is displaced as key n, in slot `own`, leaves the window. */
static int64_t choose(exact *v, int64_t n, int64_t own) {
    int64_t place = v->count - 1, gone;
    float own_score = *(float *)address_of(&v->w, LEAVING_SCORE, 0, n), smallest = __builtin_inff();
    vector least = *(vector *)v->score;
    for (int64_t j = LANES; j < v->count; j += LANES) least = minimum_of(*(vector *)(v->score + j), least);
    for (int l = 0; l < LANES; l++) smallest = least[l] < smallest ? least[l] : smallest;
    v->left[own] = ++v->step, v->is_empty[own] = 0;
    if (!(own_score > smallest)) return own;
    while (place && v->score[place] != smallest) place--;
    gone = v->kept[place];
    memmove(v->kept + place, v->kept + place + 1, sizeof(int64_t) * (v->count - 1 - place));
    memmove(v->score + place, v->score + place + 1, sizeof(float) * (v->count - 1 - place));
    v->kept[v->count - 1] = own, v->score[v->count - 1] = own_score;
    v->now[own] = 0, v->now[gone] = EMPTY;
    return gone;
}

/* Row n of what is displaced before each query: the key as the feature map sees it, its value and its age. */
static void store_gone(exact *v, int64_t n, int64_t slot) {
    work *w = &v->w;
    const sizes *s = w->sizes;
    float *key = (float *)address_of(w, GONE_KEY, 0, n), *value = (float *)address_of(w, GONE_VALUE, 0, n);
    int is_nothing = slot < 0 || v->is_empty[slot];
    *(float *)address_of(w, GONE_AGE, 0, n) = is_nothing ? 0 : v->step - v->left[slot];
    if (is_nothing) {
        memset(key, 0, 4 * s->inputs), memset(value, 0, 4 * s->width);
        return;
    }
    memcpy(key, v->key + slot * w->input_row, 4 * s->inputs);
    memcpy(value, v->value + slot * w->value_row, 4 * s->width);
    if (s->pair_start < s->pairs) turn_to(v, key, s->pair_start, -(int64_t)v->position[slot]);
}

/* Logits of a block of queries, with distant keys at the trained length; see attend_near in step.c. */
static void slot_logits(exact *v, int64_t g, int64_t n) {
    work *w = &v->w;
    int64_t p = w->input_row, columns = v->slots, limit = w->sizes->map;
    float scaling = *(float *)address_of(w, EXACT_SCALING, 0, 0);
    load(w, w->query, p, QUERY, g, n, w->sizes->inputs);
    half_product(w, v->scores, columns, w->query, p, 1, v->key_t, columns, BLOCK, p, columns, 0, FULL);
    if (v->is_long) {
        memcpy(v->distant_query, w->query, 4 * BLOCK * p);
        for (int64_t t = 0; t < w->tokens; t++)
            turn_to(v, v->distant_query + t * p, 0, limit - 1 - (int64_t)number_at(v, QUERY_POSITION, n + t));
        half_product(w, v->distant_scores, columns, v->distant_query, p, 1, v->distant_t, columns, BLOCK, p, columns, 0,
                     FULL);
    }
    for (int64_t t = 0; t < w->tokens; t++) {
        float *row = v->scores + t * columns;
        int64_t farthest = number_at(v, QUERY_POSITION, n + t) - limit;
        for (int64_t j = 0; j < columns && v->is_long && farthest >= 0; j++)
            row[j] = v->position[j] <= farthest ? v->distant_scores[t * columns + j] : row[j];
        for (int64_t j = 0; j < columns; j += LANES)
            *(vector *)(row + j) = *(vector *)(row + j) * scaling + *(vector *)(v->hidden + t * columns + j);
    }
}

/* The output of near and far keys becomes that of kept keys, too. */
static void attend_slots(exact *v, int64_t g, int64_t n) {
    work *w = &v->w;
    int64_t columns = v->slots, d = w->value_row;
    float top[BLOCK], total[BLOCK], by_lane[BLOCK * LANES], size[BLOCK];
    prefetch_rows(w, 3, EXACT_OUTPUT, g, n, n + w->tokens);
    slot_logits(v, g, n);
    reduce_rows(top, v->scores, NULL, 0, columns, 1);
    memset(by_lane, 0, sizeof(by_lane));
    for (int64_t t = 0; t < w->tokens; t++) {
        vector sum = {0};
        float less = top[t] < EMPTY / 2 ? 0 : top[t];
        for (int64_t j = 0; j < columns; j += LANES) {
            vector *x = (vector *)(v->scores + t * columns + j), y = *x - less;
            /* products with denormal numbers are slow */
            *x = rounded(w, blend(y < -LIMIT, (vector){0}, exp_of_negative(y)));
            sum += *x;
        }
        *(vector *)(by_lane + t * LANES) = sum;
    }
    row_dot_products(total, by_lane, w->ones, 0, LANES);
    half_product(w, w->out, d, v->scores, columns, 1, v->value, d, BLOCK, columns, d, 0, FULL);
    load_numbers(w, size, EXACT_SIZE, g, n);
    for (int64_t t = 0; t < w->tokens; t++) {
        if (!total[t]) continue; /* nothing is kept */
        float *to = (float *)address_of(w, EXACT_OUTPUT, g, n + t), *row = w->out + t * d;
        float of_kept = top[t] + __builtin_logf(total[t]), gap = size[t] - of_kept;
        float share = 1 / (1 + __builtin_expf(gap)), own = share / total[t], larger = gap > 0 ? size[t] : of_kept;
        for (int64_t j = 0; j < w->sizes->width; j++) to[j] += own * row[j] - share * to[j];
        *(float *)address_of(w, EXACT_SIZE, g, n + t) = larger + __builtin_log1pf(__builtin_expf(gap > 0 ? -gap : gap));
    }
}

/* A block of queries adds to the gradients of the slots, and gets its own. */
static void differentiate_slots(exact *v, int64_t g, int64_t n) {
    work *w = &v->w;
    int64_t columns = v->slots, p = w->input_row, d = w->value_row;
    float scaling = *(float *)address_of(w, EXACT_SCALING, 0, 0), size[BLOCK], own[BLOCK], of_size[BLOCK];
    slot_logits(v, g, n);
    load(w, v->grad, d, GRAD_EXACT, g, n, w->sizes->width);
    load(w, w->out, d, EXACT_OUTPUT, g, n, w->sizes->width);
    load_numbers(w, size, EXACT_SIZE, g, n), load_numbers(w, of_size, GRAD_EXACT_SIZE, g, n);
    row_dot_products(own, v->grad, w->out, d, d);
    product(v->pairs, columns, v->grad, d, 1, v->value_t, columns, BLOCK, d, columns, 0, FULL);
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t j = 0; j < columns; j += LANES) {
            vector *x = (vector *)(v->scores + t * columns + j), *pair = (vector *)(v->pairs + t * columns + j);
            vector y = minimum_of(*x - (size[t] < EMPTY / 2 ? 0 : size[t]), (vector){0});
            *x = blend(y < -LIMIT, (vector){0}, exp_of_negative(y));
            *pair = *x * (*pair - (own[t] - of_size[t])) * scaling;
        }
    product(v->grad_query, p, v->pairs, columns, 1, v->key, p, BLOCK, columns, p, 0, FULL);
    store(w, v->grad_query, p, w->ones, GRAD_EXACT_QUERY, g, n, w->sizes->inputs);
    product(v->grad_key, p, v->pairs, 1, columns, w->query, p, columns, BLOCK, p, 1, FULL);
    product(v->grad_value, d, v->scores, 1, columns, v->grad, d, columns, BLOCK, d, 1, FULL);
}

/* No later query sees this slot: its gradients, and those in row n of what it becomes, are those of its key. */
static void store_gradients(exact *v, int64_t slot, int key, int64_t n) {
    work *w = &v->w;
    const sizes *s = w->sizes;
    int64_t p = w->input_row, d = w->value_row;
    float *of_key = v->grad_key + slot * p, *of_value = v->grad_value + slot * d;
    if (v->is_empty[slot]) return;
    w->tokens = 1;
    load(w, w->key, p, key, 0, n, s->inputs), load(w, w->value, d, key + 1, 0, n, s->width);
    if (key == GRAD_GONE_KEY && s->pair_start < s->pairs) turn_to(v, w->key, s->pair_start, v->position[slot]);
    add_rows(of_key, w->key, 1, p), add_rows(of_value, w->value, 1, d);
    store(w, of_key, p, w->ones, GRAD_LEAVING_KEY, 0, v->row[slot], s->inputs);
    store(w, of_value, d, w->ones, GRAD_LEAVING_KEY + 1, 0, v->row[slot], s->width);
    memset(of_key, 0, 4 * p), memset(of_value, 0, 4 * d);
}

static void store_kept(exact *v) {
    work *w = &v->w;
    for (int64_t j = 0; j < v->count; j++) {
        int64_t slot = v->kept[j];
        int is_empty = v->is_empty[slot];
        w->tokens = 1;
        store(w, v->key + slot * w->input_row, w->input_row, w->ones, NEW_KEPT, 0, j, w->sizes->inputs);
        store(w, v->value + slot * w->value_row, w->value_row, w->ones, NEW_KEPT + 1, 0, j, w->sizes->width);
        *(float *)address_of(w, NEW_KEPT + 2, 0, j) = is_empty ? 0 : v->score[j];
        *(int32_t *)address_of(w, NEW_KEPT + 3, 0, j) = is_empty ? 0 : (int32_t)(v->step - v->left[slot] + 1);
        if (w->tensors[NEW_KEPT + 4].data) *(int32_t *)address_of(w, NEW_KEPT + 4, 0, j) = v->position[slot];
    }
}

static void exact_of_head(exact *v, int is_backward) {
    work *w = &v->w;
    int64_t queries = w->sizes->queries, columns = v->slots, p = w->input_row, d = w->value_row;
    int gathers = w->tensors[GONE_KEY].data != NULL, attends = w->tensors[EXACT_OUTPUT].data != NULL;
    load_kept(v);
    memset(v->grad_key, 0, 4 * columns * p), memset(v->grad_value, 0, 4 * columns * d);
    for (int64_t n = 0; n < queries; n += BLOCK) {
        int64_t tokens = queries - n < BLOCK ? queries - n : BLOCK;
        for (int64_t t = 0; t < tokens; t++)
            v->position[v->spare[t]] = number_at(v, LEAVING_POSITION, n + t), v->row[v->spare[t]] = n + t;
        fill_slots(v, v->spare, KEY, n, tokens);
        for (int64_t t = 0; t < tokens; t++) {
            int is_real = *address_of(w, MASK, 0, n + t);
            int64_t gone = is_real ? choose(v, n + t, v->spare[t]) : -1;
            if (is_real) v->spare[t] = gone;
            if (gathers) store_gone(v, n + t, gone), prefetch_next();
            memcpy(v->hidden + t * columns, v->now, 4 * columns);
        }
        if (!attends) continue;
        transpose(v->key_t, columns, v->key, p, columns, p);
        if (v->is_long) transpose(v->distant_t, columns, v->distant, p, columns, p);
        if (is_backward) transpose(v->value_t, columns, v->value, d, columns, d);
        for (int64_t g = 0; g < w->sizes->groups; g++) {
            w->tokens = tokens;
            is_backward ? differentiate_slots(v, g, n) : attend_slots(v, g, n);
        }
        for (int64_t t = 0; t < tokens && is_backward; t++)
            if (*address_of(w, MASK, 0, n + t)) store_gradients(v, v->spare[t], GRAD_GONE_KEY, n + t);
    }
    for (int64_t j = 0; j < v->count && is_backward; j++) store_gradients(v, v->kept[j], GRAD_KEPT_KEY, j);
    if (gathers) store_kept(v);
}

static int exact_keys(const sizes *s, const tensor *x, int is_backward) {
    exact space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->sizes = s, w->tensors = x, w->input_row = round_up(s->inputs), w->value_row = round_up(s->width);
    w->next_offset = BLOCK, w->in_tiles = !is_backward && takes_tiles(x);
    v->count = s->features, v->slots = round_up(v->count + BLOCK);
    int64_t p = w->input_row, d = w->value_row, slots = v->slots;
    int64_t floats = BLOCK * (4 * p + 3 * d + 4 * slots) + slots * (5 * p + 3 * d + 12) + v->count * 2 + 3 * BLOCK;
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 4096)) return 1;
    char *m = memory;
    w->query = allocate(&m, BLOCK * p), w->key = allocate(&m, BLOCK * p), w->value = allocate(&m, BLOCK * d);
    w->out = allocate(&m, BLOCK * d), v->distant_query = allocate(&m, BLOCK * p), w->ones = allocate(&m, BLOCK);
    v->scores = allocate(&m, BLOCK * slots), v->distant_scores = allocate(&m, BLOCK * slots);
    v->hidden = allocate(&m, BLOCK * slots), v->now = allocate(&m, slots), v->score = allocate(&m, slots);
    v->key = allocate(&m, slots * p), v->key_t = allocate(&m, slots * p), v->value = allocate(&m, slots * d);
    v->distant = allocate(&m, slots * p), v->distant_t = allocate(&m, slots * p);
    v->position = (int32_t *)allocate(&m, slots), v->is_empty = (char *)allocate(&m, slots);
    v->left = (int64_t *)allocate(&m, 2 * slots), v->kept = (int64_t *)allocate(&m, 2 * v->count);
    v->spare = (int64_t *)allocate(&m, 2 * BLOCK);
    v->row = (int64_t *)allocate(&m, 2 * slots);
    v->grad = allocate(&m, BLOCK * d), v->pairs = allocate(&m, BLOCK * slots), v->value_t = allocate(&m, d * slots);
    v->grad_query = allocate(&m, BLOCK * p), v->grad_key = allocate(&m, slots * p);
    v->grad_value = allocate(&m, slots * d);
    for (int64_t j = 0; j < BLOCK; j++) w->ones[j] = 1;
    begin_tiles(w);
    for (int64_t i = s->start; i < s->stop; i++) {
        w->batch = i / s->heads, w->head = i % s->heads;
        exact_of_head(v, is_backward);
    }
    end_tiles(w);
    free(memory);
    return 0;
}

/* `features` is how many keys are kept, `map` the trained length or 0, and `pair_start` how many pairs a map sees. */
int exact_keys_forward(const sizes *s, const tensor *x) {
    return exact_keys(s, x, 0);
}

int exact_keys_backward(const sizes *s, const tensor *x) {
    return exact_keys(s, x, 1);
}
