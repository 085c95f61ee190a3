/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bfloat16 numbers, added in float32, on processors with AVX512-BF16: twice the rate of float32 (AMD Zen 4:
   232 GFLOP/s for 116). Intel's have half the rate of float32 (Xeon of family 6, model 207: 96 for 200), so on these,
   as without AVX512-BF16, bfloat16 is widened when it is loaded, or goes through tiles.h.

   Two numbers share 32 bits, the first in the lower half: of a left factor two columns, of a right factor two rows.
   They are multiplied with the two of the other factor at once. All sums stay float32. This is for elu + 1 of inputs,
   and outputs, in bfloat16: such features are never negative, so rounding them changes each weight by 2^-8 of itself at
   most, as much as two roundings of an output. */
#ifndef BFLOAT16_H
#define BFLOAT16_H

#include "tiles.h"

#ifdef WITH_BFLOAT16
#define ONES 0x3f803f80

static inline int takes_packed(const sizes *s, const tensor *x) {
    return bfloat16_products == IN_AVX512_BF16 && s->map == ELU && !x[KEY_MAP].data && x[QUERY].bytes == 2 &&
           x[KEY].bytes == 2 && x[VALUE].bytes == 2 && x[OUTPUT].bytes == 2;
}

WITH_BFLOAT16 INLINE vector add_products(vector sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

INLINE int64_t packed_columns(int64_t columns) {
    return round_up((columns + 1) / 2);
}

static inline void allocate_packed(work *w, char **memory) {
    int64_t f = w->feature_row, d = w->value_row, packed = packed_columns(f);
    w->packed_query = (uint32_t *)allocate(memory, BLOCK * packed);
    w->packed_key_t = (uint32_t *)allocate(memory, BLOCK * packed);
    w->packed_key = (uint32_t *)allocate(memory, BLOCK / 2 * f);
    w->packed_value = (uint32_t *)allocate(memory, BLOCK / 2 * d);
    w->packed_scores = (uint32_t *)allocate(memory, BLOCK / 2 * BLOCK);
    w->packed_sums = (uint32_t *)allocate(memory, f / 2 * d);
    w->packed_z = (uint32_t *)allocate(memory, packed);
}

/* out[rows, packed_columns(columns)] = x[rows, columns], 0 beyond */
WITH_BFLOAT16 static void pack_columns(uint32_t *out, const float *x, int64_t rows, int64_t columns) {
    for (int64_t t = 0; t < rows; t++, x += columns)
        for (int64_t j = 0; j < columns; j += 2 * LANES, out += LANES) {
            vector second = j + LANES < columns ? *(const vector *)(x + j + LANES) : (vector){0};
            _mm512_storeu_si512(out, halves_of(*(const vector *)(x + j), second));
        }
}

/* out[rows / 2, columns] = x[rows, columns] */
WITH_BFLOAT16 static void pack_rows(uint32_t *out, const float *x, int64_t rows, int64_t columns) {
    for (int64_t t = 0; t < rows; t += 2, x += 2 * columns)
        for (int64_t j = 0; j < columns; j += LANES, out += LANES)
            _mm512_storeu_si512(out, pairs_of(*(const vector *)(x + j), *(const vector *)(x + columns + j)));
}

/* a[rows, depth] times b[depth, columns]; `depth` counts pairs. */
typedef struct {
    const uint32_t *a, *b;
    int64_t row, column, ldb, depth;
} packed_factors;

WITH_BFLOAT16 INLINE void packed_panel(float *out, int64_t ldo, const packed_factors *factors, int count, int rows,
                                       int width, int add) {
    vector sum[2 * ROWS][PANEL];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) sum[r][i] = (vector){0};
    for (int number = 0; number < count; number++) {
        packed_factors y = factors[number];
        for (int64_t k = 0; k < y.depth; k++)
            for (int i = 0; i < width; i++) {
                __m512i b = _mm512_loadu_si512(y.b + k * y.ldb + i * LANES);
                for (int r = 0; r < rows; r++)
                    sum[r][i] = add_products(sum[r][i], _mm512_set1_epi32(y.a[r * y.row + k * y.column]), b);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            vector *x = (vector *)(out + r * ldo + i * LANES);
            *x = sum[r][i] + (add ? *x : (vector){0});
        }
}

/* out[rows, columns] (+)= the sum of `count` products. With LOWER, of the last one row i of a ends at column i. */
WITH_BFLOAT16 INLINE void packed_product(float *out, const packed_factors *x, int count, int64_t rows, int64_t columns,
                                         int add, int shape) {
    packed_factors y[2];
    for (int64_t i = 0; i < rows; i += ROWS, out += ROWS * columns) {
        int64_t j = 0;
        for (int number = 0; number < count; number++) y[number] = x[number], y[number].a += i * x[number].row;
        if (shape == LOWER) y[count - 1].depth = (i + ROWS) / 2;
        prefetch_next();
        for (; j + PANEL * LANES <= columns; j += PANEL * LANES) {
            packed_panel(out + j, columns, y, count, ROWS, PANEL, add);
            for (int number = 0; number < count; number++) y[number].b += PANEL * LANES;
        }
        for (; j < columns; j += LANES) {
            packed_panel(out + j, columns, y, count, ROWS, 1, add);
            for (int number = 0; number < count; number++) y[number].b += LANES;
        }
    }
}

/* Of BLOCK rows of scores the columns up to the diagonal, and some beyond. */
WITH_BFLOAT16 static void score_packed(float *out, const packed_factors *x) {
    packed_factors y = *x;
    for (int64_t i = 0; i < BLOCK; i += 2 * ROWS, out += 2 * ROWS * BLOCK, y.a += 2 * ROWS * y.row) {
        prefetch_next();
        if (i < LANES)
            packed_panel(out, BLOCK, &y, 1, 2 * ROWS, 1, 0);
        else
            packed_panel(out, BLOCK, &y, 1, 2 * ROWS, 2, 0);
    }
}

/* Pairs of the numbers of two rows; `width` of them are wanted, at most two vectors. */
INLINE void store_pairs(uint32_t *out, __m512i first, __m512i second, int64_t width) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(first, low, second));
    if (width > LANES) _mm512_storeu_si512(out + LANES, _mm512_permutex2var_epi16(first, high, second));
}

