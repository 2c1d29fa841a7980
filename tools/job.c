/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"
#include "device_memory.h"

#include "../src/dtype.h"

#include <string.h>

#define DATA(member) offsetof(heddle_attention_data, member)
#define STRIDE(member) offsetof(heddle_attention, member)

static const field attention_fields[] = {
    [Q] = {"q", "q", DATA(q), KIND_DTYPE, ROLE_INPUT, "bhqd", "Qhd", STRIDE(q_stride), 0},
    [K] = {"k", "k", DATA(k), KIND_DTYPE, ROLE_INPUT, "bgkd", "Kgd", STRIDE(k_stride), 0},
    [V] = {"v", "v", DATA(v), KIND_DTYPE, ROLE_INPUT, "bgkv", "Kgv", STRIDE(v_stride), 0},
    [ALIBI] = {"alibi", "alibi", DATA(alibi_slopes), KIND_FLOAT, ROLE_INPUT, "h", NULL, 0, HEDDLE_ALIBI},
    [BIAS] = {"bias", "bias", DATA(bias), KIND_DTYPE, ROLE_INPUT, "bhqk", NULL, STRIDE(bias_stride), HEDDLE_BIAS},
    [BOOL_MASK] = {"bool_mask", "bool-mask", DATA(bool_mask), KIND_BOOL, ROLE_INPUT, "bhqk", NULL,
                   STRIDE(bool_mask_stride), HEDDLE_BOOL_MASK},
    [SINKS] = {"sinks", "sinks", DATA(sinks), KIND_FLOAT, ROLE_INPUT, "h", NULL, 0, HEDDLE_SINKS},
    [CU_Q] = {"cu_seqlens_q", "cu-seqlens-q", DATA(cu_seqlens_q), KIND_INT32, ROLE_INPUT, "n", NULL, 0, HEDDLE_VARLEN},
    [CU_K] = {"cu_seqlens_k", "cu-seqlens-k", DATA(cu_seqlens_k), KIND_INT32, ROLE_INPUT, "n", NULL, 0, HEDDLE_VARLEN},
    [LEN_Q] = {"seqlens_q", "seqlens-q", DATA(seqlens_q), KIND_INT32, ROLE_INPUT, "b", NULL, 0, HEDDLE_SEQLENS},
    [LEN_K] = {"seqlens_k", "seqlens-k", DATA(seqlens_k), KIND_INT32, ROLE_INPUT, "b", NULL, 0, HEDDLE_SEQLENS},
    [RNG] = {"rng_state", NULL, DATA(rng_state), KIND_UINT64, ROLE_INPUT, "2", NULL, 0, HEDDLE_RNG_STATE},
    [O] = {"o", "out", DATA(o), KIND_DTYPE, ROLE_OUTPUT, "bhqv", "Qhv", STRIDE(o_stride), 0},
    [LSE] = {"lse", "lse", DATA(lse), KIND_FLOAT, ROLE_OUTPUT, "bhq", "hQ", 0, 0},
    [WEIGHTS] = {"weights", "weights", DATA(weights), KIND_DTYPE, ROLE_OUTPUT, "bhqk", NULL, STRIDE(weights_stride),
                 HEDDLE_WEIGHTS},
    [DOUT] = {"dout", "dout", DATA(dout), KIND_DTYPE, ROLE_GRADIENT_IN, "bhqv", "Qhv", STRIDE(do_stride), 0},
    [DLSE] = {"dlse", "dlse", DATA(dlse), KIND_FLOAT, ROLE_GRADIENT_IN, "bhq", "hQ", 0, 0},
    [DWEIGHTS] = {"dweights", "dweights", DATA(dweights), KIND_DTYPE, ROLE_GRADIENT_IN, "bhqk", NULL,
                  STRIDE(dweights_stride), HEDDLE_WEIGHTS},
    [DQ] = {"dq", "dq", DATA(dq), KIND_DTYPE, ROLE_GRADIENT_OUT, "bhqd", "Qhd", STRIDE(dq_stride), 0},
    [DK] = {"dk", "dk", DATA(dk), KIND_DTYPE, ROLE_GRADIENT_OUT, "bgkd", "Kgd", STRIDE(dk_stride), 0},
    [DV] = {"dv", "dv", DATA(dv), KIND_DTYPE, ROLE_GRADIENT_OUT, "bgkv", "Kgv", STRIDE(dv_stride), 0},
    [DBIAS] = {"dbias", "dbias", DATA(dbias), KIND_DTYPE, ROLE_GRADIENT_OUT, "bhqk", NULL, STRIDE(dbias_stride),
               HEDDLE_BIAS},
    [DSINKS] = {"dsinks", "dsinks", DATA(dsinks), KIND_FLOAT, ROLE_GRADIENT_OUT, "h", NULL, 0, HEDDLE_SINKS},
    [ATTENTION_FIELDS] = {0},
};

