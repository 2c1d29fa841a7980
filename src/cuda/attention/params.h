/* SPDX-License-Identifier: Apache-2.0
 * The one parameter of every attention kernel, and the list of launches that one pass comes to. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_PARAMS_H
#define HEDDLE_CUDA_ATTENTION_PARAMS_H

#include "heddle.h"

#include "cuda/tensor_map.h"

/* The most blocks that share the keys of a tile of queries. */
#define MAX_SPLITS 256

/* Which tensors may be read 16 bytes at a time: pointer, strides and last dimension are multiples of that. */
enum { VECTOR_Q = 1, VECTOR_K = 2, VECTOR_V = 4, VECTOR_DO = 8, VECTOR_O = 16 };

/* A float32 tensor in two float16 parts, as attention/sm90_f32/split.cuh describes it: tiles of 64 rows, and of each tile */
typedef struct split_info {
    int32_t exponent;  /* what is held is the tensor's, times 2^exponent; -113 to 100 */
    float length;      /* of the longest row of what is held (Euclidean) */
    uint32_t marks[2]; /* bit row%32 of word row/32: the row is not finite, and somebody sees it */
} split_info;

typedef struct split_tensor {
    void *tiles;
    split_info *info;
} split_tensor;

enum { SPLIT_Q, SPLIT_K, SPLIT_V, SPLIT_DO, SPLIT_TENSORS };

typedef struct attention_params {
    heddle_attention a;               /* resolved: no default left */
    heddle_attention_data t;          /* device pointers */
    float scale, scale_log2;          /* scale, scale·log2(e) */
    float lse_factor, lse_factor_low; /* what takes lse to units of log2, as the kernels take S: the sum of both */
    float lse_unit, lse_unit_low;     /* and back */
    float softcap, inverse_softcap;
    float keep_scale; /* 1/(1 - dropout) */
    uint32_t drop_threshold;
    int32_t drops;
    int32_t rich;              /* the full kernels: more than the lean ones can is asked for */
    int32_t tf32;              /* one TF32 product in place of three */
    int32_t group;             /* query heads per key/value head */
    int32_t pack;              /* fwd: query heads that share a tile's rows; 1 or group */
    int32_t tiles_q, tiles_k;  /* per (sequence, head): blocks of fwd and dq; of dkdv */
    int32_t splits;            /* fwd: blocks that share the keys of a tile of queries */
    int32_t vectors;           /* VECTOR_Q | ... */
    int64_t rows;              /* of lse, over all heads */
    float *part_o, *part_lse;  /* [splits][rows][dv], [splits][rows], when splits > 1; lse in units of log2 */
    float *dq_sum;             /* bwd for Hopper: sums of dq, tiles of 64 queries (sum_tile); NULL: none */
    int32_t *flags;            /* for each 64 queries, where rows has been before prep: there is more to do */
    float *dsum, *base, *rest; /* [rows]: D, and lse·log2(e) as the sum of two floats (+inf: the row sees nothing) */
    split_tensor split[SPLIT_TENSORS];    /* float32 on Hopper */
    int64_t split_tiles_q, split_tiles_k; /* of a head: of one sequence, or of all if they are packed */
} attention_params;

/* Up to so many keys, D of 16-bit types is rowsum(P∘dP): o is rounded, and few keys do not average that out. */
#define FEW_KEYS 128

/* The one parameter of the kernels for Hopper. dout only in backward. */
typedef struct attention_params_sm90 {
    tensor_map q, k, v, dout;
    attention_params p;
} attention_params_sm90;

/* The forward for Hopper: how many tiles of K, and of V, are there or on their way. */
#define FORWARD90_STAGES(dim) ((dim) > 64 ? 2 : 4)

/* The float32 forward for Hopper: the slots for tiles of K and V in turn, of 64·dim·4 bytes. */
#define FORWARD32_SLOTS(dim) ((dim) > 64 ? 5 : 8)

/* The backward for Hopper: the slots for tiles that stream, beside the block's own tiles. */
#define BACKWARD90_SLOTS(dim, block) (((dim) > 128 ? 96 : 128) * 1024 / ((block) * (dim)*2))

/* The same in float32, of 64 rows. */
#define BACKWARD32_SLOTS(dim) ((dim) > 64 ? 3 : 8)

/* Of Q and dO, where dK, dV and dQ are made at once. */
#define BACKWARD90_STAGES(dim) 3

#ifndef __CUDACC__
#include "plan.h"

#include <stdbool.h>

/* Every attention kernel: ATTENTION_fwd_bf16_d64_lean_sm80, ... */
#define ATTENTION_ALL_LISTS
enum attention_kernel {
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    ATTENTION_##pass##_##dtype##_d##dim##_##variant##_##family,
#include "cuda/attention/attention.def"
#undef K
    ATTENTION_KERNELS
};
#undef ATTENTION_ALL_LISTS

/* When the family `small` is taken. */
enum { SMALL_NEVER, SMALL_CHOSEN, SMALL_ALWAYS };

/* What the plan must know of the device. */
typedef struct attention_device {
    int multiprocessors;
    size_t shared_bytes; /* that a block can have, opted in */
    int sm90;            /* has Hopper's instructions, and they are to be used */
    int small;           /* SMALL_CHOSEN, unless somebody asks for a family */
} attention_device;

typedef struct attention_launch {
    enum attention_kernel kernel;
    uint32_t grid, threads, shared_bytes; /* grid: x only; shared_bytes: dynamic */
    int sm90;                             /* the parameter is attention_params_sm90 */
} attention_launch;

/* Is the problem one for the family `small`? dim: of its kernel. Pure. */
bool heddle__cuda_attention_is_small(const heddle_attention *a, const attention_device *device, heddle_pass pass,
                                     int dim);

/* May D have to come from P and dP, in some sequence? Pure. */
bool heddle__cuda_attention_has_few_keys(const heddle_attention *a);

#define ATTENTION_MAX_LAUNCHES 8

/* Fills kernel, tiles and workspace of a resolved plan. Pure. */
heddle_status heddle__cuda_plan_attention(attention_plan *plan, const attention_device *device);

/* The launches of a planned pass, in order, all with the same *params. Returns how many (0: nothing to do). Pure. */
int heddle__cuda_attention_launches(const attention_plan *plan, const attention_device *device,
                                    const heddle_attention_data *data, void *workspace, attention_params *params,
                                    attention_launch launches[ATTENTION_MAX_LAUNCHES]);

/* q, k, v, dout: columns, rows, heads, batch. Pure. */
void heddle__cuda_attention_shapes(const attention_plan *plan, const heddle_attention_data *data,
                                   tensor_shape shapes[4]);

/* The symbol of a kernel, and in which source it is: "heddle_attention_fwd_bf16_d64_lean_sm80", "attention_fwd". */
const char *heddle__cuda_attention_symbol(enum attention_kernel kernel);
const char *heddle__cuda_attention_module(enum attention_kernel kernel);
#endif

#endif
