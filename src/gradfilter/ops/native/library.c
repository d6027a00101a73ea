/* The library's entry points, and the choice of the instruction set. */
#include <math.h>
#include <string.h>

#include "kernels.h"

extern const gf_kernels gf_kernels_base;
#ifdef GF_HAS_X86_LEVELS
extern const gf_kernels gf_kernels_avx2, gf_kernels_avx512;
static const gf_kernels *const LEVELS[] = {&gf_kernels_base, &gf_kernels_avx2, &gf_kernels_avx512};
#else
static const gf_kernels *const LEVELS[] = {&gf_kernels_base};
#endif

static int level = -1;

GF_EXPORT int gf_abi(void) { return GF_ABI; }

/* The highest level that this CPU has. */
GF_EXPORT int gf_best_level(void) {
#ifdef GF_HAS_X86_LEVELS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return 1;
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") ? 2 : 1;
#else
    return 0;
#endif
}

/* Use a level up to the best one; return the one in use. */
GF_EXPORT int gf_set_level(int wanted) {
    const int best = gf_best_level();
    const int chosen = wanted < 0 || wanted > best ? best : wanted;
    __atomic_store_n(&level, chosen, __ATOMIC_RELAXED);
    return chosen;
}

int gf_level(void) {
    const int chosen = __atomic_load_n(&level, __ATOMIC_RELAXED);
    return chosen < 0 ? gf_set_level(-1) : chosen;
}

const gf_kernels *gf_current(void) { return LEVELS[gf_level()]; }

size_t gf_norm_act_scratch(const gf_norm_act *t) {
    if (!t->mean && !t->slope) return 0;
    const gf_map *m = &t->map;
    const int64_t columns = gf_runs_in_planes(t) ? m->w : gf_ceil_div(m->w, m->pw);
    return 2 * sizeof(float) * (size_t)(columns * (m->channels_last ? m->c : 1));
}

typedef struct {
    gf_norm_act task;
    gf_norm_act_unit *unit;
    int64_t rows;
} norm_act_call;

static void run_norm_act(const void *argument, int64_t unit, void *scratch) {
    const norm_act_call *call = argument;
    call->unit(&call->task, unit / call->rows, unit % call->rows, scratch);
}

/* A map of one pixel is the same in both memory orders, and its channels are the longer run. */
static void settle(gf_map *m) {
    if (m->h == 1 && m->w == 1) m->channels_last = 1;
}

GF_EXPORT int gf_norm_act_map(const void *packed, int threads) {
    norm_act_call call;
    memcpy(&call.task, packed, sizeof call.task); /* the caller's bytes have no alignment */
    gf_map *m = &call.task.map;
    settle(m);
    call.unit = gf_current()->norm_act;
    call.rows = gf_ceil_div(m->h, m->ph);
    threads = gf_useful_threads(threads, m->n * m->c * m->h * m->w);
    return gf_parallel(run_norm_act, &call, m->n * call.rows, threads, gf_norm_act_scratch(&call.task));
}

static void run_slope(const void *argument, int64_t unit, void *scratch) {
    (void)scratch;
    gf_current()->slope(argument, unit);
}

GF_EXPORT int gf_slope_map(const void *packed, int threads) {
    gf_slope task;
    memcpy(&task, packed, sizeof task);
    gf_map *m = &task.map;
    settle(m);
    const int64_t rows = (m->channels_last ? m->n : m->n * m->c) * gf_ceil_div(m->h, m->ph);
    const int64_t cells = rows * gf_ceil_div(m->w, m->pw) * (m->channels_last ? m->c : 1);
    return gf_parallel(run_slope, &task, rows, gf_useful_threads(threads, cells), 0);
}

static void run_norm_back(const void *argument, int64_t unit, void *scratch) {
    (void)scratch;
    gf_current()->norm_back(argument, unit);
}

static void run_norm_end(const void *argument, int64_t unit, void *scratch) {
    (void)scratch;
    gf_current()->norm_end(argument, unit);
}

/* Returns 1 where a factor is 0: then g is not scaled, for what is left of it would not tell the gradient of gamma. */
GF_EXPORT int gf_norm_back_map(const void *packed, int threads) {
    gf_norm_back task;
    memcpy(&task, packed, sizeof task);
    int zero = 0;
    for (int64_t i = 0; task.scaled && task.gamma && i < task.c; i++) zero |= task.gamma[i] == 0;
    if (zero) task.scaled = NULL;
    threads = gf_useful_threads(threads, task.rows * task.c);
    return gf_parallel(run_norm_back, &task, gf_ceil_div(task.c, GF_NORM_BLOCK), threads, 0) < 0 ? -1 : zero;
}

GF_EXPORT int gf_norm_end_map(const void *packed, int threads) {
    gf_norm_end task;
    memcpy(&task, packed, sizeof task);
    return gf_parallel(run_norm_end, &task, task.c, gf_useful_threads(threads, task.c * task.k), 0);
}

/* Batch normalisation with fixed statistics as x * scale + shift; gamma and beta may be NULL. */
GF_EXPORT void gf_fold(const float *gamma, const float *beta, const float *mean, const float *var, double eps, int64_t c,
                       float *scale, float *shift) {
    for (int64_t i = 0; i < c; i++) {
        const double inverse = (gamma ? gamma[i] : 1.0) / sqrt((double)var[i] + eps);
        scale[i] = (float)inverse;
        shift[i] = (float)((beta ? beta[i] : 0.0) - mean[i] * inverse);
    }
}
