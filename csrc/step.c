/* SPDX-License-Identifier: Apache-2.0 */
/* A step of one token after others: at this size every call of torch costs more than the sums.

   `attention_step` has plain features or exponents. `delta_step` reads its state twice, once for S^T k and S^T q and
   once to write it. `hybrid_step` is `HybridAttention._attend_causally` for one real token without ALiBi: the oldest
   place of the window goes to the exact keys, or what it displaces there goes to the far sums, and the new token takes
   the newest. Every other function sees one sequence. */
#include "blocks.h"

/* Calls `step` for every sequence, with its addresses and with memory for `floats` numbers. */
static int step_sequences(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows, int64_t floats,
                          void (*step)(const step_sizes *n, char **x, float *space)) {
    char *own[STEP_TENSORS];
    for (int64_t i = 0; rows && i < n->batch; i++)
        if (rows[i] < 0 || rows[i] >= n->blocks) return 2;
    float *space = malloc(4 * (floats + 1)); /* not of 0 bytes */
    if (!space) return 1;
    for (int64_t i = 0; i < n->batch; i++) {
        for (int64_t j = 0; j < STEP_TENSORS; j++)
            own[j] = x[j] ? x[j] + (rows && j >= STEP_SUMS ? rows[i] : i) * strides[j] : NULL;
        step(n, own, space);
    }
    free(space);
    return 0;
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t j = 0; j < n; j++) sum += a[j] * b[j];
    return sum;
}

/* out[columns] += weights[count] rows[count, columns], whose rows begin `stride` numbers apart, and, if there is a
   second row of weights, the same with it in `second_out`; rows that weigh 0 in both may be nan. Sums stay in
   registers: in memory, each would wait for the one before. */
INLINE void add_weighted_twice(float *out, float *second_out, const float *rows, int64_t stride, const float *weights,
                               const float *second, int64_t count, int64_t columns) {
    enum { PARTS = 4 };
    int64_t first = 0;
    for (; first + PARTS * LANES <= columns; first += PARTS * LANES) {
        vector sums[PARTS], more[PARTS];
        for (int part = 0; part < PARTS; part++) sums[part] = *(const vector *)(out + first + part * LANES);
        for (int part = 0; part < PARTS && second; part++)
            more[part] = *(const vector *)(second_out + first + part * LANES);
        for (int64_t t = 0; t < count; t++) {
            const float *row = rows + t * stride + first;
            if (!weights[t] && !(second && second[t])) continue;
            vector x[PARTS];
            for (int part = 0; part < PARTS; part++) x[part] = *(const vector *)(row + part * LANES);
            for (int part = 0; part < PARTS; part++) sums[part] += weights[t] * x[part];
            for (int part = 0; part < PARTS && second; part++) more[part] += second[t] * x[part];
        }
        for (int part = 0; part < PARTS; part++) *(vector *)(out + first + part * LANES) = sums[part];
        for (int part = 0; part < PARTS && second; part++) *(vector *)(second_out + first + part * LANES) = more[part];
    }
    for (int64_t t = 0; t < count && first < columns; t++) {
        const float *row = rows + t * stride + first;
        if (weights[t]) add_scaled(out + first, row, weights[t], columns - first);
        if (second && second[t]) add_scaled(second_out + first, row, second[t], columns - first);
    }
}

static void add_weighted(float *out, const float *rows, int64_t stride, const float *weights, int64_t count,
                         int64_t columns) {
    add_weighted_twice(out, NULL, rows, stride, weights, NULL, count, columns);
}

static void plain_step(const step_sizes *n, char **x) {
    int64_t features = n->features, width = n->width, row = width + 1;
    for (int64_t head = 0; head < n->heads; head++) {
        const float *k = (float *)x[STEP_KEY] + head * features, *v = (float *)x[STEP_VALUE] + head * width;
        const float *old = (float *)x[STEP_SUMS] + head * features * row;
        float *new = (float *)x[STEP_NEW] + head *features *row;
        for (int64_t j = 0; j < features; j++) {
            for (int64_t i = 0; i < width; i++) new[j * row + i] = old[j * row + i] + k[j] * v[i];
            new[j * row + width] = old[j * row + width] + k[j];
        }
        for (int64_t group = head * n->groups; group < (head + 1) * n->groups; group++) {
            const float *q = (float *)x[STEP_QUERY] + group * features;
            float *out = (float *)x[STEP_FAR] + group * width, total = 0;
            memset(out, 0, sizeof(float) * width);
            add_weighted(out, new, row, q, features, width);
            for (int64_t j = 0; j < features; j++) total += q[j] * new[j * row + width];
            float inverse = 1 / (total < TINY ? TINY : total);
            for (int64_t i = 0; i < width; i++) out[i] *= inverse;
        }
    }
}

