/* SPDX-License-Identifier: Apache-2.0
 *
 * heddle: exact attention and fused LayerNorm+Linear, each forward and backward, on the CPU and on NVIDIA GPUs.
 *
 *     heddle_attention a = {.size = sizeof a, .b = 1, .h = 8, .sq = 1024, .sk = 1024, .d = 64,
 *                           .mask = HEDDLE_CAUSAL_TOP_LEFT};
 *     heddle_attention_data t = {.size = sizeof t, .q = q, .k = k, .v = v, .o = o, .lse = lse};
 *     size_t bytes;
 *     heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes);
 *     void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
 *     if (heddle_attention_forward(&a, &t, workspace, bytes, NULL) != HEDDLE_OK)
 *         fprintf(stderr, "%s\n", heddle_last_message());
 *
 * A descriptor says what the problem is, a second structure says where the data lies. In both, zero is the default of
 * every field, and `size` must be set to sizeof the structure, so that later versions can add fields at the end: where a
 * comment says "since then", a structure that ends in front is taken, too.
 *
 * Conventions that hold for every function
 *   Memory     The library allocates nothing. All pointers are the caller's and are only used during the call (on a GPU:
 *              until the stream has passed it). The workspace may hold anything and is worth nothing afterwards.
 *              Lengths, tables, lists and ids are read where the work is done (on a GPU: on the device).
 *   Aliasing   Outputs overlap neither inputs nor each other nor the workspace. Inputs may overlap.
 *   Streams    On the CPU a call returns when its work is done and `stream` is ignored. With HEDDLE_CUDA, `stream` is a
 *              CUstream/cudaStream_t of the current context (NULL: the default stream), pointers are device pointers, and
 *              the call returns at once without synchronising or allocating, so that CUDA graphs can capture it.
 *   Threads    Any number of threads may call at the same time, each with its own outputs and workspace. The CPU backend
 *              uses OpenMP's thread count for its own loops, and one thread inside a parallel region.
 *   Errors     Calls validate before they write: on an error but HEDDLE_CUDA_ERROR of a later launch no output byte is
 *              touched. The status says which kind of rule failed, heddle_last_message() which one, with the numbers.
 *   Results    On the CPU the same inputs give the same bits, whatever the number of threads. On a GPU this holds for every
 *              forward, and for a backward with HEDDLE_DETERMINISTIC.
 *   Precision  Sums are kept in float32 or better. 16-bit types are widened when read and rounded once when written.
 */
#ifndef HEDDLE_H
#define HEDDLE_H

#include <stddef.h>
#include <stdint.h>

#define HEDDLE_VERSION_MAJOR 0
#define HEDDLE_VERSION_MINOR 1
#define HEDDLE_VERSION_PATCH 0
#define HEDDLE_VERSION (HEDDLE_VERSION_MAJOR * 10000 + HEDDLE_VERSION_MINOR * 100 + HEDDLE_VERSION_PATCH)

#if defined(_WIN32) && defined(HEDDLE_SHARED)
#ifdef HEDDLE_BUILDING
#define HEDDLE_API __declspec(dllexport)
#else
#define HEDDLE_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define HEDDLE_API __attribute__((visibility("default")))
#else
#define HEDDLE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- status */

/* What a call came to. The values never change; new ones may be added. */
typedef enum heddle_status {
    HEDDLE_OK = 0,
    HEDDLE_NULL_POINTER = 1,        /* a pointer that this problem needs is NULL */
    HEDDLE_BAD_DESCRIPTOR_SIZE = 2, /* `size` is not that of a structure this library knows */
    HEDDLE_BAD_ENUM = 3,            /* an unknown dtype, device, mask, norm, pass, or feature bit */
    HEDDLE_BAD_SIZE = 4,            /* a dimension is negative, zero where it cannot be, or over its limit */
    HEDDLE_BAD_HEADS = 5,           /* hk does not divide h */
    HEDDLE_BAD_STRIDE = 6,          /* a stride is negative, or makes an output overlap itself */
    HEDDLE_OVERFLOW = 7,            /* a product of sizes and strides does not fit into 63 bits of bytes */
    HEDDLE_BAD_VALUE = 8,           /* a number is NaN, infinite, or outside its range */
    HEDDLE_WORKSPACE_TOO_SMALL = 9, /* the workspace is smaller than the query said */
    HEDDLE_MISALIGNED = 10,         /* a pointer is not a multiple of its element size, or the workspace of 64 bytes */
    HEDDLE_BAD_COMBINATION = 11,    /* fields that contradict each other, or a pointer without its feature bit */
    HEDDLE_UNSUPPORTED = 20,        /* right, but this backend has no kernel for it */
    HEDDLE_NO_DEVICE = 30,          /* the backend is not there: not built, no driver, no GPU */
    HEDDLE_WRONG_DEVICE = 31,       /* a pointer or stream belongs to another device */
    HEDDLE_CUDA_ERROR = 40,         /* a driver call failed; the message has its name and code */
    HEDDLE_EARLIER_CUDA_ERROR = 41  /* the context was already broken by somebody else's work */
} heddle_status;

