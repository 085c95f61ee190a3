/* SPDX-License-Identifier: Apache-2.0 */
/* Products, transposes, sums and maps of small matrices, the parts that every kernel is made of.

   Everything is float32, dense and in whole vectors of 16 (with AVX-512) or 8 numbers; a block has BLOCK tokens. */
#ifndef MATRICES_H
#define MATRICES_H

#include "linear_attention.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define PANEL 4
#define INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define LANES 8
#define PANEL 2
#define INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int_vector){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 32 /* tokens in a block */
#define ROWS 4
#define TINY 1.17549435e-38f

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t int_vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t bit_vector __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vector __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
/* Rows that the next block reads, or this one writes, come into the cache while products are at work. */
#define STREAMS 5
static __thread struct {
    const char *row;
    int64_t step, left, bytes, at_once;
} prefetch_streams[STREAMS];

INLINE void prefetch_next(void) {
    for (int i = 0; i < STREAMS; i++)
        for (int64_t count = 0; count < prefetch_streams[i].at_once && prefetch_streams[i].left > 0;
             count++, prefetch_streams[i].left--) {
            for (int64_t j = 0; j < prefetch_streams[i].bytes; j += 64)
                __builtin_prefetch(prefetch_streams[i].row + j, 0, 2);
            prefetch_streams[i].row += prefetch_streams[i].step;
        }
}

/* out[rows, LANES * width] (+)= a[rows, depth] b[depth, LANES * width]; a has any strides. */
INLINE void panel(float *out, int64_t ldo, const float *a, int64_t row, int64_t column, const float *b, int64_t ldb,
                  int64_t depth, int width, int add) {
    vector sum[ROWS][PANEL];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < width; i++) sum[r][i] = (vector){0};
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < width; i++) {
            vector y = *(const vector *)(b + k * ldb + i * LANES);
            for (int r = 0; r < ROWS; r++) sum[r][i] += a[r * row + k * column] * y;
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < width; i++) {
            vector *x = (vector *)(out + r * ldo + i * LANES);
            *x = sum[r][i] + (add ? *x : (vector){0});
        }
}

enum { FULL, LOWER, LOWER_T, INTO_LOWER };

/* Rows come in fours, columns in vectors. LOWER: row i of a ends at column i; LOWER_T: a is the transpose of such a
   matrix; INTO_LOWER: only that part of the result is wanted. */
static inline void product(float *out, int64_t ldo, const float *a, int64_t row, int64_t column, const float *b,
                           int64_t ldb, int64_t rows, int64_t depth, int64_t columns, int add, int shape) {
    for (int64_t i = 0; i < rows; i += ROWS) {
        int64_t first = shape == LOWER_T ? i : 0, end = shape == LOWER ? i + ROWS : depth, j = 0;
        int64_t stop = shape == INTO_LOWER ? i + ROWS : columns;
        const float *x = a + i * row + first * column, *y = b + first * ldb;
        prefetch_next();
        for (; j + PANEL * LANES <= columns && j < stop; j += PANEL * LANES)
            panel(out + i * ldo + j, ldo, x, row, column, y + j, ldb, end - first, PANEL, add);
        for (; j + 2 * LANES <= columns && j + LANES < stop; j += 2 * LANES)
            panel(out + i * ldo + j, ldo, x, row, column, y + j, ldb, end - first, 2, add);
        for (; j < stop; j += LANES) panel(out + i * ldo + j, ldo, x, row, column, y + j, ldb, end - first, 1, add);
    }
}

/* Columns of LANES rows become rows: as often as LANES is halved to 1, shuffle the two halves of the rows perfectly. */
INLINE void transpose_vectors(vector *x) {
    vector y[LANES];
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = SHUFFLE(x[i], x[i + LANES / 2], INTERLEAVE_LOW);
            y[2 * i + 1] = SHUFFLE(x[i], x[i + LANES / 2], INTERLEAVE_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

static inline void transpose(float *out, int64_t ldo, const float *x, int64_t ldx, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            vector part[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) part[r] = *(const vector *)(x + (i + r) * ldx + j);
            transpose_vectors(part);
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) *(vector *)(out + (j + r) * ldo + i) = part[r];
        }
}

INLINE vector broadcast(float x) {
    return x - (vector){0};
}

INLINE vector blend(int_vector mask, vector a, vector b) {
    return (vector)((mask & (int_vector)a) | (~mask & (int_vector)b));
}

