/* SPDX-License-Identifier: Apache-2.0
 * PyTorch's own operators of attention, computed by heddle as long as its switch is on: what
 * torch.nn.attention.activate_flash_attention_impl("heddle") registers (heddle._switch). The same functions serve the CPU
 * and CUDA. Results have the very strides that PyTorch's fake kernels promise, since compiled code counts on them. */
#include "torch_attention.h"

#include <stdio.h>
#include <string.h>

static const int64_t nothing = 0, one = 1, two = 2;

/* Arguments that heddle's own operators do not have: behind those of forward, and behind those of backward. */
enum { GIVEN_OUT = NEEDS, DEBUG_MASK, PAGE_TABLE, NUM_SPLITS, FORWARD_END };
enum { B = BACKWARD_BASE, IGNORED = B + NEEDS, BACKWARD_END };
_Static_assert((int)FORWARD_END <= MAX_ARGUMENTS && (int)BACKWARD_END <= MAX_ARGUMENTS, "call holds too few arguments");

/* A tensor seen with other sizes and strides. */
typedef struct view {
    int64_t size[4], stride[4];
} view;

typedef struct operation {
    const char *signature; /* call_begin's */
    const int *place;
    bool rows_first; /* dense tensors are [b, s, h, d], and there are windows */
    bool on_cpu;     /* the operator for CPUs alone: its causal corner, and a layout of its own for lse and gradients */
} operation;

/* ------------------------------------------------------------------------------------------------- arguments */

/* An older PyTorch has fewer arguments at the end. heddle._switch has seen that there are no others. */
static void begin(call *c, stable_value *stack, uint64_t arguments, uint64_t results, const operation *op) {
    char signature[MAX_ARGUMENTS + 1];
    snprintf(signature, sizeof signature, "%.*s", (int)arguments, op->signature);
    call_begin_at(c, stack, arguments, results, signature, op->place);
}

static void release(tensor *t) {
    if (t->handle)
        aoti_torch_delete_tensor_object(t->handle);
    t->handle = NULL;
}

static void swap_rows_and_heads(tensor *t, view *v) {
    if (!t->handle || t->rank != 4)
        return;
    const int order[] = {0, 2, 1, 3};
    for (int x = 0; x < 4; x++) {
        v->size[x] = t->size[order[x]];
        v->stride[x] = t->stride[order[x]];
    }
    t->size = v->size;
    t->stride = v->stride;
}

/* A new tensor in the place of t, with t's numbers. */
static bool copy_into(call *c, tensor *t, int64_t rank, const int64_t *size, int32_t dtype, view *v) {
    tensor made = {.rank = rank, .size = v->size, .stride = v->stride, .dtype = dtype};
    memmove(v->size, size, (size_t)rank * sizeof *size);
    contiguous_strides(rank, v->size, v->stride);
    made.device_type = t->device_type;
    made.device_index = t->device_index;
    if (aoti_torch_empty_strided(rank, v->size, v->stride, dtype, t->device_type, t->device_index, &made.handle) != 0)
        return call_fail(c, "RuntimeError", "torch could not allocate a copy");
    const bool copied =
        aoti_torch_tensor_copy_(t->handle, made.handle) == 0 && aoti_torch_get_data_ptr(made.handle, &made.data) == 0;
    release(t);
    *t = made;
    return copied || call_fail(c, "RuntimeError", "torch could not copy a tensor");
}

/* The gradient of out may be anything: an expanded number, say. */
static bool last_contiguous(call *c, tensor *t, view *v) {
    const int64_t last = t->rank - 1;
    if (last < 0 || last > 3 || t->size[last] <= 1 || t->stride[last] == 1)
        return true;
    return copy_into(c, t, t->rank, t->size, t->dtype, v);
}