/* The name of a status, such as "HEDDLE_BAD_HEADS"; "unknown status" for a value that is none. Never NULL. */
HEDDLE_API const char *heddle_status_string(heddle_status status);

/* The rule that this thread's last failing call broke, with its numbers ("hk = 3 does not divide h = 8"); "" if none has
 * failed yet. The text is the thread's own and stands until the thread's next failing call. */
HEDDLE_API const char *heddle_last_message(void);

/* ------------------------------------------------------------------------------------- types, devices, version */

typedef enum heddle_dtype {
    HEDDLE_F32 = 0,
    HEDDLE_BF16 = 1,
    HEDDLE_F16 = 2,
    HEDDLE_F64 = 3 /* on HEDDLE_REF only */
} heddle_dtype;

/* HEDDLE_CUDA_FAMILY=sm80, sm90 or small in the environment takes this family of attention kernels wherever it can. */
typedef enum heddle_device {
    HEDDLE_CPU = 0,
    HEDDLE_REF = 1, /* the reference: every sum in float64, unblocked, one thread; for tests, not for speed */
    HEDDLE_CUDA = 2 /* the device of the current CUDA context */
} heddle_device;

typedef enum heddle_pass { HEDDLE_FORWARD = 0, HEDDLE_BACKWARD = 1 } heddle_pass;

/* HEDDLE_VERSION of the library that is loaded, and its text ("0.1.0"). */
HEDDLE_API int heddle_version(void);
HEDDLE_API const char *heddle_version_string(void);

/* HEDDLE_OK if problems can run on `device`, else HEDDLE_NO_DEVICE (or HEDDLE_BAD_ENUM) with the reason in `why` (at most n
 * bytes with the final zero, cut if longer; NULL and 0 are allowed). */
HEDDLE_API heddle_status heddle_device_available(heddle_device device, char *why, size_t n);

/* What the device is, in words ("cpu: avx512, 2 threads"), into text[n]. Status and limits as above. */
HEDDLE_API heddle_status heddle_device_describe(heddle_device device, char *text, size_t n);

/* The instruction set that the CPU backend uses: "baseline", "avx2", "avx512", "avx512bf16", "amx" (both for bfloat16;
 * other types get avx512's), "neon", "sve256" (SVE whose vectors have 256 bits). It is the best that the processor has, or the
 * one named by the environment variable HEDDLE_CPU when the first call is made, if the processor has it. */
HEDDLE_API const char *heddle_cpu_isa(void);

/* The i-th instruction set in this binary that this processor can run, best first; NULL past the last. */
HEDDLE_API const char *heddle_cpu_isa_available(int i);

/* Bytes of one element; 0 for an unknown dtype. */
HEDDLE_API size_t heddle_dtype_size(heddle_dtype dtype);

/* ---------------------------------------------------------------------------------------------------- attention */

/* Strides in elements of a [b, h, s, last] tensor whose last dimension is contiguous. All three zero: the tensor is
 * contiguous in that order. Otherwise they are taken literally, so that 0 repeats the tensor along a dimension (inputs
 * only; in dbias it sums over it). HEDDLE_BROADCAST is a 0 for the tensor that repeats along all three. */
typedef struct heddle_strides {
    int64_t b, h, s;
} heddle_strides;
#define HEDDLE_BROADCAST INT64_MIN

/* Which query sees which key. With off = q_offset - k_offset for HEDDLE_CAUSAL_TOP_LEFT and otherwise
 * off = q_offset - k_offset + whole_sk - whole_sq, query i sees key j when j <= i + off (both causal masks) and i + off - window_left <= j
 * <= i + off + window_right (with HEDDLE_WINDOW). Of what is no part of something larger that is off = 0 and off = sk - sq. */
typedef enum heddle_mask {
    HEDDLE_MASK_NONE = 0,
    HEDDLE_CAUSAL_TOP_LEFT = 1,    /* query 0 sees key 0: PyTorch's is_causal */
    HEDDLE_CAUSAL_BOTTOM_RIGHT = 2 /* the last query sees the last key: FlashAttention's causal, decoding */
} heddle_mask;

/* Bits of heddle_attention.features. Each names pointers of heddle_attention_data that must then be set; a pointer without its
 * bit is an error, never ignored. */
