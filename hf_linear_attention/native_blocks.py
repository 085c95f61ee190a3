"""C source that fetches a block of tokens for the CPU kernels: features of queries and keys, values, what comes before.

A tensor comes as a pointer, four strides (batch, key/value head, group of queries or of their outputs, token) and the
size of a number: 4 bytes are float32, 2 are bfloat16 (the mask has 1). Inside, everything is float32. A missing tensor
is a null pointer.

Exponents (EXP) become features in [0, 1] by a running maximum per feature that is constant within a block: the block
ends early where the features of its first token could underflow beside those of its last.
"""

BLOCKS = r"""
#define EMPTY -1e30f /* the running maximum before the first key */
#define LIMIT 60.0f /* nats that the features of one block may differ by */

typedef struct { char *data; int64_t batch, head, group, token, bytes; } tensor; /* strides and size in bytes */
typedef struct { int64_t heads, groups, queries, keys, inputs, features, width, map, causal, start, stop; } sizes;

enum { PLAIN, ELU, EXP, HEDGEHOG }; /* from EXP on, exponents */
enum { QUERY, KEY, VALUE, MASK, DECAY, KEY_MAP, QUERY_MAP = KEY_MAP + 3, STATE = QUERY_MAP + 3, OUTPUT, DENOMINATOR,
       SCALE, NEW_STATE, GRAD_OUTPUT, GRAD_DENOMINATOR, GRAD_STATE, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_DECAY,
       GRAD_KEY_MAP, GRAD_QUERY_MAP = GRAD_KEY_MAP + 3, GRAD_FIRST = GRAD_QUERY_MAP + 3 };

/* x W + b - norm |x|^2 / 2, and the gradients of the three */
typedef struct { float *weight, *copy, *weight_t, *bias, norm, *grad_weight, *grad_bias; double grad_norm; } affine;

typedef struct work {
    const sizes *s;
    const tensor *x;
    const struct work *other; /* whose block at `n` comes next, NULL where it is of the same head */
    int64_t b, h, p, i, f, d; /* which head; inputs, their affine images, features and width in whole vectors */
    int64_t n, c, real, next; /* the block, its tokens; real tokens before it; where the next block is */
    int64_t number, end; /* in the backward pass: blocks so far; where the block behind this one begins */
    float decay, *maximum, *rescale, steps[C], query_factor[C], key_factor[C];
    float *query, *key, *value, *query_input, *key_input, *key_t, *scores, *out, *sums, *z, *one;
    float *image, *is_real, *query_softmax, *key_softmax; /* of HEDGEHOG */
    /* of the backward pass */
    float *grad, *grad_value, *output, *grad_input, *grad_sums, *grad_z, *value_t, *pairs, *sums_t, *maxima;
    int64_t *starts;
    double grad_decay;
    affine *maps; /* of keys, then of each group of queries */
    char *memory;
} work;

static inline char *at(const work *w, int which, int64_t g, int64_t n) {
    const tensor *x = w->x + which;
    return x->data + w->b * x->batch + w->h * x->head + g * x->group + n * x->token;
}

/* Fetch up to C rows of a tensor from token n on while the next products are at work. */
static void expect(const work *w, int stream, int which, int64_t g, int64_t n, int64_t length) {
    const tensor *x = w->x + which;
    int64_t left = n < 0 ? 0 : length - n;
    ahead[stream].row = at(w, which, g, n), ahead[stream].step = x->token, ahead[stream].left = left < C ? left : C;
    ahead[stream].bytes = (which < VALUE ? w->s->inputs : w->s->width) * x->bytes;
    ahead[stream].at_once = w->s->causal ? 2 : 4; /* fewer products follow in the other form */
}

INLINE vec map_of(const work *w, vec x, float factor) { return (w->s->map == ELU ? elu_of(x) : x) * factor; }

/* out[C, ld] = c rows of a tensor from token n on, 0 elsewhere; with a factor for each row, mapped to features. */
INLINE void load_mapped(const work *w, float *out, int64_t ld, int which, int64_t g, int64_t n, int64_t columns,
        const float *factor) {
    const char *row = at(w, which, g, n);
    if (!w->x[which].data) {
        memset(out, 0, 4 * ld * C);
        return;
    }
    int64_t length = which == KEY || which == VALUE ? w->s->keys : w->s->queries;
    int stream = which < VALUE ? which : which == OUTPUT ? 3 : which == GRAD_OUTPUT ? 4 : 2;
    if (w->other) expect(w->other, stream, which, g, w->other->n, length);
    else expect(w, stream, which, g, n + w->next, length);
    int64_t step = w->x[which].token, is_whole = columns % LANES == 0 && ld == columns;
    for (int64_t t = 0; t < w->c; t++, out += ld, row += step) {
        if (w->x[which].bytes == 4 && is_whole) {
            for (int64_t j = 0; j < columns; j += LANES) {
                vec x = *(const vec *)(row + 4 * j);
                *(vec *)(out + j) = factor ? map_of(w, x, factor[t]) : x;
            }
            continue;
        }
        if (w->x[which].bytes == 4) memcpy(out, row, 4 * columns);
        else
            for (int64_t j = 0; j < columns; j++) {
                union { uint32_t bits; float value; } x = {(uint32_t)((const uint16_t *)row)[j] << 16};
                out[j] = x.value;
            }
        if (ld > columns) memset(out + columns, 0, 4 * (ld - columns));
        for (int64_t j = 0; factor && j < ld; j += LANES) *(vec *)(out + j) = map_of(w, *(vec *)(out + j), factor[t]);
    }
    memset(out, 0, 4 * ld * (C - w->c));
}

static void load(const work *w, float *out, int64_t ld, int which, int64_t g, int64_t n, int64_t columns) {
    load_mapped(w, out, ld, which, g, n, columns, NULL);
}

/* c rows of a tensor from token n on = scale[t] rows[C, ld] */
static void store(const work *w, const float *rows, int64_t ld, const float *scale, int which, int64_t g, int64_t n,
        int64_t columns) {
    for (int64_t t = 0; t < w->c; t++, rows += ld) {
        char *row = at(w, which, g, n + t);
        if (w->x[which].bytes == 4)
            for (int64_t j = 0; j < columns; j++) ((float *)row)[j] = scale[t] * rows[j];
        else
            for (int64_t j = 0; j < columns; j++) {
                union { float value; uint32_t bits; } x = {scale[t] * rows[j]};
                uint32_t nearest = (x.bits + 0x7fff + (x.bits >> 16 & 1)) >> 16;
                ((uint16_t *)row)[j] = x.value == x.value ? nearest : 0x7fc0;
            }
    }
}

static void store_numbers(const work *w, const float *x, int which, int64_t g, int64_t n) {
    char *to = at(w, which, g, n);
    for (int64_t t = 0; t < w->c && w->x[which].data; t++) *(float *)(to + t * w->x[which].token) = x[t];
}

static void load_numbers(const work *w, float *x, int which, int64_t g, int64_t n) {
    memset(x, 0, 4 * C);
    if (w->x[which].data)
        for (int64_t t = 0; t < w->c; t++) x[t] = *(float *)at(w, which, g, n + t);
}

static int64_t image_columns(const sizes *s) { return s->map == HEDGEHOG ? s->features / 2 : s->features; }

/* out[C, f] = [log softmax(u), log softmax(-u)] for the rows u of w->image; softmax[2][C, i] are the two themselves. */
static void log_softmaxes(work *w, float *out, float *softmax) {
    int64_t i = w->i, columns = image_columns(w->s);
    float largest[C], total[C];
    memset(out, 0, 4 * C * w->f);
    for (int64_t t = 0; t < C; t++)
        for (int64_t j = columns; j < i; j++) w->image[t * i + j] = w->image[t * i];
    for (int part = 0; part < 2; part++, softmax += C * i) {
        float sign = part ? -1 : 1;
        for (int64_t j = 0; j < C * i; j++) softmax[j] = sign * w->image[j];
        reduce_rows(largest, softmax, NULL, 0, i, 1);
        for (int64_t t = 0; t < C; t++)
            for (int64_t j = 0; j < i; j += LANES) {
                vec *x = (vec *)(softmax + t * i + j);
                *x = exp_of_negative(*x - largest[t]);
            }
        row_dots(total, softmax, w->is_real, 0, i);
        for (int64_t t = 0; t < C; t++) {
            float *row = out + t * w->f + part * columns, less = largest[t] + __builtin_logf(total[t]);
            for (int64_t j = 0; j < columns; j++) row[j] = sign * w->image[t * i + j] - less;
            for (int64_t j = 0; j < i; j++) softmax[t * i + j] /= total[t];
        }
    }
}

/* w->image = its gradient, from that of what `log_softmaxes` made of it, w->grad[C, f]. */
static void grad_of_image(work *w, const float *softmax) {
    int64_t i = w->i, columns = image_columns(w->s);
    memset(w->image, 0, 4 * C * i);
    for (int part = 0; part < 2; part++, softmax += C * i)
        for (int64_t t = 0; t < w->c; t++) {
            const float *grad = w->grad + t * w->f + part * columns;
            float *to = w->image + t * i, total = 0, sign = part ? -1 : 1;
            for (int64_t j = 0; j < columns; j++) total += grad[j];
            for (int64_t j = 0; j < columns; j++) to[j] += sign * (grad[j] - softmax[t * i + j] * total);
        }
}

/* What the feature map takes: rows of queries or keys, or their affine images. */
static void load_inputs(work *w, float *out, float *input, int which, int64_t g, int64_t n, const affine *m) {
    const float *factor = which == KEY ? w->key_factor : w->query_factor;
    if (!m->weight) {
        load_mapped(w, out, w->f, which, g, n, w->s->inputs, w->s->map >= EXP ? NULL : factor);
        return;
    }
    float half[C];
    load(w, input, w->p, which, g, n, w->s->inputs);
    product(w->image ? w->image : out, w->i, input, w->p, 1, m->weight, w->i, C, w->s->inputs, w->i, 0, FULL);
    if (w->image) log_softmaxes(w, out, which == QUERY ? w->query_softmax : w->key_softmax);
    if (m->bias || m->norm) row_dots(half, input, input, w->p, w->p);
    for (int64_t t = 0; t < C && (m->bias || m->norm); t++)
        for (int64_t j = 0; j < w->f; j++) out[t * w->f + j] += (m->bias ? m->bias[j] : 0) - half[t] * m->norm / 2;
    for (int64_t t = 0; t < w->c && w->s->map < EXP; t++)
        for (int64_t j = 0; j < w->f; j += LANES) {
            vec *x = (vec *)(out + t * w->f + j);
            *x = map_of(w, *x, factor[t]);
        }
}

/* rows = exp(rows + add - less[t]), at most 1 */
static void exponentiate(work *w, float *rows, const float *less) {
    for (int64_t t = 0; t < w->c; t++, rows += w->f)
        for (int64_t j = 0; j < w->f; j += LANES) {
            vec *x = (vec *)(rows + j);
            *x = exp_of_negative(*x - less[t]);
        }
}

/* By how much any feature rises within the block after its first visible key; `top` is the new maximum. */
static float rise(const work *w, float *top) {
    int64_t f = w->s->features, is_first = 1;
    float largest = 0, base[f];
    memcpy(top, w->maximum, 4 * w->f);
    for (int64_t t = 0; t < w->c; t++) {
        if (!w->key_factor[t]) continue;
        const float *x = w->key + t * w->f;
        for (int64_t j = 0; j < f; j++) top[j] = x[j] > top[j] ? x[j] : top[j];
        if (is_first) memcpy(base, top, 4 * f);
        is_first = 0;
    }
    for (int64_t j = 0; j < f && !is_first; j++) largest = top[j] - base[j] > largest ? top[j] - base[j] : largest;
    return largest;
}

/* Where each token of a block stands among the real ones, and what a decay makes of that; at most `limit` tokens. */
static void count_steps(work *w, int64_t n, int64_t limit) {
    int64_t length = w->s->keys - n, count = 0;
    w->c = length < limit ? length : limit;
    for (int64_t t = 0; t < w->c; t++) {
        int is_real = !w->x[MASK].data || *at(w, MASK, 0, n + t);
        count += is_real;
        w->steps[t] = count - 1;
        w->query_factor[t] = 1;
        w->key_factor[t] = is_real;
        if (!w->decay || w->s->map >= EXP) continue;
        if (t && -w->decay * w->steps[t] > LIMIT) {
            w->c = t;
            break;
        }
        w->query_factor[t] = __builtin_expf(w->decay * w->steps[t]);
        w->key_factor[t] = is_real ? __builtin_expf(-w->decay * w->steps[t]) : 0;
    }
}

/* Exponents of keys become features; the maximum over those so far is new, unless `known`. */
static void exponentiate_keys(work *w, int64_t known) {
    int64_t f = w->s->features;
    float top[w->f];
    for (int64_t t = 0; t < w->c && w->decay; t++)
        for (int64_t j = 0; j < f; j++) w->key[t * w->f + j] -= w->decay * w->steps[t];
    if (!known) {
        for (int64_t j = 0; j < f; j++) w->maximum[j] += w->decay;
        while (rise(w, top) > LIMIT && w->s->causal && w->c > 1) w->c = (w->c + 1) / 2;
        for (int64_t j = 0; j < w->f; j += LANES)
            *(vec *)(w->rescale + j) = exp_of_negative(*(vec *)(w->maximum + j) - *(vec *)(top + j));
        memcpy(w->maximum, top, 4 * f);
    }
    for (int64_t t = 0; t < w->c; t++)
        for (int64_t j = 0; j < w->f; j += LANES) {
            vec *y = (vec *)(w->key + t * w->f + j);
            *y = exp_of_negative(*y - *(vec *)(w->maximum + j));
        }
}

/* Features and values of a block of keys: C of them, or fewer where the first features could underflow beside the
   largest. `known` are its tokens, when the maximum is known too. */
static void load_keys(work *w, int64_t n, int64_t known) {
    count_steps(w, n, known ? known : C);
    load_inputs(w, w->key, w->key_input, KEY, 0, n, w->maps);
    if (w->s->map >= EXP) exponentiate_keys(w, known);
    for (int64_t t = 0; t < w->c; t++)
        if (!w->key_factor[t]) memset(w->key + t * w->f, 0, 4 * w->f);
        else if (w->f > w->s->features) memset(w->key + t * w->f + w->s->features, 0, 4 * (w->f - w->s->features));
    memset(w->key + w->c * w->f, 0, 4 * w->f * (C - w->c));
    if (w->s->causal) transpose(w->key_t, C, w->key, w->f, C, w->f);
    load(w, w->value, w->d, VALUE, 0, n, w->s->width);
    for (int64_t t = 0; t < w->c; t++)
        if (!w->key_factor[t]) {
            memset(w->value + t * w->d, 0, 4 * w->d);
            if (w->maps->weight) memset(w->key_input + t * w->p, 0, 4 * w->p);
            for (int part = 0; part < 2 && w->image; part++)
                memset(w->key_softmax + (part * C + t) * w->i, 0, 4 * w->i);
        }
}

/* Features of a block of queries, and the logarithm of what they are divided by. */
static void load_queries(work *w, int64_t g, int64_t n, float *scale) {
    int64_t f = w->f;
    load_inputs(w, w->query, w->query_input, QUERY, g, n, w->maps + 1 + g);
    if (w->s->map < EXP) return;
    for (int64_t t = 0; t < C; t++)
        for (int64_t j = 0; j < f; j++) w->query[t * f + j] += w->maximum[j] + w->decay * w->steps[t];
    reduce_rows(scale, w->query, NULL, 0, f, 1);
    exponentiate(w, w->query, scale);
    memset(w->query + w->c * f, 0, 4 * f * (C - w->c));
}

/* Before a block the sums fade by one token, or move to the new maximum. `by_rows`: features are rows of `sums`. */
static void before_block(work *w, float *sums, float *z, int by_rows) {
    int64_t f = w->s->features, d = w->d;
    if (w->s->map < EXP && !w->decay) return;
    int is_same = 1;
    float scale[w->f];
    for (int64_t j = 0; j < w->f; j++) scale[j] = 1;
    for (int64_t j = 0; j < f; j++) {
        scale[j] = w->s->map >= EXP ? w->rescale[j] : __builtin_expf(w->decay);
        is_same &= scale[j] == 1;
        z[j] *= scale[j];
    }
    if (is_same) return;
    if (by_rows)
        for (int64_t j = 0; j < f; j++)
            for (int64_t i = 0; i < d; i++) sums[j * d + i] *= scale[j];
    else
        for (int64_t i = 0; i < d; i++)
            for (int64_t j = 0; j < w->f; j++) sums[i * w->f + j] *= scale[j];
}

/* After a block the sums fade to its last token. */
static void after_block(work *w, float *sums, float *z) {
    w->real += w->steps[w->c - 1] + 1;
    float steps = w->steps[w->c - 1], factor = __builtin_expf(w->decay * steps);
    if (!w->decay) return;
    for (int64_t j = 0; j < w->f && w->s->map >= EXP; j++) w->maximum[j] += w->decay * steps;
    if (w->s->map >= EXP) return;
    for (int64_t j = 0; j < w->f; j++) z[j] *= factor;
    for (int64_t j = 0; j < w->f * w->d; j++) sums[j] *= factor;
}

static void whole_block(work *w, int64_t n) {
    int64_t length = w->s->queries - n;
    w->c = length < C ? length : C;
    for (int64_t t = 0; t < C; t++) w->query_factor[t] = 1, w->steps[t] = 0;
}

/* state[F, D + 1 (+ 1)] <-> sums[f, d], z[f], maximum[f] */
static void unpack(const work *w, int which, float *sums, float *z, float *maximum) {
    int64_t row = w->s->width + 1 + (w->s->map >= EXP);
    memset(sums, 0, 4 * w->f * w->d);
    memset(z, 0, 4 * w->f);
    for (int64_t j = 0; maximum && j < w->f; j++) maximum[j] = EMPTY;
    if (!w->x[which].data) return;
    const float *state = (const float *)at(w, which, 0, 0);
    for (int64_t j = 0; j < w->s->features; j++, state += row) {
        memcpy(sums + j * w->d, state, 4 * w->s->width);
        z[j] = state[w->s->width];
        if (maximum && w->s->map >= EXP) maximum[j] = state[w->s->width + 1];
    }
}

static void pack(const work *w, int which, const float *sums, const float *z, const float *maximum) {
    if (!w->x[which].data) return;
    float *state = (float *)at(w, which, 0, 0);
    for (int64_t j = 0; j < w->s->features; j++, state += w->s->width + 1 + (w->s->map >= EXP)) {
        memcpy(state, sums + j * w->d, 4 * w->s->width);
        state[w->s->width] = z[j];
        if (w->s->map >= EXP) state[w->s->width + 1] = maximum ? maximum[j] : 0;
    }
}

static float *take(char **memory, int64_t floats) {
    char *start = *memory;
    *memory += 4 * ((floats + 15) & ~15);
    return (float *)start;
}

static int64_t whole(int64_t n) { return (n + 15) & ~15; }

static void describe(work *w, const sizes *s, const tensor *x) {
    memset(w, 0, sizeof(*w));
    w->s = s, w->x = x, w->p = whole(s->inputs), w->f = whole(s->features), w->d = whole(s->width);
    w->i = whole(image_columns(s));
}

/* Floats of `take_own`, at most; what is not used takes no memory. */
static int64_t own_floats(const work *w, int64_t blocks) {
    int64_t maps = 1 + w->s->groups;
    return 3 * w->f * (w->d + 1) + maps * (3 * w->p * w->i + 2 * w->f + 128) + blocks * (4 + 2 * w->f) + 256;
}

/* What a head keeps from block to block. */
static void take_own(work *w, char **memory, int64_t blocks, int is_backward) {
    int64_t p = w->p, i = w->i, f = w->f, d = w->d, maps = 1 + w->s->groups;
    w->maximum = take(memory, f), w->sums = take(memory, f * d), w->z = take(memory, f);
    w->grad_sums = take(memory, f * d), w->grad_z = take(memory, f), w->sums_t = take(memory, f * d);
    w->maps = (affine *)take(memory, maps * sizeof(affine) / 4);
    memset(w->maps, 0, maps * sizeof(affine));
    for (int64_t g = 0; g < maps; g++) {
        if (!w->x[g ? QUERY_MAP : KEY_MAP].data) continue;
        affine *a = w->maps + g;
        a->weight = a->copy = take(memory, p * i);
        if (is_backward) a->weight_t = take(memory, p * i), a->grad_weight = take(memory, p * i);
        a->bias = w->x[(g ? QUERY_MAP : KEY_MAP) + 1].data ? take(memory, f) : NULL, a->grad_bias = take(memory, f);
    }
    w->starts = (int64_t *)take(memory, 4 * blocks), w->maxima = take(memory, w->s->map >= EXP ? 2 * blocks * f : 0);
}

#define TOGETHER 16
#define OWN_IN_CACHE (1 << 19) /* floats */

/* Working space for as many heads as take turns: where they lie beside each other in memory, those whose sums stay in
   the cache together. Returns how many they are, 0 where there is no memory. */
static int64_t begin(work *w, const sizes *s, const tensor *x, int is_backward) {
    describe(w, s, x);
    int64_t p = w->p, f = w->f, d = w->d, blocks = is_backward && s->causal ? s->keys + 1 : 1;
    int64_t count = s->stop - s->start, most = x[KEY].head < x[KEY].token ? OWN_IN_CACHE / own_floats(w, 0) : 1;
    most = most < 1 ? 1 : most < TOGETHER ? most : TOGETHER;
    count = count < most ? count : most;
    int64_t i = w->i, of_image = s->map == HEDGEHOG ? 5 * C * i + i : 0;
    int64_t floats = of_image + f + C * (4 * f + 5 * d + 3 * p + 3 * C) + f + C + 256 + count * own_floats(w, blocks);
    void *memory;
    if (posix_memalign(&memory, 64, 4 * floats)) return 0;
    char *m = w->memory = memory;
    w->rescale = take(&m, f);
    w->query = take(&m, C * f), w->key = take(&m, C * f), w->key_t = take(&m, C * f);
    w->value = take(&m, C * d), w->out = take(&m, C * d), w->scores = take(&m, C * C);
    w->query_input = take(&m, C * p), w->key_input = take(&m, C * p);
    w->grad = take(&m, C * f), w->grad_value = take(&m, C * d), w->output = take(&m, C * d);
    w->grad_input = take(&m, C * p);
    w->value_t = take(&m, C * d), w->pairs = take(&m, C * C), w->one = take(&m, f + C);
    for (int64_t j = 0; j < f + C; j++) w->one[j] = 1;
    if (of_image) {
        w->image = take(&m, C * i), w->is_real = take(&m, i);
        w->query_softmax = take(&m, 2 * C * i), w->key_softmax = take(&m, 2 * C * i);
        for (int64_t j = 0; j < i; j++) w->is_real[j] = j < image_columns(s);
    }
    for (int64_t number = count - 1; number >= 0; number--) {
        w[number] = *w;
        take_own(w + number, &m, blocks, is_backward);
    }
    return count;
}

static void enter(work *w, int64_t number) {
    const sizes *s = w->s;
    w->b = number / s->heads, w->h = number % s->heads, w->real = 0, w->grad_decay = 0;
    w->n = 0, w->number = 0, w->next = C;
    w->decay = w->x[DECAY].data ? *(float *)at(w, DECAY, 0, 0) : 0;
    for (int64_t g = 0; g <= s->groups; g++) {
        affine *m = w->maps + g;
        int which = g ? QUERY_MAP : KEY_MAP, group = g ? g - 1 : 0;
        if (!m->weight) continue;
        int64_t columns = image_columns(s);
        if (columns == w->i && s->inputs == w->p && w->x[which].token == 4 * columns)
            m->weight = (float *)at(w, which, group, 0);
        else {
            memset(m->weight = m->copy, 0, 4 * w->p * w->i);
            for (int64_t i = 0; i < s->inputs; i++) memcpy(m->weight + i * w->i, at(w, which, group, i), 4 * columns);
        }
        if (m->weight_t) {
            transpose(m->weight_t, w->p, m->weight, w->i, w->p, w->i);
            memset(m->grad_weight, 0, 4 * w->p * w->i);
            memset(m->grad_bias, 0, 4 * w->f);
        }
        if (m->bias) {
            memset(m->bias, 0, 4 * w->f);
            memcpy(m->bias, at(w, which + 1, group, 0), 4 * s->features);
        }
        m->norm = w->x[which + 2].data ? *(float *)at(w, which + 2, group, 0) : 0;
        m->grad_norm = 0;
    }
}
"""
