/* The gradients of a depthwise convolution between patch-constant maps, channels_last in float32. */
#ifndef GF_PAIRS_H
#define GF_PAIRS_H

#include "kernels.h"

/* One axis: which output cells each input cell is read by, and how much. The *pairs* of input cell j are those from
 * start[j] to start[j + 1] of `pairs`, each an output cell and the number of its coefficient. */
#define GF_PAIR_AXIS_FIELDS(F)                                                                      \
    F(const int32_t *, start)      /* [in + 1] */                                                   \
    F(const int32_t *, pairs)      /* [., 2] */                                                     \
    F(int64_t, in) F(int64_t, out) /* cells */                                                      \
    F(int64_t, coefficients)
GF_STRUCT(gf_pair_axis, GF_PAIR_AXIS_FIELDS);

/* With q = mix w the coefficients of both axes' pairs,
 *   gx[j] = sum over the pairs (i, k) of j of g[i] * q[k],    gq[k] = sum over images and pairs (i, j, k) of g[i] * x[j],
 * and gw = mix transposed times gq. */
#define GF_PAIRS_FIELDS(F)                                                                          \
    F(gf_pair_axis, rows) F(gf_pair_axis, columns)                                                  \
    F(int64_t, n) F(int64_t, c) F(int64_t, taps)                                                    \
    F(const float *, mix)          /* [coefficients of rows, of columns, taps] */                   \
    F(const float *, g)            /* [N, out cells, C] */                                          \
    F(const float *, x)            /* [N, in cells, C], or NULL with gw */                          \
    F(const float *, w)            /* [C, taps], or NULL with gx */                                 \
    F(float *, gx)                 /* [N, in cells, C], or NULL */                                  \
    F(float *, gw)                 /* [C, taps], or NULL */
GF_STRUCT(gf_pairs, GF_PAIRS_FIELDS);

/* Run a whole task on 16 channels at least, the widest vector of any level. Returns 0, or -1 where there was no memory. */
typedef int gf_run_pairs(const gf_pairs *task, int threads);

#endif
