"""C source of a step of one token after others: at this size every call of torch costs more than the sums.

All tensors are dense. `one_step` has plain features, `log_step` exponents. `hybrid_step` is `_attend_back` of `hybrid`
for one real token without ALiBi: the oldest place of the window goes to the far sums, the new token takes the newest.
"""

STEP = r"""
/* one token, everything dense: query [heads, groups, f], key [heads, f], value [heads, d], state [heads, f, d + 1] */
void one_step(const float *query, const float *key, const float *value, const float *state, float *output,
        float *new_state, int64_t heads, int64_t groups, int64_t f, int64_t d) {
    for (int64_t h = 0; h < heads; h++) {
        const float *k = key + h * f, *v = value + h * d, *old = state + h * f * (d + 1);
        float *new = new_state + h * f * (d + 1);
        for (int64_t j = 0; j < f; j++) {
            float *row = new + j * (d + 1);
            for (int64_t n = 0; n < d; n++) row[n] = old[j * (d + 1) + n] + k[j] * v[n];
            row[d] = old[j * (d + 1) + d] + k[j];
        }
        for (int64_t g = h * groups; g < (h + 1) * groups; g++) {
            const float *q = query + g * f;
            float *o = output + g * d, total = 0;
            memset(o, 0, sizeof(float) * d);
            for (int64_t j = 0; j < f; j++) {
                add_scaled(o, new + j * (d + 1), q[j], d);
                total += q[j] * new[j * (d + 1) + d];
            }
            float inverse = 1 / (total < TINY ? TINY : total);
            for (int64_t j = 0; j < d; j++) o[j] *= inverse;
        }
    }
}

/* Row i of x with n numbers, as float32. */
INLINE const float *as_floats(const char *x, int64_t i, int64_t n, int64_t bytes, float *space) {
    if (bytes == 4) return (const float *)x + i * n;
    for (int64_t j = 0; j < n; j++) {
        union { uint32_t bits; float value; } y = {(uint32_t)((const uint16_t *)x)[i * n + j] << 16};
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

enum { FAR_LATER = 1, SINK = 2 };
/* From S_SUMS to S_SEEN the state in the order of `HybridState`, from S_NEW on the new one likewise. The key of a place
   has `stored` numbers, of which the exact part sees the first `p`, its value `d`. */
enum { S_QUERY, S_KEY, S_VALUE, S_QUERY_EXPONENT, S_KEY_EXPONENT, S_DECAY, S_SUMS, S_WINDOW_KEY, S_WINDOW_VALUE, S_KIND,
       S_SINK_KEY, S_SINK_VALUE, S_SEEN, S_LOG_SCALE, S_NORM_WEIGHT, S_NEW, S_NEAR = S_NEW + 7, S_NEAR_SIZE, S_LARGEST,
       S_FAR, S_FAR_SIZE };

typedef struct { int64_t batch, heads, groups, window, sinks, p, stored, f, d, bytes; } step;

/* `count` rows of which the first leaves and `row` comes behind the last */
static void shift(char *to, const char *from, const char *row, int64_t count, int64_t bytes) {
    memcpy(to, from + bytes, (count - 1) * bytes);
    memcpy(to + (count - 1) * bytes, row, bytes);
}

/* S, Z and m with a key (of `hybrid`: with the oldest place of the window, if far), and what queries read from them. */
static void far_sums(const step *n, char **x, int64_t h, const float *value) {
    int64_t f = n->f, d = n->d, width = d + 2;
    const float *old = (const float *)x[S_SUMS] + h * f * width, *exponent = (const float *)x[S_KEY_EXPONENT] + h * f;
    float *new = (float *)x[S_NEW] + h * f * width;
    float decay = x[S_DECAY] ? ((const float *)x[S_DECAY])[h % n->heads] : 0;
    int is_far = !x[S_KIND] || x[S_KIND][h / n->heads * n->window] == FAR_LATER;
    for (int64_t j = 0; j < f; j++, old += width, new += width) {
        float before = old[width - 1] + (is_far ? decay : 0), maximum = before;
        if (is_far && exponent[j] > maximum) maximum = exponent[j];
        float keep = __builtin_expf(before - maximum), weight = is_far ? __builtin_expf(exponent[j] - maximum) : 0;
        for (int64_t i = 0; i < d; i++) new[i] = old[i] * keep + weight * value[i];
        new[d] = old[d] * keep + weight;
        new[width - 1] = maximum;
    }
    new = (float *)x[S_NEW] + h * f * width;
    for (int64_t g = h * n->groups; g < (h + 1) * n->groups; g++) {
        float *out = (float *)x[S_FAR] + g * d, weights[f], ignored, total = 0;
        for (int64_t j = 0; j < f; j++)
            weights[j] = ((const float *)x[S_QUERY_EXPONENT])[g * f + j] + new[j * width + width - 1];
        float scale = softmax_weights(weights, f, &ignored);
        memset(out, 0, 4 * d);
        for (int64_t j = 0; j < f; j++) {
            add_scaled(out, new + j * width, weights[j], d);
            total += weights[j] * new[j * width + d];
        }
        for (int64_t i = 0; i < d; i++) out[i] *= total < TINY ? 0 : 1 / total;
        ((float *)x[S_FAR_SIZE])[g] = total < TINY ? EMPTY : scale + __builtin_logf(total);
    }
}

void log_step(const int64_t *sizes, char **x) {
    const step *n = (const step *)sizes;
    for (int64_t h = 0; h < n->batch * n->heads; h++) far_sums(n, x, h, (const float *)x[S_VALUE] + h * n->d);
}

/* `logits [groups, window + sinks]` is working space. */
static void near_softmax(const step *n, char **x, int64_t h, float scaling, float *logits) {
    char **new = x + S_NEW;
    int64_t b = h / n->heads, w = n->window, count = w + n->sinks, bytes = n->bytes, p = n->p, d = n->d;
    int64_t seen = ((const int64_t *)new[6])[b];
    float total, space[n->stored + d];
    for (int64_t j = 0; j < count; j++) {
        int is_sink = j >= w, is_seen = is_sink ? j - w < seen : new[3][b * w + j] == FAR_LATER;
        const float *key = is_sink ? as_floats(new[4], h * n->sinks + j - w, n->stored, bytes, space)
                                   : as_floats(new[1], h * w + j, n->stored, bytes, space);
        for (int64_t g = 0; g < n->groups; g++) {
            float query[n->stored];
            const float *q = as_floats(x[S_QUERY], h * n->groups + g, n->stored, bytes, query);
            logits[g * count + j] = is_seen ? scaling * dot(q, key, p) : EMPTY;
        }
    }
    for (int64_t g = 0; g < n->groups; g++) {
        int64_t row = h * n->groups + g;
        float *out = (float *)x[S_NEAR] + row * d, largest = softmax_weights(logits + g * count, count, &total);
        memset(out, 0, 4 * d);
        for (int64_t j = 0; j < count; j++)
            add_scaled(out, j < w ? as_floats(new[2], h * w + j, d, bytes, space)
                                  : as_floats(new[5], h * n->sinks + j - w, d, bytes, space), logits[g * count + j], d);
        for (int64_t i = 0; i < d; i++) out[i] /= total;
        ((float *)x[S_NEAR_SIZE])[row] = largest + __builtin_logf(total);
        ((float *)x[S_LARGEST])[row] = largest;
    }
}

/* `JointMix`: the near output of each query becomes that of near and far keys. */
static void join_far(const step *n, char **x, int64_t h, float scaling) {
    for (int64_t row = h * n->groups; row < (h + 1) * n->groups; row++) {
        int64_t head = row % (n->heads * n->groups);
        float space[n->stored], *near = (float *)x[S_NEAR] + row * n->d, *far = (float *)x[S_FAR] + row * n->d;
        const float *query = as_floats(x[S_QUERY], row, n->stored, n->bytes, space);
        float half_norm = scaling / 2 * dot(query, query, n->p);
        float add = ((float *)x[S_LOG_SCALE])[head] - ((float *)x[S_NORM_WEIGHT])[head] * half_norm;
        float less = ((float *)x[S_NEAR_SIZE])[row] - ((float *)x[S_FAR_SIZE])[row] - add;
        float share = 1 / (1 + __builtin_expf(less));
        for (int64_t j = 0; j < n->d; j++) near[j] += share * (far[j] - near[j]);
    }
}

int hybrid_step(const int64_t *sizes, char **x, float scaling) {
    const step *n = (const step *)sizes;
    char **new = x + S_NEW;
    float *logits = malloc(4 * n->groups * (n->window + n->sinks));
    if (!logits) return 1;
    int64_t w = n->window, s = n->sinks, key = n->stored * n->bytes, value = n->d * n->bytes;
    for (int64_t h = 0; h < n->batch * n->heads; h++) {
        int64_t b = h / n->heads, seen = ((const int64_t *)x[S_SEEN])[b];
        const char *k = x[S_KEY] + h * key, *v = x[S_VALUE] + h * value, kind = seen < s ? SINK : FAR_LATER;
        float space[n->d];
        if (h % n->heads == 0) {
            shift(new[3] + b * w, x[S_KIND] + b * w, &kind, w, 1);
            ((int64_t *)new[6])[b] = seen + 1;
        }
        shift(new[1] + h * w * key, x[S_WINDOW_KEY] + h * w * key, k, w, key);
        shift(new[2] + h * w * value, x[S_WINDOW_VALUE] + h * w * value, v, w, value);
        memcpy(new[4] + h * s * key, x[S_SINK_KEY] + h * s * key, s * key);
        memcpy(new[5] + h * s * value, x[S_SINK_VALUE] + h * s * value, s * value);
        if (kind == SINK) {
            memcpy(new[4] + (h * s + seen) * key, k, key);
            memcpy(new[5] + (h * s + seen) * value, v, value);
        }
        far_sums(n, x, h, as_floats(x[S_WINDOW_VALUE], h * w, n->d, n->bytes, space));
        near_softmax(n, x, h, scaling, logits);
        if (x[S_LOG_SCALE]) join_far(n, x, h, scaling);
    }
    free(logits);
    return 0;
}
"""
