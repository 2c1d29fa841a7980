/* SPDX-License-Identifier: Apache-2.0
 * torch.ops.heddle.attention and attention_backward: tensors to a description and back. */
#include "torch_attention.h"

#include "../../src/fields.h"
#include "block_lists.h"

#include <string.h>

#define TENSOR(id, name, field) "O"
#define NUMBER(id, schema, letter) letter
static const char forward_signature[] = "TTT"
#include "attention_arguments.def"
    ;
#define TENSOR(id, name, field) "O"
#define NUMBER(id, schema, letter) letter
static const char options_signature[] = "TTT"
#include "attention_arguments.def"
                                        "B";
#define TENSOR(id, name, field) "O"
#define NUMBER(id, schema, letter) letter
static const char backward_signature[] = "OOOTTTTT"
#include "attention_arguments.def"
                                         "I";

typedef struct argument {
    const char *name; /* NULL: no optional tensor */
    const tensor_field *field;
} argument;

#define TENSOR(id, name, field) [id] = {#name, &attention_fields[FIELD_##field]},
static const argument optional[NEEDS] = {
#include "attention_arguments.def"
};

enum { NEEDS_DQ = 1, NEEDS_DK = 2, NEEDS_DV = 4, NEEDS_DBIAS = 8, NEEDS_DSINKS = 16 };

heddle_strides attention_strides(const int64_t *stride, bool varlen) {
    heddle_strides s = {varlen ? 0 : stride[0], stride[1], varlen ? stride[0] : stride[2]};
    if (s.b == 0 && s.h == 0 && s.s == 0)
        s.b = s.h = s.s = HEDDLE_BROADCAST; /* three zeros would mean contiguous */
    return s;
}

/* The same for a tensor that is repeated where its size is 1. */
static heddle_strides broadcast_strides(const int64_t *size, const int64_t *stride) {
    int64_t s[4];
    for (int x = 0; x < 3; x++)
        s[x] = size[x] == 1 ? 0 : stride[x];
    return attention_strides(s, false);
}

/* The layout of a result that follows `like`: heads inside rows ([b, s, h, d] in memory) if `like` has that, else
 * contiguous. heddle._fake.result_strides says the same for the fake kernels. */
static void result_layout(const tensor *like, bool varlen, int64_t last, int64_t *size, int64_t *stride) {
    for (int64_t x = 0; x + 1 < like->rank; x++)
        size[x] = like->size[x];
    size[like->rank - 1] = last;
    contiguous_strides(like->rank, size, stride);
    if (!varlen && like->stride[1] < like->stride[2]) {
        int64_t h = size[1] > 1 ? size[1] : 1, s = size[2] > 1 ? size[2] : 1, l = last > 1 ? last : 1;
        stride[0] = s * h * l;
        stride[1] = l;
        stride[2] = h * l;
    }
}

/* ----------------------------------------------------------------------------------------------------- checks */

