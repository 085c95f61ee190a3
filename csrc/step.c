/* SPDX-License-Identifier: Apache-2.0 */
/* A step of one token after others: at this size every call of torch costs more than the sums.

   `plain_step` has plain features, `log_step` exponents. `hybrid_step` is `HybridAttention._attend_back` for one real
   token without ALiBi: the oldest place of the window goes to the far sums, the new token takes the newest. */
#include "blocks.h"

void plain_step(const float *query, const float *key, const float *value, const float *state, float *output,
                float *new_state, int64_t heads, int64_t groups, int64_t features, int64_t width) {
    int64_t row = width + 1;
    for (int64_t head = 0; head < heads; head++) {
        const float *k = key + head * features, *v = value + head * width, *old = state + head * features * row;
        float *new = new_state + head *features *row;
        for (int64_t j = 0; j < features; j++) {
            for (int64_t i = 0; i < width; i++) new[j * row + i] = old[j * row + i] + k[j] * v[i];
            new[j * row + width] = old[j * row + width] + k[j];
        }
        for (int64_t group = head * groups; group < (head + 1) * groups; group++) {
            const float *q = query + group * features;
            float *out = output + group * width, total = 0;
            memset(out, 0, sizeof(float) * width);
            for (int64_t j = 0; j < features; j++) {
                add_scaled(out, new + j *row, q[j], width);
                total += q[j] * new[j * row + width];
            }
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

INLINE float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t j = 0; j < n; j++) sum += a[j] * b[j];
    return sum;
}

/* x = exp(x - their maximum), 0 where x is EMPTY, nan where it is nan; returns the maximum, and the sum in `total`. */
static float softmax_weights(float *x, int64_t n, float *total) {
    float largest = EMPTY;
    *total = 0;
    for (int64_t j = 0; j < n; j++) largest = x[j] > largest ? x[j] : largest;
    for (int64_t j = 0; j < n; j++) *total += x[j] = x[j] <= EMPTY ? 0 : __builtin_expf(x[j] - largest);
    return largest;
}

/* What a place of the window holds besides nothing, 0: a token that goes to the far sums later, or a sink. */
enum { FAR_LATER = 1, SINK = 2 };
/* `count` rows of which the first leaves and `row` comes behind the last */
static void shift_rows(char *to, const char *from, const char *row, int64_t count, int64_t bytes) {
    memcpy(to, from + bytes, (count - 1) * bytes);
    memcpy(to + (count - 1) * bytes, row, bytes);
}

/* S, Z and m with a key (of `hybrid`: with the oldest place of the window, if far), and what queries read from them. */
static void update_far(const step_sizes *n, char **x, int64_t head, const float *value) {
    int64_t features = n->features, width = n->width, row = width + 2;
    const float *old = (const float *)x[STEP_SUMS] + head * features * row;
    const float *exponent = (const float *)x[STEP_KEY_EXPONENT] + head * features;
    float *sums = (float *)x[STEP_NEW] + head * features * row, *new = sums;
    float decay = x[STEP_DECAY] ? ((const float *)x[STEP_DECAY])[head % n->heads] : 0;
    int is_far = !x[STEP_KIND] || x[STEP_KIND][head / n->heads * n->window] == FAR_LATER;
    for (int64_t j = 0; j < features; j++, old += row, new += row) {
        float before = old[row - 1] + (is_far ? decay : 0), maximum = before;
        if (is_far && exponent[j] > maximum) maximum = exponent[j];
        float keep = __builtin_expf(before - maximum), weight = is_far ? __builtin_expf(exponent[j] - maximum) : 0;
        for (int64_t i = 0; i < width; i++) new[i] = old[i] * keep + (is_far ? weight * value[i] : 0);
        new[width] = old[width] * keep + weight;
        new[row - 1] = maximum;
    }
    for (int64_t group = head * n->groups; group < (head + 1) * n->groups; group++) {
        float *out = (float *)x[STEP_FAR] + group * width, weights[features], ignored, total = 0;
        const float *query = (const float *)x[STEP_QUERY_EXPONENT] + group * features;
        for (int64_t j = 0; j < features; j++) weights[j] = query[j] + sums[j * row + row - 1];
        float scale = softmax_weights(weights, features, &ignored);
        memset(out, 0, 4 * width);
        for (int64_t j = 0; j < features; j++) {
            add_scaled(out, sums + j * row, weights[j], width);
            total += weights[j] * sums[j * row + width];
        }
        for (int64_t i = 0; i < width; i++) out[i] *= total < TINY ? 0 : 1 / total;
        ((float *)x[STEP_FAR_SIZE])[group] = total < TINY ? EMPTY : scale + __builtin_logf(total);
    }
}

int log_step(const step_sizes *n, char **x) {
    for (int64_t head = 0; head < n->batch * n->heads; head++)
        update_far(n, x, head, (const float *)x[STEP_VALUE] + head * n->width);
    return 0;
}

/* `logits [groups, window + sinks]` is working space. */
static void attend_near(const step_sizes *n, char **x, int64_t head, float scaling, float *logits) {
    char **new = x + STEP_NEW;
    int64_t batch = head / n->heads, window = n->window, count = window + n->sinks, width = n->width;
    int64_t seen = ((const int64_t *)new[6])[batch];
    float total, space[n->stored_dim], query_space[n->stored_dim], value_space[width];
    for (int64_t j = 0; j < count; j++) {
        int is_sink = j >= window, is_seen = is_sink ? j - window < seen : new[3][batch * window + j] == FAR_LATER;
        const float *key = is_sink
                               ? row_as_floats(new[4], head * n->sinks + j - window, n->stored_dim, n->key_bytes, space)
                               : row_as_floats(new[1], head * window + j, n->stored_dim, n->key_bytes, space);
        const char *queries = is_sink && x[STEP_SINK_QUERY] ? x[STEP_SINK_QUERY] : x[STEP_QUERY];
        for (int64_t g = 0; g < n->groups; g++) {
            const float *query =
                row_as_floats(queries, head * n->groups + g, n->stored_dim, n->query_bytes, query_space);
            logits[g * count + j] = is_seen ? scaling * dot(query, key, n->key_dim) : EMPTY;
        }
    }
    for (int64_t g = 0; g < n->groups; g++) {
        int64_t row = head * n->groups + g;
        float *out = (float *)x[STEP_NEAR] + row * width, largest = softmax_weights(logits + g * count, count, &total);
        memset(out, 0, 4 * width);
        for (int64_t j = 0; j < count; j++) {
            const float *value =
                j < window ? row_as_floats(new[2], head * window + j, width, n->value_bytes, value_space)
                           : row_as_floats(new[5], head * n->sinks + j - window, width, n->value_bytes, value_space);
            if (logits[g * count + j]) add_scaled(out, value, logits[g * count + j], width); /* hidden may be nan */
        }
        for (int64_t i = 0; i < width; i++) out[i] *= total ? 1 / total : 0;
        ((float *)x[STEP_NEAR_SIZE])[row] = total ? largest + __builtin_logf(total) : EMPTY;
        ((float *)x[STEP_LARGEST])[row] = largest;
    }
}

/* `JointMix`: the near output of each query becomes that of near and far keys. */
static void join_far_part(const step_sizes *n, char **x, int64_t head, float scaling) {
    for (int64_t row = head * n->groups; row < (head + 1) * n->groups; row++) {
        int64_t query_head = row % (n->heads * n->groups);
        float space[n->stored_dim], *near = (float *)x[STEP_NEAR] + row * n->width;
        const float *far = (const float *)x[STEP_FAR] + row * n->width;
        const float *query = row_as_floats(x[STEP_QUERY], row, n->stored_dim, n->query_bytes, space);
        float half_norm = scaling / 2 * dot(query, query, n->key_dim);
        float add = ((float *)x[STEP_LOG_SCALE])[query_head] - ((float *)x[STEP_NORM_WEIGHT])[query_head] * half_norm;
        float less = ((float *)x[STEP_NEAR_SIZE])[row] - ((float *)x[STEP_FAR_SIZE])[row] - add;
        float share = 1 / (1 + __builtin_expf(less));
        for (int64_t j = 0; j < n->width; j++) near[j] += share * (far[j] - near[j]);
    }
}

int hybrid_step(const step_sizes *n, char **x, float scaling) {
    char **new = x + STEP_NEW;
    float *logits = malloc(4 * n->groups * (n->window + n->sinks));
    if (!logits) return 1;
    int64_t window = n->window, sinks = n->sinks, key = n->stored_dim * n->key_bytes, value = n->width * n->value_bytes;
    for (int64_t head = 0; head < n->batch * n->heads; head++) {
        int64_t batch = head / n->heads, seen = ((const int64_t *)x[STEP_SEEN])[batch];
        const char *new_key = x[STEP_KEY] + head * key, *new_value = x[STEP_VALUE] + head * value;
        const char kind = seen < sinks ? SINK : FAR_LATER;
        float space[n->width];
        if (head % n->heads == 0) {
            shift_rows(new[3] + batch *window, x[STEP_KIND] + batch * window, &kind, window, 1);
            ((int64_t *)new[6])[batch] = (int64_t)((uint64_t)seen + 1); /* any number may come from a file */
            if (new[7])
                shift_rows(new[7] + batch *window * 4, x[STEP_WINDOW_POSITION] + batch * window * 4,
                           x[STEP_POSITION] + batch * 4, window, 4);
        }
        shift_rows(new[1] + head *window *key, x[STEP_WINDOW_KEY] + head * window * key, new_key, window, key);
        shift_rows(new[2] + head *window *value, x[STEP_WINDOW_VALUE] + head * window * value, new_value, window,
                   value);
        if (sinks) { /* else there may be no address */
            memcpy(new[4] + head *sinks *key, x[STEP_SINK_KEY] + head * sinks * key, sinks * key);
            memcpy(new[5] + head *sinks *value, x[STEP_SINK_VALUE] + head * sinks * value, sinks * value);
        }
        if (kind == SINK && seen >= 0) {
            memcpy(new[4] + (head * sinks + seen) * key, new_key, key);
            memcpy(new[5] + (head * sinks + seen) * value, new_value, value);
        }
        update_far(n, x, head, row_as_floats(x[STEP_WINDOW_VALUE], head * window, n->width, n->value_bytes, space));
        attend_near(n, x, head, scaling, logits);
        if (x[STEP_LOG_SCALE]) join_far_part(n, x, head, scaling);
    }
    free(logits);
    return 0;
}
