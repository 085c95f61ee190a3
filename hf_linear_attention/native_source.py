"""C source of the CPU kernels that `backends` compiles: float32, features and head dimension multiples of 16.

A tensor comes as a pointer and four strides in elements: batch, key/value head, group (queries and outputs), token.
"""

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define PANEL 4
#else
#define LANES 8
#define PANEL 2
#endif
#define C 32 /* tokens in a block */
#define ROWS 4

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef struct { float *data; int64_t batch, head, group, token; } tensor;
typedef struct { int64_t batches, heads, groups, length, features, width, start, stop; } sizes;

static inline float *at(const tensor *x, int64_t b, int64_t h, int64_t g, int64_t n) {
    return x->data + b * x->batch + h * x->head + g * x->group + n * x->token;
}

/* out[rows, LANES * width] (+)= a[rows, depth] b[depth, LANES * width]; a has any strides. */
static inline __attribute__((always_inline)) void panel(float *out, int64_t ldo, const float *a, int64_t row,
        int64_t column, const float *b, int64_t ldb, int rows, int64_t depth, int width, int add) {
    vec sum[ROWS][PANEL];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++)
            sum[r][w] = add ? *(const vec *)(out + r * ldo + w * LANES) : (vec){0};
    for (int64_t k = 0; k < depth; k++)
        for (int w = 0; w < width; w++) {
            vec y = *(const vec *)(b + k * ldb + w * LANES);
            for (int r = 0; r < rows; r++) sum[r][w] += a[r * row + k * column] * y;
        }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) *(vec *)(out + r * ldo + w * LANES) = sum[r][w];
}

/* triangle 1: row i of a ends at column i; 2: column k of a (a transposed triangle) begins at row k. */
static void product(float *out, int64_t ldo, const float *a, int64_t row, int64_t column, const float *b, int64_t ldb,
        int64_t rows, int64_t depth, int64_t columns, int add, int triangle) {
    for (int64_t i = 0; i < rows; i += ROWS) {
        int64_t first = triangle == 2 ? i : 0, last = triangle == 1 && i + ROWS < depth ? i + ROWS : depth, j = 0;
        const float *x = a + i * row + first * column, *y = b + first * ldb;
        float *o = out + i * ldo;
        if (i + ROWS <= rows) {
            for (; j + PANEL * LANES <= columns; j += PANEL * LANES)
                panel(o + j, ldo, x, row, column, y + j, ldb, ROWS, last - first, PANEL, add);
            for (; j + 2 * LANES <= columns; j += 2 * LANES)
                panel(o + j, ldo, x, row, column, y + j, ldb, ROWS, last - first, 2, add);
            for (; j < columns; j += LANES)
                panel(o + j, ldo, x, row, column, y + j, ldb, ROWS, last - first, 1, add);
        } else
            for (int64_t r = 0; r < rows - i; r++)
                for (j = 0; j < columns; j += LANES)
                    panel(o + r * ldo + j, ldo, x + r * row, row, column, y + j, ldb, 1, last - first, 1, add);
    }
}

static void transpose(float *out, const float *x, int64_t ldx, int64_t rows, int64_t columns) {
    memset(out, 0, sizeof(float) * C * columns);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) out[j * C + i] = x[i * ldx + j];
}

static void lower(float *scores, int64_t rows) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i + 1; j < C; j++) scores[i * C + j] = 0;
}

static inline float dot(const float *x, const float *y, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static inline void add_scaled(float *out, const float *x, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] += scale * x[i];
}

static float *work(int64_t floats) {
    void *memory = NULL;
    return posix_memalign(&memory, 64, sizeof(float) * floats) ? NULL : memory;
}

#define TINY 1.17549435e-38f

/* state[F, D + 1] <-> sums[F, D], z[F] */
static void unpack(const float *state, float *sums, float *z, int64_t f, int64_t d) {
    for (int64_t i = 0; i < f; i++) {
        memcpy(sums + i * d, state + i * (d + 1), sizeof(float) * d);
        z[i] = state[i * (d + 1) + d];
    }
}

static void pack(float *state, const float *sums, const float *z, int64_t f, int64_t d) {
    for (int64_t i = 0; i < f; i++) {
        memcpy(state + i * (d + 1), sums + i * d, sizeof(float) * d);
        state[i * (d + 1) + d] = z[i];
    }
}