static bool check_sizes(call *c, problem *p) {
    const tensor *q = &p->in[Q], *k = &p->in[K], *v = &p->in[V];
    const char *const names[] = {"q", "k", "v"};
    const int32_t bytes = aoti_torch_dtype_float8_e4m3fn();
    if (k->dtype == bytes || v->dtype == bytes)
        p->a.features |= HEDDLE_E4M3;
    for (int x = 0; x < 3; x++) {
        const bool pages = p->paged && x != Q, rows = p->varlen && !pages;
        if (p->in[x].rank != (rows ? 3 : 4))
            return call_fail(c, "ValueError", "%s has %lld dimensions, but must have %s", names[x],
                             (long long)p->in[x].rank,
                             pages  ? "4 ([pages, hk, page, d])"
                             : rows ? "3 ([total, h, d])"
                                    : "4 ([b, h, s, d])");
        if (!call_check(c, &p->in[x], names[x], x != Q && p->a.features & HEDDLE_E4M3 ? bytes : call_dtype(c)))
            return false;
    }
    const int64_t d = k->rank - 1;
    if (k->size[d] != q->size[q->rank - 1])
        return call_fail(c, "ValueError", "q has head dim %lld, but k has %lld", (long long)q->size[q->rank - 1],
                         (long long)k->size[d]);
    for (int64_t x = 0; x < d; x++)
        if (k->size[x] != v->size[x])
            return call_fail(c, "ValueError", "k has size %lld in dimension %lld, but v has %lld",
                             (long long)k->size[x], (long long)x, (long long)v->size[x]);
    if (!p->varlen && !p->paged && k->size[0] != q->size[0])
        return call_fail(c, "ValueError", "q has batch size %lld, but k has %lld", (long long)q->size[0],
                         (long long)k->size[0]);
    if (k->size[1] == 0 || q->size[1] % k->size[1])
        return call_fail(c, "ValueError", "hk = %lld does not divide h = %lld (HEDDLE_BAD_HEADS)",
                         (long long)k->size[1], (long long)q->size[1]);
    if (v->size[d] == 0)
        return call_fail(c, "ValueError", "v has head dim 0");
    return true;
}

/* Keys in pages, once b is known: the limit of a sequence's keys is what its row of the table has room for, or max_seqlen_k. */
static bool take_pages(call *c, problem *p, int64_t most) {
    heddle_attention *a = &p->a;
    const tensor *k = &p->in[K], *table = &p->in[BLOCK_TABLE];
    if (table->rank != 2 || table->size[0] != a->b)
        return call_fail(c, "ValueError",
                         "block_table has %lld dimensions, the first of size %lld, but must have 2 ([%lld, pages of a "
                         "sequence])",
                         (long long)table->rank, (long long)(table->rank ? table->size[0] : 0), (long long)a->b);
    if (!call_check(c, table, "block_table", aoti_torch_dtype_int32()))
        return false;
    if (table->size[0] > 1 && table->stride[0] < table->size[1])
        return call_fail(c, "ValueError", "block_table has stride %lld between rows of %lld: they must not overlap",
                         (long long)table->stride[0], (long long)table->size[1]);
    a->pages = k->size[0];
    a->page = k->size[2];
    a->table = table->size[0] > 1 ? table->stride[0] : table->size[1];
    if (__builtin_mul_overflow(table->size[1], a->page, &a->sk))
        a->sk = INT64_MAX;
    if (most > 0 && most < a->sk)
        a->sk = most;
    a->features |= HEDDLE_PAGES;
    p->t.block_table = table->data;
    return true;
}

/* Packed queries: how many sequences there are, and where they begin. */
static bool take_packed(call *c, problem *p, const int64_t *integer) {
    heddle_attention *a = &p->a;
    const tensor *cu_q = &p->in[CU_SEQLENS_Q], *cu_k = &p->in[CU_SEQLENS_K];
    if (p->paged && cu_k->handle)
        return call_fail(c, "ValueError",
                         "cu_seqlens_k is given with block_table: keys in pages are not packed, seqlens_k has their "
                         "lengths");
    if (!cu_q->handle || (!p->paged && !cu_k->handle))
        return call_fail(c, "ValueError", "cu_seqlens_q and cu_seqlens_k come together, but only one is given");
    if (cu_q->rank != 1 || cu_q->size[0] < 1)
        return call_fail(c, "ValueError", "cu_seqlens_q must have one dimension of at least 1");
    if (!call_check(c, cu_q, "cu_seqlens_q", aoti_torch_dtype_int32()))
        return false;
    if (!p->paged && (!call_check_shape(c, cu_k, "cu_seqlens_k", 1, cu_q->size) ||
                      !call_check(c, cu_k, "cu_seqlens_k", aoti_torch_dtype_int32())))
        return false;
    a->b = cu_q->size[0] - 1;
    a->sq = integer[MAX_SEQLEN_Q];
    a->total_q = p->in[Q].size[0];
    a->features |= HEDDLE_VARLEN;
    p->t.cu_seqlens_q = cu_q->data;
    p->t.cu_seqlens_k = p->paged ? NULL : cu_k->data;
    return true;
}

