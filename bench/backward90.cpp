/* SPDX-License-Identifier: Apache-2.0
 * Draft, never run: the backward kernels for Hopper against float64 and by the clock, without the library. list.h: lines
 * DKDV(name, T, D, BLOCK, SLOTS, PLAIN) and DQ(name, T, D, BLOCK, SLOTS), with which attention_bwd_sm90.cu is compiled to a cubin (-DBWD_LIST=...). */
#include <cuda.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <string>
#include <algorithm>
#include "../src/cuda/attention_params.h"
using std::vector;
#define CU(x) do { CUresult e_ = (x); if (e_) { const char *n; cuGetErrorName(e_, &n); printf("%s:%d %s -> %s\n", __FILE__, __LINE__, #x, n); fflush(stdout); _exit(3); } } while (0)
struct maps { CUtensorMap q, k, v, dout; };
struct all_params { maps m; attention_params p; };
static_assert(sizeof(all_params) < 4096, "");
static CUmodule mod; static int sms = 132; static const char *only_pass = 0;
static uint64_t seed = 1;
static double rnd() { seed = seed * 6364136223846793005ull + 1442695040888963407ull; return (double)(seed >> 11) / 9007199254740992.0; }
static double gauss() { return sqrt(-2 * log(rnd() + 1e-300)) * cos(6.283185307179586 * rnd()); }
static uint16_t to16(double x, bool f16) {
    float f = (float)x; uint32_t u; memcpy(&u, &f, 4);
    if (!f16) { if (x != x) return 0x7fc0; return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16); }
    _Float16 h = (_Float16)f; uint16_t r; memcpy(&r, &h, 2); return r;
}
static double from16(uint16_t b, bool f16) {
    if (f16) { _Float16 h; memcpy(&h, &b, 2); return (double)h; }
    uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f;
}
struct kernel { const char *pass, *dtype; int d, block, slots; const char *name; };
static kernel kernels[] = {
#define DKDV(name, T, D, BLOCK, SLOTS, ...) {"dkdv", #T, D, BLOCK, SLOTS, #name},
#define DQ(name, T, D, BLOCK, SLOTS) {"dq", #T, D, BLOCK, SLOTS, #name},
#include "list.h"
};
static int shared_of(const kernel &k) {
    int dk = !strcmp(k.pass, "dkdv");
    return 2 * 128 * k.d * 2 + k.slots * (k.block * k.d * 2 + (dk ? 3 : 1) * k.block * 4 + 16) + 16;
}
static CUdeviceptr up(const void *p, size_t n) { CUdeviceptr d; CU(cuMemAlloc(&d, n + 256)); if (p) CU(cuMemcpyHtoD(d, p, n)); return d; }
static CUtensorMap encode(CUdeviceptr at, int d, int64_t rows, int64_t h, int64_t b, heddle_strides s, bool f16) {
    CUtensorMap m; cuuint64_t dims[4] = {(cuuint64_t)d, (cuuint64_t)rows, (cuuint64_t)h, (cuuint64_t)b};
    cuuint64_t st[3] = {(cuuint64_t)s.s * 2, (cuuint64_t)s.h * 2, (cuuint64_t)s.b * 2}; cuuint32_t box[4] = {64, 64, 1, 1}, one[4] = {1, 1, 1, 1};
    CU(cuTensorMapEncodeTiled(&m, f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)at, dims, st, box, one,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return m;
}
static void launch(const kernel &k, all_params &a, int64_t tiles, bool persist) {
    CUfunction f; CU(cuModuleGetFunction(&f, mod, k.name));
    CU(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_of(k)));
    void *args[] = {&a};
    int64_t grid = persist ? std::min<int64_t>(tiles, sms) : tiles; if (k.d == 256 && !strcmp(k.pass, "dkdv")) grid = std::max<int64_t>(2, grid);
    CU(cuLaunchKernel(f, (unsigned)grid, 1, 1, 384, 1, 1, (unsigned)shared_of(k), 0, args, 0));
}
struct test { const char *name; int b, h, hk, sq, sk, d, dv; int mask; int left, right; bool varlen, lens, nan; };
static double worst(const char *what, const char *kn, const vector<uint16_t> &got, const vector<double> &ref, bool f16, int heads, int dim) {
    double scale = 0, err = 0; size_t bad = 0, first = ~(size_t)0;
    for (double x : ref) scale = std::max(scale, fabs(x));
    double tol = scale * (f16 ? 0.004 : 0.02) + 1e-6;
    for (size_t i = 0; i < ref.size(); i++) {
        double g = from16(got[i], f16), e = fabs(g - ref[i]);
        if (!(e <= tol)) { if (first == ~(size_t)0) first = i; bad++; }
        if (e == e) err = std::max(err, e);
    }
    printf("   %-10s %-3s err/max %.2e %s", kn, what, err / (scale + 1e-30), bad ? "WRONG" : "ok");
    if (bad) {
        printf(" %zu of %zu, first (row %zu head %zu col %zu) got %g want %g;", bad, ref.size(), first / dim / heads, first / dim % heads, first % dim, from16(got[first], f16), ref[first]);
        for (size_t i = first / dim * dim; i < first / dim * dim + 8; i++) printf(" %g/%g", from16(got[i], f16), ref[i]);
    }
    printf("\n");
    return bad;
}
static void run_test(const test &t, bool f16) {
    int wrong = 0;
    bool any = false; for (auto &k : kernels) any |= k.d == (std::max(t.d, t.dv) <= 64 ? 64 : std::max(t.d, t.dv) <= 128 ? 128 : 256) && !strcmp(k.dtype, f16 ? "f16" : "bf16");
    if (!any) return;
    printf("%s %s b%d h%d/%d s%dx%d d%d/%d\n", t.name, f16 ? "f16" : "bf16", t.b, t.h, t.hk, t.sq, t.sk, t.d, t.dv);
    vector<int> lq(t.b), lk(t.b), cq(t.b + 1), ck(t.b + 1), uq, uk;
    for (int n = 0; n < t.b; n++) {
        lq[n] = t.varlen ? (n == 1 ? 0 : t.sq - 31 * n) : t.sq; lk[n] = t.varlen ? (n == 2 ? 0 : t.sk - 17 * n) : t.sk;
        cq[n + 1] = cq[n] + lq[n]; ck[n + 1] = ck[n] + lk[n];
    }
    if (t.lens) { uq = lq; uk = lk; for (int n = 0; n < t.b; n++) { uq[n] = std::max(0, lq[n] - 13 - 7 * n); uk[n] = std::max(0, lk[n] - 41 - 5 * n); } }
    int64_t rq = t.varlen ? cq[t.b] : (int64_t)t.b * t.sq, rk = t.varlen ? ck[t.b] : (int64_t)t.b * t.sk;
    auto fill = [&](int64_t rows, int heads, int dim) { vector<uint16_t> v((size_t)rows * heads * dim); for (auto &x : v) x = to16(gauss(), f16); return v; };
    vector<uint16_t> q = fill(rq, t.h, t.d), k = fill(rk, t.hk, t.d), v = fill(rk, t.hk, t.dv), o = fill(rq, t.h, t.dv);
    vector<double> rdq(q.size()), rdk(k.size()), rdv(v.size());
    int64_t lrows = t.varlen ? rq * t.h : (int64_t)t.b * t.h * t.sq;
    vector<float> base(lrows, INFINITY), rest(lrows, 0), dsum(lrows, 0);
    double scale = 1 / sqrt((double)t.d);
    float sl2 = (float)(scale * 1.4426950408889634);
    auto P = [&](vector<uint16_t> &x, int64_t row, int head, int heads, int dim) { return x.data() + (row * heads + head) * dim; };
    for (int n = 0; n < t.b; n++) {
        int64_t q0 = t.varlen ? cq[n] : (int64_t)n * t.sq, k0 = t.varlen ? ck[n] : (int64_t)n * t.sk;
        int nq = t.lens ? uq[n] : lq[n], nk = t.lens ? uk[n] : lk[n];
        int off = t.mask == HEDDLE_CAUSAL_TOP_LEFT ? 0 : nk - nq;
        int64_t lo = -(1 << 29), hi = 1 << 29;
        if (t.mask != HEDDLE_MASK_NONE) hi = off;
        if (t.left >= 0) lo = off - t.left;
        if (t.right >= 0) hi = std::min<int64_t>(hi, off + t.right);
        vector<char> seen_k(lk[n], 0), seen_q(lq[n], 0);
        for (int x = 0; x < t.h; x++) {
            int y = x / (t.h / t.hk);
            for (int i = 0; i < nq; i++) {
                vector<double> p(nk, 0), dp(nk, 0); double m = -INFINITY, sum = 0, D = 0; int64_t j0 = std::max<int64_t>(0, i + lo), j1 = std::min<int64_t>(nk - 1, i + hi);
                vector<double> qi(t.d), oi(t.dv); for (int e = 0; e < t.d; e++) qi[e] = from16(P(q, q0 + i, x, t.h, t.d)[e], f16); for (int e = 0; e < t.dv; e++) oi[e] = from16(P(o, q0 + i, x, t.h, t.dv)[e], f16);
                for (int64_t j = j0; j <= j1; j++) {
                    double s = 0, u = 0; uint16_t *kk = P(k, k0 + j, y, t.hk, t.d), *vv = P(v, k0 + j, y, t.hk, t.dv);
                    for (int e = 0; e < t.d; e++) s += qi[e] * from16(kk[e], f16);
                    for (int e = 0; e < t.dv; e++) u += oi[e] * from16(vv[e], f16);
                    p[j] = s * scale; dp[j] = u; m = std::max(m, p[j]); seen_k[j] = 1; seen_q[i] = 1;
                }
                if (j0 > j1) continue;
                for (int64_t j = j0; j <= j1; j++) sum += p[j] = exp(p[j] - m);
                for (int64_t j = j0; j <= j1; j++) D += (p[j] /= sum) * dp[j];
                double l2 = (m + log(sum)) * 1.4426950408889634;
                int64_t at = t.varlen ? x * rq + q0 + i : ((int64_t)n * t.h + x) * t.sq + i;
                base[at] = (float)l2; rest[at] = (float)(l2 - base[at]); dsum[at] = (float)D;
                for (int64_t j = j0; j <= j1; j++) {
                    double ds = p[j] * (dp[j] - D) * scale;
                    uint16_t *kk = P(k, k0 + j, y, t.hk, t.d);
                    double *a = &rdq[((q0 + i) * t.h + x) * t.d], *bb = &rdk[((k0 + j) * t.hk + y) * t.d], *cc = &rdv[((k0 + j) * t.hk + y) * t.dv];
                    for (int e = 0; e < t.d; e++) { a[e] += ds * from16(kk[e], f16); bb[e] += ds * qi[e]; }
                    for (int e = 0; e < t.dv; e++) cc[e] += p[j] * oi[e];
                }
            }
        }
        if (t.nan) {
            for (int j = 0; j < lk[n]; j++) if (!seen_k[j]) for (int y = 0; y < t.hk; y++) { P(k, k0 + j, y, t.hk, t.d)[j % t.d] = to16(NAN, f16); P(v, k0 + j, y, t.hk, t.dv)[j % t.dv] = to16(NAN, f16); }
            for (int i = 0; i < lq[n]; i++) if (!seen_q[i]) for (int x = 0; x < t.h; x++) { P(q, q0 + i, x, t.h, t.d)[i % t.d] = to16(NAN, f16); P(o, q0 + i, x, t.h, t.dv)[i % t.dv] = to16(INFINITY, f16); }
        }
    }
    all_params a; memset(&a, 0, sizeof a); attention_params &p = a.p;
    p.a.dtype = f16 ? HEDDLE_F16 : HEDDLE_BF16; p.a.b = t.b; p.a.h = t.h; p.a.hk = t.hk; p.a.sq = t.sq; p.a.sk = t.sk; p.a.d = t.d; p.a.dv = t.dv; p.a.mask = (heddle_mask)t.mask;
    p.a.window_left = t.left; p.a.window_right = t.right; p.a.features = (t.varlen ? HEDDLE_VARLEN : 0) | (t.left >= 0 || t.right >= 0 ? HEDDLE_WINDOW : 0);
    p.a.total_q = rq; p.a.total_k = rk; p.a.scale = scale;
    auto st = [&](int heads, int dim, int s) { heddle_strides r; r.b = t.varlen ? 0 : (int64_t)s * heads * dim; r.h = dim; r.s = (int64_t)heads * dim; return r; };
    p.a.q_stride = p.a.dq_stride = st(t.h, t.d, t.sq); p.a.k_stride = p.a.dk_stride = st(t.hk, t.d, t.sk); p.a.v_stride = p.a.dv_stride = st(t.hk, t.dv, t.sk); p.a.do_stride = st(t.h, t.dv, t.sq);
    CUdeviceptr dq_ = up(q.data(), q.size() * 2), dk_ = up(k.data(), k.size() * 2), dv_ = up(v.data(), v.size() * 2), do_ = up(o.data(), o.size() * 2);
    CUdeviceptr b_ = up(base.data(), lrows * 4), r_ = up(rest.data(), lrows * 4), s_ = up(dsum.data(), lrows * 4);
    CUdeviceptr gq = up(0, q.size() * 2), gk = up(0, k.size() * 2), gv = up(0, v.size() * 2);
    p.t.q = (void *)dq_; p.t.k = (void *)dk_; p.t.v = (void *)dv_; p.t.dout = (void *)do_; p.t.dq = (void *)gq; p.t.dk = (void *)gk; p.t.dv = (void *)gv;
    p.base = (float *)b_; p.rest = (float *)r_; p.dsum = (float *)s_;
    if (t.varlen) { p.t.cu_seqlens_q = (int32_t *)up(cq.data(), cq.size() * 4); p.t.cu_seqlens_k = (int32_t *)up(ck.data(), ck.size() * 4); }
    if (t.lens) { p.t.seqlens_q = (int32_t *)up(uq.data(), uq.size() * 4); p.t.seqlens_k = (int32_t *)up(uk.data(), uk.size() * 4); }
    p.scale = (float)scale; p.scale_log2 = sl2; p.keep_scale = 1; p.group = t.h / t.hk; p.tiles_q = (t.sq + 127) / 128; p.tiles_k = (t.sk + 127) / 128; p.rows = lrows;
    int64_t nb = t.varlen ? 1 : t.b, sq_ = t.varlen ? rq : t.sq, sk_ = t.varlen ? rk : t.sk;
    heddle_strides fq = p.a.q_stride, fk = p.a.k_stride, fv = p.a.v_stride, fo = p.a.do_stride; if (t.varlen) { fq.b = fq.s * rq; fk.b = fk.s * rk; fv.b = fv.s * rk; fo.b = fo.s * rq; }
    a.m.q = encode(dq_, t.d, sq_, t.h, nb, fq, f16); a.m.k = encode(dk_, t.d, sk_, t.hk, nb, fk, f16); a.m.v = encode(dv_, t.dv, sk_, t.hk, nb, fv, f16); a.m.dout = encode(do_, t.dv, sq_, t.h, nb, fo, f16);
    int D = std::max(t.d, t.dv) <= 64 ? 64 : std::max(t.d, t.dv) <= 128 ? 128 : 256;
    for (auto &kn : kernels) {
        if (kn.d != D || strcmp(kn.dtype, f16 ? "f16" : "bf16") || (only_pass && !strstr(kn.name, only_pass))) continue;
        printf("   %s\n", kn.name); fflush(stdout);
        bool isdkdv = !strcmp(kn.pass, "dkdv");
        CU(cuMemsetD8(gq, 0xff, q.size() * 2)); CU(cuMemsetD8(gk, 0xff, k.size() * 2)); CU(cuMemsetD8(gv, 0xff, v.size() * 2));
        launch(kn, a, isdkdv ? (int64_t)t.b * t.hk * p.tiles_k * (D == 256 ? 2 : 1) : (int64_t)t.b * t.h * p.tiles_q, true);
        CUresult e = cuCtxSynchronize(); if (e) { const char *nm; cuGetErrorName(e, &nm); printf("   %s: %s\n", kn.name, nm); fflush(stdout); _exit(4); }
        auto get = [&](CUdeviceptr g, size_t n) { vector<uint16_t> r(n); CU(cuMemcpyDtoH(r.data(), g, n * 2)); return r; };
        if (isdkdv) {
            wrong += worst("dk", kn.name, get(gk, k.size()), rdk, f16, t.hk, t.d) != 0;
            wrong += worst("dv", kn.name, get(gv, v.size()), rdv, f16, t.hk, t.dv) != 0;
        } else
            wrong += worst("dq", kn.name, get(gq, q.size()), rdq, f16, t.h, t.d) != 0;
    }
    for (CUdeviceptr x : {dq_, dk_, dv_, do_, b_, r_, s_, gq, gk, gv}) cuMemFree(x);
    fflush(stdout);
}
static void time_all(int b, int h, int s, int d, int causal, const char *only) {
    size_t n = (size_t)b * h * s * d; vector<uint16_t> x(n); static vector<uint16_t> pool; if (pool.empty()) { pool.resize(1 << 20); for (auto &e : pool) e = to16(gauss(), false); }
    for (size_t i = 0; i < n; i++) x[i] = pool[(i * 7 + i / 1048576 * 13) & 1048575];
    CUdeviceptr t[7]; for (int i = 0; i < 7; i++) t[i] = up(i < 4 ? x.data() : 0, n * 2);
    size_t rows = (size_t)b * h * s; vector<float> base(rows), zero(rows, 0); for (size_t i = 0; i < rows; i++) base[i] = (float)(log2(causal ? i % s + 1 : s) + 0.7);
    CUdeviceptr b_ = up(base.data(), rows * 4), r_ = up(zero.data(), rows * 4), s_ = up(zero.data(), rows * 4);
    all_params a; memset(&a, 0, sizeof a); attention_params &p = a.p;
    p.a.b = b; p.a.h = p.a.hk = h; p.a.sq = p.a.sk = s; p.a.d = p.a.dv = d; p.a.mask = causal ? HEDDLE_CAUSAL_BOTTOM_RIGHT : HEDDLE_MASK_NONE; p.a.window_left = p.a.window_right = -1;
    heddle_strides st; st.b = (int64_t)s * h * d; st.h = d; st.s = (int64_t)h * d;
    p.a.q_stride = p.a.k_stride = p.a.v_stride = p.a.do_stride = p.a.dq_stride = p.a.dk_stride = p.a.dv_stride = st;
    p.t.q = (void *)t[0]; p.t.k = (void *)t[1]; p.t.v = (void *)t[2]; p.t.dout = (void *)t[3]; p.t.dq = (void *)t[4]; p.t.dk = (void *)t[5]; p.t.dv = (void *)t[6];
    p.base = (float *)b_; p.rest = (float *)r_; p.dsum = (float *)s_; p.scale = (float)(1 / sqrt((double)d)); p.scale_log2 = (float)(1.4426950408889634 / sqrt((double)d)); p.keep_scale = 1; p.group = 1;
    p.tiles_q = p.tiles_k = (s + 127) / 128;
    a.m.q = encode(t[0], d, s, h, b, st, false); a.m.k = encode(t[1], d, s, h, b, st, false); a.m.v = encode(t[2], d, s, h, b, st, false); a.m.dout = encode(t[3], d, s, h, b, st, false);
    CUevent e0, e1; cuEventCreate(&e0, 0); cuEventCreate(&e1, 0);
    double flops = 10.0 * (double)s * s * d * h * b * (causal ? 0.5 : 1), best[2] = {1e9, 1e9};
    printf("time b%d h%d s%d d%d %s:", b, h, s, d, causal ? "causal" : "full");
    for (auto &k : kernels) {
        if (k.d != d || strcmp(k.dtype, "bf16") || (only && !strstr(k.name, only))) continue;
        bool isdkdv = !strcmp(k.pass, "dkdv");
        for (int persist = 0; persist < 2; persist++) {
            vector<float> ms; int64_t tiles = (int64_t)b * h * p.tiles_k * (isdkdv && d == 256 ? 2 : 1);
            for (int r = 0; r < 6; r++) { cuEventRecord(e0, 0); launch(k, a, tiles, persist); cuEventRecord(e1, 0); CU(cuEventSynchronize(e1)); float m; cuEventElapsedTime(&m, e0, e1); if (r) ms.push_back(m); }
            std::sort(ms.begin(), ms.end()); double w = (isdkdv ? 4 : 3) / 5.0 * flops / ms[2] * 1e-9;
            printf(" %s%s %.3f ms (%.0f)", k.name, persist ? "/p" : "", ms[2], w);
            best[!isdkdv] = std::min(best[!isdkdv], (double)ms[2]);
        }
    }
    printf(" | best sum %.3f ms = %.0f TFLOP/s\n", best[0] + best[1], flops / (best[0] + best[1]) * 1e-9);
    for (CUdeviceptr y : t) cuMemFree(y); cuMemFree(b_); cuMemFree(r_); cuMemFree(s_); fflush(stdout);
}
int main(int argc, char **argv) {
    CUdevice dev; CUcontext ctx; CU(cuInit(0)); CU(cuDeviceGet(&dev, 0)); CU(cuDevicePrimaryCtxRetain(&ctx, dev)); CU(cuCtxSetCurrent(ctx));
    CU(cuModuleLoad(&mod, argv[1])); const char *mode = argv[2]; int d = atoi(argv[3]);
    const char *prefix = argc > 4 ? argv[4] : 0;
    if (!strcmp(mode, "test")) {
        int N = HEDDLE_MASK_NONE, TL = HEDDLE_CAUSAL_TOP_LEFT, BR = HEDDLE_CAUSAL_BOTTOM_RIGHT;
        test tests[] = {
            {"one tile", 1, 1, 1, 64, 128, d, d, N, -1, -1, false, false, false},
            {"full", 1, 2, 2, 256, 256, d, d, N, -1, -1, false, false, false},
            {"causal", 1, 2, 1, 256, 256, d, d, BR, -1, -1, false, false, false},
            {"odd gqa", 2, 4, 2, 197, 301, d, d, BR, -1, -1, false, false, true},
            {"top left", 1, 2, 1, 301, 197, d, d, TL, -1, -1, false, false, true},
            {"br dead rows", 1, 2, 1, 301, 197, d, d, BR, -1, -1, false, false, true},
            {"window", 1, 2, 1, 350, 350, d - 24, d - 8, N, 40, 17, false, false, true},
            {"packed", 4, 2, 1, 170, 210, d, d - 16, BR, -1, -1, true, false, true},
            {"packed lens", 4, 2, 2, 170, 210, d - 40, d, N, -1, -1, true, true, true},
            {"lens", 2, 4, 1, 300, 300, d, d, BR, 100, -1, false, true, true},
            {"many", 1, 4, 4, 700, 700, d, d, BR, -1, -1, false, false, false},
        };
        for (auto &t : tests) { only_pass = prefix; sms = t.h == 4 ? 3 : 5; run_test(t, false); run_test(t, true); }
    } else {
        int s = atoi(argv[4]); int h = d == 64 ? 32 : d == 128 ? 16 : 8, b = 16384 / s;
        for (int c = 0; c < 2; c++) time_all(b, h, s, d, c, argc > 5 ? argv[5] : 0);
    }
    printf("done\n");
}
