/* All that Python asks of the library by a packed task, in one list, and the structs that it packs, in another. */
#ifndef GF_TASKS_H
#define GF_TASKS_H

#include "backward.h"
#include "conv.h"
#include "kernels.h"
#include "maxpool.h"
#include "pairs.h"
#include "single.h"

/* T(name, struct): a task gf_NAME_map runs, on a struct gf_STRUCT. Its number is its place in the list. */
#define GF_TASKS(T)                                                                                                   \
    T(norm_act, norm_act) T(unpool, unpool) T(slope, slope) T(norm_back, norm_back) T(norm_end, norm_end) T(fold, fold) \
    T(max_pool, max_pool) T(max_route, max_route)                                                                     \
    T(depthwise, depthwise) T(dense, dense) T(winograd, dense) T(expand, expand)                                      \
    T(pairs, pairs) T(backward, backward) T(single, single)

/* Run a task on up to `threads` threads. They return 0, -1 where there was no memory, or what else they have to say. */
#define GF_DECLARE_TASK(name, record) int gf_##name##_map(const gf_##record *task, int threads);
GF_TASKS(GF_DECLARE_TASK)

/* What each packed task begins with: then a struct of so many bytes follows. */
#define GF_HEADER_FIELDS(F)                                                                                           \
    F(int32_t, task) /* its number */                                                                                 \
    F(int32_t, bytes)
GF_STRUCT(gf_header, GF_HEADER_FIELDS);

/* S(name, fields) for every struct gf_NAME that Python packs or reads. */
#define GF_STRUCTS(S)                                                                                                 \
    S(header, GF_HEADER_FIELDS) S(request, GF_REQUEST_FIELDS) S(memory, GF_MEMORY_FIELDS)                             \
    S(map, GF_MAP_FIELDS) S(norm_act, GF_NORM_ACT_FIELDS) S(unpool, GF_UNPOOL_FIELDS) S(slope, GF_SLOPE_FIELDS)       \
    S(norm_back, GF_NORM_BACK_FIELDS) S(norm_end, GF_NORM_END_FIELDS) S(fold, GF_FOLD_FIELDS)                         \
    S(max_pool, GF_MAX_POOL_FIELDS) S(max_route, GF_MAX_ROUTE_FIELDS)                                                 \
    S(depthwise, GF_DEPTHWISE_FIELDS) S(dense, GF_DENSE_FIELDS) S(expand, GF_EXPAND_FIELDS)                           \
    S(pair_axis, GF_PAIR_AXIS_FIELDS) S(pairs, GF_PAIRS_FIELDS)                                                       \
    S(axis_tile, GF_AXIS_TILE_FIELDS) S(tile_axis, GF_TILE_AXIS_FIELDS) S(backward, GF_BACKWARD_FIELDS)               \
    S(single, GF_SINGLE_FIELDS)

/* The constants that Python has, too. */
#define GF_CONSTANTS(C)                                                                                               \
    C(GF_CHANNELS) C(GF_FLOAT32) C(GF_BFLOAT16)                                                                       \
    C(GF_IDENTITY) C(GF_CLAMP) C(GF_LEAKY) C(GF_HARDSWISH) C(GF_SILU)

#endif
