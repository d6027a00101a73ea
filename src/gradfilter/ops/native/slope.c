/* The gradient of a piecewise linear activation at patch resolution, from the counts of its steep pixels. */
#include "vec.h"

/* Cells of one area. Where all of a patch is on a piece of slope 0, its gradient is 0 even if g is NaN or infinite: torch
 * does not multiply there. In a loop of its own, which compilers turn into vectors: a product they do not take on trial. */
#define RUN(type)                                                                                                     \
    static void run_##type(const float *g, const void *counts, float low, float rise, float *gx, int64_t cells) {     \
        const type *count = counts;                                                                                   \
        for (int64_t i = 0; i < cells; i++) gx[i] = g[i] * (low + rise * (float)count[i]);                            \
        if (low == 0)                                                                                                 \
            for (int64_t i = 0; i < cells; i++) gx[i] = count[i] ? gx[i] : 0;                                         \
    }
RUN(uint8_t)
RUN(int16_t)
RUN(int32_t)

void GF_LEVEL(gf_slope_row)(const gf_slope *t, int64_t row) {
    const gf_map *m = &t->map;
    const int64_t down = gf_ceil_div(m->h, m->ph), across = gf_ceil_div(m->w, m->pw), depth = m->channels_last ? m->c : 1;
    const int64_t height = gf_least(m->ph, m->h - row % down * m->ph), whole = m->w / m->pw;
    for (int64_t start = 0, end; start < across; start = end) { /* the whole patches, then a partial one */
        end = start < whole ? whole : across;
        const int64_t width = start < whole ? m->pw : m->w - whole * m->pw, at = (row * across + start) * depth;
        const float rise = (t->high - t->low) / (float)(height * width);
        const void *counts = (const char *)t->counts + at * t->count_bytes;
        (t->count_bytes == 1   ? run_uint8_t
         : t->count_bytes == 2 ? run_int16_t
                               : run_int32_t)(t->g + at, counts, t->low, rise, t->gx + at, (end - start) * depth);
    }
}
