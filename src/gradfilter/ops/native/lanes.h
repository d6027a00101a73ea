/* Arithmetic on LANES numbers at once, in the compiler's own vectors. Included once per width: no include guard. */
#define L(name) GF_PASTE(name, LANES)

typedef float L(vf) __attribute__((vector_size(4 * LANES)));
typedef int32_t L(vi) __attribute__((vector_size(4 * LANES)));
typedef uint32_t L(vu) __attribute__((vector_size(4 * LANES)));
typedef uint16_t L(vh) __attribute__((vector_size(2 * LANES)));

GF_INLINE L(vf) L(load_float)(const float *p) {
    L(vf) v;
    memcpy(&v, p, sizeof v);
    return v;
}

GF_INLINE void L(store_float)(float *p, L(vf) v) { memcpy(p, &v, sizeof v); }

/* Minus zero keeps the sign of a zero. */
GF_INLINE L(vf) L(splat)(float v) { return v - (L(vf)){0}; }

GF_INLINE L(vf) L(load)(const void *p, int64_t at, const int dtype) {
    if (dtype == GF_FLOAT32) return L(load_float)((const float *)p + at);
    L(vh) half;
    memcpy(&half, (const uint16_t *)p + at, sizeof half);
    return (L(vf))(__builtin_convertvector(half, L(vu)) << 16);
}

GF_INLINE L(vf) L(choose)(L(vi) mask, L(vf) yes, L(vf) no) {
    return (L(vf))((mask & (L(vi))yes) | (~mask & (L(vi))no));
}

/* Store v and return it as stored: pooled outputs are of the numbers that the next layer reads. */
GF_INLINE L(vf) L(store)(void *p, int64_t at, L(vf) v, const int dtype) {
    if (dtype == GF_FLOAT32) {
        L(store_float)((float *)p + at, v);
        return v;
    }
    L(vu) bits = (L(vu))v;
    L(vu) nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    L(vu) nan = (L(vu))(v != v);
    nearest = (nan & 0x7fc0) | (~nan & nearest);
    L(vh) half = __builtin_convertvector(nearest, L(vh));
    memcpy((uint16_t *)p + at, &half, sizeof half);
    return (L(vf))(nearest << 16);
}

GF_INLINE void L(prefetch)(const void *p, int64_t at, const int dtype, const int write) {
    const char *line = (const char *)((uintptr_t)p + (uintptr_t)at * (dtype == GF_FLOAT32 ? 4 : 2));
    if (write)
        __builtin_prefetch(line, 1);
    else
        __builtin_prefetch(line, 0);
}

/* exp(x): 2^n times a polynomial in the rest of x, |rest| <= ln(2)/2. Relative error below 2e-7. */
GF_INLINE L(vf) L(exponential)(L(vf) x) {
    L(vf) held = L(choose)(x < -87.33654f, L(splat)(-87.33654f), x);
    held = L(choose)(held > 88.02f, L(splat)(88.02f), held);
    held = L(choose)(x == x, held, L(splat)(0));
    /* Adding 1.5 * 2^23 rounds to the nearest integer. */
    L(vf) shifted = held * 1.44269504f + 12582912.0f;
    L(vi) power = (L(vi))shifted - 0x4b400000;
    L(vf) whole = shifted - 12582912.0f;
    L(vf) rest = held - whole * 0.693145752f - whole * 1.42860677e-6f;
    L(vf) sum = rest * (1.0f / 720) + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    L(vf) y = sum * (L(vf))((power + 127) << 23);
    y = L(choose)(x > 88.02f, L(splat)(__builtin_inff()), y);
    y = L(choose)(x < -87.33654f, L(splat)(0), y);
    return L(choose)(x == x, y, x);
}

/* The activation of z; `share` receives its derivative (HARDSWISH, SILU). */
GF_INLINE L(vf) L(activate)(L(vf) z, const strip *s, const int kind, L(vf) *share) {
    if (kind == GF_CLAMP) {
        z = L(choose)(z < s->lo, L(splat)(s->lo), z);
        return L(choose)(z > s->hi, L(splat)(s->hi), z);
    }
    if (kind == GF_LEAKY) return L(choose)(z > 0, z, z * s->leak);
    if (kind == GF_HARDSWISH) {
        L(vf) gate = L(choose)(z < -3, L(splat)(0), z + 3);
        gate = L(choose)(z > 3, L(splat)(6), gate);
        *share = L(choose)(z >= 3, L(splat)(1), z * (1.0f / 3) + 0.5f);
        *share = L(choose)(z <= -3, L(splat)(0), *share);
        return z * gate / 6.0f; /* torch's own rounding */
    }
    if (kind == GF_SILU) {
        L(vf) below = 1 + L(exponential)(-z);
        L(vf) gate = 1 / below;
        *share = gate * (1 + z * (1 - gate));
        return z / below;
    }
    return z;
}

/* Run as many whole vectors of one cell as there are from element `i`; return where it stopped. */
GF_INLINE int64_t L(run_cell)(const strip *s, int64_t cell, int64_t i, const int kind, const int dtype, const int residual) {
    const int steps = kind == GF_CLAMP || kind == GF_LEAKY;
    const int64_t from = cell * s->count * s->stride, to = cell * s->width;
    for (; i + LANES <= s->width; i += LANES) {
        const L(vf) scale = s->scales ? L(load_float)(s->scales + i) : L(splat)(s->scale);
        const L(vf) shift = s->shifts ? L(load_float)(s->shifts + i) : L(splat)(s->shift);
        L(vf) sum = {0}, slope = {0};
        L(vi) count = {0};
        for (int64_t k = 0, at = from + i; k < s->count; k++, at += s->stride) {
            L(vf) share = {0};
            L(prefetch)(s->x, at + s->ahead, dtype, 0);
            if (s->y && s->y != s->x) L(prefetch)(s->y, at + s->ahead, dtype, 1);
            if (residual) L(prefetch)(s->residual, at + s->ahead, dtype, 0);
            L(vf) z = L(load)(s->x, at, dtype) * scale + shift;
            if (residual) z += L(load)(s->residual, at, dtype);
            L(vf) y = L(activate)(z, s, kind, &share);
            if (s->y) y = L(store)(s->y, at, y, dtype);
            sum += y;
            /* A comparison that holds is -1. NaN is steep between bounds and flat below a leaky kink, as in torch. A bound that
             * is rounded to half precision may lie between the bounds: y alone does not tell. */
            if (kind == GF_LEAKY)
                count += ~(y > 0);
            else if (kind == GF_CLAMP)
                count += dtype == GF_FLOAT32 ? (y <= s->flat_to) | (y >= s->flat_from)
                                             : (y <= s->flat_to) | (y >= s->flat_from) | (z <= s->flat_to) | (z >= s->flat_from);
            else
                slope += share;
        }
        if (!s->sums) continue;
        if (steps) slope = __builtin_convertvector(count + (int32_t)s->count, L(vf));
        if (!s->first) {
            sum += L(load_float)(s->sums + to + i);
            slope += L(load_float)(s->slopes + to + i);
        }
        L(store_float)(s->sums + to + i, sum);
        L(store_float)(s->slopes + to + i, slope);
    }
    return i;
}

#undef L
#undef LANES
