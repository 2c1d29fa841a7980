/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_append by its formula, in float64, sequence by sequence. */
#include "ref.h"

#include "../tokens.h"

/* Where rows go: elements of the problem's type, or with HEDDLE_E4M3 bytes of what is divided by the scale. */
typedef struct row_target {
    void *at;
    bool bytes;
    double scale;
} row_target;

static void put(const heddle_append *a, row_target to, int64_t there, double x) {
    if (to.bytes)
        ((uint8_t *)to.at)[there] = double_to_e4m3(x / to.scale);
    else
        store_element(a->dtype, to.at, there, x);
}

static row_target cache_of(const heddle_append *a, void *at, const void *scale, int64_t n, int64_t y) {
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    return (row_target){at, (a->features & HEDDLE_E4M3) != 0, scale ? load_element(real, scale, n * a->hk + y) : 1};
}

/* One row, `width` elements of it, as it is at `position`. */
static void put_row(const heddle_append *a, const heddle_append_data *t, int64_t position, int64_t rotary,
                    int64_t width, const void *from, int64_t at, row_target to, int64_t there) {
    const int64_t half = rotary / 2, known = position < a->positions ? position * a->table_stride : -1;
    for (int64_t e = 0; e < half; e++) {
        const double c = known < 0 ? NAN : load_element(a->table_dtype, t->cos, known + e);
        const double s = known < 0 ? NAN : load_element(a->table_dtype, t->sin, known + e);
        const int64_t one = a->interleaved ? 2 * e : e, other = a->interleaved ? one + 1 : e + half;
        const double y = load_element(a->dtype, from, at + one), z = load_element(a->dtype, from, at + other);
        put(a, to, there + one, y * c - z * s);
        put(a, to, there + other, y * s + z * c);
    }
    for (int64_t e = rotary; e < width; e++)
        put(a, to, there + e, load_element(a->dtype, from, at + e));
}

static void put_keys(const heddle_append *a, const heddle_append_data *t, int64_t n, int64_t i, int64_t b,
                     int64_t row) {
    const int64_t j = append_length(a, t, n) + i;
    int64_t part, to;
    if (!append_place(a, t, n, j, &part, &to))
        return;
    for (int64_t x = 0; x < a->hk; x++) {
        put_row(a, t, j, a->rotary, a->d, t->k_new,
                b * a->k_new_stride.b + x * a->k_new_stride.h + row * a->k_new_stride.s,
                cache_of(a, t->k, t->k_scale, n, x), part * a->k_stride.b + x * a->k_stride.h + to * a->k_stride.s);
        put_row(a, t, j, 0, a->dv, t->v_new, b * a->v_new_stride.b + x * a->v_new_stride.h + row * a->v_new_stride.s,
                cache_of(a, t->v, t->v_scale, n, x), part * a->v_stride.b + x * a->v_stride.h + to * a->v_stride.s);
    }
}

static void put_query(const heddle_append *a, const heddle_append_data *t, int64_t n, int64_t i, int64_t b,
                      int64_t row) {
    const int64_t position = append_length(a, t, n) + (a->together ? 0 : i);
    for (int64_t x = 0; x < a->h; x++)
        put_row(a, t, position, a->rotary, a->d, t->q, b * a->q_stride.b + x * a->q_stride.h + row * a->q_stride.s,
                (row_target){.at = t->q_out}, b * a->q_out_stride.b + x * a->q_out_stride.h + row * a->q_out_stride.s);
}

heddle_status heddle__ref_append(const heddle_append *a, const heddle_append_data *t, void *stream) {
    (void)stream;
    for (int64_t n = 0; n < a->b; n++) {
        int64_t first = 0, rows = a->s, queries = a->sq, b = n;
        if (a->features & HEDDLE_VARLEN) {
            queries = rows = append_packed(a, t, n, &first);
            b = 0;
        }
        for (int64_t i = 0; i < rows; i++)
            put_keys(a, t, n, i, b, first + i);
        for (int64_t i = 0; i < queries; i++)
            put_query(a, t, n, i, b, first + i);
        if (t->seqlens_out)
            t->seqlens_out[n] = (int32_t)append_length_after(a, t, n);
    }
    return HEDDLE_OK;
}
