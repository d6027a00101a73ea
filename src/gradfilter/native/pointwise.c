/* Pointwise convolution: a product of matrices in tiles of registers, a few patch rows at a time. */
#include "conv.h"
#include "finish.h"

/* R pixels times V vectors of outputs. */
GF_INLINE void run_tile(const float *x, int64_t inputs, const float *weight, const float *shift, float *y, int64_t pitch,
                        const int R, const int V) {
    gf_vec sum[12][3];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) sum[r][j] = gf_load(shift + j * GF_LANES);
    for (int64_t i = 0; i < inputs; i++, weight += V * GF_LANES) {
        gf_vec w[3];
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) w[j] = gf_load(weight + j * GF_LANES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float pixel = x[r * inputs + i];
#pragma GCC unroll 3
            for (int j = 0; j < V; j++) sum[r][j] += pixel * w[j];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) gf_store(y + r * pitch + j * GF_LANES, sum[r][j]);
}

/* Bring the numbers from `from` on nearer: the pixels that a later tile reads. */
GF_INLINE void fetch(const float *from, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/* `pixels` pixels times one panel of outputs: 12 sums at once keep both multipliers busy. */
#define PANEL(V, R)                                                                                                      \
    static void panel_##V(const float *x, int64_t inputs, const float *weight, const float *shift, float *y,             \
                          int64_t pitch, int64_t pixels, int64_t ahead) {                                                \
        int64_t i = 0;                                                                                                   \
        for (; i + R <= pixels; i += R) {                                                                                \
            if (ahead) fetch(x + i * inputs + ahead, R * inputs);                                                        \
            run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, R, V);                                 \
        }                                                                                                                \
        for (; i + 2 <= pixels; i += 2) run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, 2, V);     \
        if (i < pixels) run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, 1, V);                     \
    }

PANEL(1, 12)
PANEL(2, 6)
PANEL(3, 4)

typedef void panel_fn(const float *x, int64_t inputs, const float *weight, const float *shift, float *y, int64_t pitch,
                      int64_t pixels, int64_t ahead);
static panel_fn *const RUN[3] = {panel_1, panel_2, panel_3};

/* A task and what all of its units share. A panel is two vectors of outputs; an odd one joins the last panel. */
typedef struct {
    const gf_pointwise *task;
    float *weight, *shift; /* packed: [panel, input, vector, lane] and [vector, lane] */
    int64_t vectors, panels;
    int64_t part;     /* panels that are multiplied with the same pixels before the next ones are */
    int64_t together; /* patch rows that are multiplied with the same panels */
    size_t rows_at;   /* in the scratch of a thread */
} plan;

/* The first vector of a panel; of the one after the last, the end. */
GF_INLINE int64_t panel_start(const plan *p, int64_t panel) { return panel < p->panels ? 2 * panel : p->vectors; }

static void pack(const plan *p) {
    const gf_pointwise *t = p->task;
    for (int64_t panel = 0; panel < p->panels; panel++) {
        const int64_t start = panel_start(p, panel), width = panel_start(p, panel + 1) - start;
        float *to = p->weight + start * GF_LANES * t->inputs;
        for (int64_t j = 0; j < width; j++) {
            const int64_t c = gf_vec_start(start + j, t->after.map.c);
            for (int64_t l = 0; l < GF_LANES; l++) {
                const float scale = t->scale ? t->scale[c + l] : 1, *from = t->weight + (c + l) * t->inputs;
                p->shift[(start + j) * GF_LANES + l] = t->shift ? t->shift[c + l] : 0;
                for (int64_t i = 0; i < t->inputs; i++) to[(i * width + j) * GF_LANES + l] = from[i] * scale;
            }
        }
    }
}

/* How far ahead of a tile its panel fetches. */
enum { AHEAD_FLOATS = 4096 };

