/* The gradients of a convolution between patch-constant maps whose kernel has three coarse taps per axis. */
#ifndef GF_BACKWARD_H
#define GF_BACKWARD_H

#include "kernels.h"

/* Along one axis, a tile is one or two cells of the output and the four numbers that they are correlated with: `mix`
 * times four cells of the input. It is the identity where all of these are whole patches inside the map. Two cells take
 * products at all four positions, one takes the first three, and one with the first number alone the first. */
typedef struct {
    int32_t out, outs; /* its first output cell, and how many it has */
    int32_t in, seen;  /* its first input cell, and the end of those that earlier tiles have */
    int32_t positions; /* with products: 4, or as many as all others of the axis that have not 4 */
    int32_t plain;     /* whether `mix` is the identity, on cells inside the map */
    float mix[4][4];
} gf_axis_tile;

typedef struct {
    const gf_axis_tile *tiles;
    int64_t count;
    int64_t in, out;  /* cells */
    float taps[4][3]; /* what becomes of the kernel: lifted, then transformed */
} gf_tile_axis;

/* With the correlation y of x and w that the tiles describe, its gradients from that of y. */
typedef struct {
    gf_tile_axis rows, columns;
    int64_t n, co, ci; /* channels: multiples of GF_CHANNELS */
    const float *g;    /* [N, out cells, co] */
    const float *x;    /* [N, in cells, ci], or NULL with gw */
    const float *w;    /* [co, 3, 3, ci], or NULL with gx */
    float *gx;         /* [N, in cells, ci], or NULL */
    float *gw;         /* [co, 3, 3, ci], or NULL */
} gf_backward;

/* Run a whole task. Returns 0, or -1 where there was no memory. */
typedef int gf_run_backward(const gf_backward *task, int threads);

#endif
