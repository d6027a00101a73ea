/* The gradients of a depthwise convolution between patch-constant maps, a few channels of some images at a time. */
#include "pairs.h"
#include "vec.h"

/* Vectors that are in registers at once, and channels of a unit of work: as many as lie in a few cache lines. */
enum { GROUP = 4, BLOCK = 64 };

/* Units of work from which on images need not be divided: enough of them to keep a few threads busy to the end. */
enum { MANY_UNITS = 8 };

/* Let a pointer be one register: compilers like to compute each vector's address anew, from more numbers than there are. */
#define KEEP(pointer) __asm__("" : "+r"(pointer))

/* Images are divided by sizes alone, so that results are the same on any number of threads. */
typedef struct {
    const gf_pairs *task;
    int64_t blocks, parts; /* of channels, and of images */
    int64_t coefficients;
    float *gw; /* of each part of the images [parts, C, taps] */
} plan;

/* What a unit works on: `channels` of them from `first` on, and its own q and gq [coefficients, pitch]. */
typedef struct {
    int64_t first, channels, vectors, pitch;
    float *q, *gq;
} part;

/* The pairs of one input cell along an axis. */
typedef struct {
    const int32_t *pair, *end;
} span;

GF_INLINE span find_span(const gf_pair_axis *axis, int64_t cell) {
    return (span){axis->pairs + 2 * axis->start[cell], axis->pairs + 2 * axis->start[cell + 1]};
}

/* All pairs of one input cell, `count` vectors of channels wide. */
GF_INLINE void run_cell(const gf_pairs *t, span rows, span columns, const float *g, const float *x, float *gx,
                        const float *q, float *gq, const int64_t pitch, const int count, const int want_x,
                        const int want_q) {
    const int64_t channels = t->c, across = t->columns.out * t->c, coefficients = t->columns.coefficients;
    gf_vec sum[GROUP], value[GROUP];
    for (int v = 0; v < count; v++) {
        if (want_x) sum[v] = (gf_vec){0};
        if (want_q) value[v] = gf_load(x + v * GF_LANES);
    }
    for (; rows.pair < rows.end; rows.pair += 2) {
        const float *line = g + rows.pair[0] * across;
        const int64_t first = rows.pair[1] * coefficients;
        for (const int32_t *pair = columns.pair; pair < columns.end; pair += 2) {
            const float *from = line + pair[0] * channels, *factor = q + (first + pair[1]) * pitch;
            float *total = gq + (first + pair[1]) * pitch;
            KEEP(from);
            KEEP(factor);
            KEEP(total);
            for (int v = 0; v < count; v++) {
                const gf_vec gradient = gf_load(from + v * GF_LANES);
                if (want_x) sum[v] += gradient * gf_load(factor + v * GF_LANES);
                if (want_q) gf_store(total + v * GF_LANES, gf_load(total + v * GF_LANES) + gradient * value[v]);
            }
        }
    }
    if (want_x)
        for (int v = 0; v < count; v++) gf_store(gx + v * GF_LANES, sum[v]);
}

/* One image: groups of vectors as long as there are whole ones; the last vector overlaps the one before it. */
GF_INLINE void run_image(const gf_pairs *t, const part *p, const float *g, const float *x, float *gx, const int want_x,
                         const int want_q) {
    for (int64_t i = 0; i < t->rows.in; i++) {
        const span rows = find_span(&t->rows, i);
        for (int64_t j = 0; j < t->columns.in; j++) {
            const span columns = find_span(&t->columns, j);
            const int64_t cell = (i * t->columns.in + j) * t->c;
            for (int64_t v = 0; v < p->vectors;) {
                const int64_t start = p->first + gf_vec_start(v, p->channels), own = v * GF_LANES;
                const int64_t whole = p->channels / GF_LANES - v;
                const float *from = want_q ? x + cell + start : NULL;
                float *to = want_x ? gx + cell + start : NULL;
                if (whole >= GROUP) {
                    run_cell(t, rows, columns, g + start, from, to, p->q + own, p->gq + own, p->pitch, GROUP, want_x, want_q);
                    v += GROUP;
                } else if (whole >= 2) {
                    run_cell(t, rows, columns, g + start, from, to, p->q + own, p->gq + own, p->pitch, 2, want_x, want_q);
                    v += 2;
                } else {
                    run_cell(t, rows, columns, g + start, from, to, p->q + own, p->gq + own, p->pitch, 1, want_x, want_q);
                    v++;
                }
            }
        }
    }
}

/* Sums of rows of `from`, `pitch` apart, times factors, `step` apart: `count` vectors wide, so that sums need not wait for
 * each other. */
GF_INLINE void add_rows(const float *factors, int64_t step, int64_t rows, const float *from, int64_t pitch, gf_vec *sum,
                        const int count) {
    for (int v = 0; v < count; v++) sum[v] = (gf_vec){0};
    for (int64_t row = 0; row < rows; row++)
        for (int v = 0; v < count; v++) sum[v] += factors[row * step] * gf_load(from + row * pitch + v * GF_LANES);
}