/* Row i of x with n numbers, as float32. */
INLINE const float *row_as_floats(const char *x, int64_t i, int64_t n, int64_t bytes, float *space) {
    if (bytes == 4) return (const float *)x + i * n;
    for (int64_t j = 0; j < n; j++) {
        union {
            uint32_t bits;
            float value;
        } y = {(uint32_t)((const uint16_t *)x)[i * n + j] << 16};
        space[j] = y.value;
    }
    return space;
}

/* exp(x) for x <= 0, nan where it is nan */
INLINE vector exponential(vector x) {
    return blend(x < -86.0f, (vector){0}, exp_of_negative(x) + 0 * x);
}

/* x = exp(x) for x <= 0 */
static void exponentials(float *x, int64_t n) {
    int64_t whole = n / LANES * LANES;
    vector last = {0};
    for (int64_t j = 0; j < whole; j += LANES) *(vector *)(x + j) = exponential(*(const vector *)(x + j));
    memcpy(&last, x + whole, 4 * (n - whole));
    last = exponential(last);
    memcpy(x + whole, &last, 4 * (n - whole));
}

/* x = exp(x - their maximum), 0 where x is EMPTY, nan where it is nan; returns the maximum, and the sum in `total`. */
static float softmax_weights(float *x, int64_t n, float *total) {
    vector most = broadcast(EMPTY);
    float largest = EMPTY;
    int64_t whole = n / LANES * LANES;
    *total = 0;
    for (int64_t j = 0; j < whole; j += LANES) most = maximum_of(*(const vector *)(x + j), most);
    for (int64_t j = whole; j < n; j++) largest = x[j] > largest ? x[j] : largest;
    for (int l = 0; l < LANES; l++) largest = most[l] > largest ? most[l] : largest;
    for (int64_t j = 0; j < n; j++) x[j] = x[j] <= EMPTY ? EMPTY : x[j] - largest;
    exponentials(x, n);
    for (int64_t j = 0; j < n; j++) *total += x[j];
    return largest;
}

/* What a place of the window holds besides nothing, 0: a token that goes to the far sums later, or a sink. */
enum { FAR_LATER = 1, SINK = 2 };
/* `count` rows of which number `gone` leaves and `row` comes behind the last; none does if there is no such number.
   `to` may be `from`. */
static void shift_rows(char *to, const char *from, const char *row, int64_t count, int64_t gone, int64_t bytes) {
    if (to != from) memcpy(to, from, gone * bytes);
    if (gone == count) return;
    memmove(to + gone * bytes, from + (gone + 1) * bytes, (count - 1 - gone) * bytes);
    memcpy(to + (count - 1) * bytes, row, bytes);
}

static void copy_rows(char *to, const char *from, int64_t bytes) {
    if (to != from && bytes) memcpy(to, from, bytes); /* without rows there may be no address */
}

/* x - log sum exp(sign x), times the sign; `space [n]`. */
static void log_softmax(float *out, const float *x, float sign, int64_t n, float *space) {
    float total, largest;
    for (int64_t j = 0; j < n; j++) space[j] = sign * x[j];
    largest = softmax_weights(space, n, &total);
    float less = largest + __builtin_logf(total);
    for (int64_t j = 0; j < n; j++) out[j] = sign * x[j] - less;
}

