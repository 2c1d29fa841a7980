/* SPDX-License-Identifier: Apache-2.0
 * What all attention kernels share: where a sequence lies, scores. */
#ifndef HEDDLE_CUDA_ATTENTION_COMMON_CUH
#define HEDDLE_CUDA_ATTENTION_COMMON_CUH

#include "cuda/attention/shown.cuh"

#include <math_constants.h>

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL_LANES 0xffffffffu

/* --------------------------------------------------------------------------------------------------- sequences */

/* One sequence. Positions fit into 32 bits (the plan checks), offsets in memory do not. */
struct place {
    int64_t n;
    int64_t first_q, first_k;   /* rows in the tensors */
    int sq, sk, all_sq, all_sk; /* rows that count; rows that the sequence has */
    int lo, hi, off;            /* query i sees key j when i + lo <= j <= i + hi */
};

/* Does no query see more than FEW_KEYS? Where these keys are some of all nobody knows. */
INLINE bool sees_few(const attention_params &p, const place &c) {
    return !p.adds && (c.sk <= FEW_KEYS || (uint32_t)c.hi - (uint32_t)c.lo < FEW_KEYS);
}

/* In float32: may a mask or a bias hide more keys than the band does, so that few are left? */
template <typename T> INLINE bool hides(const attention_params &p) {
    return sizeof(T) == 4 && !p.adds && (p.a.features & (HEDDLE_BOOL_MASK | HEDDLE_BIAS));
}

/* Has sm80 the rows that see head y of keys, in float32 on Hopper? */
INLINE bool has_few(const attention_params &p, const place &c, int64_t y) {
    return p.few && p.few[c.n * p.a.hk + y];
}

/* For sm80 itself: has Hopper them? */
template <typename T> INLINE bool is_left_out(const attention_params &p, const place &c, int64_t y) {
    return sizeof(T) == 4 && p.few && !has_few(p, c, y);
}

/* Its tiles of so many of `all` rows: where Hopper's kernels are launched, too, the plan counts those of theirs. */
template <typename T, bool FULL, int ROWS> INLINE int own_tiles(const attention_params &p, int64_t all, int planned) {
    return FULL && sizeof(T) == 4 && p.few ? (int)((all + ROWS - 1) / ROWS) : planned;
}

INLINE int clamp_to_int(int64_t x) {
    return (int)clamp64(x, -(INT64_C(1) << 30), INT64_C(1) << 30);
}

INLINE place find_place(const attention_params &p, int64_t n) {
    const sequence all = sequence_of(&p.a, p.t.cu_seqlens_q, p.t.cu_seqlens_k, NULL, NULL, n);
    const sequence used = sequence_of(&p.a, p.t.cu_seqlens_q, p.t.cu_seqlens_k, p.t.seqlens_q, p.t.seqlens_k, n);
    const int64_t off = p.off + own_offset(&p.a, used);
    const band m = band_along(&p.a, off);
    place c;
    c.n = n;
    c.first_q = used.first_q;
    c.first_k = used.first_k;
    c.sq = (int)used.sq;
    c.sk = (int)used.sk;
    c.all_sq = (int)all.sq;
    c.all_sk = (int)all.sk;
    c.lo = clamp_to_int(m.lo);
    c.hi = clamp_to_int(m.hi);
    c.off = (int)off;
    return c;
}

/* HEDDLE_PAGES: what the table says of key j of sequence n, and the page that this is, -1: none. Who asks ahead looks at it late, since
 * that waits for it. */
INLINE int entry_at(const attention_params &p, int64_t n, int j) {
    return p.t.block_table[n * p.a.table + (j >> p.page_bits)];
}
INLINE int page_of(const attention_params &p, int entry) {
    return (unsigned)entry < (unsigned)p.a.pages ? entry : -1;
}
INLINE int page_at(const attention_params &p, int64_t n, int j) {
    return page_of(p, entry_at(p, n, j));
}

INLINE int64_t row_at(const heddle_strides &s, int64_t n, int64_t head, int64_t row) {
    return n * s.b + head * s.h + row * s.s;
}

/* Which tile of which unit (a head of a sequence, or a part of one) block `id` has. A few units at a time, whose
 * keys stay in the second-level cache, and of these all first tiles first: with the longest tiles in front, blocks
 * end together. */
