/* SPDX-License-Identifier: Apache-2.0 */
/* elu(x) + 1 of a dense tensor, for features that are wanted as such. */
#include "matrices.h"

void elu_plus_one(const float *x, float *out, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) *(vector *)(out + i) = elu_of(*(const vector *)(x + i));
    if (i == count) return;
    vector rest = {0};
    memcpy(&rest, x + i, 4 * (count - i));
    rest = elu_of(rest);
    memcpy(out + i, &rest, 4 * (count - i));
}
