/* SPDX-License-Identifier: Apache-2.0
 * Bytes to a description of attention or norm-linear, sane or absurd; what the library accepts has a workspace and a
 * name in both passes, and runs, where it is small, in tensors and a workspace without a byte to spare. Append and merge
 * are in fuzz_problems_append.c. */
#define _GNU_SOURCE
#include "../../src/fields.h"
#include "problems.h"

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    return 0;
}

/* ---------------------------------------------------------------------------------------------------- attention */

static void options_of_attention(bytes *b, heddle_attention *a) {
    static const double scales[] = {0, 0.5, -1, 1e-3, 1e30, 1e-40, 1e300};
    static const double caps[] = {0, 0, 30, 0.5, 1e-30, 1e20, 1e-50, 1e39};
    a->dtype = (heddle_dtype)take_between(b, 0, 3);
    a->device = take_between(b, 0, 3) ? HEDDLE_CPU : HEDDLE_REF;
    a->features = take_number(b, 2) & 0xffff;
    a->mask = (heddle_mask)take_between(b, 0, LAST_MASK);
    a->scale = scales[take_between(b, 0, 6)];
    a->softcap = caps[take_between(b, 0, 7)];
    a->dropout = (double)take_between(b, 0, 3) / 4;
    a->seed = take_number(b, 1);
    if (a->features & HEDDLE_BLOCKS) {
        a->block_q = (uint8_t)(64 << take_between(b, 0, 1));
        a->block_k = (uint8_t)(64 << take_between(b, 0, 1));
        a->blocks_of_b = (uint8_t)take_between(b, 0, 1);
        a->blocks_of_h = (uint8_t)take_between(b, 0, 1);
    }
    if (a->features & HEDDLE_WINDOW) {
        a->window_left = take_between(b, -2, 9);
        a->window_right = take_between(b, -2, 9);
    }
}

/* A part of a whole, and the limit, with numbers that `take` makes. */
static void part_of_attention(bytes *b, heddle_attention *a, int64_t (*take)(bytes *)) {
    int64_t *const number[] = {&a->q_offset, &a->k_offset, &a->h_offset,       &a->whole_sq,
                               &a->whole_sk, &a->whole_h,  &a->multiprocessors};
    const uint64_t which = take_number(b, 1);
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        *number[i] = which >> i & 1 ? take(b) : 0;
}

static int64_t small_size(bytes *b) {
    return take_between(b, 0, 200);
}

static heddle_attention small_attention(bytes *b) {
    heddle_attention a = {.size = sizeof a};
    options_of_attention(b, &a);
    a.b = take_between(b, 0, 3);
    a.hk = take_between(b, 1, 3);
    a.h = a.hk * take_between(b, 1, 4);
    a.sq = take_between(b, 0, take_bit(b) ? 5 : 70);
    a.sk = take_between(b, 0, take_bit(b) ? 9 : 150);
    if (a.device == HEDDLE_REF) { /* which is slow, and has no tiles */
        a.sq %= 16;
        a.sk %= 16;
    }
    a.d = take_between(b, 1, take_bit(b) ? 9 : 40);
    a.dv = take_between(b, 0, take_bit(b) ? 9 : 40);
    const int packed = (a.features & HEDDLE_VARLEN) != 0, paged = (a.features & HEDDLE_PAGES) != 0;
    if (packed) {
        a.total_q = take_between(b, 0, 80);
        a.total_k = paged ? 0 : take_between(b, 0, 160);
    }
    if (paged) {
        a.page = INT64_C(16) << take_between(b, 0, 4);
        a.pages = take_between(b, 0, 5);
        a.table = take_between(b, 0, 1) * take_between(b, 0, 12);
    }
    const int64_t dv = a.dv ? a.dv : a.d, rows_q = packed ? a.total_q : a.sq, rows_k = packed ? a.total_k : a.sk,
                  keys = paged ? a.page : rows_k;
    a.q_stride = small_strides(b, 1, packed, a.h, rows_q, a.d);
    a.k_stride = small_strides(b, 1, packed && !paged, a.hk, keys, a.d);
    a.v_stride = small_strides(b, 1, packed && !paged, a.hk, keys, dv);
    a.do_stride = small_strides(b, 1, packed, a.h, rows_q, dv);
    a.o_stride = small_strides(b, 0, packed, a.h, rows_q, dv);
    a.dq_stride = small_strides(b, 0, packed, a.h, rows_q, a.d);
    a.dk_stride = small_strides(b, 0, packed, a.hk, rows_k, a.d);
    a.dv_stride = small_strides(b, 0, packed, a.hk, rows_k, dv);
    a.bias_stride = small_strides(b, 1, 0, a.h, a.sq, a.sk);
    a.dbias_stride = small_strides(b, 1, 0, a.h, a.sq, a.sk);
    a.bool_mask_stride = small_strides(b, 1, 0, a.h, a.sq, a.sk);
    a.weights_stride = small_strides(b, 0, 0, a.h, a.sq, a.sk);
    a.dweights_stride = small_strides(b, 1, 0, a.h, a.sq, a.sk);
    if (a.features & HEDDLE_ALIBI)
        a.alibi_stride_b = take_between(b, 0, 1) * a.h;
    part_of_attention(b, &a, small_size);
    return a;
}