INLINE void tile_of_block(int64_t id, int tiles, int64_t units, int *tile, int64_t *unit) {
    const int64_t section = id / (16 * (int64_t)tiles) * 16;
    const int r = (int)(id - section * tiles), count = (int)min64(16, units - section);
    *tile = r / count;
    *unit = section + r % count;
}

/* Where row i of head x is in lse, and in the arrays of that shape. */
INLINE int64_t lse_at(const attention_params &p, const place &c, int64_t x, int64_t i) {
    return p.a.features & HEDDLE_VARLEN ? x * p.a.total_q + c.first_q + i : (c.n * p.a.h + x) * p.a.sq + i;
}

/* The logarithm of 2^base·sum in units of unit + unit_low, rounded once: base may be large, and is what S became. */
INLINE float log_of_sum(float base, float sum, float unit, float unit_low) {
    const float high = base * unit, low = fmaf(base, unit, -high) + base * unit_low;
    return sum == 0.0f ? -CUDART_INF_F : high + fmaf(log2f(sum), LN2, low);
}

/* log2 of a positive number: a whole one and what is left, from 0 to 1. Of hundreds one float would lack more than a float32 log-sum-exp. */
struct split_log {
    float whole, part;
};

INLINE split_log split_log2(float x) {
    const int exponent = (__float_as_int(x) >> 23) - 127;
    const float rest = __int_as_float((__float_as_int(x) & 0x7fffff) | 0x3f800000);
    return {(float)exponent, log2f(rest) + (x - x)}; /* NaN of what is not finite */
}

/* In float32 all of the logarithm's bits count. more: what base lacks. The unit is that of scores, and has their factor's rounding; of the
 * sum's logarithm no such unit is taken. */
template <typename T> INLINE float natural_log(const attention_params &p, float base, float sum, float more = 0.0f) {
    if (sizeof(T) == 2 || sum == 0.0f)
        return log_of_sum(base, sum, p.lse_unit, p.lse_unit_low);
    const split_log log2 = split_log2(sum); /* times the first 16 bits of LN2: exact */
    const float high = base * p.lse_unit, low = fmaf(base, p.lse_unit, -high) + base * p.lse_unit_low;
    float rest;
    const float all = add_exactly(high, log2.whole * 0x1.62e4p-1f, &rest);
    return all + fmaf(log2.part + more, LN2, fmaf(log2.whole, 0x1.7f7d1cp-20f, rest + low));
}
template <typename T> INLINE float add_log(float top, float sum) {
    if (sizeof(T) == 2 || sum == 0.0f || !isfinite(top))
        return fmaf(log2f(sum), LN2, top);
    const split_log log2 = split_log2(sum); /* times the first 16 bits of LN2: exact */
    float rest;
    const float all = add_exactly(top, log2.whole * 0x1.62e4p-1f, &rest);
    return all + fmaf(log2.part, LN2, fmaf(log2.whole, 0x1.7f7d1cp-20f, rest));
}

/* Of large scores max·c is too coarse: its own rounding would be the exponent of the largest one. From here on, where that is 1, the
 * maximum is subtracted before the multiplication with c, from scores that then have no base: where P is held in float16, up to 2^15
 * (sm90_f32), it would be infinite otherwise. The other forwards have room, and wait for alone_from, which costs nothing for an element. */
#define FAR 0x1p24f

INLINE bool is_far(float top, float c, float from = FAR) {
    return fabsf(__fmul_rn(top, c)) >= from && top != -CUDART_INF_F;
}

/* From here on the neighbours in float32 of a row's largest score have no weight beside it (2^-16 of 16 bits, 2^-32), while the
 * rounding of max·c is 4 (8) at most and cancels in the quotient of the sums. So P is exp2(S·f - max·f) with any f that rounds
 * neither product and is large enough: a power of two in place of c, and no instruction more for an element. */
template <typename T> INLINE constexpr float alone_from(void) {
    return sizeof(T) == 2 ? 0x1p27f : 0x1p28f;
}

/* What a row's scores are multiplied with, what is subtracted then, and what was summed before shrinks by. */
struct row_scale {
    float factor, base, shrink;
};

/* The usual row. What was far below (-1e12, say) shrinks to 0 by itself. */
INLINE row_scale scale_row(float before, float top, float c) {
    const float base = top == -CUDART_INF_F ? 0.0f : __fmul_rn(top, c);
    /* not fused, or the rounding of what is subtracted would come in twice */
    return {c, base, exp2_approx(__fmul_rn(before, c) - base)};
}

