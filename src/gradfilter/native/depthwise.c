/* Depthwise convolution, one unit at a time: a table of the pixels under the unit, then blocks of columns in registers. */
#include "conv.h"
#include "finish.h"

/* Some columns of one row: where its pixels are, and which channels to compute. */
typedef struct {
    const float *const *at; /* the first tap of the first column */
    int64_t step;           /* in `at`, from one row of taps to the next */
    int64_t taps;           /* rows of taps that lie on the map */
    const float *weight;    /* of the first of those, for vector 0 */
    const float *shift;
    int64_t from, to; /* vectors of channels */
    int64_t channels, kh, kw, sw, dw;
    float *y;
    int64_t pitch; /* of y */
} block;

/* T columns of a kernel with K columns and stride S; K == 0: as the block says, with its dilation. */
GF_INLINE void run_block(const block *b, const int T, const int K, const int S) {
    const int64_t width = K ? K : b->kw;
    for (int64_t i = b->from; i < b->to; i++) {
        const int64_t c = gf_vec_start(i, b->channels);
        const float *w = b->weight + i * b->kh * width * GF_LANES;
        const float *const *at = b->at;
        gf_vec sum[7];
#pragma GCC unroll 7
        for (int t = 0; t < T; t++) sum[t] = gf_load(b->shift + c);
        for (int64_t u = 0; u < b->taps; u++, at += b->step) {
            if (K) {
                gf_vec tap[K ? K : 1];
#pragma GCC unroll 7
                for (int v = 0; v < K; v++, w += GF_LANES) tap[v] = gf_load(w);
#pragma GCC unroll 32
                for (int j = 0; j < (T - 1) * S + K; j++) {
                    const gf_vec x = gf_load(at[j] + c);
#pragma GCC unroll 7
                    for (int t = 0; t < T; t++)
                        if (t * S <= j && j < t * S + K) sum[t] += x * tap[j - t * S];
                }
            } else {
                for (int64_t v = 0; v < width; v++, w += GF_LANES) {
                    const gf_vec tap = gf_load(w);
#pragma GCC unroll 7
                    for (int t = 0; t < T; t++) sum[t] += gf_load(at[t * b->sw + v * b->dw] + c) * tap;
                }
            }
        }
#pragma GCC unroll 7
        for (int t = 0; t < T; t++) gf_store(b->y + t * b->pitch + i * GF_LANES, sum[t]);
    }
}

typedef void block_fn(const block *);

#define BLOCK(T, K, S) \
    static void block_##T##_##K##_##S(const block *b) { run_block(b, T, K, S); }
#define BLOCKS(K, S) \
    BLOCK(1, K, S) BLOCK(2, K, S) BLOCK(3, K, S) BLOCK(4, K, S) BLOCK(5, K, S) BLOCK(6, K, S) BLOCK(7, K, S)
#define ROW(K, S)                                                                                                     \
    {                                                                                                                 \
        block_1_##K##_##S, block_2_##K##_##S, block_3_##K##_##S, block_4_##K##_##S, block_5_##K##_##S,                \
            block_6_##K##_##S, block_7_##K##_##S                                                                      \
    }

BLOCKS(0, 0)
BLOCKS(3, 1)
BLOCKS(3, 2)
BLOCKS(5, 1)
BLOCKS(5, 2)
BLOCKS(7, 1)
BLOCKS(7, 2)

enum { COLUMNS = 7 };

static block_fn *const ANY[COLUMNS] = ROW(0, 0);
static block_fn *const KNOWN[3][2][COLUMNS] = {{ROW(3, 1), ROW(3, 2)}, {ROW(5, 1), ROW(5, 2)}, {ROW(7, 1), ROW(7, 2)}};

/* A task and what all of its units share. */
typedef struct {
    const gf_depthwise *task;
    float *weight, *shift; /* packed: [vector, kh, kw, lane] and [C] */
    float *zeros;          /* a pixel outside the map */
    block_fn *const *run;
    int64_t vectors, pitch; /* of channels: vectors, and lanes in all of them */
    int64_t together;       /* vectors whose pixels under a band the first cache holds */
    int64_t band;           /* rows of y whose pixels of x the second cache holds */
    int64_t blocks;         /* in a row of y */
    int64_t cols_in;        /* under a row of y */
    size_t rows_at, table_at;  /* in the scratch of a thread */
} plan;

static void pack(const plan *p) {
    const gf_depthwise *t = p->task;
    const int64_t channels = t->after.map.c, taps = t->kh * t->kw;
    float *to = p->weight;
    for (int64_t i = 0; i < p->vectors; i++) {
        const int64_t c = gf_vec_start(i, channels);
        for (int64_t v = 0; v < taps; v++)
            for (int64_t l = c; l < c + GF_LANES; l++) *to++ = t->weight[l * taps + v] * (t->scale ? t->scale[l] : 1);
    }
    for (int64_t c = 0; c < channels; c++) p->shift[c] = t->shift ? t->shift[c] : 0;
    memset(p->zeros, 0, (size_t)channels * sizeof(float));
}

/* Note where each pixel under the unit is. */
static void fill_table(const plan *p, int64_t image, int64_t first, int64_t rows, const float **table) {
    const gf_depthwise *t = p->task;
    const int64_t channels = t->after.map.c;
    for (int64_t r = first; r < first + rows; r++) {
        const float *row = t->x + (image * t->h + r) * t->w * channels;
        for (int64_t q = -t->left; q < p->cols_in - t->left; q++)
            *table++ = r < 0 || r >= t->h || q < 0 || q >= t->w ? p->zeros : row + q * channels;
    }
}

/* The part of x that later units read first: brought nearer a few lines at a time. */
typedef struct {
    const char *from, *to;
    int64_t lines; /* per block */
} ahead;