static heddle_attention absurd_attention(bytes *b) {
    heddle_attention a = {.size = sizeof a};
    options_of_attention(b, &a);
    int64_t *const size[] = {&a.b, &a.h, &a.hk, &a.sq, &a.sk, &a.total_q, &a.total_k};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        *size[i] = any_size(b);
    if (!(a.features & HEDDLE_VARLEN) && take_bit(b))
        a.total_q = a.total_k = 0;
    if (take_bit(b))
        a.hk = 0;
    a.d = take_between(b, 0, 513);
    a.dv = take_between(b, -1, 513);
    heddle_strides *const strides[] = {&a.q_stride,        &a.k_stride,     &a.v_stride,       &a.o_stride,
                                       &a.do_stride,       &a.dq_stride,    &a.dk_stride,      &a.dv_stride,
                                       &a.bias_stride,     &a.dbias_stride, &a.weights_stride, &a.dweights_stride,
                                       &a.bool_mask_stride};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        const uint64_t kind = take_number(b, 1);
        if (kind < 128)
            continue;
        *strides[i] = kind < 192 ? (heddle_strides){HEDDLE_BROADCAST, 0, 0}
                                 : (heddle_strides){any_size(b), any_size(b), any_size(b)};
    }
    if (a.features & HEDDLE_WINDOW) {
        a.window_left = (int64_t)take_number(b, 8);
        a.window_right = (int64_t)take_number(b, 8);
    }
    if (a.features & HEDDLE_ALIBI)
        a.alibi_stride_b = any_size(b);
    if (a.features & HEDDLE_PAGES) {
        a.page = take_bit(b) ? any_size(b) : INT64_C(16) << take_between(b, 0, 4);
        a.pages = any_size(b);
        a.table = any_size(b);
    }
    part_of_attention(b, &a, any_size);
    return a;
}

/* Of one of the small tensors; NULL, if it may be, where a bit says so. */
static void *new_tensor(memory *m, const heddle_attention *a, int per_sequence, heddle_strides s, int64_t h,
                        int64_t rows, int64_t last, int fills) {
    const int packed = !per_sequence && (a->features & HEDDLE_VARLEN);
    const int64_t count = span(literal(s, packed, h, rows, last), packed ? 1 : a->b, h, rows, last);
    return fills ? new_floats(m, a->dtype, count) : new_block(m, (size_t)count * heddle_dtype_size(a->dtype));
}

/* k or v. */
static void *new_keys(memory *m, const heddle_attention *a, heddle_strides s, int64_t rows, int64_t last) {
    const int64_t hk = a->hk ? a->hk : a->h;
    const int paged = (a->features & HEDDLE_PAGES) != 0, packed = !paged && (a->features & HEDDLE_VARLEN);
    const int64_t b = paged ? a->pages : packed ? 1 : a->b, of_rows = paged ? a->page : rows;
    if (a->features & HEDDLE_E4M3)
        return new_bytes(m, span(literal(s, packed, hk, of_rows, last), b, hk, of_rows, last));
    if (paged)
        return new_floats(m, a->dtype, span(literal(s, 0, hk, a->page, last), a->pages, hk, a->page, last));
    return new_tensor(m, a, 0, s, hk, rows, last, 1);
}

static uint8_t *new_mask(memory *m, const heddle_attention *a) {
    const int64_t count = span(literal(a->bool_mask_stride, 0, a->h, a->sq, a->sk), a->b, a->h, a->sq, a->sk);
    uint8_t *p = new_block(m, (size_t)count);
    uint64_t state = take_number(m->source, 2);
    for (int64_t i = 0; i < count; i++)
        p[i] = (uint8_t)((state = state * UINT64_C(6364136223846793005) + 1) >> 33 & 3);
    return p;
}