template <typename T> INLINE bool is_alone(const row_scale &r) {
    return !(fabsf(r.base) < alone_from<T>());
}

/* The same of a row that is_alone. 2^31 over top's power of two: its last bit comes to 2^8. */
INLINE void scale_alone(float before, float top, row_scale *r) {
    r->factor = __uint_as_float(min((127u + 127u + 31u << 23) - (__float_as_uint(top) & 0x7f800000u), 0x7f000000u));
    r->base = top * r->factor;
    r->shrink = before == top ? 1.0f : 0.0f;
}

/* The part of a row that a share of the keys gives: its maximum, and its sum over exp2((S - maximum)·c), 0 of no keys. */
INLINE void store_part(const attention_params &p, int key_share, int64_t row, float max, float sum) {
    p.part_max[key_share * p.lse_rows + row] = max;
    p.part_sum[key_share * p.lse_rows + row] = sum;
}

/* lse of a row from the same two. unit: what takes its maximum to natural units. */
template <typename T> INLINE float natural_lse(const attention_params &p, float max, float c, float unit, float sum) {
    const float base = __fmul_rn(max, c), more = fmaf(max, c, -base);
    if (is_far(max, c))
        return add_log<T>(max * unit, sum);
    if (sizeof(T) == 4)
        return natural_log<T>(p, base, sum, more);
    const float high = base * p.lse_unit;
    const float low = fmaf(base, p.lse_unit, -high) + base * p.lse_unit_low;
    return high + fmaf(log2f(sum) + more, LN2, low);
}

/* The sink of head x, -inf where there is none or it does not count. */
INLINE float sink_of(const attention_params &p, int64_t x, bool counts) {
    return (p.a.features & HEDDLE_SINKS) && counts ? ((const float *)p.t.sinks)[x] : -CUDART_INF_F;
}

/* How far a sink is above a row's largest score, in units of log2: -inf where there is none, inf where there are no scores. unit: what
 * takes them to natural units. near: what the sum has beside the maximum, of a rounding. */
INLINE float sink_above(float sink, float unit, float max, float near) {
    return sink == -CUDART_INF_F ? sink : fmaf(fmaf(-max, unit, sink), LOG2E, near);
}

/* It joins the sum. Returns what was summed before shrinks by. */
INLINE float add_sink(float above, float *sum) {
    const float shrink = above > 0.0f ? exp2_approx(-above) : 1.0f;
    *sum = fmaf(*sum, shrink, above > 0.0f ? 1.0f : exp2_approx(above));
    return shrink;
}

/* The end of a row whose sum is over exp2(S·c - base), or where it is far over exp2((S - max)·c): the sink joins in. Returns what O
 * shrinks by. */
template <typename T>
INLINE float end_row(const attention_params &p, bool far, float unit, float max, float c, float base, float sink,
                     float *sum, float *lse) {
    const float above = sink_above(sink, unit, max, far || *sum == 0.0f ? 0.0f : fmaf(max, c, -base));
    const float shrink = add_sink(above, sum);
    *lse = above > 0.0f ? add_log<T>(sink, *sum) : far ? add_log<T>(max * unit, *sum) : natural_log<T>(p, base, *sum);
    return shrink;
}

/* HEDDLE_ACCUMULATE: the shares of what is there of a row, and of what was found, in all of it. A negative `keep`: nothing is there, and what
 * lies there may be NaN. */
struct row_shares {
    float keep, take;
};

/* *lse becomes that of all; at: where the row is. */
INLINE row_shares join_before(const attention_params &p, int64_t at, float *lse) {
    const float there = p.before[at], found = *lse, top = fmaxf(there, found);
    if (there == -CUDART_INF_F)
        return {-1.0f, 1.0f};
    const float before = expf(there - top), now = expf(found - top), all = before + now;
    *lse = top + logf(all);
    return {before / all, now / all};
}

/* A number of o of a row, whose lse was found; at: where it is. */
template <typename T> INLINE void store_number(const attention_params &p, int64_t row, float lse, int64_t at, float x) {
    if (!p.adds) {
        from_float((T *)p.t.o + at, x);
        return;
    }
    const row_shares s = join_before(p, row, &lse);
    float *const to = (float *)p.t.o + at;
    *to = fmaf(s.keep >= 0.0f ? *to : 0.0f, s.keep, x * s.take);
}

