/* What follows a convolution, on rows that it has just computed: residual, activation, patch means and counts.
 *
 * The rows stand in scratch, a vector of channels after the other: pixel p has vector i at x[p * pitch + i * GF_LANES].
 * Smooth activations are left to the pass that the library has for them, over the same rows of y.
 */
#ifndef GF_FINISH_H
#define GF_FINISH_H

#include "vec.h"

/* Pixels to fetch ahead of where y is, and cells ahead of where means and slopes are. */
enum { AHEAD = 4, CELLS_AHEAD = 8 };

/* Some vectors of channels of one cell. */
typedef struct {
    const float *x, *residual;
    float *y;
    int64_t rows, columns;
    int64_t x_pitch, x_row, y_pitch, y_row; /* floats to the next pixel and row */
    float lo, hi, leak;
    float flat_to, flat_from; /* of CLAMP, slope 1 strictly between; NaN: no such bound */
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
                /* NaN is steep between bounds and flat below a leaky kink, as in torch. */
                if (kind == GF_CLAMP) count[v] += (z <= to) | (z >= from);
                if (kind == GF_LEAKY) count[v] += ~(z > none);
            }
        }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) sums[v] = sum[v], flat[v] = count[v];
}

static int is_smooth(const gf_norm_act *t) { return t->kind > GF_LEAKY; }

/* What is known of patches of which not all rows have been finished: [cell, vector, lane]. */
typedef struct {
    float *sums;
    float *slopes; /* numbers of steep pixels, or sums of the derivative */
} unfinished;

/* Some rows of one patch row, for the vectors of channels from `vector` on that a pitch of x holds. */
typedef struct {
    float *x;
    int64_t pitch, vector, image;
    int64_t from, to; /* rows of the image */
    unfinished kept;  /* not used where they are all rows of the patch row */
} band;

/* Where the results of a band go. */
typedef struct {
    int64_t cells, at;  /* in the patch row, and the index of the first one's first channel */
    int64_t rows;       /* of the patch row */
    int starts, ends;   /* whether the band has its first row, and its last one */
} patch_row;

GF_INLINE patch_row find_patch_row(const gf_map *m, const band *b) {
    const int64_t row = b->from / m->ph, top = row * m->ph, cells = gf_ceil_div(m->w, m->pw);
    const int64_t rows = gf_least(m->ph, m->h - top);
    return (patch_row){cells, (b->image * gf_ceil_div(m->h, m->ph) + row) * cells * m->c, rows, b->from == top,
                       b->to == top + rows};
}

/* One over the pixels of a cell, where a product with it is the quotient to the last bit; else 0. */
GF_INLINE float exact_inverse(int64_t area) { return area & (area - 1) ? 0 : 1 / (float)area; }

/* Add a band's part of one vector of a cell to what is known of it, and write the whole: `area` is the whole's. */
GF_INLINE void put_cell(const gf_norm_act *t, const band *b, const patch_row *to, int64_t cell, int64_t vector, gf_vec sum,
                        gf_vec slope, int64_t area, float inverse) {
    const int64_t kept = cell * b->pitch + (vector - b->vector) * GF_LANES;
    const int64_t at = to->at + cell * t->map.c + gf_vec_start(vector, t->map.c);
    if (!to->starts) sum += gf_load(b->kept.sums + kept), slope += gf_load(b->kept.slopes + kept);
    if (!to->ends) {
        gf_store(b->kept.sums + kept, sum);
        gf_store(b->kept.slopes + kept, slope);
        return;
    }
    if (t->mean) __builtin_prefetch((float *)t->mean + at + CELLS_AHEAD * t->map.c, 1);
    if (t->slope) __builtin_prefetch((char *)t->slope + (at + CELLS_AHEAD * t->map.c) * (is_smooth(t) ? 4 : t->count_bytes), 1);
    if (t->mean) gf_store((float *)t->mean + at, t->sums ? sum : inverse != 0 ? sum * inverse : sum / (float)area);
    if (!t->slope || t->kind == GF_IDENTITY) return;
    if (is_smooth(t))
        gf_store((float *)t->slope + at, slope / (float)area);
    else
        gf_put_counts(t->slope, at, __builtin_convertvector(slope, gf_ints), t->count_bytes);
}

/* Finish V vectors of a cell, from `vector` on, and what a band has of its columns. */
GF_INLINE void finish_cell(const gf_norm_act *t, const band *b, const patch_row *to, const cell *q, int64_t cell,
                           int64_t vector, float inverse, const int kind, const int residual, const int stream, const int V) {
    gf_vec sums[2];
    gf_ints flat[2];
    run_cell(q, kind, residual, stream, V, sums, flat);
    if (!t->mean && !t->slope) return;
#pragma GCC unroll 2
    for (int k = 0; k < V; k++)
        put_cell(t, b, to, cell, vector + k, sums[k], __builtin_convertvector(flat[k] + (int32_t)(q->rows * q->columns), gf_vec),
                 to->rows * q->columns, inverse);
}