INLINE __mmask32 first_of(int64_t left) {
    return left < 2 * LANES ? (1u << left) - 1 : ~0u;
}

/* As many of `left` numbers as there is room for, 0 beyond. */
INLINE __m512i load_first(const char *x, int64_t left) {
    return _mm512_maskz_loadu_epi16(first_of(left), x);
}

/* factor[t] (elu + 1) of the rows of a block of queries or keys, 0 where the factor is 0 and beyond the columns */
WITH_BFLOAT16 static void load_packed(const work *w, uint32_t *out, int which, int64_t g, int64_t n,
                                      const float *factor) {
    int64_t columns = w->sizes->inputs, packed = packed_columns(columns);
    prefetch_following(w, which, g, n);
    memset(out + w->tokens * packed, 0, 4 * packed * (BLOCK - w->tokens));
    for (int64_t t = 0; t < w->tokens; t++, out += packed) {
        const char *row = address_of(w, which, g, n + t);
        if (!factor[t]) {
            memset(out, 0, 4 * packed);
            continue;
        }
        for (int64_t j = 0; j < columns; j += 2 * LANES) {
            __m512i x = load_first(row + 2 * j, columns - j);
            vector low = (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16);
            vector high = (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16);
            __m512i both = halves_of(elu_of(low) * factor[t], elu_of(high) * factor[t]);
            _mm512_storeu_si512(out + j / 2, _mm512_maskz_mov_epi16(first_of(columns - j), both));
        }
    }
}

