/* Max pooling of channels_last maps in float32. */
#ifndef GF_MAXPOOL_H
#define GF_MAXPOOL_H

#include "kernels.h"

/* y[o] = the maximum over the taps of window o. The first of equal ones wins, and a NaN wins over all before it.
 *
 * The winner lies in one of few input cells, the *places* in reach of y's cell. `rows` and `columns` say for each row and
 * column of y: the first pixel of its window on the map, how many taps are there, at least one, and the place of each of
 * them, ascending; the place of a tap is that of its row plus that of its column. */
#define GF_MAX_POOL_FIELDS(F)                                                                                    \
    F(gf_map, map)                 /* y's */                                                                     \
    F(const float *, x)            /* [N, h, w, C] */                                                            \
    F(float *, y)                  /* [N, H, W, C] */                                                            \
    F(float *, mean)               /* [N, H', W', C], or NULL */                                                 \
    F(void *, winners)             /* [N, H', W', places, C], counts; or the place itself [N, H, W, C], bytes */ \
    F(const int32_t *, rows)       /* [H, 2 + kh] */                                                             \
    F(const int32_t *, columns)    /* [W, 2 + kw] */                                                             \
    F(int64_t, h) F(int64_t, w)    /* of x */                                                                    \
    F(int64_t, kh) F(int64_t, kw) F(int64_t, dh) F(int64_t, dw)                                                  \
    F(int64_t, places) F(int64_t, across) /* in reach: all of them, and those side by side */                    \
    F(int64_t, count_bytes)        /* 1, 2 or 4: size of a count; 0: the place itself */
GF_STRUCT(gf_max_pool, GF_MAX_POOL_FIELDS);

/* The backward: gx[target] += g * count, for each cell of y and each place in reach of it. */
#define GF_MAX_ROUTE_FIELDS(F)                                                                      \
    F(int64_t, n) F(int64_t, c)                                                                     \
    F(int64_t, cells) F(int64_t, in_cells) F(int64_t, places) /* cells of y and of x */             \
    F(int64_t, count_bytes)        /* 1, 2 or 4; 0: winners are places */                           \
    F(const float *, g)            /* [N, cells, C], per pixel */                                   \
    F(const void *, winners)       /* [N, cells, places, C]; or [N, cells, C] */                    \
    F(const int64_t *, target)     /* [cells, places]: a cell of x */                               \
    F(float *, gx)                 /* [N, in_cells, C], zero */
GF_STRUCT(gf_max_route, GF_MAX_ROUTE_FIELDS);

/* Run a whole task: a max pooling on 16 channels at least, the widest vector of any level. They return 0, or -1 where
 * there was no memory. */
typedef int gf_run_max_pool(const gf_max_pool *task, int threads);
typedef int gf_run_max_route(const gf_max_route *task, int threads);

#endif
