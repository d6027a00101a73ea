/* What follows a convolution, on rows that it has just computed: residual, activation, patch means and counts.
 *
 * The rows stand in scratch, a vector of channels after the other: pixel p has vector i at x[p * pitch + i * GF_LANES].
 * Smooth activations are left to the pass that the library has for them, over the same rows of y.
 */
#ifndef GF_FINISH_H
#define GF_FINISH_H

#include "vec.h"

/* Pixels to fetch ahead of where y is. */
enum { AHEAD = 4 };

/* Some vectors of channels of one cell. */
typedef struct {
    const float *x, *residual;
    float *y;
    int64_t rows, columns;
    int64_t x_pitch, x_row, y_pitch, y_row; /* floats to the next pixel and row */
    float lo, hi, leak;
    float flat_to, flat_from; /* slope 1 strictly between; NaN: no such bound */
} cell;

/* V vectors of channels of a cell: write y, return sums and minus the numbers of flat pixels. */
GF_INLINE void run_cell(const cell *q, const int kind, const int residual, const int stream, const int V, gf_vec sums[2],
                        gf_ints flat[2]) {
    const gf_vec none = {0}, lo = none + q->lo, hi = none + q->hi, to = none + q->flat_to, from = none + q->flat_from;
    const int64_t columns = q->columns, x_pitch = q->x_pitch, y_pitch = q->y_pitch;
    const float leak = q->leak;
    gf_vec sum[2] = {none, none};
    gf_ints count[2] = {{0}, {0}};
    for (int64_t r = 0; r < q->rows; r++) {
        const float *x = q->x + r * q->x_row, *other = residual ? q->residual + r * q->y_row : NULL;
        float *y = q->y + r * q->y_row;
        for (int64_t p = 0; p < columns; p++, x += x_pitch, y += y_pitch) {
            if (!stream) __builtin_prefetch(y + AHEAD * y_pitch, 1);
#pragma GCC unroll 2
            for (int v = 0; v < V; v++) {
                gf_vec z = gf_load(x + v * GF_LANES);
                if (residual) z += gf_load(other + p * y_pitch + v * GF_LANES);
                if (kind == GF_CLAMP) z = gf_hold(z, lo, hi);
                if (kind == GF_LEAKY) z = gf_choose(z > none, z, z * leak);
                (stream ? gf_stream : gf_store)(y + v * GF_LANES, z);
                sum[v] += z;
                if (kind != GF_IDENTITY) count[v] += (z <= to) | (z >= from);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[v] = sum[v], flat[v] = count[v];
}

#define CELL(kind, residual, stream, V)                                                           \
    static void kind##_##residual##_##stream##_##V(const cell *q, gf_vec *sums, gf_ints *flat) { \
        run_cell(q, kind, residual, stream, V, sums, flat);                                       \
    }
#define CELLS_OF(kind, residual) \
    CELL(kind, residual, 0, 1) CELL(kind, residual, 0, 2) CELL(kind, residual, 1, 1) CELL(kind, residual, 1, 2)
#define ROW_OF(kind, residual) \
    {{kind##_##residual##_0_1, kind##_##residual##_0_2}, {kind##_##residual##_1_1, kind##_##residual##_1_2}}
CELLS_OF(GF_IDENTITY, 0)
CELLS_OF(GF_IDENTITY, 1)
CELLS_OF(GF_CLAMP, 0)
CELLS_OF(GF_CLAMP, 1)
CELLS_OF(GF_LEAKY, 0)
CELLS_OF(GF_LEAKY, 1)

typedef void cell_fn(const cell *, gf_vec *sums, gf_ints *flat);
static cell_fn *const CELLS[3][2][2][2] = {{ROW_OF(GF_IDENTITY, 0), ROW_OF(GF_IDENTITY, 1)},
                                           {ROW_OF(GF_CLAMP, 0), ROW_OF(GF_CLAMP, 1)},
                                           {ROW_OF(GF_LEAKY, 0), ROW_OF(GF_LEAKY, 1)}};

static int is_smooth(const gf_norm_act *t) { return t->kind > GF_LEAKY; }

/* Smooth activations: y = x, then the library's own pass over y. */
static void finish_smooth(const gf_norm_act *t, int64_t image, int64_t row, void *scratch) {
    gf_norm_act task = *t;
    task.x = t->y;
    task.scale = task.shift = NULL;
    gf_current()->norm_act(&task, image, row, scratch);
}

/* Finish patch row `row` of an image, for the vectors of channels from `vector` on that a pitch of x holds. */
static void finish_rows(const gf_norm_act *t, const float *x, int64_t pitch, int64_t image, int64_t row, int64_t vector,
                        void *scratch) {
    const gf_map *m = &t->map;
    const int smooth = is_smooth(t), streamed = !smooth && gf_is_streamed(&t->map, t->y);
    void *mean = smooth ? NULL : t->mean, *slope = smooth || t->kind == GF_IDENTITY ? NULL : t->slope;
    const float *residual = smooth ? NULL : t->residual;
    cell_fn *const *run = CELLS[smooth ? GF_IDENTITY : t->kind][residual != NULL][streamed];
    const int64_t down = gf_ceil_div(m->h, m->ph), cells = gf_ceil_div(m->w, m->pw), end = vector + pitch / GF_LANES;
    const int64_t first = (image * m->h + row * m->ph) * m->w;
    cell q = {.rows = gf_least(m->ph, m->h - row * m->ph), .x_pitch = pitch, .x_row = pitch * m->w, .y_pitch = m->c};
    q.y_row = m->c * m->w;
    q.lo = t->lo, q.hi = t->hi, q.leak = t->leak;
    q.flat_to = t->kind == GF_LEAKY ? 0 : t->lo;
    q.flat_from = t->kind == GF_LEAKY || t->hi == __builtin_inff() ? __builtin_nanf("") : t->hi;
    for (int64_t j = 0; j < cells; j++) {
        const int64_t left = j * m->pw, at = ((image * down + row) * cells + j) * m->c;
        q.columns = gf_least(m->pw, m->w - left);
        const int32_t area = (int32_t)(q.rows * q.columns);
        for (int64_t i = vector, v; i < end; i += v) {
            const int64_t c = gf_vec_start(i, m->c), pixel = (first + left) * m->c + c;
            gf_vec sums[2];
            gf_ints flat[2];
            v = i + 2 <= end && (i + 2) * GF_LANES <= m->c ? 2 : 1;
            q.x = x + left * pitch + (i - vector) * GF_LANES;
            q.y = (float *)t->y + pixel;
            q.residual = residual ? residual + pixel : NULL;
            run[v - 1](&q, sums, flat);
            for (int64_t k = 0, to = at + c; k < v; k++, to += GF_LANES) {
                if (mean) gf_store((float *)mean + to, t->sums ? sums[k] : sums[k] / (float)area);
                if (slope) gf_put_counts(slope, to, flat[k] + area, t->count_bytes);
            }
        }
    }
    if (streamed) gf_fence();
    if (smooth) finish_smooth(t, image, row, scratch);
}

#endif
