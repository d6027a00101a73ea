/* Dense convolution: a product of matrices in tiles of registers, a few patch rows at a time.
 *
 * A kernel of one pixel multiplies x where it is; for others the numbers under each pixel of y are gathered first.
 */
#include "conv.h"
#include "finish.h"
#include "tile.h"

/* A task and what all of its units share. */
typedef struct {
    const gf_dense *task;
    float *weight, *shift; /* packed: [panel, input, vector, lane] and [vector, lane] */
    int64_t depth;   /* numbers of x under a pixel of y */
    int64_t gathers; /* whether these are not simply a pixel of x */
    int64_t vectors, panels;
    int64_t part;     /* panels that are multiplied with the same pixels before the next ones are */
    int64_t together; /* patch rows that are multiplied with the same panels */
    size_t rows_at, gathered_at; /* in the scratch of a thread */
} plan;

static void pack(const plan *p) {
    const gf_dense *t = p->task;
    const int64_t taps = t->kh * t->kw;
    for (int64_t panel = 0; panel < p->panels; panel++) {
        const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
        float *to = p->weight + start * GF_LANES * p->depth;
        for (int64_t j = 0; j < width; j++) {
            const int64_t c = gf_vec_start(start + j, t->after.map.c);
            for (int64_t l = 0; l < GF_LANES; l++) {
                const float scale = t->scale ? t->scale[c + l] : 1, *from = t->weight + (c + l) * p->depth;
                p->shift[(start + j) * GF_LANES + l] = t->shift ? t->shift[c + l] : 0;
                float *lane = to + j * GF_LANES + l;
                for (int64_t tap = 0; tap < taps; tap++)
                    for (int64_t i = tap; i < p->depth; i += taps, lane += width * GF_LANES) *lane = from[i] * scale;
            }
        }
    }
}

/* How far ahead of a tile its panel fetches. */
enum { AHEAD_FLOATS = 4096 };

/* Multiply `pixels` pixels with panels [from, to); y begins with the first of those. */
static void multiply(const plan *p, const float *x, float *y, int64_t pixels, int64_t from, int64_t to) {
    const int64_t inputs = p->depth, first = panel_start(from, p->vectors);
    const int64_t pitch = (panel_start(to, p->vectors) - first) * GF_LANES;
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t ahead = panel == 0 && !p->gathers ? gf_most(12, AHEAD_FLOATS / inputs) * inputs : 0;
        const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start, at = start * GF_LANES;
        RUN[width - 1](x, inputs, p->weight + at * inputs, p->shift + at, y + at - first * GF_LANES, pitch, pixels, ahead);
    }
}

/* Copy a few numbers: too few for memcpy to be worth its call. */
GF_INLINE void copy(float *to, const float *from, int64_t count) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) memcpy(to + i, from + i, 4 * sizeof(float));
    if (i < count && count >= 4)
        memcpy(to + count - 4, from + count - 4, 4 * sizeof(float));
    else
        for (; i < count; i++) to[i] = from[i];
}

/* Gather one row of taps, [kw, inputs]; `row` is that of x, NULL outside, and `left` its first column. */
GF_INLINE void gather_row(const gf_dense *t, const float *row, int64_t left, float *to) {
    const int64_t inputs = t->inputs;
    if (row && t->dw == 1 && left >= 0 && left + t->kw <= t->w) {
        if (t->kw * inputs == 9) /* three colours, three columns: a network's first convolution */
            copy(to, row + left * inputs, 9);
        else
            copy(to, row + left * inputs, t->kw * inputs);
        return;
    }
    for (int64_t v = 0, q = left; v < t->kw; v++, q += t->dw, to += inputs) {
        if (row && q >= 0 && q < t->w)
            copy(to, row + q * inputs, inputs);
        else
            memset(to, 0, (size_t)inputs * sizeof(float));
    }
}

/* Gather what is under `pixels` pixels of y, counted over all images. */
static void gather(const gf_dense *t, int64_t first, int64_t pixels, float *to) {
    const gf_map *map = &t->after.map;
    const int64_t step = t->kw * t->inputs, depth = step * t->kh;
    for (int64_t i = first, end; i < first + pixels; i = end) {
        const int64_t row = i / map->w, image = row / map->h, top = row % map->h * t->sh - t->top;
        end = gf_least(first + pixels, (row + 1) * map->w);
        for (int64_t u = 0, y = top; u < t->kh; u++, y += t->dh) {
            const float *from = y >= 0 && y < t->h ? t->x + (image * t->h + y) * t->w * t->inputs : NULL;
            float *into = to + (i - first) * depth + u * step;
            for (int64_t q = i - row * map->w; q < end - row * map->w; q++, into += depth)
                gather_row(t, from, q * t->sw - t->left, into);
        }
    }
}

/* Pixels that stay near while all panels pass over them. */
static int64_t chunk_of(int64_t depth) { return gf_most(24, gf_least(192, 32768 / depth / 12 * 12)); }

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
    float *y = (float *)((char *)scratch + p->rows_at), *gathered = (float *)((char *)scratch + p->gathered_at);
    for (int64_t i = from; i < to; i += chunk) {
        const int64_t pixels = gf_least(chunk, to - i);
        if (p->gathers) gather(t, i, pixels, gathered);
        multiply(p, p->gathers ? gathered : t->x + i * p->depth, y + (i - from) * pitch, pixels, panel, end);
    }
    for (int64_t unit = first; unit < last; unit++) {
        const float *rows = y + (first_pixel(map, unit) - from) * pitch;
        finish_rows(&t->after, rows, pitch, unit / down, unit % down, vector, scratch);
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

int GF_LEVEL(gf_dense)(const gf_dense *t, int threads) {
    const gf_map *map = &t->after.map;
    const int64_t units = map->n * gf_ceil_div(map->h, map->ph), pixels = gf_least(map->ph, map->h) * map->w;
    plan p = {.task = t, .vectors = gf_ceil_div(map->c, GF_LANES)};
    p.depth = t->inputs * t->kh * t->kw;
    p.gathers = t->kh * t->kw * t->sh * t->sw > 1 || t->top || t->left || t->h != map->h || t->w != map->w;
    divide(&p, units, threads);
    const int64_t lanes = p.vectors * GF_LANES, widest = gf_least(lanes, (2 * p.part + 1) * GF_LANES);
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.weight = aligned_alloc(64, gf_float_bytes(lanes * (p.depth + 1)));
    if (!p.weight) return -1;
    p.shift = p.weight + lanes * p.depth;
    pack(&p);
    p.gathered_at = p.rows_at + gf_float_bytes(p.together * pixels * widest);
    const size_t scratch = p.gathered_at + (p.gathers ? gf_float_bytes(chunk_of(p.depth) * p.depth) : 0);
    const int64_t work = gf_ceil_div(units, p.together) * gf_ceil_div(p.panels, p.part);
    const int failed = gf_parallel(run_units, &p, work, threads, scratch);
    free(p.weight);
    return failed;
}
