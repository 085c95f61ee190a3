/* SPDX-License-Identifier: Apache-2.0 */
/* Exact softmax attention to a window of places and to sinks: one block of queries after the other.

   Keys and values of a window lie in a ring of blocks, so that each is fetched once; the sinks stay behind them:

       columns   | block 3 | block 4 | block 2 | sinks |      of scores [BLOCK, columns], keys^T, values^T and `hidden`

   Place p is that of query p: negative before the first query. Four queries see `window` + 3 places in a row, at most
   two runs of columns; nothing else is computed. Columns with whole vectors around these runs hold logits, the weights
   of what a query does not see are 0, and the other columns are never read.

   The backward pass makes the weights again from the logarithm of their sum, as FlashAttention (Dao 2022) does. */
#include "tiles.h"

typedef struct {
    work w;
    int64_t window, sinks, blocks, columns;
    int64_t ring;  /* columns of the ring */
    int64_t begin; /* the column of the oldest place of the ring */
    int64_t low,
        high;      /* the first place of the ring that has a key, and the one behind the last; so far from `begin` */
    int is_joint;  /* with far keys */
    float *hidden; /* EMPTY where a place cannot be seen, else 0 */
    float *key, *key_t, *value, *value_t, *scores, *pairs, *grad_key, *grad_value, *sink_query, *grad_sink_query;
    float *there; /* rows of gradients that stand there already */
} window;

/* Columns from `first` to before `end`. */
typedef struct {
    int64_t first, end;
} run;

/* The two runs of columns of places that queries t .. t + ROWS - 1 of the block see, in whole vectors or exactly. */
static void runs_of(const window *v, int64_t t, int is_whole, run *runs) {
    int64_t first = t + v->ring - BLOCK - v->window + 1, end = t + ROWS + v->ring - BLOCK, turn = v->ring - v->begin;
    first = first < v->low ? v->low : first, end = end > v->high ? v->high : end;
    if (v->w.in_tiles) first = 0, end = v->ring; /* as whole products read them, where nothing is seen too */
    if (is_whole) first = first / LANES * LANES, end = (end + LANES - 1) / LANES * LANES;
    runs[0] = (run){v->begin + first, v->begin + (end < turn ? end : turn)};
    runs[1] = (run){(first > turn ? first : turn) - turn, end - turn};
}

/* A block of keys and values from row n on, which may be negative; value_t is for the backward pass. */
static void load_places(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    int64_t p = w->input_row, d = w->value_row, skipped = n >= 0 ? 0 : -n < BLOCK ? -n : BLOCK;
    float *key = v->key + column * p, *value = v->value + column * d;
    n += skipped;
    w->tokens = length < n ? 0 : length - n < BLOCK - skipped ? length - n : BLOCK - skipped;
    load(w, key, p, which, 0, n, w->sizes->inputs);
    load(w, value, d, which == KEY ? VALUE : SINK_VALUE, 0, n, w->sizes->width);
    if (skipped) {
        memmove(key + skipped * p, key, 4 * (BLOCK - skipped) * p);
        memmove(value + skipped * d, value, 4 * (BLOCK - skipped) * d);
    }
    for (int64_t t = 0; t < BLOCK; t++) {
        int is_there = t >= skipped && t < skipped + w->tokens;
        int is_visible = is_there && (which != KEY || *address_of(w, MASK, 0, n + t - skipped));
        v->hidden[column + t] = is_visible ? 0 : EMPTY;
        if (is_visible) continue;
        memset(key + t * p, 0, 4 * p);
        memset(value + t * d, 0, 4 * d);
    }
    transpose(v->key_t + column, v->columns, key, p, BLOCK, p);
    if (v->value_t) transpose(v->value_t + column, v->columns, value, d, BLOCK, d);
}

