/* Convolution with kernels of 3x3 pixels by Winograd's F(2x2, 3x3): 16 products for 4 pixels of y instead of 36.
 *
 * A tile is 2x2 pixels of y, and a position one of the 4x4 numbers that a tile's pixels of x, and each kernel, are
 * turned into. Per position, the tiles times the kernels are a product of matrices; of its 16 results a tile's pixels
 * are sums. The transforms only add and halve: errors stay of the size of rounding.
 */
#include "conv.h"
#include "finish.h"
#include "tile.h"

enum { POSITIONS = 16 };

/* A task and what all of its work shares: some patch rows of one image, or all of several images, at a time. */
typedef struct {
    const gf_dense *task;
    float *weight; /* transformed: [position, panel, input, vector, lane] */
    float *shift;  /* [vector, lane], then as many zeros */
    int64_t vectors, panels;
    int64_t part;          /* panels whose products are turned into pixels together */
    int64_t finishes;      /* whether a part is finished before the next one begins */
    int64_t across;        /* tiles in a row */
    int64_t images, units; /* patch rows in a piece of work, and in how many images */
    int64_t chunk;         /* tiles at once */
    int64_t weight_step, tiles_step, products_step; /* floats to the next position */
    size_t rows_at, tiles_at, products_at, edge_at; /* in the scratch of a thread */
} plan;

/* A piece of work: rows [top, bottom) of some images. */
typedef struct {
    int64_t image, images, unit, units, top, bottom;
    int64_t tall; /* rows of tiles in an image */
} piece;

/* Floats from one position to the next: the 16 of them must not fall on the same lines of the first cache. */
GF_INLINE int64_t spread(int64_t floats) { return (floats + 1023) / 1024 * 1024 + 64; }

/* G g of a column of three, or of three columns. */
GF_INLINE void transform_taps(const gf_vec g[3], gf_vec to[4]) {
    const gf_vec even = (g[0] + g[2]) * 0.5f, odd = g[1] * 0.5f;
    to[0] = g[0], to[1] = even + odd, to[2] = even - odd, to[3] = g[2];
}

enum { INPUTS = 16, TAPS = 9 };

/* Transform some inputs' kernels of one vector of outputs: `taps` is [input, tap, lane]. */
static void transform_kernels(const float *taps, int64_t inputs, float *to, int64_t pitch, int64_t step) {
    for (int64_t i = 0; i < inputs; i++, taps += TAPS * GF_LANES, to += pitch) {
        gf_vec half[3][4];
#pragma GCC unroll 3
        for (int v = 0; v < 3; v++) {
            const gf_vec column[3] = {gf_load(taps + v * GF_LANES), gf_load(taps + (3 + v) * GF_LANES),
                                      gf_load(taps + (6 + v) * GF_LANES)};
            transform_taps(column, half[v]);
        }
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
            const gf_vec row[3] = {half[0][u], half[1][u], half[2][u]};
            gf_vec all[4];
            transform_taps(row, all);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) gf_store(to + (4 * u + v) * step, all[v]);
        }
    }
}

/* Transform the weights of one panel. */
static void pack_panel(const void *argument, int64_t panel, void *scratch) {
    const plan *p = argument;
    const gf_dense *t = p->task;
    const int64_t start = panel_start(panel, p->vectors), end = panel_start(panel + 1, p->vectors);
    float *taps = scratch;
    for (int64_t i = 0; i < t->inputs; i += INPUTS)
        for (int64_t j = start; j < end; j++) {
            const int64_t c = gf_vec_start(j, t->after.map.c), inputs = gf_least(INPUTS, t->inputs - i);
            for (int64_t l = 0; l < GF_LANES; l++) {
                const float scale = t->scale ? t->scale[c + l] : 1;
                const float *from = t->weight + ((c + l) * t->inputs + i) * TAPS;
                for (int64_t k = 0; k < inputs * TAPS; k++) taps[k * GF_LANES + l] = from[k] * scale;
            }
            const int64_t pitch = (end - start) * GF_LANES;
            float *to = p->weight + start * GF_LANES * t->inputs + i * pitch + (j - start) * GF_LANES;
            transform_kernels(taps, inputs, to, pitch, p->weight_step);
        }
    for (int64_t j = start; j < end; j++)
        for (int64_t l = 0, c = gf_vec_start(j, t->after.map.c); l < GF_LANES; l++) {
            p->shift[j * GF_LANES + l] = t->shift ? t->shift[c + l] : 0;
            p->shift[(p->vectors + j) * GF_LANES + l] = 0;
        }
}