/* LANES numbers in bfloat16 */
INLINE vector widen(const char *x) {
#ifdef __AVX512F__ /* GCC 12 widens each half of a vector by itself */
    bit_vector wide = (bit_vector)_mm512_cvtepu16_epi32((__m256i) * (const half_vector *)x);
#else
    bit_vector wide = __builtin_convertvector(*(const half_vector *)x, bit_vector);
#endif
    return (vector)(wide << 16);
}

/* nan where b is nan */
#ifdef __AVX512F__
INLINE vector maximum_of(vector a, vector b) {
    return _mm512_max_ps(a, b);
}

INLINE vector minimum_of(vector a, vector b) {
    return _mm512_min_ps(a, b);
}
#else
INLINE vector minimum_of(vector a, vector b) {
    return blend(a < b, a, b);
}

INLINE vector maximum_of(vector a, vector b) {
    return blend(a > b, a, b);
}
#endif

/* exp for x <= 0, relative error 2e-7 and exactly 1 at 0; no smaller than exp(-86.6), so that no result is denormal */
INLINE vector exp_of_negative(vector x) {
    x = maximum_of(broadcast(-86.6f), x); /* keeps nan */
#ifdef __AVX512F__
    vector power = _mm512_roundscale_ps(x * 1.44269504f, 0);
    vector r = x - power * 0.693147181f; /* at most log(2) / 2 in size */
#else
    int_vector power = __builtin_convertvector(x * 1.44269504f - 0.5f, int_vector);
    vector r = x - __builtin_convertvector(power, vector) * 0.693147181f;
#endif
    vector p = 8.2902721009e-3f * r + 4.1898159624e-2f; /* minimax, fitted with the first term held at 1 */
    p = p * r + 1.6667638127e-1f;
    p = p * r + 4.9999147841e-1f;
    p = p * r + 9.9999970631e-1f;
    p = p * r + 1;
#ifdef __AVX512F__
    return _mm512_scalef_ps(p, power);
#else
    return (vector)((bit_vector)p + ((bit_vector)power << 23)); /* any bits where x is hidden and anything */
#endif
}

INLINE vector elu_of(vector x) {
    return exp_of_negative(minimum_of((vector){0}, x)) + maximum_of((vector){0}, x);
}

/* out[C]: the sum, or the largest, over j of a[t, j] b[t, j] */
INLINE void reduce_rows(float *out, const float *a, const float *b, int64_t ldb, int64_t columns, int is_maximum) {
    for (int64_t t = 0; t < BLOCK; t += LANES) {
        vector part[LANES];
        for (int r = 0; r < LANES; r++) {
            const float *x = a + (t + r) * columns, *y = b + (t + r) * ldb;
            vector sum = *(const vector *)x;
            if (!is_maximum) sum *= *(const vector *)y;
            for (int64_t j = LANES; j < columns; j += LANES)
                if (is_maximum)
                    sum = maximum_of(sum, *(const vector *)(x + j));
                else
                    sum += *(const vector *)(x + j) * *(const vector *)(y + j);
            part[r] = sum;
        }
        transpose_vectors(part);
        for (int r = 1; r < LANES; r++)
            if (is_maximum)
                part[0] = maximum_of(part[0], part[r]);
            else
                part[0] += part[r];
        *(vector *)(out + t) = part[0];
    }
}

static inline void row_dot_products(float *out, const float *a, const float *b, int64_t ldb, int64_t columns) {
    reduce_rows(out, a, b, ldb, columns, 0);
}

static inline void add_scaled(float *out, const float *x, float scale, int64_t n) {
    for (int64_t j = 0; j < n; j++) out[j] += scale * x[j];
}

static inline void add_rows(float *out, const float *x, int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns; j += LANES) {
        vector sum = *(vector *)(out + j);
        for (int64_t t = 0; t < rows; t++) sum += *(const vector *)(x + t * columns + j);
        *(vector *)(out + j) = sum;
    }
}

/* scores[i, j] += add[i] where j <= i, and 0 elsewhere */
static inline void add_and_clear_upper(float *scores, const float *add) {
    int_vector column;
    for (int l = 0; l < LANES; l++) column[l] = l;
    for (int32_t i = 0; i < BLOCK; i++)
        for (int32_t j = 0; j < BLOCK; j += LANES) {
            vector *x = (vector *)(scores + i * BLOCK + j);
            *x = blend(column + j <= i, *x + add[i], (vector){0});
        }
}

#endif
