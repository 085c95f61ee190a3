/* SPDX-License-Identifier: Apache-2.0 */
/* Products whose factors are rounded to bfloat16, by the tiles of AMX: sixteen rows of sixteen float32 sums that 32
   columns of a left factor and 32 rows of a right one are added to, at ten times the rate of float32 or more (Xeon of
   family 6, model 167: 2,200 GFLOP/s for 100). So what is multiplied in vain, beyond a diagonal or a window, costs less
   than leaving it out.

   Two numbers share 32 bits, the first in the lower half: of a left factor two columns, of a right factor two rows. */
#ifndef TILES_H
#define TILES_H

#include "blocks.h"

#if defined(__AVX512F__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define WITH_BFLOAT16 __attribute__((target("avx512bf16")))

/* a in the lower half of the vector, b in the upper one */
WITH_BFLOAT16 INLINE __m512i halves_of(vector a, vector b) {
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

/* Pairs of the numbers of two rows. */
WITH_BFLOAT16 INLINE __m512i pairs_of(vector first, vector second) {
    const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                            21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(places, halves_of(first, second));
}
#endif

#if defined(WITH_BFLOAT16) && defined(__linux__)
#define WITH_TILES __attribute__((target("avx512bf16,amx-tile,amx-bf16")))
#define TILE 16   /* rows of a tile, and words of one of its rows */
#define DEPTH 128 /* columns of a left factor at a time */
#define IN_LINES __attribute__((aligned(64)))

/* Tiles of 16 rows of 64 bytes, for this thread until `end_tiles` leaves them to whatever had them before. */
WITH_TILES static inline void begin_tiles(work *w) {
    static const struct {
        uint8_t palette, start_row, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {[0 ... 7] = 4 * TILE}, .rows = {[0 ... 7] = TILE}};
    if (!w->in_tiles) return;
    _tile_storeconfig(w->tiles_before);
    _tile_loadconfig(&shape);
}

WITH_TILES static inline void end_tiles(const work *w) {
    if (w->in_tiles) _tile_loadconfig(w->tiles_before);
}

/* out[2 * TILE, words] = `depth` columns of `rows` rows of a, 0 up to the next 32; a has a stride of 1. */
WITH_TILES static inline void pack_left(uint32_t *out, const float *a, int64_t row, int64_t column, int64_t rows,
                                        int64_t depth) {
    int64_t words = (depth + 2 * TILE - 1) / (2 * TILE) * TILE;
    uint32_t across[TILE * DEPTH] IN_LINES;
    for (int64_t i = 0; i < rows && column == 1; i++)
        for (int64_t k = 0; k < depth; k += 2 * LANES) {
            const float *x = a + i * row + k;
            vector second = k + LANES < depth ? *(const vector *)(x + LANES) : (vector){0};
            _mm512_storeu_si512(out + i * words + k / 2, halves_of(*(const vector *)x, second));
        }
    if (column == 1) return;
    for (int64_t k = 0; k < 2 * words; k += 2)
        for (int64_t i = 0; i < rows; i += LANES) {
            const float *x = a + i + k * column;
            __m512i both = k < depth ? pairs_of(*(const vector *)x, *(const vector *)(x + column)) : (__m512i){0};
            _mm512_storeu_si512(across + k / 2 * rows + i, both);
        }
    transpose((float *)out, words, (const float *)across, rows, words, rows);
}

/* out[words, 2 * TILE] likewise for `depth` rows of `columns` columns of b */
WITH_TILES static inline void pack_right(uint32_t *out, const float *b, int64_t ldb, int64_t depth, int64_t columns) {
    int64_t end = (depth + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
    for (int64_t k = 0; k < end; k += 2, out += 2 * TILE)
        for (int64_t j = 0; j < columns; j += LANES) {
            const float *x = b + k * ldb + j;
            __m512i both = k < depth ? pairs_of(*(const vector *)x, *(const vector *)(x + ldb)) : (__m512i){0};
            _mm512_storeu_si512(out + j, both);
        }
}

/* Up to four tiles of sums: out (+)= a b of `words` words per row. */
WITH_TILES static inline void multiply_tiles(float *out, int64_t ldo, const uint32_t *a, const uint32_t *b,
                                             int64_t words, int has_more_rows, int has_more_columns, int add) {
    const int64_t bytes = 4 * ldo, pairs = 4 * 2 * TILE;
    char *sums = (char *)out, *below = sums + TILE * bytes;
    __asm__ volatile("" ::: "memory"); /* what tiles read and write is no secret to the compiler */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, sums, bytes);
        if (has_more_columns) _tile_loadd(1, sums + 4 * TILE, bytes);
        if (has_more_rows) _tile_loadd(2, below, bytes);
        if (has_more_rows && has_more_columns) _tile_loadd(3, below + 4 * TILE, bytes);
    }
    for (int64_t k = 0; k < words; k += TILE) {
        _tile_loadd(4, a + k, 4 * words);
        _tile_loadd(6, b + k * 2 * TILE, pairs);
        _tile_dpbf16ps(0, 4, 6);
        if (has_more_columns) {
            _tile_loadd(7, b + k * 2 * TILE + TILE, pairs);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (!has_more_rows) continue;
        _tile_loadd(5, a + TILE * words + k, 4 * words);
        _tile_dpbf16ps(2, 5, 6);
        if (has_more_columns) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, bytes);
    if (has_more_columns) _tile_stored(1, sums + 4 * TILE, bytes);
    if (has_more_rows) _tile_stored(2, below, bytes);
    if (has_more_rows && has_more_columns) _tile_stored(3, below + 4 * TILE, bytes);
    __asm__ volatile("" ::: "memory");
}

WITH_TILES static void product_in_tiles(float *out, int64_t ldo, const float *a, int64_t row, int64_t column,
                                        const float *b, int64_t ldb, int64_t rows, int64_t depth, int64_t columns,
                                        int add) {
    uint32_t left[TILE * DEPTH] IN_LINES, right[TILE * DEPTH] IN_LINES;
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t part = depth - k < DEPTH ? depth - k : DEPTH, words = (part + 2 * TILE - 1) / (2 * TILE) * TILE;
        for (int64_t i = 0; i < rows; i += 2 * TILE) {
            pack_left(left, a + i * row + k * column, row, column, rows - i < 2 * TILE ? TILE : 2 * TILE, part);
            for (int64_t j = 0; j < rows && j < 2 * TILE; j += ROWS) prefetch_next(); /* as often as `product` does */
            for (int64_t j = 0; j < columns; j += 2 * TILE) {
                pack_right(right, b + k * ldb + j, ldb, part, columns - j < 2 * TILE ? TILE : 2 * TILE);
                multiply_tiles(out + i * ldo + j, ldo, left, right, words, rows - i > TILE, columns - j > TILE,
                               add || k);
            }
        }
    }
}
#else
static inline void begin_tiles(work *w) {
    (void)w;
}
static inline void end_tiles(const work *w) {
    (void)w;
}
#define product_in_tiles(out, ldo, a, row, column, b, ldb, rows, depth, columns, add) (void)0
#endif

/* Rounded to bfloat16 where a product would do so, too: other sums then see the same numbers. */
INLINE vector rounded(const work *w, vector x) {
    bit_vector bits = (bit_vector)x;
    return w->in_tiles ? (vector)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000) : x;
}

static inline void round_numbers(const work *w, float *x, int64_t count) {
    for (int64_t j = 0; j < count && w->in_tiles; j += LANES) *(vector *)(x + j) = rounded(w, *(vector *)(x + j));
}

static inline int takes_tiles(const tensor *x) {
    return bfloat16_products == IN_AMX && x[QUERY].bytes == 2;
}

/* `product`, whose factors may be rounded to bfloat16, of rows in sixteens and with zeros where the shape leaves a out.
 */
static inline void half_product(const work *w, float *out, int64_t ldo, const float *a, int64_t row, int64_t column,
                                const float *b, int64_t ldb, int64_t rows, int64_t depth, int64_t columns, int add,
                                int shape) {
    if (w->in_tiles)
        product_in_tiles(out, ldo, a, row, column, b, ldb, rows, depth, columns, add);
    else
        product(out, ldo, a, row, column, b, ldb, rows, depth, columns, add, shape);
}

#endif
