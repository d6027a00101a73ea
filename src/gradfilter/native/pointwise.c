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

/* `pixels` pixels times one panel of outputs: 12 sums at once keep both multipliers busy. */
#define PANEL(V, R)                                                                                                       \
    static void panel_##V(const float *x, int64_t inputs, const float *weight, const float *shift, float *y,              \
                          int64_t pitch, int64_t pixels) {                                               \
        int64_t i = 0;                                                                                                    \
        for (; i + R <= pixels; i += R)                                                                                   \
            run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, R, V);                      \
        for (; i + 2 <= pixels; i += 2)                                                                                   \
            run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, 2, V);                      \
        if (i < pixels) run_tile(x + i * inputs, inputs, weight, shift, y + i * pitch, pitch, 1, V);          \
    }

PANEL(1, 12)
PANEL(2, 6)
PANEL(3, 4)

typedef void panel_fn(const float *x, int64_t inputs, const float *weight, const float *shift, float *y, int64_t pitch,
                      int64_t pixels);
static panel_fn *const RUN[3] = {panel_1, panel_2, panel_3};

/* Vectors of the panel from vector `from` on: two, and the odd one joins the last two. */
GF_INLINE int64_t panel_width(int64_t vectors, int64_t from) {
    const int64_t left = vectors - from;
    return left == 3 || left == 1 ? left : 2;
}

/* A task and what all of its units share. */
typedef struct {
    const gf_pointwise *task;
    float *weight, *shift; /* packed: [panel, input, vector, lane] and [vector, lane] */
    int64_t vectors, pitch; /* of channels: vectors, and lanes in all of them */
    int64_t together; /* patch rows whose pixels are multiplied at once */
    size_t rows_at;   /* in the scratch of a thread */
} plan;

static void pack(const plan *p) {
    const gf_pointwise *t = p->task;
    float *to = p->weight, *shift = p->shift;
    for (int64_t v = 0, width; v < p->vectors; v += width) {
        width = panel_width(p->vectors, v);
        for (int64_t j = v; j < v + width; j++) {
            const int64_t c = gf_vec_start(j, t->after.map.c);
            for (int64_t l = 0; l < GF_LANES; l++) {
                const float scale = t->scale ? t->scale[c + l] : 1, *from = t->weight + (c + l) * t->inputs;
                *shift++ = t->shift ? t->shift[c + l] : 0;
                for (int64_t i = 0; i < t->inputs; i++) to[(i * width + j - v) * GF_LANES + l] = from[i] * scale;
            }
        }
        to += width * GF_LANES * t->inputs;
    }
}

/* Multiply `pixels` pixels with every panel. */
static void multiply(const plan *p, const float *x, float *y, int64_t pixels) {
    const int64_t inputs = p->task->inputs;
    for (int64_t v = 0, width; v < p->vectors; v += width) {
        const int64_t start = v * GF_LANES;
        width = panel_width(p->vectors, v);
        RUN[width - 1](x, inputs, p->weight + start * inputs, p->shift + start, y + start, p->pitch, pixels);
    }
}

/* Pixels of x that stay near while all panels pass over them. */
static int64_t chunk_of(int64_t inputs) { return gf_most(24, gf_least(192, 32768 / inputs / 12 * 12)); }

/* The first pixel of patch row `unit`, counted over all images. */
static int64_t first_pixel(const gf_map *map, int64_t unit) {
    const int64_t down = gf_ceil_div(map->h, map->ph);
    return (unit / down * map->h + unit % down * map->ph) * map->w;
}

static void run_units(const void *argument, int64_t group, void *scratch) {
    const plan *p = argument;
    const gf_pointwise *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), first = group * p->together;
    const int64_t last = gf_least(map->n * down, first + p->together);
    const int64_t from = first_pixel(map, first), to = first_pixel(map, last), chunk = chunk_of(t->inputs);
    float *y = (float *)((char *)scratch + p->rows_at);
    for (int64_t i = from; i < to; i += chunk)
        multiply(p, t->x + i * t->inputs, y + (i - from) * p->pitch, gf_least(chunk, to - i));
    for (int64_t unit = first; unit < last; unit++) {
        const float *rows = y + (first_pixel(map, unit) - from) * p->pitch;
        finish_rows(&t->after, rows, p->pitch, unit / down, unit % down, scratch);
    }
}

/* Bytes of y that the second cache holds beside x and the weights. */
enum { SECOND_CACHE = 131072 };

int GF_LEVEL(gf_pointwise)(const gf_pointwise *t, int threads) {
    const gf_map *map = &t->after.map;
    plan p = {.task = t, .vectors = gf_ceil_div(map->c, GF_LANES)};
    p.pitch = p.vectors * GF_LANES;
    const int64_t units = map->n * gf_ceil_div(map->h, map->ph), floats = gf_least(map->ph, map->h) * map->w * p.pitch;
    p.together = gf_most(1, gf_least(gf_ceil_div(units, threads), SECOND_CACHE / (int64_t)sizeof(float) / floats));
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.weight = aligned_alloc(64, gf_float_bytes(p.pitch * (t->inputs + 1)));
    if (!p.weight) return -1;
    p.shift = p.weight + p.pitch * t->inputs;
    pack(&p);
    const size_t scratch = p.rows_at + gf_float_bytes(p.together * floats);
    const int failed = gf_parallel(run_units, &p, gf_ceil_div(units, p.together), threads, scratch);
    free(p.weight);
    return failed;
}
