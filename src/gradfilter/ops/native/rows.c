/* The fused pass: y = act(x * scale + shift + residual) and what it leaves per patch, one unit at a time. */
#include <math.h>
#include <string.h>

#include "kernels.h"

/* Cells side by side, each of `count` runs of `width` numbers, `stride` apart. Element i of all runs has one scale and
 * one shift, and within a cell one sum: in channels_last the runs are the pixels of a patch in one row, in NCHW there is
 * one cell whose runs are the rows of one channel. */
typedef struct {
    const void *x, *residual;
    void *y;
    int64_t cells, width, count, stride;
    int64_t ahead; /* elements from here to what is read next: no hardware foresees several interleaved runs */
    const float *scales, *shifts; /* per element, or NULL: the numbers below */
    float scale, shift;
    float lo, hi, leak;
    float flat_to, flat_from; /* of CLAMP, slope 1 strictly between; NaN: no such bound */
    float *sums, *slopes;     /* per cell and element, or NULL */
    int first;                /* set the sums instead of adding to them */
} strip;

#if defined(__AVX512F__)
#define LANES 16
#include "lanes.h"
#endif
#if defined(__AVX2__)
#define LANES 8
#include "lanes.h"
#endif
#define LANES 4
#include "lanes.h"
#define LANES 1
#include "lanes.h"

GF_INLINE void run_lanes(const strip *given, const int kind, const int dtype, const int residual) {
    const strip own = *given, *const s = &own; /* no store to y can change it: its fields stay in registers */
    for (int64_t cell = 0; cell < s->cells; cell++) {
        int64_t i = 0;
#if defined(__AVX512F__)
        i = run_cell_16(s, cell, i, kind, dtype, residual);
#endif
#if defined(__AVX2__)
        i = run_cell_8(s, cell, i, kind, dtype, residual);
#endif
        i = run_cell_4(s, cell, i, kind, dtype, residual);
        run_cell_1(s, cell, i, kind, dtype, residual);
    }
}

typedef void run_fn(const strip *);

#define STRIP(kind, dtype, residual) \
    static void kind##_##dtype##_##residual(const strip *s) { run_lanes(s, kind, dtype, residual); }
#define STRIPS(kind)              \
    STRIP(kind, GF_FLOAT32, 0)    \
    STRIP(kind, GF_FLOAT32, 1)    \
    STRIP(kind, GF_BFLOAT16, 0)   \
    STRIP(kind, GF_BFLOAT16, 1)
