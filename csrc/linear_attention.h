/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of the CPU kernels: plain C, called through ctypes by hf_linear_attention/kernels/cpu.py.

   Nothing here checks a size: kernels/cpu.py compares every shape, dtype and stride before an address leaves Python.

   Axes: heads are key/value heads, groups the query heads of each of them. A tensor has five axes, batch, head, group,
   token and column; the stride of a column is always one number. Numbers of 4 bytes are float32, of 2 bfloat16; masks
   have 1 byte per entry. A missing tensor is a null pointer. Inside, all arithmetic is float32, but for the
   products of bfloat16.h and tiles.h. */
#ifndef LINEAR_ATTENTION_H
#define LINEAR_ATTENTION_H

#include <stdint.h>

/* Raised by every change to what stands in this file; kernels/cpu.py computes in torch where it expects another one. */
#define ABI_VERSION 9

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

typedef struct {
    char *data;
    int64_t batch, head, group, token, bytes; /* strides, and the size of a number, in bytes */
} tensor;

/* One call: the sizes of its tensors, and which (batch, head) pairs are computed: numbers start .. stop - 1. Rotary
   tables turn `pairs` pairs of columns: number i has the columns pair_start + i pair_step and pair_distance after it.
 */
typedef struct {
    int64_t heads, groups, queries, keys, inputs, features, width, map, causal, pairs, pair_start, pair_step,
        pair_distance, start, stop;
} sizes;

/* What the feature map does to numbers: nothing, elu(x) + 1, exp (numbers are exponents), and the exponents
   [log softmax(u), log softmax(-u)] of Hedgehog. From EXP on, states have a running maximum. */
enum { PLAIN, ELU, EXP, HEDGEHOG };

/* Tensors of attention_forward (up to NEW_STATE) and attention_backward. A map has weight, bias and norm weight; the
   bias of queries is one number, a constant of the query like their norm. QUERY_TURN and KEY_TURN are float32 rows of
   the cosines and then the sines by which a map's input is turned. With a KEY_MAP into exponents, KEY_AGE says for how
   many tokens a key has faded when it comes (float32). */
enum {
    QUERY,
    KEY,
    VALUE,
    MASK,
    DECAY,
    KEY_MAP,
    QUERY_MAP = KEY_MAP + 3,
    STATE = QUERY_MAP + 3,
    QUERY_TURN,
    KEY_TURN,
    KEY_AGE,
    OUTPUT,
    DENOMINATOR,
    SCALE,
    NEW_STATE,
    GRAD_OUTPUT,
    GRAD_DENOMINATOR,
    GRAD_STATE,
    GRAD_QUERY,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_DECAY,
    GRAD_KEY_MAP,
    GRAD_QUERY_MAP = GRAD_KEY_MAP + 3,
    GRAD_FIRST_STATE = GRAD_QUERY_MAP + 3,
    ATTENTION_TENSORS
};

/* Tensors of window_forward (up to LARGEST) and window_backward; `sizes.features` is how many places a query sees,
   `sizes.map` how many sinks. The last place of the last query is the last key; if it is not `causal`, a query sees as
   many places on either side of its own. SINK_QUERY is what sinks are compared with, or
   the query turned by SINK_TURN, or else the query itself. With FAR_TOTAL and FAR_SCALE, the denominators and scales
   that attention_forward wrote (0 where a query has no far keys), NEAR_OUTPUT holds its output: near and far keys then
   share a denominator. NEAR_OUTPUT and LOG_SIZE become those of both, FAR_TOTAL the denominator in units of the scale,
   with which attention_backward is right, and window_backward adds to the gradients that this one wrote. */
