/* SPDX-License-Identifier: Apache-2.0
 * What a family of norm-linear kernels supplies, and what the files share that list its launches. C only, and pure. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_FAMILY_H
#define HEDDLE_CUDA_NORM_LINEAR_FAMILY_H

#include "cuda/norm_linear/norm_linear.h"
#include "cuda/norm_linear/sm80/contract.h"
#include "cuda/norm_linear/sm90/contract.h"

/* What the workspace of the products holds, in order: A(type, name, elements), of which there are none where a pass does not need them.
 * du: in place of dy, [m, np]; u: what an activation of two halves is of, [m, np]; z: xhat (or z) for a product; least, shared: exponents of
 * float32's planes on their way. Without a norm x is multiplied as it is, in float32 in planes. */
#define NORM_LINEAR_ARRAYS                                                                                             \
    A(float, mean, is->plain ? 0 : a->m)                                                                               \
    A(float, rstd, is->plain ? 0 : a->m)                                                                               \
    A(uint16_t, z, raw || (is->plain && !is->wide) ? 0 : matrix)                                                       \
    A(uint16_t, z_low, two ? matrix : 0)                                                                               \
    A(uint16_t, w, own && (is->wide || raw) ? weights : 0)                                                             \
    A(uint16_t, w_low, own &&two ? weights : 0)                                                                        \
    A(int32_t, x_exponent, is->wide && is->plain ? a->m : 0)                                                           \
    A(int32_t, w_exponent, own && is->wide ? is->n : 0)                                                                \
    A(int32_t, turns, raw ? 2 * (blocks(a->m, GEMM_TILE) + 1) : 0)                                                     \
    A(float, s, backward || !own ? 0 : is->n)                                                                          \
    A(float, t, backward || !own ? 0 : is->n)                                                                          \
    A(uint16_t, dy, backward && is->wide ? a->m * is->np : 0)                                                          \
    A(uint16_t, dy_low, backward &&two ? a->m * is->np : 0)                                                            \
    A(int32_t, dy_exponent, backward && is->wide ? a->m : 0)                                                           \
    A(int32_t, least, backward && is->wide ? (is->plain ? 3 : 2) * prepare_blocks(device, is) : 0)                     \
    A(int32_t, shared, backward && is->wide ? 2 : 0)                                                                   \
    A(float, dgamma_part, backward ? (gemm80_sums(blocks(is->n, GEMM_TILE)) + z_parts(a)) * a->k : 0)                  \
    A(float, dbeta_part, backward ? z_parts(a) * a->k : 0)                                                             \
    A(float, finish_part,                                                                                              \
      backward && !is->wide && !is->plain && a->k <= SUMMED_ROW ? 2 * finish_blocks(device) * a->k : 0)                \
    A(float, dbias_part, backward ? sum_parts(a->m) * is->n : 0)                                                       \
    A(float, dbias, backward ? is->n : 0)                                                                              \
    A(float, dw_sums, backward ? is->dw.floats : 0)                                                                    \
    A(int32_t, dw_arrived, backward ? is->dw.tiles : 0)                                                                \
    A(char, du, backward && a->activation ? a->m * is->np * (is->wide ? 4 : 2) : 0)                                    \
    A(char, u, !backward && is->gated ? a->m * is->np * (is->wide ? 4 : 2) : 0)

typedef struct norm_linear_arrays {
#define A(type, name, elements) type *name;
    NORM_LINEAR_ARRAYS
#undef A
} norm_linear_arrays;

/* What the products keep of the weight where the caller wants it kept (heddle_norm_linear_prepare), likewise: W∘gamma as it is multiplied, in
 * float32 as planes and exponents, and what the epilogue adds, s and t of docs/design.md, section 4. By the problem alone, whatever m is and
 * whichever family takes it: other forwards read W where it lies, and nothing of this. */
#define NORM_LINEAR_PREPARED                                                                                           \
    A(uint16_t, w, weights)                                                                                            \
    A(uint16_t, w_low, two ? weights : 0)                                                                              \
    A(int32_t, w_exponent, is->wide ? is->n : 0)                                                                       \
    A(float, s, !is->wide && weights ? is->n : 0)                                                                      \
    A(float, t, weights ? is->n : 0)

/* Of a product on Hopper: which of the widths its tiles have; of dw in how many shares their terms are taken, and if it is more than one the
 * tiles, pairs of rows counted, and what all shares leave. */
typedef struct gemm90_shape {
    int width, shares;
    int64_t tiles, floats;
} gemm90_shape;

