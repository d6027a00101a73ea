/* Rows of a depthwise convolution, in blocks of columns that stay in registers. A table says where the pixels are. */
#ifndef GF_WINDOW_H
#define GF_WINDOW_H

#include "conv.h"
#include "vec.h"

/* Some columns of one row: where its pixels are, and which channels to compute. */
typedef struct {
    const float *const *at; /* the first tap of the first column */
    int64_t step;           /* in `at`, from one row of taps to the next */
    int64_t taps;           /* rows of taps that lie on the map */
    const float *weight;    /* of the first of those, for the first vector of a pixel */
    const float *shift;
    int64_t from, to; /* vectors of channels */
    int64_t channels; /* of a pixel: vectors overlap where they are not a whole number of them */
    int64_t kh, kw, sw, dw;
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
        for (int t = 0; t < T; t++) sum[t] = gf_load(b->shift + i * GF_LANES);
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

/* The functions for blocks of 1 to COLUMNS columns of a row of y. */
static block_fn *const *choose_blocks(const gf_depthwise *t) {
    const int known = t->kw == 3 || t->kw == 5 || t->kw == 7;
    return known && t->dw == 1 && (t->sw == 1 || t->sw == 2) ? KNOWN[(t->kw - 3) / 2][t->sw - 1] : ANY;
}

/* A convolution and what all of its rows share. */
typedef struct {
    const gf_depthwise *task;
    float *weight, *shift; /* packed: [vector, kh, kw, lane] and [vector, lane] */
    float *zeros;          /* a pixel outside the map */
    block_fn *const *run;
    int64_t vectors; /* of channels */
    int64_t blocks;  /* in a row of y */
    int64_t tall, wide; /* rows and columns of x under a row of y, the zeros around the map among them */
} window;

static void pack_taps(const window *w) {
    const gf_depthwise *t = w->task;
    const int64_t channels = t->after.map.c, taps = t->kh * t->kw;
    float *to = w->weight;
    for (int64_t i = 0; i < w->vectors; i++) {
        const int64_t c = gf_vec_start(i, channels);
        for (int64_t v = 0; v < taps; v++)
            for (int64_t l = c; l < c + GF_LANES; l++) *to++ = t->weight[l * taps + v] * (t->scale ? t->scale[l] : 1);
        for (int64_t l = 0; l < GF_LANES; l++) w->shift[i * GF_LANES + l] = t->shift ? t->shift[c + l] : 0;
    }
    memset(w->zeros, 0, (size_t)(w->vectors * GF_LANES) * sizeof(float));
}

/* Return 0, or -1 where there was no memory; else the caller frees `weight`. */
static int open_window(window *w, const gf_depthwise *t) {
    const gf_map *map = &t->after.map;
    const int64_t vectors = gf_ceil_div(map->c, GF_LANES), lanes = vectors * GF_LANES, taps = t->kh * t->kw;
    *w = (window){.task = t, .run = choose_blocks(t), .vectors = vectors, .blocks = gf_ceil_div(map->w, COLUMNS)};
    w->tall = (t->kh - 1) * t->dh + 1;
    w->wide = (map->w - 1) * t->sw + (t->kw - 1) * t->dw + 1;
    w->weight = aligned_alloc(64, gf_float_bytes(lanes * (taps + 2)));
    if (!w->weight) return -1;
    w->shift = w->weight + lanes * taps;
    w->zeros = w->shift + lanes;
    pack_taps(w);
    return 0;
}

/* Note where the pixels of a row of x are, or that it is none of the map's where it is NULL; return the next row's place. */
static const float **note_row(const window *w, const float *row, int64_t pitch, const float **table) {
    const gf_depthwise *t = w->task;
    const int64_t wide = w->wide, from = row ? gf_least(t->left, wide) : wide, to = gf_least(t->left + t->w, wide);
    const float *const zeros = w->zeros;
    int64_t q = 0;
    for (; q < from; q++) table[q] = zeros;
    for (; q < to; q++) table[q] = row + (q - t->left) * pitch;
    for (; q < wide; q++) table[q] = zeros;
    return table + wide;
}

/* What is read later, brought nearer a few lines at a time. */
typedef struct {
    const char *from, *to;
    int64_t lines; /* per block */
} ahead;

GF_INLINE void bring(ahead *a) {
    for (int64_t i = 0; i < a->lines && a->from < a->to; i++, a->from += 64) __builtin_prefetch(a->from, 0, 2);
}

/* What the blocks of all rows have in common whose pixels hold `channels` channels. */
static block make_block(const window *w, int64_t channels, int64_t pitch) {
    const gf_depthwise *t = w->task;
    return (block){.step = t->dh * w->wide, .channels = channels, .pitch = pitch, .kh = t->kh, .kw = t->kw, .sw = t->sw, .dw = t->dw};
}

/* The taps of a row of y that lie on the map. */
typedef struct {
    int64_t first, count;
    int64_t row; /* of x, under the first one */
} taps_on_map;

GF_INLINE taps_on_map find_taps(const gf_depthwise *t, int64_t row) {
    const int64_t top = row * t->sh - t->top, first = top < 0 ? gf_least(t->kh, gf_ceil_div(-top, t->dh)) : 0;
    const int64_t end = gf_least(t->kh, gf_ceil_div(gf_most(0, t->h - top), t->dh));
    return (taps_on_map){first, gf_most(0, end - first), top + first * t->dh};
}

/* Compute one row of y; pixels begin with vector `vector` of the channels, and `table` with the row of x under the first
 * tap on the map. */
static void run_row(const window *w, block *b, int64_t vector, taps_on_map taps, const float *const *table, float *y, ahead *a) {
    const int64_t width = w->task->after.map.w;
    b->taps = taps.count;
    b->weight = w->weight + (vector * b->kh + taps.first) * b->kw * GF_LANES;
    b->shift = w->shift + vector * GF_LANES;
    for (int64_t i = 0; i < w->blocks; i++) {
        const int64_t from = width * i / w->blocks, to = width * (i + 1) / w->blocks;
        b->at = table + from * b->sw;
        b->y = y + from * b->pitch;
        bring(a);
        w->run[to - from - 1](b);
    }
}

#endif