#define HEDDLE_WINDOW (UINT64_C(1) << 0)        /* window_left and window_right count */
#define HEDDLE_ALIBI (UINT64_C(1) << 1)         /* alibi_slopes */
#define HEDDLE_BIAS (UINT64_C(1) << 2)          /* bias, and in backward dbias if it is wanted */
#define HEDDLE_BOOL_MASK (UINT64_C(1) << 3)     /* bool_mask */
#define HEDDLE_SINKS (UINT64_C(1) << 4)         /* sinks, and in backward dsinks if it is wanted */
#define HEDDLE_VARLEN (UINT64_C(1) << 5)        /* cu_seqlens_q and cu_seqlens_k */
#define HEDDLE_SEQLENS (UINT64_C(1) << 6)       /* seqlens_q or seqlens_k or both */
#define HEDDLE_WEIGHTS (UINT64_C(1) << 7)       /* weights (forward), dweights (backward) */
#define HEDDLE_RNG_STATE (UINT64_C(1) << 8)     /* rng_state in place of seed and offset */
#define HEDDLE_DETERMINISTIC (UINT64_C(1) << 9) /* backward gives the same bits every time (the CPU always does) */
#define HEDDLE_TF32 (UINT64_C(1) << 10)         /* float32 products may be rounded to TF32 (GPU) */
#define HEDDLE_ACCUMULATE (UINT64_C(1) << 11)   /* results are added to what is there, in float */
#define HEDDLE_PAGES (UINT64_C(1) << 12)        /* block_table: k and v lie in pages; forward alone */
#define HEDDLE_SEGMENTS (UINT64_C(1) << 13)     /* q_segments and k_segments: a query sees keys of its own segment */
#define HEDDLE_BLOCKS (UINT64_C(1) << 14)       /* block_rows and block_columns: blocks of keys for blocks of queries */
#define HEDDLE_E4M3 (UINT64_C(1) << 15)         /* k and v have 8 bits; k_scale and v_scale; forward alone */

