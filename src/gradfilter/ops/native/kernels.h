/* The passes over maps that torch has no single function for, on raw pointers: no torch, no Python.
 *
 * A map [N, C, H, W] is dense in NCHW or in channels_last memory. Its *unit* of work is one image and one row of
 * patches: `ph` rows of pixels (fewer in the last one), so that whatever computed those rows may call the unit's
 * function while they are still in the cache.
 *
 * Files named by GF_SOURCES_PER_LEVEL in CMakeLists.txt are compiled once per level of the instruction set; what they
 * define carries the level's suffix (GF_LEVEL) and is reached through the table `gf_kernels`.
 */
#ifndef GF_KERNELS_H
#define GF_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define GF_PASTE2(name, suffix) name##_##suffix
#define GF_PASTE(name, suffix) GF_PASTE2(name, suffix)
#define GF_LEVEL(name) GF_PASTE(name, GF_SUFFIX)

#if defined(__GNUC__)
#define GF_EXPORT __attribute__((visibility("default")))
#define GF_INLINE static inline __attribute__((always_inline))
#endif

/* A struct that Python packs is a list of its fields, F(type, name) each: `gf_describe` in tasks.c makes a text of the same
 * list, which Python compares with its own before it uses the library. What the text cannot show, a new meaning in the same
 * place, has a new name: else a library of before would be taken for one of today. */
#define GF_MEMBER(type, name) type name;
#define GF_STRUCT(name, fields) typedef struct { fields(GF_MEMBER) } name

/* The widest vector of any level. */
enum { GF_CHANNELS = 16 };

enum gf_dtype { GF_FLOAT32 = 0, GF_BFLOAT16 = 1 };
enum gf_kind { GF_IDENTITY = 0, GF_CLAMP = 1, GF_LEAKY = 2, GF_HARDSWISH = 3, GF_SILU = 4 };

/* A map in memory and how it is cut into patches. */
#define GF_MAP_FIELDS(F)                                                                            \
    F(int64_t, n) F(int64_t, c) F(int64_t, h) F(int64_t, w)                                         \
    F(int64_t, ph) F(int64_t, pw)  /* the patch */                                                  \
    F(int32_t, channels_last)      /* memory order N, H, W, C instead of N, C, H, W */              \
    F(int32_t, dtype)              /* enum gf_dtype, of the map and of its patch means */
GF_STRUCT(gf_map, GF_MAP_FIELDS);

/* y = act(x * scale[c] + shift[c] + residual), with patch means and slopes of the activation. */
#define GF_NORM_ACT_FIELDS(F)                                                                                   \
    F(gf_map, map)                                                                                              \
    F(int32_t, kind)               /* enum gf_kind */                                                           \
    F(int32_t, count_bytes)        /* 1, 2 or 4: size of a count in `slope`; used by CLAMP and LEAKY */         \
    F(float, lo) F(float, hi) F(float, leak) /* bounds of CLAMP; slope of LEAKY below 0 */                      \
    F(int32_t, sums)               /* `mean` receives sums over patches instead */                              \
    F(const void *, x)                                                                                          \
    F(const void *, residual)      /* or NULL */                                                                \
    F(void *, y)                   /* may be x; or NULL: pool only */                                           \
    F(const float *, scale)        /* [C], or NULL for 1 */                                                     \
    F(const float *, shift)        /* [C], or NULL for 0 */                                                     \
    F(void *, mean)                /* [N, C, H', W'] in the map's dtype and memory order, or NULL */            \
    F(void *, slope)               /* shaped as `mean`: counts of steep pixels, or mean derivatives; or NULL */
GF_STRUCT(gf_norm_act, GF_NORM_ACT_FIELDS);

/* Bytes of scratch that a unit needs, the same for all units of a task. */
size_t gf_norm_act_scratch(const gf_norm_act *task);

/* Tell whether a unit is run row by row: a channels_last map with fewer channels than lanes leaves most of these idle,
 * and where all channels share one scale and shift its rows are one run of numbers. */
static inline int gf_runs_in_planes(const gf_norm_act *t) {
    return !t->map.channels_last || (t->map.c < 8 && !t->scale && !t->shift);
}

/* Run one unit: all channels of patch row `row` of image `image`. `scratch` is 64-byte aligned and the thread's own.
 * x and y are the whole maps' pointers; with x == y the rows that were just written are finished in place. */
typedef void gf_norm_act_unit(const gf_norm_act *task, int64_t image, int64_t row, void *scratch);

/* The transpose of pooling: every cell over its patch. */
#define GF_UNPOOL_FIELDS(F)                                                                         \
    F(gf_map, map)                                                                                  \
    F(const void *, cells) /* [N, C, H', W'] */                                                     \
    F(void *, y)           /* [N, C, H, W] */
GF_STRUCT(gf_unpool, GF_UNPOOL_FIELDS);

/* gx = g * (low + (high - low) * count / area), cell by cell: counts are the pixels of a patch on the piece of slope
 * `high`. */
#define GF_SLOPE_FIELDS(F)                                                                          \
    F(gf_map, map)               /* float32 */                                                      \
    F(const float *, g)          /* [N, C, H', W'] */                                               \
    F(const void *, counts)      /* the same shape and memory order */                              \
    F(float *, gx)                                                                                  \
    F(float, low) F(float, high)                                                                    \
    F(int64_t, count_bytes)      /* 1, 2 or 4 */
GF_STRUCT(gf_slope, GF_SLOPE_FIELDS);