/* attn_mask as bias or mask. PyTorch lets it have another type, a last dimension of 1, and no dimensions for b and h. */
static bool take_mask(call *c, int base, view *v) {
    tensor *mask = &c->tensor[base + BIAS];
    if (c->message[0] || !mask->handle)
        return !c->message[0];
    if (mask->rank != 2 && mask->rank != 4)
        return call_fail(c, "ValueError", "attn_mask has %lld dimensions, but must have 2 or 4", (long long)mask->rank);
    const tensor *q = &c->tensor[base + Q], *k = &c->tensor[base + K];
    const int64_t sk = k->rank == 4 ? k->size[2] : 0, first = 4 - mask->rank;
    for (int64_t x = 0; x < 4; x++) {
        v->size[x] = x < first ? 1 : mask->size[x - first];
        v->stride[x] = x < first ? 0 : mask->stride[x - first];
    }
    const bool is_bool = mask->dtype == aoti_torch_dtype_bool();
    const bool repeats = v->size[3] == 1 && sk > 1;
    if (repeats || (v->size[3] > 1 && v->stride[3] != 1) || (!is_bool && mask->dtype != q->dtype)) {
        v->size[3] = repeats ? sk : v->size[3];
        if (!copy_into(c, mask, 4, v->size, is_bool ? mask->dtype : q->dtype, v))
            return false;
    }
    mask->rank = 4;
    mask->size = v->size;
    mask->stride = v->stride;
    if (is_bool) {
        c->tensor[base + MASK] = *mask;
        mask->handle = NULL;
    }
    return true;
}

/* The seed comes as uint64; without dropout nobody needs it, and compilers may have left it anywhere. */
static bool take_seed(call *c, int base) {
    tensor *rng = &c->tensor[base + RNG_STATE];
    if (c->number[base + DROPOUT] == 0)
        release(rng);
    else if (rng->handle && rng->dtype == aoti_torch_dtype_uint64())
        rng->dtype = aoti_torch_dtype_int64();
    return !c->message[0];
}

static bool refuse(call *c) {
    if (c->integer[DEBUG_MASK])
        return call_fail(c, "NotImplementedError", "return_debug_mask=True: heddle has no such tensor");
    if (c->tensor[PAGE_TABLE].handle)
        return call_fail(c, "NotImplementedError", "block_table: heddle has no paged keys and values");
    if (c->integer[NUM_SPLITS] == 1)
        return call_fail(c, "NotImplementedError",
                         "num_splits=1: heddle does not promise the same bits for other batches");
    if (c->tensor[ALIBI_SLOPES].handle)
        return call_fail(c, "NotImplementedError",
                         "alibi_slopes: PyTorch's backward operator knows nothing of them; call heddle.attention");
    return !c->message[0];
}

/* FlashAttention's causal corner is the bottom right one; the operator for CPUs has the top left one. */
static void take_corner(call *c, int base, const operation *op) {
    c->integer[base + CAUSAL] *= op->on_cpu ? 1 : 2;
    if (!op->rows_first)
        c->integer[base + WINDOW_LEFT] = c->integer[base + WINDOW_RIGHT] = -1;
}

/* --------------------------------------------------------------------------------------------------- layouts */

/* The strides of torch.empty_like: without gaps, the dimensions in the order in which they lie in `like`. */
static void strides_like(const tensor *like, const int64_t *size, int64_t *stride) {
    int64_t order[4], step = 1; /* the innermost first */
    for (int64_t x = 0; x < like->rank; x++) {
        int64_t at = x;
        order[x] = like->rank - 1 - x;
        for (int64_t y = x; y-- > 0;) {
            const int64_t inner = order[y], outer = order[at];
            if (like->stride[inner] == 0 || like->stride[outer] == 0)
                continue;
            const bool swap = like->stride[inner] > like->stride[outer] ||
                              (like->stride[inner] == like->stride[outer] && like->size[inner] > like->size[outer]);
            if (!swap && like->stride[inner] < like->stride[outer])
                break;
            if (swap) {
                order[y] = outer;
                order[at] = inner;
                at = y;
            }
        }
    }
    for (int64_t x = 0; x < like->rank; x++) {
        stride[order[x]] = step;
        step *= size[order[x]] > 1 ? size[order[x]] : 1;
    }
}

/* [b, s, h, d] in memory, where that is a tensor [b, h, s, d]. */
static void strides_rows_first(const int64_t *size, int64_t *stride) {
    const int64_t h = size[1] > 1 ? size[1] : 1, s = size[2] > 1 ? size[2] : 1, d = size[3] > 1 ? size[3] : 1;
    stride[0] = s * h * d;
    stride[1] = d;
    stride[2] = h * d;
    stride[3] = 1;
}