#undef DATA
#undef STRIDE
#define DATA(member) offsetof(heddle_norm_linear_data, member)
#define STRIDE(member) offsetof(heddle_norm_linear, member)

static const field norm_linear_fields[] = {
    [X] = {"x", "x", DATA(x), KIND_DTYPE, ROLE_INPUT, "mk", NULL, STRIDE(x_stride), 0},
    [GAMMA] = {"gamma", "gamma", DATA(gamma), KIND_DTYPE, ROLE_INPUT, "k", NULL, 0, 0},
    [BETA] = {"beta", "beta", DATA(beta), KIND_DTYPE, ROLE_INPUT, "k", NULL, 0, 0},
    [W] = {"w", "w", DATA(w), KIND_DTYPE, ROLE_INPUT, "nk", NULL, STRIDE(w_stride), 0},
    [C] = {"bias", "bias", DATA(bias), KIND_DTYPE, ROLE_INPUT, "n", NULL, 0, 0},
    [Y] = {"y", "out", DATA(y), KIND_DTYPE, ROLE_OUTPUT, "mn", NULL, STRIDE(y_stride), 0},
    [MEAN] = {"mean", "mean", DATA(mean), KIND_FLOAT, ROLE_OUTPUT, "m", NULL, 0, 0},
    [RSTD] = {"rstd", "rstd", DATA(rstd), KIND_FLOAT, ROLE_OUTPUT, "m", NULL, 0, 0},
    [DY] = {"dy", "dout", DATA(dy), KIND_DTYPE, ROLE_GRADIENT_IN, "mn", NULL, STRIDE(dy_stride), 0},
    [DX] = {"dx", "dx", DATA(dx), KIND_DTYPE, ROLE_GRADIENT_OUT, "mk", NULL, STRIDE(dx_stride), 0},
    [DGAMMA] = {"dgamma", "dgamma", DATA(dgamma), KIND_DTYPE, ROLE_GRADIENT_OUT, "k", NULL, 0, 0},
    [DBETA] = {"dbeta", "dbeta", DATA(dbeta), KIND_DTYPE, ROLE_GRADIENT_OUT, "k", NULL, 0, 0},
    [DW] = {"dw", "dw", DATA(dw), KIND_DTYPE, ROLE_GRADIENT_OUT, "nk", NULL, STRIDE(dw_stride), 0},
    [DC] = {"dbias", "dbias", DATA(dbias), KIND_DTYPE, ROLE_GRADIENT_OUT, "n", NULL, 0, 0},
    [NORM_LINEAR_FIELDS] = {0},
};

const field *job_fields(const job *j) {
    return j->linear ? norm_linear_fields : attention_fields;
}

void job_set_dtype(job *j, heddle_dtype dtype) {
    j->a.dtype = j->l.dtype = dtype;
}

void job_set_device(job *j, heddle_device device) {
    j->a.device = j->l.device = device;
}

heddle_dtype job_dtype(const job *j) {
    return j->linear ? j->l.dtype : j->a.dtype;
}

/* ----------------------------------------------------------------------------------------------------- elements */

