/* Run the library on numbers that are the same everywhere, and write what comes out: builds for two processors can be
 * compared. test_native_arm.py builds it with the library's sources.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tasks.h"

static uint32_t seed = 1;

/* Numbers between -2 and 2 with few bits. */
static float *draw(int64_t count) {
    float *values = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)((int32_t)(seed >> 20) - 2048) / 1024;
    }
    return values;
}

/* Write floats, or integers of one byte as such. */
static void put(const void *from, int64_t count, int bytes) {
    for (int64_t i = 0; i < count; i++) {
        const float value = bytes == 1 ? (float)((const uint8_t *)from)[i] : ((const float *)from)[i];
        fwrite(&value, sizeof value, 1, stdout);
    }
}

static void need(int code) {
    if (code) exit(1);
}

static int64_t size_of(const gf_map *m) { return m->n * m->c * m->h * m->w; }
static int64_t cells_of(const gf_map *m) { return m->n * m->c * gf_ceil_div(m->h, m->ph) * gf_ceil_div(m->w, m->pw); }

/* The pass behind a convolution, or alone: what it reads but for x, and where its results go. */
static gf_norm_act make_pass(gf_map map, int kind, int residual) {
    gf_norm_act t = {.map = map, .kind = kind, .count_bytes = 1, .lo = 0, .hi = 1.5f, .leak = 0.25f};
    if (residual) t.residual = draw(size_of(&map));
    t.y = malloc((size_t)size_of(&map) * sizeof(float));
    t.mean = malloc((size_t)cells_of(&map) * sizeof(float));
    t.slope = kind ? malloc((size_t)cells_of(&map) * sizeof(float)) : NULL;
    return t;
}

static void put_cells(const gf_norm_act *t) {
    put(t->mean, cells_of(&t->map), 4);
    if (t->slope) put(t->slope, cells_of(&t->map), t->kind == GF_CLAMP || t->kind == GF_LEAKY ? 1 : 4);
}

static void put_pass(const gf_norm_act *t) {
    put(t->y, size_of(&t->map), 4);
    put_cells(t);
}

static void run_maps(int64_t c, int64_t h, int64_t w, int64_t patch, int kind, int last) {
    const gf_map map = {2, c, h, w, patch, patch, last, GF_FLOAT32};
    gf_norm_act t = make_pass(map, kind, kind % 2);
    t.x = draw(size_of(&map)), t.scale = draw(c), t.shift = draw(c);
    need(gf_norm_act_map(&t, 2));
    put_pass(&t);
    const gf_unpool back = {.map = map, .cells = t.mean, .y = t.y};
    need(gf_unpool_map(&back, 2));
    put(back.y, size_of(&map), 4);
    if (kind != GF_CLAMP && kind != GF_LEAKY) return;
    const gf_slope slope = {map, draw(cells_of(&map)), t.slope, t.mean, t.leak, 1, 1};
    need(gf_slope_map(&slope, 2));
    put(slope.gx, cells_of(&map), 4);
}

static void run_convolutions(int64_t in, int64_t out, int64_t side, int64_t k, int64_t s, int64_t d, int64_t patch,
                             int kind) {
    const int64_t h = side, w = side + 3, pad = d * (k - 1) / 2;
    const int64_t over = d * (k - 1) + 1, down = (h + 2 * pad - over) / s + 1, across = (w + 2 * pad - over) / s + 1;
    const gf_map map = {2, out, down, across, patch, patch, 1, GF_FLOAT32};
    const float *scale = draw(out), *shift = draw(out), *x = draw(2 * h * w * in), *weight = draw(out * in * k * k);
    gf_dense t = {make_pass(map, kind, 1), x, weight, scale, shift, in, h, w, k, k, s, s, d, d, pad, pad};
    need(gf_dense_map(&t, 2));
    put_pass(&t.after);
    if (k == 3 && s == 1 && d == 1 && in >= GF_CHANNELS) {
        need(gf_winograd_map(&t, 2));
        put_pass(&t.after);
    }
    x = draw(2 * h * w * out), weight = draw(out * k * k);
    gf_depthwise each = {make_pass(map, kind, 0), x, weight, scale, shift, h, w, k, k, s, s, d, d, pad, pad};
    need(gf_depthwise_map(&each, 2));
    put_pass(&each.after);
}

