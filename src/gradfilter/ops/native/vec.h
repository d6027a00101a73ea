/* Vectors of floats as wide as the level's registers, in the compiler's own types, and how the convolutions use memory. */
#ifndef GF_VEC_H
#define GF_VEC_H

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <xmmintrin.h>
#endif

#if defined(__AVX512F__)
#define GF_LANES 16
#define GF_MAX _mm512_max_ps
#define GF_MIN _mm512_min_ps
#define GF_STREAM _mm512_stream_ps
#elif defined(__AVX__)
#define GF_LANES 8
#define GF_MAX _mm256_max_ps
#define GF_MIN _mm256_min_ps
#define GF_STREAM _mm256_stream_ps
#else
#define GF_LANES 4
#define GF_MAX _mm_max_ps
#define GF_MIN _mm_min_ps
#endif

typedef float gf_vec __attribute__((vector_size(4 * GF_LANES)));
typedef int32_t gf_ints __attribute__((vector_size(4 * GF_LANES)));

GF_INLINE gf_vec gf_load(const float *from) {
    gf_vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

GF_INLINE void gf_store(float *to, gf_vec value) { memcpy(to, &value, sizeof value); }

GF_INLINE gf_vec gf_choose(gf_ints mask, gf_vec yes, gf_vec no) {
    return (gf_vec)((mask & (gf_ints)yes) | (~mask & (gf_ints)no));
}

/* The value held between two bounds; NaN stays NaN. */
GF_INLINE gf_vec gf_hold(gf_vec value, gf_vec lo, gf_vec hi) {
#if defined(__SSE2__)
    return (gf_vec)GF_MIN(hi, GF_MAX(lo, value)); /* of two numbers that do not compare, the second */
#else
    value = gf_choose(value < lo, lo, value);
    return gf_choose(value > hi, hi, value);
#endif
}

/* Write past the caches, a vector at its own alignment; the fence orders such writes before what follows. */
#if GF_LANES >= 8
#define GF_CAN_STREAM 1
GF_INLINE void gf_stream(float *to, gf_vec value) { GF_STREAM(to, value); }
GF_INLINE void gf_fence(void) { _mm_sfence(); }
#else
#define GF_CAN_STREAM 0
GF_INLINE void gf_stream(float *to, gf_vec value) { gf_store(to, value); }
GF_INLINE void gf_fence(void) {}
#endif

/* Bytes from which on a map does not stay in any cache until it is read again. */
enum { GF_STREAMED = 1 << 23 };

/* Tell whether a map of floats is written past the caches: larger than they are, and whole cache lines per pixel. */
GF_INLINE int gf_is_streamed(const gf_map *m, const void *y) {
    const int64_t bytes = m->n * m->c * m->h * m->w * (int64_t)sizeof(float);
    return GF_CAN_STREAM && bytes >= GF_STREAMED && m->c % 16 == 0 && (uintptr_t)y % 64 == 0;
}

/* Write a vector of counts as integers of 1, 2 or 4 bytes, the vector's first at index `at`. */
GF_INLINE void gf_put_counts(void *to, int64_t at, gf_ints count, int bytes) {
    if (bytes == 1) {
        typedef uint8_t small __attribute__((vector_size(GF_LANES)));
        const small narrow = __builtin_convertvector(count, small);
        memcpy((uint8_t *)to + at, &narrow, sizeof narrow);
    } else if (bytes == 2) {
        typedef int16_t small __attribute__((vector_size(2 * GF_LANES)));
        const small narrow = __builtin_convertvector(count, small);
        memcpy((int16_t *)to + at, &narrow, sizeof narrow);
    } else {
        memcpy((int32_t *)to + at, &count, sizeof count);
    }
}

/* Where vector i of `channels` numbers begins: the last one overlaps the one before it. */
GF_INLINE int64_t gf_vec_start(int64_t i, int64_t channels) {
    const int64_t start = i * GF_LANES;
    return start + GF_LANES <= channels ? start : channels - GF_LANES;
}

GF_INLINE int64_t gf_least(int64_t a, int64_t b) { return a < b ? a : b; }
GF_INLINE int64_t gf_most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes of so many floats, in whole cache lines. */
GF_INLINE size_t gf_float_bytes(int64_t floats) { return ((size_t)floats * sizeof(float) + 63) / 64 * 64; }

#endif
