/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule for one token: the state is read twice, once for S^T k and S^T q and once to be written. */
#include "matrices.h"

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

INLINE float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
    for (int64_t j = 0; j < n; j++) sum += a[j] * b[j];
    return sum;
}

void delta_step(const float *query, const float *key, const float *value, const float *decay, const float *beta,
                const float *state, float *output, float *new_state, int64_t heads, int64_t groups, int64_t features,
                int64_t width, int64_t decays, int64_t erases) {
    float fade[features], change[STRIP], read[STRIP];
    for (int64_t head = 0; head < heads; head++) {
        const float *k = key + head * features;
        for (int64_t j = 0; j < features; j++)
            fade[j] = j && decays == 1 ? fade[0] : __builtin_expf(decay[head * decays + j]);
        for (int64_t column = 0; column < width; column += STRIP) {
            int64_t first = head * features * width + column, left = width - column;
            strip s = {fade, k, state + first, new_state + first, features, width, left < STRIP ? left : STRIP};
            for (int64_t g = head * groups; g < (head + 1) * groups; g++) {
                float *out = output + g * width + column, own = dot(query + g * features, k, features);
                read_strip(read, out, &s, k, query + g * features);
                for (int64_t i = 0; i < s.columns; i++) {
                    change[i] = beta[head] * (value[head * width + column + i] - (erases ? read[i] : 0));
                    out[i] += own * change[i];
                }
            }
            write_strip(&s, change);
        }
    }
}