static heddle_dtype element_dtype(const job *j, int f) {
    heddle_dtype dtype = job_dtype(j);
    return job_fields(j)[f].kind == KIND_DTYPE || dtype == HEDDLE_F64 ? dtype : HEDDLE_F32;
}

size_t field_bytes(const job *j, int f) {
    switch (job_fields(j)[f].kind) {
    case KIND_BOOL: return 1;
    case KIND_INT32: return 4;
    case KIND_UINT64: return 8;
    default: return heddle_dtype_size(element_dtype(j, f));
    }
}

void store_value(const job *j, int f, void *p, int64_t i, double x) {
    switch (job_fields(j)[f].kind) {
    case KIND_BOOL: ((uint8_t *)p)[i] = x != 0; break;
    case KIND_INT32: ((int32_t *)p)[i] = (int32_t)x; break;
    case KIND_UINT64: ((uint64_t *)p)[i] = (uint64_t)x; break;
    default: store_element(element_dtype(j, f), p, i, x);
    }
}

double load_value(const job *j, int f, const void *p, int64_t i) {
    switch (job_fields(j)[f].kind) {
    case KIND_BOOL: return ((const uint8_t *)p)[i];
    case KIND_INT32: return ((const int32_t *)p)[i];
    case KIND_UINT64: return (double)((const uint64_t *)p)[i];
    default: return load_element(element_dtype(j, f), p, i);
    }
}

/* ------------------------------------------------------------------------------------------------------- shapes */

int64_t job_extent(const job *j, char letter) {
    const heddle_attention *a = &j->a;
    if (j->linear)
        return letter == 'm' ? j->l.m : letter == 'k' ? j->l.k : j->l.n;
    switch (letter) {
    case 'b': return a->b;
    case 'n': return a->b + 1;
    case 'h': return a->h;
    case 'g': return a->hk ? a->hk : a->h;
    case 'q': return a->sq;
    case 'k': return a->sk;
    case 'd': return a->d;
    case 'v': return a->dv ? a->dv : a->d;
    case 'Q': return a->total_q;
    case 'K': return a->total_k;
    default: return 2;
    }
}

const char *field_shape(const job *j, int f) {
    const field *t = &job_fields(j)[f];
    if (!j->linear && j->a.features & HEDDLE_VARLEN && t->packed)
        return t->packed;
    return f == ALIBI && !j->linear && j->a.alibi_stride_b ? "bh" : t->shape;
}

heddle_strides field_strides(const job *j, int f) {
    const field *t = &job_fields(j)[f];
    const char *shape = field_shape(j, f);
    heddle_strides s;
    memcpy(&s, (const char *)&j->a + t->stride, sizeof s);
    if (s.b == 0 && s.h == 0 && s.s == 0) {
        int64_t last = job_extent(j, shape[strlen(shape) - 1]);
        if (shape != t->packed)
            return (heddle_strides){job_extent(j, shape[1]) * job_extent(j, shape[2]) * last,
                                    job_extent(j, shape[2]) * last, last};
        return (heddle_strides){0, last, job_extent(j, shape[1]) * last};
    }
    s.b = s.b == HEDDLE_BROADCAST || shape == t->packed ? 0 : s.b;
    s.h = s.h == HEDDLE_BROADCAST ? 0 : s.h;
    s.s = s.s == HEDDLE_BROADCAST ? 0 : s.s;
    return s;
}

static int64_t strided_count(const job *j, int f) {
    const char *shape = field_shape(j, f);
    heddle_strides s = field_strides(j, f);
    bool packed = shape == job_fields(j)[f].packed;
    int64_t b = packed ? 1 : job_extent(j, shape[0]), h = job_extent(j, shape[1]);
    int64_t rows = job_extent(j, packed ? shape[0] : shape[2]), last = job_extent(j, shape[strlen(shape) - 1]);
    if (f == DBIAS) { /* a sum is there, though it be of nothing */
        b = s.b ? b : 1;
        h = s.h ? h : 1;
        rows = s.s ? rows : 1;
    }
    return b && h && rows && last ? (b - 1) * s.b + (h - 1) * s.h + (rows - 1) * s.s + last : 0;
}