/* The exponents of a row of `key_dim` numbers, scaled by `root`; `space [features]`. */
static void map_row(const step_sizes *n, float *out, const float *row, float root, const float *weight,
                    const float *bias, float norm, float *space) {
    int64_t columns = n->map == HEDGEHOG ? n->features / 2 : n->features;
    float *image = n->map == HEDGEHOG ? space : out, y[n->key_dim];
    for (int64_t i = 0; i < n->key_dim; i++) y[i] = root * row[i];
    memset(image, 0, 4 * columns);
    add_weighted(image, weight, columns, y, n->key_dim, columns);
    if (n->map == HEDGEHOG) {
        for (int part = 0; part < 2; part++)
            log_softmax(out + part * columns, image, part ? -1 : 1, columns, space + columns);
        return;
    }
    float less = norm ? norm / 2 * dot(y, y, n->key_dim) : 0;
    for (int64_t j = 0; j < columns && (bias || norm); j++) out[j] += (bias ? bias[j] : 0) - less;
}

/* A row with its pairs of columns turned, in `space [key_dim]`; itself where there are none. */
static const float *turned_row(const step_sizes *n, const float *row, int64_t first, const float *turn, float *space) {
    if (first == n->pairs) return row;
    memcpy(space, row, 4 * n->key_dim);
    turn_pairs(space, turn, n->pairs, first, n->is_interleaved ? 2 : 1, n->is_interleaved ? 1 : n->pairs);
    return space;
}

/* A key that goes to the far sums, if `is_far`, after it has been behind the window for `age` tokens; `place` is where
   it was among the exact keys, `exact` if it was not. */
typedef struct {
    const char *key, *value;
    int64_t position, age, place;
    int is_far;
} leaving;

/* The oldest key of the window, which is an ordinary token if `is_far`, or the exact key that it displaces: that with
   the smallest score, the latest one of several. `oldest` is the position in the window. */
static leaving leaving_key(const step_sizes *n, char **x, int64_t head, int32_t oldest, int is_far) {
    int64_t key = n->key_dim * n->key_bytes, value = n->width * n->value_bytes, first = head * n->exact;
    leaving found = {x[STEP_WINDOW_KEY] + head * n->window * key,
                     x[STEP_WINDOW_VALUE] + head * n->window * value,
                     oldest,
                     0,
                     n->exact,
                     is_far};
    if (!is_far || !n->exact) return found;
    const float *score = (const float *)x[STEP_KEPT_SCORE] + first;
    const int32_t *age = (const int32_t *)x[STEP_KEPT_AGE] + first;
    float smallest = __builtin_inff();
    int64_t place = 0;
    for (int64_t j = 0; j < n->exact; j++) {
        float own = age[j] ? score[j] : -__builtin_inff();
        if (own <= smallest) smallest = own, place = j;
    }
    if (!(((const float *)x[STEP_WINDOW_SCORE])[head * n->window] > smallest)) return found;
    int64_t position = x[STEP_KEPT_POSITION] ? ((const int32_t *)x[STEP_KEPT_POSITION])[first + place] : 0;
    return (leaving){x[STEP_KEPT_KEY] + (first + place) * key,
                     x[STEP_KEPT_VALUE] + (first + place) * value,
                     position,
                     age[place],
                     place,
                     age[place] != 0};
}

/* The exact keys after the oldest key of the window, an ordinary token if `is_far`, has come to them. */
static void keep_key(const step_sizes *n, char **x, int64_t head, const leaving *gone, int32_t oldest, int is_far) {
    int64_t key = n->key_dim * n->key_bytes, value = n->width * n->value_bytes, row = head * n->window;
    const int32_t no_age = 0;
    const char *rows[] = {x[STEP_WINDOW_KEY] + row * key, x[STEP_WINDOW_VALUE] + row * value,
                          x[STEP_WINDOW_SCORE] + row * 4, (const char *)&no_age, (const char *)&oldest};
    const int64_t bytes[] = {key, value, 4, 4, 4};
    for (int i = 0; i < 5 && x[STEP_KEPT_KEY + i]; i++) {
        int64_t first = head * n->exact * bytes[i];
        shift_rows(x[STEP_NEW_KEPT + i] + first, x[STEP_KEPT_KEY + i] + first, rows[i], n->exact, gone->place,
                   bytes[i]);
    }
    int32_t *age = (int32_t *)x[STEP_NEW_KEPT + STEP_KEPT_AGE - STEP_KEPT_KEY] + head * n->exact;
    for (int64_t j = 0; j < n->exact && is_far; j++) age[j] = (int32_t)((uint32_t)age[j] + (age[j] != 0));
    if (gone->place < n->exact) age[n->exact - 1] = 1;
}