static void run_expansion(int64_t in, int64_t out, int64_t side, int64_t k, int64_t s, int64_t patch, int kind) {
    const int64_t h = side, w = side + 3, pad = k / 2, down = (h - 1) / s + 1, across = (w - 1) / s + 1;
    const gf_map hidden = {2, out, h, w, patch, patch, 1, GF_FLOAT32}, map = {2, out, down, across, 3, 4, 1, GF_FLOAT32};
    const float *x = draw(2 * h * w * in), *weight = draw(out * in), *taps = draw(out * k * k), *shift = draw(out);
    gf_expand t = {.first = {make_pass(hidden, kind, 0), x, weight, NULL, shift, in, h, w, 1, 1, 1, 1, 1, 1, 0, 0},
                   .second = {make_pass(map, kind, 0), NULL, taps, NULL, NULL, h, w, k, k, s, s, 1, 1, pad, pad}};
    float *unused = t.first.after.y;
    t.first.after.y = NULL;
    need(gf_expand_map(&t, 2));
    put_cells(&t.first.after);
    put_pass(&t.second.after);
    free(unused);
}

/* Windows of 2x2 without overlap, patches of 2x2: every cell of y has the four cells of x below it in reach. */
static void run_pooling(int64_t c, int64_t side) {
    const int64_t cells = side / 2, reach = 4;
    const gf_map map = {2, c, side, side, 2, 2, 1, GF_FLOAT32};
    int32_t *rows = malloc((size_t)side * 4 * sizeof *rows), *columns = malloc((size_t)side * 4 * sizeof *columns);
    for (int32_t o = 0; o < side; o++) {
        const int32_t place = o % 2, row[4] = {2 * o, 2, 2 * place, 2 * place}, column[4] = {2 * o, 2, place, place};
        for (int i = 0; i < 4; i++) rows[4 * o + i] = row[i], columns[4 * o + i] = column[i];
    }
    uint8_t *winners = calloc((size_t)(2 * cells * cells * reach * c), 1);
    const float *x = draw(4 * size_of(&map));
    float *y = malloc((size_t)size_of(&map) * 4), *mean = malloc((size_t)cells_of(&map) * 4);
    const gf_max_pool t = {map, x, y, mean, winners, rows, columns, 2 * side, 2 * side, 2, 2, 1, 1, reach, 2, 1};
    need(gf_max_pool_map(&t, 2));
    put(t.y, size_of(&map), 4);
    put(t.mean, cells_of(&map), 4);
    put(winners, 2 * cells * cells * reach * c, 1);
    int64_t *target = malloc((size_t)(cells * cells * reach) * sizeof *target);
    for (int64_t cell = 0; cell < cells * cells; cell++)
        for (int64_t i = 0; i < reach; i++)
            target[reach * cell + i] = (cell / cells * 2 + i / 2) * 2 * cells + cell % cells * 2 + i % 2;
    const gf_max_route back = {2, c, cells * cells, 4 * cells * cells, reach, 1, draw(cells_of(&map)), winners, target,
                               calloc((size_t)(2 * c * 4 * cells * cells), 4)};
    need(gf_max_route_map(&back, 2));
    put(back.gx, 2 * c * 4 * cells * cells, 4);
}

/* Cells that are read by themselves and by their neighbours, with three coefficients along each axis. */
static void run_pairs(int64_t c, int64_t cells) {
    int32_t *start = calloc((size_t)cells + 1, sizeof *start), *pairs = malloc((size_t)cells * 6 * sizeof *pairs), count = 0;
    for (int32_t j = 0; j < cells; j++) {
        for (int32_t i = j - 1; i <= j + 1; i++)
            if (i >= 0 && i < cells) pairs[2 * count] = i, pairs[2 * count + 1] = i - j + 1, count++;
        start[j + 1] = count;
    }
    const gf_pair_axis axis = {start, pairs, cells, cells, 3};
    const int64_t size = 2 * cells * cells * c;
    float *gx = malloc((size_t)size * 4), *gw = malloc((size_t)(7 * c) * 4);
    const gf_pairs t = {axis, axis, 2, c, 7, draw(9 * 7), draw(size), draw(size), draw(7 * c), gx, gw};
    need(gf_pairs_map(&t, 2));
    put(t.gx, size, 4);
    put(t.gw, 7 * c, 4);
}

/* Cells that are read by three of them, with zeros outside: two cells to a tile, and what is left over. The last tile's
 * numbers are mixed, as those of partial patches are; where it has two cells, a tile of one product adds to the second. */