/* A number of a gradient, or what is added to it. */
template <typename T> INLINE void add_number(bool adds, void *to, int64_t at, float x) {
    if (adds)
        ((float *)to)[at] += x;
    else
        from_float((T *)to + at, x);
}

/* ---------------------------------------------------------------------------------- the log-sum-exp for the backward
 * P = exp2(S·c - base - rest), where rest is not negative: the rounding of base is a part of it. Of huge scores that would be too large a
 * part, and their neighbours in float32 have no weight beside them: a negative rest says that S and base are multiplied by a power of two
 * in place of c, which rounds neither, and P = exp2(S·power_of(c) - base + rest).
 * In float32 P = exp2((S - base)·c)·rest, as a textbook has it: base is the largest score, or the average one, and rest 1 over the sum. So
 * the exponent is small, and what it is rounded by, too; and the weight of who is alone is 1. */
#define HUGE_BASE 0x1p32f

/* c = power_of(c)·mantissa_of(c), positive and normal. */
INLINE float power_of(float c) {
    return __uint_as_float(__float_as_uint(c) & 0x7f800000u);
}
INLINE int exponent_of(float c) {
    return (int)(__float_as_uint(c) >> 23 & 0xff) - 127;
}
INLINE float mantissa_of(float c) {
    return __uint_as_float((__float_as_uint(c) & 0x7fffffu) | 0x3f800000u);
}

INLINE float factor_of(float c, float rest) { /* a comparison would take more registers */
    return __uint_as_float(__float_as_uint(c) & ~((uint32_t)(__float_as_int(rest) >> 31) & 0x7fffffu));
}
template <typename T> INLINE float weight_of(float s, float c, float base, float rest) {
    return sizeof(T) == 2 ? exp2_approx(fmaf(s, factor_of(c, rest), -base) - fabsf(rest))
                          : exp2_approx((s - base) * c) * rest;
}

/* 2^-x, where x is mostly next to nothing. */
INLINE float inverse_power(float x) {
    const float y = x * LN2;
    return fabsf(x) < 0x1p-10f ? fmaf(y, fmaf(y, 0.5f, -1.0f), 1.0f) : exp2f(-x);
}

/* From a row's maximum and the logarithm to base 2 of its sum over exp2((S - maximum)·c), in 16 bits. What is whole of it joins the base:
 * rest is to be small, as its rounding is one of all weights of the row. */
INLINE void put_log_sum(float max, float c, split_log log2, float *base, float *rest) {
    const float low = __fmul_rd(max, c);
    const bool huge = fabsf(low) >= HUGE_BASE;
    float left;
    const float all = add_exactly(low, log2.whole, &left), down = left < 0.0f ? nextafterf(all, -CUDART_INF_F) : all;
    *base = huge ? max * power_of(c) : down;
    *rest = huge ? -fmaxf(log2.whole + log2.part, 0x1p-100f) : (all - down + left) + fmaf(max, c, -low) + log2.part;
}

/* From lse alone, which is not -inf, in 16 bits. */
INLINE void split_lse(const attention_params &p, float lse, float *base, float *rest) {
    *base = __fmul_rd(lse, p.lse_factor);
    *rest = fmaf(lse, p.lse_factor, -*base) + lse * p.lse_factor_low;
    if (!(fabsf(*base) < HUGE_BASE)) {
        *base = lse * p.lse_huge;
        *rest = isfinite(lse) ? -0x1p-100f : 0.0f;
    } else if (*rest < 0.0f) {
        const float lower = nextafterf(*base, -CUDART_INF_F);
        *rest += *base - lower;
        *base = lower;
    }
}

/* The same in float32; base_log2 is c. Of `keys` equal scores the base is about what they are: the logarithm of the sum is then about that of
 * their number, whose whole part goes to rest, and has nothing of c's rounding (lse_more), unlike the rest of lse. */
INLINE void split_lse32(const attention_params &p, float lse, int keys, float *base, float *rest) {
    const float log2 = lse * p.lse_factor, low = fmaf(lse, p.lse_factor, -log2) + lse * p.lse_factor_low;
    const bool huge = !(fabsf(log2) < 0x1p23f); /* there is nobody but who is at the base */
    const float whole = huge ? 0.0f : floorf(fminf(fmaxf(log2, 0.0f), (float)exponent_of((float)(keys | 1))));
    const float above = log2 - whole; /* exact: it is no larger than log2 */
    const float score = huge ? lse * p.lse_huge / power_of(p.base_log2) : above / p.base_log2;
    *base = huge || fabsf(score) < 0x1p126f ? score : 0.0f;
    const float product = *base * p.base_log2, lost = above - product - fmaf(*base, p.base_log2, -product);
    *rest = huge ? 1.0f : inverse_power(fmaf(-whole, p.lse_more, lost + low)) * exp2f(-whole);
}