/* The exponents of the key that goes to the far sums, and behind them those of the `queries` of this head; the angles
   `turn` move queries to where the map sees them. */
static void map_rows(const step_sizes *n, char **x, int64_t head, const leaving *gone, const float *queries,
                     const float *turn, float *out, float *space) {
    int64_t d = n->key_dim, f = n->features, columns = n->map == HEDGEHOG ? f / 2 : f, first = n->first_turned;
    float root = __builtin_sqrtf(n->scaling), row_space[d], turned_space[d], key_turn[2 * n->pairs + 1];
    if (gone->is_far) {
        const float *bias = (const float *)x[STEP_KEY_BIAS], *norm = (const float *)x[STEP_KEY_NORM];
        const float *row = row_as_floats(gone->key, 0, d, n->key_bytes, row_space);
        make_turn(key_turn, (const float *)x[STEP_FREQUENCIES], n->pairs, first, -gone->position);
        map_row(n, out, turned_row(n, row, first, key_turn, turned_space), root,
                (const float *)x[STEP_KEY_WEIGHT] + head * d * columns, bias ? bias + head * f : NULL,
                norm ? norm[head] : 0, space);
        float faded = x[STEP_DECAY] ? ((const float *)x[STEP_DECAY])[head] * gone->age : 0;
        for (int64_t j = 0; j < f; j++) out[j] += faded;
    }
    for (int64_t g = 0; g < n->groups; g++) {
        const float *weight = (const float *)x[STEP_QUERY_WEIGHT] + (head * n->groups + g) * d * columns;
        const float *query = turned_row(n, queries + g * round_up(d), first, turn, turned_space);
        map_row(n, out + (1 + g) * f, query, root, weight, NULL, 0, space);
    }
}

/* S, Z and m with a key and its `value` if `is_far`, and what queries read from them. `exponent [features]` is that of
   the key, `queries [groups, features]` those of the queries, `space [4, features]`. */
static void update_far(const step_sizes *n, char **x, int64_t head, const float *value, int is_far,
                       const float *exponent, const float *queries, float *space) {
    int64_t features = n->features, width = n->width, row = width + 2;
    const float *old = (const float *)x[STEP_SUMS] + head * features * row;
    float *new = (float *)x[STEP_NEW] + head *features *row;
    float *maximum = space, *keep = maximum + features, *weight = keep + features, *weights = weight + features;
    float decay = x[STEP_DECAY] && is_far ? ((const float *)x[STEP_DECAY])[head] : 0;
    for (int64_t j = 0; j < features; j++) {
        float before = old[j * row + row - 1] + decay;
        maximum[j] = is_far && exponent[j] > before ? exponent[j] : before;
        keep[j] = before - maximum[j];
        weight[j] = is_far ? exponent[j] - maximum[j] : EMPTY;
    }
    exponentials(keep, features);
    exponentials(weight, features);
    for (int64_t j = 0; j < features; j++) {
        const float *from = old + j * row;
        float *to = new + j *row;
        for (int64_t i = 0; i < width; i++) to[i] = from[i] * keep[j] + (is_far ? weight[j] * value[i] : 0);
        to[width] = from[width] * keep[j] + weight[j];
        to[row - 1] = maximum[j];
    }
    for (int64_t group = head * n->groups; group < (head + 1) * n->groups; group++) {
        float *out = (float *)x[STEP_FAR] + group * width, ignored, total = 0;
        const float *query = queries + (group - head * n->groups) * features;
        for (int64_t j = 0; j < features; j++) weights[j] = query[j] + maximum[j];
        float scale = softmax_weights(weights, features, &ignored);
        memset(out, 0, 4 * width);
        add_weighted(out, new, row, weights, features, width);
        for (int64_t j = 0; j < features; j++) total += weights[j] * new[j * row + width];
        for (int64_t i = 0; i < width; i++) out[i] *= total < TINY ? 0 : 1 / total;
        ((float *)x[STEP_FAR_SIZE])[group] = total < TINY ? EMPTY : scale + __builtin_logf(total);
    }
}