/* Result x with the shape of `like` but for its last size, in the caller's order of dimensions; its strides in heddle's. */
static void *make_result(call *c, const operation *op, int x, const tensor *like, int64_t last, bool gradient,
                         heddle_strides *strides) {
    const bool dense = like->rank == 4;
    tensor callers = *like;
    view v, swapped;
    if (op->rows_first)
        swap_rows_and_heads(&callers, &swapped);
    memcpy(v.size, callers.size, (size_t)callers.rank * sizeof *v.size);
    v.size[callers.rank - 1] = last;
    if (gradient && op->on_cpu)
        strides_rows_first(v.size, v.stride);
    else
        strides_like(&callers, v.size, v.stride);
    if (last > 1 && v.stride[callers.rank - 1] != 1) {
        call_fail(c, "ValueError", "a result would have to lie with its last dimension not contiguous, as query does");
        return NULL;
    }
    const int64_t ours[3] = {v.stride[0], v.stride[op->rows_first && dense ? 2 : 1], v.stride[op->rows_first ? 1 : 2]};
    *strides = attention_strides(dense ? ours : v.stride, !dense);
    return call_make(c, x, callers.rank, v.size, v.stride, call_dtype(c));
}

/* lse between heddle's [b, h, s] and the operator for CPUs, which has [b, s, h] in memory. */
static void turn_lse(const heddle_attention *a, size_t bytes, const char *from, char *to, bool rows_first) {
    for (int64_t b = 0; b < a->b; b++)
        for (int64_t h = 0; h < a->h; h++)
            for (int64_t s = 0; s < a->sq; s++) {
                const int64_t plain = (b * a->h + h) * a->sq + s, turned = (b * a->sq + s) * a->h + h;
                memcpy(to + (size_t)(rows_first ? turned : plain) * bytes,
                       from + (size_t)(rows_first ? plain : turned) * bytes, bytes);
            }
}

static size_t lse_bytes(const call *c) {
    return c->dtype == HEDDLE_F64 ? 8 : 4;
}

/* Room for lse in heddle's order, behind the workspace. */
static size_t room_for_lse(const call *c, const problem *p, const operation *op) {
    const bool turned = op->on_cpu && p->a.h > 1 && p->a.sq > 1;
    return turned ? (size_t)(p->a.b * p->a.h * p->a.sq) * lse_bytes(c) : 0;
}

