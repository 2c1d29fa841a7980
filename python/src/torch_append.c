/* SPDX-License-Identifier: Apache-2.0
 * torch.ops.heddle.attention_append: new rows into a cache that is an argument, and rotated queries as a result. */
#include "torch_attention.h"

/* Arguments in the order of the schema. */
enum {
    K_CACHE,
    V_CACHE,
    K_NEW,
    V_NEW,
    SEQLENS,
    QUERIES,
    COS,
    SIN,
    TABLE,
    INDEX,
    CU,
    MOST,
    MOST_KEYS,
    INTERLEAVED,
    TOGETHER,
    K_SCALES,
    V_SCALES
};
enum { Q_OUT, LENGTHS };

static const char *const names[] = {"k_cache",    "v_cache",    "k",           "v",           "seqlens_k", "q",
                                    "rotary_cos", "rotary_sin", "block_table", "cache_index", "cu_seqlens"};

typedef struct append_problem {
    heddle_append a;
    heddle_append_data t;
    bool packed;
} append_problem;

static bool check_ranks(call *c, const append_problem *p) {
    for (int x = K_CACHE; x <= QUERIES; x++) {
        const tensor *t = &c->tensor[x];
        const int64_t rank = x == SEQLENS ? 1 : p->packed && x > V_CACHE ? 3 : 4;
        if (!t->handle)
            continue;
        if (t->rank != rank)
            return call_fail(c, "ValueError", "%s has %lld dimensions, but must have %lld", names[x],
                             (long long)t->rank, (long long)rank);
        const bool bytes = (p->a.features & HEDDLE_E4M3) && x <= V_CACHE;
        if (!call_check(c, t, names[x],
                        x == SEQLENS ? aoti_torch_dtype_int32()
                        : bytes      ? aoti_torch_dtype_float8_e4m3fn()
                                     : call_dtype(c)))
            return false;
    }
    return true;
}

/* The caches' rows and heads are k's; those of new keys and values are as the schema has them. */
static bool take_sizes(call *c, append_problem *p) {
    heddle_append *a = &p->a;
    const tensor *in = c->tensor, *k = &in[K_CACHE], *v = &in[V_CACHE], *q = &in[QUERIES];
    const int rows = p->packed ? 0 : 2;
    a->b = in[SEQLENS].size[0];
    a->hk = k->size[1];
    a->d = k->size[3];
    a->dv = v->size[3];
    a->s = p->packed ? c->integer[MOST] : in[K_NEW].size[rows];
    a->total = p->packed ? in[K_NEW].size[0] : 0;
    const int64_t of_v[] = {k->size[0], a->hk, k->size[2], a->dv};
    const int64_t new_k[] = {a->b, a->hk, a->s, a->d}, new_v[] = {a->b, a->hk, a->s, a->dv};
    const int64_t packed_k[] = {a->total, a->hk, a->d}, packed_v[] = {a->total, a->hk, a->dv};
    if (a->dv == 0)
        return call_fail(c, "ValueError", "v_cache has head dim 0");
    if (!call_check_shape(c, v, "v_cache", 4, of_v) ||
        !call_check_shape(c, &in[K_NEW], "k", p->packed ? 3 : 4, p->packed ? packed_k : new_k) ||
        !call_check_shape(c, &in[V_NEW], "v", p->packed ? 3 : 4, p->packed ? packed_v : new_v))
        return false;
    if (!q->handle)
        return true;
    a->h = q->size[1];
    a->sq = p->packed ? 0 : q->size[2];
    const int64_t new_q[] = {a->b, a->h, a->sq, a->d}, packed_q[] = {a->total, a->h, a->d};
    if (a->h == 0)
        return call_fail(c, "ValueError", "q has no heads");
    return call_check_shape(c, q, "q", p->packed ? 3 : 4, p->packed ? packed_q : new_q);
}