#define ROW(kind) \
    {{kind##_GF_FLOAT32_0, kind##_GF_FLOAT32_1}, {kind##_GF_BFLOAT16_0, kind##_GF_BFLOAT16_1}}

STRIPS(GF_IDENTITY)
STRIPS(GF_CLAMP)
STRIPS(GF_LEAKY)
STRIPS(GF_HARDSWISH)
STRIPS(GF_SILU)

static run_fn *const RUN[5][2][2] = {ROW(GF_IDENTITY), ROW(GF_CLAMP), ROW(GF_LEAKY), ROW(GF_HARDSWISH), ROW(GF_SILU)};

static const void *step_in(const void *p, int64_t at, int dtype) {
    return p ? (const char *)p + at * (dtype == GF_BFLOAT16 ? 2 : 4) : NULL;
}

static void *step_out(void *p, int64_t at, int dtype) {
    return p ? (char *)p + at * (dtype == GF_BFLOAT16 ? 2 : 4) : NULL;
}

static inline void put(void *p, int64_t at, float v, int dtype) {
    if (dtype == GF_FLOAT32)
        ((float *)p)[at] = v;
    else
        store_1(p, at, (vf_1){v}, GF_BFLOAT16);
}

/* Write the means and slopes of `width` sums over `area` pixels to the cells from `at` on. */
static void finish(const gf_norm_act *t, const float *sums, const float *slopes, int64_t width, int64_t area, int64_t at) {
    const int dtype = t->map.dtype;
    const float pixels = t->sums ? 1 : (float)area;
    if (t->mean) {
        if (dtype == GF_FLOAT32)
            for (int64_t i = 0; i < width; i++) ((float *)t->mean)[at + i] = sums[i] / pixels;
        else
            for (int64_t i = 0; i < width; i++) put(t->mean, at + i, sums[i] / pixels, dtype);
    }
    if (!t->slope) return;
    if (t->kind == GF_HARDSWISH || t->kind == GF_SILU)
        for (int64_t i = 0; i < width; i++) put(t->slope, at + i, slopes[i] / (float)area, dtype);
    else if (t->count_bytes == 1)
        for (int64_t i = 0; i < width; i++) ((uint8_t *)t->slope)[at + i] = (uint8_t)(int32_t)slopes[i];
    else if (t->count_bytes == 2)
        for (int64_t i = 0; i < width; i++) ((int16_t *)t->slope)[at + i] = (int16_t)(int32_t)slopes[i];
    else
        for (int64_t i = 0; i < width; i++) ((int32_t *)t->slope)[at + i] = (int32_t)slopes[i];
}

static strip make_strip(const gf_norm_act *t) {
    strip s = {.scale = 1, .shift = -0.0f, .lo = t->lo, .hi = t->hi, .leak = t->leak};
    s.flat_to = t->lo;
    s.flat_from = t->hi == INFINITY ? NAN : t->hi;
    return s;
}

static void place(strip *s, const gf_norm_act *t, int64_t at) {
    s->x = step_in(t->x, at, t->map.dtype);
    s->residual = step_in(t->residual, at, t->map.dtype);
    s->y = step_out(t->y, at, t->map.dtype);
}

/* Pixels of a chunk where nothing is pooled: enough to hide the start of a strip, few enough to read in order. */
enum { CHUNK = 8 };

static void run_channels_last(const gf_norm_act *t, run_fn *run, int64_t image, int64_t row, int64_t rows, float *scratch) {
    const gf_map *m = &t->map;
    const int pooled = t->mean || t->slope;
    const int64_t pw = pooled ? m->pw : CHUNK, whole = m->w / pw, part = m->w % pw, done = whole * m->c;
    const int64_t cells = gf_ceil_div(m->w, pw), at = (image * gf_ceil_div(m->h, m->ph) + row) * cells * m->c;
    float *slopes = scratch + cells * m->c;
    strip s = make_strip(t);
    s.width = s.stride = m->c;
    s.scales = t->scale;
    s.shifts = t->shift;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t start = (image * m->h + row * m->ph + r) * m->w;
        s.first = r == 0;
        for (int last = 0; last < 2; last++) {
            s.cells = last ? part != 0 : whole;
            s.count = last ? part : pw;
            s.ahead = s.count * m->c;
            s.sums = pooled ? scratch + last * done : NULL;
            s.slopes = pooled ? slopes + last * done : NULL;
            place(&s, t, (start + last * whole * pw) * m->c);
            run(&s);
        }
    }
    if (!pooled) return;
    finish(t, scratch, slopes, done, rows * pw, at);
    if (part) finish(t, scratch + done, slopes + done, m->c, rows * part, at + done);
}

/* Add up the columns of each cell, of `depth` numbers each, in place: cell j moves to column j, which has been read by then. */
static void gather_columns(float *sums, int64_t width, int64_t pw, int64_t depth) {
    for (int64_t cell = 0, from = 0; from < width; cell++, from += pw) {
        const int64_t to = from + pw < width ? from + pw : width;
        for (int64_t d = 0; d < depth; d++) {
            float sum = 0;
            for (int64_t i = from; i < to; i++) sum += sums[i * depth + d];
            sums[cell * depth + d] = sum;
        }
    }
}

/* Row by row: the channels of an NCHW map, or all of the few channels of a channels_last map at once. */
static void run_planes(const gf_norm_act *t, run_fn *run, int64_t image, int64_t row, int64_t rows, float *scratch) {
    const gf_map *m = &t->map;
    const int pooled = t->mean || t->slope;
    const int64_t depth = m->channels_last ? m->c : 1, planes = m->c / depth, line = m->w * depth;
    const int64_t cells = gf_ceil_div(m->w, m->pw) * depth, down = gf_ceil_div(m->h, m->ph), whole = m->w / m->pw * depth;
    strip s = make_strip(t);
    s.width = pooled ? line : line * rows;
    s.count = pooled ? rows : 1;
    s.cells = 1;
    s.stride = line;
    s.ahead = s.count * line;
    s.first = 1;
    for (int64_t c = 0; c < planes; c++) {
        const int64_t plane = image * planes + c, at = (plane * down + row) * cells;
        if (t->scale) s.scale = t->scale[c];
        if (t->shift) s.shift = t->shift[c];
        place(&s, t, (plane * m->h + row * m->ph) * line);
        if (pooled) {
            s.sums = scratch;
            s.slopes = scratch + line;
        }
        run(&s);
        if (!pooled) continue;
        gather_columns(s.sums, m->w, m->pw, depth);
        if (t->slope) gather_columns(s.slopes, m->w, m->pw, depth);
        finish(t, s.sums, s.slopes, whole, rows * m->pw, at);
        if (whole < cells) finish(t, s.sums + whole, s.slopes + whole, depth, rows * (m->w % m->pw), at + whole);
    }
}

static void norm_act(const gf_norm_act *t, int64_t image, int64_t row, void *scratch) {
    const gf_map *m = &t->map;
    run_fn *run = RUN[t->kind][m->dtype][t->residual != NULL];
    const int64_t left = m->h - row * m->ph, rows = left < m->ph ? left : m->ph;
    if (gf_runs_in_planes(t))
        run_planes(t, run, image, row, rows, scratch);
    else
        run_channels_last(t, run, image, row, rows, scratch);
}

extern gf_slope_unit GF_LEVEL(gf_slope_row);
extern gf_norm_back_unit GF_LEVEL(gf_norm_back_block);
extern gf_norm_end_unit GF_LEVEL(gf_norm_end_channel);
const gf_kernels GF_LEVEL(gf_kernels) = {
    .norm_act = norm_act,
    .slope = GF_LEVEL(gf_slope_row),
    .norm_back = GF_LEVEL(gf_norm_back_block),
    .norm_end = GF_LEVEL(gf_norm_end_channel),
};