/* rows[C, ld] become a gradient, or are added to what the far keys left of it. */
static void store_gradient(window *v, float *rows, int64_t ld, int which, int64_t g, int64_t n, int64_t columns) {
    work *w = &v->w;
    if (v->is_joint && which < GRAD_SINK) {
        load(w, v->there, ld, which, g, n, columns);
        for (int64_t j = 0; j < w->tokens * ld; j++) rows[j] += v->there[j];
    }
    store(w, rows, ld, w->ones, which, g, n, columns);
}

/* The gradients of a block of places from row n on are complete. */
static void store_place_gradients(window *v, int which, int64_t n, int64_t length, int64_t column) {
    work *w = &v->w;
    int64_t p = w->input_row, d = w->value_row, skipped = n >= 0 ? 0 : -n < BLOCK ? -n : BLOCK;
    float *key = v->grad_key + column * p, *value = v->grad_value + column * d;
    n += skipped;
    w->tokens = length < n ? 0 : length - n < BLOCK - skipped ? length - n : BLOCK - skipped;
    store_gradient(v, key + skipped * p, p, which, 0, n, w->sizes->inputs);
    store_gradient(v, value + skipped * d, d, which + 1, 0, n, w->sizes->width);
    memset(key, 0, 4 * BLOCK * p);
    memset(value, 0, 4 * BLOCK * d);
}

/* Scaled logits of the query n + t, EMPTY where it sees nothing; the largest in each lane. */
static vector mask_logits(const window *v, float *scores, int64_t n, int64_t t, const run *runs, float scaling) {
    const char *seen = v->sinks ? address_of(&v->w, SINK_SEEN, 0, n + t) : NULL;
    int32_t first = (int32_t)(t + v->ring - BLOCK - v->window + 1);
    vector largest = broadcast(EMPTY);
    int_vector lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int i = 0; i < 2; i++)
        for (int64_t j = runs[i].first; j < runs[i].end; j += LANES) {
            int_vector offset = lane + (int32_t)(j - v->begin + i * v->ring - first);
            vector y = *(vector *)(scores + j) * scaling + *(vector *)(v->hidden + j);
            y = blend((offset >= 0) & (offset < (int32_t)v->window), y, broadcast(EMPTY));
            *(vector *)(scores + j) = y;
            largest = maximum_of(largest, y);
        }
    float *sink = scores + v->ring;
    for (int64_t j = 0; j < v->columns - v->ring; j++) sink[j] = j < v->sinks && seen[j] ? sink[j] * scaling : EMPTY;
    for (int64_t j = v->ring; j < v->columns; j += LANES) largest = maximum_of(largest, *(vector *)(scores + j));
    return largest;
}

/* out[BLOCK, columns] = a[BLOCK, depth] b[depth, columns] where four rows see something */
static void product_with_columns(const window *v, float *out, const float *a, int64_t row, const float *b,
                                 const float *sinks_a, int64_t rows, int64_t depth) {
    int64_t count = v->columns;
    if (v->w.in_tiles) product_in_tiles(out, count, a, row, 1, b, count, BLOCK, row, v->ring, 0);
    for (int64_t t = 0; t < rows && !v->w.in_tiles; t += ROWS) {
        run runs[2];
        runs_of(v, t, 1, runs);
        for (int i = 0; i < 2; i++)
            if (runs[i].first < runs[i].end)
                product(out + t * count + runs[i].first, count, a + t * row, row, 1, b + runs[i].first, count, ROWS,
                        depth, runs[i].end - runs[i].first, 0, FULL);
    }
    if (v->sinks)
        half_product(&v->w, out + v->ring, count, sinks_a, row, 1, b + v->ring, count, v->w.in_tiles ? BLOCK : rows,
                     depth, count - v->ring, 0, FULL);
}