static void *new_dbias(memory *m, const heddle_attention *a) {
    const heddle_strides s = literal(a->dbias_stride, 0, a->h, a->sq, a->sk);
    return new_block(m, (size_t)span(s, s.b ? a->b : 1, s.h ? a->h : 1, s.s ? a->sq : 1, a->sk) *
                            heddle_dtype_size(a->dtype));
}

/* Whether each tensor of the absurd description would be small, too, as far as the library lets it through. */
static int is_small(const heddle_attention *a) {
    const int64_t sizes[] = {a->b, a->h, a->sq, a->sk, a->total_q, a->total_k};
    const heddle_strides strides[] = {a->q_stride,        a->k_stride,     a->v_stride,       a->o_stride,
                                      a->do_stride,       a->dq_stride,    a->dk_stride,      a->dv_stride,
                                      a->bias_stride,     a->dbias_stride, a->weights_stride, a->dweights_stride,
                                      a->bool_mask_stride};
    double product = (double)(a->d > a->dv ? a->d : a->dv);
    for (int i = 0; i < 4; i++)
        product *= (double)(sizes[i] + 1);
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        if (strides[i].b > 4096 || strides[i].h > 4096 || strides[i].s > 4096)
            return 0;
    if (a->pages > 64 || a->table > 64)
        return 0;
    return product < MOST_BYTES && a->alibi_stride_b < 4096 && a->total_q < 256 && a->total_k < 256;
}

/* With the type of what may be added to. */
static heddle_attention sums_of(const heddle_attention *a) {
    heddle_attention s = *a;
    if (a->features & HEDDLE_ACCUMULATE)
        s.dtype = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    return s;
}

static heddle_attention_data data_of_attention(memory *m, const heddle_attention *a) {
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const uint64_t f = a->features, left_out = take_number(m->source, 2);
    const int packed = (f & HEDDLE_VARLEN) != 0;
    const int64_t dv = a->dv ? a->dv : a->d, rows_q = packed ? a->total_q : a->sq, rows_k = packed ? a->total_k : a->sk,
                  of_rows = a->h * rows_q * (packed ? 1 : a->b);
    const heddle_attention sums = sums_of(a);
    heddle_attention_data t = {.size = sizeof t};
    t.q = new_tensor(m, a, 0, a->q_stride, a->h, rows_q, a->d, 1);
    t.k = new_keys(m, a, a->k_stride, rows_k, a->d);
    t.v = new_keys(m, a, a->v_stride, rows_k, dv);
    t.o = new_tensor(m, &sums, 0, a->o_stride, a->h, rows_q, dv, 0);
    t.lse = new_block(m, (size_t)of_rows * heddle_dtype_size(real));
    if (f & HEDDLE_ALIBI)
        t.alibi_slopes = new_floats(m, real, a->b ? (a->b - 1) * a->alibi_stride_b + a->h : 0);
    if (f & HEDDLE_BIAS)
        t.bias = new_tensor(m, a, 1, a->bias_stride, a->h, a->sq, a->sk, 1);
    if (f & HEDDLE_BOOL_MASK)
        t.bool_mask = new_mask(m, a);
    if (f & HEDDLE_SINKS)
        t.sinks = new_floats(m, real, a->h);
    if (packed) {
        t.cu_seqlens_q = new_lengths(m, a->b + 1, rows_q);
        t.cu_seqlens_k = f & HEDDLE_PAGES ? NULL : new_lengths(m, a->b + 1, rows_k);
    }
    if (f & HEDDLE_PAGES) {
        const int64_t row = a->table ? a->table : (a->sk + a->page - 1) / a->page;
        t.block_table = new_lengths(m, a->b * row, a->pages);
    }
    if (f & HEDDLE_BLOCKS) {
        const int64_t numbers = (a->blocks_of_b ? a->b : 1) * (a->blocks_of_h ? a->h : 1) *
                                ((a->sq + a->block_q - 1) / a->block_q + 1),
                      columns = take_between(m->source, 0, 40);
        int32_t *rows = new_lengths(m, numbers, columns);
        if (numbers > 0)
            rows[numbers - 1] = (int32_t)columns;
        t.block_rows = rows;
        t.block_columns = new_lengths(m, columns, 5);
    }
    if (f & HEDDLE_E4M3) {
        t.k_scale = left_out & 4 ? NULL : new_floats(m, real, a->b * (a->hk ? a->hk : a->h));
        t.v_scale = left_out & 8 ? NULL : new_floats(m, real, a->b * (a->hk ? a->hk : a->h));
    }
    if (f & HEDDLE_SEGMENTS) {
        t.q_segments = new_lengths(m, packed ? rows_q : a->b * a->sq, 3);
        t.k_segments = new_lengths(m, packed && !(f & HEDDLE_PAGES) ? rows_k : a->b * a->sk, 3);
    }
    if (f & HEDDLE_SEQLENS) {
        t.seqlens_q = left_out & 1 ? NULL : new_lengths(m, a->b, a->sq);
        t.seqlens_k = !t.seqlens_q || left_out & 2 ? new_lengths(m, a->b, a->sk) : NULL;
    }
    if (f & HEDDLE_RNG_STATE) {
        uint64_t *state = new_block(m, 16);
        state[0] = take_number(m->source, 1);
        state[1] = take_number(m->source, 8);
        t.rng_state = state;
    }
    if (f & HEDDLE_WEIGHTS)
        t.weights = new_tensor(m, a, 1, a->weights_stride, a->h, a->sq, a->sk, 0);
    return t;
}