int64_t field_count(const job *j, int f) {
    const field *t = &job_fields(j)[f];
    const char *shape = field_shape(j, f);
    int64_t count = 1, row_stride = 0;
    if (!j->linear && t->stride)
        return strided_count(j, f);
    if (j->linear && t->stride)
        memcpy(&row_stride, (const char *)&j->l + t->stride, sizeof row_stride);
    if (row_stride) {
        int64_t rows = job_extent(j, shape[0]);
        return rows ? (rows - 1) * row_stride + job_extent(j, shape[1]) : 0;
    }
    for (const char *letter = shape; *letter; letter++)
        count *= job_extent(j, *letter);
    return count;
}

/* ---------------------------------------------------------------------------------------------------------- run */

static bool accepted(heddle_status status) {
    if (status != HEDDLE_OK)
        complain("%s (%s)", heddle_last_message(), heddle_status_string(status));
    return status == HEDDLE_OK;
}

bool job_prepare(job *j, arena *m, bool backward) {
    for (int pass = HEDDLE_FORWARD; pass <= (backward ? HEDDLE_BACKWARD : HEDDLE_FORWARD); pass++) {
        heddle_status status = j->linear
                                   ? heddle_norm_linear_workspace(&j->l, (heddle_pass)pass, &j->workspace_bytes[pass])
                                   : heddle_attention_workspace(&j->a, (heddle_pass)pass, &j->workspace_bytes[pass]);
        if (!accepted(status))
            return false;
    }
    size_t forward = j->workspace_bytes[HEDDLE_FORWARD], back = j->workspace_bytes[HEDDLE_BACKWARD];
    j->workspace = arena_alloc(m, forward > back ? forward : back);
    return true;
}

/* The call itself, on data and workspace wherever they are. */
static bool call(const job *j, heddle_pass pass, void *const data[JOB_FIELDS], void *workspace) {
    heddle_attention_data a = {.size = sizeof a};
    heddle_norm_linear_data l = {.size = sizeof l};
    char *base = j->linear ? (char *)&l : (char *)&a;
    for (int f = 0; job_fields(j)[f].name; f++)
        if (job_fields(j)[f].role <= ROLE_OUTPUT || pass == HEDDLE_BACKWARD)
            memcpy(base + job_fields(j)[f].offset, &data[f], sizeof(void *));
    if (pass == HEDDLE_BACKWARD)
        a.weights = NULL;
    size_t bytes = j->workspace_bytes[pass];
    heddle_status (*attention)(const heddle_attention *, const heddle_attention_data *, void *, size_t, void *) =
        pass == HEDDLE_FORWARD ? heddle_attention_forward : heddle_attention_backward;
    heddle_status (*norm_linear)(const heddle_norm_linear *, const heddle_norm_linear_data *, void *, size_t, void *) =
        pass == HEDDLE_FORWARD ? heddle_norm_linear_forward : heddle_norm_linear_backward;
    return accepted(j->linear ? norm_linear(&j->l, &l, workspace, bytes, NULL)
                              : attention(&j->a, &a, workspace, bytes, NULL));
}

static heddle_device job_device(const job *j) {
    return j->linear ? j->l.device : j->a.device;
}

/* The data of a job where its device computes: in place, or copied to the GPU and back. */
typedef struct place {
    void *data[JOB_FIELDS], *workspace;
    bool copied;
} place;

static size_t field_size(const job *j, int f) {
    return (size_t)field_count(j, f) * field_bytes(j, f);
}

static void leave(const job *j, place *p) {
    for (int f = 0; p->copied && job_fields(j)[f].name; f++)
        device_memory_free(p->data[f]);
    if (p->copied)
        device_memory_free(p->workspace);
}