/* out[ROWS, LANES * width] = the sum over `count` runs of weights[ROWS, run] b[run, LANES * width] */
INLINE void panel_of_runs(float *out, int64_t ldo, const float *weights, int64_t row, const float *b, int64_t ldb,
                          const run *runs, int count, int width) {
    vector sum[ROWS][PANEL];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < width; i++) sum[r][i] = (vector){0};
    for (int number = 0; number < count; number++)
        for (int64_t k = runs[number].first; k < runs[number].end; k++)
            for (int i = 0; i < width; i++) {
                vector y = *(const vector *)(b + k * ldb + i * LANES);
                for (int r = 0; r < ROWS; r++) sum[r][i] += weights[r * row + k] * y;
            }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < width; i++) *(vector *)(out + r * ldo + i * LANES) = sum[r][i];
}

/* out[BLOCK, columns] = weights[BLOCK, places] b[places, columns], and that of the sinks alone in `sinks_out` */
static void product_with_places(const window *v, float *out, const float *weights, const float *b, int64_t columns,
                                float *sinks_out, int64_t rows) {
    int64_t count = v->columns;
    int is_apart = sinks_out != out;
    if (v->w.in_tiles)
        product_in_tiles(out, columns, weights, count, 1, b, columns, BLOCK, is_apart ? v->ring : count, columns, 0);
    for (int64_t t = 0; t < rows && !v->w.in_tiles; t += ROWS) {
        run runs[3] = {{0, 0}, {0, 0}, {v->ring, v->ring + v->sinks}};
        const float *a = weights + t * count;
        float *to = out + t * columns;
        int64_t j = 0;
        runs_of(v, t, 0, runs);
        prefetch_next();
        for (; j + PANEL * LANES <= columns; j += PANEL * LANES)
            panel_of_runs(to + j, columns, a, count, b + j, columns, runs, 3 - is_apart, PANEL);
        for (; j < columns; j += LANES) panel_of_runs(to + j, columns, a, count, b + j, columns, runs, 3 - is_apart, 1);
    }
    if (is_apart)
        product(sinks_out, columns, weights + v->ring, count, 1, b + v->ring * columns, columns, rows, v->sinks,
                columns, 0, FULL);
}

/* out[places, columns] += weights[BLOCK, places]^T b[BLOCK, columns], with other rows for the sinks. */
static void add_to_places(const window *v, float *out, const float *weights, const float *b, const float *sinks_b,
                          int64_t columns, int64_t rows) {
    int64_t count = v->columns;
    for (int64_t j = 0; j < v->ring; j += ROWS) {
        int64_t place = (j - v->begin + v->ring) % v->ring - v->ring + BLOCK;
        int64_t first = place < 0 ? 0 : place, end = place + ROWS - 1 + v->window;
        end = end < rows ? end : rows;
        if (first < end)
            product(out + j * columns, columns, weights + first * count + j, 1, count, b + first * columns, columns,
                    ROWS, end - first, columns, 1, FULL);
    }
    if (v->sinks)
        product(out + v->ring * columns, columns, weights + v->ring, 1, count, sinks_b, columns, count - v->ring, rows,
                columns, 1, FULL);
}

/* Logits of a block of queries and the largest of each; the number of its rows, in whole fours. */
static int64_t block_logits(window *v, int64_t g, int64_t n, float *largest) {
    work *w = &v->w;
    int64_t rows = (w->tokens + ROWS - 1) / ROWS * ROWS, count = v->columns, p = w->input_row;
    float *sink_query = w->query, by_lane[BLOCK * LANES], scaling = *(float *)address_of(w, SCALING, 0, 0);
    load(w, w->query, p, QUERY, g, n, w->sizes->inputs);
    if (v->sink_query != w->query) {
        sink_query = v->sink_query;
        int is_given = w->tensors[SINK_QUERY].data != NULL;
        load(w, sink_query, p, is_given ? SINK_QUERY : QUERY, g, n, w->sizes->inputs);
        turn_rows(w, sink_query, p, SINK_TURN, n, 1);
    }
    product_with_columns(v, v->scores, w->query, p, v->key_t, sink_query, rows, w->sizes->inputs);
    memset(by_lane, 0, sizeof(by_lane));
    for (int64_t t = 0; t < w->tokens; t++) {
        run runs[2];
        runs_of(v, t / ROWS * ROWS, 1, runs);
        *(vector *)(by_lane + t * LANES) = mask_logits(v, v->scores + t * count, n, t, runs, scaling);
    }
    memset(v->scores + w->tokens * count, 0, 4 * (BLOCK - w->tokens) * count);
    reduce_rows(largest, by_lane, NULL, 0, LANES, 1);
    return rows;
}

