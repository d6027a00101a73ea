/* Sums of outer products in tiles of registers: what the gradient of a weight is made of. */
#ifndef GF_OUTER_H
#define GF_OUTER_H

#include "tile.h"

/* Channels of g that are packed together, a multiple of ROWS, those whose sums are in registers at once. */
enum { BLOCK = GF_CHANNELS, ROWS = GF_LANES == 16 ? 8 : 4 };

/* How many channels of g ahead of those that are packed the weights of others are fetched: they lie far apart. */
enum { AHEAD = 4 };

/* As `add_outer`, for ROWS channels and V vectors. What is there is added last: a sum of sums rounds better than one
 * long sum. */
GF_INLINE void add_tile(const float *g, const float *x, int64_t count, int adds, float *to, int64_t pitch, const int V) {
    gf_vec sum[ROWS][3];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) sum[r][j] = (gf_vec){0};
    for (int64_t i = 0; i < count; i++, g += BLOCK, x += V * GF_LANES) {
        gf_vec value[3];
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) value[j] = gf_load(x + j * GF_LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
            for (int j = 0; j < V; j++) sum[r][j] += g[r] * value[j];
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (int j = 0; j < V; j++) {
            float *at = to + r * pitch + j * GF_LANES;
            gf_store(at, adds ? gf_load(at) + sum[r][j] : sum[r][j]);
        }
}

/* The sum over `count` cells of `channels` of a block of g, [cell, channel], times a panel of x, [cell, vector, lane]:
 * stored at `to`, [channel of g, `pitch` floats], or added to what is there. Channels are rounded up to a multiple of
 * ROWS: so many rows are written. */
static inline void add_outer(const float *g, const float *x, int64_t count, int adds, float *to, int64_t pitch,
                             int64_t channels, int64_t width) {
    for (int64_t o = 0; o < channels; o += ROWS, g += ROWS, to += ROWS * pitch) {
        if (width == 1)
            add_tile(g, x, count, adds, to, pitch, 1);
        else if (width == 2)
            add_tile(g, x, count, adds, to, pitch, 2);
        else
            add_tile(g, x, count, adds, to, pitch, 3);
    }
}

#endif
