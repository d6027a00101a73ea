/* The gradients of a 3x3 convolution by Winograd's F(2x2, 3x3), as winograd.c has it forwards.
 *
 * With y = At [(G w Gt) * (Bt x B)] A on a tile, * position by position, gx = B [(G w Gt) * (A g At)] Bt, and
 * gw = Gt [sum over tiles of (A g At) * (Bt x B)] G: 16 products instead of 36 for each of the two, and A g At serves
 * both. Lifting the kernel is part of G, and partial patches are of B, tile by tile.
 *
 * A tile of one cell along an axis has no use for the last position along it, or for all but the first, and where the kernel's
 * third tap is 0, as behind a stride, no tile has products at the last one. So in a round,
 * tiles stand in such an order that those which need a position are a range.
 *
 * Tiles run in rounds of as many as stay in the caches: they are transformed, then multiplied, gx by panels of its
 * channels and gw by blocks of g's.
 */
#include "backward.h"
#include "outer.h"

enum { POSITIONS = 16, GROUP = 8 };

/* Tiles in a round: as many as keep a position of all channels in the second cache, for at its end threads wait. */
enum { LEAST_TILES = 128, MOST_TILES = 512, TILE_FLOATS = 65536 };

/* In which order tiles stand, by the axes along which they need all positions. */
enum { DOWN, BOTH, ACROSS, NEITHER, KINDS };

typedef struct {
    const gf_backward *task;
    int64_t image, total;    /* tiles in an image, and in all */
    int64_t first, count;    /* those of the round */
    int32_t rows, columns;   /* positions along each axis that all tiles need */
    int64_t starts[KINDS + 1];
    int32_t slots[MOST_TILES]; /* where they stand */
    int64_t vectors, panels; /* of gx's channels */
    int64_t blocks;          /* of g's */
    int64_t parts;           /* panels that gx takes: none where it is not asked for */
    int64_t g_step, x_step, weight_step, products_step; /* floats to the next position */
    float *g;                /* transformed: [position, block, tile, channel] */
    float *x;                /* transformed: [position, panel, tile, vector, lane] */
    float *weight;           /* transformed: [panel, position, channel of g, vector, lane]; NULL in a lone round */
    float *sums;             /* of gw: [block, position, channel of g, channel]; NULL in a lone round */
    size_t weight_at;        /* in the scratch of a thread */
} plan;

/* Where a tile is. */
typedef struct {
    const gf_axis_tile *row, *column;
    int64_t image;
} place;

typedef gf_vec square[4][4];

/* Floats from one position to the next: the 16 of them must not fall on the same lines of the first cache. */
GF_INLINE int64_t spread(int64_t floats) { return (floats + 1023) / 1024 * 1024 + 64; }

GF_INLINE place find_place(const plan *p, int64_t tile) {
    const gf_backward *t = p->task;
    const int64_t within = tile % p->image, across = t->columns.count;
    return (place){t->rows.tiles + within / across, t->columns.tiles + within % across, tile / p->image};
}

static int find_kind(const plan *p, int64_t tile) {
    const place at = find_place(p, tile);
    const int down = at.row->positions == 4, across = at.column->positions == 4;
    return down ? (across ? BOTH : DOWN) : across ? ACROSS : NEITHER;
}

/* Put the tiles of the round in order. */
static void order_tiles(plan *p) {
    int64_t next[KINDS] = {0};
    for (int64_t i = 0; i < p->count; i++) next[find_kind(p, p->first + i)]++;
    p->starts[0] = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        p->starts[kind + 1] = p->starts[kind] + next[kind];
        next[kind] = p->starts[kind];
    }
    for (int64_t i = 0; i < p->count; i++) p->slots[i] = (int32_t)next[find_kind(p, p->first + i)]++;
}

/* The positions along an axis that all of its tiles need. */
static int32_t find_shared(const gf_tile_axis *axis) {
    int32_t shared = 4;
    for (int64_t i = 0; i < axis->count; i++) shared = axis->tiles[i].positions < shared ? axis->tiles[i].positions : shared;
    return shared;
}

/* The slots of the tiles that need a position. */
typedef struct {
    int64_t start, count;
} range;

