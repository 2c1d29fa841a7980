/* SPDX-License-Identifier: Apache-2.0
 * Causal attention in plain loops, the way small C trainers write it: what `./dev bench --cpu` measures heddle against.
 *
 * qkv is [b, t, 3c] with q, k and v side by side, c = heads * d; out is [b, t, c]; preatt and att, the scores before and
 * after softmax, are kept as [b, heads, t, t]. Forward is parallel over batch, head and query; backward is serial and
 * adds to its gradients, which begin as zeros. */
#include <math.h>
#include <stdint.h>

static void forward_row(float *out, float *pre, float *att, const float *qkv, int64_t b, int64_t t, int64_t h,
                        int64_t steps, int64_t c, int64_t d) {
    const float scale = 1.0F / sqrtf((float)d);
    const float *query = qkv + (b * steps + t) * 3 * c + h * d;
    float most = -1e30F;
    for (int64_t u = 0; u <= t; u++) {
        const float *key = qkv + (b * steps + u) * 3 * c + c + h * d;
        float dot = 0;
        for (int64_t i = 0; i < d; i++)
            dot += query[i] * key[i];
        pre[u] = dot * scale;
        if (pre[u] > most)
            most = pre[u];
    }
    float sum = 0;
    for (int64_t u = 0; u <= t; u++) {
        att[u] = expf(pre[u] - most);
        sum += att[u];
    }
    for (int64_t u = 0; u < steps; u++)
        att[u] = u <= t ? att[u] / sum : 0;
    float *to = out + (b * steps + t) * c + h * d;
    for (int64_t i = 0; i < d; i++)
        to[i] = 0;
    for (int64_t u = 0; u <= t; u++) {
        const float *value = qkv + (b * steps + u) * 3 * c + 2 * c + h * d;
        for (int64_t i = 0; i < d; i++)
            to[i] += att[u] * value[i];
    }
}

void naive_forward(float *out, float *preatt, float *att, const float *qkv, int64_t batch, int64_t steps, int64_t c,
                   int64_t heads) {
#pragma omp parallel for collapse(3)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < steps; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t row = ((b * heads + h) * steps + t) * steps;
                forward_row(out, preatt + row, att + row, qkv, b, t, h, steps, c, c / heads);
            }
}

/* The whole Jacobian of softmax, element by element: t² for a row, t³ for a head. */
static void softmax_backward(float *dpre, const float *datt, const float *att, int64_t t) {
    for (int64_t u = 0; u <= t; u++)
        for (int64_t w = 0; w <= t; w++)
            dpre[w] += att[u] * ((u == w ? 1.0F : 0.0F) - att[w]) * datt[u];
}

/* The same by its closed form: t for a row. */
static void softmax_backward_linear(float *dpre, const float *datt, const float *att, int64_t t) {
    float sum = 0;
    for (int64_t u = 0; u <= t; u++)
        sum += att[u] * datt[u];
    for (int64_t u = 0; u <= t; u++)
        dpre[u] += att[u] * (datt[u] - sum);
}

static void backward_row(float *dqkv, float *dpre, float *datt, const float *dout, const float *qkv, const float *att,
                         int64_t b, int64_t t, int64_t h, int64_t steps, int64_t c, int64_t d, int linear) {
    const float scale = 1.0F / sqrtf((float)d);
    const float *from = dout + (b * steps + t) * c + h * d;
    for (int64_t u = 0; u <= t; u++) {
        const float *value = qkv + (b * steps + u) * 3 * c + 2 * c + h * d;
        float *dvalue = dqkv + (value - qkv);
        for (int64_t i = 0; i < d; i++) {
            datt[u] += value[i] * from[i];
            dvalue[i] += att[u] * from[i];
        }
    }
    (linear ? softmax_backward_linear : softmax_backward)(dpre, datt, att, t);
    const float *query = qkv + (b * steps + t) * 3 * c + h * d;
    float *dquery = dqkv + (query - qkv);
    for (int64_t u = 0; u <= t; u++) {
        const float *key = qkv + (b * steps + u) * 3 * c + c + h * d;
        float *dkey = dqkv + (key - qkv);
        for (int64_t i = 0; i < d; i++) {
            dquery[i] += key[i] * dpre[u] * scale;
            dkey[i] += query[i] * dpre[u] * scale;
        }
    }
}

void naive_backward(float *dqkv, float *dpreatt, float *datt, const float *dout, const float *qkv, const float *att,
                    int64_t batch, int64_t steps, int64_t c, int64_t heads, int linear) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < steps; t++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t row = ((b * heads + h) * steps + t) * steps;
                backward_row(dqkv, dpreatt + row, datt + row, dout, qkv, att + row, b, t, h, steps, c, c / heads,
                             linear);
            }
}