/* One attention problem.
 *
 *     T[i,j] = scale * sum_e q[i,e] k[j,e]
 *     S[i,j] = (softcap > 0 ? softcap * tanh(T / softcap) : T) - slope * |i + off - j| + bias[i,j], or -inf where masked
 *     lse[i] = log(exp(sink) + sum_j exp(S[i,j]))              exp(sink) = 0 without HEDDLE_SINKS; natural logarithm
 *     P[i,j] = exp(S[i,j] - lse[i])
 *     o[i]   = sum_j P[i,j] Z[i,j] v[j]                        Z = 1, or with dropout 0 or 65536/(65536 - t)
 *
 * for every batch b and query head h; query head x uses key/value head x / (h / hk). A query that sees no key has o = 0 and lse = -inf (lse
 * = sink with HEDDLE_SINKS) and passes no gradient to q, k, v and bias. What is masked out is never used and may be NaN. A bias of -inf masks;
 * any other is a number, so that a row of nothing but a type's least number is the mean of all values.
 *
 * With HEDDLE_VARLEN the sequences are packed: q is [total_q, h, d], k and v are [total_k, hk, ...], sequence n holds the rows
 * cu_seqlens[n] to cu_seqlens[n+1]-1 (zero of them is fine), sq and sk are upper limits of one sequence's rows, b counts sequences,
 * strides.b is not used and lse is [h, total_q]; the default strides are then those of [total, h, last]. bias, bool_mask, weights and dbias
 * keep [b, h, sq, sk] (written as zero outside the sequence). Rows that belong to no sequence are not written. cu_seqlens and seqlens are
 * clamped to their limits. With HEDDLE_SEQLENS only the first seqlens_q[n] and seqlens_k[n] rows of batch n count, for off too; outputs of
 * others are zero (lse: -inf).
 *
 * With HEDDLE_ACCUMULATE the keys are some of those that the queries see, and o, dq, dk and dv are float, whatever dtype is. Forward finds
 * in o and lse (which it needs) the result of other keys, and leaves that of all of them together; where lse is -inf it does not read o.
 * Backward is given o and lse as all keys have made them, takes D[i] = sum_e dout[i,e] o[i,e] - dlse[i], and adds to dq, dk and dv; dbias
 * and dsinks it writes as ever, of this part. A sink is one more key: it goes to one part. Not with HEDDLE_WEIGHTS. Without the bit backward
 * may be given o and lse of more keys, too, and sees by lse that these are a part: dq, dk and dv are then the part's.
 *
 * With HEDDLE_PAGES the keys and values of a sequence lie in pages of `page` rows: k is [pages, hk, page, d], v is [pages, hk, page, dv],
 * their strides.b go from page to page (rows side by side, as [pages, page, hk, d], by strides), and key j of sequence n is row j % page of
 * page block_table[n, j / page]. Sequences may share pages. A number that is no page, below 0 or not below `pages`, hides the keys that it
 * stands for, as a mask does; behind the last key of a sequence any may stand. sk is the upper limit of a sequence's keys, seqlens_k says
 * how many it has. With HEDDLE_VARLEN only the queries are packed: total_k is 0 and cu_seqlens_k NULL. Backward refuses pages. On
 * HEDDLE_CUDA the workspace of some problems with many queries has room for b·sk keys and values in 16 bits, 2 GiB at most (docs/limits.md).
 *
 * With HEDDLE_SEGMENTS query i of sequence n sees key j only where q_segments[n, i] = k_segments[n, j] (documents in a row, say), and where
 * masks, windows and the rest let it. Any number is an id, in any order. Both are int32 and contiguous, [b, sq] and [b, sk]; with
 * HEDDLE_VARLEN they lie as the rows do, [total_q] and [total_k] (with HEDDLE_PAGES keys are [b, sk]). Of a part they are the part's own.
 * Only those of rows that count are read. On HEDDLE_CUDA the workspace has a bit, or a byte, for each query and key of b (docs/limits.md).
 *
 * With HEDDLE_BLOCKS a list names the blocks of keys that each block of queries sees; what it does not name is masked. A block has block_q
 * queries, or block_k keys, 64 or 128, the last one as many as are left; both are counted from the first row of the tensors, of a part's
 * own, and of packed ones from the first of each sequence. There are R = sq / block_q, rounded up, lists for one head (of sq as described):
 * that of block r names block_columns[block_rows[r]] to block_columns[block_rows[r + 1] - 1], in any order. block_rows has R + 1 numbers,
 * and behind them those of the next head where blocks_of_h is 1, and of all heads of the next batch where blocks_of_b is 1; the numbers
 * count in all of block_columns. The last number of all says how many columns there are: others are clamped to 0 and to it, and a column
 * that is no block of keys names nothing. On HEDDLE_CUDA the workspace is as with segments, for each head's lists.
 *
 * With HEDDLE_E4M3 the elements of k and v are bytes, whatever dtype is: e4m3 of the OCP's 8-bit floating point specification (2023),
 * PyTorch's float8_e4m3fn. The k of the formulas is k_scale[n, y] times the k that is there, of head y of keys of sequence n, and v alike.
 * They are widened when they are read; nothing else changes. The workspace may be as large as with pages. Backward refuses it.
 *
 * Dropout: with t = floor(65536*dropout + 0.5), element (n, x, i, j) is kept when its number, of 16 bits, is not below t: half j%2 (0: the
 * low one) of word j%8/2 of Philox4x32-7(counter = {j/8, n*h + x, i, offset}, key = seed) (low words; offset's high 32 bits are
 * exclusive-ored into i's word); i, j, x and h are those of the whole (below). The same on every backend. The probability to be kept is 1 -
 * t/65536; with a dropout under 2^-17 all are, and one that rounds to 1 is refused. Salmon et al., "Parallel random numbers", SC11.
 *
 * A problem may be a part of a larger one: some of its queries, keys and heads. Row i is then row q_offset + i of the whole, which has
 * whole_sq, key j is key k_offset + j of whole_sk, and head x is head h_offset + x of whole_h: that is what masks, windows, ALiBi and
 * dropout go by, so that S, P and Z are those of the whole. All tensors are the part's own, bias and slopes too. Where whole_sq or whole_sk
 * is 0, as it must be with HEDDLE_VARLEN and HEDDLE_SEQLENS, the part ends where the whole (the whole sequence) does: whole_sq = q_offset +
 * sq, whole_sk = k_offset + sk. h_offset needs whole_h; it may count heads of batch entries in front, too (n0*whole_h + x0).
 *
 * With multiprocessors = n > 0 HEDDLE_CUDA leaves the rest of the device to others (NCCL, say): kernels whose blocks stay and go from tile
 * to tile, Hopper's in 16 bits, have no more of them than n multiprocessors hold. Blocks of the other kernels have a tile each and make
 * room as they end. Bits may differ from those of another n. On HEDDLE_CPU and HEDDLE_REF n has no meaning.
 *
 * Source of the formulas: Dao, "FlashAttention-2", 2023, sections 2 and 3; softcap: Gemma 2, 2024; ALiBi: Press et al., 2021; sinks:
 * "attention sink" logits as in gpt-oss, 2025; pages: Kwon et al., "PagedAttention", 2023. */
