/* The gradients of a convolution between patch-constant maps whose outputs read one cell each. */
#ifndef GF_SINGLE_H
#define GF_SINGLE_H

#include "kernels.h"

/* gx = g times the sum of w over its taps, gw = g transposed times x: all taps have the same gradient. */
#define GF_SINGLE_FIELDS(F)                                                                             \
    F(int64_t, cells)              /* of all images: at least 1 */                                      \
    F(int64_t, co) F(int64_t, ci) F(int64_t, taps) /* ci: at least GF_CHANNELS */                       \
    F(const float *, g)            /* [cells, co] */                                                    \
    F(const float *, x)            /* [cells, ci]; NULL where gw is */                                  \
    F(const float *, w)            /* [co, taps, ci] or [co, ci, taps]; NULL where gx is */             \
    F(int64_t, tap) F(int64_t, channel) /* floats of w to the next tap, and to the next channel of x */ \
    F(float *, gx)                 /* [cells, ci], or NULL */                                           \
    F(float *, gw)                 /* [co, ci], or NULL */
GF_STRUCT(gf_single, GF_SINGLE_FIELDS);

/* Run a whole task. Returns 0, or -1 where there was no memory. */
typedef int gf_run_single(const gf_single *task, int threads);

#endif