GF_INLINE range find_range(const plan *p, int64_t position) {
    const int few_rows = position / 4 >= p->rows, few_columns = position % 4 >= p->columns;
    const int64_t start = p->starts[few_columns ? BOTH : DOWN];
    return (range){start, p->starts[few_rows ? ACROSS : few_columns ? NEITHER : KINDS] - start};
}

/* Swap the axes of a square. */
GF_INLINE void flip(square from, square to) {
#pragma GCC unroll 4
    for (int a = 0; a < 4; a++)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) to[b][a] = from[a][b];
}

/* Multiply with `mix`, or with its transpose, along the first axis. Most of its numbers are zeros. */
GF_INLINE void mix_axis(const float mix[4][4], square from, square to, const int transposed) {
    for (int a = 0; a < 4; a++) {
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) to[a][b] = (gf_vec){0};
        for (int k = 0; k < 4; k++) {
            const float factor = transposed ? mix[k][a] : mix[a][k];
            if (factor != 0)
#pragma GCC unroll 4
                for (int b = 0; b < 4; b++) to[a][b] += factor * from[k][b];
        }
    }
}

/* Multiply with both axes' `mix`, or with their transposes. */
GF_INLINE void mix_both(const place *at, square d, const int transposed) {
    square half, flipped;
    mix_axis(at->row->mix, d, half, transposed);
    flip(half, flipped);
    mix_axis(at->column->mix, flipped, half, transposed);
    flip(half, d);
}

/* A g of a column of two. */
GF_INLINE void spread_two(gf_vec a, gf_vec b, gf_vec to[4]) { to[0] = a, to[1] = a + b, to[2] = a - b, to[3] = -b; }

/* Bt d of a column of four. */
GF_INLINE void transform_four(const gf_vec d[4], gf_vec to[4]) {
    to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
}

/* B m of a column of four. */
GF_INLINE void return_four(const gf_vec m[4], gf_vec to[4]) {
    to[0] = m[0], to[1] = m[1] - m[2] + m[3], to[2] = m[1] + m[2] - m[0], to[3] = -m[3];
}

/* Bt d B of a square, or B m Bt. */
GF_INLINE void transform_square(square d, const int back) {
    square half, flipped;
    for (int axis = 0; axis < 2; axis++) {
        flip(d, flipped);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) (back ? return_four : transform_four)(flipped[v], half[v]);
        memcpy(d, half, sizeof half);
    }
}

/* Rows and columns of positions: of a tile, those with products. */
typedef struct {
    int rows, columns;
} extent;

static const extent ALL = {4, 4};

GF_INLINE extent find_extent(const place *at) { return (extent){at->row->positions, at->column->positions}; }

GF_INLINE void store_positions(square d, float *to, int64_t step, const extent some) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            if (u < some.rows && v < some.columns) gf_store(to + (4 * u + v) * step, d[u][v]);
}

/* Load positions, and zeros for those without products. */
GF_INLINE void load_positions(const float *from, int64_t step, square d, const extent some) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; u++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            d[u][v] = u < some.rows && v < some.columns ? gf_load(from + (4 * u + v) * step) : (gf_vec){0};
}

/* Transform the gradients of a tile's cells. */
static void transform_g(const plan *p, const place *at, int64_t slot) {
    const gf_backward *t = p->task;
    const int64_t across = t->columns.out * t->co;
    const float *from = t->g + ((at->image * t->rows.out + at->row->out) * t->columns.out + at->column->out) * t->co;
    const int below = at->row->outs > 1, right = at->column->outs > 1;
    const extent some = find_extent(at);
    for (int64_t c = 0; c < t->co; c += GF_LANES) {
        const gf_vec none = {0}, first = gf_load(from + c), second = right ? gf_load(from + t->co + c) : none;
        const gf_vec third = below ? gf_load(from + across + c) : none;
        const gf_vec fourth = below && right ? gf_load(from + across + t->co + c) : none;
        gf_vec left[4], last[4];
        square d;
        spread_two(first, third, left);
        spread_two(second, fourth, last);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) spread_two(left[u], last[u], d[u]);
        store_positions(d, p->g + (c / BLOCK * p->count + slot) * BLOCK + c % BLOCK, p->g_step, some);
    }
}