/* scores[t] = exp(scores[t] - less[t]), and their sum */
static void exponentiate_logits(window *v, const float *less, float *total) {
    float by_lane[BLOCK * LANES];
    memset(by_lane, 0, sizeof(by_lane));
    for (int64_t t = 0; t < v->w.tokens; t++) {
        run runs[3] = {{0, 0}, {0, 0}, {v->ring, v->columns}};
        vector sum = {0};
        runs_of(v, t / ROWS * ROWS, 1, runs);
        for (int i = 0; i < 3; i++)
            for (int64_t j = runs[i].first; j < runs[i].end; j += LANES) {
                vector *x = (vector *)(v->scores + t * v->columns + j), y = *x - less[t];
                /* products with denormal numbers are slow */
                *x = rounded(&v->w, blend(y < -LIMIT, (vector){0}, exp_of_negative(y)));
                sum += *x;
            }
        *(vector *)(by_lane + t * LANES) = sum;
    }
    row_dot_products(total, by_lane, v->w.ones, 0, LANES);
}

/* What the sums of near keys, `near[t]`, and the output of far keys, `far[t]`, count in the output; `total` of the
   weights of near keys, in units of exp(largest[t]), becomes the logarithm of the whole. */
static void join_far_keys(window *v, const float *largest, float *total, float *near, float *far, int64_t g,
                          int64_t n) {
    work *w = &v->w;
    float far_total[BLOCK], scale[BLOCK], top[BLOCK];
    load_numbers(w, far_total, FAR_TOTAL, g, n);
    load_numbers(w, scale, FAR_SCALE, g, n);
    for (int64_t t = 0; t < BLOCK; t++) {
        scale[t] = far_total[t] < TINY ? EMPTY : scale[t];
        top[t] = scale[t] > largest[t] ? scale[t] : largest[t];
    }
    for (int64_t t = 0; t < BLOCK; t += LANES) {
        *(vector *)(near + t) = exp_of_negative(*(vector *)(largest + t) - *(vector *)(top + t));
        *(vector *)(far + t) = exp_of_negative(*(vector *)(scale + t) - *(vector *)(top + t));
    }
    for (int64_t t = 0; t < w->tokens; t++) {
        float sum = near[t] * total[t] + far[t] * far_total[t];
        int is_near = far_total[t] < TINY;
        total[t] = sum ? top[t] + __builtin_logf(sum) : EMPTY;
        near[t] = sum ? near[t] / sum : 0;
        float units = sum / far[t];
        far[t] = is_near ? 0 : far[t] * far_total[t] / sum;
        far_total[t] = is_near ? __builtin_inff() : units;
    }
    store_numbers(w, far_total, FAR_TOTAL, g, n);
}

static void attend_window(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float largest[BLOCK], less[BLOCK], total[BLOCK], near[BLOCK], far[BLOCK] = {0};
    prefetch_rows(w, 3, NEAR_OUTPUT, g, n, n + w->tokens);
    int64_t rows = block_logits(v, g, n, largest), d = w->value_row;
    for (int64_t t = 0; t < BLOCK; t++) less[t] = largest[t] < EMPTY / 2 ? 0 : largest[t]; /* then all weights are 0 */
    exponentiate_logits(v, less, total);
    product_with_places(v, w->out, v->scores, v->value, d, w->out, rows);
    if (v->is_joint)
        join_far_keys(v, largest, total, near, far, g, n);
    else
        for (int64_t t = 0; t < w->tokens; t++) {
            int is_empty = largest[t] < EMPTY / 2;
            near[t] = is_empty ? 0 : 1 / total[t];
            total[t] = is_empty ? EMPTY : largest[t] + __builtin_logf(total[t]);
        }
    for (int64_t t = 0; t < w->tokens; t++) {
        float *to = (float *)address_of(w, NEAR_OUTPUT, g, n + t);
        const float *row = w->out + t * d;
        for (int64_t j = 0; j < w->sizes->width && far[t]; j++) to[j] = near[t] * row[j] + far[t] * to[j];
        for (int64_t j = 0; j < w->sizes->width && !far[t]; j++) to[j] = near[t] * row[j];
    }
    store_numbers(w, total, LOG_SIZE, g, n);
    store_numbers(w, largest, LARGEST, g, n);
}

