/* Depthwise convolution, one unit at a time: a table of the pixels under the unit, then blocks of columns in registers. */
#include "conv.h"
#include "finish.h"
#include "window.h"

/* A task and what all of its units share. */
typedef struct {
    window window;
    int64_t pitch;            /* lanes in all vectors of channels */
    int64_t together;         /* vectors whose pixels under a band the first cache holds */
    int64_t band;             /* rows of y whose pixels of x the second cache holds */
    size_t rows_at, table_at; /* in the scratch of a thread */
} plan;

/* Note where each pixel under the unit is. */
static void fill_table(const window *w, int64_t image, int64_t first, int64_t rows, const float **table) {
    const gf_depthwise *t = w->task;
    const int64_t channels = t->after.map.c;
    for (int64_t r = first; r < first + rows; r++)
        table = note_row(w, r < 0 || r >= t->h ? NULL : t->x + (image * t->h + r) * t->w * channels, channels, table);
}

/* The part of x that later units read first. */
static ahead look_ahead(const gf_depthwise *t, int64_t image, int64_t from, int64_t rows, int64_t blocks) {
    const gf_map *map = &t->after.map;
    const int64_t pitch = t->w * map->c * (int64_t)sizeof(float);
    const int64_t start = image * t->h + gf_most(0, gf_least(from, t->h)), stop = gf_least(map->n * t->h, start + rows);
    const char *x = (const char *)t->x;
    return (ahead){x + start * pitch, x + stop * pitch, gf_ceil_div((stop - start) * pitch, 64 * blocks)};
}

/* Compute rows [first, last) of y; `table` begins with the row of x under their first tap. */
static void run_band(const plan *p, int64_t image, int64_t first, int64_t last, const float *const *table, float *y) {
    const window *w = &p->window;
    const gf_depthwise *t = w->task;
    const int64_t rows = last - first, top = first * t->sh - t->top, parts = gf_ceil_div(w->vectors, p->together);
    ahead a = look_ahead(t, image, top + (rows - 1) * t->sh + w->tall, rows * t->sh, rows * w->blocks * parts);
    block b = make_block(w, t->after.map.c, p->pitch);
    for (b.from = 0; b.from < w->vectors; b.from = b.to) {
        b.to = gf_least(w->vectors, b.from + p->together);
        for (int64_t r = 0; r < rows; r++) {
            const taps_on_map taps = find_taps(t, first + r);
            run_row(w, &b, 0, taps, table + (taps.row - top) * w->wide, y + r * t->after.map.w * p->pitch, &a);
        }
    }
}

static void run_unit(const void *argument, int64_t unit, void *scratch) {
    const plan *p = argument;
    const window *w = &p->window;
    const gf_depthwise *t = w->task;
    const gf_map *map = &t->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), image = unit / down, row = unit % down;
    const int64_t start = row * map->ph, end = gf_least(map->h, start + map->ph);
    float *y = (float *)((char *)scratch + p->rows_at);
    const float **table = (const float **)((char *)scratch + p->table_at);
    fill_table(w, image, start * t->sh - t->top, (end - start - 1) * t->sh + w->tall, table);
    for (int64_t r = start; r < end; r += p->band)
        run_band(p, image, r, gf_least(r + p->band, end), table + (r - start) * t->sh * w->wide,
                 y + (r - start) * map->w * p->pitch);
    finish_rows(&t->after, y, p->pitch, image, row, 0, scratch);
}

/* Bytes of x that the first and the second cache hold beside the rest. */
enum { FIRST_CACHE = 16384, SECOND_CACHE = 131072 };

int GF_LEVEL(gf_depthwise)(const gf_depthwise *t, int threads) {
    const gf_map *map = &t->after.map;
    plan p;
    window *w = &p.window;
    if (open_window(w, t)) return -1;
    const int64_t rows = gf_least(map->ph, map->h), line = 64 / (4 * GF_LANES);
    const int64_t held = SECOND_CACHE / (t->w * map->c * (int64_t)sizeof(float));
    p.pitch = w->vectors * GF_LANES;
    p.band = gf_most(1, gf_least(rows, (held - w->tall) / t->sh + 1));
    p.together = gf_most(1, FIRST_CACHE / 64 / (((p.band - 1) * t->sh + w->tall) * w->wide)) * line;
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.table_at = p.rows_at + gf_float_bytes(rows * map->w * p.pitch);
    const size_t scratch = p.table_at + (size_t)(((rows - 1) * t->sh + w->tall) * w->wide) * sizeof(float *);
    const int failed = gf_parallel(run_unit, &p, map->n * gf_ceil_div(map->h, map->ph), threads, scratch);
    free(w->weight);
    return failed;
}