static void data_of_gradients(memory *m, const heddle_attention *a, heddle_attention_data *t) {
    const heddle_attention sums = sums_of(a);
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const uint64_t f = a->features, left_out = take_number(m->source, 2);
    const int packed = (f & HEDDLE_VARLEN) != 0;
    const int64_t hk = a->hk ? a->hk : a->h, dv = a->dv ? a->dv : a->d, rows_q = packed ? a->total_q : a->sq,
                  rows_k = packed ? a->total_k : a->sk, of_rows = a->h * rows_q * (packed ? 1 : a->b);
    t->weights = NULL;
    if (!(left_out & 1))
        t->dout = new_tensor(m, a, 0, a->do_stride, a->h, rows_q, dv, 1);
    if (left_out & 2)
        t->dlse = new_floats(m, real, of_rows);
    if ((f & HEDDLE_WEIGHTS) && !(left_out & 4))
        t->dweights = new_tensor(m, a, 1, a->dweights_stride, a->h, a->sq, a->sk, 1);
    if (!(left_out & 8))
        t->dq = new_tensor(m, &sums, 0, a->dq_stride, a->h, rows_q, a->d, 0);
    if (!(left_out & 16))
        t->dk = new_tensor(m, &sums, 0, a->dk_stride, hk, rows_k, a->d, 0);
    if (!(left_out & 32))
        t->dv = new_tensor(m, &sums, 0, a->dv_stride, hk, rows_k, dv, 0);
    if ((f & HEDDLE_BIAS) && !(left_out & 64))
        t->dbias = new_dbias(m, a);
    if ((f & HEDDLE_SINKS) && !(left_out & 128))
        t->dsinks = new_block(m, (size_t)a->h * heddle_dtype_size(real));
}

/* What both passes need, or that they are refused alike; of keys in pages or of 8 bits backward is, always. */
static int plans(const heddle_attention *a, size_t need[2]) {
    char why[256], name[128];
    const heddle_status status = heddle_attention_supported(a, why, sizeof why);
    const int paged = (a->features & (HEDDLE_PAGES | HEDDLE_E4M3)) != 0;
    for (int pass = 0; pass < 2; pass++) {
        const int taken = status == HEDDLE_OK && !(pass && paged);
        need[pass] = pass && paged ? 0 : SIZE_MAX;
        MUST((heddle_attention_workspace(a, (heddle_pass)pass, &need[pass]) == HEDDLE_OK) == taken);
        MUST((heddle_attention_kernel(a, (heddle_pass)pass, name, sizeof name) == HEDDLE_OK) == taken);
        MUST(!taken || need[pass] < INT64_MAX);
    }
    MUST((status == HEDDLE_OK) == (*why == 0));
    return status == HEDDLE_OK;
}

static void fuzz_attention(bytes *b) {
    memory m = {.source = b};
    size_t need[2];
    const int absurd = take_bit(b);
    const heddle_attention a = absurd ? absurd_attention(b) : small_attention(b);
    if (!plans(&a, need) || (absurd && !is_small(&a)) || need[0] > MOST_WORKSPACE || need[1] > MOST_WORKSPACE)
        return;
    heddle_attention_data t = data_of_attention(&m, &a);
    void *space = new_block(&m, need[0]);
    MUST(heddle_attention_forward(&a, &t, space, need[0], NULL) == HEDDLE_OK);
    if (!(a.features & (HEDDLE_PAGES | HEDDLE_E4M3))) {
        data_of_gradients(&m, &a, &t);
        space = new_block(&m, need[1]);
        MUST(heddle_attention_backward(&a, &t, space, need[1], NULL) == HEDDLE_OK);
    }
    free_blocks(&m);
}