static ahead look_ahead(const plan *p, int64_t image, int64_t from, int64_t rows, int64_t blocks) {
    const gf_depthwise *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t pitch = t->w * map->c * (int64_t)sizeof(float);
    const int64_t start = image * t->h + gf_most(0, gf_least(from, t->h)), stop = gf_least(map->n * t->h, start + rows);
    const char *x = (const char *)t->x;
    return (ahead){x + start * pitch, x + stop * pitch, gf_ceil_div((stop - start) * pitch, 64 * blocks)};
}

static void bring(ahead *a) {
    for (int64_t i = 0; i < a->lines && a->from < a->to; i++, a->from += 64) __builtin_prefetch(a->from, 0, 2);
}

/* Compute one row of y for some vectors of channels. */
static void run_row(const plan *p, block *b, const float *const *table, float *y, ahead *a) {
    const int64_t w = p->task->after.map.w;
    for (int64_t i = 0; i < p->blocks; i++) {
        const int64_t from = w * i / p->blocks, to = w * (i + 1) / p->blocks;
        b->at = table + from * b->sw;
        b->y = y + from * b->pitch;
        bring(a);
        p->run[to - from - 1](b);
    }
}

/* Compute `rows` rows of y; `top` is the row of x under their first tap. */
static void run_band(const plan *p, int64_t image, int64_t top, int64_t rows, const float *const *table, float *y) {
    const gf_depthwise *t = p->task;
    const int64_t under = (rows - 1) * t->sh + (t->kh - 1) * t->dh + 1, parts = gf_ceil_div(p->vectors, p->together);
    ahead a = look_ahead(p, image, top + under, rows * t->sh, rows * p->blocks * parts);
    block b = {.shift = p->shift, .kh = t->kh, .kw = t->kw, .sw = t->sw, .dw = t->dw};
    b.step = t->dh * p->cols_in;
    b.channels = t->after.map.c;
    b.pitch = p->pitch;
    for (b.from = 0; b.from < p->vectors; b.from = b.to) {
        b.to = gf_least(p->vectors, b.from + p->together);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t first = top + r * t->sh;
            const int64_t u = first < 0 ? gf_least(t->kh, gf_ceil_div(-first, t->dh)) : 0;
            b.taps = gf_least(t->kh, gf_ceil_div(gf_most(0, t->h - first), t->dh)) - u;
            b.weight = p->weight + u * t->kw * GF_LANES;
            run_row(p, &b, table + (r * t->sh + u * t->dh) * p->cols_in, y + r * t->after.map.w * p->pitch, &a);
        }
    }
}

static void run_unit(const void *argument, int64_t unit, void *scratch) {
    const plan *p = argument;
    const gf_depthwise *t = p->task;
    const gf_map *map = &t->after.map;
    const int64_t down = gf_ceil_div(map->h, map->ph), image = unit / down, row = unit % down;
    const int64_t rows = gf_least(map->ph, map->h - row * map->ph), top = row * map->ph * t->sh - t->top;
    float *y = (float *)((char *)scratch + p->rows_at);
    const float **table = (const float **)((char *)scratch + p->table_at);
    fill_table(p, image, top, (rows - 1) * t->sh + (t->kh - 1) * t->dh + 1, table);
    for (int64_t r = 0; r < rows; r += p->band)
        run_band(p, image, top + r * t->sh, gf_least(p->band, rows - r), table + r * t->sh * p->cols_in,
                 y + r * map->w * p->pitch);
    finish_rows(&t->after, y, p->pitch, image, row, 0, scratch);
}

/* Bytes of x that the first and the second cache hold beside the rest. */
enum { FIRST_CACHE = 16384, SECOND_CACHE = 131072 };

static block_fn *const *choose(const gf_depthwise *t) {
    const int known = t->kw == 3 || t->kw == 5 || t->kw == 7;
    return known && t->dw == 1 && (t->sw == 1 || t->sw == 2) ? KNOWN[(t->kw - 3) / 2][t->sw - 1] : ANY;
}

int GF_LEVEL(gf_depthwise)(const gf_depthwise *t, int threads) {
    const gf_map *map = &t->after.map;
    plan p = {.task = t, .run = choose(t), .vectors = gf_ceil_div(map->c, GF_LANES)};
    const int64_t rows = gf_least(map->ph, map->h), tall = (t->kh - 1) * t->dh + 1, line = 64 / (4 * GF_LANES);
    const int64_t held = SECOND_CACHE / (t->w * map->c * (int64_t)sizeof(float));
    p.pitch = p.vectors * GF_LANES;
    p.blocks = gf_ceil_div(map->w, COLUMNS);
    p.cols_in = (map->w - 1) * t->sw + (t->kw - 1) * t->dw + 1;
    p.band = gf_most(1, gf_least(rows, (held - tall) / t->sh + 1));
    const int64_t under = ((p.band - 1) * t->sh + tall) * p.cols_in;
    p.together = gf_most(1, FIRST_CACHE / 64 / under) * line;
    p.rows_at = (gf_norm_act_scratch(&t->after) + 63) / 64 * 64;
    p.table_at = p.rows_at + gf_float_bytes(rows * map->w * p.pitch);
    const size_t scratch = p.table_at + (size_t)(((rows - 1) * t->sh + tall) * p.cols_in) * sizeof(float *);
    p.weight = aligned_alloc(64, gf_float_bytes(p.pitch * t->kh * t->kw + 2 * map->c));
    if (!p.weight) return -1;
    p.shift = p.weight + p.pitch * t->kh * t->kw;
    p.zeros = p.shift + map->c;
    pack(&p);
    const int failed = gf_parallel(run_unit, &p, map->n * gf_ceil_div(map->h, map->ph), threads, scratch);
    free(p.weight);
    return failed;
}
