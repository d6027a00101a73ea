/* The library's entry points, and the choice of the instruction set. */
#include <math.h>

#include "tasks.h"

extern const gf_kernels gf_kernels_base;
#ifdef GF_HAS_X86_LEVELS
extern const gf_kernels gf_kernels_avx2, gf_kernels_avx512;
static const gf_kernels *const LEVELS[] = {&gf_kernels_base, &gf_kernels_avx2, &gf_kernels_avx512};
#else
static const gf_kernels *const LEVELS[] = {&gf_kernels_base};
#endif

static int level = -1;

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

int gf_norm_act_map(const gf_norm_act *task, int threads) {
    norm_act_call call = {.task = *task};
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

int gf_slope_map(const gf_slope *given, int threads) {
    gf_slope task = *given;
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
int gf_norm_back_map(const gf_norm_back *given, int threads) {
    gf_norm_back task = *given;
    int zero = 0;
    for (int64_t i = 0; task.scaled && task.gamma && i < task.c; i++) zero |= task.gamma[i] == 0;
    if (zero) task.scaled = NULL;
    threads = gf_useful_threads(threads, task.rows * task.c + (task.folded ? task.k * task.c : 0));
    return gf_parallel(run_norm_back, &task, gf_ceil_div(task.c, GF_NORM_BLOCK), threads, 0) < 0 ? -1 : zero;
}

int gf_norm_end_map(const gf_norm_end *task, int threads) {
    return gf_parallel(run_norm_end, task, task->c, gf_useful_threads(threads, task->c * task->outer * task->inner), 0);
}

int gf_fold_map(const gf_fold *t, int threads) {
    (void)threads;
    for (int64_t i = 0; i < t->c; i++) {
        const double inverse = (t->gamma ? t->gamma[i] : 1.0) / sqrt((double)t->var[i] + t->eps);
        t->scale[i] = (float)inverse;
        t->shift[i] = (float)((t->beta ? t->beta[i] : 0.0) - t->mean[i] * inverse);
    }
    return 0;
}