/* What follows from the description and the device. */
typedef struct norm_linear_facts {
    int64_t n;       /* rows of W, columns of u: where an activation is of two halves twice those of y */
    int64_t kp, np;  /* k and n in planes */
    bool wide, tf32; /* float32; one product */
    bool plain;      /* no norm */
    bool gated;      /* the activation is of two halves */
    bool raw;        /* forward multiplies x itself */
    bool gathers;    /* and Hopper's product forms the moments of its rows, as far as the pointers allow */
    bool kept;       /* forward finds what it makes of the weight with the caller */
    bool few;        /* forward is one launch, as far as the pointers allow */
    bool few90;      /* its product is Hopper's for few rows, likewise */
    bool sm90;       /* the products are Hopper's, as far as the pointers allow */
    int dtype;       /* 0 bf16, 1 f16, 2 f32 */
    gemm90_shape dw; /* with sm90, in backward */
} norm_linear_facts;

/* The plan, in the part of a norm_linear_plan that is the backend's own. */
typedef struct __attribute__((may_alias)) norm_linear_choice {
    void *record, *context; /* the device, for run */
    int family;             /* its place in the list */
    norm_linear_facts is;
    struct {
#define A(type, name, elements) size_t name;
        NORM_LINEAR_ARRAYS
#undef A
    } at; /* offsets in the workspace of the products */
} norm_linear_choice;

typedef struct norm_linear_call {
    const heddle_norm_linear *a;
    heddle_pass pass;
    const cuda_facts *device;
    norm_linear_facts is;
    const heddle_norm_linear_data *t;
    void *workspace;
    norm_linear_arrays at;
    bool b_is_there; /* the launch in front of forward's product has waited for who may write W */
    norm_linear_launch *launches;
    int count;
} norm_linear_call;

typedef struct norm_linear_family {
    bool (*takes)(const heddle_norm_linear *a, heddle_pass pass, const cuda_facts *device);
    /* Threads, tiles, the kernel that names the plan, the workspace. */
    void (*plan)(norm_linear_plan *plan, const cuda_facts *device, norm_linear_choice *c);
    void (*launch)(const norm_linear_choice *choice, norm_linear_call *c);
} norm_linear_family;

extern const norm_linear_family heddle__norm_linear_small, heddle__norm_linear_products;

enum { DY_SHARED, W_SHARED }; /* places in arrays.shared, and jobs that find them */

static inline int64_t blocks(int64_t n, int64_t each) {
    return (n + each - 1) / each;
}

/* Shares of the rows for the sums of dz, a fourth of sum_parts' at most: they lie behind those that dgamma has anyway. */
static inline int32_t z_parts(const heddle_norm_linear *a) {
    return a->features & HEDDLE_Z ? (int32_t)(sum_parts(a->m) < 64 ? sum_parts(a->m) : 64) : 0;
}

static inline size_t size_of(const norm_linear_facts *is) {
    return is->wide ? 4 : 2;
}

/* The blocks of `prepare` and `finish` stay on their multiprocessors. */
static inline int64_t prepare_blocks(const cuda_facts *device, const norm_linear_facts *is) {
    return device->multiprocessors * prepare_resident((int)size_of(is));
}

static inline int64_t finish_blocks(const cuda_facts *device) {
    return device->multiprocessors * FINISH_RESIDENT;
}

/* Those of `activate` and `z`, of which so many fit on a multiprocessor: two rounds, but where the second would go to those left to others. */
static inline int64_t passing_blocks(const norm_linear_call *c, int resident) {
    return (c->a->multiprocessors ? 1 : 2) * (int64_t)resident * c->device->multiprocessors;
}

static inline bool aligned16(const void *p, int64_t ld, size_t size) {
    return (uintptr_t)p % 16 == 0 && (size_t)ld * size % 16 == 0;
}

/* Of a tensor that may not be there, whose stride is then no matter. */
static inline bool none_or_aligned16(const void *p, int64_t ld, size_t size) {
    return !p || aligned16(p, ld, size);
}

/* xhat is at most sqrt(k): with this exponent it stays below 2^15, and every power of two is exact. */
static inline int32_t xhat_exponent(int64_t k) {
    int e = 0;
    while (e < 31 && INT64_C(1) << 2 * e < k)
        e++;
    return 14 - e;
}

static inline int64_t least_of(int64_t x, int64_t y) {
    return x < y ? x : y;
}

/* Numbers of columns that a tile may have on Hopper. */
#define WIDTH_OF(pass, width) width
enum { WIDTHS = sizeof((int[]){GEMM90_WIDTHS(WIDTH_OF, )}) / sizeof(int) };

/* The kernels of one product. */
typedef struct gemm_kernels {
    enum cuda_kernel sm80[3], any[2], tf32, sm90[WIDTHS][2];
    enum gemm90_pass pass;
} gemm_kernels;

