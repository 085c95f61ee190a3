"""C source of softmax attention with few keys (the slots of `linformer`, landmarks) or few queries. Forward only.

Keys come by the hundred, transposed once, and meet all blocks of queries; with more keys than that the sums of each
block wait in memory for the next hundred, rescaled to a running maximum (FlashAttention 2022, algorithm 1).
"""

SLOTS = r"""
#define SLOTS 128 /* keys at a time */

enum { SLOT_OUTPUT = MASK + 1 };

typedef struct {
    work w;
    int64_t columns, hides; /* keys at hand in whole vectors, and whether any of them is hidden */
    float *key_t, *value, *hidden, *scores, *sums, *largest, *total;
} slots;

/* Up to SLOTS keys from `first` on; 0 and hidden where there are none. */
static void load_slots(slots *v, int64_t first) {
    work *w = &v->w;
    int64_t left = w->s->keys - first;
    v->columns = whole(left < SLOTS ? left : SLOTS), v->hides = left < v->columns;
    for (int64_t j = 0; j < v->columns; j += C) {
        w->c = left < j ? 0 : left - j < C ? left - j : C;
        load(w, w->key, w->p, KEY, 0, first + j, w->s->inputs);
        load(w, v->value + j * w->d, w->d, VALUE, 0, first + j, w->s->width);
        for (int64_t t = 0; t < C; t++) {
            int is_hidden = t >= w->c || (w->x[MASK].data && !*at(w, MASK, 0, first + j + t));
            v->hidden[j + t] = is_hidden ? EMPTY : 0;
            if (!is_hidden) continue;
            v->hides |= j + t < v->columns;
            memset(w->key + t * w->p, 0, 4 * w->p); /* what is hidden may be anything */
            memset(v->value + (j + t) * w->d, 0, 4 * w->d);
        }
        transpose(v->key_t + j, SLOTS, w->key, w->p, C, w->p);
    }
    for (int which = KEY; which <= VALUE; which++) {
        expect(w, which, which, 0, first + SLOTS, w->s->keys);
        ahead[which].left = left < SLOTS ? 0 : left < 2 * SLOTS ? left - SLOTS : SLOTS;
    }
}

/* Weights exp(score - less) and their sums. */
static void weigh_slots(slots *v, const float *less, float *total) {
    float parts[C * LANES];
    for (int64_t t = 0; t < C; t++) {
        vec sum = {0};
        for (int64_t j = 0; j < v->columns; j += LANES) {
            vec *x = (vec *)(v->scores + t * v->columns + j);
            sum += *x = exp_of_negative(*x - less[t]);
        }
        *(vec *)(parts + t * LANES) = sum;
    }
    row_dots(total, parts, v->w.one, 0, LANES);
}

static void attend_slots(slots *v, int64_t g, int64_t n, int64_t first) {
    work *w = &v->w;
    int64_t number = g * (w->s->queries + C) + n, count = v->columns, is_only = w->s->keys <= SLOTS;
    float *sums = v->sums + (is_only ? 0 : number * w->d), *largest = v->largest + (is_only ? 0 : number);
    float *all_total = v->total + (is_only ? 0 : number), top[C], total[C];
    w->c = w->s->queries - n < C ? w->s->queries - n : C;
    load(w, w->query, w->p, QUERY, g, n, w->s->inputs);
    expect(w, 3, SLOT_OUTPUT, g, n, n + w->c);
    product(v->scores, count, w->query, w->p, 1, v->key_t, SLOTS, C, w->p, count, 0, FULL);
    for (int64_t t = 0; t < C && v->hides; t++)
        for (int64_t j = 0; j < count; j += LANES)
            *(vec *)(v->scores + t * count + j) += *(vec *)(v->hidden + j);
    reduce_rows(top, v->scores, NULL, 0, count, 1);
    for (int64_t t = 0; t < w->c && first; t++) {
        float now = top[t] > largest[t] ? top[t] : largest[t], factor = __builtin_expf(largest[t] - now);
        for (int64_t j = 0; j < w->d; j++) sums[t * w->d + j] *= factor;
        all_total[t] *= factor, top[t] = now;
    }
    weigh_slots(v, top, total);
    int64_t rows = (w->c + ROWS - 1) / ROWS * ROWS;
    product(sums, w->d, v->scores, count, 1, v->value, w->d, rows, count, w->d, first > 0, FULL);
    for (int64_t t = 0; t < w->c; t++) {
        largest[t] = top[t];
        all_total[t] = total[t] + (first ? all_total[t] : 0);
    }
    if (first + SLOTS < w->s->keys) return;
    for (int64_t t = 0; t < w->c; t++) total[t] = 1 / all_total[t];
    store(w, sums, w->d, total, SLOT_OUTPUT, g, n, w->s->width);
}

int slots_forward(const sizes *s, const tensor *x) {
    slots space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->s = s, w->x = x, w->p = whole(s->inputs), w->d = whole(s->width), w->next = C;
    int64_t rows = s->keys <= SLOTS ? C : s->groups * (s->queries + C);
    int64_t floats = C * (2 * w->p + SLOTS) + SLOTS * (w->p + w->d + 1) + rows * (w->d + 2) + LANES;
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 1024)) return 1;
    char *m = memory;
    w->query = take(&m, C * w->p), w->key = take(&m, C * w->p), v->scores = take(&m, C * SLOTS);
    v->key_t = take(&m, SLOTS * w->p), v->value = take(&m, SLOTS * w->d);
    v->hidden = take(&m, SLOTS), w->one = take(&m, LANES);
    v->sums = take(&m, rows * w->d), v->largest = take(&m, rows), v->total = take(&m, rows);
    for (int64_t j = 0; j < LANES; j++) w->one[j] = 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        w->b = i / s->heads, w->h = i % s->heads;
        for (int64_t first = 0; first < s->keys; first += SLOTS) {
            load_slots(v, first);
            for (int64_t g = 0; g < s->groups; g++)
                for (int64_t n = 0; n < s->queries; n += C) attend_slots(v, g, n, first);
        }
    }
    free(memory);
    return 0;
}
"""