/* Bt d of a column of four, or of four columns. */
GF_INLINE void transform_four(const gf_vec d[4], gf_vec to[4]) {
    to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
}

/* Transform the 4x4 pixels of x under a tile; `row` floats to the next row. */
static void transform_pixels(const float *x, int64_t row, int64_t inputs, float *to, int64_t step) {
    for (int64_t i = 0; i < gf_ceil_div(inputs, GF_LANES); i++) {
        const int64_t c = gf_vec_start(i, inputs);
        gf_vec half[4][4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const float *at = x + v * inputs + c;
            const gf_vec column[4] = {gf_load(at), gf_load(at + row), gf_load(at + 2 * row), gf_load(at + 3 * row)};
            transform_four(column, half[v]);
        }
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
            const gf_vec across[4] = {half[0][u], half[1][u], half[2][u], half[3][u]};
            gf_vec all[4];
            transform_four(across, all);
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) gf_store(to + (4 * u + v) * step + c, all[v]);
        }
    }
}

/* Copy the pixels under a tile at the edge of x, with the zeros outside. */
static void copy_edge(const gf_dense *t, int64_t image, int64_t top, int64_t left, float *to) {
    const size_t bytes = (size_t)t->inputs * sizeof(float);
    for (int64_t y = top; y < top + 4; y++)
        for (int64_t x = left; x < left + 4; x++, to += t->inputs) {
            if (y >= 0 && y < t->h && x >= 0 && x < t->w)
                memcpy(to, t->x + ((image * t->h + y) * t->w + x) * t->inputs, bytes);
            else
                memset(to, 0, bytes);
        }
}

/* Transform what is under `count` tiles of a piece, from tile `first` on, into [position, tile, input]. */
static void transform_tiles(const plan *p, const piece *w, int64_t first, int64_t count, float *to, float *edge) {
    const gf_dense *t = p->task;
    for (int64_t i = first; i < first + count; i++, to += t->inputs) {
        const int64_t row = i / p->across, image = w->image + row / w->tall;
        const int64_t top = w->top + row % w->tall * 2 - t->top, left = i % p->across * 2 - t->left;
        if (top >= 0 && left >= 0 && top + 4 <= t->h && left + 4 <= t->w) {
            const float *from = t->x + ((image * t->h + top) * t->w + left) * t->inputs;
            transform_pixels(from, t->w * t->inputs, t->inputs, to, p->tiles_step);
        } else {
            copy_edge(t, image, top, left, edge);
            transform_pixels(edge, 4 * t->inputs, t->inputs, to, p->tiles_step);
        }
    }
}

/* Multiply `count` tiles with panels [from, to), into [position, tile, vector, lane]. */
static void multiply(const plan *p, const float *tiles, int64_t count, int64_t from, int64_t to, float *products) {
    const int64_t inputs = p->task->inputs, first = panel_start(from, p->vectors);
    const int64_t pitch = (panel_start(to, p->vectors) - first) * GF_LANES;
    const under at = under_itself(inputs);
    for (int64_t k = 0; k < POSITIONS; k++) {
        /* All pixels of a tile have position 5 once as a term. */
        const float *shift = k == 5 ? p->shift : p->shift + p->vectors * GF_LANES;
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
            const float *weight = p->weight + k * p->weight_step + start * GF_LANES * inputs;
            float *y = products + k * p->products_step + (start - first) * GF_LANES;
            RUN[width - 1](tiles + k * p->tiles_step, &at, weight, shift + start * GF_LANES, y, pitch, count, 0);
        }
    }
}