static bool take_sizes(call *c, problem *p, const int64_t *integer) {
    heddle_attention *a = &p->a;
    const tensor *q = &p->in[Q], *k = &p->in[K];
    a->h = q->size[1];
    a->hk = k->size[1];
    a->d = q->size[q->rank - 1];
    a->dv = p->in[V].size[k->rank - 1];
    if (!p->varlen) {
        a->b = q->size[0];
        a->sq = q->size[2];
        a->sk = k->size[2];
        return !p->paged || take_pages(c, p, integer[MAX_SEQLEN_K]);
    }
    if (!take_packed(c, p, integer))
        return false;
    if (p->paged) {
        if (!take_pages(c, p, integer[MAX_SEQLEN_K]))
            return false;
    } else {
        a->sk = integer[MAX_SEQLEN_K];
        a->total_k = k->size[0];
    }
    /* No sequence is longer than all rows together, and the kernels' work grows with the limit. Only the square tensors
     * and lists of blocks have it in their shapes. */
    bool square = integer[RETURN_WEIGHTS] || p->in[BLOCK_ROWS].handle;
    for (int x = 0; x < NEEDS; x++)
        square |= optional[x].name && p->in[x].handle && is_of_scores(optional[x].field->shape);
    if (!square) {
        a->sq = a->sq < a->total_q ? a->sq : a->total_q;
        if (!p->paged)
            a->sk = a->sk < a->total_k ? a->sk : a->total_k;
    }
    return true;
}

/* On the CPU the lengths can be read, so a wrong one is an error there; on a GPU it is clamped. */
static bool check_packing(call *c, const char *name, const int32_t *cu, int64_t b, int64_t longest, int64_t total) {
    for (int64_t x = 0; x <= b; x++)
        if (cu[x] < (x ? cu[x - 1] : 0) || cu[x] > total || (x && cu[x] - cu[x - 1] > longest))
            return call_fail(
                c, "ValueError",
                "cu_seqlens_%s[%lld] = %d after %d: must not fall, exceed the %lld rows, or make a sequence "
                "longer than max_seqlen_%s = %lld",
                name, (long long)x, cu[x], x ? cu[x - 1] : 0, (long long)total, name, (long long)longest);
    return true;
}

static bool check_lengths(call *c, const char *name, const int32_t *lengths, int64_t b, int64_t longest) {
    for (int64_t x = 0; lengths && x < b; x++)
        if (lengths[x] < 0 || lengths[x] > longest)
            return call_fail(c, "ValueError", "seqlens_%s[%lld] = %d is outside 0 to %lld", name, (long long)x,
                             lengths[x], (long long)longest);
    return true;
}

/* What is added to scores, or masks them: [b or 1, h or 1, sq or 1, sk]. */
static bool check_broadcast(call *c, const problem *p, const tensor *t, const char *name, int32_t dtype) {
    const int64_t full[4] = {p->a.b, p->a.h, p->a.sq, p->a.sk};
    bool fits = t->rank == 4 && t->size[3] == full[3];
    for (int x = 0; fits && x < 3; x++)
        fits = t->size[x] == 1 || t->size[x] == full[x];
    if (!fits && t->rank == 4)
        return call_fail(c, "ValueError",
                         "%s has shape [%lld, %lld, %lld, %lld], but must have [%lld or 1, %lld or 1, %lld "
                         "or 1, %lld]",
                         name, (long long)t->size[0], (long long)t->size[1], (long long)t->size[2],
                         (long long)t->size[3], (long long)full[0], (long long)full[1], (long long)full[2],
                         (long long)full[3]);
    if (!fits)
        return call_fail(c, "ValueError", "%s has %lld dimensions, but must have 4", name, (long long)t->rank);
    return call_check(c, t, name, dtype);
}