/* Run row `row` of cells, counted over all images, and in NCHW memory over all channels. */
typedef void gf_slope_unit(const gf_slope *task, int64_t row);

/* The backward of a batch norm with fixed statistics, before the convolution in front of it: scale = gamma / sigma,
 * total = the sum of g over all rows, and either scaled = g * scale or folded = weight * scale. */
#define GF_NORM_BACK_FIELDS(F)                                                                      \
    F(int64_t, rows) F(int64_t, c)                                                                  \
    F(int64_t, k)                  /* weights of a channel */                                       \
    F(double, eps)                                                                                  \
    F(const float *, g)            /* [rows, C] */                                                  \
    F(const float *, gamma)        /* [C], or NULL for 1 */                                         \
    F(const float *, var)          /* [C] */                                                        \
    F(float *, scale) F(float *, total) /* [C] */                                                   \
    F(float *, scaled)             /* [rows, C], or NULL */                                         \
    F(const float *, weight)       /* [C, k], or NULL with folded */                                \
    F(float *, folded)             /* [C, k], or NULL */
GF_STRUCT(gf_norm_back, GF_NORM_BACK_FIELDS);

/* The same behind that convolution, where its weight has the gradient gw: of scaled g, or else it becomes gw * scale here.
 * Weights of a channel are [outer, inner] in memory, and `out` is like the weight; gw may have them in another order, or one
 * number for many. With gv = gw / scale, g_gamma = (<gv, weight> + (bias - mean) * total) / sigma and g_bias = total * scale. */
#define GF_NORM_END_FIELDS(F)                                                                              \
    F(int64_t, c) F(int64_t, outer) F(int64_t, inner) /* output channels, and weights of each */           \
    F(int64_t, channel_step) F(int64_t, outer_step) F(int64_t, inner_step) /* of gw, in floats */          \
    F(double, eps)                                                                                         \
    F(int64_t, is_scaled)                                                                                  \
    F(const float *, weight)       /* [C, outer, inner] */                                                 \
    F(const float *, bias)         /* [C], or NULL for 0 */                                                \
    F(const float *, mean) F(const float *, var) F(const float *, scale) F(const float *, total) /* [C] */ \
    F(const float *, gw)                                                                                   \
    F(float *, g_gamma) F(float *, g_bias) /* [C], or NULL */                                              \
    F(float *, out)                /* [C, outer, inner]; gw itself where that is in the same order */
GF_STRUCT(gf_norm_end, GF_NORM_END_FIELDS);

/* Channels of a unit of the first, all rows of them; the second has one unit per channel. */
enum { GF_NORM_BLOCK = 64 };
typedef void gf_norm_back_unit(const gf_norm_back *task, int64_t unit);
typedef void gf_norm_end_unit(const gf_norm_end *task, int64_t channel);

/* Batch normalisation with fixed statistics as x * scale + shift. */
#define GF_FOLD_FIELDS(F)                                                                           \
    F(const float *, gamma)        /* [C], or NULL for 1 */                                         \
    F(const float *, beta)         /* [C], or NULL for 0 */                                         \
    F(const float *, mean) F(const float *, var) /* [C] */                                          \
    F(double, eps)                                                                                  \
    F(int64_t, c)                                                                                   \
    F(float *, scale) F(float *, shift) /* [C] */
GF_STRUCT(gf_fold, GF_FOLD_FIELDS);

/* What a level of the instruction set has to offer. */
typedef struct {
    gf_norm_act_unit *norm_act;
    gf_slope_unit *slope;
    gf_norm_back_unit *norm_back;
    gf_norm_end_unit *norm_end;
} gf_kernels;

/* The number of the level in use, and its table. */
int gf_level(void);
const gf_kernels *gf_current(void);

/* Call run(argument, unit, scratch) for every unit in [0, units) on up to `threads` threads, the calling one included.
 * Each thread has `scratch_bytes` of its own. Returns 0, or -1 where there was no memory. */
typedef void gf_run(const void *argument, int64_t unit, void *scratch);
typedef void gf_team(void (*run)(void *), void *argument, unsigned threads, unsigned flags); /* OpenMP's GOMP_parallel */
void gf_set_team(gf_team *wanted);
int gf_parallel(gf_run *run, const void *argument, int64_t units, int threads, size_t scratch_bytes);

/* Take large memory that is used again, 64-byte aligned, NULL where there is none; give it back with its owner. */
void *gf_take_memory(size_t bytes, void **owner);
void gf_give_memory(void *memory, void *owner);

/* A tensor on such memory: what it is to be. */
typedef int64_t gf_axes[8];
#define GF_REQUEST_FIELDS(F)                                                                        \
    F(gf_axes, shape) F(gf_axes, strides) /* of the first `axes`; strides in numbers */             \
    F(int64_t, bytes)                                                                               \
    F(int32_t, axes)                                                                                \
    F(int32_t, code) F(int32_t, bits) /* the dtype, as DLPack has it */
GF_STRUCT(gf_request, GF_REQUEST_FIELDS);

/* Bytes of blocks: in use, kept free, and the most that were in use at once. */
#define GF_MEMORY_FIELDS(F)                                                                    \
    F(int64_t, used) F(int64_t, kept) F(int64_t, most)
GF_STRUCT(gf_memory, GF_MEMORY_FIELDS);

/* As many of `threads` as a call over `elements` numbers is worth. */
int gf_useful_threads(int threads, int64_t elements);

static inline int64_t gf_ceil_div(int64_t a, int64_t b) { return a / b + (a % b > 0); }

#endif
