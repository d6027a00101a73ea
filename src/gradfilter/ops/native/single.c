/* Two products of matrices that share one of theirs.
 *
 * Cells are divided into parts, and each part goes through its cells in chunks that stay in the caches: gx first, then
 * gw, for which it has sums of its own. So what they add up to depends on the sizes alone, not on who computed which.
 * Where there are fewer parts than threads need, their channels are divided as well.
 */
#include "single.h"

#include "outer.h"

/* Cells at once, and the least of a part, in whole tiles of any width; the most parts, and the most sums they may have. */
enum { TILE = 12, CHUNK = 8 * TILE, PART = 43 * TILE, MOST_PARTS = 16, SUM_FLOATS = 1 << 20 };

/* Pieces of work that a thread should find, so that none waits long for the last one. */
enum { PIECES = 4 };

typedef struct {
    const gf_single *task;
    int64_t vectors, panels; /* of gx's channels */
    int64_t blocks;          /* of g's */
    int64_t parts, part;     /* how many, and cells of each */
    int64_t gx_slices;       /* pieces of a part that are of gx alone: none where one piece has all */
    int64_t gw_slices;       /* the other ones */
    int64_t pitch;           /* floats of a row of sums */
    float *weight;           /* summed over taps: [panel, channel of g, vector, lane] */
    float *sums;             /* [part, channel of g, vector, lane]: gw itself where it can be */
    size_t x_at, y_at;       /* in the scratch of a thread, behind g */
} plan;

typedef struct {
    int64_t start, end;
} range;

/* Slice i of n things. */
GF_INLINE range find_slice(int64_t n, int64_t i, int64_t slices) { return (range){i * n / slices, (i + 1) * n / slices}; }

/* A vector of numbers that lie `step` floats apart. */
GF_INLINE gf_vec gather(const float *from, int64_t step) {
    gf_vec value;
    for (int l = 0; l < GF_LANES; l++) value[l] = from[l * step];
    return value;
}

/* Sum the weights of some channels of g and panels over their taps; `dense` where a tap's channels lie side by side. */
GF_INLINE void sum_some(const plan *p, range channels, range panels, const int dense) {
    const gf_single *t = p->task;
    for (int64_t o = channels.start; o < channels.end; o++)
        for (int64_t panel = panels.start; panel < panels.end; panel++) {
            const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
            float *to = p->weight + (start * t->co + o * width) * GF_LANES;
            for (int64_t j = start; j < start + width; j++, to += GF_LANES) {
                const float *from = t->w + o * t->taps * t->ci + gf_vec_start(j, t->ci) * (dense ? 1 : t->channel);
                if (dense)
                    for (int64_t k = 0; k < t->taps; k++) fetch(from + AHEAD * t->taps * t->ci + k * t->tap, GF_LANES);
                gf_vec sum = dense ? gf_load(from) : gather(from, t->channel);
                for (int64_t k = 1; k < t->taps; k++)
                    sum += dense ? gf_load(from + k * t->tap) : gather(from + k * t->tap, t->channel);
                gf_store(to, sum);
            }
        }
}

static void sum_taps(const plan *p, range channels, range panels) {
    if (p->task->channel == 1)
        sum_some(p, channels, panels, 1);
    else
        sum_some(p, channels, panels, 0);
}

static void run_weights(const void *argument, int64_t block, void *scratch) {
    (void)scratch;
    const plan *p = argument;
    const range channels = {block * BLOCK, gf_least(p->task->co, (block + 1) * BLOCK)};
    sum_taps(p, channels, (range){0, p->panels});
}

/* gx of some cells on the channels of a panel. */
static void multiply(const plan *p, int64_t first, int64_t count, int64_t panel, int64_t ahead, float *edge) {
    static const float zeros[3 * GF_LANES];
    const gf_single *t = p->task;
    const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
    const int whole = (start + width) * GF_LANES <= t->ci;
    const under at = under_itself(t->co);
    float *to = t->gx + first * t->ci, *y = whole ? to + start * GF_LANES : edge;
    const int64_t pitch = whole ? t->ci : width * GF_LANES;
    RUN[width - 1](t->g + first * t->co, &at, p->weight + start * GF_LANES * t->co, zeros, y, pitch, count, ahead);
    for (int64_t i = 0; i < count && !whole; i++, y += pitch, to += t->ci)
        for (int64_t j = 0; j < width; j++) gf_store(to + gf_vec_start(start + j, t->ci), gf_load(y + j * GF_LANES));
}

/* Copy some blocks of g of some cells to [block, cell, channel], with zeros behind the last channel. */
static void pack_g(const plan *p, int64_t first, int64_t count, range blocks, float *to) {
    const int64_t co = p->task->co;
    for (int64_t i = 0; i < count; i++)
        for (int64_t block = blocks.start; block < blocks.end; block++) {
            const float *from = p->task->g + (first + i) * co + block * BLOCK;
            float *at = to + ((block - blocks.start) * count + i) * BLOCK;
            if (block * BLOCK + BLOCK <= co) {
                memcpy(at, from, BLOCK * sizeof(float));
            } else {
                memset(at, 0, BLOCK * sizeof(float));
                memcpy(at, from, (size_t)(co - block * BLOCK) * sizeof(float));
            }
        }
}

/* Copy x of some cells on a panel to [cell, vector, lane]. */
static void pack_x(const plan *p, int64_t first, int64_t count, int64_t start, int64_t width, float *to) {
    const int64_t ci = p->task->ci;
    const float *from = p->task->x + first * ci;
    for (int64_t i = 0; i < count; i++, from += ci)
        for (int64_t j = start; j < start + width; j++, to += GF_LANES) gf_store(to, gf_load(from + gf_vec_start(j, ci)));
}

