/* SPDX-License-Identifier: Apache-2.0 */
/* What a caller asks the library itself. */
#include "linear_attention.h"

void abi(int64_t *numbers) {
    int64_t all[] = {ABI_VERSION,    sizeof(tensor), sizeof(sizes), sizeof(step_sizes), ATTENTION_TENSORS,
                     WINDOW_TENSORS, SLOT_TENSORS,   EXACT_TENSORS, STEP_TENSORS,       DELTA_TENSORS};
    for (int i = 0; i < 10; i++) numbers[i] = all[i];
}

int64_t best_instruction_set(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
