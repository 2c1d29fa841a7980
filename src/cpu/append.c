/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_append on the CPU: a token at a time, its rows of all heads one after another. */
#include "../dtype.h"
#include "../tokens.h"
#include "cpu.h"

typedef struct append_work {
    const heddle_append *a;
    const heddle_append_data *t;
} append_work;

/* What is inlined with a constant type has no branch on it in its loops. */
__attribute__((always_inline)) static inline float load_float(heddle_dtype type, const void *p, int64_t x) {
    switch (type) {
    case HEDDLE_BF16: return bf16_to_float(((const uint16_t *)p)[x]);
    case HEDDLE_F16: return f16_to_float(((const uint16_t *)p)[x]);
    default: return ((const float *)p)[x];
    }
}

/* Where a row goes: elements of the problem's type, or with HEDDLE_E4M3 bytes of what is divided by the scale. */
typedef struct row_target {
    char *at;
    bool bytes;
    float scale;
} row_target;

__attribute__((always_inline)) static inline void store_float(heddle_dtype type, bool bytes, row_target to, int64_t x,
                                                              float value) {
    if (bytes) {
        ((uint8_t *)to.at)[x] = float_to_e4m3(value / to.scale);
        return;
    }
    switch (type) {
    case HEDDLE_BF16: ((uint16_t *)(void *)to.at)[x] = float_to_bf16(value); break;
    case HEDDLE_F16: ((uint16_t *)(void *)to.at)[x] = double_to_f16((double)value); break;
    default: ((float *)(void *)to.at)[x] = value; break;
    }
}

/* `from` and `to` may be one row: both of a pair are read before either is written. */
__attribute__((always_inline)) static inline void rotate_typed(const heddle_append *a, heddle_dtype type,
                                                               heddle_dtype table, bool bytes, const void *cos,
                                                               const void *sin, int64_t angles, const void *from,
                                                               row_target to) {
    const int64_t half = a->rotary / 2, step = a->interleaved ? 2 : 1, other = a->interleaved ? 1 : half;
    for (int64_t e = 0; e < half; e++) {
        const float c = angles < 0 ? NAN : load_float(table, cos, angles + e),
                    s = angles < 0 ? NAN : load_float(table, sin, angles + e);
        const float y = load_float(type, from, e * step), z = load_float(type, from, e * step + other);
        store_float(type, bytes, to, e * step, y * c - z * s);
        store_float(type, bytes, to, e * step + other, y * s + z * c);
    }
}

__attribute__((always_inline)) static inline void rotate_as(const append_work *w, heddle_dtype type, int64_t position,
                                                            const void *from, row_target to) {
    const heddle_append *a = w->a;
    const int64_t angles = position < a->positions ? position * a->table_stride : -1;
    const heddle_dtype table = a->table_dtype == HEDDLE_F32 ? HEDDLE_F32 : type;
    if (to.bytes)
        rotate_typed(a, type, table, true, w->t->cos, w->t->sin, angles, from, to);
    else if (table == HEDDLE_F32)
        rotate_typed(a, type, HEDDLE_F32, false, w->t->cos, w->t->sin, angles, from, to);
    else
        rotate_typed(a, type, type, false, w->t->cos, w->t->sin, angles, from, to);
}

static void rotate(const append_work *w, int64_t position, const void *from, row_target to) {
    switch (w->a->dtype) {
    case HEDDLE_BF16: rotate_as(w, HEDDLE_BF16, position, from, to); break;
    case HEDDLE_F16: rotate_as(w, HEDDLE_F16, position, from, to); break;
    default: rotate_as(w, HEDDLE_F32, position, from, to); break;
    }
}

/* Elements `begin` to `end` of a row as they are. */
static void copy_rest(const heddle_append *a, int64_t begin, int64_t end, const char *from, row_target to) {
    const size_t size = heddle_dtype_size(a->dtype);
    if (to.bytes)
        for (int64_t e = begin; e < end; e++)
            store_float(a->dtype, true, to, e, load_float(a->dtype, from, e));
    else if (from != to.at)
        memcpy(to.at + (size_t)begin * size, from + (size_t)begin * size, (size_t)(end - begin) * size);
}