/* At m of a column of four, or of four columns. */
GF_INLINE void sum_four(const gf_vec m[4], gf_vec to[2]) {
    to[0] = m[0] + m[1] + m[2], to[1] = m[1] - m[2] - m[3];
}

/* Turn the products of one tile, `lanes` at each position, into its four pixels. */
static void sum_products(const float *from, int64_t step, int64_t lanes, float *const to[4]) {
    for (int64_t c = 0; c < lanes; c += GF_LANES) {
        gf_vec half[4][2];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const float *at = from + v * step + c;
            const gf_vec column[4] = {gf_load(at), gf_load(at + 4 * step), gf_load(at + 8 * step), gf_load(at + 12 * step)};
            sum_four(column, half[v]);
        }
#pragma GCC unroll 2
        for (int u = 0; u < 2; u++) {
            const gf_vec across[4] = {half[0][u], half[1][u], half[2][u], half[3][u]};
            gf_vec both[2];
            sum_four(across, both);
            gf_store(to[2 * u] + c, both[0]);
            gf_store(to[2 * u + 1] + c, both[1]);
        }
    }
}

/* Turn the products of `count` tiles into pixels of the piece's rows; `outside` takes those that y does not have. */
static void sum_tiles(const plan *p, const piece *w, int64_t first, int64_t count, const float *products, int64_t lanes,
                      float *rows, int64_t pitch, float *outside) {
    const int64_t width = p->task->after.map.w, height = w->bottom - w->top;
    for (int64_t i = first; i < first + count; i++, products += lanes) {
        const int64_t row = i / p->across, y = row % w->tall * 2, x = i % p->across * 2;
        float *at = rows + ((row / w->tall * height + y) * width + x) * pitch;
        const int below = y + 1 < height, right = x + 1 < width;
        float *const to[4] = {at, right ? at + pitch : outside, below ? at + width * pitch : outside,
                              below && right ? at + (width + 1) * pitch : outside};
        sum_products(products, p->products_step, lanes, to);
    }
}

static void finish(const plan *p, const piece *w, float *rows, int64_t pitch, int64_t vector, void *scratch) {
    const gf_map *map = &p->task->after.map;
    for (int64_t i = 0; i < w->images; i++)
        for (int64_t unit = 0; unit < w->units; unit++) {
            float *from = rows + (i * (w->bottom - w->top) + unit * map->ph) * map->w * pitch;
            finish_rows(&p->task->after, from, pitch, w->image + i, w->unit + unit, vector, scratch);
        }
}

static piece find_piece(const plan *p, int64_t work) {
    const gf_map *map = &p->task->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), pieces = gf_ceil_div(down, p->units);
    piece w = {.image = work / pieces * p->images, .unit = work % pieces * p->units};
    w.images = gf_least(p->images, map->n - w.image);
    w.units = gf_least(p->units, down - w.unit);
    w.top = w.unit * map->ph;
    w.bottom = gf_least(map->h, (w.unit + w.units) * map->ph);
    w.tall = gf_ceil_div(w.bottom - w.top, 2);
    return w;
}