/* Is a float32 log-sum-exp too coarse for P = exp(S - lse)? Large ones are; and in float32 most are where rows are short, as the products of
 * these lose less, or a softcap has made scores alike, so that all of a row is off as much and nothing else is. */
template <typename T> INLINE bool is_large(const attention_params &p, float lse) {
    const bool alike = p.softcap > 0.0f && fabsf(lse) > p.softcap;
    const float most = sizeof(T) == 2 ? 1024.0f : max64(p.a.d, p.a.dv) <= 32 || alike ? 2.0f : 12.0f;
    return fabsf(lse) > most && fabsf(lse) < CUDART_INF_F;
}

/* And all are in float32 where few keys are seen, if another kernel than the forward's makes S: a textbook's computation loses next to
 * nothing there, as the maximum is the log-sum-exp, or nearly so, and S is the same in both passes. Where these keys are some of all
 * there is no better one. */
template <typename T> INLINE bool is_coarse(const attention_params &p, const place &c, float lse) {
    return sizeof(T) == 4 && sees_few(p, c) ? fabsf(lse) < CUDART_INF_F : !p.adds && is_large<T>(p, lse);
}

/* Is a log-sum-exp that was found anew the given one, but for roundings? It may be another on purpose. noise: what the scores of who gave it
 * may be off by. */
INLINE bool is_same_lse(float found, float lse, float noise = 0.0f) {
    return fabsf(found - lse) <= fmaf(fmaxf(fabsf(lse), 4.0f), 0x1p-20f, noise);
}

/* The log-sum-exp of a row anew, of its maximum, its sum over exp2((S - maximum)·c) and its sink (-inf: it has none); taken where it is the
 * given one. The base is the larger of the two: rest would be as large as they are apart, and so would its rounding. unit: what takes the
 * maximum to natural units. */
template <typename T>
INLINE void put_row_sum(const attention_params &p, float max, float c, float unit, float sum, float sink, float lse,
                        float noise, float *base, float *rest) {
    const float above = sink_above(sink, unit, max, 0.0f), rare = exp2f(-fabsf(above));
    const float all = above > 0.0f ? fmaf(sum, rare, 1.0f) : sum + rare;
    const float found = above > 0.0f ? add_log<float>(sink, all) : natural_lse<float>(p, max, c, unit, all);
    if (!is_same_lse(found, lse, noise))
        return;
    if (sizeof(T) == 4) {
        *base = max;
        *rest = 1.0f;
        if (above > 0.0f)
            split_lse32(p, sink, 1, base, rest);
        *rest /= all;
    } else if (above > 0.0f) {
        const float log2 = log2f(all);
        split_lse(p, sink, base, rest);
        *rest += *rest < 0.0f ? -log2 : log2;
    } else {
        put_log_sum(max, c, split_log2(all), base, rest);
    }
}

/* What a row of dQ is multiplied with, by what its P sums to: off 1 by a rounding that all of the row has; or, of some of all keys, more. */
INLINE float weights_to_one(const attention_params &p, float sum) {
    return !p.adds && fabsf(sum - 1.0f) < 0x1p-20f ? 2.0f - sum : 1.0f;
}

/* Tiles of 64 queries in dq_sum: all of a head, and which is the first of a head of a sequence. */
INLINE int64_t sum_tiles(const attention_params &p) {
    return p.a.features & HEDDLE_VARLEN ? packed_tiles64(p.a.total_q, p.a.b) : p.a.b * tiles64(p.a.sq);
}

INLINE int64_t sum_tile(const attention_params &p, const place &c, int64_t x) {
    return x * sum_tiles(p) + (p.a.features & HEDDLE_VARLEN ? packed_tiles64(c.first_q, c.n) : c.n * tiles64(p.a.sq));
}

/* ------------------------------------------------------------------------------------------------------ scores */

/* What the score of an element of row i of head x depends on beside q·k. */
struct score_row {
    int i;
    float slope;
    int64_t bias, mask, dweights; /* offsets of the row */
};

