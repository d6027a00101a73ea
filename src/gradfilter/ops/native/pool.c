/* The entry points of max pooling. */
#include "tasks.h"

gf_run_max_pool gf_max_pool_base;
gf_run_max_route gf_max_route_base;
#ifdef GF_HAS_X86_LEVELS
gf_run_max_pool gf_max_pool_avx2, gf_max_pool_avx512;
gf_run_max_route gf_max_route_avx2, gf_max_route_avx512;
static gf_run_max_pool *const MAX_POOL[] = {gf_max_pool_base, gf_max_pool_avx2, gf_max_pool_avx512};
static gf_run_max_route *const MAX_ROUTE[] = {gf_max_route_base, gf_max_route_avx2, gf_max_route_avx512};
#else
static gf_run_max_pool *const MAX_POOL[] = {gf_max_pool_base};
static gf_run_max_route *const MAX_ROUTE[] = {gf_max_route_base};
#endif

int gf_max_pool_map(const gf_max_pool *task, int threads) {
    const gf_map *m = &task->map;
    return MAX_POOL[gf_level()](task, gf_useful_threads(threads, m->n * m->c * m->h * m->w * task->kh * task->kw));
}

int gf_max_route_map(const gf_max_route *task, int threads) {
    return MAX_ROUTE[gf_level()](task, gf_useful_threads(threads, task->n * task->c * task->cells * task->places));
}