static int32_t dtype_of(const call *c, const tensor_field *f) {
    switch (f->element) {
    case OF_DTYPE: return call_dtype(c);
    case OF_FLOAT: return call_real(c);
    case OF_BOOL: return aoti_torch_dtype_bool();
    case OF_INT32: return aoti_torch_dtype_int32();
    default: return aoti_torch_dtype_int64();
    }
}

/* A tensor of the very shape that the list gives it. */
static bool check_field(call *c, const problem *p, const tensor *t, const char *name, const tensor_field *f) {
    const char *shape = attention_shape(f, p->a.features);
    int64_t size[4], rank = 0;
    for (; shape[rank]; rank++)
        size[rank] = attention_extent(&p->a, shape[rank]);
    return call_check_shape(c, t, name, rank, size) && call_check(c, t, name, dtype_of(c, f));
}

static void take_field(problem *p, const tensor *t, const tensor_field *f, const heddle_strides *stride) {
    p->a.features |= f->feature;
    memcpy((char *)&p->t + f->offset, &t->data, sizeof t->data);
    if (f->stride)
        memcpy((char *)&p->a + f->stride, stride, sizeof *stride);
}

/* One of the optional tensors, if it is given. */
static bool take_optional(call *c, problem *p, int at) {
    const tensor *t = &p->in[at];
    const argument *x = &optional[at];
    heddle_strides stride = {0};
    if (!t->handle)
        return true;
    if (is_of_scores(x->field->shape)) {
        if (!check_broadcast(c, p, t, x->name, dtype_of(c, x->field)))
            return false;
        stride = broadcast_strides(t->size, t->stride);
    } else if (at == ALIBI_SLOPES && t->rank != 1) {
        const int64_t shape[2] = {p->a.b, p->a.h};
        if (!call_check_shape(c, t, x->name, 2, shape) || !call_check(c, t, x->name, dtype_of(c, x->field)))
            return false;
        p->a.alibi_stride_b = t->stride[0];
    } else if (!check_field(c, p, t, x->name, x->field)) {
        return false;
    }
    take_field(p, t, x->field, &stride);
    return true;
}

static bool take_lengths(call *c, problem *p) {
    const heddle_attention *a = &p->a;
    if (!take_optional(c, p, SEQLENS_Q) || !take_optional(c, p, SEQLENS_K))
        return false;
    if (c->device == HEDDLE_CUDA)
        return true;
    if (p->varlen && (!check_packing(c, "q", p->t.cu_seqlens_q, a->b, a->sq, a->total_q) ||
                      (!p->paged && !check_packing(c, "k", p->t.cu_seqlens_k, a->b, a->sk, a->total_k))))
        return false;
    return check_lengths(c, "q", p->t.seqlens_q, a->b, a->sq) && check_lengths(c, "k", p->t.seqlens_k, a->b, a->sk);
}

/* Those of no other function. */
static bool take_masks(call *c, problem *p) {
    for (int x = BIAS; x < CU_SEQLENS_Q; x++)
        if (!take_optional(c, p, x))
            return false;
    if (!p->in[Q_SEGMENTS].handle != !p->in[K_SEGMENTS].handle)
        return call_fail(c, "ValueError", "q_segments and k_segments come together, but only one is given");
    return take_optional(c, p, Q_SEGMENTS) && take_optional(c, p, K_SEGMENTS) &&
           call_check_contiguous(c, &p->in[Q_SEGMENTS], "q_segments") &&
           call_check_contiguous(c, &p->in[K_SEGMENTS], "k_segments");
}

/* Of keys of 8 bits alone: without them a scale would be left out. */
static bool take_scales(call *c, problem *p) {
    for (int x = K_SCALE; x <= V_SCALE; x++) {
        if (p->in[x].handle && !(p->a.features & HEDDLE_E4M3))
            return call_fail(c, "ValueError", "%s is given, but k and v are not float8_e4m3fn", optional[x].name);
        if (!take_optional(c, p, x) || !call_check_contiguous(c, &p->in[x], optional[x].name))
            return false;
    }
    return true;
}