enum {
    SINK_KEY = MASK + 1,
    SINK_VALUE,
    SINK_SEEN,
    SINK_QUERY,
    SCALING,
    SINK_TURN,
    FAR_TOTAL,
    FAR_SCALE,
    NEAR_OUTPUT,
    LOG_SIZE,
    LARGEST,
    GRAD_NEAR,
    GRAD_LOG_SIZE,
    GRAD_NEAR_QUERY,
    GRAD_PLACE,
    GRAD_SINK = GRAD_PLACE + 2,
    GRAD_SINK_QUERY = GRAD_SINK + 2,
    WINDOW_TENSORS
};

/* Tensors of slots_forward. */
enum { SLOT_OUTPUT = MASK + 1, SLOT_TENSORS };

/* Tensors of exact_keys_forward (up to EXACT_SIZE), which attends if EXACT_OUTPUT is there, and gathers if GONE_KEY is:
   the keys that are displaced before each query, float32 and as the map sees them; GONE_VALUE and GONE_AGE are what
   belongs to them. Output and log size become those of kept keys and what was there before. exact_keys_backward takes
   output and log size of all that is joined, is for a call that kept nothing before and stayed within the trained
   length, and leaves rows of masked keys.
   The tensors that are kept come in the order of `Kept`; positions and ages are int32, and may be missing.
   `sizes.features` is how many keys are kept, `sizes.map` the trained length or 0; `pair_start` is how many pairs the
   map sees. */
enum {
    LEAVING_SCORE = MASK + 1,
    QUERY_POSITION,
    LEAVING_POSITION,
    FREQUENCIES,
    EXACT_SCALING,
    OLD_KEPT,
    NEW_KEPT = OLD_KEPT + 5,
    GONE_KEY = NEW_KEPT + 5,
    GONE_VALUE,
    GONE_AGE,
    EXACT_OUTPUT,
    EXACT_SIZE,
    GRAD_EXACT,
    GRAD_EXACT_SIZE,
    GRAD_GONE_KEY,
    GRAD_KEPT_KEY = GRAD_GONE_KEY + 2,
    GRAD_EXACT_QUERY = GRAD_KEPT_KEY + 2,
    GRAD_LEAVING_KEY,
    EXACT_TENSORS = GRAD_LEAVING_KEY + 2
};

/* Tensors of delta_forward (up to DELTA_NEW_STATE) and delta_backward. `sizes.inputs` is how many features a key has,
   `sizes.features` how many numbers a log decay (1, or one per feature), `sizes.map` whether a token erases. */
enum {
    DELTA_DECAY = VALUE + 1,
    DELTA_BETA,
    DELTA_STATE,
    DELTA_OUTPUT,
    DELTA_NEW_STATE,
    GRAD_DELTA_OUTPUT,
    GRAD_DELTA_STATE,
    GRAD_DELTA_QUERY,
    GRAD_DELTA_KEY,
    GRAD_DELTA_VALUE,
    GRAD_DELTA_DECAY,
    GRAD_DELTA_BETA,
    GRAD_DELTA_FIRST_STATE,
    DELTA_TENSORS
};

/* One token after others, of `batch` sequences. With `rows`, the state of sequence i is block rows[i] of the states,
   which have `blocks` of them. In delta_step `key_dim` is how many numbers a log decay has (1, or one per feature), and
   `map` whether a token erases. In hybrid_step `exact` is how many keys are kept behind the window. Positions turn
   `pairs` pairs of columns, 2 i and 2 i + 1 if `is_interleaved`, else i and `pairs` + i; the map does not see the turn
   of the pairs from number `first_turned` on. From `trained_length` on (unless it is 0) the queries move for sinks. */
typedef struct {
    int64_t batch, blocks, heads, groups, window, sinks, key_dim, features, width, map;
    int64_t query_bytes, key_bytes, value_bytes;
    int64_t exact, pairs, first_turned, is_interleaved, trained_length;
    double scaling;
} step_sizes;