/* The same for up to GROUP vectors; returns how many. */
GF_INLINE int add_some_rows(const float *factors, int64_t step, int64_t rows, const float *from, int64_t pitch, gf_vec *sum,
                            int64_t left) {
    const int count = left >= GROUP ? GROUP : left >= 2 ? 2 : 1;
    if (count == GROUP)
        add_rows(factors, step, rows, from, pitch, sum, GROUP);
    else if (count == 2)
        add_rows(factors, step, rows, from, pitch, sum, 2);
    else
        add_rows(factors, step, rows, from, pitch, sum, 1);
    return count;
}

/* q = mix w of some channels; `turned` has room for the weights as [tap, pitch]. */
static void mix_weights(const plan *all, const part *p, float *turned) {
    const gf_pairs *t = all->task;
    gf_vec sum[GROUP];
    for (int64_t tap = 0; tap < t->taps; tap++)
        for (int64_t v = 0; v < p->vectors; v++) {
            const float *from = t->w + (p->first + gf_vec_start(v, p->channels)) * t->taps + tap;
            for (int64_t l = 0; l < GF_LANES; l++) turned[tap * p->pitch + v * GF_LANES + l] = from[l * t->taps];
        }
    for (int64_t k = 0; k < all->coefficients; k++)
        for (int64_t v = 0; v < p->vectors;) {
            const int count =
                add_some_rows(t->mix + k * t->taps, 1, t->taps, turned + v * GF_LANES, p->pitch, sum, p->vectors - v);
            for (int i = 0; i < count; i++, v++) gf_store(p->q + k * p->pitch + v * GF_LANES, sum[i]);
        }
}

/* gw = mix transposed times gq of some channels, [channel, tap]. */
static void mix_back(const plan *all, const part *p, float *gw) {
    const gf_pairs *t = all->task;
    gf_vec sum[GROUP];
    for (int64_t tap = 0; tap < t->taps; tap++)
        for (int64_t v = 0; v < p->vectors;) {
            const int count = add_some_rows(t->mix + tap, t->taps, all->coefficients, p->gq + v * GF_LANES, p->pitch, sum,
                                            p->vectors - v);
            for (int i = 0; i < count; i++, v++) {
                float *to = gw + gf_vec_start(v, p->channels) * t->taps + tap;
                for (int64_t l = 0; l < GF_LANES; l++) to[l * t->taps] = sum[i][l];
            }
        }
}

static void run_unit(const void *argument, int64_t unit, void *scratch) {
    const plan *all = argument;
    const gf_pairs *t = all->task;
    const int64_t block = unit % all->blocks, piece = unit / all->blocks;
    part p = {.first = block * BLOCK, .channels = block + 1 < all->blocks ? BLOCK : t->c - block * BLOCK, .q = scratch};
    const int64_t in = t->rows.in * t->columns.in * t->c, out = t->rows.out * t->columns.out * t->c;
    p.vectors = gf_ceil_div(p.channels, GF_LANES);
    p.pitch = p.vectors * GF_LANES;
    p.gq = p.q + all->coefficients * p.pitch;
    if (t->gx) mix_weights(all, &p, p.gq + all->coefficients * p.pitch);
    if (t->gw) memset(p.gq, 0, (size_t)(all->coefficients * p.pitch) * sizeof(float));
    for (int64_t image = piece * t->n / all->parts; image < (piece + 1) * t->n / all->parts; image++) {
        const float *g = t->g + image * out, *x = t->gw ? t->x + image * in : NULL;
        float *gx = t->gx ? t->gx + image * in : NULL;
        if (gx && x)
            run_image(t, &p, g, x, gx, 1, 1);
        else if (gx)
            run_image(t, &p, g, x, gx, 1, 0);
        else
            run_image(t, &p, g, x, gx, 0, 1);
    }
    if (t->gw) mix_back(all, &p, all->gw + (piece * t->c + p.first) * t->taps);
}

/* Add up what the parts of the images have. */
static void sum_parts(const plan *p) {
    const int64_t count = p->task->c * p->task->taps;
    memcpy(p->task->gw, p->gw, (size_t)count * sizeof(float));
    for (int64_t piece = 1; piece < p->parts; piece++)
        for (int64_t i = 0; i < count; i++) p->task->gw[i] += p->gw[piece * count + i];
}

int GF_LEVEL(gf_pairs)(const gf_pairs *t, int threads) {
    plan p = {.task = t, .blocks = gf_most(1, t->c / BLOCK), .parts = 1, .gw = t->gw};
    void *owner = NULL;
    p.coefficients = t->rows.coefficients * t->columns.coefficients;
    p.parts = gf_most(1, gf_least(t->n, MANY_UNITS / p.blocks));
    if (t->gw && p.parts > 1) p.gw = gf_take_memory(gf_float_bytes(p.parts * t->c * t->taps), &owner);
    if (t->gw && !p.gw) return -1;
    const size_t scratch = gf_float_bytes((2 * p.coefficients + t->taps) * 2 * BLOCK);
    const int failed = gf_parallel(run_unit, &p, p.blocks * p.parts, threads, scratch);
    if (p.gw == t->gw) return failed;
    if (!failed) sum_parts(&p);
    gf_give_memory(p.gw, owner);
    return failed;
}
