/* SPDX-License-Identifier: Apache-2.0
 * The table of attention's kernels: in which image each lies, how many rows a block of it owns, how much shared memory it takes. Pure. */
#include "cuda/attention/kernels.h"

#include "dtype.h"
#include "mask.h"

#define ATTENTION_ALL_LISTS
#define DTYPE_bf16 HEDDLE_BF16
#define DTYPE_f16 HEDDLE_F16
#define DTYPE_f32 HEDDLE_F32
const kernel_row heddle__cuda_attention_kernels[ATTENTION_KERNELS] = {
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    {PASS_##pass,                                                                                                      \
     DTYPE_##dtype,                                                                                                    \
     dim,                                                                                                              \
     VARIANT_##variant,                                                                                                \
     FAMILY_##family,                                                                                                  \
     warps,                                                                                                            \
     tiles,                                                                                                            \
     block,                                                                                                            \
     "heddle_attention_" #pass "_" #dtype "_d" #dim "_" #variant "_" #family},
#include "cuda/attention/attention.def"
#undef K
};

/* Where a kernel is in the list, plus one: found without a walk, since every call looks for some. */
#define WIDTHS 5
#define WIDTH_OF(dim) (((dim) > 32) + ((dim) > 64) + ((dim) > 128) + ((dim) > 256))
static const int16_t kernel_index[PASSES][3][VARIANT_plain + 1][FAMILY_small + 1][WIDTHS] = {
#define K(pass, dtype, dim, variant, family, warps, tiles, block)                                                      \
    [PASS_##pass][DTYPE_##dtype][VARIANT_##variant][FAMILY_##family][WIDTH_OF(dim)] =                                  \
        ATTENTION_##pass##_##dtype##_d##dim##_##variant##_##family + 1,
#include "cuda/attention/attention.def"
#undef K
};

const char *heddle__cuda_attention_symbol(enum attention_kernel kernel) {
    return heddle__cuda_attention_kernels[kernel].symbol;
}

const char *heddle__cuda_attention_module(enum attention_kernel kernel) {
    const kernel_row *k = &heddle__cuda_attention_kernels[kernel];
    if (k->variant == VARIANT_plain)
        return "attention_plain";
    if (k->family == FAMILY_small)
        return "attention_small";
    if (k->family == FAMILY_sm90 && k->dtype == HEDDLE_F32)
        return k->pass == PASS_split ? "attention_split_sm90"
               : k->pass == PASS_fwd ? "attention_fwd32_sm90"
                                     : "attention_bwd32_sm90";
    if (k->family == FAMILY_sm90)
        switch (k->pass) {
        case PASS_fwd: return "attention_fwd_sm90";
        case PASS_dkdv:
        case PASS_dq: return "attention_dkdv_sm90";
        default: return "attention_bwd_sm90";
        }
    return k->pass == PASS_fwd ? "attention_fwd_sm80" : "attention_bwd_sm80";
}

/* ------------------------------------------------------------------------------------------------- shared memory */

/* The block's own tiles and those that stream; numbers of the rows that stream; barriers. */
static size_t shared_bytes_backward90(const kernel_row *k) {
    const size_t slots = (size_t)BACKWARD90_SLOTS(k->dim, k->block), block = (size_t)k->block,
                 width = (size_t)k->dim * 2;
    return 2 * (size_t)rows_of(k) * width + slots * (block * width + block * (k->pass == PASS_dkdv ? 3 : 1) * 4 + 16) +
           16;
}

/* Up to 1023 bytes before the first tile; tiles; what is known of K's and V's, and of Q's; barriers. */
static size_t shared_bytes_forward32(const kernel_row *k) {
    const size_t slots = (size_t)FORWARD32_SLOTS(k->dim), groups = (size_t)k->tiles;
    return 1024 + (groups + slots) * 64 * (size_t)k->dim * 4 + 2 * slots * sizeof(split_info) + groups * 6 * 4 + 8 * 16;
}

/* As layout backward32 has it; prep has no second tensor. */
static size_t shared_bytes_backward32(const kernel_row *k) {
    const size_t slots = (size_t)BACKWARD32_SLOTS(k->dim), block = (size_t)k->block, tile = block * (size_t)k->dim * 4;
    return (k->pass == PASS_prep ? 2 : 4) * tile + slots * (tile + (3 * block + 4) * 4 + 16) + 8;
}

/* K, V; stages of Q and dO with three numbers a row; dS twice; of long ones two pieces of dQ; marks of keys;
 * barriers. */
static size_t shared_bytes_fused(const kernel_row *k) {
    const size_t own = (size_t)rows_of(k), block = (size_t)k->block, width = (size_t)k->dim * 2;
    return 2 * own * width + BACKWARD90_STAGES(k->dim) * (2 * block * width + 3 * block * 4 + 32) +
           2 * own * block * 2 + (k->variant == VARIANT_long ? 2 * 64 * 64 * sizeof(float) : 0) + own * 4 + 64;
}

/* Up to 1023 bytes before the first tile; tiles of Q, two or, of wide heads, one; tiles of K and V and marks; jobs; barriers. */
static size_t shared_bytes_sm90(const kernel_row *k) {
    const size_t rows = (size_t)rows_of(k), width = (size_t)k->dim * 2, block = (size_t)k->block;
    if (k->pass == PASS_split || k->pass == PASS_finish || k->pass == PASS_rows)
        return 0;
    if (k->pass == PASS_bwd)
        return shared_bytes_fused(k);
    if (k->pass != PASS_fwd)
        return k->dtype == HEDDLE_F32 ? shared_bytes_backward32(k) : shared_bytes_backward90(k);
    if (k->dtype == HEDDLE_F32)
        return shared_bytes_forward32(k);
    const size_t stages = FORWARD90_STAGES(k->dim);
    return 1024 + (k->dim > 128 ? 1 : 2) * rows * width + stages * (2 * block * width + 16) + 2 * 64 + 8 * 7 * 4;
}

/* Two tiles of the block's own rows, two that stream, their weights, and four numbers a row; in float32. */
static size_t shared_bytes_small(const kernel_row *k) {
    const size_t rows = (size_t)k->tiles, block = (size_t)k->block;
    return (2 * (rows + block) * ((size_t)k->dim + 4) + 2 * block * rows + 4 * block) * sizeof(float);
}

size_t heddle__cuda_shared_bytes(const kernel_row *k) {
    const size_t pitch = (size_t)k->dim * heddle_dtype_size(k->dtype) + 16, block = (size_t)k->block;
    if (k->variant == VARIANT_plain)
        return 0;
    if (k->family == FAMILY_sm90)
        return shared_bytes_sm90(k);
    if (k->family == FAMILY_small)
        return shared_bytes_small(k);
    if (k->variant == VARIANT_decode) /* Q; rings of tiles of K and V; marks */
        return (size_t)rows_of(k) * pitch +
               (size_t)k->warps * (2 * (size_t)k->tiles * block * (pitch - 16) + block * 4);
    const size_t join = warps_of_a_row(k) > 1 ? (size_t)k->warps * 32 * (size_t)k->tiles * block / 8 * 16 : 0;
    if (k->pass == PASS_fwd)
        return (size_t)rows_of(k) * pitch + 4 * block * pitch + 2 * block * 4 + join;
    return 2 * (size_t)rows_of(k) * pitch + 4 * block * pitch + 8 * block * 4 + 2 * join;
}

/* ------------------------------------------------------------------------------------------------------- search */

int heddle__cuda_find_attention(const heddle_attention *a, const attention_device *device, kernel_pass pass,
                                kernel_variant variant, kernel_family family) {
    const int16_t *of_width = kernel_index[pass][a->dtype][variant][family];
    for (int width = WIDTH_OF(max64(a->d, a->dv)); width < WIDTHS; width++) {
        const int x = of_width[width] - 1;
        if (x >= 0 && heddle__cuda_shared_bytes(&heddle__cuda_attention_kernels[x]) <= device->shared_bytes)
            return x;
    }
    return -1;
}
