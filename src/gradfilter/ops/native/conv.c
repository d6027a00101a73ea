/* The entry points of the convolutions. */
#include <string.h>

#include "conv.h"

gf_run_depthwise gf_depthwise_base;
gf_run_dense gf_dense_base, gf_winograd_base;
gf_run_expand gf_expand_base;
#ifdef GF_HAS_X86_LEVELS
gf_run_depthwise gf_depthwise_avx2, gf_depthwise_avx512;
gf_run_dense gf_dense_avx2, gf_dense_avx512, gf_winograd_avx2, gf_winograd_avx512;
gf_run_expand gf_expand_avx2, gf_expand_avx512;
static gf_run_depthwise *const DEPTHWISE[] = {gf_depthwise_base, gf_depthwise_avx2, gf_depthwise_avx512};
static gf_run_dense *const DENSE[] = {gf_dense_base, gf_dense_avx2, gf_dense_avx512};
static gf_run_dense *const WINOGRAD[] = {gf_winograd_base, gf_winograd_avx2, gf_winograd_avx512};
static gf_run_expand *const EXPAND[] = {gf_expand_base, gf_expand_avx2, gf_expand_avx512};
#else
static gf_run_depthwise *const DEPTHWISE[] = {gf_depthwise_base};
static gf_run_dense *const DENSE[] = {gf_dense_base};
static gf_run_dense *const WINOGRAD[] = {gf_winograd_base};
static gf_run_expand *const EXPAND[] = {gf_expand_base};
#endif

static int useful(int threads, const gf_norm_act *after, int64_t products) {
    return gf_useful_threads(threads, after->map.n * after->map.c * after->map.h * after->map.w * (1 + products / 8));
}

GF_EXPORT int gf_depthwise_map(const void *packed, int threads) {
    gf_depthwise task;
    memcpy(&task, packed, sizeof task); /* the caller's bytes have no alignment */
    return DEPTHWISE[gf_level()](&task, useful(threads, &task.after, task.kh * task.kw));
}

GF_EXPORT int gf_dense_map(const void *packed, int threads) {
    gf_dense task;
    memcpy(&task, packed, sizeof task);
    return DENSE[gf_level()](&task, useful(threads, &task.after, task.inputs * task.kh * task.kw));
}

GF_EXPORT int gf_winograd_map(const void *packed, int threads) {
    gf_dense task;
    memcpy(&task, packed, sizeof task);
    return WINOGRAD[gf_level()](&task, useful(threads, &task.after, task.inputs * 4));
}

GF_EXPORT int gf_expand_map(const void *packed, int threads) {
    gf_expand task;
    memcpy(&task, packed, sizeof task);
    return EXPAND[gf_level()](&task, useful(threads, &task.first.after, task.first.inputs));
}