static void step_features(const step_sizes *n, char **x, float *space) {
    const float *key = (const float *)x[STEP_KEY], *query = (const float *)x[STEP_QUERY];
    if (n->map == PLAIN) plain_step(n, x);
    for (int64_t head = 0; head < n->heads && n->map != PLAIN; head++)
        update_far(n, x, head, (const float *)x[STEP_VALUE] + head * n->width, 1, key + head * n->features,
                   query + head * n->groups * n->features, space);
}

int attention_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows) {
    return step_sequences(n, x, strides, rows, 4 * n->features, step_features);
}

#define STRIP (8 * LANES) /* columns of which two rows of sums stay in registers */
#define AHEAD 6           /* rows that are fetched before they are needed */

typedef struct {
    const float *fade, *key, *old; /* exp of the log decay per feature, the key, S from this column on */
    float *new;
    int64_t features, width, columns;
} strip;

/* out[columns] = sum_j x_j fade_j S_j, and the same of y; in registers if the number of columns is known */
INLINE void read_columns(float *out, float *second, const strip *s, const float *x, const float *y, int64_t columns) {
    float sum[STRIP] = {0}, sum_y[STRIP] = {0};
    for (int64_t j = 0; j < s->features; j++) {
        float scale = s->fade[j] * x[j], scale_y = s->fade[j] * y[j];
        for (int64_t i = 0; i < columns; i += 16) {
            __builtin_prefetch(s->old + (j + AHEAD) * s->width + i, 0, 2);
            __builtin_prefetch(s->new + (j + AHEAD) * s->width + i, 1, 2);
        }
        for (int64_t i = 0; i < columns; i++) {
            sum[i] += scale * s->old[j * s->width + i];
            sum_y[i] += scale_y * s->old[j * s->width + i];
        }
    }
    for (int64_t i = 0; i < columns; i++) out[i] = sum[i], second[i] = sum_y[i];
}

static void read_strip(float *out, float *second, const strip *s, const float *x, const float *y) {
    if (s->columns == STRIP)
        read_columns(out, second, s, x, y, STRIP);
    else
        read_columns(out, second, s, x, y, s->columns);
}

static void write_strip(const strip *s, const float *change) {
    for (int64_t j = 0; j < s->features; j++)
        for (int64_t i = 0; i < s->columns; i++)
            s->new[j * s->width + i] = s->fade[j] * s->old[j * s->width + i] + s->key[j] * change[i];
}

static void step_delta(const step_sizes *n, char **x, float *fade) {
    int64_t features = n->features, width = n->width, decays = n->key_dim;
    float change[STRIP], read[STRIP];
    for (int64_t head = 0; head < n->heads; head++) {
        const float *k = (float *)x[STEP_KEY] + head * features, *v = (float *)x[STEP_VALUE] + head * width;
        const float *decay = (float *)x[STEP_DECAY] + head * decays, beta = ((float *)x[STEP_BETA])[head];
        const float *old = (float *)x[STEP_SUMS] + head * features * width;
        float *new = (float *)x[STEP_NEW] + head *features *width;
        for (int64_t j = 0; j < features; j++) fade[j] = j && decays == 1 ? fade[0] : __builtin_expf(decay[j]);
        for (int64_t column = 0; column < width; column += STRIP) {
            int64_t left = width - column;
            strip s = {fade, k, old + column, new + column, features, width, left < STRIP ? left : STRIP};
            for (int64_t g = head * n->groups; g < (head + 1) * n->groups; g++) {
                const float *query = (float *)x[STEP_QUERY] + g * features;
                float *out = (float *)x[STEP_FAR] + g * width + column, own = dot(query, k, features);
                read_strip(read, out, &s, k, query);
                for (int64_t i = 0; i < s.columns; i++) {
                    change[i] = beta * (v[column + i] - (n->map ? read[i] : 0));
                    out[i] += own * change[i];
                }
            }
            write_strip(&s, change);
        }
    }
}

int delta_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows) {
    return step_sequences(n, x, strides, rows, n->features, step_delta);
}