typedef struct heddle_attention {
    size_t size; /* sizeof(heddle_attention) */
    heddle_dtype dtype;
    heddle_device device;
    int64_t b, h, hk;      /* hk: 0 means h */
    int64_t sq, sk, d, dv; /* sk: 0 means none; dv: 0 means d; d and dv from 1 to 512 */
    heddle_mask mask;
    uint8_t block_q, block_k;          /* HEDDLE_BLOCKS: 64 or 128; else 0, as both of */
    uint8_t blocks_of_b, blocks_of_h;  /* 1: lists for each batch, for each head; 0: the same for all */
    uint64_t features;                 /* HEDDLE_WINDOW | ... */
    int64_t window_left, window_right; /* negative: unbounded */
    double scale;                      /* 0 means 1/sqrt(d); else, but in float64, from 2^-100 to 2^100 in magnitude, */
    double softcap;                    /* and so are softcap and scale/softcap; softcap 0 means none */
    double dropout; /* probability that a weight is dropped, 0 <= dropout < 1 - 2^-17; rounded to a multiple of 2^-16 */
    uint64_t seed, offset;    /* of dropout */
    int64_t total_q, total_k; /* HEDDLE_VARLEN: rows of q and of k */
    heddle_strides q_stride, k_stride, v_stride, o_stride;
    heddle_strides do_stride, dq_stride, dk_stride, dv_stride;
    heddle_strides bias_stride, bool_mask_stride; /* [b, h, sq, sk], repeated where 0 */
    heddle_strides dbias_stride;                  /* default: [b, h, sq, sk] contiguous; summed over where 0 */
    heddle_strides weights_stride, dweights_stride;
    int64_t alibi_stride_b; /* alibi_slopes[n*alibi_stride_b + x]: 0, or h for slopes per batch */
    /* since then: the part that this is of a larger problem */
    int64_t q_offset, k_offset, h_offset; /* rows, keys and heads of the whole in front of the part's first */
    int64_t whole_sq, whole_sk, whole_h;  /* how many the whole has; 0: it ends with the part */
    /* since then: HEDDLE_PAGES */
    int64_t page, pages;     /* rows of a page: 16, 32, 64, 128 or 256; pages that k and v have */
    int64_t table;           /* numbers in a row of block_table, at least sk / page, rounded up; 0: as many */
    int64_t multiprocessors; /* since then: of HEDDLE_CUDA, for blocks that stay; 0: all */
} heddle_attention;

/* Where the data of one attention problem lies. Forward does not look at what only backward uses. "float" below is float32, or
 * float64 when dtype is HEDDLE_F64. */
typedef struct heddle_attention_data {
    size_t size; /* sizeof(heddle_attention_data) */
    /* inputs of both passes */
    const void *q;                              /* dtype [b, h, sq, d] */
    const void *k, *v;                          /* dtype [b, hk, sk, d] and [b, hk, sk, dv], or e4m3 */
    const void *alibi_slopes;                   /* float [h] or [b, h] */
    const void *bias;                           /* dtype [b, h, sq, sk] */
    const uint8_t *bool_mask;                   /* [b, h, sq, sk]; 0 masks the element out */
    const void *sinks;                          /* float [h] */
    const int32_t *cu_seqlens_q, *cu_seqlens_k; /* [b + 1] */
    const int32_t *seqlens_q, *seqlens_k;       /* [b], or NULL for all of sq, of sk */
    const uint64_t *rng_state;                  /* {seed, offset} */
    /* outputs of forward, inputs of backward */
    void *o;       /* dtype [b, h, sq, dv] */
    void *lse;     /* float [b, h, sq]; in forward NULL if not wanted */
    void *weights; /* output of forward alone; dtype [b, h, sq, sk]: P, before dropout */
    /* inputs of backward */
    const void *dout;     /* dtype [b, h, sq, dv]: gradient of o; NULL means zero */
    const void *dlse;     /* float [b, h, sq]: gradient of lse; NULL means zero */
    const void *dweights; /* dtype [b, h, sq, sk]: gradient of weights; NULL means zero */
    /* outputs of backward, each NULL if not wanted */
    void *dq;                               /* dtype [b, h, sq, d] */
    void *dk, *dv;                          /* dtype [b, hk, sk, d] and [b, hk, sk, dv] */
    void *dbias;                            /* dtype, shape of dbias_stride; zeros where what it sums over is empty */
    void *dsinks;                           /* float [h] */
    const int32_t *block_table;             /* since then: input of forward, [b, table] */
    const int32_t *q_segments, *k_segments; /* since then: inputs of both passes, [b, sq] and [b, sk] */
    const int32_t *block_rows;              /* since then: inputs of both passes, [b or 1, h or 1, R + 1] */
    const int32_t *block_columns;           /* [the last number of block_rows] */
    const void *k_scale, *v_scale;          /* since then: inputs of forward, float [b, hk]; NULL means ones */
} heddle_attention_data;

/* HEDDLE_OK if both passes of this problem can run here (with HEDDLE_PAGES or HEDDLE_E4M3 forward, which is all there is), else what
 * forward would return; the reason goes to why[n] as well as to heddle_last_message(). Looks at the descriptor alone. */
HEDDLE_API heddle_status heddle_attention_supported(const heddle_attention *desc, char *why, size_t n);

/* *bytes = what the pass needs as workspace with the present number of threads; it grows with sq + sk, never with their
 * product, but for HEDDLE_SEGMENTS, HEDDLE_BLOCKS and HEDDLE_BOOL_MASK on a GPU: a bit for each byte of the mask, of its rows that are not
 * alike. Runs the same plan as the pass itself. The workspace must be aligned to 64 bytes; it may be NULL if *bytes is 0. */
