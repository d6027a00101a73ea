/* Dense convolution: a product of matrices in tiles of registers, a few patch rows at a time.
 *
 * A kernel of one pixel multiplies x where it is. For others the rows of x under a patch row of y are copied, with the
 * zeros at their ends: in channels_last memory all that a row of taps reads of such a strip is one run of numbers, and
 * the pixels of y read runs that overlap.
 */
#include "conv.h"
#include "finish.h"
#include "tile.h"

/* A task and what all of its units share. */
typedef struct {
    const gf_dense *task;
    float *weight, *shift; /* packed: [panel, input, vector, lane] and [vector, lane] */
    int64_t depth;  /* numbers of x under a pixel of y */
    int64_t strips; /* rows of x that are copied for a patch row; 0 where a pixel of y is under one of x */
    int64_t strip;  /* floats in each */
    under at;
    int64_t vectors, panels;
    int64_t part;     /* panels that are multiplied with the same pixels before the next ones are */
    int64_t together; /* patch rows that are multiplied with the same panels */
    size_t rows_at, strips_at; /* in the scratch of a thread */
} plan;

/* Multiply `pixels` pixels with panels [from, to); y begins with the first of those. */
static void multiply(const plan *p, const float *x, float *y, int64_t pixels, int64_t from, int64_t to) {
    const int64_t first = panel_start(from, p->vectors), pitch = (panel_start(to, p->vectors) - first) * GF_LANES;
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t ahead = panel == 0 && !p->strips ? far_ahead(p->depth) : 0;
        const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start, c = start * GF_LANES;
        RUN[width - 1](x, &p->at, p->weight + c * p->depth, p->shift + c, y + c - first * GF_LANES, pitch, pixels, ahead);
    }
}

/* Copy the rows of x under patch row `row` of an image, from the first column that y reads to the last. */
static void copy_strips(const plan *p, int64_t image, int64_t row, float *to) {
    const gf_dense *t = p->task;
    const int64_t top = row * t->after.map.ph * t->sh - t->top, width = p->strip / t->inputs;
    const int64_t before = gf_least(t->left, width), there = gf_most(0, gf_least(t->w, width - before));
    for (int64_t k = 0, y = top; k < p->strips; k++, y++, to += p->strip) {
        const int64_t first = before * t->inputs, count = y >= 0 && y < t->h ? there * t->inputs : 0;
        memset(to, 0, (size_t)first * sizeof(float));
        if (count) memcpy(to + first, t->x + (image * t->h + y) * t->w * t->inputs, (size_t)count * sizeof(float));
        memset(to + first + count, 0, (size_t)(p->strip - first - count) * sizeof(float));
    }
}

/* The first pixel of patch row `unit`, counted over all images. */
static int64_t first_pixel(const gf_map *map, int64_t unit) {
    const int64_t down = gf_ceil_div(map->h, map->ph);
    return (unit / down * map->h + unit % down * map->ph) * map->w;
}

static void run_units(const void *argument, int64_t work, void *scratch) {
    const plan *p = argument;
    const gf_dense *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), parts = gf_ceil_div(p->panels, p->part);
    const int64_t first = work / parts * p->together, last = gf_least(map->n * down, first + p->together);
    const int64_t panel = work % parts * p->part, end = gf_least(p->panels, panel + p->part);
    const int64_t vector = panel_start(panel, p->vectors), pitch = (panel_start(end, p->vectors) - vector) * GF_LANES;
    const int64_t from = first_pixel(map, first), to = first_pixel(map, last), chunk = chunk_of(p->depth);
    float *y = (float *)((char *)scratch + p->rows_at), *strips = (float *)((char *)scratch + p->strips_at);
    for (int64_t i = from; i < to && !p->strips; i += chunk)
        multiply(p, t->x + i * p->depth, y + (i - from) * pitch, gf_least(chunk, to - i), panel, end);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t image = unit / down, row = unit % down;
        float *rows = y + (first_pixel(map, unit) - from) * pitch;
        if (p->strips) {
            copy_strips(p, image, row, strips);
            for (int64_t r = 0; r < gf_least(map->ph, map->h - row * map->ph); r++)
                multiply(p, strips + r * t->sh * p->strip, rows + r * map->w * pitch, map->w, panel, end);
        }
        finish_rows(&t->after, rows, pitch, image, row, vector, scratch);
    }
}

/* Bytes of weights, of x and of y that the second cache holds together. */
enum { WEIGHTS = 98304, PIXELS = 131072, RESULTS = 131072 };

/* Choose how much is multiplied at once. */
static void divide(plan *p, int64_t units, int threads) {
    const gf_dense *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t pixels = gf_least(map->ph, map->h) * map->w, bytes = sizeof(float);
    p->panels = count_panels(p->vectors);
    p->part = is_smooth(&t->after) ? p->panels : gf_most(4, WEIGHTS / (2 * GF_LANES * p->depth * bytes));
    p->part = gf_least(p->panels, p->part);
    const int64_t results = RESULTS / (pixels * 2 * p->part * GF_LANES * bytes), inputs = PIXELS / (pixels * p->depth * bytes);
    p->together = gf_most(1, gf_least(gf_ceil_div(units, threads), gf_least(results, inputs)));
}

/* Read x from strips: a row of taps is one run, or with a dilation one run per tap. */
static void set_strips(plan *p) {
    const gf_dense *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t close = t->dw == 1, inputs = t->inputs;
    p->strips = (gf_least(map->ph, map->h) - 1) * t->sh + (t->kh - 1) * t->dh + 1;
    p->strip = ((map->w - 1) * t->sw + (t->kw - 1) * t->dw + 1) * inputs;
    p->at = (under){t->kh, t->dh * p->strip, close ? 1 : t->kw, t->dw * inputs, close ? t->kw * inputs : inputs, t->sw * inputs};
}

int GF_LEVEL(gf_dense)(const gf_dense *t, int threads) {
    const gf_map *map = &t->after.map;
    const int64_t units = map->n * gf_ceil_div(map->h, map->ph), pixels = gf_least(map->ph, map->h) * map->w;
    plan p = {.task = t, .vectors = gf_ceil_div(map->c, GF_LANES)};
    p.depth = t->inputs * t->kh * t->kw;
    p.at = under_itself(t->inputs);
    if (t->kh * t->kw * t->sh * t->sw > 1 || t->top || t->left || t->h != map->h || t->w != map->w) set_strips(&p);
    divide(&p, units, threads);
    const int64_t lanes = p.vectors * GF_LANES, widest = gf_least(lanes, (2 * p.part + 1) * GF_LANES);
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.weight = aligned_alloc(64, gf_float_bytes(lanes * (p.depth + 1)));
    if (!p.weight) return -1;
    p.shift = p.weight + lanes * p.depth;
    pack_panels(t, p.vectors, p.weight, p.shift);
    p.strips_at = p.rows_at + gf_float_bytes(p.together * pixels * widest);
    const size_t scratch = p.strips_at + gf_float_bytes(p.strips * p.strip);
    const int64_t work = gf_ceil_div(units, p.together) * gf_ceil_div(p.panels, p.part);
    const int failed = gf_parallel(run_units, &p, work, threads, scratch);
    free(p.weight);
    return failed;
}
