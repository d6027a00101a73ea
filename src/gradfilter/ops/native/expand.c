/* A dense convolution with kernels of one pixel and the depthwise convolution of its result, in one go.
 *
 * Hidden channels do not meet in a depthwise convolution. So a unit of work is one image and a few panels of hidden
 * channels, whose rows pass through a ring that stays in the cache: a few rows are multiplied and finished, then all rows
 * of y that have what they need by now are computed and finished.
 */
#include "conv.h"
#include "finish.h"
#include "tile.h"
#include "window.h"

/* A task and what all of its units share. */
typedef struct {
    const gf_expand *task;
    float *weight, *shift; /* of the first convolution, packed */
    window window;         /* the second */
    int64_t vectors, panels;
    int64_t part;   /* panels in a unit */
    int64_t widest; /* lanes in the widest unit */
    int64_t step;   /* rows of the hidden map that are computed at once */
    int64_t ring;   /* rows of it that are kept: a whole number of steps */
    int64_t rows;   /* of y that are computed at once */
    size_t ring_at, table_at, y_at, kept_at[2]; /* in the scratch of a thread */
} plan;

/* Where a unit is. */
typedef struct {
    const plan *plan;
    int64_t image, panel, end; /* panels [panel, end) */
    int64_t vector, pitch;     /* the first vector, and lanes in all of them */
    char *scratch;
    float *ring;           /* [row % ring, column, lane] */
    const float **table;   /* where its pixels are; all rows twice, so that those under a row of y follow each other */
    unfinished kept[2];    /* of the hidden map and of y */
} unit;

/* Finish rows [from, to) of a map, patch row by patch row. */
static void finish_range(const unit *u, int second, float *x, int64_t from, int64_t to) {
    const gf_expand *task = u->plan->task;
    const gf_norm_act *t = second ? &task->second.after : &task->first.after;
    const int64_t ph = t->map.ph;
    for (int64_t row = from, end; row < to; row = end) {
        end = gf_least(to, (row / ph + 1) * ph);
        const band b = {x + (row - from) * t->map.w * u->pitch, u->pitch, u->vector, u->image, row, end, u->kept[second]};
        finish_some(t, &b, u->scratch);
    }
}

/* Compute rows [from, to) of the hidden map into the ring. */
static void run_hidden(const unit *u, int64_t from, int64_t to) {
    const plan *p = u->plan;
    const gf_dense *t = &p->task->first;
    const under at = under_itself(t->inputs);
    const int64_t pixels = (to - from) * t->w, chunk = chunk_of(t->inputs);
    const float *x = t->x + (u->image * t->h + from) * t->w * t->inputs;
    float *y = u->ring + from % p->ring * t->w * u->pitch;
    for (int64_t i = 0; i < pixels; i += chunk)
        for (int64_t panel = u->panel; panel < u->end; panel++) {
            const int64_t start = panel_start(panel, p->vectors), width = panel_start(panel + 1, p->vectors) - start;
            const int64_t c = start * GF_LANES, ahead = panel == u->panel ? far_ahead(t->inputs) : 0;
            RUN[width - 1](x + i * t->inputs, &at, p->weight + c * t->inputs, p->shift + c,
                           y + i * u->pitch + c - u->vector * GF_LANES, u->pitch, gf_least(chunk, pixels - i), ahead);
        }
    finish_range(u, 0, y, from, to);
}

/* Compute rows [from, to) of y. */
static void run_rows(const unit *u, int64_t from, int64_t to) {
    const plan *p = u->plan;
    const window *w = &p->window;
    float *y = (float *)(u->scratch + p->y_at);
    ahead none = {NULL, NULL, 0};
    block b = make_block(w, u->pitch, u->pitch);
    b.to = u->pitch / GF_LANES;
    for (int64_t row = from; row < to; row++) {
        const taps_on_map taps = find_taps(w->task, row);
        const float **table = u->table + (taps.count ? taps.row % p->ring : 0) * w->wide;
        run_row(w, &b, u->vector, taps, table, y + (row - from) * w->task->after.map.w * u->pitch, &none);
    }
    finish_range(u, 1, y, from, to);
}

/* How many rows of y need no more than the first `rows` rows of the hidden map. */
static int64_t count_ready(const plan *p, int64_t rows) {
    const gf_depthwise *t = &p->task->second;
    const int64_t top = rows - p->window.tall + t->top; /* where taps may begin, counted from the first row of zeros */
    if (rows >= t->h) return t->after.map.h;
    return top < 0 ? 0 : gf_least(t->after.map.h, top / t->sh + 1);
}