/* Transform the input's cells under a tile. */
static void transform_x(const plan *p, const place *at, int64_t slot) {
    const gf_backward *t = p->task;
    const int64_t across = t->columns.in * t->ci, down = t->rows.in - at->row->in, right = t->columns.in - at->column->in;
    const float *from = t->x + ((at->image * t->rows.in + at->row->in) * t->columns.in + at->column->in) * t->ci;
    const int plain = at->row->plain && at->column->plain;
    const extent some = find_extent(at);
    for (int64_t panel = 0; panel < p->panels; panel++) {
        const int64_t start = panel_start(panel, p->vectors), end = panel_start(panel + 1, p->vectors);
        float *to = p->x + (start * p->count + slot * (end - start)) * GF_LANES;
        for (int64_t j = start; j < end; j++, to += GF_LANES) {
            const float *cells = from + j * GF_LANES;
            square d;
            if (plain) {
#pragma GCC unroll 4
                for (int u = 0; u < 4; u++)
#pragma GCC unroll 4
                    for (int v = 0; v < 4; v++) d[u][v] = gf_load(cells + u * across + v * t->ci);
            } else {
                for (int u = 0; u < 4; u++)
                    for (int v = 0; v < 4; v++)
                        d[u][v] = u < down && v < right ? gf_load(cells + u * across + v * t->ci) : (gf_vec){0};
                mix_both(at, d, 0);
            }
            transform_square(d, 0);
            store_positions(d, to, p->x_step, some);
        }
    }
}

/* Transform some tiles of the round. */
static void run_transforms(const void *argument, int64_t unit, void *scratch) {
    (void)scratch;
    const plan *p = argument;
    for (int64_t tile = unit * GROUP; tile < gf_least(p->count, (unit + 1) * GROUP); tile++) {
        const place at = find_place(p, p->first + tile);
        transform_g(p, &at, p->slots[tile]);
        if (p->task->gw) transform_x(p, &at, p->slots[tile]);
    }
}

/* Load the nine taps of a kernel for a vector of channels, of which each has its taps side by side. */
GF_INLINE void load_taps(const float *from, gf_vec taps[9]) {
    float lanes[9][GF_LANES];
#pragma GCC unroll 16
    for (int l = 0; l < GF_LANES; l++)
#pragma GCC unroll 9
        for (int k = 0; k < 9; k++) lanes[k][l] = from[l * 9 + k];
#pragma GCC unroll 9
    for (int k = 0; k < 9; k++) taps[k] = gf_load(lanes[k]);
}

/* Store nine taps so. */
GF_INLINE void store_taps(float *to, const gf_vec taps[9]) {
    float lanes[9][GF_LANES];
#pragma GCC unroll 9
    for (int k = 0; k < 9; k++) gf_store(lanes[k], taps[k]);
#pragma GCC unroll 16
    for (int l = 0; l < GF_LANES; l++)
#pragma GCC unroll 9
        for (int k = 0; k < 9; k++) to[l * 9 + k] = lanes[k][l];
}

/* Lift and transform the kernels of a panel of gx's channels. */
static void pack_panel(const plan *p, int64_t start, int64_t width, float *to) {
    const gf_backward *t = p->task;
    const float(*rows)[3] = t->rows.taps, (*columns)[3] = t->columns.taps;
    for (int64_t o = 0; o < t->co; o++)
        for (int64_t j = 0; j < width; j++, to += GF_LANES) {
            const int64_t first = (start + j) * GF_LANES;
            const float *from = t->w + o * 9 * t->ci + first * (t->last ? 1 : 9);
            gf_vec taps[9], half[4][3];
            if (t->last) {
#pragma GCC unroll 9
                for (int k = 0; k < 9; k++) {
                    fetch(from + (AHEAD * 9 + k) * t->ci, GF_LANES);
                    taps[k] = gf_load(from + k * t->ci);
                }
            } else {
                fetch(from + AHEAD * 9 * t->ci, 9 * GF_LANES);
                load_taps(from, taps);
            }
#pragma GCC unroll 3
            for (int v = 0; v < 3; v++) {
                const gf_vec a = taps[v], b = taps[3 + v], c = taps[6 + v];
#pragma GCC unroll 4
                for (int u = 0; u < 4; u++) half[u][v] = rows[u][0] * a + rows[u][1] * b + rows[u][2] * c;
            }
            square d;
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++)
                    d[u][v] = columns[v][0] * half[u][0] + columns[v][1] * half[u][1] + columns[v][2] * half[u][2];
            store_positions(d, to, p->weight_step, ALL);
        }
}

