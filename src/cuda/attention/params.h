/* SPDX-License-Identifier: Apache-2.0
 * The one parameter of every attention kernel. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_PARAMS_H
#define HEDDLE_CUDA_ATTENTION_PARAMS_H

#include "heddle.h"

#include "cuda/attention/contract.h"
#include "cuda/tensor_map.h"

/* Which tensors may be read 16 bytes at a time: pointer, strides and last dimension are multiples of that; of the bias two elements, and
 * whatever last dimension; and for Hopper, does the copy engine fetch the bias? */
enum {
    VECTOR_Q = 1,
    VECTOR_K = 2,
    VECTOR_V = 4,
    VECTOR_DO = 8,
    VECTOR_O = 16,
    VECTOR_BIAS = 32,
    VECTOR_BIAS_BOXES = 64
};

/* A float32 tensor in two float16 parts, as attention/sm90_f32/split.cuh describes it: tiles of 64 rows, and of each tile */
typedef struct split_info {
    int32_t exponent;  /* what is held is the tensor's, times 2^exponent; -113 to 100 */
    int32_t given;     /* of K twice the exponent, and 1 if its low part has what scores lack beside its own */
    uint32_t marks[2]; /* bit row%32 of word row/32: the row is not finite, and somebody sees it */
} split_info;

typedef struct split_tensor {
    void *tiles;
    split_info *info;
} split_tensor;

enum { SPLIT_Q, SPLIT_K, SPLIT_V, SPLIT_DO, SPLIT_TENSORS };

/* What kernels read of a boolean mask (mask.cu): of tiles of so many rows and columns the tile_kind, and a bit for each element. Rows
 * are queries or, for kernels that have keys as rows, keys. A map for each batch and head, as far as they are not alike. */
typedef struct mask_map {
    uint8_t *kinds;                   /* [maps][tiles_down][tiles_across]; NULL: there is no map */
    uint32_t *bits;                   /* [maps][lines][words] */
    int32_t rows, columns;            /* of a tile */
    int32_t tiles_down, tiles_across; /* 1: all are alike */
    int32_t lines, words;             /* lines 1: all rows are alike; a multiple of 4 words */
    int32_t line_step, word_step;     /* words from row to row, and for 32 columns; 0: alike */
    int32_t of_b, of_h;               /* maps from batch to batch and from head to head; 0: alike */
    uint32_t *taken; /* of queries, forward: tiles that blocks have taken so far; NULL: nobody counts */
} mask_map;

/* HEDDLE_SEGMENTS and HEDDLE_BLOCKS: what the kernel `seen` makes maps of, or bytes; NULL: it is not by these. */
typedef struct seen_sources {
    const int32_t *q_segments, *k_segments, *block_rows, *block_columns;
    const uint8_t *bool_mask; /* the caller's */
    heddle_strides bool_mask_stride;
    uint8_t *bytes; /* [maps][sq][line_step]; NULL: nobody reads them */
    mask_map shape; /* of their tiles */
    int32_t maps;
} seen_sources;

/* What kernels know of heddle_attention_data, in its order: a pointer that comes behind leaves their parameters where they are. */
typedef struct kernel_data {
    size_t size;
    const void *q, *k, *v, *alibi_slopes, *bias;
    const uint8_t *bool_mask;
    const void *sinks;
    const int32_t *cu_seqlens_q, *cu_seqlens_k, *seqlens_q, *seqlens_k;
    const uint64_t *rng_state;
    void *o, *lse, *weights;
    const void *dout, *dlse, *dweights;
    void *dq, *dk, *dv, *dbias, *dsinks;
    const int32_t *block_table;
} kernel_data;

typedef struct attention_params {
    heddle_attention a;      /* resolved: no default left */
    kernel_data t;           /* device pointers */
    float scale, scale_log2; /* scale, scale·log2(e) */
    float base_log2;         /* backward, float32: what scores that base is subtracted from are multiplied with then */
    float lse_factor, lse_factor_low; /* what takes lse to units of log2, as the kernels take S: the sum of both */
    float lse_more;                   /* so much of itself is lse_factor larger than log2(e) */
    float lse_unit, lse_unit_low;     /* and back */
    float lse_huge;                   /* from lse to units of S·power_of(scale·log2(e)) */
    float unit;                       /* what takes S, as the kernels take it, to units of lse: scale, or 1 */
    float softcap, inverse_softcap;
    float keep_scale; /* dropout_scale(dropout) */
    uint32_t drop_threshold;
    int32_t drops;
    int32_t rich;                      /* the full kernels: more than the lean ones can is asked for */
    int32_t tf32;                      /* one TF32 product in place of three */
    int32_t group;                     /* query heads per key/value head */
    int32_t pack;                      /* fwd: query heads that share a tile's rows; 1 or group */
    int32_t tiles_q, tiles_k;          /* per (sequence, head): blocks of fwd and dq; of dkdv */
    int32_t key_shares;                /* fwd: blocks that share the keys of a tile of queries */
    int32_t vectors;                   /* VECTOR_Q | ... */
    int64_t lse_rows;                  /* over all heads */
    float *part_o;                     /* [key_shares][lse_rows][dv], when key_shares > 1 */
    float *part_max, *part_sum;        /* [key_shares][lse_rows]: store_part */
    float *dq_sum;                     /* bwd for Hopper: sums of dq, tiles of 64 queries (sum_tile); NULL: none */
    int32_t *flags;                    /* for each 64 queries, where light has been before prep: there is more to do */
    float *dsum, *base, *rest;         /* [rows]: D, and what put_log_sum makes of lse (+inf: the row sees nothing) */
    split_tensor split[SPLIT_TENSORS]; /* float32 on Hopper */
    int64_t split_tiles_q, split_tiles_k; /* of a head: of one sequence, or of all if they are packed */
    uint32_t blocks_of_dk;                /* dkdv for Hopper: blocks that make dK, where the others make dV */
    /* sm90's full kernels: S = score_out·(softcap: tanh of)(score_in·qk) + what is added */
    float score_in, score_out;
    int32_t *dirty;                         /* for each 64 queries: Q or dO is not finite */
    mask_map seen_by_queries, seen_of_keys; /* rows are queries; rows are keys */
    int64_t off;                            /* of the diagonal, beside own_offset: what the place of a part gives */
    uint32_t drop_row, drop_eight;          /* rows, and eights of keys, that dropout counts in front of the part's */
    int32_t adds;                           /* HEDDLE_ACCUMULATE: o, dq, dk and dv are float32 and hold something */
    const float *before; /* fwd that adds: lse of what is there; that of all goes to t.lse, which is the workspace's */
    float *lse;          /* and from there to this */
    int32_t page_bits;   /* HEDDLE_PAGES: a page has 2^page_bits keys; 0: there are none */
    int32_t *
        few; /* float32 on Hopper, [b][hk]: most rows see few keys, and sm80's kernels have them; NULL: nobody looked */
    int32_t lo, hi; /* of a sequence as long as the tensors: as place has them */
    seen_sources from;
    const float *k_scale, *v_scale; /* HEDDLE_E4M3: [b, hk]; NULL: ones */
} attention_params;

/* The one parameter of the kernels for Hopper. dout only in backward; bias where VECTOR_BIAS_BOXES says so. */
typedef struct attention_params_sm90 {
    tensor_map q, k, v, dout, bias;
    attention_params p;
} attention_params_sm90;

#endif