static bool enter(const job *j, heddle_pass pass, place *p) {
    *p = (place){.workspace = j->workspace, .copied = job_device(j) == HEDDLE_CUDA};
    if (!p->copied) {
        memcpy(p->data, j->data, sizeof p->data);
        return true;
    }
    size_t bytes = j->workspace_bytes[pass];
    p->workspace = device_memory_new(bytes);
    bool ok = p->workspace && device_memory_copy(p->workspace, j->workspace, bytes);
    for (int f = 0; job_fields(j)[f].name && ok; f++)
        if (j->data[f]) {
            p->data[f] = device_memory_new(field_size(j, f));
            ok = p->data[f] && device_memory_copy(p->data[f], j->data[f], field_size(j, f));
        }
    if (!ok) {
        complain("the GPU's memory: %s", device_memory_error());
        leave(j, p);
    }
    return ok;
}

static bool fetch(const job *j, heddle_pass pass, const place *p) {
    field_role role = pass == HEDDLE_FORWARD ? ROLE_OUTPUT : ROLE_GRADIENT_OUT;
    bool ok = !p->copied || device_memory_wait();
    for (int f = 0; p->copied && ok && job_fields(j)[f].name; f++)
        if (j->data[f] && job_fields(j)[f].role == role)
            ok = device_memory_copy(j->data[f], p->data[f], field_size(j, f));
    if (!ok)
        complain("the GPU: %s", device_memory_error());
    return ok;
}

bool job_run(const job *j, heddle_pass pass) {
    place p;
    if (!enter(j, pass, &p))
        return false;
    bool ok = call(j, pass, p.data, p.workspace) && fetch(j, pass, &p);
    leave(j, &p);
    return ok;
}

/* -------------------------------------------------------------------------------------------------------- speed */

/* Pairs of a query and a key, masks apart. */
static double scores(const job *j) {
    const heddle_attention *a = &j->a;
    const int32_t *q = j->data[CU_Q], *k = j->data[CU_K];
    double pairs = 0;
    if (!(a->features & HEDDLE_VARLEN))
        return (double)a->b * (double)a->h * (double)a->sq * (double)a->sk;
    for (int64_t n = 0; n < a->b; n++)
        pairs += (double)(q[n + 1] - q[n]) * (double)(k[n + 1] - k[n]);
    return pairs * (double)a->h;
}

double job_flops(const job *j, heddle_pass pass) {
    if (j->linear)
        return 2.0 * (double)j->l.m * (double)j->l.n * (double)j->l.k * (pass == HEDDLE_BACKWARD ? 2 : 1);
    double flops = 2.0 * (double)(j->a.d + job_extent(j, 'v')) * scores(j);
    return flops * (j->a.mask == HEDDLE_MASK_NONE ? 1 : 0.5) * (pass == HEDDLE_BACKWARD ? 2.5 : 1);
}

/* A GPU is given several calls at a time, so that their start is hidden as it is in a program. */
static bool timed_calls(const job *j, heddle_pass pass, const place *p, double *seconds) {
    const int calls = p->copied ? 16 : 1;
    double begin = now();
    for (int x = 0; x < calls; x++)
        if (!call(j, pass, p->data, p->workspace))
            return false;
    if (p->copied && !device_memory_wait())
        return complain("the GPU: %s", device_memory_error()), false;
    *seconds = (now() - begin) / calls;
    return true;
}

double job_seconds(const job *j, heddle_pass pass) {
    enum { MOST = 1001 };
    double sample[MOST], warm, begin = now();
    int n = 0;
    place p;
    if (pass == HEDDLE_BACKWARD && !job_run(j, HEDDLE_FORWARD))
        return -1;
    if (!enter(j, pass, &p))
        return -1;
    bool ok = timed_calls(j, pass, &p, &warm);
    for (; ok && n < MOST && (n < 5 || now() - begin < 1.0); n++)
        ok = timed_calls(j, pass, &p, &sample[n]);
    leave(j, &p);
    return ok ? median(sample, n) : -1;
}
