/* The entry points of convolutions' gradients at patch resolution. */
#include "tasks.h"

gf_run_pairs gf_pairs_base;
gf_run_backward gf_backward_base;
gf_run_single gf_single_base;
#ifdef GF_HAS_X86_LEVELS
gf_run_pairs gf_pairs_avx2, gf_pairs_avx512;
gf_run_backward gf_backward_avx2, gf_backward_avx512;
gf_run_single gf_single_avx2, gf_single_avx512;
static gf_run_pairs *const PAIRS[] = {gf_pairs_base, gf_pairs_avx2, gf_pairs_avx512};
static gf_run_backward *const BACKWARD[] = {gf_backward_base, gf_backward_avx2, gf_backward_avx512};
static gf_run_single *const SINGLE[] = {gf_single_base, gf_single_avx2, gf_single_avx512};
#else
static gf_run_pairs *const PAIRS[] = {gf_pairs_base};
static gf_run_backward *const BACKWARD[] = {gf_backward_base};
static gf_run_single *const SINGLE[] = {gf_single_base};
#endif

static int64_t count_pairs(const gf_pair_axis *axis) { return axis->start[axis->in]; }

int gf_pairs_map(const gf_pairs *task, int threads) {
    const int64_t pairs = count_pairs(&task->rows) * count_pairs(&task->columns);
    return PAIRS[gf_level()](task, gf_useful_threads(threads, task->n * task->c * (1 + pairs / 4)));
}

int gf_backward_map(const gf_backward *task, int threads) {
    const int64_t tiles = task->n * task->rows.count * task->columns.count;
    return BACKWARD[gf_level()](task, gf_useful_threads(threads, tiles * task->co * task->ci));
}

int gf_single_map(const gf_single *task, int threads) {
    return SINGLE[gf_level()](task, gf_useful_threads(threads, task->cells * task->co * task->ci));
}