static void run_tiles(int64_t co, int64_t ci, int32_t cells, int last) {
    const int32_t count = (cells + 1) / 2, more = cells % 2 == 0;
    gf_axis_tile *tiles = calloc((size_t)(count + more), sizeof *tiles);
    for (int32_t i = 0, seen = 0; i < count; i++) {
        gf_axis_tile *t = tiles + i;
        t->out = 2 * i, t->outs = i + 1 < count || cells % 2 == 0 ? 2 : 1, t->positions = t->outs + 2;
        const int32_t in = 2 * i - 1, last = cells > 4 ? cells - 4 : 0;
        t->in = in < 0 ? 0 : in < last ? in : last, t->seen = seen;
        t->plain = in == t->in && in + 4 <= cells && i + 1 < count;
        for (int32_t k = 0; k < 4; k++)
            if (in + k >= 0 && in + k < cells) t->mix[k][in + k - t->in] = i + 1 < count ? 1 : 0.75f;
        seen = t->in + 4 < cells ? t->in + 4 : cells;
    }
    if (more) {
        gf_axis_tile *t = tiles + count;
        t->out = cells - 1, t->outs = t->positions = 1, t->in = tiles[count - 1].in, t->seen = cells;
        t->mix[0][cells - 1 - t->in] = 0.25f;
    }
    const gf_tile_axis axis = {tiles, count + more, cells, cells, {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}}};
    const int64_t map = 2 * cells * cells, w = co * 9 * ci;
    gf_backward t = {axis, axis, 2, co, ci, draw(map * co), draw(map * ci), draw(w), last, NULL, NULL};
    t.gx = malloc((size_t)(map * ci) * 4), t.gw = malloc((size_t)w * 4);
    need(gf_backward_map(&t, 2));
    put(t.gx, map * ci, 4);
    put(t.gw, w, 4);
}

/* A kernel whose taps share one gradient, in either order of taps and channels. */
static void run_single(int64_t cells, int64_t co, int64_t ci, int64_t taps, int last) {
    gf_single t = {cells, co, ci, taps, draw(cells * co), draw(cells * ci), draw(co * ci * taps), 1, taps, NULL, NULL};
    if (last) t.tap = ci, t.channel = 1;
    t.gx = malloc((size_t)(cells * ci) * 4), t.gw = malloc((size_t)(co * ci) * 4);
    need(gf_single_map(&t, 2));
    put(t.gx, cells * ci, 4);
    put(t.gw, co * ci, 4);
}

/* The way back through a batch norm; variances are squares of what is drawn. */
static void run_norms(int64_t rows, int64_t c, int64_t k, int scaled) {
    float *var = draw(c), *vectors = malloc((size_t)(4 * c) * 4), *out = scaled ? malloc((size_t)(rows * c) * 4) : NULL;
    for (int64_t i = 0; i < c; i++) var[i] = var[i] * var[i] + 1;
    float *scale = vectors, *total = vectors + c, *g_gamma = vectors + 2 * c, *g_bias = vectors + 3 * c, *gamma = draw(c);
    for (int64_t i = 0; i < c; i++) gamma[i] += 3;
    float *folded = scaled ? NULL : malloc((size_t)(c * k) * 4);
    const gf_norm_back back = {rows, c, k, 1e-3, draw(rows * c), gamma, var, scale, total, out, draw(c * k), folded};
    need(gf_norm_back_map(&back, 2));
    if (out) put(out, rows * c, 4);
    if (folded) put(folded, c * k, 4);
    /* The gradient is as the weight is, or has its last two axes, 3 and k / 3, turned. */
    float *from = draw(c * k), *gw = scaled ? from : malloc((size_t)(c * k) * 4);
    const gf_norm_end end = {c, k / 3, 3, k, scaled ? 3 : 1, scaled ? 1 : k / 3, 1e-3, scaled, draw(c * k), draw(c), draw(c),
                             var, scale, total, from, g_gamma, g_bias, gw};
    need(gf_norm_end_map(&end, 2));
    put(vectors, 4 * c, 4);
    put(gw, c * k, 4);
}

int main(void) {
    for (int kind = GF_IDENTITY; kind <= GF_SILU; kind++)
        for (int last = 0; last < 2; last++) {
            run_maps(21, 13, 11, 4, kind, last);
            run_maps(3, 9, 17, 3, kind, last);
        }
    for (int kind = GF_IDENTITY; kind <= GF_SILU; kind++) {
        run_convolutions(19, 24, 12, 1, 1, 1, 4, kind);
        run_convolutions(16, 40, 11, 3, 1, 1, 4, kind);
        run_convolutions(3, 17, 15, 3, 2, 1, 2, kind);
        run_convolutions(5, 33, 14, 3, 1, 3, 3, kind);
        run_convolutions(2, 16, 13, 5, 2, 1, 7, kind);
    }
    for (int kind = GF_IDENTITY; kind <= GF_LEAKY; kind++) {
        run_expansion(6, 40, 13, 3, 1, 4, kind);
        run_expansion(3, 17, 90, 5, 2, 2, kind);
    }
    run_pooling(24, 6);
    run_pooling(17, 4);
    run_pairs(40, 5);
    run_pairs(150, 3);
    run_tiles(32, 48, 4, 1);
    run_tiles(16, 80, 7, 0);
    run_single(50, 24, 90, 9, 1);
    run_single(1300, 19, 40, 9, 0);
    run_norms(77, 40, 27, 0);
    run_norms(33, 150, 63, 1);
    return 0;
}