/* Multiply `pixels` pixels with panels [from, to); y begins with the first of those. */
static void multiply(const plan *p, const float *x, float *y, int64_t pixels, int64_t from, int64_t to) {
    const int64_t inputs = p->task->inputs, first = panel_start(p, from);
    const int64_t pitch = (panel_start(p, to) - first) * GF_LANES;
    for (int64_t panel = from; panel < to; panel++) {
        const int64_t ahead = panel == from ? gf_most(12, AHEAD_FLOATS / inputs) * inputs : 0;
        const int64_t start = panel_start(p, panel), width = panel_start(p, panel + 1) - start, at = start * GF_LANES;
        RUN[width - 1](x, inputs, p->weight + at * inputs, p->shift + at, y + at - first * GF_LANES, pitch, pixels, ahead);
    }
}

/* Pixels of x that stay near while all panels pass over them. */
static int64_t chunk_of(int64_t inputs) { return gf_most(24, gf_least(192, 32768 / inputs / 12 * 12)); }

/* The first pixel of patch row `unit`, counted over all images. */
static int64_t first_pixel(const gf_map *map, int64_t unit) {
    const int64_t down = gf_ceil_div(map->h, map->ph);
    return (unit / down * map->h + unit % down * map->ph) * map->w;
}

static void run_units(const void *argument, int64_t work, void *scratch) {
    const plan *p = argument;
    const gf_pointwise *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), parts = gf_ceil_div(p->panels, p->part);
    const int64_t first = work / parts * p->together, last = gf_least(map->n * down, first + p->together);
    const int64_t panel = work % parts * p->part, end = gf_least(p->panels, panel + p->part);
    const int64_t vector = panel_start(p, panel), pitch = (panel_start(p, end) - vector) * GF_LANES;
    const int64_t from = first_pixel(map, first), to = first_pixel(map, last), chunk = chunk_of(t->inputs);
    float *y = (float *)((char *)scratch + p->rows_at);
    for (int64_t i = from; i < to; i += chunk)
        multiply(p, t->x + i * t->inputs, y + (i - from) * pitch, gf_least(chunk, to - i), panel, end);
    for (int64_t unit = first; unit < last; unit++) {
        const float *rows = y + (first_pixel(map, unit) - from) * pitch;
        finish_rows(&t->after, rows, pitch, unit / down, unit % down, vector, scratch);
    }
}

/* Bytes of weights, of x and of y that the second cache holds together. */
enum { WEIGHTS = 98304, PIXELS = 131072, RESULTS = 131072 };

/* Choose how much is multiplied at once. */
static void divide(plan *p, int64_t units, int threads) {
    const gf_pointwise *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t pixels = gf_least(map->ph, map->h) * map->w, bytes = sizeof(float);
    p->panels = gf_most(1, p->vectors / 2);
    p->part = is_smooth(&t->after) ? p->panels : gf_most(1, WEIGHTS / (2 * GF_LANES * t->inputs * bytes));
    p->part = gf_least(p->panels, p->part);
    const int64_t results = RESULTS / (pixels * 2 * p->part * GF_LANES * bytes), inputs = PIXELS / (pixels * t->inputs * bytes);
    p->together = gf_most(1, gf_least(gf_ceil_div(units, threads), gf_least(results, inputs)));
}

int GF_LEVEL(gf_pointwise)(const gf_pointwise *t, int threads) {
    const gf_map *map = &t->after.map;
    const int64_t units = map->n * gf_ceil_div(map->h, map->ph), pixels = gf_least(map->ph, map->h) * map->w;
    plan p = {.task = t, .vectors = gf_ceil_div(map->c, GF_LANES)};
    divide(&p, units, threads);
    const int64_t lanes = p.vectors * GF_LANES, widest = gf_least(lanes, (2 * p.part + 1) * GF_LANES);
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.weight = aligned_alloc(64, gf_float_bytes(lanes * (t->inputs + 1)));
    if (!p.weight) return -1;
    p.shift = p.weight + lanes * t->inputs;
    pack(&p);
    const size_t scratch = p.rows_at + gf_float_bytes(p.together * pixels * widest);
    const int64_t work = gf_ceil_div(units, p.together) * gf_ceil_div(p.panels, p.part);
    const int failed = gf_parallel(run_units, &p, work, threads, scratch);
    free(p.weight);
    return failed;
}