INLINE score_row make_score_row(const attention_params &p, const place &c, int64_t x, int i) {
    score_row r;
    r.i = i;
    r.slope = p.a.features & HEDDLE_ALIBI ? ((const float *)p.t.alibi_slopes)[c.n * p.a.alibi_stride_b + x] : 0.0f;
    r.bias = row_at(p.a.bias_stride, c.n, x, i);
    r.mask = mask_row(p, c.n, x, i);
    r.dweights = row_at(p.a.dweights_stride, c.n, x, i);
    return r;
}

/* tanh, and 1 - tanh², its derivative: where tanh is nearly 1 its last bit would be most of that, which float32 shows. */
template <typename T> INLINE float tanh_with_slack(float x, float *slack) {
    if (sizeof(T) == 2) {
        const float th = tanhf(x);
        *slack = 1.0f - th * th;
        return th;
    }
    const float size = fabsf(x), square = x * x;
    float near = fmaf(square, -0x1.8257f8p-8f, 0x1.54b88ap-6f); /* to 2^-28, fitted up to 0.6 */
    near = fmaf(near, square, -0x1.b898dap-5f);
    near = fmaf(near, square, 0x1.1109aep-3f);
    near = fmaf(near, square, -0x1.55553ep-2f);
    near = fmaf(x * square, near, x);
    const float half = reciprocal_approx(exp2_approx(size * (2.0f * LOG2E)) + 1.0f); /* of 1 - tanh */
    const float th = size < 0.6f ? near : copysignf(fmaf(half, -2.0f, 1.0f), x), four = 4.0f * half;
    *slack = size < 0.6f ? fmaf(-th, th, 1.0f) : fmaf(-four, half, four);
    return th;
}

/* S from q·k; -inf where masked. *slack = dS/dT. Row and key must be inside the sequence. */
template <typename T>
INLINE float full_score(const attention_params &p, const place &c, const score_row &r, int j, float qk, float *slack) {
    *slack = 1.0f;
    if (j < r.i + c.lo || j > r.i + c.hi || r.i >= c.sq || j >= c.sk || j < 0)
        return -CUDART_INF_F;
    if ((p.a.features & HEDDLE_BOOL_MASK) && !mask_shows(p, r.mask, r.i, j))
        return -CUDART_INF_F;
    float bias = 0.0f;
    if (p.a.features & HEDDLE_BIAS)
        bias = to_float(((const T *)p.t.bias)[r.bias + j]);
    if (bias == -CUDART_INF_F)
        return -CUDART_INF_F;
    float t = qk * p.scale;
    if (p.softcap > 0.0f)
        t = p.softcap * tanh_with_slack<T>(__fmul_rn(qk, p.score_in), slack);
    if (p.a.features & HEDDLE_ALIBI)
        t -= r.slope * fabsf((float)(r.i + c.off - j));
    return t + counted_bias(bias);
}

/* May key j, which the band shows, have a weight in the row of query i of head x, by mask and bias? */
template <typename T> INLINE bool is_shown(const attention_params &p, const place &c, int64_t x, int i, int j) {
    if ((p.a.features & HEDDLE_BOOL_MASK) && !mask_shows(p, mask_row(p, c.n, x, i), i, j))
        return false;
    return !(p.a.features & HEDDLE_BIAS) ||
           !(to_float(((const T *)p.t.bias)[row_at(p.a.bias_stride, c.n, x, i) + j]) < (float)FAINT_BIAS);
}

/* How many keys may have a weight in the row of query i of head x; by a warp, which counts no further than to more than FEW_KEYS. */
template <typename T> INLINE int count_seen(const attention_params &p, const place &c, int64_t x, int i) {
    const int lane = threadIdx.x % 32, end = min(i + c.hi, c.sk - 1) + 1;
    int count = 0;
    for (int j0 = max(0, i + c.lo); j0 < end && count <= FEW_KEYS; j0 += 128)
#pragma unroll
        for (int z = 0; z < 4; z++) {
            const int j = j0 + z * 32 + lane;
            count += __popc(__ballot_sync(ALL_LANES, j < end && is_shown<T>(p, c, x, i, j)));
        }
    return count;
}

/* ------------------------------------------------------------------------------------------------------ shuffles */

INLINE float warp_sum(float x) {
    for (int step = 16; step; step >>= 1)
        x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

INLINE float warp_max(float x) {
    for (int step = 16; step; step >>= 1)
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

/* Over the four lanes that hold one row of a fragment. */
INLINE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

INLINE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

#endif