HEDDLE_API heddle_status heddle_attention_workspace(const heddle_attention *desc, heddle_pass pass, size_t *bytes);

/* The name of the kernel that the plan picks, such as "heddle_attention_fwd_f32_avx512", into name[n]. */
HEDDLE_API heddle_status heddle_attention_kernel(const heddle_attention *desc, heddle_pass pass, char *name, size_t n);

/* Writes o, and lse and weights if they are there. */
HEDDLE_API heddle_status heddle_attention_forward(const heddle_attention *desc, const heddle_attention_data *data,
                                                  void *workspace, size_t workspace_bytes, void *stream);

/* Given the gradients of o, lse and weights, writes those of q, k, v, bias and sinks. o and lse are those of forward.
 *
 *     dP = Z∘(dout·vᵀ) + dweights        D[i] = sum_j P[i,j] dP[i,j] - dlse[i]        dS = P∘(dP - D)
 *     dv = (Z∘P)ᵀ·dout      dT = dS∘(1 - tanh²(T/softcap))      dq = scale dT·k      dk = scale dTᵀ·q      dbias = dS
 *     dsinks = -sum over b and i of exp(sink - lse[i]) D[i]                dk, dv: summed over the query heads of the group
 */
HEDDLE_API heddle_status heddle_attention_backward(const heddle_attention *desc, const heddle_attention_data *data,
                                                   void *workspace, size_t workspace_bytes, void *stream);

/* Two results of the same queries and different keys, o and lse as forward writes them. */
typedef struct heddle_merge {
    size_t size;        /* sizeof(heddle_merge) */
    heddle_dtype dtype; /* of other_o */
    heddle_device device;
    int64_t b, h, s, dv; /* o is [b, h, s, dv], lse [b, h, s] contiguous; packed: b = 1, s = total_q */
    heddle_strides o_stride, other_stride;
} heddle_merge;

/* Makes of o and lse (float) and the other's what all keys together give; where a lse is -inf, its o is not read.
 *
 *     all = log(exp(lse) + exp(other_lse))      o = exp(lse - all) o + exp(other_lse - all) other_o      lse = all
 */
HEDDLE_API heddle_status heddle_attention_merge(const heddle_merge *desc, void *o, void *lse, const void *other_o,
                                                const void *other_lse, void *stream);

/* New rows for a cache of keys and values: s of each of b sequences, written behind the first seqlens_k[n] rows that it has there,
 * and rotated by their positions; queries of the same sequences may be rotated with them. With j = seqlens_k[n] + i
 *
 *     k[n, x, j] = R(j) k_new[n, x, i]      v[n, x, j] = v_new[n, x, i]      q_out[n, x, i] = R(j) q[n, x, i]
 *
 * where R(j) makes of each pair (y, z) of a row's first `rotary` elements (y cos[j, e] - z sin[j, e], y sin[j, e] + z cos[j, e]) in
 * float32, rounded once: of elements e and e + rotary/2, or with interleaved = 1 of 2e and 2e + 1, e = 0 to rotary/2 - 1. The others are
 * copied. With together = 1 all queries of a sequence are at seqlens_k[n]. With HEDDLE_VARLEN new rows and queries are packed as in
 * heddle_attention, both by cu_seqlens, and s is the limit of a sequence. With HEDDLE_PAGES k and v lie in pages as there. With caches > 0
 * they have so many sequences, of which n is cache_index[n]. Lengths are clamped to their limits (seqlens_k to sk). A row is not written
 * where it would lie behind sk, in a page that is none or in a sequence that the cache has not; of a query at a position that the tables
 * have not, what is rotated becomes NaN. No two new rows may have one place: pages that are written to are not shared. With HEDDLE_E4M3 k and
 * v are e4m3: what is written is divided by k_scale[n, x], or v_scale, in float32, and rounded once, to 448 where it is larger.
 * Source: Su et al., "RoFormer", 2021; pairs as in GPT-J (interleaved) and GPT-NeoX. */
typedef struct heddle_append {
    size_t size; /* sizeof(heddle_append) */
    heddle_dtype dtype;
    heddle_device device;
    heddle_dtype table_dtype; /* of cos and sin: float32, or dtype */
    uint8_t interleaved, together, reserved[2];
    uint64_t features;          /* HEDDLE_VARLEN, HEDDLE_PAGES, HEDDLE_E4M3 */
    int64_t b, h, hk;           /* h: 0 where no queries are rotated */
    int64_t s, sq, sk, d, dv;   /* new rows, queries (0 with HEDDLE_VARLEN), rows of the cache; dv: 0 means d */
    int64_t rotary, positions;  /* an even number up to d, 0: no rotation; rows of cos and sin, at least sk */
    int64_t total, caches;      /* HEDDLE_VARLEN: rows of k_new; 0: the cache has b sequences, in order */
    int64_t page, pages, table; /* HEDDLE_PAGES */
    int64_t table_stride;       /* elements from row to row of cos and sin; 0 means rotary / 2 */
    heddle_strides k_new_stride, v_new_stride, k_stride, v_stride, q_stride, q_out_stride;
} heddle_append;