static void window_gradients(window *v, int64_t g, int64_t n) {
    work *w = &v->w;
    float size[BLOCK], e[BLOCK], grad_size[BLOCK], unused[BLOCK], scaling = *(float *)address_of(w, SCALING, 0, 0);
    int64_t count = v->columns, rows = block_logits(v, g, n, unused), p = w->input_row, d = w->value_row;
    load(w, w->out, d, GRAD_NEAR, g, n, w->sizes->width);
    load(w, w->output, d, NEAR_OUTPUT, g, n, w->sizes->width);
    load_numbers(w, size, LOG_SIZE, g, n);
    load_numbers(w, grad_size, GRAD_LOG_SIZE, g, n);
    for (int64_t t = 0; t < BLOCK; t++) size[t] = size[t] > EMPTY ? size[t] : 0; /* then all weights are 0 */
    exponentiate_logits(v, size, unused);
    row_dot_products(e, w->out, w->output, d, d);
    product_with_columns(v, v->pairs, w->out, d, v->value_t, w->out, rows, w->sizes->width);
    memset(v->pairs + w->tokens * count, 0, 4 * (BLOCK - w->tokens) * count);
    for (int64_t t = 0; t < w->tokens; t++) {
        float *pairs = v->pairs + t * count, *weights = v->scores + t * count, add = grad_size[t] - e[t];
        run runs[3] = {{0, 0}, {0, 0}, {v->ring, count}};
        runs_of(v, t / ROWS * ROWS, 1, runs);
        for (int i = 0; i < 3; i++)
            for (int64_t j = runs[i].first; j < runs[i].end; j++) pairs[j] = (pairs[j] + add) * weights[j] * scaling;
    }
    int has_own = v->sink_query != w->query;
    float *grad_sink_query = has_own ? v->grad_sink_query : w->grad;
    product_with_places(v, w->grad, v->pairs, v->key, p, grad_sink_query, rows);
    add_to_places(v, v->grad_key, v->pairs, w->query, v->sink_query, p, rows);
    add_to_places(v, v->grad_value, v->scores, w->out, w->out, d, rows);
    if (has_own && w->tensors[SINK_QUERY].data)
        store(w, grad_sink_query, p, w->ones, GRAD_SINK_QUERY, g, n, w->sizes->inputs);
    else if (has_own) {
        turn_rows(w, grad_sink_query, p, SINK_TURN, n, -1);
        for (int64_t j = 0; j < w->tokens * p; j++) w->grad[j] += grad_sink_query[j];
    }
    store_gradient(v, w->grad, p, GRAD_NEAR_QUERY, g, n, w->sizes->inputs);
}

