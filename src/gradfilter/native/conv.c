/* The entry points of the convolutions. */
#include <string.h>

#include "conv.h"

gf_run_depthwise gf_depthwise_base;
gf_run_pointwise gf_pointwise_base;
#ifdef GF_HAS_X86_LEVELS
gf_run_depthwise gf_depthwise_avx2, gf_depthwise_avx512;
gf_run_pointwise gf_pointwise_avx2, gf_pointwise_avx512;
static gf_run_depthwise *const DEPTHWISE[] = {gf_depthwise_base, gf_depthwise_avx2, gf_depthwise_avx512};
static gf_run_pointwise *const POINTWISE[] = {gf_pointwise_base, gf_pointwise_avx2, gf_pointwise_avx512};
#else
static gf_run_depthwise *const DEPTHWISE[] = {gf_depthwise_base};
static gf_run_pointwise *const POINTWISE[] = {gf_pointwise_base};
#endif

static int useful(int threads, const gf_norm_act *after, int64_t products) {
    return gf_useful_threads(threads, after->map.n * after->map.c * after->map.h * after->map.w * (1 + products / 8));
}

GF_EXPORT int gf_depthwise_map(const void *packed, int threads) {
    gf_depthwise task;
    memcpy(&task, packed, sizeof task); /* the caller's bytes have no alignment */
    return DEPTHWISE[gf_level()](&task, useful(threads, &task.after, task.kh * task.kw));
}

GF_EXPORT int gf_pointwise_map(const void *packed, int threads) {
    gf_pointwise task;
    memcpy(&task, packed, sizeof task);
    return POINTWISE[gf_level()](&task, useful(threads, &task.after, task.inputs));
}
