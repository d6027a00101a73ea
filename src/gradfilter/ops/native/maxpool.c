/* Max pooling of channels_last maps: the maxima, their patch means, and where in reach of each cell the winners lie. */
#include "maxpool.h"
#include "vec.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
GF_INLINE gf_vec choose(gf_ints mask, gf_vec yes, gf_vec no) { return (gf_vec)_mm256_blendv_ps(no, yes, (__m256)mask); }
#else
GF_INLINE gf_vec choose(gf_ints mask, gf_vec yes, gf_vec no) { return gf_choose(mask, yes, no); }
#endif

/* The window of one pixel of y, in the order in which the first maximum wins, and the places that it can name. */
typedef struct {
    int64_t taps, cells;
    int64_t *offset; /* of each tap in the image */
    int32_t *place;  /* of each tap */
    int32_t *cell;   /* the places between those of the first and the last tap */
} window;

/* What one unit leaves before it is finished: per cell, vectors of sums and of counts. */
typedef struct {
    const gf_max_pool *task;
    int64_t vectors, pitch; /* of channels: vectors, and lanes in all of them */
    int64_t cells;          /* in a row of cells */
    int streamed;
    size_t counts_at, offset_at, place_at, cell_at; /* in the scratch of a thread; the sums come first */
} plan;

static void fill_window(const gf_max_pool *t, const int32_t *row, const int32_t *column, window *q) {
    const int64_t channels = t->map.c, corner = (row[0] * t->w + column[0]) * channels;
    q->taps = q->cells = 0;
    for (int64_t u = 0; u < row[1]; u++)
        for (int64_t v = 0; v < column[1]; v++, q->taps++) {
            q->offset[q->taps] = corner + (u * t->dh * t->w + v * t->dw) * channels;
            q->place[q->taps] = row[2 + u] + column[2 + v];
        }
    for (int32_t a = row[2]; a <= row[1 + row[1]]; a += (int32_t)t->across)
        for (int32_t b = column[2]; b <= column[1 + column[1]]; b++) q->cell[q->cells++] = a + b;
}

/* One pixel, V vectors of channels: write y, add to the sums, and count or write the winner's place. */
GF_INLINE void run_pixel(const window *q, const float *x, float *y, float *sums, int32_t *counts, int64_t pitch,
                         uint8_t *places, const int stream, const int V) {
    const gf_vec none = {0};
    const gf_ints zero = {0};
    gf_vec best[4];
    gf_ints place[4];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) best[v] = none - __builtin_inff(), place[v] = zero + q->place[0];
    for (int64_t k = 0; k < q->taps; k++) {
        const float *from = x + q->offset[k];
        const gf_ints here = zero + q->place[k];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const gf_vec z = gf_load(from + v * GF_LANES);
            const gf_ints wins = (z > best[v]) | (z != z);
            best[v] = choose(wins, z, best[v]);
            place[v] = (gf_ints)choose(wins, (gf_vec)here, (gf_vec)place[v]);
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        (stream ? gf_stream : gf_store)(y + v * GF_LANES, best[v]);
        if (sums) gf_store(sums + v * GF_LANES, gf_load(sums + v * GF_LANES) + best[v]);
        if (places) gf_put_counts(places, v * GF_LANES, place[v], 1);
    }
    if (!counts) return;
    for (int64_t k = 0; k < q->cells; k++) {
        int32_t *count = counts + q->cell[k] * pitch;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++, count += GF_LANES) {
            gf_ints sum;
            memcpy(&sum, count, sizeof sum);
            sum -= place[v] == q->cell[k]; /* a comparison that holds is -1 */
            memcpy(count, &sum, sizeof sum);
        }
    }
}

/* All channels of one pixel, four vectors at a time while there are as many whole ones. */
GF_INLINE void run_channels(const plan *p, const window *q, const float *x, float *y, float *sums, int32_t *counts,
                            uint8_t *places, const int stream) {
    const int64_t channels = p->task->map.c;
    for (int64_t i = 0, v; i < p->vectors; i += v) {
        const int64_t c = gf_vec_start(i, channels), at = i * GF_LANES;
        float *sum = sums ? sums + at : NULL;
        int32_t *count = counts ? counts + at : NULL;
        uint8_t *place = places ? places + c : NULL;
        v = (i + 4) * GF_LANES <= channels ? 4 : 1;
        if (v == 4)
            run_pixel(q, x + c, y + c, sum, count, p->pitch, place, stream, 4);
        else
            run_pixel(q, x + c, y + c, sum, count, p->pitch, place, stream, 1);
    }
}

