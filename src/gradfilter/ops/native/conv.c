/* The entry points of the convolutions. */
#include "tasks.h"

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

int gf_depthwise_map(const gf_depthwise *task, int threads) {
    return DEPTHWISE[gf_level()](task, useful(threads, &task->after, task->kh * task->kw));
}

int gf_dense_map(const gf_dense *task, int threads) {
    return DENSE[gf_level()](task, useful(threads, &task->after, task->inputs * task->kh * task->kw));
}

int gf_winograd_map(const gf_dense *task, int threads) {
    return WINOGRAD[gf_level()](task, useful(threads, &task->after, task->inputs * 4));
}

int gf_expand_map(const gf_expand *task, int threads) {
    return EXPAND[gf_level()](task, useful(threads, &task->first.after, task->first.inputs));
}
