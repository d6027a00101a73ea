/* The gradients of a convolution between patch-constant maps whose outputs read one cell each. */
#ifndef GF_SINGLE_H
#define GF_SINGLE_H

#include "kernels.h"

/* gx = g times the sum of w over its taps, gw = g transposed times x: all taps have the same gradient. */
typedef struct {
    int64_t cells, co, ci, taps; /* cells of all images: at least 1; ci: at least GF_CHANNELS */
    const float *g;              /* [cells, co] */
    const float *x;              /* [cells, ci]; NULL where gw is */
    const float *w;              /* [co, taps, ci] or [co, ci, taps]; NULL where gx is */
    int64_t tap, channel;        /* floats of w to the next tap, and to the next channel of x */
    float *gx;                   /* [cells, ci], or NULL */
    float *gw;                   /* [co, ci], or NULL */
} gf_single;

/* Run a whole task. Returns 0, or -1 where there was no memory. */
typedef int gf_run_single(const gf_single *task, int threads);

#endif