/* Rows of `columns` numbers as float32, BLOCK of them or less, in whole vectors: where they are, or in `space`. */
static const float *block_as_floats(const char *x, int64_t first, int64_t count, int64_t columns, int64_t bytes,
                                    float *space) {
    int64_t row = round_up(columns);
    if (bytes == 4 && row == columns && count == BLOCK) return (const float *)x + first * columns;
    memset(space, 0, 4 * BLOCK * row);
    for (int64_t t = 0; t < count; t++) {
        const float *from = row_as_floats(x, first + t, columns, bytes, space + t * row);
        if (from != space + t * row) memcpy(space + t * row, from, 4 * columns);
    }
    return space;
}

static int all_are(float number, const float *x, int64_t count) {
    for (int64_t t = 0; t < count; t++)
        if (x[t] != number) return 0;
    return 1;
}

/* The products of `queries [groups, whole vectors]` with `count` keys from row `first` on, in `out [groups, row]`, of
   whose first row an EMPTY number says that there is no key. */
static void compare(const step_sizes *n, float *out, int64_t row, const char *keys, int64_t first, int64_t count,
                    const float *queries, float *space) {
    float found[BLOCK];
    for (int64_t t = 0; t < count; t += BLOCK) {
        int64_t rows = count - t < BLOCK ? count - t : BLOCK, columns = round_up(n->key_dim);
        if (all_are(EMPTY, out + t, rows)) continue;
        const float *block = block_as_floats(keys, first + t, rows, n->key_dim, n->key_bytes, space);
        for (int64_t g = 0; g < n->groups; g++) {
            row_dot_products(found, block, queries + g * columns, 0, columns);
            memcpy(out + g * row + t, found, 4 * rows);
        }
    }
}

/* out[groups, width] += weights[groups, row] times `count` values from row `first` on. */
static void add_weighted_values(const step_sizes *n, float *out, const char *values, int64_t first,
                                const float *weights, int64_t row, int64_t count, float *space) {
    int64_t width = n->width, stride = round_up(width);
    for (int64_t t = 0; t < count; t += BLOCK) {
        int64_t rows = count - t < BLOCK ? count - t : BLOCK, g = 0;
        while (g < n->groups && all_are(0, weights + g * row + t, rows)) g++;
        if (g == n->groups) continue;
        g = 0;
        const float *block = block_as_floats(values, first + t, rows, width, n->value_bytes, space);
        for (; g + 2 <= n->groups; g += 2) {
            const float *from = weights + g * row + t;
            float *to = out + g * width;
            add_weighted_twice(to, to + width, block, stride, from, from + row, rows, width);
        }
        if (g < n->groups) add_weighted(out + g * width, block, stride, weights + g * row + t, rows, width);
    }
}

/* EMPTY in `logits [groups, window + sinks + exact]` of a head where the state has no key. */
static void empty_places(const step_sizes *n, char **x, int64_t head, float *logits) {
    char **new = x + STEP_NEW, **kept = x + STEP_NEW_KEPT;
    const int32_t *age = (const int32_t *)kept[STEP_KEPT_AGE - STEP_KEPT_KEY];
    int64_t first = head * n->exact, window = n->window, near = window + n->sinks, count = near + n->exact,
            seen = *(const int64_t *)new[6];
    for (int64_t j = 0; j < count; j++) {
        int is_sink = j >= window && j < near;
        int is_seen = is_sink ? j - window < seen : j < window ? new[3][j] == FAR_LATER : age[first + j - near] != 0;
        for (int64_t g = 0; g < n->groups && !is_seen; g++) logits[g * count + j] = EMPTY;
    }
}

/* Exact keys, behind window and sinks, are compared at most at the trained length, like sinks: then with the queries
   `moved` there, and keys moved to position 0. `logits [groups, window + sinks + exact]` and `block [BLOCK, columns]`
   are working space. */
