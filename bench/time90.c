/* SPDX-License-Identifier: Apache-2.0
 * Times the forward of both families and compares their results: b,h,hk,s,d,causal(0|1|2),type(b|h)[,window] ... . The sm80 family is
 * reached by an o that is not aligned. gcc -O2 -Iinclude -I. bench/time90.c tools/device_memory.c build/libheddle.a -fopenmp -ldl -lm */
#define _POSIX_C_SOURCE 200809L
#include "heddle.h"
#include "tools/device_memory.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int (*ev_create)(void **, unsigned), (*ev_record)(void *, void *), (*ev_sync)(void *),
    (*ev_time)(float *, void *, void *);
#define GET(f, s)                                                                                                      \
    do {                                                                                                               \
        void *a = device_memory_driver(s);                                                                             \
        memcpy(&f, &a, sizeof a);                                                                                      \
    } while (0)
static uint64_t st = 88172645463325252ull;
static double uni(void) {
    st ^= st << 13;
    st ^= st >> 7;
    st ^= st << 17;
    return (double)(st >> 11) * 0x1p-53;
}
static float tof(uint16_t x, int f16) {
    if (!f16) {
        uint32_t u = (uint32_t)x << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    int e = x >> 10 & 31, m = x & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return (float)(x >> 15 ? -v : v);
}
static uint16_t from(float f, int f16) {
    if (!f16) {
        uint32_t u;
        memcpy(&u, &f, 4);
        return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    int e;
    double m = frexp(fabs(f), &e);
    if (f == 0)
        return 0;
    if (e < -13)
        return 0;
    int mm = (int)rint(ldexp(m, 11));
    if (mm == 2048) {
        mm = 1024;
        e++;
    }
    return (uint16_t)((f < 0) << 15 | (e + 14) << 10 | (mm & 1023));
}
static void *filled(size_t n, int f16) {
    enum { B = 1 << 20 };
    uint16_t *h = malloc(B * 2);
    for (int x = 0; x < B; x++)
        h[x] = from((float)(sqrt(-2 * log(uni() + 1e-300)) * cos(6.283185307 * uni())), f16);
    char *d = device_memory_new(n * 2 + 64);
    for (size_t at = 0; at < n; at += B)
        device_memory_copy(d + at * 2, h, (n - at < B ? n - at : B) * 2);
    free(h);
    return d;
}
static double run(heddle_attention *a, heddle_attention_data *t, void *ws, size_t bytes, double flop) {
    void *e0, *e1;
    float ms = 0;
    ev_create(&e0, 0);
    ev_create(&e1, 0);
    heddle_status s = heddle_attention_forward(a, t, ws, bytes, NULL);
    if (s) {
        printf("FAILED %s %s\n", heddle_status_string(s), heddle_last_message());
        return -1;
    }
    if (!device_memory_wait()) {
        printf("ERROR %s\n", device_memory_error());
        exit(1);
    }
    int reps = (int)fmin(200, fmax(5, 0.012 / (flop / 450e12)));
    for (int x = 0; x < reps / 3 + 1; x++)
        heddle_attention_forward(a, t, ws, bytes, NULL);
    ev_record(e0, NULL);
    for (int x = 0; x < reps; x++)
        heddle_attention_forward(a, t, ws, bytes, NULL);
    ev_record(e1, NULL);
    ev_sync(e1);
    ev_time(&ms, e0, e1);
    return ms / reps;
}
int main(int argc, char **argv) {
    device_memory_free(device_memory_new(1));
    GET(ev_create, "cuEventCreate");
    GET(ev_record, "cuEventRecord");
    GET(ev_sync, "cuEventSynchronize");
    GET(ev_time, "cuEventElapsedTime");
    /* b h hk s d causal dtype(b|h) [window] */
    for (int x = 1; x < argc; x++) {
        int b, h, hk, s, d, c, w = -1;
        char ty;
        if (sscanf(argv[x], "%d,%d,%d,%d,%d,%d,%c,%d", &b, &h, &hk, &s, &d, &c, &ty, &w) < 7)
            continue;
        size_t nq = (size_t)b * h * s * d, nk = (size_t)b * hk * s * d;
        heddle_attention a = {.size = sizeof a,
                              .device = HEDDLE_CUDA,
                              .dtype = ty == 'h' ? HEDDLE_F16 : HEDDLE_BF16,
                              .b = b,
                              .h = h,
                              .hk = hk,
                              .sq = s,
                              .sk = s,
                              .d = d,
                              .mask = c == 2 ? HEDDLE_CAUSAL_TOP_LEFT
                                      : c    ? HEDDLE_CAUSAL_BOTTOM_RIGHT
                                             : HEDDLE_MASK_NONE};
        a.q_stride = a.o_stride = (heddle_strides){(int64_t)s * h * d, d, (int64_t)h * d};
        a.k_stride = a.v_stride = (heddle_strides){(int64_t)s * hk * d, d, (int64_t)hk * d};
        if (w >= 0) {
            a.features |= HEDDLE_WINDOW;
            a.window_left = w;
            a.window_right = c ? 0 : w;
        }
        int f16 = ty == 'h';
        char *q = filled(nq, f16), *k = filled(nk + 64, f16), *v = filled(nk + 8, f16);
        char *o = device_memory_new(nq * 2 + 64), *o2 = device_memory_new(nq * 2 + 64),
             *lse = device_memory_new(nq / d * 4), *lse2 = device_memory_new(nq / d * 4);
        size_t bytes = 0;
        char name[128] = "";
        heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes);
        heddle_attention_kernel(&a, HEDDLE_FORWARD, name, sizeof name);
        void *ws = device_memory_new(bytes);
        double flop = 4.0 * b * h * (double)s * s * d * (c ? 0.5 : 1);
        heddle_attention_data t = {.size = sizeof t, .q = q, .k = k, .v = v, .o = o, .lse = lse}, u = t;
        u.o = o2 + 2;
        u.lse = lse2;
        double t1 = run(&a, &t, ws, bytes, flop), t2 = run(&a, &u, ws, bytes, flop);
        uint16_t *x1 = malloc(nq * 2), *x2 = malloc(nq * 2);
        float *l1 = malloc(nq / d * 4), *l2 = malloc(nq / d * 4);
        device_memory_copy(x1, o, nq * 2);
        device_memory_copy(x2, o2 + 2, nq * 2);
        device_memory_copy(l1, lse, nq / d * 4);
        device_memory_copy(l2, lse2, nq / d * 4);
        double worst = 0, top = 0, wl = 0;
        size_t bad = 0;
        for (size_t i = 0; i<nq; i += nq> 4000000 ? 7 : 1) {
            double e = fabs(tof(x1[i], f16) - tof(x2[i], f16)), m = fabs(tof(x2[i], f16));
            if (!(e <= 1e-2 * m + 4e-3))
                bad++;
            if (e > worst || e != e)
                worst = e;
            if (m > top)
                top = m;
        }
        for (size_t i = 0; i < nq / d; i++) {
            double e = fabs(l1[i] - l2[i]);
            if (e > wl || e != e)
                wl = e;
        }
        printf("%-26s %7.4f ms %6.1f TF | sm80 %7.4f ms %6.1f TF | x%.2f | diff o %.4g of %.3g (%zu bad) lse %.3g %s\n",
               argv[x], t1, flop / t1 * 1e-9, t2, flop / t2 * 1e-9, t2 / t1, worst, top, bad, wl,
               strstr(name, "sm90") ? "sm90" : name);
        fflush(stdout);
        device_memory_free(q);
        device_memory_free(k);
        device_memory_free(v);
        device_memory_free(o);
        device_memory_free(o2);
        device_memory_free(lse);
        device_memory_free(lse2);
        device_memory_free(ws);
        free(x1);
        free(x2);
        free(l1);
        free(l2);
    }
    return 0;
}