/* Finish a band where the activation is no smooth one; without a y, in place. */
GF_INLINE void run_band_of(const gf_norm_act *t, const band *b, const int kind, const int residual, const int stream) {
    const gf_map *m = &t->map;
    const patch_row to = find_patch_row(m, b);
    const int64_t first = (b->image * m->h + b->from) * m->w, end = b->vector + b->pitch / GF_LANES;
    cell q = {.rows = b->to - b->from, .x_pitch = b->pitch, .x_row = b->pitch * m->w};
    q.y_pitch = t->y ? m->c : b->pitch;
    q.y_row = q.y_pitch * m->w;
    q.lo = t->lo, q.hi = t->hi, q.leak = t->leak;
    q.flat_to = t->lo;
    q.flat_from = t->hi == __builtin_inff() ? __builtin_nanf("") : t->hi;
    for (int64_t j = 0; j < to.cells; j++) {
        const int64_t left = j * m->pw;
        q.columns = gf_least(m->pw, m->w - left);
        const float inverse = exact_inverse(to.rows * q.columns);
        for (int64_t i = b->vector, v; i < end; i += v) {
            const int64_t pixel = (first + left) * m->c + gf_vec_start(i, m->c);
            float *x = b->x + left * b->pitch + (i - b->vector) * GF_LANES;
            q.x = x;
            q.y = t->y ? (float *)t->y + pixel : x;
            q.residual = residual ? (const float *)t->residual + pixel : NULL;
            v = i + 2 <= end && (i + 2) * GF_LANES <= m->c ? 2 : 1;
            if (v == 2)
                finish_cell(t, b, &to, &q, j, i, inverse, kind, residual, stream, 2);
            else
                finish_cell(t, b, &to, &q, j, i, inverse, kind, residual, stream, 1);
        }
    }
}

#define BAND(kind, residual, stream)                                                  \
    static void kind##_##residual##_##stream(const gf_norm_act *t, const band *b) { \
        run_band_of(t, b, kind, residual, stream);                                    \
    }
#define BANDS_OF(kind) BAND(kind, 0, 0) BAND(kind, 0, 1) BAND(kind, 1, 0) BAND(kind, 1, 1)
#define ROW_OF(kind) {{kind##_0_0, kind##_0_1}, {kind##_1_0, kind##_1_1}}
BANDS_OF(GF_IDENTITY)
BANDS_OF(GF_CLAMP)
BANDS_OF(GF_LEAKY)

typedef void band_fn(const gf_norm_act *, const band *);
static band_fn *const BANDS[3][2][2] = {ROW_OF(GF_IDENTITY), ROW_OF(GF_CLAMP), ROW_OF(GF_LEAKY)};

/* `stream`: y is not read again soon, and may be written past the caches. */
static void finish_band(const gf_norm_act *t, const band *b, int stream) {
    const int streamed = stream && t->y && gf_is_streamed(&t->map, t->y);
    BANDS[t->kind][t->residual != NULL][streamed](t, b);
    if (streamed) gf_fence();
}

/* The pass that only writes y: what is left of one whose activation, means and slopes are computed elsewhere. */
static gf_norm_act copy_only(const gf_norm_act *t) {
    return (gf_norm_act){.map = t->map, .kind = GF_IDENTITY, .y = t->y};
}

/* Finish patch row `row` of an image, for the vectors of channels from `vector` on that a pitch of x holds: of a smooth
 * activation all of them, for the library's own pass over y follows. */
static inline void finish_rows(const gf_norm_act *t, float *x, int64_t pitch, int64_t image, int64_t row, int64_t vector,
                        void *scratch) {
    const gf_map *m = &t->map;
    const band b = {x, pitch, vector, image, row * m->ph, gf_least(m->h, (row + 1) * m->ph), {NULL, NULL}};
    if (!is_smooth(t)) {
        finish_band(t, &b, 1);
        return;
    }
    const gf_norm_act copy = copy_only(t);
    finish_band(&copy, &b, 0);
    gf_norm_act task = *t;
    task.x = t->y;
    task.scale = task.shift = NULL;
    gf_current()->norm_act(&task, image, row, scratch);
}

/* A smooth activation of some rows in scratch, by the library's own pass and in place: a map of its own, with one row of
 * patches, of which it gives sums and mean slopes. */
static inline gf_norm_act pass_in_scratch(const gf_norm_act *t, float *x, int64_t pitch, int64_t rows, float *sums,
                                          float *slopes) {
    gf_norm_act task = {.map = {1, pitch, rows, t->map.w, rows, t->map.pw, 1, GF_FLOAT32}, .kind = t->kind, .sums = 1};
    task.x = task.y = x;
    if (t->mean || t->slope) task.mean = sums, task.slope = slopes;
    return task;
}

/* Bytes of scratch that `finish_some` needs for bands of this pitch. */
static inline size_t some_scratch(const gf_norm_act *t, int64_t pitch) {
    if (!is_smooth(t)) return 0;
    gf_norm_act pass = pass_in_scratch(t, NULL, pitch, 1, NULL, NULL);
    pass.mean = &pass; /* anything: there is one */
    return gf_float_bytes(2 * gf_ceil_div(t->map.w, t->map.pw) * pitch) + (gf_norm_act_scratch(&pass) + 63) / 64 * 64;
}

/* Finish a band of some of the channels, whatever the activation. There is no residual. */
static inline void finish_some(const gf_norm_act *t, const band *b, void *scratch) {
    if (!is_smooth(t)) {
        finish_band(t, b, 1);
        return;
    }
    const patch_row to = find_patch_row(&t->map, b);
    const int64_t size = to.cells * b->pitch, rows = b->to - b->from;
    float *sums = scratch, *slopes = sums + size;
    const gf_norm_act pass = pass_in_scratch(t, b->x, b->pitch, rows, sums, slopes), copy = copy_only(t);
    gf_current()->norm_act(&pass, 0, 0, (char *)scratch + gf_float_bytes(2 * size));
    if (t->y) finish_band(&copy, b, 1);
    for (int64_t j = 0; j < to.cells && (t->mean || t->slope); j++)
        for (int64_t i = 0; i < b->pitch; i += GF_LANES) {
            const int64_t at = j * b->pitch + i, columns = gf_least(t->map.pw, t->map.w - j * t->map.pw);
            put_cell(t, b, &to, j, b->vector + i / GF_LANES, gf_load(sums + at), gf_load(slopes + at) * (float)(rows * columns),
                     to.rows * columns, 0);
        }
}

#endif