static bool take_blocks(call *c, problem *p, const int64_t *integer) {
    const tensor *rows = &p->in[BLOCK_ROWS], *columns = &p->in[BLOCK_COLUMNS];
    heddle_attention *a = &p->a;
    const int64_t sizes[] = {integer[BLOCK_Q], integer[BLOCK_K]};
    if (!rows->handle != !columns->handle)
        return call_fail(c, "ValueError", "block_rows and block_columns come together, but only one is given");
    for (int x = 0; x < 2; x++)
        if (rows->handle ? sizes[x] != 64 && sizes[x] != 128 : sizes[x] != 0)
            return call_fail(c, "ValueError", "block_%c = %lld, but with block_rows it must be 64 or 128, else 0",
                             "qk"[x], (long long)sizes[x]);
    if (!rows->handle)
        return true;
    if (rows->rank != 3)
        return call_fail(c, "ValueError",
                         "block_rows has %lld dimensions, but must have 3 ([b or 1, h or 1, lists + 1])",
                         (long long)rows->rank);
    if (columns->rank != 1)
        return call_fail(c, "ValueError", "block_columns has %lld dimensions, but must have 1",
                         (long long)columns->rank);
    a->block_q = (uint8_t)sizes[0];
    a->block_k = (uint8_t)sizes[1];
    a->blocks_of_b = rows->size[0] != 1;
    a->blocks_of_h = rows->size[1] != 1;
    if (!take_optional(c, p, BLOCK_ROWS) || !call_check_contiguous(c, rows, "block_rows") ||
        !call_check(c, columns, "block_columns", dtype_of(c, optional[BLOCK_COLUMNS].field)) ||
        !call_check_contiguous(c, columns, "block_columns"))
        return false;
    take_field(p, columns, optional[BLOCK_COLUMNS].field, &(heddle_strides){0});
    char why[160];
    return c->device == HEDDLE_CUDA ||
           !find_wrong_list(a, p->t.block_rows, p->t.block_columns, columns->size[0], why, sizeof why) ||
           call_fail(c, "ValueError", "%s", why);
}

static bool take_numbers(call *c, problem *p, const int64_t *integer, const double *number) {
    heddle_attention *a = &p->a;
    a->mask = (heddle_mask)integer[CAUSAL];
    if (integer[CAUSAL] < 0 || integer[CAUSAL] > LAST_MASK)
        return call_fail(c, "ValueError", "causal = %lld is none of heddle_mask, 0 to %d", (long long)integer[CAUSAL],
                         LAST_MASK);
    if (integer[WINDOW_LEFT] >= 0 || integer[WINDOW_RIGHT] >= 0) {
        a->features |= HEDDLE_WINDOW;
        a->window_left = integer[WINDOW_LEFT];
        a->window_right = integer[WINDOW_RIGHT];
    }
    a->scale = number[SCALE];
    a->softcap = number[SOFTCAP];
    a->dropout = number[DROPOUT];
    a->features |= integer[RETURN_WEIGHTS] ? HEDDLE_WEIGHTS : 0;
    a->features |= integer[DETERMINISTIC] ? HEDDLE_DETERMINISTIC : 0;
    a->features |= integer[TF32] ? HEDDLE_TF32 : 0;
    a->q_offset = integer[Q_OFFSET];
    a->k_offset = integer[K_OFFSET];
    a->h_offset = integer[H_OFFSET];
    a->whole_sq = integer[WHOLE_SQ];
    a->whole_sk = integer[WHOLE_SK];
    a->whole_h = integer[WHOLE_H];
    a->multiprocessors = integer[MULTIPROCESSORS];
    const tensor *rng = &p->in[RNG_STATE];
    if (!rng->handle) {
        return a->dropout == 0 ||
               call_fail(c, "ValueError", "dropout = %g needs rng_state, int64 [2]: {seed, offset}", a->dropout);
    }
    return take_optional(c, p, RNG_STATE);
}