/* -------------------------------------------------------------------------------------------------- norm-linear */

static heddle_norm_linear some_norm_linear(bytes *b, int absurd) {
    heddle_norm_linear a = {.size = sizeof a};
    a.dtype = (heddle_dtype)take_between(b, 0, 3);
    a.device = take_between(b, 0, 3) ? HEDDLE_CPU : HEDDLE_REF;
    a.norm = (heddle_norm)take_between(b, 0, LAST_NORM);
    a.features = take_bit(b) ? HEDDLE_DETERMINISTIC : 0;
    a.eps = take_bit(b) || (a.norm == HEDDLE_NO_NORM && !absurd) ? 0 : 1e-3;
    a.m = absurd ? any_size(b) : take_between(b, 0, 40);
    a.k = absurd ? any_size(b) : take_between(b, 1, 70);
    a.n = absurd ? any_size(b) : take_between(b, 1, 70);
    const int64_t width[] = {a.k, a.k, a.n, a.n, a.k, a.k};
    int64_t *const stride[] = {&a.x_stride, &a.w_stride, &a.y_stride, &a.dy_stride, &a.dx_stride, &a.dw_stride};
    for (int i = 0; i < 6; i++)
        if (take_bit(b))
            *stride[i] = absurd ? any_size(b) : width[i] + take_between(b, 0, 3);
    if (take_bit(b)) {
        a.features |= HEDDLE_ACTIVATION;
        a.activation = (heddle_activation)take_between(b, absurd ? -1 : 1, LAST_ACTIVATION + (absurd ? 2 : 0));
        a.u_stride = take_bit(b) ? 0 : absurd ? any_size(b) : norm_linear_extent(&a, 'N') + take_between(b, 0, 3);
    }
    if (take_bit(b)) {
        a.features |= HEDDLE_RESIDUAL;
        a.residual_stride = take_bit(b) ? 0 : absurd ? any_size(b) : a.n + take_between(b, 0, 3);
    }
    if (take_bit(b) && (absurd || a.norm != HEDDLE_NO_NORM)) {
        a.features |= HEDDLE_Z;
        a.z_stride = take_bit(b) ? 0 : absurd ? any_size(b) : a.k + take_between(b, 0, 3);
        a.dz_stride = take_bit(b) ? 0 : absurd ? any_size(b) : a.k + take_between(b, 0, 3);
    }
    if (take_bit(b))
        a.multiprocessors = absurd ? any_size(b) : take_between(b, 0, 200);
    return a;
}

static int64_t rows_span(int64_t rows, int64_t width, int64_t stride) {
    return rows ? (rows - 1) * (stride ? stride : width) + width : 0;
}

/* The same forward once more, with what it makes of the weight in a block of its own, and with other bytes in its place. */
static void run_prepared(memory *m, heddle_norm_linear a, heddle_norm_linear_data t) {
    size_t size = 0, need = 0;
    MUST(heddle_norm_linear_prepared_size(&a, &size) == HEDDLE_OK);
    void *const prepared = new_block(m, size);
    MUST(heddle_norm_linear_prepare(&a, &t, prepared, size, NULL) == HEDDLE_OK);
    a.features |= HEDDLE_PREPARED;
    a.prepared_bytes = (int64_t)size;
    t.prepared = size ? prepared : NULL;
    MUST(heddle_norm_linear_workspace(&a, HEDDLE_FORWARD, &need) == HEDDLE_OK);
    void *const space = new_block(m, need);
    MUST(heddle_norm_linear_forward(&a, &t, space, need, NULL) == HEDDLE_OK);
    if (!size)
        return;
    ((unsigned char *)prepared)[take_number(m->source, 1) % 64] ^= 1;
    MUST(heddle_norm_linear_forward(&a, &t, space, need, NULL) == HEDDLE_BAD_VALUE);
}