/* Features and values of a block of keys from token n on. */
static void load_packed_keys(work *w, int64_t n) {
    int64_t f = w->feature_row, d = w->value_row, width = w->sizes->width, packed = packed_columns(f);
    load_packed(w, w->packed_query, KEY, 0, n, w->key_factor);
    if (w->sizes->causal)
        transpose((float *)w->packed_key_t, BLOCK, (const float *)w->packed_query, packed, BLOCK, packed);
    prefetch_following(w, VALUE, 0, n);
    for (int64_t t = 0; t < BLOCK; t += 2) {
        const uint32_t *key = w->packed_query + t * packed;
        for (int64_t j = 0; j < f; j += 2 * LANES)
            store_pairs(w->packed_key + t / 2 * f + j, _mm512_loadu_si512(key + j / 2),
                        _mm512_loadu_si512(key + packed + j / 2), f - j);
        for (int64_t j = 0; j < d; j += 2 * LANES) {
            __m512i x[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
            for (int i = 0; i < 2; i++)
                if (t + i < w->tokens && w->key_factor[t + i])
                    x[i] = load_first(address_of(w, VALUE, 0, n + t + i) + 2 * j, width - j);
            store_pairs(w->packed_value + t / 2 * d + j, x[0], x[1], d - j);
        }
    }
}

static void pack_sums(work *w) {
    pack_rows(w->packed_sums, w->sums, w->feature_row, w->value_row);
    pack_columns(w->packed_z, w->z, 1, w->feature_row);
}

WITH_BFLOAT16 static void add_packed_block(work *w) {
    int64_t f = w->feature_row, d = w->value_row;
    packed_factors x = {w->packed_key, w->packed_value, 1, f, d, BLOCK / 2};
    packed_product(w->sums, &x, 1, f, d, 1, FULL);
    for (int64_t j = 0; j < f; j += LANES) {
        vector sum = *(vector *)(w->z + j);
        for (int64_t t = 0; t < BLOCK / 2; t++)
            sum = add_products(sum, _mm512_loadu_si512(w->packed_key + t * f + j), _mm512_set1_epi32(ONES));
        *(vector *)(w->z + j) = sum;
    }
}

/* w->out and `total`, numerator and denominator of the output of a block of queries from token n on */
WITH_BFLOAT16 static void attend_packed_block(work *w, float *total, int64_t g, int64_t n) {
    int64_t f = w->feature_row, d = w->value_row, packed = packed_columns(f), pairs = BLOCK / 2;
    float zeros[BLOCK] = {0};
    load_packed(w, w->packed_query, QUERY, g, n, w->query_factor);
    packed_factors x[] = {{w->packed_query, w->packed_sums, packed, 1, d, f / 2},
                          {w->packed_scores, w->packed_value, pairs, 1, d, pairs}};
    if (w->sizes->causal) {
        score_packed(w->scores, &(packed_factors){w->packed_query, w->packed_key_t, packed, 1, BLOCK, f / 2});
        add_and_clear_upper(w->scores, zeros);
        pack_columns(w->packed_scores, w->scores, BLOCK, BLOCK);
        packed_product(w->out, x, 2, BLOCK, d, 0, LOWER);
    } else
        packed_product(w->out, x, 1, BLOCK, d, 0, FULL);
    for (int64_t t = 0; t < BLOCK; t += LANES) {
        vector part[LANES];
        for (int r = 0; r < LANES; r++) {
            vector sum = {0};
            for (int64_t j = 0; j < packed; j += LANES)
                sum = add_products(sum, _mm512_loadu_si512(w->packed_query + (t + r) * packed + j),
                                   _mm512_loadu_si512(w->packed_z + j));
            for (int64_t j = 0; j < pairs && w->sizes->causal; j += LANES)
                sum = add_products(sum, _mm512_loadu_si512(w->packed_scores + (t + r) * pairs + j),
                                   _mm512_set1_epi32(ONES));
            part[r] = sum;
        }
        transpose_vectors(part);
        for (int r = 1; r < LANES; r++) part[0] += part[r];
        *(vector *)(total + t) = part[0];
    }
}

/* `store` of w->out in bfloat16 */
WITH_BFLOAT16 static void store_packed(const work *w, const float *scale, int64_t g, int64_t n) {
    int64_t width = w->sizes->width, d = w->value_row;
    for (int64_t t = 0; t < w->tokens; t++) {
        char *row = address_of(w, OUTPUT, g, n + t);
        for (int64_t j = 0; j < width; j += 2 * LANES) {
            const float *x = w->out + t * d + j;
            vector second = j + LANES < d ? *(const vector *)(x + LANES) : (vector){0};
            __m512i both = halves_of(*(const vector *)x * scale[t], second * scale[t]);
            _mm512_mask_storeu_epi16(row + 2 * j, first_of(width - j), both);
        }
    }
}

#else
static inline void store_packed(const work *w, const float *scale, int64_t g, int64_t n) {
    (void)w, (void)scale, (void)g, (void)n;
}
static inline int takes_packed(const sizes *s, const tensor *x) {
    (void)s, (void)x;
    return 0;
}
static inline void allocate_packed(work *w, char **memory) {
    (void)w, (void)memory;
}
static void load_packed_keys(work *w, int64_t n) {
    (void)w, (void)n;
}
static void pack_sums(work *w) {
    (void)w;
}
static void add_packed_block(work *w) {
    (void)w;
}
static void attend_packed_block(work *w, float *total, int64_t g, int64_t n) {
    (void)w, (void)total, (void)g, (void)n;
}
#endif

#endif