bool attention_describe(call *c, int base, problem *p) {
    *p = (problem){.a.size = sizeof p->a, .t.size = sizeof p->t, .in = c->tensor + base};
    if (!call_device(c, base + Q, "q"))
        return false;
    p->varlen = p->in[CU_SEQLENS_Q].handle || p->in[CU_SEQLENS_K].handle;
    p->paged = p->in[BLOCK_TABLE].handle;
    p->a.dtype = c->dtype;
    p->a.device = c->device;
    if (!check_sizes(c, p) || !take_sizes(c, p, c->integer + base) || !take_lengths(c, p) || !take_masks(c, p) ||
        !take_scales(c, p) || !take_blocks(c, p, c->integer + base) ||
        !take_numbers(c, p, c->integer + base, c->number + base))
        return false;
    heddle_strides *const strides[] = {&p->a.q_stride, &p->a.k_stride, &p->a.v_stride};
    const void **const data[] = {&p->t.q, &p->t.k, &p->t.v};
    for (int x = 0; x < 3; x++) {
        *strides[x] = attention_strides(p->in[x].stride, p->varlen && !(p->paged && x != Q));
        *data[x] = p->in[x].data;
    }
    return true;
}

/* A result with the layout of `like`, and its strides for the description. */
static void *make_like(call *c, const problem *p, int x, const tensor *like, int64_t last, heddle_strides *strides) {
    int64_t size[4], stride[4];
    result_layout(like, p->varlen, last, size, stride);
    *strides = attention_strides(stride, p->varlen);
    return call_make(c, x, like->rank, size, stride, call_dtype(c));
}

bool attention_has_loose_rows(const call *c, const int32_t *cu, int64_t b, int64_t total) {
    return c->device == HEDDLE_CUDA || cu[0] > 0 || cu[b] < total;
}

/* ---------------------------------------------------------------------------------------------------- forward */

static void forward_results(call *c, problem *p, bool lse) {
    heddle_attention *a = &p->a;
    const int64_t rows[3] = {a->b, a->h, a->sq}, packed[2] = {a->h, a->total_q};
    const int64_t square[4] = {a->b, a->h, a->sq, a->sk};
    int64_t stride[4];
    p->t.o = make_like(c, p, 0, &p->in[Q], a->dv, &a->o_stride);
    contiguous_strides(p->varlen ? 2 : 3, p->varlen ? packed : rows, stride);
    if (lse)
        p->t.lse = call_make(c, 1, p->varlen ? 2 : 3, p->varlen ? packed : rows, stride, call_real(c));
    else
        call_make_none(c, 1);
    if (a->features & HEDDLE_WEIGHTS) {
        contiguous_strides(4, square, stride);
        p->t.weights = call_make(c, 2, 4, square, stride, call_dtype(c));
    } else {
        call_make_empty(c, 2);
    }
    if (p->varlen && !c->message[0] && attention_has_loose_rows(c, p->t.cu_seqlens_q, a->b, a->total_q)) {
        call_zero(c, 0);
        call_zero(c, 1);
    }
}

static void forward(call *c, bool lse) {
    problem p;
    size_t bytes = 0;
    void *workspace;
    if (!attention_describe(c, FORWARD_BASE, &p) || !call_attention_bytes(c, &p.a, HEDDLE_FORWARD, &bytes))
        return;
    forward_results(c, &p, lse);
    if (call_workspace(c, bytes, &workspace))
        call_status(c, heddle_attention_forward(&p.a, &p.t, workspace, bytes, c->stream));
}

void heddle_torch_attention(stable_value *stack, uint64_t arguments, uint64_t results) {
    call c;
    call_begin(&c, stack, arguments, results, forward_signature);
    forward(&c, true);
    call_end(&c, stack);
}