static size_t aligned(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

/* --------------------------------------------------------------------------------------------------- forward */

/* {seed, offset} from torch's generator: what torch.randint(0, 2**62, (2,)) draws. */
static bool draw_seed(call *c, int x) {
    call_make(c, x, 1, &two, &one, aoti_torch_dtype_uint64());
    call_make(c, x + 1, 0, &nothing, &nothing, aoti_torch_dtype_uint64());
    if (c->message[0] || c->number[DROPOUT] == 0)
        return !c->message[0];
    tensor *rng = &c->tensor[RNG_STATE];
    stable_value stack[3] = {0, UINT64_C(1) << 62, 0};
    *rng = (tensor){.rank = 1, .size = &two, .stride = &one, .dtype = aoti_torch_dtype_int64()};
    rng->device_type = c->device_type;
    rng->device_index = c->device_index;
    if (aoti_torch_new_tensor_handle(c->result[x], &rng->handle) != 0)
        return call_fail(c, "RuntimeError", "torch could not share a tensor");
    stack[0] = (stable_value)(uintptr_t)rng->handle;
    rng->handle = NULL; /* the dispatcher takes it, and gives one back */
    if (aoti_torch_call_dispatcher("aten::random_", "to", stack) != 0)
        return call_fail(c, "RuntimeError", "torch could not draw a seed for dropout");
    rng->handle = (tensor_handle)(uintptr_t)stack[0];
    return aoti_torch_get_data_ptr(rng->handle, &rng->data) == 0 ||
           call_fail(c, "RuntimeError", "torch could not tell where a seed lies");
}

static void *make_lse(call *c, const problem *p, const operation *op, int x) {
    const heddle_attention *a = &p->a;
    int64_t size[3] = {a->b, a->h, a->sq}, stride[3];
    int64_t packed[2] = {a->h, a->total_q};
    contiguous_strides(p->varlen ? 2 : 3, p->varlen ? packed : size, stride);
    if (op->on_cpu) {
        stride[1] = 1;
        stride[2] = a->h > 1 ? a->h : 1;
    }
    return call_make(c, x, p->varlen ? 2 : 3, p->varlen ? packed : size, stride, call_real(c));
}

static bool zero(call *c, tensor_handle t) {
    return aoti_torch_zero_(t) == 0 || call_fail(c, "RuntimeError", "torch could not fill a result with zeros");
}

/* Result `out` is the output, or what the caller gave for it; result `lse` its log-sum-exp. */
static void run_forward(call *c, problem *p, const operation *op, int out, int lse, view *given) {
    heddle_attention *a = &p->a;
    size_t bytes = 0;
    void *workspace;
    tensor *into = &c->tensor[GIVEN_OUT];
    if (!attention_describe(c, FORWARD_BASE, p) || !call_attention_bytes(c, a, HEDDLE_FORWARD, &bytes))
        return;
    if (into->handle) {
        int64_t size[4];
        if (op->rows_first)
            swap_rows_and_heads(into, given);
        memcpy(size, p->in[Q].size, (size_t)p->in[Q].rank * sizeof *size);
        size[p->in[Q].rank - 1] = a->dv;
        if (!call_check_shape(c, into, "out", p->in[Q].rank, size) || !call_check(c, into, "out", call_dtype(c)))
            return;
        p->t.o = into->data;
        a->o_stride = attention_strides(into->stride, p->varlen);
    } else {
        p->t.o = make_result(c, op, out, &p->in[Q], a->dv, false, &a->o_stride);
    }
    p->t.lse = make_lse(c, p, op, lse);
    if (c->message[0])
        return;
    if (p->varlen && attention_has_loose_rows(c, p->t.cu_seqlens_q, a->b, a->total_q) &&
        (!zero(c, into->handle ? into->handle : c->result[out]) || !zero(c, c->result[lse])))
        return;
    const size_t room = room_for_lse(c, p, op);
    char *turned = p->t.lse;
    if (!call_workspace(c, room ? aligned(bytes) + room : bytes, &workspace))
        return;
    if (room)
        p->t.lse = (char *)workspace + aligned(bytes);
    if (call_status(c, heddle_attention_forward(a, &p->t, workspace, bytes, c->stream)) && room)
        turn_lse(a, lse_bytes(c), p->t.lse, turned, true);
}

static void flash_forward(call *c, problem *p, const operation *op, view *views, int out, int lse) {
    if (op->rows_first)
        for (int x = Q; x <= V; x++)
            swap_rows_and_heads(&c->tensor[x], &views[x]);
    take_corner(c, FORWARD_BASE, op);
    run_forward(c, p, op, out, lse, &views[3]);
}

static void aten_for_cpu(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const int place[] = {Q, K, V, DROPOUT, CAUSAL, BIAS, SCALE};
    static const operation op = {"TTTDBOS", place, .on_cpu = true};
    view views[4];
    call c;
    problem p;
    begin(&c, stack, arguments, results, &op);
    if (c.number[DROPOUT] != 0)
        call_fail(&c, "NotImplementedError", "dropout_p = %g: this operator of PyTorch returns no seed",
                  c.number[DROPOUT]);
    if (take_mask(&c, FORWARD_BASE, &views[0]))
        flash_forward(&c, &p, &op, views, 0, 1);
    call_end(&c, stack);
}

/* (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask) */
static void aten_sdpa(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const int place[] = {Q, K, V, DROPOUT, CAUSAL, DEBUG_MASK, SCALE};
    static const operation op = {"TTTDBBS", place, .rows_first = false};
    view views[4];
    call c;
    problem p = {0};
    begin(&c, stack, arguments, results, &op);
    if (refuse(&c) && call_device(&c, Q, "query") && draw_seed(&c, 6))
        flash_forward(&c, &p, &op, views, 0, 1);
    call_make_none(&c, 2);
    call_make_none(&c, 3);
    call_make(&c, 8, 1, &nothing, &one, call_dtype(&c));
    call_end(&c, stack);
    stack[4] = (stable_value)p.a.sq;
    stack[5] = (stable_value)p.a.sk;
}

/* (output, softmax_logsumexp, rng_state, unused, debug_attn_mask) */
static void aten_forward(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const int place[] = {
        Q,          K,     V,           CU_SEQLENS_Q, CU_SEQLENS_K, MAX_SEQLEN_Q, MAX_SEQLEN_K, DROPOUT,   CAUSAL,
        DEBUG_MASK, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SEQLENS_K,    ALIBI_SLOPES, PAGE_TABLE,   NUM_SPLITS};
    static const operation op = {"TTTOOIIDBBSNNOOON", place, .rows_first = true};
    view views[4];
    call c;
    problem p;
    begin(&c, stack, arguments, results, &op);
    if (refuse(&c) && call_device(&c, Q, "query") && draw_seed(&c, 2))
        flash_forward(&c, &p, &op, views, 0, 1);
    call_make(&c, 4, 1, &nothing, &one, call_dtype(&c));
    call_end(&c, stack);
}

/* The same into a tensor of the caller's, without dropout; returns softmax_logsumexp. */
static void aten_forward_inplace(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const int place[] = {
        GIVEN_OUT, Q,          K,     V,           CU_SEQLENS_Q, CU_SEQLENS_K, MAX_SEQLEN_Q, MAX_SEQLEN_K, DROPOUT,
        CAUSAL,    DEBUG_MASK, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SEQLENS_K,    ALIBI_SLOPES, PAGE_TABLE,   NUM_SPLITS};
    static const operation op = {"TTTTOOIIDBBSNNOOON", place, .rows_first = true};
    view views[4];
    call c;
    problem p;
    begin(&c, stack, arguments, results, &op);
    if (c.number[DROPOUT] != 0)
        call_fail(&c, "NotImplementedError", "dropout_p = %g: this operator of PyTorch returns no seed",
                  c.number[DROPOUT]);
    if (refuse(&c))
        flash_forward(&c, &p, &op, views, 1, 0);
    call_end(&c, stack);
}

/* -------------------------------------------------------------------------------------------------- backward */

static bool asks_for_determinism(void) {
    /* PyTorch has no C symbol that tells; where these are gone, the answer that is never wrong. */
    if (!torch_global_context || !torch_deterministic_algorithms)
        return true;
    return torch_deterministic_algorithms(torch_global_context());
}

static void backward_results(call *c, problem *p, const operation *op) {
    heddle_attention *a = &p->a;
    p->t.dq = make_result(c, op, 0, &p->in[Q], a->d, true, &a->dq_stride);
    p->t.dk = make_result(c, op, 1, &p->in[K], a->d, true, &a->dk_stride);
    p->t.dv = make_result(c, op, 2, &p->in[V], a->dv, true, &a->dv_stride);
    if (!p->varlen || c->message[0])
        return;
    if (attention_has_loose_rows(c, p->t.cu_seqlens_q, a->b, a->total_q))
        call_zero(c, 0);
    for (int x = 1; x < 3; x++)
        if (attention_has_loose_rows(c, p->t.cu_seqlens_k, a->b, a->total_k))
            call_zero(c, x);
}

/* lse as the operator for CPUs has it, described as heddle has it. True if it must be turned. */
static bool describe_lse(call *c, view *v) {
    tensor *lse = &c->tensor[LSE];
    if (lse->rank != 3)
        return false;
    memcpy(v->size, lse->size, 3 * sizeof *v->size);
    contiguous_strides(3, v->size, v->stride);
    const int64_t h = lse->size[1], s = lse->size[2];
    const bool turned = (h <= 1 || lse->stride[1] == 1) && (s <= 1 || lse->stride[2] == h) &&
                        (lse->size[0] <= 1 || lse->stride[0] == h * s);
    if (turned) {
        lse->size = v->size;
        lse->stride = v->stride;
        return true;
    }
    copy_into(c, lse, 3, v->size, lse->dtype, v); /* somebody else's */
    return false;
}

static void run_backward(call *c, const operation *op, bool turned_lse) {
    problem p;
    size_t bytes = 0;
    void *workspace;
    if (!take_seed(c, B) || !attention_describe(c, B, &p) || !attention_take_gradients(c, &p) ||
        !call_check_contiguous(c, &c->tensor[LSE], "logsumexp") ||
        !call_attention_bytes(c, &p.a, HEDDLE_BACKWARD, &bytes))
        return;
    backward_results(c, &p, op);
    const size_t room = turned_lse ? room_for_lse(c, &p, op) : 0;
    if (!call_workspace(c, room ? aligned(bytes) + room : bytes, &workspace))
        return;
    if (room) {
        char *turned = (char *)workspace + aligned(bytes);
        turn_lse(&p.a, lse_bytes(c), p.t.lse, turned, false);
        p.t.lse = turned;
    }
    call_status(c, heddle_attention_backward(&p.a, &p.t, workspace, bytes, c->stream));
}

static void backward(stable_value *stack, uint64_t arguments, uint64_t results, const operation *op) {
    view views[7];
    call c;
    begin(&c, stack, arguments, results, op);
    bool turned_lse = false, fits = !c.message[0] && last_contiguous(&c, &c.tensor[DOUT], &views[0]);
    if (fits && op->rows_first) {
        const int dense[] = {DOUT, OUT, B + Q, B + K, B + V};
        for (int x = 0; x < 5; x++)
            swap_rows_and_heads(&c.tensor[dense[x]], &views[x + 1]);
    }
    if (fits && op->on_cpu) {
        turned_lse = describe_lse(&c, &views[6]);
        fits = take_mask(&c, B, &views[1]);
    }
    take_corner(&c, B, op);
    c.integer[B + DETERMINISTIC] = asks_for_determinism();
    if (fits)
        run_backward(&c, op, turned_lse);
    call_end(&c, stack);
}

static void aten_for_cpu_backward(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const int place[] = {DOUT, B + Q, B + K, B + V, OUT, LSE, B + DROPOUT, B + CAUSAL, B + BIAS, B + SCALE};
    static const operation op = {"TTTTTTDBOS", place, .on_cpu = true};
    backward(stack, arguments, results, &op);
}

/* The operators of flash attention: what both take, and the window of the second. */
static const int flash_backward[] = {DOUT,
                                     B + Q,
                                     B + K,
                                     B + V,
                                     OUT,
                                     LSE,
                                     B + CU_SEQLENS_Q,
                                     B + CU_SEQLENS_K,
                                     B + MAX_SEQLEN_Q,
                                     B + MAX_SEQLEN_K,
                                     B + DROPOUT,
                                     B + CAUSAL,
                                     B + RNG_STATE,
                                     IGNORED,
                                     B + SCALE,
                                     B + WINDOW_LEFT,
                                     B + WINDOW_RIGHT};

static void aten_sdpa_backward(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const operation op = {"TTTTTTUUIIDBUUS", flash_backward, .rows_first = false};
    backward(stack, arguments, results, &op);
}

static void aten_backward(stable_value *stack, uint64_t arguments, uint64_t results) {
    static const operation op = {"TTTTTTUUIIDBUUSNN", flash_backward, .rows_first = true};
    backward(stack, arguments, results, &op);
}

/* ---------------------------------------------------------------------------------------------------- switch */

static const struct {
    const char *name;
    stable_kernel kernel;
    bool on_cpu;
} operators[] = {
    {"_scaled_dot_product_flash_attention_for_cpu", aten_for_cpu, true},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", aten_for_cpu_backward, true},
    {"_scaled_dot_product_flash_attention", aten_sdpa, false},
    {"_scaled_dot_product_flash_attention_backward", aten_sdpa_backward, false},
    {"_flash_attention_forward", aten_forward, false},
    {"_flash_attention_backward", aten_backward, false},
    {"_flash_attention_forward_no_dropout_inplace", aten_forward_inplace, false},
};

/* The kernels are PyTorch's as long as these live. */
static library_handle libraries[2];

/* Puts the operators in PyTorch's place, or gives them back: the caller sees to it that each is done once, and that only
 * those of the first `count` are taken, which this PyTorch has. 0 when that succeeded. */
__attribute__((visibility("default"))) int heddle_torch_switch(int count) {
    const char *const keys[] = {"CPU", "CUDA"};
    int32_t bad = 0;
    for (int key = 0; key < 2 && count > 0 && !bad; key++) {
        bad = aoti_torch_library_init_impl("aten", keys[key], "heddle", 0, &libraries[key]);
        for (int x = 0; x < count && x < (int)(sizeof operators / sizeof *operators) && !bad; x++)
            if (key == 0 || !operators[x].on_cpu)
                bad = torch_library_impl(libraries[key], operators[x].name, operators[x].kernel, TORCH_ABI_2_10);
    }
    for (int key = 0; key < 2 && (count == 0 || bad); key++) {
        if (libraries[key])
            bad |= aoti_torch_delete_library_object(libraries[key]);
        libraries[key] = NULL;
    }
    return bad;
}