/* Add the products of some cells to a part's sums, on some blocks of g's channels and panels of x's. */
static void add_cells(const plan *p, int64_t part, int64_t first, int64_t count, range blocks, range panels, void *scratch) {
    float *g = scratch, *x = (float *)((char *)scratch + p->x_at);
    const int adds = first > part * p->part;
    pack_g(p, first, count, blocks, g);
    for (int64_t panel = panels.start; panel < panels.end; panel++) {
        const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
        float *sums = p->sums + part * p->blocks * BLOCK * p->pitch + start * GF_LANES;
        pack_x(p, first, count, start, width, x);
        for (int64_t block = blocks.start; block < blocks.end; block++) {
            const int64_t channels = gf_least(BLOCK, p->task->co - block * BLOCK);
            const float *from = g + (block - blocks.start) * count * BLOCK;
            add_outer(from, x, count, adds, sums + block * BLOCK * p->pitch, p->pitch, channels, width);
        }
    }
}

static void run_piece(const void *argument, int64_t unit, void *scratch) {
    const plan *p = argument;
    const gf_single *t = p->task;
    const int64_t slices = p->gx_slices + p->gw_slices, part = unit / slices, slice = unit % slices;
    range gx = {0}, panels = {0, p->panels}, blocks = {0, p->blocks};
    if (slice < p->gx_slices) {
        gx = find_slice(p->panels, slice, p->gx_slices);
        panels.end = 0;
    } else {
        if (!p->gx_slices && t->gx) gx = panels;
        range *larger = t->ci > t->co ? &panels : &blocks;
        *larger = find_slice(larger->end, slice - p->gx_slices, p->gw_slices);
        if (!t->gw) panels.end = 0;
    }
    const int64_t begin = part * p->part, end = gf_least(t->cells, begin + p->part);
    if (p->parts == 1) sum_taps(p, (range){0, t->co}, gx); /* near its products */
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t count = gf_least(CHUNK, end - first);
        for (int64_t panel = gx.start; panel < gx.end; panel++) {
            const int64_t ahead = panel == gx.start ? far_ahead(t->co) : 0; /* the others find g in the cache */
            multiply(p, first, count, panel, ahead, (float *)((char *)scratch + p->y_at));
        }
        if (panels.end) add_cells(p, part, first, count, blocks, panels, scratch);
    }
}

/* Add up the parts' sums of one channel of g. */
static void run_sums(const void *argument, int64_t channel, void *scratch) {
    (void)scratch;
    const plan *p = argument;
    const int64_t ci = p->task->ci, step = p->blocks * BLOCK * p->pitch;
    for (int64_t j = 0; j < p->vectors; j++) {
        const float *from = p->sums + channel * p->pitch + j * GF_LANES;
        gf_vec sum = gf_load(from);
        for (int64_t part = 1; part < p->parts; part++) sum += gf_load(from + part * step);
        gf_store(p->task->gw + channel * ci + gf_vec_start(j, ci), sum);
    }
}

/* Take memory for what all threads share, and run. */
int GF_LEVEL(gf_single)(const gf_single *t, int threads) {
    plan p = {.task = t, .vectors = gf_ceil_div(t->ci, GF_LANES), .blocks = gf_ceil_div(t->co, BLOCK), .gw_slices = 1};
    p.panels = count_panels(p.vectors);
    p.pitch = p.vectors * GF_LANES;
    const int64_t all = p.blocks * BLOCK * p.pitch, parts = gf_most(1, gf_least(MOST_PARTS, SUM_FLOATS / all));
    p.part = gf_most(PART, gf_ceil_div(gf_ceil_div(t->cells, parts), TILE) * TILE);
    p.parts = gf_ceil_div(t->cells, p.part);
    const int64_t pieces = threads > 1 ? gf_ceil_div(PIECES * threads, p.parts) : 1;
    if (pieces > 1) {
        p.gx_slices = t->gx ? gf_least(p.panels, pieces) : 0;
        p.gw_slices = t->gw ? gf_least(t->ci > t->co ? p.panels : p.blocks, pieces) : 0;
    }
    const int direct = p.parts == 1 && all == t->co * t->ci;
    const int64_t weight = t->gx ? t->co * p.pitch : 0, sums = t->gw && !direct ? p.parts * all : 0;
    void *owner;
    p.weight = gf_take_memory(gf_float_bytes(gf_most(1, weight + sums)), &owner);
    if (!p.weight) return -1;
    p.sums = direct ? t->gw : p.weight + weight;
    p.x_at = gf_float_bytes(t->gw ? CHUNK * p.blocks * BLOCK : 0);
    p.y_at = p.x_at + gf_float_bytes(CHUNK * 3 * GF_LANES);
    const size_t scratch = p.y_at + gf_float_bytes(CHUNK * 3 * GF_LANES);
    int failed = 0;
    if (t->gx && p.parts > 1) failed = gf_parallel(run_weights, &p, p.blocks, gf_useful_threads(threads, t->taps * weight), 0);
    if (!failed) failed = gf_parallel(run_piece, &p, p.parts * (p.gx_slices + p.gw_slices), threads, scratch);
    if (!failed && sums) failed = gf_parallel(run_sums, &p, t->co, gf_useful_threads(threads, sums), 0);
    gf_give_memory(p.weight, owner);
    return failed;
}
