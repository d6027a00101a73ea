/* A product of pixels with panels of weights, in tiles of registers.
 *
 * A panel is two vectors of outputs; an odd one joins the last panel. Its weights are packed [input, vector, lane].
 */
#ifndef GF_TILE_H
#define GF_TILE_H

#include "conv.h"
#include "vec.h"

/* Where the numbers of x are that a pixel is multiplied with: runs of `run` floats, one or more in each of some rows. */
typedef struct {
    int64_t rows, row; /* how many rows, and floats to the next one */
    int64_t runs, hop; /* how many runs in a row, and floats to the next one */
    int64_t run;
    int64_t pixel; /* floats to the next pixel */
} under;

/* A pixel that is multiplied where it is. */
GF_INLINE under under_itself(int64_t inputs) { return (under){1, 0, 1, 0, inputs, inputs}; }

/* R pixels times V vectors of outputs. */
GF_INLINE void run_tile(const float *x, const under *at, const float *weight, const float *shift, float *y, int64_t pitch,
                        const int R, const int V) {
    const int64_t pixel = at->pixel, run = at->run;
    gf_vec sum[12][3];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) sum[r][j] = gf_load(shift + j * GF_LANES);
    for (int64_t u = 0; u < at->rows; u++, x += at->row) {
        const float *from = x;
        for (int64_t v = 0; v < at->runs; v++, from += at->hop)
            for (int64_t i = 0; i < run; i++, weight += V * GF_LANES) {
                gf_vec w[3];
#pragma GCC unroll 3
                for (int j = 0; j < V; j++) w[j] = gf_load(weight + j * GF_LANES);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const float number = from[r * pixel + i];
#pragma GCC unroll 3
                    for (int j = 0; j < V; j++) sum[r][j] += number * w[j];
                }
            }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) gf_store(y + r * pitch + j * GF_LANES, sum[r][j]);
}

/* Bring the numbers from `from` on nearer: the pixels that a later tile reads. */
GF_INLINE void fetch(const float *from, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(from + i, 0, 2);
}

/* How far ahead of a tile a panel fetches pixels of `inputs` numbers that lie one after the other. */
GF_INLINE int64_t far_ahead(int64_t inputs) { return gf_most(12, 4096 / inputs) * inputs; }

/* `pixels` pixels times one panel of outputs, R at a time, then S: 12 sums at once keep both multipliers busy, and 8 do; where
 * there are registers for 24, weights pass by half as often. */
#define PANEL(V, R, S)                                                                                                   \
    static void panel_##V(const float *x, const under *at, const float *weight, const float *shift, float *y,            \
                          int64_t pitch, int64_t pixels, int64_t ahead) {                                                \
        const int64_t step = at->pixel;                                                                                  \
        int64_t i = 0;                                                                                                   \
        for (; i + R <= pixels; i += R) {                                                                                \
            if (ahead) fetch(x + i * step + ahead, R * step);                                                            \
            run_tile(x + i * step, at, weight, shift, y + i * pitch, pitch, R, V);                                       \
        }                                                                                                                \
        if (i + S <= pixels) {                                                                                           \
            run_tile(x + i * step, at, weight, shift, y + i * pitch, pitch, S, V);                                       \
            i += S;                                                                                                      \
        }                                                                                                                \
        for (; i + 2 <= pixels; i += 2) run_tile(x + i * step, at, weight, shift, y + i * pitch, pitch, 2, V);           \
        if (i < pixels) run_tile(x + i * step, at, weight, shift, y + i * pitch, pitch, 1, V);                           \
    }

PANEL(1, 12, 8)
#if GF_LANES == 16
PANEL(2, 12, 6)
PANEL(3, 8, 4)
#else
PANEL(2, 6, 4)
PANEL(3, 4, 3)
#endif

typedef void panel_fn(const float *x, const under *at, const float *weight, const float *shift, float *y, int64_t pitch,
                      int64_t pixels, int64_t ahead);
static panel_fn *const RUN[3] = {panel_1, panel_2, panel_3};

/* Panels in so many vectors. */
GF_INLINE int64_t count_panels(int64_t vectors) { return gf_most(1, vectors / 2); }

/* The first vector of a panel; of the one after the last, the end. */
GF_INLINE int64_t panel_start(int64_t panel, int64_t vectors) {
    return panel < count_panels(vectors) ? 2 * panel : vectors;
}

/* Pixels that stay near while all panels pass over them. */
GF_INLINE int64_t chunk_of(int64_t depth) { return gf_most(24, gf_least(192, 32768 / depth / 12 * 12)); }

/* Pack the weights of all panels, times the scales, and the shifts as [vector, lane]. */
static inline void pack_panels(const gf_dense *t, int64_t vectors, float *weight, float *shift) {
    const int64_t taps = t->kh * t->kw, depth = t->inputs * taps;
    for (int64_t panel = 0; panel < count_panels(vectors); panel++) {
        const int64_t start = panel_start(panel, vectors), width = panel_start(panel + 1, vectors) - start;
        float *to = weight + start * GF_LANES * depth;
        for (int64_t j = 0; j < width; j++) {
            const int64_t c = gf_vec_start(start + j, t->after.map.c);
            for (int64_t l = 0; l < GF_LANES; l++) {
                const float scale = t->scale ? t->scale[c + l] : 1, *from = t->weight + (c + l) * depth;
                shift[(start + j) * GF_LANES + l] = t->shift ? t->shift[c + l] : 0;
                float *lane = to + j * GF_LANES + l;
                for (int64_t tap = 0; tap < taps; tap++)
                    for (int64_t i = tap; i < depth; i += taps, lane += width * GF_LANES) *lane = from[i] * scale;
            }
        }
    }
}

#endif