/* Add what one tile has for `width` vectors of gx's channels, from `start` on. */
static void return_tile(const plan *p, const place *at, const float *products, int64_t start, int64_t width) {
    const gf_backward *t = p->task;
    const int64_t across = t->columns.in * t->ci, down = t->rows.in - at->row->in, right = t->columns.in - at->column->in;
    float *to = t->gx + ((at->image * t->rows.in + at->row->in) * t->columns.in + at->column->in) * t->ci;
    const int64_t seen_rows = at->row->seen - at->row->in, seen_columns = at->column->seen - at->column->in;
    const int plain = at->row->plain && at->column->plain;
    const extent some = find_extent(at);
    for (int64_t j = 0; j < width; j++) {
        square d;
        load_positions(products + j * GF_LANES, p->products_step, d, some);
        transform_square(d, 1);
        if (!plain) mix_both(at, d, 1);
        float *cells = to + (start + j) * GF_LANES;
        for (int64_t u = 0; u < gf_least(4, down); u++)
            for (int64_t v = 0; v < gf_least(4, right); v++) {
                float *cell = cells + u * across + v * t->ci;
                gf_store(cell, u < seen_rows || v < seen_columns ? gf_load(cell) + d[u][v] : d[u][v]);
            }
    }
}

/* gx on one panel of its channels. */
static void run_panel(const plan *p, int64_t panel, void *scratch) {
    static const float zeros[3 * GF_LANES];
    const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
    float *products = scratch, *weight = (float *)((char *)scratch + p->weight_at);
    if (p->weight) weight = p->weight + panel * POSITIONS * p->weight_step;
    if (p->first == 0) pack_panel(p, start, width, weight);
    const under at = {.rows = p->blocks, .row = p->count * BLOCK, .runs = 1, .run = BLOCK, .pixel = BLOCK};
    for (int64_t k = 0; k < POSITIONS; k++) {
        const range tiles = find_range(p, k);
        const float *g = p->g + k * p->g_step + tiles.start * BLOCK;
        float *to = products + k * p->products_step + tiles.start * width * GF_LANES;
        RUN[width - 1](g, &at, weight + k * p->weight_step, zeros, to, width * GF_LANES, tiles.count, 0);
    }
    for (int64_t tile = 0; tile < p->count; tile++) {
        const place where = find_place(p, p->first + tile);
        return_tile(p, &where, products + p->slots[tile] * width * GF_LANES, start, width);
    }
}

/* Turn the sums of a block into gw. */
static void finish_block(const plan *p, int64_t block, const float *sums) {
    const gf_backward *t = p->task;
    const float(*rows)[3] = t->rows.taps, (*columns)[3] = t->columns.taps;
    for (int64_t o = 0; o < BLOCK; o++)
        for (int64_t c = 0; c < t->ci; c += GF_LANES) {
            float *to = t->gw + (block * BLOCK + o) * 9 * t->ci + c * (t->last ? 1 : 9);
            square d;
            gf_vec half[3][4], taps[9];
            load_positions(sums + o * t->ci + c, BLOCK * t->ci, d, ALL);
#pragma GCC unroll 3
            for (int u = 0; u < 3; u++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++)
                    half[u][v] = rows[0][u] * d[0][v] + rows[1][u] * d[1][v] + rows[2][u] * d[2][v] + rows[3][u] * d[3][v];
#pragma GCC unroll 3
            for (int u = 0; u < 3; u++)
#pragma GCC unroll 3
                for (int v = 0; v < 3; v++)
                    taps[3 * u + v] = columns[0][v] * half[u][0] + columns[1][v] * half[u][1] +
                                      columns[2][v] * half[u][2] + columns[3][v] * half[u][3];
            if (!t->last)
                store_taps(to, taps);
            else
#pragma GCC unroll 9
                for (int k = 0; k < 9; k++) gf_store(to + k * t->ci, taps[k]);
        }
}

