"""C source of the CPU kernels that `backends` compiles: attention forward and backward, elu(x) + 1.

The exact window of `hybrid` stands in `native_window`, softmax over few keys in `native_slots`, a step of one token in
`native_step`.

Forward, causal or not: O = (phi(q) S) / (phi(q) Z) block by block (Katharopoulos 2020, equations 9 and 18-20). Backward
(equations 13-15): forwards over the blocks for the gradients of queries, then backwards for those of keys and values.
Features are made from queries and keys a block at a time, and again in the backward pass: they never reach memory.
"""

from .native_blocks import BLOCKS
from .native_matrices import MATRICES
from .native_slots import SLOTS
from .native_step import STEP
from .native_window import WINDOW


SOURCE = (
    MATRICES
    + BLOCKS
    + WINDOW
    + SLOTS
    + STEP
    + r"""
/* 0 where there is nothing to see */
INLINE float inverse_of(float x) { return x < TINY && x > -TINY ? 0 : 1 / x; }

static void absorb(work *w) {
    int64_t f = w->f, d = w->d;
    if (w->s->causal) product(w->sums, d, w->key_t, C, 1, w->value, d, f, C, d, 1, FULL);
    else product(w->sums, d, w->key, 1, f, w->value, d, f, C, d, 1, FULL);
    add_rows(w->z, w->key, w->c, w->f);
}

/* Output of a block of queries, from the sums and, in the causal form, the keys of the same block. */
static void attend(work *w, int64_t n) {
    int64_t f = w->f, d = w->d;
    float total[C], inverse[C], scale[C], zeros[C] = {0};
    for (int64_t g = 0; g < w->s->groups; g++) {
        load_queries(w, g, n, scale);
        expect(w, 3, OUTPUT, g, n, n + w->c);
        product(w->out, d, w->query, f, 1, w->sums, d, C, f, d, 0, FULL);
        row_dots(total, w->query, w->z, 0, f);
        if (w->s->causal) {
            product(w->scores, C, w->query, f, 1, w->key_t, C, C, f, C, 0, INTO_LOWER);
            lower(w->scores, zeros);
            product(w->out, d, w->scores, C, 1, w->value, d, C, C, d, 1, LOWER);
            row_dots(inverse, w->scores, w->one, 0, C);
            for (int64_t t = 0; t < C; t++) total[t] += inverse[t];
        }
        for (int64_t t = 0; t < C; t++) inverse[t] = inverse_of(total[t]);
        store(w, w->out, d, inverse, OUTPUT, g, n, w->s->width);
        store_numbers(w, total, DENOMINATOR, g, n);
        store_numbers(w, scale, SCALE, g, n);
    }
}

/* Heads go on block by block in turns: what lies beside each other in memory is read together. */
static void take_turns(work *w, int64_t count, int (*go_on)(work *)) {
    for (int64_t i = 0; i < count; i++) w[i].n = 0, w[i].other = count > 1 ? w + (i + 1) % count : NULL;
    for (int is_going = 1; is_going;) {
        is_going = 0;
        for (int64_t i = 0; i < count; i++) is_going |= go_on(w + i);
    }
}

static int forward_block(work *w) {
    if (w->n >= w->s->keys) return 0;
    load_keys(w, w->n, 0);
    before_block(w, w->sums, w->z, 1);
    if (w->s->causal) attend(w, w->n);
    absorb(w);
    after_block(w, w->sums, w->z);
    w->n += w->c;
    return 1;
}

static int forward_queries(work *w) {
    if (w->n >= w->s->queries) return 0;
    whole_block(w, w->n);
    attend(w, w->n);
    w->n += w->c;
    return 1;
}

/* `pass` over all heads, as many at a time as take turns; 1 where there is no memory. */
static int over_heads(const sizes *s, const tensor *x, int is_backward, void (*pass)(work *, int64_t)) {
    work w[TOGETHER];
    int64_t most = begin(w, s, x, is_backward);
    for (int64_t first = s->start; first < s->stop && most; first += most) {
        int64_t count = s->stop - first < most ? s->stop - first : most;
        for (int64_t i = 0; i < count; i++) {
            enter(w + i, first + i);
            unpack(w + i, STATE, w[i].sums, w[i].z, w[i].maximum);
        }
        pass(w, count);
    }
    if (most) free(w->memory);
    return !most;
}

static void forward_pass(work *w, int64_t count) {
    take_turns(w, count, forward_block);
    if (!w->s->causal) take_turns(w, count, forward_queries);
    for (int64_t i = 0; i < count; i++) pack(w + i, NEW_STATE, w[i].sums, w[i].z, w[i].maximum);
}

int attention_forward(const sizes *s, const tensor *x) { return over_heads(s, x, 0, forward_pass); }

/* Gradients of numerator, w->out[C, d], and denominator, e[C], of a block of queries. */
static void grad_of_sums(work *w, float *e, int64_t g, int64_t n) {
    int64_t d = w->d;
    float total[C], grad[C], *output = w->output;
    load(w, w->out, d, GRAD_OUTPUT, g, n, w->s->width);
    load(w, output, d, OUTPUT, g, n, w->s->width);
    load_numbers(w, total, DENOMINATOR, g, n);
    load_numbers(w, grad, GRAD_DENOMINATOR, g, n);
    for (int64_t t = 0; t < C; t++) {
        float inverse = inverse_of(total[t]);
        for (int64_t j = 0; j < d; j++) w->out[t * d + j] *= inverse;
    }
    row_dots(e, w->out, output, d, d);
    for (int64_t t = 0; t < C; t++) e[t] = grad[t] - e[t];
}

/* The gradient of a block of features, w->grad[C, f], goes back through the map. */
static void finish(work *w, const float *features, const float *input, const float *factor, int is_query, int64_t g,
        int64_t n) {
    int64_t f = w->f, p = w->p;
    int to = is_query ? GRAD_QUERY : GRAD_KEY;
    affine *m = w->maps + (is_query ? 1 + g : 0);
    float total[C], half[C];
    if (w->x[GRAD_DECAY].data) {
        row_dots(total, w->grad, features, f, f);
        for (int64_t t = 0; t < w->c; t++)
            w->grad_decay += (is_query ? 1 : -1) * (w->real + w->steps[t] + 1.0) * total[t];
    }
    for (int64_t t = 0; t < w->c; t++)
        for (int64_t j = 0; j < f; j++) {
            float x = features[t * f + j], below = x < factor[t] ? x : factor[t];
            w->grad[t * f + j] *= w->s->map >= EXP ? x : w->s->map == ELU ? below : factor[t];
        }
    if (!m->weight) {
        store(w, w->grad, f, w->one, to, g, n, w->s->inputs);
        return;
    }
    if (w->image) grad_of_image(w, is_query ? w->query_softmax : w->key_softmax);
    float *grad = w->image ? w->image : w->grad;
    int64_t i = w->i;
    memset(grad + w->c * i, 0, 4 * i * (C - w->c));
    if (w->x[is_query ? GRAD_QUERY_MAP : GRAD_KEY_MAP].data)
        product(m->grad_weight, i, input, 1, p, grad, i, p, C, i, 1, FULL);
    add_rows(m->grad_bias, grad, w->c, i);
    product(w->grad_input, p, grad, i, 1, m->weight_t, p, C, i, p, 0, FULL);
    row_dots(total, grad, w->one, 0, i);
    row_dots(half, input, input, p, p);
    for (int64_t t = 0; t < w->c; t++) {
        m->grad_norm -= (double)total[t] * half[t] / 2;
        for (int64_t j = 0; j < p; j++) w->grad_input[t * p + j] -= m->norm * total[t] * input[t * p + j];
    }
    store(w, w->grad_input, p, w->one, to, g, n, w->s->inputs);
}

static void absorb_gradients(work *w, const float *e) {
    product(w->grad_sums, w->d, w->query, 1, w->f, w->out, w->d, w->f, C, w->d, 1, FULL);
    for (int64_t t = 0; t < w->c; t++) add_scaled(w->grad_z, w->query + t * w->f, e[t], w->f);
}

/* Gradients of a block of queries, which meet the sums of what lies before them and the keys of the block. */
static void query_gradients(work *w, int64_t n) {
    int64_t f = w->f, d = w->d;
    float e[C], scale[C];
    for (int64_t g = 0; g < w->s->groups; g++) {
        load_queries(w, g, n, scale);
        grad_of_sums(w, e, g, n);
        product(w->grad, f, w->out, d, 1, w->sums_t, f, C, d, f, 0, FULL);
        if (w->s->causal) {
            product(w->pairs, C, w->out, d, 1, w->value_t, C, C, d, C, 0, INTO_LOWER);
            lower(w->pairs, e);
            product(w->grad, f, w->pairs, C, 1, w->key, f, C, C, f, 1, LOWER);
        } else
            absorb_gradients(w, e);
        for (int64_t t = 0; t < w->c; t++) add_scaled(w->grad + t * f, w->z, e[t], f);
        finish(w, w->query, w->query_input, w->query_factor, 1, g, n);
    }
}

/* Gradients of a block of keys and values, which meet the sums over the queries behind them and those of the block. */
static void key_gradients(work *w, int64_t n) {
    int64_t f = w->f, d = w->d;
    float e[C], scale[C], zeros[C] = {0};
    transpose(w->sums_t, f, w->grad_sums, d, f, d);
    product(w->grad, f, w->value, d, 1, w->sums_t, f, C, d, f, 0, FULL);
    product(w->grad_value, d, w->key, f, 1, w->grad_sums, d, C, f, d, 0, FULL);
    for (int64_t t = 0; t < C; t++) add_scaled(w->grad + t * f, w->grad_z, 1, f);
    for (int64_t g = 0; g < w->s->groups && w->s->causal; g++) {
        load_queries(w, g, n, scale);
        grad_of_sums(w, e, g, n);
        product(w->scores, C, w->query, f, 1, w->key_t, C, C, f, C, 0, INTO_LOWER);
        lower(w->scores, zeros);
        product(w->pairs, C, w->out, d, 1, w->value_t, C, C, d, C, 0, INTO_LOWER);
        lower(w->pairs, e);
        product(w->grad, f, w->pairs, 1, C, w->query, f, C, C, f, 1, LOWER_T);
        product(w->grad_value, d, w->scores, 1, C, w->out, d, C, C, d, 1, LOWER_T);
        absorb_gradients(w, e);
    }
    finish(w, w->key, w->key_input, w->key_factor, 0, 0, n);
    store(w, w->grad_value, d, w->one, GRAD_VALUE, 0, n, w->s->width);
}

static void remember_block(work *w, int64_t number, int64_t n) {
    w->starts[2 * number] = n, w->starts[2 * number + 1] = w->real;
    if (w->s->map < EXP) return;
    memcpy(w->maxima + 2 * number * w->f, w->maximum, 4 * w->f);
    memcpy(w->maxima + (2 * number + 1) * w->f, w->rescale, 4 * w->f);
}

static int64_t recall_block(work *w, int64_t number) {
    w->real = w->starts[2 * number + 1];
    if (w->s->map >= EXP) {
        memcpy(w->maximum, w->maxima + 2 * number * w->f, 4 * w->f);
        memcpy(w->rescale, w->maxima + (2 * number + 1) * w->f, 4 * w->f);
    }
    return w->starts[2 * number];
}

static void store_map_gradients(const work *w, int which, int64_t g, const affine *m) {
    const tensor *x = w->x + which;
    for (int64_t i = 0; i < w->s->inputs && x->data; i++)
        memcpy(at(w, which, g, i), m->grad_weight + i * w->i, 4 * image_columns(w->s));
    if (x[1].data) memcpy(at(w, which + 1, g, 0), m->grad_bias, 4 * w->s->features);
    if (x[2].data) *(float *)at(w, which + 2, g, 0) = m->grad_norm;
}

/* Forwards over the blocks, for the gradients of queries. */
static int backward_block(work *w) {
    int64_t f = w->f, d = w->d;
    if (w->n >= w->s->keys) return 0;
    load_keys(w, w->n, 0);
    before_block(w, w->sums_t, w->z, 0);
    transpose(w->value_t, C, w->value, d, C, d);
    if (w->s->causal) {
        remember_block(w, w->number++, w->n);
        query_gradients(w, w->n);
    }
    product(w->sums_t, f, w->value_t, C, 1, w->key, f, d, C, f, 1, FULL);
    add_rows(w->z, w->key, w->c, f);
    after_block(w, w->sums_t, w->z);
    w->n += w->c;
    return 1;
}

static int backward_queries(work *w) {
    if (w->n >= w->s->queries) return 0;
    whole_block(w, w->n);
    query_gradients(w, w->n);
    w->n += w->c;
    return 1;
}

/* Backwards over the blocks, for the gradients of keys and values; `end` is where the last one began. */
static int backward_keys(work *w) {
    int is_causal = w->s->causal;
    if (is_causal ? !w->number : w->n >= w->s->keys) return 0;
    if (is_causal) w->n = recall_block(w, --w->number);
    load_keys(w, w->n, is_causal ? w->end - w->n : C);
    if (w->s->map < EXP) after_block(w, w->grad_sums, w->grad_z);
    if (is_causal) {
        w->real = w->starts[2 * w->number + 1];
        transpose(w->value_t, C, w->value, w->d, C, w->d);
    }
    key_gradients(w, w->n);
    if (is_causal) before_block(w, w->grad_sums, w->grad_z, 1);
    w->end = w->n;
    w->n = !is_causal ? w->n + w->c : w->number ? w->starts[2 * w->number - 2] : w->n;
    return 1;
}

static void turn_round(work *w) {
    for (int64_t j = 0; j < w->f && w->decay; j++) {
        double product = (double)w->z[j] * w->grad_z[j];
        for (int64_t i = 0; i < w->d; i++) product += (double)w->sums_t[i * w->f + j] * w->grad_sums[j * w->d + i];
        w->grad_decay += w->real * product;
    }
    w->end = w->s->keys;
    if (w->s->causal) w->next = -C;
}

static void finish_head(work *w) {
    const sizes *s = w->s;
    if (!s->causal && s->map >= EXP) { /* from the first maximum to the last */
        for (int64_t j = 0; j < w->f; j += LANES)
            *(vec *)(w->rescale + j) = exp_of_negative(*(vec *)(w->maxima + j) - *(vec *)(w->maximum + j));
        before_block(w, w->grad_sums, w->grad_z, 1);
    }
    pack(w, GRAD_FIRST, w->grad_sums, w->grad_z, NULL);
    if (w->x[GRAD_DECAY].data) *(float *)at(w, GRAD_DECAY, 0, 0) = w->grad_decay;
    store_map_gradients(w, GRAD_KEY_MAP, 0, w->maps);
    for (int64_t g = 0; g < s->groups; g++) store_map_gradients(w, GRAD_QUERY_MAP, g, w->maps + 1 + g);
}

static void backward_pass(work *w, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        unpack(w + i, GRAD_STATE, w[i].grad_sums, w[i].grad_z, NULL);
        transpose(w[i].sums_t, w->f, w[i].sums, w->d, w->f, w->d);
        if (!w->s->causal) remember_block(w + i, 0, 0);
    }
    take_turns(w, count, backward_block);
    if (!w->s->causal) take_turns(w, count, backward_queries);
    for (int64_t i = 0; i < count; i++) turn_round(w + i);
    take_turns(w, count, backward_keys);
    for (int64_t i = 0; i < count; i++) finish_head(w + i);
}

int attention_backward(const sizes *s, const tensor *x) { return over_heads(s, x, 1, backward_pass); }

void elu_plus_one(const float *x, float *out, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) *(vec *)(out + i) = elu_of(*(const vec *)(x + i));
    vec rest = {0};
    memcpy(&rest, x + i, 4 * (n - i));
    rest = elu_of(rest);
    memcpy(out + i, &rest, 4 * (n - i));
}
"""
)