static void attend_near(const step_sizes *n, char **x, int64_t head, const float *queries, const float *moved,
                        float *logits, float *block) {
    char **new = x + STEP_NEW, **kept = x + STEP_NEW_KEPT;
    int64_t window = n->window, near = window + n->sinks, count = near + n->exact, width = n->width, d = n->key_dim;
    int64_t first = head * n->exact, columns = round_up(d);
    int64_t farthest = moved == queries ? INT64_MIN : *(const int32_t *)x[STEP_POSITION] - n->trained_length;
    const int32_t *age = (const int32_t *)kept[STEP_KEPT_AGE - STEP_KEPT_KEY];
    const int32_t *position = (const int32_t *)kept[STEP_KEPT_POSITION - STEP_KEPT_KEY];
    float total, scaling = n->scaling, inverse[n->groups], space[d], turned_space[d], turn[2 * n->pairs + 1];
    memset(logits, 0, 4 * n->groups * count);
    empty_places(n, x, head, logits);
    compare(n, logits, count, new[1], head * window, window, queries, block);
    compare(n, logits + window, count, new[4], head * n->sinks, n->sinks, moved, block);
    compare(n, logits + near, count, kept[0], first, n->exact, queries, block);
    for (int64_t j = near; j < count && position && moved != queries; j++) {
        if (position[first + j - near] > farthest || !age[first + j - near]) continue;
        make_turn(turn, (const float *)x[STEP_FREQUENCIES], n->pairs, 0, -(int64_t)position[first + j - near]);
        const float *key = row_as_floats(kept[0], first + j - near, d, n->key_bytes, space);
        key = turned_row(n, key, 0, turn, turned_space);
        for (int64_t g = 0; g < n->groups; g++) logits[g * count + j] = dot(moved + g * columns, key, d);
    }
    for (int64_t j = 0; j < n->groups * count; j++) logits[j] *= scaling;
    empty_places(n, x, head, logits);
    float *out = (float *)x[STEP_NEAR] + head * n->groups * width;
    for (int64_t g = 0; g < n->groups; g++) {
        int64_t row = head * n->groups + g;
        float largest = softmax_weights(logits + g * count, count, &total);
        ((float *)x[STEP_NEAR_SIZE])[row] = total ? largest + __builtin_logf(total) : EMPTY;
        ((float *)x[STEP_LARGEST])[row] = largest;
        inverse[g] = total ? 1 / total : 0;
    }
    memset(out, 0, 4 * n->groups * width);
    add_weighted_values(n, out, new[2], head * window, logits, count, window, block);
    add_weighted_values(n, out, new[5], head * n->sinks, logits + window, count, n->sinks, block);
    add_weighted_values(n, out, kept[1], first, logits + near, count, n->exact, block);
    for (int64_t i = 0; i < n->groups * width; i++) out[i] *= inverse[i / width];
}

/* `JointMix`: the near output of each query becomes that of near and far keys. */
static void join_far_part(const step_sizes *n, char **x, int64_t head) {
    for (int64_t row = head * n->groups; row < (head + 1) * n->groups; row++) {
        float space[n->key_dim], *near = (float *)x[STEP_NEAR] + row * n->width;
        const float *far = (const float *)x[STEP_FAR] + row * n->width;
        const float *query = row_as_floats(x[STEP_QUERY], row, n->key_dim, n->query_bytes, space);
        float half_norm = (float)n->scaling / 2 * dot(query, query, n->key_dim);
        float add = ((float *)x[STEP_LOG_SCALE])[row] - ((float *)x[STEP_NORM_WEIGHT])[row] * half_norm;
        float less = ((float *)x[STEP_NEAR_SIZE])[row] - ((float *)x[STEP_FAR_SIZE])[row] - add;
        float share = 1 / (1 + __builtin_expf(less));
        for (int64_t j = 0; j < n->width; j++) near[j] += share * (far[j] - near[j]);
    }
}