static void window_of_head(window *v, int is_backward) {
    work *w = &v->w;
    int64_t ring = v->ring, queries = w->sizes->queries, keys = w->sizes->keys;
    int64_t before = w->sizes->causal ? keys - queries : v->window / 2;
    int64_t last = (queries - 1) / BLOCK * BLOCK;
    w->next_offset =
        -BLOCK; /* nothing comes after the sinks; what their block has beyond the columns, the places overwrite */
    for (int64_t n = 0; n < v->sinks; n += BLOCK) load_places(v, SINK_KEY, n, v->sinks, ring + n);
    w->next_offset = BLOCK;
    for (int64_t n = 0; n < queries; n += BLOCK) {
        v->begin = (n + BLOCK) % ring, v->low = ring - BLOCK - n - before, v->high = v->low + keys;
        for (int64_t place = n ? n : n - ring + BLOCK; place <= n; place += BLOCK)
            load_places(v, KEY, place + before, keys, (place + ring) % ring);
        w->tokens = queries - n < BLOCK ? queries - n : BLOCK;
        for (int64_t g = 0; g < w->sizes->groups; g++)
            if (is_backward)
                window_gradients(v, g, n);
            else
                attend_window(v, g, n);
        for (int64_t place = n - ring + BLOCK; is_backward && place <= (n == last ? n : n - ring + BLOCK);
             place += BLOCK)
            store_place_gradients(v, GRAD_PLACE, place + before, keys, (place + ring) % ring);
    }
    for (int64_t n = 0; is_backward && n < v->sinks; n += BLOCK)
        store_place_gradients(v, GRAD_SINK, n, v->sinks, ring + n);
}

/* `features` is how many places a query sees, `map` how many sinks. */
static int run_window(const sizes *s, const tensor *x, int is_backward) {
    window space, *v = &space;
    work *w = &v->w;
    memset(v, 0, sizeof(*v));
    w->sizes = s, w->tensors = x, w->input_row = round_up(s->inputs), w->value_row = round_up(s->width);
    w->in_tiles = !is_backward && takes_tiles(x);
    v->window = s->features, v->sinks = s->map, v->is_joint = x[FAR_TOTAL].data != NULL;
    v->blocks = (v->window + 2 * BLOCK - 2) / BLOCK, v->ring = v->blocks * BLOCK;
    v->columns = v->ring + round_up(v->sinks);
    int64_t columns = v->columns + BLOCK, widest = w->input_row > w->value_row ? w->input_row : w->value_row;
    int64_t floats = columns * (2 * w->input_row + w->value_row + BLOCK + 2) +
                     BLOCK * (4 * w->input_row + 2 * w->value_row + widest);
    if (is_backward) floats += columns * (w->input_row + 2 * w->value_row + BLOCK);
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats + 1024)) return 1;
    char *m = memory;
    memset(m, 0, 4 * floats + 1024);
    w->query = allocate(&m, BLOCK * w->input_row), w->grad = allocate(&m, BLOCK * w->input_row);
    int has_own = v->sinks && (x[SINK_QUERY].data || x[SINK_TURN].data);
    v->sink_query = has_own ? allocate(&m, BLOCK * w->input_row) : w->query;
    v->grad_sink_query = allocate(&m, BLOCK * w->input_row);
    w->out = allocate(&m, BLOCK * w->value_row), w->output = allocate(&m, BLOCK * w->value_row);
    v->there = allocate(&m, BLOCK * widest);
    v->key = allocate(&m, columns * w->input_row), v->key_t = allocate(&m, columns * w->input_row),
    v->scores = allocate(&m, columns * BLOCK);
    v->value = allocate(&m, columns * w->value_row), v->hidden = allocate(&m, columns), w->ones = allocate(&m, columns);
    if (is_backward) {
        v->grad_key = allocate(&m, columns * w->input_row), v->grad_value = allocate(&m, columns * w->value_row);
        v->pairs = allocate(&m, columns * BLOCK), v->value_t = allocate(&m, columns * w->value_row);
    }
    for (int64_t j = 0; j < columns; j++) w->ones[j] = 1;
    begin_tiles(w);
    for (int64_t i = s->start; i < s->stop; i++) {
        w->batch = i / s->heads, w->head = i % s->heads;
        window_of_head(v, is_backward);
    }
    end_tiles(w);
    free(memory);
    return 0;
}

int window_forward(const sizes *s, const tensor *x) {
    return run_window(s, x, 0);
}

int window_backward(const sizes *s, const tensor *x) {
    return run_window(s, x, 1);
}