/* Write the means and counts of a row of cells. */
static void finish_cells(const plan *p, int64_t image, int64_t row, int64_t rows, const float *sums, const int32_t *counts) {
    const gf_max_pool *t = p->task;
    const gf_map *m = &t->map;
    for (int64_t j = 0; j < p->cells; j++) {
        const int64_t at = (image * gf_ceil_div(m->h, m->ph) + row) * p->cells + j;
        const float area = (float)(rows * gf_least(m->pw, m->w - j * m->pw));
        for (int64_t i = 0; i < p->vectors; i++) {
            const int64_t c = gf_vec_start(i, m->c);
            if (t->mean) gf_store(t->mean + at * m->c + c, gf_load(sums + j * p->pitch + i * GF_LANES) / area);
        }
        for (int64_t k = 0; t->count_bytes && k < t->places; k++)
            for (int64_t i = 0; i < p->vectors; i++) {
                gf_ints count;
                memcpy(&count, counts + (j * t->places + k) * p->pitch + i * GF_LANES, sizeof count);
                gf_put_counts(t->winners, (at * t->places + k) * m->c + gf_vec_start(i, m->c), count, t->count_bytes);
            }
    }
}

static void run_unit(const void *argument, int64_t unit, void *scratch) {
    const plan *p = argument;
    const gf_max_pool *t = p->task;
    const gf_map *m = &t->map;
    const int64_t down = gf_ceil_div(m->h, m->ph), image = unit / down, first = unit % down * m->ph;
    const int64_t end = gf_least(m->h, first + m->ph);
    char *base = scratch;
    float *sums = t->mean ? (float *)base : NULL;
    int32_t *counts = t->count_bytes ? (int32_t *)(base + p->counts_at) : NULL;
    window q = {.offset = (int64_t *)(base + p->offset_at),
                .place = (int32_t *)(base + p->place_at),
                .cell = (int32_t *)(base + p->cell_at)};
    const float *x = t->x + image * t->h * t->w * m->c;
    memset(scratch, 0, p->offset_at);
    for (int64_t r = first; r < end; r++) {
        const int32_t *row = t->rows + r * (2 + t->kh);
        for (int64_t j = 0; j < m->w; j++) {
            const int64_t cell = j / m->pw, at = ((image * m->h + r) * m->w + j) * m->c;
            float *sum = sums ? sums + cell * p->pitch : NULL;
            int32_t *count = counts ? counts + cell * t->places * p->pitch : NULL;
            uint8_t *places = t->count_bytes ? NULL : (uint8_t *)t->winners + at;
            fill_window(t, row, t->columns + j * (2 + t->kw), &q);
            if (p->streamed)
                run_channels(p, &q, x, t->y + at, sum, count, places, 1);
            else
                run_channels(p, &q, x, t->y + at, sum, count, places, 0);
        }
    }
    if (p->streamed) gf_fence();
    finish_cells(p, image, first / m->ph, end - first, sums, counts);
}

int GF_LEVEL(gf_max_pool)(const gf_max_pool *t, int threads) {
    const gf_map *m = &t->map;
    plan p = {.task = t, .vectors = gf_ceil_div(m->c, GF_LANES), .cells = gf_ceil_div(m->w, m->pw)};
    const int64_t taps = t->kh * t->kw;
    p.pitch = p.vectors * GF_LANES;
    p.streamed = gf_is_streamed(m, t->y);
    p.counts_at = t->mean ? gf_float_bytes(p.cells * p.pitch) : 0;
    p.offset_at = p.counts_at + (t->count_bytes ? gf_float_bytes(p.cells * t->places * p.pitch) : 0);
    p.place_at = p.offset_at + (size_t)taps * sizeof(int64_t);
    p.cell_at = p.place_at + (size_t)taps * sizeof(int32_t);
    const size_t scratch = p.cell_at + (size_t)t->places * sizeof(int32_t);
    return gf_parallel(run_unit, &p, m->n * gf_ceil_div(m->h, m->ph), threads, scratch);
}

/* Where nothing was won, nothing is added: a gradient that is not finite stays where it belongs. */
#define ADD(type)                                            \
    const type *restrict won = (const type *)t->winners + at; \
    for (int64_t i = 0; i < t->c; i++) {                      \
        const float count = (float)won[i], all = g[i] * count; \
        gx[i] += count != 0 ? all : 0;                        \
    }

static void run_route(const void *argument, int64_t image, void *scratch) {
    (void)scratch;
    const gf_max_route *t = argument;
    for (int64_t j = 0; j < t->cells; j++) {
        const int64_t cell = image * t->cells + j, *target = t->target + j * t->places;
        const float *restrict g = t->g + cell * t->c;
        if (!t->count_bytes) {
            const uint8_t *place = (const uint8_t *)t->winners + cell * t->c;
            float *gx = t->gx + image * t->in_cells * t->c;
            for (int64_t i = 0; i < t->c; i++)
                if (place[i] < t->places) gx[target[place[i]] * t->c + i] += g[i]; /* a caller's bytes may name others */
            continue;
        }
        for (int64_t k = 0; k < t->places; k++) {
            const int64_t at = (cell * t->places + k) * t->c;
            float *restrict gx = t->gx + (image * t->in_cells + target[k]) * t->c;
            if (t->count_bytes == 1) {
                ADD(uint8_t)
            } else if (t->count_bytes == 2) {
                ADD(int16_t)
            } else {
                ADD(int32_t)
            }
        }
    }
}

int GF_LEVEL(gf_max_route)(const gf_max_route *t, int threads) { return gf_parallel(run_route, t, t->n, threads, 0); }