static void run_norm_linear(memory *m, const heddle_norm_linear *a, const size_t need[2]) {
    const heddle_dtype real = a->dtype == HEDDLE_F64 ? HEDDLE_F64 : HEDDLE_F32;
    const size_t each = heddle_dtype_size(a->dtype);
    const int64_t of_u = norm_linear_extent(a, 'N');
    const uint64_t left_out = take_number(m->source, 2) | (a->norm == HEDDLE_NO_NORM ? 1 | 2 | 8 | 64 | 128 : 0);
    heddle_norm_linear_data t = {.size = sizeof t};
    t.x = new_floats(m, a->dtype, rows_span(a->m, a->k, a->x_stride));
    t.w = new_floats(m, a->dtype, rows_span(of_u, a->k, a->w_stride));
    t.gamma = left_out & 1 ? NULL : new_floats(m, a->dtype, a->k);
    t.beta = left_out & 2 ? NULL : new_floats(m, a->dtype, a->k);
    t.bias = left_out & 4 ? NULL : new_floats(m, a->dtype, of_u);
    t.y = new_block(m, (size_t)rows_span(a->m, a->n, a->y_stride) * each);
    t.mean = left_out & 8 ? NULL : new_block(m, (size_t)a->m * heddle_dtype_size(real));
    t.rstd = left_out & 8 ? NULL : new_block(m, (size_t)a->m * heddle_dtype_size(real));
    t.u = a->activation ? new_block(m, (size_t)rows_span(a->m, of_u, a->u_stride) * each) : NULL;
    if (a->features & HEDDLE_RESIDUAL)
        t.residual = new_floats(m, a->dtype, rows_span(a->m, a->n, a->residual_stride));
    if (a->features & HEDDLE_Z) {
        t.z = new_block(m, (size_t)rows_span(a->m, a->k, a->z_stride) * each);
        t.dz = new_floats(m, a->dtype, rows_span(a->m, a->k, a->dz_stride));
    }
    void *space = new_block(m, need[0]);
    MUST(heddle_norm_linear_forward(a, &t, space, need[0], NULL) == HEDDLE_OK);
    run_prepared(m, *a, t);
    t.dy = new_floats(m, a->dtype, rows_span(a->m, a->n, a->dy_stride));
    t.y = left_out & 16 ? NULL : t.y;
    t.dx = left_out & 32 ? NULL : new_block(m, (size_t)rows_span(a->m, a->k, a->dx_stride) * each);
    t.dgamma = left_out & 64 ? NULL : new_block(m, (size_t)a->k * each);
    t.dbeta = left_out & 128 ? NULL : new_block(m, (size_t)a->k * each);
    t.dw = left_out & 256 ? NULL : new_block(m, (size_t)rows_span(of_u, a->k, a->dw_stride) * each);
    t.dbias = left_out & 512 ? NULL : new_block(m, (size_t)of_u * each);
    space = new_block(m, need[1]);
    MUST(heddle_norm_linear_backward(a, &t, space, need[1], NULL) == HEDDLE_OK);
    free_blocks(m);
}

static void fuzz_norm_linear(bytes *b) {
    memory m = {.source = b};
    const int absurd = take_bit(b);
    const heddle_norm_linear a = some_norm_linear(b, absurd);
    size_t need[2] = {SIZE_MAX, SIZE_MAX};
    char why[256], name[128];
    const heddle_status status = heddle_norm_linear_supported(&a, why, sizeof why);
    for (int pass = 0; pass < 2; pass++) {
        MUST((heddle_norm_linear_workspace(&a, (heddle_pass)pass, &need[pass]) == HEDDLE_OK) == (status == HEDDLE_OK));
        MUST((heddle_norm_linear_kernel(&a, (heddle_pass)pass, name, sizeof name) == HEDDLE_OK) ==
             (status == HEDDLE_OK));
        MUST(status != HEDDLE_OK || need[pass] < INT64_MAX);
    }
    const int64_t strides = a.x_stride | a.w_stride | a.y_stride | a.dy_stride | a.dx_stride | a.dw_stride |
                            a.u_stride | a.residual_stride | a.z_stride | a.dz_stride;
    if (status != HEDDLE_OK || a.m > 64 || a.k > 128 || a.n > 128 || strides > 4096 || need[0] > MOST_WORKSPACE ||
        need[1] > MOST_WORKSPACE)
        return;
    run_norm_linear(&m, &a, need);
}

/* Few inputs that have grown begin with such a byte: they go on being what they were. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, data + size};
    const uint64_t kind = take_number(&b, 1);
    if (kind >> 5 == 2)
        (kind % 4 ? fuzz_append : fuzz_merge)(&b);
    else if (kind % 4)
        fuzz_attention(&b);
    else
        fuzz_norm_linear(&b);
    return 0;
}