/* query, key, value, state (may be null), output, denominator, new state */
int causal_forward(const sizes *s, const tensor *x) {
    const tensor *query = x, *key = x + 1, *value = x + 2, *state = x + 3, *output = x + 4, *denominator = x + 5;
    const tensor *new_state = x + 6;
    int64_t f = s->features, d = s->width;
    float *sums = work(f * d + f + C * f + C * C), *z = sums + f * d, *key_t = z + f, *scores = key_t + C * f;
    if (!sums) return 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        int64_t b = i / s->heads, h = i % s->heads;
        if (state->data) unpack(at(state, b, h, 0, 0), sums, z, f, d);
        else memset(sums, 0, sizeof(float) * (f * d + f));
        for (int64_t n = 0; n < s->length; n += C) {
            int64_t c = s->length - n < C ? s->length - n : C;
            float *k = at(key, b, h, 0, n), *v = at(value, b, h, 0, n);
            transpose(key_t, k, key->token, c, f);
            for (int64_t g = 0; g < s->groups; g++) {
                float *q = at(query, b, h, g, n), *o = at(output, b, h, g, n);
                product(scores, C, q, query->token, 1, key_t, C, c, f, C, 0, 0);
                lower(scores, c);
                product(o, output->token, q, query->token, 1, sums, d, c, f, d, 0, 0);
                product(o, output->token, scores, C, 1, v, value->token, c, c, d, 1, 1);
                for (int64_t t = 0; t < c; t++) {
                    float total = dot(q + t * query->token, z, f), *row = o + t * output->token;
                    for (int64_t j = 0; j < C; j++) total += scores[t * C + j];
                    *at(denominator, b, h, g, n + t) = total;
                    float inverse = 1 / (total < TINY ? TINY : total);
                    for (int64_t j = 0; j < d; j++) row[j] *= inverse;
                }
            }
            product(sums, d, k, 1, key->token, v, value->token, f, c, d, 1, 0);
            for (int64_t t = 0; t < c; t++) add_scaled(z, k + t * key->token, 1, f);
        }
        pack(at(new_state, b, h, 0, 0), sums, z, f, d);
    }
    free(sums);
    return 0;
}

/* gradients of numerator, g[c, D], and denominator, e[c], of a block */
static void grad_of_sums(float *g, float *e, const float *grad, int64_t ldg, const float *out, int64_t ldo,
        const float *den, int64_t ldd, const float *grad_den, int64_t lde, int64_t c, int64_t d) {
    for (int64_t t = 0; t < c; t++) {
        float total = den[t * ldd], inverse = total < TINY ? 0 : 1 / total;
        for (int64_t j = 0; j < d; j++) g[t * d + j] = grad[t * ldg + j] * inverse;
        e[t] = grad_den[t * lde] - dot(g + t * d, out + t * ldo, d);
    }
}

/* query, key, value, state (may be null), output, denominator; gradients of output, denominator, new state (may be
   null); gradients to make: query, key, value, state (may be null) */
