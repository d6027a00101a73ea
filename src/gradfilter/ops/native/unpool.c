/* Every cell over its patch. */
#include <string.h>

#include "tasks.h"

/* Repeat each of `cells` items of `bytes` bytes `pw` times, up to `width` items. */
static void repeat(const char *from, char *to, int64_t width, int64_t pw, size_t bytes) {
    if (bytes == 4)
        for (int64_t i = 0, cell = 0; i < width; cell++)
            for (int64_t end = i + pw < width ? i + pw : width; i < end; i++) memcpy(to + 4 * i, from + 4 * cell, 4);
    else if (bytes == 2)
        for (int64_t i = 0, cell = 0; i < width; cell++)
            for (int64_t end = i + pw < width ? i + pw : width; i < end; i++) memcpy(to + 2 * i, from + 2 * cell, 2);
    else
        for (int64_t i = 0; i < width; i++) memcpy(to + (size_t)i * bytes, from + (size_t)(i / pw) * bytes, bytes);
}

/* One row of cells [cells, depth] over `rows` rows of pixels [w, depth]. */
static void spread(const gf_unpool *t, const char *from, char *to, int64_t rows, int64_t depth) {
    const gf_map *m = &t->map;
    const size_t item = m->dtype == GF_BFLOAT16 ? 2 : 4;
    const size_t row = (size_t)(m->w * depth) * item;
    repeat(from, to, m->w, m->pw, (size_t)depth * item);
    for (int64_t r = 1; r < rows; r++) memcpy(to + (size_t)r * row, to, row);
}

static void run_unpool(const void *argument, int64_t unit, void *scratch) {
    (void)scratch;
    const gf_unpool *t = argument;
    const gf_map *m = &t->map;
    const size_t item = m->dtype == GF_BFLOAT16 ? 2 : 4;
    const int64_t down = gf_ceil_div(m->h, m->ph), across = gf_ceil_div(m->w, m->pw);
    const int64_t depth = m->channels_last ? m->c : 1, row = unit % down, plane = unit / down;
    const int64_t left = m->h - row * m->ph, rows = left < m->ph ? left : m->ph;
    const char *from = (const char *)t->cells + (size_t)(unit * across * depth) * item;
    char *to = (char *)t->y + (size_t)((plane * m->h + row * m->ph) * m->w * depth) * item;
    spread(t, from, to, rows, depth);
}

int gf_unpool_map(const gf_unpool *task, int threads) {
    const gf_map *m = &task->map;
    const int64_t planes = m->channels_last ? m->n : m->n * m->c;
    threads = gf_useful_threads(threads, m->n * m->c * m->h * m->w);
    return gf_parallel(run_unpool, task, planes * gf_ceil_div(m->h, m->ph), threads, 0);
}