/* Where the rows of the cache lie: in order, by an index, or in pages. */
static bool take_cache(call *c, append_problem *p) {
    heddle_append *a = &p->a;
    const tensor *k = &c->tensor[K_CACHE], *table = &c->tensor[TABLE], *index = &c->tensor[INDEX];
    a->sk = k->size[2];
    if (index->handle) {
        a->caches = k->size[0];
        if (!call_check_shape(c, index, names[INDEX], 1, &a->b) ||
            !call_check(c, index, names[INDEX], aoti_torch_dtype_int32()))
            return false;
        p->t.cache_index = index->data;
    }
    if (table->handle) {
        if (table->rank != 2 || table->size[0] != a->b)
            return call_fail(c, "ValueError", "block_table must have 2 dimensions, [%lld, pages of a sequence]",
                             (long long)a->b);
        if (!call_check(c, table, names[TABLE], aoti_torch_dtype_int32()))
            return false;
        a->features |= HEDDLE_PAGES;
        a->pages = k->size[0];
        a->page = k->size[2];
        a->table = table->size[0] > 1 ? table->stride[0] : table->size[1];
        if (a->table < table->size[1])
            return call_fail(c, "ValueError", "the rows of block_table overlap");
        if (__builtin_mul_overflow(table->size[1], a->page, &a->sk))
            a->sk = INT64_MAX;
        p->t.block_table = table->data;
    } else if (!index->handle && k->size[0] != a->b)
        return call_fail(c, "ValueError", "seqlens_k has batch size %lld, but k_cache %lld", (long long)a->b,
                         (long long)k->size[0]);
    if (c->integer[MOST_KEYS] > 0 && c->integer[MOST_KEYS] < a->sk)
        a->sk = c->integer[MOST_KEYS];
    return true;
}

static bool take_angles(call *c, append_problem *p) {
    heddle_append *a = &p->a;
    const tensor *cos = &c->tensor[COS], *sin = &c->tensor[SIN];
    if (!cos->handle != !sin->handle)
        return call_fail(c, "ValueError", "rotary_cos and rotary_sin come together, but only one is given");
    if (!cos->handle)
        return true;
    const bool wide = cos->dtype == aoti_torch_dtype_float32();
    if (cos->rank != 2 || cos->size[1] == 0)
        return call_fail(c, "ValueError", "rotary_cos must have 2 dimensions, [positions, rotary / 2]");
    if (!call_check(c, cos, names[COS], wide ? cos->dtype : call_dtype(c)) ||
        !call_check(c, sin, names[SIN], cos->dtype) || !call_check_shape(c, sin, names[SIN], 2, cos->size))
        return false;
    if (cos->size[0] > 1 && (cos->stride[0] != sin->stride[0] || cos->stride[0] == 0))
        return call_fail(
            c, "ValueError",
            "the rows of rotary_cos lie %lld elements apart, those of rotary_sin %lld: make both contiguous",
            (long long)cos->stride[0], (long long)sin->stride[0]);
    a->table_dtype = wide ? HEDDLE_F32 : c->dtype;
    a->positions = cos->size[0];
    a->rotary = 2 * cos->size[1];
    a->table_stride = cos->size[0] > 1 ? cos->stride[0] : 0;
    a->interleaved = (uint8_t)c->integer[INTERLEAVED];
    a->together = (uint8_t)c->integer[TOGETHER];
    p->t.cos = cos->data;
    p->t.sin = sin->data;
    return true;
}

static bool take_packed(call *c, append_problem *p) {
    const tensor *cu = &c->tensor[CU];
    if (!p->packed)
        return true;
    const int64_t size = p->a.b + 1;
    p->a.features |= HEDDLE_VARLEN;
    p->t.cu_seqlens = cu->data;
    return call_check_shape(c, cu, names[CU], 1, &size) && call_check(c, cu, names[CU], aoti_torch_dtype_int32());
}