void heddle_torch_attention_plain(stable_value *stack, uint64_t arguments, uint64_t results) {
    enum { WANTS_LSE = NEEDS };
    static const int place[] = {Q, K, V, CAUSAL, SCALE, WANTS_LSE};
    call c;
    call_begin_at(&c, stack, arguments, results, "TTTIDB", place);
    c.integer[WINDOW_LEFT] = c.integer[WINDOW_RIGHT] = -1;
    forward(&c, c.integer[WANTS_LSE]);
    call_end(&c, stack);
}

/* Bias or mask with fewer dimensions: seen as four, of which the first are 1. */
static void see_four(tensor *t, int64_t size[4], int64_t stride[4]) {
    if (!t->handle || t->rank >= 4)
        return;
    for (int64_t x = 0, missing = 4 - t->rank; x < 4; x++) {
        size[x] = x < missing ? 1 : t->size[x - missing];
        stride[x] = x < missing ? 0 : t->stride[x - missing];
    }
    t->rank = 4;
    t->size = size;
    t->stride = stride;
}

void heddle_torch_attention_options(stable_value *stack, uint64_t arguments, uint64_t results) {
    enum { WANTS_LSE = NEEDS };
    int64_t size[2][4], stride[2][4];
    call c;
    call_begin(&c, stack, arguments, results, options_signature);
    see_four(&c.tensor[BIAS], size[0], stride[0]);
    see_four(&c.tensor[MASK], size[1], stride[1]);
    forward(&c, c.integer[WANTS_LSE]);
    call_end(&c, stack);
}

/* --------------------------------------------------------------------------------------------------- backward */

bool attention_take_gradients(call *c, problem *p) {
    static const struct {
        int at;
        argument is;
    } all[] = {{OUT, {"out", &attention_fields[FIELD_O]}},
               {LSE, {"lse", &attention_fields[FIELD_LSE]}},
               {DOUT, {"dout", &attention_fields[FIELD_DOUT]}},
               {DLSE, {"dlse", &attention_fields[FIELD_DLSE]}},
               {DWEIGHTS, {"dweights", &attention_fields[FIELD_DWEIGHTS]}}};
    for (size_t x = 0; x < sizeof all / sizeof *all; x++) {
        const tensor *t = &c->tensor[all[x].at];
        const tensor_field *f = all[x].is.field;
        if (!t->handle)
            continue;
        if (f->feature & ~p->a.features)
            return call_fail(c, "ValueError", "dweights is given, but return_weights is false");
        if (!check_field(c, p, t, all[x].is.name, f))
            return false;
        const heddle_strides stride =
            f->stride ? attention_strides(t->stride, p->varlen && f->packed) : (heddle_strides){0};
        take_field(p, t, f, &stride);
    }
    return true;
}

static void *make_dbias(call *c, problem *p) {
    const tensor *bias = &p->in[BIAS];
    int64_t stride[4];
    contiguous_strides(4, bias->size, stride);
    p->a.dbias_stride = broadcast_strides(bias->size, stride);
    return call_make(c, 3, 4, bias->size, stride, call_dtype(c));
}

static void backward_results(call *c, problem *p, int64_t needs) {
    heddle_attention *a = &p->a;
    const int64_t one = 1;
    const bool bias = a->features & HEDDLE_BIAS && needs & NEEDS_DBIAS;
    const bool sinks = a->features & HEDDLE_SINKS && needs & NEEDS_DSINKS;
    p->t.dq = needs & NEEDS_DQ ? make_like(c, p, 0, &p->in[Q], a->d, &a->dq_stride) : NULL;
    p->t.dk = needs & NEEDS_DK ? make_like(c, p, 1, &p->in[K], a->d, &a->dk_stride) : NULL;
    p->t.dv = needs & NEEDS_DV ? make_like(c, p, 2, &p->in[V], a->dv, &a->dv_stride) : NULL;
    p->t.dbias = bias ? make_dbias(c, p) : NULL;
    p->t.dsinks = sinks ? call_make(c, 4, 1, &a->h, &one, call_real(c)) : NULL;
    const bool made[] = {needs & NEEDS_DQ, needs & NEEDS_DK, needs & NEEDS_DV, bias, sinks};
    for (int x = 0; x < 5; x++)
        if (!made[x])
            call_make_none(c, x);
    if (!p->varlen || c->message[0])
        return;
    if (made[0] && attention_has_loose_rows(c, p->t.cu_seqlens_q, a->b, a->total_q))
        call_zero(c, 0);
    for (int x = 1; x < 3; x++)
        if (made[x] && attention_has_loose_rows(c, p->t.cu_seqlens_k, a->b, a->total_k))
            call_zero(c, x);
}

