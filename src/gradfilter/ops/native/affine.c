/* The backward of a batch norm with fixed statistics: what it does to the gradient and to the kernel in front of it. */
#include <math.h>

#include "vec.h"

/* Rows, or weights, that are added up in single precision before they are added to a total in double. */
enum { RUN = 32 };

void GF_LEVEL(gf_norm_back_block)(const gf_norm_back *t, int64_t unit) {
    const int64_t first = unit * GF_NORM_BLOCK, width = gf_least(GF_NORM_BLOCK, t->c - first);
    float scale[GF_NORM_BLOCK];
    double total[GF_NORM_BLOCK] = {0};
    for (int64_t i = 0; i < width; i++)
        scale[i] = (float)((t->gamma ? t->gamma[first + i] : 1.0) / sqrt((double)t->var[first + i] + t->eps));
    for (int64_t row = 0; row < t->rows; row += RUN) {
        const int64_t end = gf_least(t->rows, row + RUN);
        float sum[GF_NORM_BLOCK] = {0};
        for (int64_t r = row; r < end; r++) {
            const float *g = t->g + r * t->c + first;
            for (int64_t i = 0; i < width; i++) sum[i] += g[i];
            if (!t->scaled) continue;
            float *scaled = t->scaled + r * t->c + first;
            for (int64_t i = 0; i < width; i++) scaled[i] = g[i] * scale[i];
        }
        for (int64_t i = 0; i < width; i++) total[i] += sum[i];
    }
    for (int64_t i = 0; i < width; i++) {
        t->scale[first + i] = scale[i];
        t->total[first + i] = (float)total[i];
        if (!t->folded) continue;
        const float *weight = t->weight + (first + i) * t->k;
        float *folded = t->folded + (first + i) * t->k;
        for (int64_t j = 0; j < t->k; j++) folded[j] = weight[j] * scale[i];
    }
}

/* Copy the gradients of a channel's weights to where and as the weights' own memory has them. */
static void copy_channel(const gf_norm_end *t, const float *from, float *to) {
    for (int64_t i = 0; i < t->outer; i++, from += t->outer_step, to += t->inner)
        for (int64_t j = 0; j < t->inner; j++) to[j] = from[j * t->inner_step];
}

void GF_LEVEL(gf_norm_end_channel)(const gf_norm_end *t, int64_t channel) {
    const int64_t count = t->outer * t->inner;
    const float *weight = t->weight + channel * count;
    float *gw = t->out + channel * count;
    if (t->gw != t->out) copy_channel(t, t->gw + channel * t->channel_step, gw);
    const float scale = t->scale[channel];
    const double inverse = 1 / sqrt((double)t->var[channel] + t->eps), total = t->total[channel];
    double along = 0;
    if (t->g_gamma) {
        for (int64_t from = 0; from < count; from += RUN * GF_LANES) {
            const int64_t end = gf_least(count, from + RUN * GF_LANES);
            float lanes[GF_LANES] = {0};
            int64_t i = from;
            for (; i + GF_LANES <= end; i += GF_LANES)
                for (int l = 0; l < GF_LANES; l++) lanes[l] += gw[i + l] * weight[i + l];
            for (; i < end; i++) lanes[0] += gw[i] * weight[i];
            for (int l = 0; l < GF_LANES; l++) along += lanes[l];
        }
        if (t->is_scaled) along /= scale;
        const double offset = (t->bias ? t->bias[channel] : 0.0) - t->mean[channel];
        t->g_gamma[channel] = (float)((along + offset * total) * inverse);
    }
    if (t->g_bias) t->g_bias[channel] = (float)(total * scale);
    if (!t->is_scaled)
        for (int64_t i = 0; i < count; i++) gw[i] *= scale;
}
