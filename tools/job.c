/* SPDX-License-Identifier: Apache-2.0 */
#include "job.h"
#include "device_memory.h"

#include "../src/dtype.h"

#include <string.h>

const tensor_field *job_fields(const job *j) {
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

uint64_t job_features(const job *j) {
    return j->linear ? j->l.features : j->a.features;
}

bool job_has(const job *j, int f) {
    const tensor_field *t = &job_fields(j)[f];
    return j->linear ? norm_linear_has(&j->l, t) : !t->feature || (j->a.features & t->feature);
}

/* ----------------------------------------------------------------------------------------------------- elements */

static heddle_dtype element_dtype(const job *j, int f) {
    heddle_dtype dtype = job_dtype(j);
    return element_in(&job_fields(j)[f], job_features(j)) == OF_DTYPE || dtype == HEDDLE_F64 ? dtype : HEDDLE_F32;
}

size_t field_bytes(const job *j, int f) {
    switch (element_in(&job_fields(j)[f], job_features(j))) {
    case OF_BOOL:
    case OF_BYTES:
    case OF_E4M3: return 1;
    case OF_INT32: return 4;
    case OF_UINT64: return 8;
    default: return heddle_dtype_size(element_dtype(j, f));
    }
}

void store_value(const job *j, int f, void *p, int64_t i, double x) {
    switch (element_in(&job_fields(j)[f], job_features(j))) {
    case OF_E4M3: ((uint8_t *)p)[i] = double_to_e4m3(x); break;
    case OF_BOOL: ((uint8_t *)p)[i] = x != 0; break;
    case OF_BYTES: ((uint8_t *)p)[i] = (uint8_t)x; break;
    case OF_INT32: ((int32_t *)p)[i] = (int32_t)x; break;
    case OF_UINT64: ((uint64_t *)p)[i] = (uint64_t)x; break;
    default: store_element(element_dtype(j, f), p, i, x);
    }
}

double load_value(const job *j, int f, const void *p, int64_t i) {
    switch (element_in(&job_fields(j)[f], job_features(j))) {
    case OF_E4M3: return (double)e4m3_to_float(((const uint8_t *)p)[i]);
    case OF_BOOL:
    case OF_BYTES: return ((const uint8_t *)p)[i];
    case OF_INT32: return ((const int32_t *)p)[i];
    case OF_UINT64: return (double)((const uint64_t *)p)[i];
    default: return load_element(element_dtype(j, f), p, i);
    }
}

/* ------------------------------------------------------------------------------------------------------- shapes */

int64_t job_extent(const job *j, char letter) {
    if (!j->linear && letter == 'c')
        return j->columns;
    return j->linear ? norm_linear_extent(&j->l, letter) : attention_extent(&j->a, letter);
}

const char *field_shape(const job *j, int f) {
    const tensor_field *t = &job_fields(j)[f];
    if (j->linear)
        return t->shape;
    return f == ALIBI && j->a.alibi_stride_b ? "bh" : attention_shape(t, j->a.features);
}

heddle_strides field_strides(const job *j, int f) {
    const tensor_field *t = &job_fields(j)[f];
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
    if (is_summed(&job_fields(j)[f])) { /* a sum is there, though it be of nothing */
        b = s.b ? b : 1;
        h = s.h ? h : 1;
        rows = s.s ? rows : 1;
    }
    return b && h && rows && last ? (b - 1) * s.b + (h - 1) * s.h + (rows - 1) * s.s + last : 0;
}

int64_t field_count(const job *j, int f) {
    const tensor_field *t = &job_fields(j)[f];
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

bool job_sizes(job *j, bool backward) {
    for (int pass = HEDDLE_FORWARD; pass <= (backward ? HEDDLE_BACKWARD : HEDDLE_FORWARD); pass++) {
        heddle_status status = j->linear
                                   ? heddle_norm_linear_workspace(&j->l, (heddle_pass)pass, &j->workspace_bytes[pass])
                                   : heddle_attention_workspace(&j->a, (heddle_pass)pass, &j->workspace_bytes[pass]);
        if (!accepted(status))
            return false;
    }
    return true;
}

bool job_prepare(job *j, arena *m, bool backward) {
    if (!job_sizes(j, backward))
        return false;
    size_t forward = j->workspace_bytes[HEDDLE_FORWARD], back = j->workspace_bytes[HEDDLE_BACKWARD];
    j->workspace = arena_alloc(m, forward > back ? forward : back);
    return true;
}

bool job_call(const job *j, heddle_pass pass, void *const data[JOB_FIELDS], void *workspace) {
    heddle_attention_data a = {.size = sizeof a};
    heddle_norm_linear_data l = {.size = sizeof l};
    char *base = j->linear ? (char *)&l : (char *)&a;
    for (int f = 0; job_fields(j)[f].name; f++)
        if (job_fields(j)[f].need[pass] != NEED_UNUSED)
            memcpy(base + job_fields(j)[f].offset, &data[f], sizeof(void *));
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
    bool ok = !p->copied || device_memory_wait();
    for (int f = 0; p->copied && ok && job_fields(j)[f].name; f++)
        if (j->data[f] && is_output_of(&job_fields(j)[f], pass))
            ok = device_memory_copy(j->data[f], p->data[f], field_size(j, f));
    if (!ok)
        complain("the GPU: %s", device_memory_error());
    return ok;
}

bool job_run(const job *j, heddle_pass pass) {
    place p;
    if (!enter(j, pass, &p))
        return false;
    bool ok = job_call(j, pass, p.data, p.workspace) && fetch(j, pass, &p);
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
        return 2.0 * (double)j->l.m * (double)job_extent(j, 'N') * (double)j->l.k * (pass == HEDDLE_BACKWARD ? 2 : 1);
    double flops = 2.0 * (double)(j->a.d + job_extent(j, 'v')) * scores(j);
    return flops * (j->a.mask == HEDDLE_MASK_NONE ? 1 : 0.5) * (pass == HEDDLE_BACKWARD ? 2.5 : 1);
}

/* A GPU is given several calls at a time, so that their start is hidden as it is in a program. */
static bool timed_calls(const job *j, heddle_pass pass, const place *p, double *seconds) {
    const int calls = p->copied ? 16 : 1;
    double begin = now();
    for (int x = 0; x < calls; x++)
        if (!job_call(j, pass, p->data, p->workspace))
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