static unit make_unit(const plan *p, int64_t work, char *scratch) {
    const gf_depthwise *t = &p->task->second;
    const int64_t parts = gf_ceil_div(p->panels, p->part), panel = work % parts * p->part;
    unit u = {.plan = p, .image = work / parts, .panel = panel, .end = gf_least(p->panels, panel + p->part), .scratch = scratch};
    u.vector = panel_start(panel, p->vectors);
    u.pitch = (panel_start(u.end, p->vectors) - u.vector) * GF_LANES;
    u.ring = (float *)(scratch + p->ring_at);
    u.table = (const float **)(scratch + p->table_at);
    for (int i = 0; i < 2; i++) {
        const gf_map *map = i ? &t->after.map : &p->task->first.after.map;
        float *kept = (float *)(scratch + p->kept_at[i]);
        u.kept[i] = (unfinished){kept, kept + gf_ceil_div(map->w, map->pw) * u.pitch};
    }
    const float **table = u.table;
    for (int64_t r = 0; r < 2 * p->ring; r++) table = note_row(&p->window, u.ring + r % p->ring * t->w * u.pitch, u.pitch, table);
    return u;
}

static void run_unit(const void *argument, int64_t work, void *scratch) {
    const plan *p = argument;
    const unit u = make_unit(p, work, scratch);
    const int64_t h = p->task->second.h, ph = p->task->second.after.map.ph;
    for (int64_t row = 0, done = 0; row < h; row += p->step) {
        const int64_t end = gf_least(h, row + p->step);
        run_hidden(&u, row, end);
        for (int64_t ready = count_ready(p, end), to; done < ready; done = to) {
            to = gf_least(ready, done + p->rows);
            if (to / ph * ph > done) to = to / ph * ph; /* whole patch rows, where they are there */
            run_rows(&u, done, to);
        }
    }
}

/* Hidden channels of a unit, and bytes of the hidden map and of y that are computed at once: the second cache holds the
 * ring, which is of two such steps where windows are no higher than one. */
enum { CHANNELS = 64, STEP = 131072, ROWS = 32768 };

/* Units for each thread that keep all of them busy to the end. */
enum { UNITS = 4 };

/* Choose how much is computed at once. */
static void divide(plan *p, int threads) {
    const gf_depthwise *t = &p->task->second;
    const int64_t lanes = p->vectors * GF_LANES, bytes = sizeof(float), ph = p->task->first.after.map.ph;
    p->panels = count_panels(p->vectors);
    p->part = gf_least(p->panels, gf_most(1, CHANNELS / (2 * GF_LANES)));
    if (threads > 1) p->part = gf_most(1, gf_least(p->part, p->task->first.after.map.n * p->panels / (UNITS * threads)));
    p->widest = gf_least(lanes, (2 * p->part + 1) * GF_LANES);
    p->step = gf_most(1, STEP / (t->w * 2 * p->part * GF_LANES * bytes));
    if (p->step > ph) p->step = p->step / ph * ph;
    p->step = gf_least(t->h, p->step);
    p->ring = gf_least(gf_ceil_div(p->window.tall - 1, p->step) + 1, gf_ceil_div(t->h, p->step)) * p->step;
    p->rows = gf_most(1, gf_least(t->after.map.h, ROWS / (t->after.map.w * 2 * p->part * GF_LANES * bytes)));
}

/* Lay out the scratch of a thread; return its bytes. */
static size_t place(plan *p) {
    const gf_norm_act *first = &p->task->first.after, *second = &p->task->second.after;
    const size_t one = some_scratch(first, p->widest), other = some_scratch(second, p->widest);
    p->ring_at = one > other ? one : other;
    p->y_at = p->ring_at + gf_float_bytes(p->ring * first->map.w * p->widest);
    p->kept_at[0] = p->y_at + gf_float_bytes(p->rows * second->map.w * p->widest);
    p->kept_at[1] = p->kept_at[0] + gf_float_bytes(2 * gf_ceil_div(first->map.w, first->map.pw) * p->widest);
    p->table_at = p->kept_at[1] + gf_float_bytes(2 * gf_ceil_div(second->map.w, second->map.pw) * p->widest);
    return p->table_at + (size_t)(2 * p->ring * p->window.wide) * sizeof(float *);
}

int GF_LEVEL(gf_expand)(const gf_expand *t, int threads) {
    plan p = {.task = t, .vectors = gf_ceil_div(t->first.after.map.c, GF_LANES)};
    const int64_t lanes = p.vectors * GF_LANES;
    p.weight = aligned_alloc(64, gf_float_bytes(lanes * (t->first.inputs + 1)));
    int failed = !p.weight || open_window(&p.window, &t->second) ? -1 : 0;
    if (!failed) {
        p.shift = p.weight + lanes * t->first.inputs;
        pack_panels(&t->first, p.vectors, p.weight, p.shift);
        divide(&p, threads);
        const size_t scratch = place(&p);
        failed = gf_parallel(run_unit, &p, t->first.after.map.n * gf_ceil_div(p.panels, p.part), threads, scratch);
        free(p.window.weight);
    }
    free(p.weight);
    return failed;
}