/* dq, dk and dv as heads of one tensor [b, s, h + 2·hk, d], whose batches and rows lie as q's. */
static void heads_result(call *c, problem *p) {
    heddle_attention *a = &p->a;
    const int64_t heads = a->h + 2 * a->hk, row = heads * a->d, size[4] = {a->b, a->sq, heads, a->d};
    const bool rows_first = a->q_stride.s > a->q_stride.b; /* [s, b, ...] in memory */
    const int64_t stride[4] = {rows_first ? row : a->sq * row, rows_first ? a->b * row : row, a->d, 1};
    const size_t element = heddle_dtype_size(a->dtype);
    if (a->sq != a->sk || a->d != a->dv)
        call_fail(c, "ValueError", "q, k and v are no heads of one tensor");
    char *const made = call_make(c, 0, 4, size, stride, call_dtype(c));
    if (!made)
        return;
    a->dq_stride = a->dk_stride = a->dv_stride = (heddle_strides){stride[0], a->d, stride[1]};
    p->t.dq = made;
    p->t.dk = made + (size_t)(a->h * a->d) * element;
    p->t.dv = made + (size_t)((a->h + a->hk) * a->d) * element;
}

/* together: as heads of one tensor, the one result. */
static void backward(call *c, bool together) {
    problem p;
    size_t bytes = 0;
    void *workspace;
    if (!attention_describe(c, BACKWARD_BASE, &p) || !attention_take_gradients(c, &p) ||
        !call_check_contiguous(c, &c->tensor[LSE], "lse") || !call_check_contiguous(c, &c->tensor[DLSE], "dlse") ||
        !call_attention_bytes(c, &p.a, HEDDLE_BACKWARD, &bytes))
        return;
    if (together)
        heads_result(c, &p);
    else
        backward_results(c, &p, c->integer[BACKWARD_BASE + NEEDS]);
    if (call_workspace(c, bytes, &workspace))
        call_status(c, heddle_attention_backward(&p.a, &p.t, workspace, bytes, c->stream));
}

void heddle_torch_attention_backward(stable_value *stack, uint64_t arguments, uint64_t results) {
    call c;
    call_begin(&c, stack, arguments, results, backward_signature);
    backward(&c, false);
    call_end(&c, stack);
}

static void plain_backward(stable_value *stack, uint64_t arguments, uint64_t results, bool together) {
    enum { B = BACKWARD_BASE };
    static const int place[] = {DOUT,     OUT, LSE, B + Q, B + K, B + V, B + CAUSAL, B + SCALE, B + DETERMINISTIC,
                                B + NEEDS};
    call c;
    call_begin_at(&c, stack, arguments, results, together ? "TTTTTTIDB" : "TTTTTTIDBI", place);
    c.integer[B + WINDOW_LEFT] = c.integer[B + WINDOW_RIGHT] = -1;
    backward(&c, together);
    call_end(&c, stack);
}

void heddle_torch_attention_backward_plain(stable_value *stack, uint64_t arguments, uint64_t results) {
    plain_backward(stack, arguments, results, false);
}

void heddle_torch_attention_backward_heads(stable_value *stack, uint64_t arguments, uint64_t results) {
    plain_backward(stack, arguments, results, true);
}