static int64_t offset(heddle_strides stride, int64_t b, int64_t h, int64_t s, size_t size) {
    return (b * stride.b + h * stride.h + s * stride.s) * (int64_t)size;
}

/* Row `at` of head x of sequence n in the cache. */
static row_target cache_of(const append_work *w, void *cache, const void *scale, int64_t at, int64_t n, int64_t x) {
    const bool bytes = w->a->features & HEDDLE_E4M3;
    return (row_target){(char *)cache + at, bytes, scale ? ((const float *)scale)[n * w->a->hk + x] : 1};
}

static void append_keys(const append_work *w, int64_t n, int64_t j, int64_t b, int64_t row) {
    const heddle_append *a = w->a;
    const heddle_append_data *t = w->t;
    const size_t size = heddle_dtype_size(a->dtype), cached = a->features & HEDDLE_E4M3 ? 1 : size;
    int64_t part, to;
    if (!append_place(a, t, n, j, &part, &to))
        return;
    for (int64_t x = 0; x < a->hk; x++) {
        const char *k = (const char *)t->k_new + offset(a->k_new_stride, b, x, row, size);
        const char *v = (const char *)t->v_new + offset(a->v_new_stride, b, x, row, size);
        const row_target of_k = cache_of(w, t->k, t->k_scale, offset(a->k_stride, part, x, to, cached), n, x);
        rotate(w, j, k, of_k);
        copy_rest(a, a->rotary, a->d, k, of_k);
        copy_rest(a, 0, a->dv, v, cache_of(w, t->v, t->v_scale, offset(a->v_stride, part, x, to, cached), n, x));
    }
}

static void append_queries(const append_work *w, int64_t position, int64_t b, int64_t row) {
    const heddle_append *a = w->a;
    const size_t size = heddle_dtype_size(a->dtype);
    for (int64_t x = 0; x < a->h; x++) {
        const char *q = (const char *)w->t->q + offset(a->q_stride, b, x, row, size);
        const row_target to = {.at = (char *)w->t->q_out + offset(a->q_out_stride, b, x, row, size)};
        rotate(w, position, q, to);
        copy_rest(a, a->rotary, a->d, q, to);
    }
}

/* The last sequence that begins at or before a packed row. */
static int64_t find_sequence(const append_work *w, int64_t row) {
    int64_t low = 0, n = w->a->b;
    for (; n > 1; n -= n / 2)
        if (w->t->cu_seqlens[low + n / 2] <= row)
            low += n / 2;
    return low;
}

static void append_token(const append_work *w, int64_t token) {
    const heddle_append *a = w->a;
    const int64_t each = max64(a->s, a->h ? a->sq : 0);
    int64_t n, i, first = 0, rows = a->s, queries = a->sq, b;
    if (a->features & HEDDLE_VARLEN) {
        n = find_sequence(w, token);
        queries = rows = append_packed(a, w->t, n, &first);
        i = token - first;
        b = 0;
    } else {
        b = n = token / each;
        i = token % each;
    }
    const int64_t length = append_length(a, w->t, n);
    if (i >= 0 && i < rows)
        append_keys(w, n, length + i, b, first + i);
    if (i >= 0 && i < queries)
        append_queries(w, length + (a->together ? 0 : i), b, first + i);
}

void heddle__cpu_append(const heddle_append *a, const heddle_append_data *t, int threads) {
    const append_work w = {a, t};
    const int64_t tokens = append_tokens(a);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t token = 0; token < tokens; token++)
        append_token(&w, token);
    if (t->seqlens_out)
        for (int64_t n = 0; n < a->b; n++)
            t->seqlens_out[n] = (int32_t)append_length_after(a, t, n);
    (void)threads;
}
