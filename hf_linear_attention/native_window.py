"""C source of exact softmax attention to a window of places and to sinks: one block of queries after the other.

Keys and values of a window lie in a ring of blocks, so that each is fetched once; the sinks stay behind them:

    columns   | block 3 | block 4 | block 2 | sinks |      of scores [C, columns], keys^T, values^T and `hidden`

The backward pass makes the weights again from the logarithm of their sum, as FlashAttention (Dao 2022) does.
"""

WINDOW = r"""
enum { SINK_KEY = MASK + 1, SINK_VALUE, SEEN, SCALING, NEAR_OUTPUT, LOG_SIZE, LARGEST, GRAD_NEAR, GRAD_SIZE,
       GRAD_NEAR_QUERY, GRAD_PLACE, GRAD_SINK = GRAD_PLACE + 2 }; /* keys, then values */

typedef struct {
    work w;
    int64_t window, sinks, blocks, columns;
    float *hidden; /* EMPTY where a place cannot be seen, else 0 */
    float *key, *key_t, *value, *value_t, *scores, *pairs, *grad_key, *grad_value;
} window;

/* A block of keys and values from token n on; value_t is for the backward pass. */
static void load_part(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    float *key = v->key + column * w->p, *value = v->value + column * w->d;
    w->c = length < n ? 0 : length - n < C ? length - n : C;
    load(w, key, w->p, which, 0, n, w->s->inputs);
    load(w, value, w->d, which == KEY ? VALUE : SINK_VALUE, 0, n, w->s->width);
    for (int64_t t = 0; t < C; t++) {
        int is_visible = t < w->c && (which != KEY || *at(w, MASK, 0, n + t));
        v->hidden[column + t] = is_visible ? 0 : EMPTY;
        if (is_visible) continue;
        memset(key + t * w->p, 0, 4 * w->p);
        memset(value + t * w->d, 0, 4 * w->d);
    }
    transpose(v->key_t + column, v->columns, key, w->p, C, w->p);
    if (v->value_t) transpose(v->value_t + column, v->columns, value, w->d, C, w->d);
}

/* The gradients of such a block are complete. */
static void store_part(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    float *key = v->grad_key + column * w->p, *value = v->grad_value + column * w->d;
    w->c = length < n ? 0 : length - n < C ? length - n : C;
    store(w, key, w->p, w->one, which, 0, n, w->s->inputs);
    store(w, value, w->d, w->one, which + 1, 0, n, w->s->width);
    memset(key, 0, 4 * C * w->p);
    memset(value, 0, 4 * C * w->d);
}

/* Scaled logits of the query n + t, EMPTY where it sees nothing. */
static void show(const window *v, float *scores, int64_t n, int64_t t, float scaling) {
    const char *seen = v->sinks ? at(&v->w, SEEN, 0, n + t) : NULL;
    ints lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int64_t block = 0; block < v->blocks; block++) {
        int64_t column = (n / C + block) % v->blocks * C;
        for (int32_t j = 0; j < C; j += LANES) {
            vec *x = (vec *)(scores + column + j);
            ints offset = lane + (int32_t)(block * C + j - t);
            vec y = *x * scaling + *(vec *)(v->hidden + column + j);
            *x = choose((offset >= 0) & (offset < (int32_t)v->window), y, all(EMPTY));
        }
    }
    float *sink = scores + v->blocks * C;
    for (int64_t j = 0; j < v->columns - v->blocks * C; j++)
        sink[j] = j < v->sinks && seen[j] ? sink[j] * scaling : EMPTY;
}

/* Logits of a block of queries; the number of its rows, in whole fours. */
static int64_t show_block(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    int64_t rows = (w->c + ROWS - 1) / ROWS * ROWS, count = v->columns;
    load(w, w->query, w->p, QUERY, g, n, w->s->inputs);
    product(v->scores, count, w->query, w->p, 1, v->key_t, count, rows, w->s->inputs, count, 0, FULL);
    for (int64_t t = 0; t < w->c; t++) show(v, v->scores + t * count, n, t, *(float *)at(w, SCALING, 0, 0));
    memset(v->scores + w->c * count, 0, 4 * (C - w->c) * count);
    return rows;
}

/* scores[t] = exp(scores[t] - less[t]) */
static void weigh(window *v, const float *less) {
    for (int64_t t = 0; t < v->w.c; t++)
        for (int64_t j = 0; j < v->columns; j += LANES) {
            vec *x = (vec *)(v->scores + t * v->columns + j), y = *x - less[t];
            *x = choose(y < -LIMIT, (vec){0}, exp_of_negative(y)); /* products with denormal numbers are slow */
        }
}

static void attend_window(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float largest[C], total[C], inverse[C];
    int64_t count = v->columns, rows = show_block(v, g, n);
    reduce_rows(largest, v->scores, NULL, 0, count, 1);
    weigh(v, largest);
    product(w->out, w->d, v->scores, count, 1, v->value, w->d, rows, count, w->d, 0, FULL);
    row_dots(total, v->scores, w->one, 0, count);
    for (int64_t t = 0; t < w->c; t++) {
        inverse[t] = 1 / total[t];
        total[t] = largest[t] > EMPTY ? largest[t] + __builtin_logf(total[t]) : EMPTY;
    }
    store(w, w->out, w->d, inverse, NEAR_OUTPUT, g, n, w->s->width);
    store_numbers(w, total, LOG_SIZE, g, n);
    store_numbers(w, largest, LARGEST, g, n);
}

static void window_gradients(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float size[C], e[C], grad_size[C], scaling = *(float *)at(w, SCALING, 0, 0);
    int64_t count = v->columns, rows = show_block(v, g, n);
    load(w, w->out, w->d, GRAD_NEAR, g, n, w->s->width);
    load(w, w->output, w->d, NEAR_OUTPUT, g, n, w->s->width);
    load_numbers(w, size, LOG_SIZE, g, n);
    load_numbers(w, grad_size, GRAD_SIZE, g, n);
    for (int64_t t = 0; t < C; t++) size[t] = size[t] > EMPTY ? size[t] : 0; /* then all weights are 0 */
    weigh(v, size);
    row_dots(e, w->out, w->output, w->d, w->d);
    product(v->pairs, count, w->out, w->d, 1, v->value_t, count, rows, w->s->width, count, 0, FULL);
    for (int64_t t = 0; t < rows; t++) {
        float *pairs = v->pairs + t * count, *weights = v->scores + t * count, add = grad_size[t] - e[t];
        for (int64_t j = 0; j < count; j++) pairs[j] = (pairs[j] + add) * weights[j] * scaling;
    }
    product(w->grad, w->p, v->pairs, count, 1, v->key, w->p, rows, count, w->p, 0, FULL);
    product(v->grad_key, w->p, v->pairs, 1, count, w->query, w->p, count, rows, w->p, 1, FULL);
    product(v->grad_value, w->d, v->scores, 1, count, w->out, w->d, count, rows, w->d, 1, FULL);
    store(w, w->grad, w->p, w->one, GRAD_NEAR_QUERY, g, n, w->s->inputs);
}

static void window_of_head(window *v, int is_backward) {
    work *w = &v->w;
    int64_t sinks = v->blocks * C, queries = w->s->queries, last = (queries - 1) / C * C;
    w->next = -C; /* nothing comes after the sinks; what their block has beyond the columns, the places overwrite */
    for (int64_t n = 0; n < v->sinks; n += C) load_part(v, SINK_KEY, n, v->sinks, sinks + n);
    w->next = C;
    for (int64_t n = 0; n < queries; n += C) {
        for (int64_t place = n ? n + sinks - C : 0; place < n + sinks; place += C)
            load_part(v, KEY, place, w->s->keys, place % sinks);
        w->c = queries - n < C ? queries - n : C;
        for (int64_t g = 0; g < w->s->groups; g++)
            if (is_backward) window_gradients(v, g, n);
            else attend_window(v, g, n);
        for (int64_t place = n; is_backward && place < (n == last ? n + sinks : n + C); place += C)
            store_part(v, GRAD_PLACE, place, w->s->keys, place % sinks);
    }
    for (int64_t n = 0; is_backward && n < v->sinks; n += C) store_part(v, GRAD_SINK, n, v->sinks, sinks + n);
}

/* `features` is how many places a query sees, `map` how many sinks. */
static int run_window(const sizes *s, const tensor *x, int is_backward) {
    window space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->s = s, w->x = x, w->p = whole(s->inputs), w->d = whole(s->width);
    v->window = s->features, v->sinks = s->map;
    v->blocks = (v->window + 2 * C - 2) / C;
    v->columns = v->blocks * C + whole(v->sinks);
    int64_t columns = v->columns + C, floats = columns * (3 * w->p + 3 * w->d + 2 * C + 2) + C * (2 * w->p + 2 * w->d);
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 1024)) return 1;
    char *m = memory;
    memset(m, 0, 4 * floats + 1024);
    w->query = take(&m, C * w->p), w->grad = take(&m, C * w->p);
    w->out = take(&m, C * w->d), w->output = take(&m, C * w->d);
    v->key = take(&m, columns * w->p), v->key_t = take(&m, columns * w->p), v->scores = take(&m, columns * C);
    v->value = take(&m, columns * w->d), v->hidden = take(&m, columns), w->one = take(&m, columns);
    v->grad_key = take(&m, columns * w->p), v->grad_value = take(&m, columns * w->d);
    v->pairs = take(&m, columns * C), v->value_t = is_backward ? take(&m, columns * w->d) : NULL;
    for (int64_t j = 0; j < columns; j++) w->one[j] = 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        w->b = i / s->heads, w->h = i % s->heads;
        window_of_head(v, is_backward);
    }
    free(memory);
    return 0;
}

int window_forward(const sizes *s, const tensor *x) { return run_window(s, x, 0); }

int window_backward(const sizes *s, const tensor *x) { return run_window(s, x, 1); }
"""