/* Addresses of a step, and how many bytes further on each has the next sequence or the next block of states; both are
   dense in themselves, and what all sequences share has stride 0. attention_step and delta_step have STEP_QUERY and
   STEP_KEY (features, or exponents), STEP_VALUE, STEP_DECAY (of delta_step: per sequence), STEP_BETA, STEP_FAR,
   STEP_FAR_SIZE, STEP_SUMS and STEP_NEW. In hybrid_step the score of the key is STEP_SCORE and its place among the
   real tokens, from 1, times STEP_SLOPE; STEP_FREQUENCIES are the angles of pairs per position. What follows STEP_SUMS
   are states: those of `WindowState` (which may have no positions and no scores) and then of `Kept`, if there are exact
   keys. From STEP_NEW on they are the new ones likewise, which may lie where the old ones do. */
enum {
    STEP_QUERY,
    STEP_KEY,
    STEP_VALUE,
    STEP_SCORE,
    STEP_SLOPE,
    STEP_POSITION,
    STEP_FREQUENCIES,
    STEP_KEY_WEIGHT,
    STEP_KEY_BIAS,
    STEP_KEY_NORM,
    STEP_QUERY_WEIGHT,
    STEP_DECAY,
    STEP_LOG_SCALE,
    STEP_NORM_WEIGHT,
    STEP_BETA,
    STEP_NEAR,
    STEP_NEAR_SIZE,
    STEP_LARGEST,
    STEP_FAR,
    STEP_FAR_SIZE,
    STEP_SUMS,
    STEP_WINDOW_KEY,
    STEP_WINDOW_VALUE,
    STEP_KIND,
    STEP_SINK_KEY,
    STEP_SINK_VALUE,
    STEP_SEEN,
    STEP_WINDOW_POSITION,
    STEP_WINDOW_SCORE,
    STEP_KEPT_KEY,
    STEP_KEPT_VALUE,
    STEP_KEPT_SCORE,
    STEP_KEPT_AGE,
    STEP_KEPT_POSITION,
    STEP_NEW,
    STEP_NEW_KEPT = STEP_NEW + STEP_KEPT_KEY - STEP_SUMS,
    STEP_TENSORS = STEP_NEW + STEP_NEW - STEP_SUMS
};

/* ABI_VERSION and what a caller must lay out alike: the sizes of the three structs and of the six lists. */
EXPORT void abi(int64_t *numbers);
/* The best of the instruction sets that this library is built for and this processor has: 0 base, 1 avx2, 2 avx512. */
EXPORT int64_t best_instruction_set(void);

/* How products are computed where the queries are bfloat16: in float32, with AVX512-BF16 (bfloat16.h) or with AMX
   (tiles.h). What the processor has of it are the bits 1 << IN_AVX512_BF16 and 1 << IN_AMX of `bfloat16_features`;
   bit 0 says that it is of Intel. `set_bfloat16` chooses, before the first call of a kernel. */
enum { IN_FLOAT32, IN_AVX512_BF16, IN_AMX };
EXPORT int64_t bfloat16_features(void);
EXPORT void set_bfloat16(int64_t products);
extern __attribute__((visibility("hidden"))) int64_t bfloat16_products;

/* These return 1 where there is no memory left for their working space, else 0. */
EXPORT int attention_forward(const sizes *s, const tensor *x);
EXPORT int attention_backward(const sizes *s, const tensor *x);
EXPORT int window_forward(const sizes *s, const tensor *x);
EXPORT int window_backward(const sizes *s, const tensor *x);
EXPORT int slots_forward(const sizes *s, const tensor *x);
EXPORT int exact_keys_forward(const sizes *s, const tensor *x);
EXPORT int exact_keys_backward(const sizes *s, const tensor *x);
EXPORT int delta_forward(const sizes *s, const tensor *x);
EXPORT int delta_backward(const sizes *s, const tensor *x);
/* These also return 2 for a row that is no block, and have then written nothing. */
EXPORT int attention_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows);
EXPORT int delta_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows);
EXPORT int hybrid_step(const step_sizes *n, char **x, const int64_t *strides, const int64_t *rows);

EXPORT void elu_plus_one(const float *x, float *out, int64_t count);

#endif