static void step_hybrid(const step_sizes *n, char **x, float *exponents) {
    char **new = x + STEP_NEW;
    float *far_space = exponents + (1 + n->groups) * n->features, *queries = far_space + 4 * n->features;
    int64_t columns = round_up(n->key_dim);
    float *moved_space = queries + n->groups * columns, *block = moved_space + n->groups * columns;
    float *logits = block + BLOCK * (columns > round_up(n->width) ? columns : round_up(n->width));
    int64_t window = n->window, sinks = n->sinks, key = n->key_dim * n->key_bytes, value = n->width * n->value_bytes;
    int64_t seen = *(const int64_t *)x[STEP_SEEN], now = (int64_t)((uint64_t)seen + 1); /* any number of a file */
    int64_t position = x[STEP_POSITION] ? *(const int32_t *)x[STEP_POSITION] : 0, last = n->trained_length - 1;
    int is_far = *x[STEP_KIND] == FAR_LATER, is_sink = seen < sinks,
        is_beyond = n->pairs && n->trained_length && position > last;
    const char kind = is_sink ? SINK : FAR_LATER;
    float to_map[2 * n->pairs + 1], to_last[2 * n->pairs + 1];
    int32_t oldest = new[7] ? *(const int32_t *)x[STEP_WINDOW_POSITION] : 0;
    shift_rows(new[3], x[STEP_KIND], &kind, window, 0, 1);
    *(int64_t *)new[6] = now;
    if (new[7]) shift_rows(new[7], x[STEP_WINDOW_POSITION], x[STEP_POSITION], window, 0, 4);
    make_turn(to_map, (const float *)x[STEP_FREQUENCIES], n->pairs, n->first_turned, -position);
    if (is_beyond) make_turn(to_last, (const float *)x[STEP_FREQUENCIES], n->pairs, 0, last - position);
    for (int64_t head = 0; head < n->heads; head++) {
        const char *new_key = x[STEP_KEY] + head * key, *new_value = x[STEP_VALUE] + head * value;
        float space[n->width], *moved = is_beyond ? moved_space : queries;
        for (int64_t g = 0; g < n->groups; g++) {
            float *query = queries + g * columns;
            const float *row = row_as_floats(x[STEP_QUERY], head * n->groups + g, n->key_dim, n->query_bytes, query);
            if (row != query) memcpy(query, row, 4 * n->key_dim);
            for (int64_t i = n->key_dim; i < columns; i++) query[i] = moved[g * columns + i] = 0;
            if (is_beyond) turned_row(n, query, 0, to_last, moved + g * columns);
        }
        /* Before anything moves: it may move in place. */
        leaving gone = leaving_key(n, x, head, oldest, is_far);
        map_rows(n, x, head, &gone, queries, to_map, exponents, far_space);
        update_far(n, x, head, row_as_floats(gone.value, 0, n->width, n->value_bytes, space), gone.is_far, exponents,
                   exponents + n->features, far_space);
        if (n->exact) {
            volatile float recent = ((const float *)x[STEP_SLOPE])[head] * (float)now; /* rounded, as in torch */
            float score = ((const float *)x[STEP_SCORE])[head] + recent;
            char *scores = new[STEP_WINDOW_SCORE - STEP_SUMS] + 4 * head *window;
            keep_key(n, x, head, &gone, oldest, is_far);
            shift_rows(scores, x[STEP_WINDOW_SCORE] + 4 * head * window, (char *)&score, window, 0, 4);
        }
        shift_rows(new[1] + head *window *key, x[STEP_WINDOW_KEY] + head * window * key, new_key, window, 0, key);
        shift_rows(new[2] + head *window *value, x[STEP_WINDOW_VALUE] + head * window * value, new_value, window, 0,
                   value);
        copy_rows(new[4] + head *sinks *key, x[STEP_SINK_KEY] + head * sinks * key, sinks * key);
        copy_rows(new[5] + head *sinks *value, x[STEP_SINK_VALUE] + head * sinks * value, sinks * value);
        if (is_sink && seen >= 0) {
            memcpy(new[4] + (head * sinks + seen) * key, new_key, key);
            memcpy(new[5] + (head * sinks + seen) * value, new_value, value);
        }
        attend_near(n, x, head, queries, moved, logits, block);
        if (x[STEP_LOG_SCALE]) join_far_part(n, x, head);
    }
}

int hybrid_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows) {
    int64_t near = n->window + n->sinks + n->exact, columns = round_up(n->key_dim), width = round_up(n->width);
    int64_t floats = (5 + n->groups) * n->features + n->groups * (2 * columns + near);
    floats += BLOCK * (columns > width ? columns : width);
    return step_sequences(n, x, strides, rows, floats, step_hybrid);
}
