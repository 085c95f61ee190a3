/* SPDX-License-Identifier: Apache-2.0 */
/* What a caller asks the library itself. */
#include "linear_attention.h"

#ifdef __AVX512F__
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define TILE_DATA 18
#endif
#endif

int64_t bfloat16_products = IN_FLOAT32;

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

void set_bfloat16(int64_t products) {
    bfloat16_products = products;
}

/* A process has to ask Linux for the registers of AMX; its threads have them, too. */
int64_t bfloat16_features(void) {
    int64_t features = 0;
#ifdef __AVX512F__
    unsigned a, b, c, d = 0;
    features |= __builtin_cpu_is("intel") != 0;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) features |= 1 << IN_AVX512_BF16;
#ifdef __linux__
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    int is_there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE);
    if (is_there && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA)) features |= 1 << IN_AMX;
#endif
#endif
    return features;
}