typedef struct heddle_append_data {
    size_t size;               /* sizeof(heddle_append_data) */
    const void *k_new, *v_new; /* dtype [b, hk, s, d] and [b, hk, s, dv] */
    void *k, *v;               /* dtype [b, hk, sk, d] and [b, hk, sk, dv], or e4m3 */
    const void *q;             /* dtype [b, h, sq, d]; with h */
    void *q_out;               /* the same; may be q itself with q's strides */
    const void *cos, *sin;     /* table_dtype [positions, rotary / 2]; with rotary */
    const int32_t *seqlens_k, *cu_seqlens, *block_table, *cache_index; /* [b], [b + 1], [b, table], [b] */
    int32_t *seqlens_out;          /* [b]: how many rows each sequence has now; NULL if not wanted */
    const void *k_scale, *v_scale; /* since then: float [b, hk]; NULL means ones */
} heddle_append_data;

/* Writes them. One launch on HEDDLE_CUDA, without workspace; the same bits every time. */
HEDDLE_API heddle_status heddle_attention_append(const heddle_append *desc, const heddle_append_data *data,
                                                 void *stream);

/* -------------------------------------------------------------------------------------------------- norm-linear */

typedef enum heddle_norm {
    HEDDLE_LAYER_NORM = 0, /* mean = sum_k x / k,  rstd = 1/sqrt(sum_k (x - mean)² / k + eps) */
    HEDDLE_RMS_NORM = 1,   /* mean = 0,            rstd = 1/sqrt(sum_k x² / k + eps) */
    HEDDLE_NO_NORM = 2     /* z = x: a Linear alone, without gamma, beta, eps, mean, rstd and their gradients */
} heddle_norm;

typedef enum heddle_activation {
    HEDDLE_NO_ACTIVATION = 0, /* act(u) = u */
    HEDDLE_GELU = 1,          /* u·(1 + erf(u/sqrt(2)))/2 */
    HEDDLE_GELU_TANH = 2,     /* u·(1 + tanh(sqrt(2/pi)·(u + 0.044715 u³)))/2 */
    HEDDLE_SILU = 3,          /* u/(1 + exp(-u)) */
    /* Of two halves: act(u) = act(gate)∘up with u = [gate, up], so that W [2n, k], bias [2n] and u [m, 2n] have the gate's rows
     * and columns in front of up's; y stays [m, n]. */
    HEDDLE_GEGLU = 4,      /* HEDDLE_GELU of the gate */
    HEDDLE_GEGLU_TANH = 5, /* HEDDLE_GELU_TANH */
    HEDDLE_SWIGLU = 6      /* HEDDLE_SILU */
} heddle_activation;

/* Bits of heddle_norm_linear.features. */
#define HEDDLE_ACTIVATION (UINT64_C(1) << 32) /* activation counts, and u */
#define HEDDLE_RESIDUAL (UINT64_C(1) << 33)   /* residual counts, a tensor that is added to y */
#define HEDDLE_Z (UINT64_C(1) << 34) /* z counts, a second result, and dz, its gradient; not with HEDDLE_NO_NORM */
#define HEDDLE_PREPARED (UINT64_C(1) << 35) /* prepared counts: what forward makes of the weight, kept by the caller */

/* One norm-linear problem, for every row of x:
 *     xhat = (x - mean)·rstd      z = xhat∘gamma + beta      u = z·Wᵀ + bias      y = act(u) + residual
 * Source: Ba et al., "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization", 2019;
 * Hendrycks and Gimpel, "Gaussian error linear units", 2016; Shazeer, "GLU variants improve transformer", 2020. */
typedef struct heddle_norm_linear {
    size_t size; /* sizeof(heddle_norm_linear) */
    heddle_dtype dtype;
    heddle_device device;
    heddle_norm norm;
    int32_t reserved0; /* 0 */
    uint64_t features; /* 0, HEDDLE_DETERMINISTIC, HEDDLE_TF32 and the bits above */
    int64_t m, k, n;   /* rows, features in, features out: columns of y; m may be 0 */
    double eps;        /* 0 means 1e-5; with HEDDLE_NO_NORM it must be 0 */
    /* elements from row to row; 0 means contiguous */
    int64_t x_stride, w_stride, y_stride, dy_stride, dx_stride, dw_stride;
    heddle_activation activation; /* since then: with HEDDLE_ACTIVATION, else 0 */
    int32_t reserved1;            /* 0 */
    int64_t u_stride;
    int64_t residual_stride;     /* since then */
    int64_t z_stride, dz_stride; /* since then */
    int64_t prepared_bytes;      /* since then: with HEDDLE_PREPARED, else 0 */
    int64_t multiprocessors;     /* since then: as in heddle_attention; 1 means 2 */
} heddle_norm_linear;