static void run_piece(const void *argument, int64_t work, void *scratch) {
    const plan *p = argument;
    const piece w = find_piece(p, work);
    const int64_t count = w.images * w.tall * p->across;
    float *rows = (float *)((char *)scratch + p->rows_at), *tiles = (float *)((char *)scratch + p->tiles_at);
    float *products = (float *)((char *)scratch + p->products_at), *edge = (float *)((char *)scratch + p->edge_at);
    for (int64_t first = 0; first < count; first += p->chunk) {
        const int64_t some = gf_least(p->chunk, count - first);
        transform_tiles(p, &w, first, some, tiles, edge);
        for (int64_t panel = 0; panel < p->panels; panel += p->part) {
            const int64_t end = gf_least(p->panels, panel + p->part), vector = panel_start(panel, p->vectors);
            const int64_t lanes = (panel_start(end, p->vectors) - vector) * GF_LANES;
            const int64_t pitch = p->finishes ? lanes : p->vectors * GF_LANES;
            multiply(p, tiles, some, panel, end, products);
            sum_tiles(p, &w, first, some, products, lanes, rows + (p->finishes ? 0 : vector * GF_LANES), pitch, edge);
            if (p->finishes) finish(p, &w, rows, pitch, vector, scratch);
        }
    }
    if (!p->finishes) finish(p, &w, rows, p->vectors * GF_LANES, 0, scratch);
}

/* Tiles at once, and panels whose products stand in the second cache. Many inputs are transformed for fewer tiles. */
enum { LEAST_TILES = 48, MOST_TILES = 128, TILE_FLOATS = 65536, PART = 4 };

/* Choose how much is done at once. */
static void divide(plan *p, int threads) {
    const gf_map *map = &p->task->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), rows = gf_least(map->ph, map->h);
    const int64_t image = gf_ceil_div(map->h, 2) * p->across, unit = gf_ceil_div(rows, 2) * p->across;
    const int64_t most = gf_most(LEAST_TILES, gf_least(MOST_TILES, TILE_FLOATS / p->task->inputs));
    const int64_t some = gf_least(most, gf_ceil_div(map->n * image, threads));
    p->images = gf_most(1, some / image);
    p->units = image <= some ? down : gf_most(1, gf_least(down, some / unit));
    const int64_t tall = gf_ceil_div(gf_least(map->h, p->units * map->ph), 2), tiles = p->images * tall * p->across;
    p->chunk = gf_least(tiles, most);
    p->part = gf_least(p->panels, PART);
    p->finishes = tiles <= p->chunk && !is_smooth(&p->task->after);
}

int GF_LEVEL(gf_winograd)(const gf_dense *t, int threads) {
    const gf_map *map = &t->after.map;
    plan p = {.task = t, .vectors = gf_ceil_div(map->c, GF_LANES), .across = gf_ceil_div(map->w, 2)};
    p.panels = count_panels(p.vectors);
    divide(&p, threads);
    const int64_t lanes = p.vectors * GF_LANES, widest = gf_least(lanes, (2 * p.part + 1) * GF_LANES);
    const int64_t pixels = p.images * gf_least(map->h, p.units * map->ph) * map->w;
    p.weight_step = spread(lanes * t->inputs);
    p.tiles_step = spread(p.chunk * t->inputs);
    p.products_step = spread(p.chunk * widest);
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.tiles_at = p.rows_at + gf_float_bytes(pixels * (p.finishes ? widest : lanes));
    p.products_at = p.tiles_at + gf_float_bytes(POSITIONS * p.tiles_step);
    p.edge_at = p.products_at + gf_float_bytes(POSITIONS * p.products_step);
    const size_t scratch = p.edge_at + gf_float_bytes(gf_most(POSITIONS * t->inputs, widest));
    void *owner;
    p.weight = gf_take_memory(gf_float_bytes(POSITIONS * p.weight_step + 2 * lanes), &owner);
    if (!p.weight) return -1;
    p.shift = p.weight + POSITIONS * p.weight_step;
    const int64_t work = gf_ceil_div(map->n, p.images) * gf_ceil_div(gf_ceil_div(map->h, map->ph), p.units);
    int failed = gf_parallel(pack_panel, &p, p.panels, threads, gf_float_bytes(INPUTS * TAPS * GF_LANES));
    if (!failed) failed = gf_parallel(run_piece, &p, work, threads, scratch);
    gf_give_memory(p.weight, owner);
    return failed;
}
