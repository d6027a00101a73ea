/* Max pooling of channels_last maps in float32. */
#ifndef GF_MAXPOOL_H
#define GF_MAXPOOL_H

#include "kernels.h"

/* y[o] = the maximum over the taps of window o. The first of equal ones wins, and a NaN wins over all before it.
 *
 * The winner lies in one of few input cells, the *places* in reach of y's cell. `rows` and `columns` say for each row and
 * column of y: the first pixel of its window on the map, how many taps are there, at least one, and the place of each of
 * them, ascending; the place of a tap is that of its row plus that of its column. */
typedef struct {
    gf_map map;        /* y's */
    const float *x;    /* [N, h, w, C] */
    float *y;          /* [N, H, W, C] */
    float *mean;       /* [N, H', W', C], or NULL */
    void *winners;     /* [N, H', W', places, C], counts; or the place itself [N, H, W, C], bytes */
    const int32_t *rows;    /* [H, 2 + kh] */
    const int32_t *columns; /* [W, 2 + kw] */
    int64_t h, w;      /* of x */
    int64_t kh, kw, dh, dw;
    int64_t places, across; /* in reach: all of them, and those side by side */
    int64_t count_bytes;    /* 1, 2 or 4: size of a count; 0: the place itself */
} gf_max_pool;

/* Run a whole task, on at least GF_LEAST_CHANNELS channels. It returns 0, or -1 where there was no memory. */
typedef int gf_run_max_pool(const gf_max_pool *task, int threads);

#endif
