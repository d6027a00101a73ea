/* Convolutions of channels_last maps in float32 that finish their rows while those are in the cache.
 *
 * They write the rows of a unit into the thread's scratch and run the norm-activation pass from there to y. `after` is
 * that pass: its map is y's; its x, scale and shift are not used, for these are in the packed weights already.
 */
#ifndef GF_CONV_H
#define GF_CONV_H

#include "kernels.h"

/* y[o] = shift + scale * sum over taps of x[stride * o + dilation * tap - padding] * weight[tap], per channel. */
#define GF_DEPTHWISE_FIELDS(F)                                                                             \
    F(gf_norm_act, after)                                                                                  \
    F(const float *, x)            /* [N, h, w, C]; zero outside */                                        \
    F(const float *, weight)       /* [C, kh, kw] */                                                       \
    F(const float *, scale)        /* [C], or NULL for 1 */                                                \
    F(const float *, shift)        /* [C], or NULL for 0 */                                                \
    F(int64_t, h) F(int64_t, w)    /* of x */                                                              \
    F(int64_t, kh) F(int64_t, kw) F(int64_t, sh) F(int64_t, sw) F(int64_t, dh) F(int64_t, dw)              \
    F(int64_t, top) F(int64_t, left) /* padding; what is needed at the other ends follows from y's size */
GF_STRUCT(gf_depthwise, GF_DEPTHWISE_FIELDS);

/* The same with every input channel in every output: a pixel of y is a product of the weight with the pixels under it. */
#define GF_DENSE_FIELDS(F)                                                                          \
    F(gf_norm_act, after)                                                                           \
    F(const float *, x)            /* [N, h, w, inputs]; zero outside */                            \
    F(const float *, weight)       /* [C, inputs, kh, kw] */                                        \
    F(const float *, scale)        /* [C], or NULL for 1 */                                         \
    F(const float *, shift)        /* [C], or NULL for 0 */                                         \
    F(int64_t, inputs)                                                                              \
    F(int64_t, h) F(int64_t, w)    /* of x */                                                       \
    F(int64_t, kh) F(int64_t, kw) F(int64_t, sh) F(int64_t, sw) F(int64_t, dh) F(int64_t, dw)       \
    F(int64_t, top) F(int64_t, left) /* padding */
GF_STRUCT(gf_dense, GF_DENSE_FIELDS); /* Winograd's, too: kernel 3x3, stride and dilation 1, inputs >= GF_CHANNELS */

/* A dense convolution with kernels of one pixel, and a depthwise one of its result: a hidden map that is never in memory. */
#define GF_EXPAND_FIELDS(F)                                                                         \
    F(gf_dense, first)      /* stride 1, no padding; its `after` has no y and no residual */        \
    F(gf_depthwise, second) /* its x is not used; no residual either */
GF_STRUCT(gf_expand, GF_EXPAND_FIELDS);

/* Run a whole task, whose map has GF_CHANNELS output channels at least. They return 0, or -1 where there was no memory. */
typedef int gf_run_depthwise(const gf_depthwise *task, int threads);
typedef int gf_run_dense(const gf_dense *task, int threads);
typedef int gf_run_expand(const gf_expand *task, int threads);

#endif