/* Of caches of 8 bits alone: without them a scale would be left out. */
static bool take_scales(call *c, append_problem *p) {
    const void **const to[] = {&p->t.k_scale, &p->t.v_scale};
    const char *const of[] = {"k_scale", "v_scale"};
    const int64_t size[] = {p->a.b, p->a.hk};
    for (int x = 0; x < 2; x++) {
        const tensor *t = &c->tensor[K_SCALES + x];
        if (!t->handle)
            continue;
        if (!(p->a.features & HEDDLE_E4M3))
            return call_fail(c, "ValueError", "%s is given, but k_cache and v_cache are not float8_e4m3fn", of[x]);
        if (!call_check_shape(c, t, of[x], 2, size) || !call_check(c, t, of[x], call_real(c)) ||
            !call_check_contiguous(c, t, of[x]))
            return false;
        *to[x] = t->data;
    }
    return true;
}

/* The type is that of the new rows: caches may have bytes. */
static bool describe(call *c, append_problem *p) {
    const tensor *in = c->tensor;
    const int32_t bytes = aoti_torch_dtype_float8_e4m3fn();
    *p = (append_problem){.a.size = sizeof p->a, .t.size = sizeof p->t, .packed = in[CU].handle};
    if (in[K_CACHE].dtype == bytes || in[V_CACHE].dtype == bytes)
        p->a.features |= HEDDLE_E4M3;
    if (!call_device(c, p->a.features & HEDDLE_E4M3 ? K_NEW : K_CACHE, p->a.features & HEDDLE_E4M3 ? "k" : "k_cache") ||
        !check_ranks(c, p))
        return false;
    p->a.dtype = c->dtype;
    p->a.device = c->device;
    if (!take_sizes(c, p) || !take_cache(c, p) || !take_angles(c, p) || !take_packed(c, p) || !take_scales(c, p))
        return false;
    p->a.k_stride = attention_strides(in[K_CACHE].stride, false);
    p->a.v_stride = attention_strides(in[V_CACHE].stride, false);
    p->a.k_new_stride = attention_strides(in[K_NEW].stride, p->packed);
    p->a.v_new_stride = attention_strides(in[V_NEW].stride, p->packed);
    p->t.k = in[K_CACHE].data;
    p->t.v = in[V_CACHE].data;
    p->t.k_new = in[K_NEW].data;
    p->t.v_new = in[V_NEW].data;
    p->t.seqlens_k = in[SEQLENS].data;
    return true;
}

/* q's result, in its own order of heads and rows, and the lengths. */
static bool make_results(call *c, append_problem *p) {
    const tensor *q = &c->tensor[QUERIES];
    const int64_t one = 1;
    if (q->handle) {
        int64_t stride[4];
        contiguous_strides(q->rank, q->size, stride);
        if (!p->packed && q->stride[1] < q->stride[2]) {
            const int64_t h = q->size[1], s = q->size[2] > 1 ? q->size[2] : 1, last = q->size[3];
            stride[0] = s * h * last;
            stride[1] = last;
            stride[2] = h * last;
        }
        p->t.q = q->data;
        p->t.q_out = call_make(c, Q_OUT, q->rank, q->size, stride, call_dtype(c));
        p->a.q_stride = attention_strides(q->stride, p->packed);
        p->a.q_out_stride = attention_strides(stride, p->packed);
    } else
        call_make_empty(c, Q_OUT);
    p->t.seqlens_out = call_make(c, LENGTHS, 1, &p->a.b, &one, aoti_torch_dtype_int32());
    return !c->message[0];
}

void heddle_torch_attention_append(stable_value *stack, uint64_t arguments, uint64_t results) {
    call c;
    append_problem p;
    call_begin(&c, stack, arguments, results, "TTTTTOOOOOOIIBBOO");
    if (describe(&c, &p) && make_results(&c, &p))
        call_status(&c, heddle_attention_append(&p.a, &p.t, c.stream));
    call_end(&c, stack);
}