int causal_backward(const sizes *s, const tensor *x) {
    const tensor *query = x, *key = x + 1, *value = x + 2, *state = x + 3, *output = x + 4, *denominator = x + 5;
    const tensor *grad_output = x + 6, *grad_denominator = x + 7, *grad_state = x + 8;
    const tensor *grad_query = x + 9, *grad_key = x + 10, *grad_value = x + 11, *grad_first = x + 12;
    int64_t f = s->features, d = s->width;
    float *sums = work(2 * f * d + f + C * (f + 2 * d) + 2 * C * C + C);
    float *sums_t = sums + f * d, *z = sums_t + f * d, *key_t = z + f, *value_t = key_t + C * f;
    float *g = value_t + C * d, *scores = g + C * d, *pairs = scores + C * C, *e = pairs + C * C;
    if (!sums) return 1;
    for (int64_t i = s->start; i < s->stop; i++) {
        int64_t b = i / s->heads, h = i % s->heads, blocks = (s->length + C - 1) / C;
        memset(sums, 0, sizeof(float) * (2 * f * d + f));
        if (state->data) {
            unpack(at(state, b, h, 0, 0), sums, z, f, d);
            for (int64_t j = 0; j < f; j++)
                for (int64_t k = 0; k < d; k++) sums_t[k * f + j] = sums[j * d + k];
        }
        for (int64_t n = 0; n < s->length; n += C) {
            int64_t c = s->length - n < C ? s->length - n : C;
            float *k = at(key, b, h, 0, n), *v = at(value, b, h, 0, n);
            transpose(value_t, v, value->token, c, d);
            for (int64_t m = 0; m < s->groups; m++) {
                float *to = at(grad_query, b, h, m, n);
                grad_of_sums(g, e, at(grad_output, b, h, m, n), grad_output->token, at(output, b, h, m, n),
                    output->token, at(denominator, b, h, m, n), denominator->token,
                    at(grad_denominator, b, h, m, n), grad_denominator->token, c, d);
                product(pairs, C, g, d, 1, value_t, C, c, d, C, 0, 0);
                for (int64_t t = 0; t < c; t++)
                    for (int64_t j = 0; j <= t; j++) pairs[t * C + j] += e[t];
                lower(pairs, c);
                product(to, grad_query->token, g, d, 1, sums_t, f, c, d, f, 0, 0);
                product(to, grad_query->token, pairs, C, 1, k, key->token, c, c, f, 1, 1);
                for (int64_t t = 0; t < c; t++) add_scaled(to + t * grad_query->token, z, e[t], f);
            }
            product(sums_t, f, v, 1, value->token, k, key->token, d, c, f, 1, 0);
            for (int64_t t = 0; t < c; t++) add_scaled(z, k + t * key->token, 1, f);
        }
        memset(sums, 0, sizeof(float) * (2 * f * d + f));
        if (grad_state->data) {
            unpack(at(grad_state, b, h, 0, 0), sums, z, f, d);
            for (int64_t j = 0; j < f; j++)
                for (int64_t k = 0; k < d; k++) sums_t[k * f + j] = sums[j * d + k];
        }
        for (int64_t n = (blocks - 1) * C; n >= 0; n -= C) {
            int64_t c = s->length - n < C ? s->length - n : C;
            float *k = at(key, b, h, 0, n), *v = at(value, b, h, 0, n);
            float *to_key = at(grad_key, b, h, 0, n), *to_value = at(grad_value, b, h, 0, n);
            transpose(key_t, k, key->token, c, f);
            transpose(value_t, v, value->token, c, d);
            product(to_key, grad_key->token, v, value->token, 1, sums_t, f, c, d, f, 0, 0);
            product(to_value, grad_value->token, k, key->token, 1, sums, d, c, f, d, 0, 0);
            for (int64_t t = 0; t < c; t++) add_scaled(to_key + t * grad_key->token, z, 1, f);
            for (int64_t m = 0; m < s->groups; m++) {
                float *q = at(query, b, h, m, n);
                grad_of_sums(g, e, at(grad_output, b, h, m, n), grad_output->token, at(output, b, h, m, n),
                    output->token, at(denominator, b, h, m, n), denominator->token,
                    at(grad_denominator, b, h, m, n), grad_denominator->token, c, d);
                product(scores, C, q, query->token, 1, key_t, C, c, f, C, 0, 0);
                lower(scores, c);
                product(pairs, C, g, d, 1, value_t, C, c, d, C, 0, 0);
                for (int64_t t = 0; t < c; t++)
                    for (int64_t j = 0; j <= t; j++) pairs[t * C + j] += e[t];
                lower(pairs, c);
                product(to_key, grad_key->token, pairs, 1, C, q, query->token, c, c, f, 1, 2);
                product(to_value, grad_value->token, scores, 1, C, g, d, c, c, d, 1, 2);
                product(sums, d, q, 1, query->token, g, d, f, c, d, 1, 0);
                product(sums_t, f, g, 1, d, q, query->token, d, c, f, 1, 0);
                for (int64_t t = 0; t < c; t++) add_scaled(z, q + t * query->token, e[t], f);
            }
        }
        if (grad_first->data) pack(at(grad_first, b, h, 0, 0), sums, z, f, d);
    }
    free(sums);
    return 0;
}

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

/* exp for -87.3 <= x <= 0, relative error 3e-7 (Cephes) */
static inline float exp_of_negative(float x) {
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

void elu_plus_one(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float negative = x[i] < 0 ? x[i] : 0, e = exp_of_negative(negative > -87.3f ? negative : -87.3f);
        out[i] = x[i] > 0 ? x[i] + 1 : x[i] <= 0 ? e : x[i]; /* the last keeps nan */
    }
}
"""