#define WIDTH_KERNELS(pass, width)                                                                                     \
    { NORM_LINEAR_##pass##_n##width##_bf16_sm90, NORM_LINEAR_##pass##_n##width##_f16_sm90 }
/* The products of an activation of two halves: Hopper's alone. */
#define GATED (&(const gemm_kernels){.sm90 = {GEMM90_WIDTHS(WIDTH_KERNELS, fwd_gate)}, .pass = GEMM90_gate})
/* That of raw x, of the widest tiles. */
#define OF_RAW (&(const gemm_kernels){.sm90 = {{NORM_LINEAR_fwd_raw_n256_bf16_sm90}}, .pass = GEMM90_raw})
#define GEMMS(pass)                                                                                                    \
    (&(const gemm_kernels){                                                                                            \
        {NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80, NORM_LINEAR_##pass##_f32_sm80},                \
        {NORM_LINEAR_##pass##_any_bf16_sm80, NORM_LINEAR_##pass##_any_f16_sm80},                                       \
        NORM_LINEAR_##pass##_tf32_sm80,                                                                                \
        {GEMM90_WIDTHS(WIDTH_KERNELS, pass)},                                                                          \
        GEMM90_##pass})

/* The same kernel of each dtype. */
#define OF_DTYPE(pass)                                                                                                 \
    ((const enum cuda_kernel[]){NORM_LINEAR_##pass##_bf16_sm80, NORM_LINEAR_##pass##_f16_sm80,                         \
                                NORM_LINEAR_##pass##_f32_sm80})

/* A launch, unless it has no blocks. */
void heddle__cuda_add(norm_linear_call *c, enum cuda_kernel kernel, int64_t grid, uint32_t shared,
                      const norm_linear_params *params);

/* y = act(u), or, with dy, du and its sums over rows. */
void heddle__cuda_add_activate(norm_linear_call *c, norm_activate p);

/* z itself, or dz added to what is there. */
void heddle__cuda_add_z(norm_linear_call *c, norm_z p);

/* The job of making W ready for the product. */
norm_rows heddle__cuda_rows_of_w(const norm_linear_call *c);

/* Bytes that are prepared, of a problem with these facts; and where they lie in `prepared`. */
size_t heddle__cuda_prepared_bytes(const heddle_norm_linear *a, const norm_linear_facts *is);
void heddle__cuda_find_prepared(norm_linear_call *c, const void *prepared);

/* What the products take a problem for. */
norm_linear_facts heddle__cuda_norm_linear_facts(const norm_linear_plan *plan, const cuda_facts *device);

/* The job of normalising x, with what differs from one use to the other in p. */
norm_rows heddle__cuda_rows_of_x(const norm_linear_call *c, norm_rows p);

/* In 16 bits, for Hopper's product. */
void heddle__cuda_add_normalise(norm_linear_call *c, const norm_rows *x);

/* Returns the blocks. */
int64_t heddle__cuda_add_prepare(norm_linear_call *c, norm_prepare p);

/* Tiles of a product on Hopper. adds: an activation or a residual. */
gemm90_shape heddle__cuda_shape90(const cuda_facts *device, enum gemm90_pass pass, int64_t rows, int64_t cols,
                                  int64_t depth, bool adds);

/* Its kernel, and the columns of its tiles. */
enum cuda_kernel heddle__cuda_gemm90(const norm_linear_call *c, const gemm_kernels *kernels, int64_t rows, int64_t cols,
                                     int64_t depth, bool adds, int64_t *width);

/* Whether there are as many of the widest tiles as Hopper's multiprocessors have at once. */
bool heddle__cuda_fills90(const cuda_facts *device, int64_t rows, int64_t cols);

/* A product. Returns whether it is Hopper's. */
bool heddle__cuda_add_gemm(norm_linear_call *c, const gemm_kernels *kernels, const norm_gemm *p, bool a_transposed,
                           bool b_transposed);

/* Forward with an activation of two halves, where it fits90: columns of the gate, activation and all that product_of has. */
void heddle__cuda_add_gated(norm_linear_call *c, const norm_gemm *p);

/* Whether it will be, by what is known of it so far. */
bool heddle__cuda_fits90(const norm_linear_call *c, const norm_gemm *p);

/* Forward of few rows on Hopper: the kernel that names it, and rows of a cluster (0: there is none for it); whether it will be, by what is
 * known of the product so far; its launch. */
enum cuda_kernel heddle__cuda_few90(const norm_linear_call *c, int64_t *rows);
bool heddle__cuda_fits_few90(const norm_linear_call *c, const norm_gemm *p);
void heddle__cuda_add_few90(norm_linear_call *c, const norm_gemm *p, bool gated);

void heddle__cuda_add_totals(norm_linear_call *c, norm_totals p);

/* All launches of a backward pass by products. */
void heddle__cuda_products_backward(norm_linear_call *c);

#endif
