/* The gradients of a convolution between patch-constant maps whose kernel has two or three coarse taps per axis. */
#ifndef GF_BACKWARD_H
#define GF_BACKWARD_H

#include "kernels.h"

/* Along one axis, a tile is one or two cells of the output and the four numbers that they are correlated with: `mix`
 * times four cells of the input. It is the identity where all of these are whole patches inside the map. Two cells take
 * products at all four positions, or at the first three where the third tap is 0; one cell takes the first three, and one
 * with the first number alone the first. */
typedef float gf_mix[4][4], gf_taps[4][3];
#define GF_AXIS_TILE_FIELDS(F)                                                                                  \
    F(int32_t, out) F(int32_t, outs) /* its first output cell, and how many it has */                           \
    F(int32_t, in) F(int32_t, seen) /* its first input cell, and the end of those that earlier tiles have */    \
    F(int32_t, positions)          /* with products: 4, or as many as all others of the axis that have not 4 */ \
    F(int32_t, plain)              /* whether `mix` is the identity, on cells inside the map */                 \
    F(gf_mix, mix)
GF_STRUCT(gf_axis_tile, GF_AXIS_TILE_FIELDS);

#define GF_TILE_AXIS_FIELDS(F)                                                                      \
    F(const gf_axis_tile *, tiles)                                                                  \
    F(int64_t, count)                                                                               \
    F(int64_t, in) F(int64_t, out) /* cells */                                                      \
    F(gf_taps, taps)               /* what becomes of the kernel: lifted, then transformed */
GF_STRUCT(gf_tile_axis, GF_TILE_AXIS_FIELDS);

/* With the correlation y of x and w that the tiles describe, its gradients from that of y. */
#define GF_BACKWARD_FIELDS(F)                                                                       \
    F(gf_tile_axis, rows) F(gf_tile_axis, columns)                                                  \
    F(int64_t, n)                                                                                   \
    F(int64_t, co) F(int64_t, ci)  /* channels: multiples of GF_CHANNELS */                         \
    F(const float *, g)            /* [N, out cells, co] */                                         \
    F(const float *, x)            /* [N, in cells, ci], or NULL with gw */                         \
    F(const float *, w)            /* [co, 3, 3, ci] or [co, ci, 3, 3], or NULL with gx */          \
    F(int64_t, last)               /* whether channels are the last axis of w and gw */             \
    F(float *, gx)                 /* [N, in cells, ci], or NULL */                                 \
    F(float *, gw)                 /* as w, or NULL */
GF_STRUCT(gf_backward, GF_BACKWARD_FIELDS);

/* Run a whole task. Returns 0, or -1 where there was no memory. */
typedef int gf_run_backward(const gf_backward *task, int threads);

#endif