/* gw on one block of g's channels. */
static void run_block(const plan *p, int64_t block, void *scratch) {
    const int64_t ci = p->task->ci;
    float *sums = p->sums ? p->sums + block * POSITIONS * BLOCK * ci : scratch;
    for (int64_t k = 0; k < POSITIONS; k++) {
        const range tiles = find_range(p, k);
        for (int64_t panel = 0; panel < p->panels; panel++) {
            const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
            const float *x = p->x + k * p->x_step + (start * p->count + tiles.start * width) * GF_LANES;
            const float *g = p->g + k * p->g_step + (block * p->count + tiles.start) * BLOCK;
            float *to = sums + k * BLOCK * ci + start * GF_LANES;
            add_outer(g, x, tiles.count, p->first > 0, to, ci, BLOCK, width);
        }
    }
    if (p->first + p->count == p->total) finish_block(p, block, sums);
}

static void run_products(const void *argument, int64_t unit, void *scratch) {
    const plan *p = argument;
    if (unit < p->parts)
        run_panel(p, unit, scratch);
    else
        run_block(p, unit - p->parts, scratch);
}

/* Take memory for what all threads share, and run the rounds. */
int GF_LEVEL(gf_backward)(const gf_backward *t, int threads) {
    plan p = {.task = t, .image = t->rows.count * t->columns.count, .vectors = t->ci / GF_LANES, .blocks = t->co / BLOCK};
    p.total = t->n * p.image;
    p.rows = find_shared(&t->rows);
    p.columns = find_shared(&t->columns);
    p.panels = count_panels(p.vectors);
    p.parts = t->gx ? p.panels : 0;
    const int64_t fitting = gf_most(LEAST_TILES, gf_least(MOST_TILES, TILE_FLOATS / gf_most(t->co, t->ci)));
    const int64_t most = gf_ceil_div(p.total, gf_most(1, gf_ceil_div(p.total, fitting))); /* in rounds of one size */
    const int64_t widest = gf_least(p.vectors, 3) * GF_LANES;
    const int alone = most == p.total;
    p.g_step = spread(most * t->co);
    p.x_step = spread(most * t->ci);
    p.weight_step = spread(t->co * widest);
    p.products_step = spread(most * widest);
    const int64_t x = t->gw ? POSITIONS * p.x_step : 0, weight = POSITIONS * p.weight_step;
    const int64_t weights = alone || !t->gx ? 0 : p.panels * weight;
    const int64_t sums = POSITIONS * BLOCK * t->ci, all_sums = alone || !t->gw ? 0 : p.blocks * sums;
    void *owner;
    p.g = gf_take_memory(gf_float_bytes(POSITIONS * p.g_step + x + weights + all_sums), &owner);
    if (!p.g) return -1;
    p.x = p.g + POSITIONS * p.g_step;
    p.weight = weights ? p.x + x : NULL;
    p.sums = all_sums ? p.x + x + weights : NULL;
    p.weight_at = gf_float_bytes(POSITIONS * p.products_step);
    const size_t for_panel = t->gx ? p.weight_at + (alone ? gf_float_bytes(weight) : 0) : 0;
    const size_t for_block = alone && t->gw ? gf_float_bytes(sums) : 0;
    const size_t scratch = for_panel > for_block ? for_panel : for_block;
    int failed = 0;
    for (; p.first < p.total && !failed; p.first += p.count) {
        p.count = gf_least(most, p.total - p.first);
        order_tiles(&p);
        failed = gf_parallel(run_transforms, &p, gf_ceil_div(p.count, GROUP), threads, 0);
        if (!failed) failed = gf_parallel(run_products, &p, p.parts + (t->gw ? p.blocks : 0), threads, scratch);
    }
    gf_give_memory(p.g, owner);
    return failed;
}