/* Where its data lies. "float" is float32, or float64 when dtype is HEDDLE_F64. */
typedef struct heddle_norm_linear_data {
    size_t size; /* sizeof(heddle_norm_linear_data) */
    /* inputs of both passes */
    const void *x;     /* dtype [m, k] */
    const void *gamma; /* dtype [k]; NULL means ones */
    const void *beta;  /* dtype [k]; NULL means zeros */
    const void *w;     /* dtype [n, k]; of an activation of two halves [2n, k], as bias, u, dw and dbias have 2n, too */
    const void *bias;  /* dtype [n]; NULL means zeros */
    /* outputs of forward; backward takes those that it is given and computes the rest anew */
    void *y;    /* dtype [m, n] */
    void *mean; /* float [m], NULL if not wanted; zeros with HEDDLE_RMS_NORM */
    void *rstd; /* float [m], NULL if not wanted; mean and rstd come together or not at all in backward */
    /* input of backward */
    const void *dy; /* dtype [m, n] */
    /* outputs of backward, each NULL if not wanted; dgamma, dbeta and dbias may be asked for without gamma, beta and bias */
    void *dx;     /* dtype [m, k] */
    void *dgamma; /* dtype [k] */
    void *dbeta;  /* dtype [k] */
    void *dw;     /* dtype [n, k] */
    void *dbias;  /* dtype [n] */
    void *u;      /* since then: output of forward, input of backward; dtype [m, n]: what the activation is of */
    const void *residual; /* since then: input of forward, added to y; dtype [m, n], no part of y or u */
    void *z;              /* since then: output of forward; dtype [m, k], no part of x or y */
    const void *dz;       /* input of backward; dtype [m, k]: what else than y has for z's gradient; NULL means zeros */
    const void *prepared; /* since then: input of forward, of heddle_norm_linear_prepare; NULL if it has no bytes */
} heddle_norm_linear_data;

/* As the functions of attention with these names. */
HEDDLE_API heddle_status heddle_norm_linear_supported(const heddle_norm_linear *desc, char *why, size_t n);
HEDDLE_API heddle_status heddle_norm_linear_workspace(const heddle_norm_linear *desc, heddle_pass pass, size_t *bytes);
HEDDLE_API heddle_status heddle_norm_linear_kernel(const heddle_norm_linear *desc, heddle_pass pass, char *name,
                                                   size_t n);

/* Writes y, and mean, rstd, u and z if they are there. */
HEDDLE_API heddle_status heddle_norm_linear_forward(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                                    void *workspace, size_t workspace_bytes, void *stream);

/* *bytes = what forward makes of the weight (w, gamma, beta and bias) before it looks at x, where that is worth keeping; else 0. It depends
 * on device, dtype, norm, k, n, activation, HEDDLE_TF32 and HEDDLE_Z alone. */
HEDDLE_API heddle_status heddle_norm_linear_prepared_size(const heddle_norm_linear *desc, size_t *bytes);

/* Writes it to prepared [bytes], at a multiple of 64, and no part of the inputs; of data it looks at w, gamma, beta and bias alone. A
 * forward with HEDDLE_PREPARED, this buffer and the same weight then skips that work, with the same bits as without; where m does not need
 * it, it does not read it. Backward does not look at it. The caller prepares anew when the weight has changed. What can be seen is refused
 * before anything is written: prepared_bytes that are not those of the problem and, on the CPU, a buffer of another dtype, k, n,
 * number of halves, instruction set or library, or of a w of which 64 elements, all over it, were others. On a GPU nobody sees that. */
HEDDLE_API heddle_status heddle_norm_linear_prepare(const heddle_norm_linear *desc, const heddle_norm_linear_data *data,
                                                    void *prepared, size_t bytes, void *stream);

/* Given dy, and u where there is an activation, writes the gradients that are wanted. With du = dy∘act'(u) in place of dy:
 *
 *     h = dy·W + dz      g = h∘gamma      dx = rstd·(g - mean_k(g) - xhat·mean_k(g∘xhat))      RMS: without mean_k(g)
 *     dw = dyᵀ·z      dbias = sum_m dy      dgamma = sum_m h∘xhat      dbeta = sum_m h
 *
 * HEDDLE_NO_NORM: dx = dy·W. Of two halves: du = [dy∘up∘act'(gate), dy∘act(gate)]. */
HEDDLE_API heddle_status heddle_norm_linear_backward(const heddle_norm_linear *desc,
                                                     const heddle_norm_linear_data *data, void *workspace,
                                                     size_t workspace_bytes, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* HEDDLE_H */
