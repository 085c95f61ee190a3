/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule, block by block: what its forward and its backward pass share.

   hf_linear_attention/kernels_delta_torch.py has the mathematics and the names: A, P, U, K', Q', K''. All exponents are
   sums of numbers of one sign, never differences of sums. */
#ifndef DELTA_H
#define DELTA_H

#include "blocks.h"

#define GROUP ROWS /* tokens of which a decay per feature forms all pairs one by one */
#define FACTORS 10 /* of a group: from its start to each token, then from token s to token t > s */

typedef struct {
    work w;
    int erases, by_feature, is_backward;
    float beta[BLOCK], step[BLOCK];
    float *key, *value, *decay, *query; /* as loaded; the decay only if it has a number per feature */
    float *key_in, *query_in;           /* K' and Q' */
    float *key_out_t;                   /* K'' transposed [f, C] */
    float *pairs, *query_pairs, *fade;  /* -A, P of each group of queries; E if it is the same for all features */
    float *factors, *total;             /* of each group of tokens; of the block, [f] */
    float *corrected, *new, *sums;      /* V - K' S - A U, U, S */
    float *start_rows, *end_rows;       /* the factors in K' and K'', in the backward pass */
    float *states, *all_corrected;      /* before each block, and of all tokens, in the backward pass */
    float *grad_sums, *state_t, *grad_sums_t, *new_t, *grad_new, *grad_out, *grad_pairs, *grad_query_pairs;
    float *grad_key, *grad_key_row, *grad_query, *grad_decay, *faded_key, *faded_query;
} delta;

/* exp for x <= 0, and exactly 0 where float32 ends */
INLINE vector fade_of(vector x) {
    return blend(x < -86.0f, (vector){0}, exp_of_negative(x));
}

/* Where factor s -> t of a group stands, for s < t; those from its start come first. */
INLINE int64_t factor_index(int64_t s, int64_t t) {
    return GROUP + t * (t - 1) / 2 + s;
}

/* A, P, K', Q', K'' and the decay of the whole block, from the loaded tensors. */
void gate_block(delta *v);
void load_delta_block(delta *v, int64_t n);
void solve_block(delta *v);
void add_delta_block(delta *v);
int begin_delta(delta *v, const sizes *s, const tensor *x, int is_backward);
void enter_delta_head(delta *v, int64_t number);

#endif
