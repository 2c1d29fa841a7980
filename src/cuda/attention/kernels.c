/* SPDX-License-Identifier: Apache-2.0
 * The table of attention's kernels: how many rows a block of each owns, how much shared memory it takes. Pure. */
#include "cuda/attention/family.h"
#include "cuda/attention/short/contract.h"
#include "cuda/attention/sm80/contract.h"
#include "cuda/attention/sm90/contract.h"
#include "cuda/attention/sm90_f32/contract.h"
#include "cuda/attention/small/contract.h"
#include "dtype.h"
#include "mask.h"

#define DTYPE_bf16 HEDDLE_BF16
#define DTYPE_f16 HEDDLE_F16
#define DTYPE_f32 HEDDLE_F32
const kernel_row heddle__cuda_attention_kernels[ATTENTION_KERNELS] = {
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    {PASS_##pass, DTYPE_##dtype, dim, VARIANT_##variant, FAMILY_##family, warps, own, block},
#include "cuda/attention/attention.def"
#undef K
};

/* Where a kernel is in the list, plus one: found without a walk, since every call looks for some. Head dims are multiples of 32. */
#define WIDTHS 16
#define WIDTH_OF(dim) (((dim)-1) / 32)
static const int16_t kernel_index[PASSES][3][VARIANTS][KERNEL_FAMILIES][WIDTHS] = {
#define K(pass, dtype, dim, variant, family, warps, own, block, module)                                                \
    [PASS_##pass][DTYPE_##dtype][VARIANT_##variant][FAMILY_##family][WIDTH_OF(dim)] =                                  \
        ATTENTION_##pass##_##dtype##_d##dim##_##variant##_##family + 1,
#include "cuda/attention/attention.def"
#undef K
};

/* ------------------------------------------------------------------------------------------------- shared memory */

static int shared_bytes_sm90(const kernel_row *k) {
    const bool has_options = k->variant != VARIANT_lean && k->variant != VARIANT_long && k->variant != VARIANT_adding &&
                             k->variant != VARIANT_paged;
    const int slots = sm90_backward_slots(k->dim, k->block), options = has_options ? SM90_BACKWARD_OPTIONS : 0;
    switch (k->pass) {
    case PASS_fwd:
        if (k->variant == VARIANT_paged)
            return sm90_forward_paged_bytes(k->dim, k->own, k->block);
        return has_options ? sm90_forward_full_bytes(k->dim, k->own, k->block)
                           : sm90_forward_bytes(k->dim, k->own, k->block);
    case PASS_bwd:
        if (sm90_is_pair(k->dim, k->own))
            return sm90_pair_bytes(has_options);
        if (k->dim > 128)
            return sm90_wide_bytes(k->dim) + SM90_WIDE_OPTIONS;
        return sm90_fused_bytes(k->dim, k->block, k->variant == VARIANT_long) +
               (has_options ? sm90_fused_options(k->block) : 0);
    case PASS_dkdv:
        if (k->dim > SM90_MOST_WHOLE)
            return sm90_large_bytes(k->dim, 1);
        return sm90_backward_bytes(k->dim, k->block, 2, slots, 3) + options;
    case PASS_dq:
        if (k->dim > SM90_MOST_WHOLE)
            return sm90_large_bytes(k->dim, 0);
        return sm90_backward_bytes(k->dim, k->block, 2, slots, 1) + options;
    case PASS_dbias: return sm90_dbias_bytes(k->dim, k->block);
    default: return 0;
    }
}

static int shared_bytes_sm90_f32(const kernel_row *k) {
    switch (k->pass) {
    case PASS_fwd: return forward32_bytes(k->dim, k->own, k->variant == VARIANT_full);
    case PASS_prep: return backward32_bytes(k->dim, k->variant == VARIANT_full ? 2 : 1);
    case PASS_dkdv:
    case PASS_dq: return backward32_bytes(k->dim, 2);
    case PASS_dbias: return dbias32_bytes(k->dim);
    default: return 0;
    }
}

static int shared_bytes_sm80(const kernel_row *k) {
    const int element = (int)heddle_dtype_size(k->dtype);
    if (k->variant == VARIANT_plain || k->pass == PASS_append || k->pass == PASS_collect)
        return 0;
    if (k->variant == VARIANT_bytefull)
        return sm80_byte_tiles_bytes(k->dim, k->own, k->block);
    if (k->variant == VARIANT_decode || k->variant == VARIANT_paged)
        return sm80_decode_bytes(element, k->dim, k->warps, k->own, k->block);
    if (k->variant == VARIANT_bytes || k->variant == VARIANT_bytepages)
        return sm80_bytes_bytes(k->dim, k->warps, k->own, k->block);
    if (k->pass == PASS_bwd)
        return sm80_fused_bytes(element, k->dim, k->warps, k->own, k->block);
    if (k->pass == PASS_light || k->pass == PASS_gather)
        return 0;
    if (k->pass == PASS_dbias)
        return sm80_dbias_bytes(element, k->dim, k->own, k->block);
    if (k->pass == PASS_weights)
        return sm80_weights_bytes(element, k->dim, k->own, k->block);
    if (k->pass == PASS_fwd && (k->variant == VARIANT_rich || k->variant == VARIANT_biased))
        return sm80_rich_bytes(k->dim, k->own, k->block, sm80_rich_places(k->dim), k->variant == VARIANT_biased);
    if (k->pass == PASS_fwd && element == 2 && k->variant != VARIANT_full)
        return sm80_lean_bytes(k->dim, k->own, k->block, k->variant == VARIANT_lean ? 2 : 1);
    return k->pass == PASS_fwd ? sm80_forward_bytes(element, k->dim, k->own, k->block)
                               : sm80_backward_bytes(element, k->dim, k->own, k->block);
}

size_t heddle__cuda_shared_bytes(const kernel_row *k) {
    switch (k->family) {
    case FAMILY_sm80: return (size_t)shared_bytes_sm80(k);
    case FAMILY_sm90: return (size_t)(k->dtype == HEDDLE_F32 ? shared_bytes_sm90_f32(k) : shared_bytes_sm90(k));
    case FAMILY_small: return (size_t)small_bytes(k->dim);
    case FAMILY_short: return (size_t)short_bytes(k->dim);
    case KERNEL_FAMILIES: break;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- search */

int heddle__cuda_find_attention_from(const attention_problem *p, kernel_pass pass, kernel_variant variant,
                                     kernel_family family, int64_t dim) {
    const int16_t *of_width = kernel_index[pass][p->a->dtype][variant][family];
    for (int width = (int)WIDTH_OF(max64(dim, max64(p->a->d, p->a->dv))); width < WIDTHS; width++) {
        const int x = of_width[width] - 1;
        if (x >= 0 && heddle__cuda_shared_bytes(&heddle__cuda_attention_kernels[x]) <= p->device->shared_bytes)
            return x;
    }
    return -1;
}

int heddle__cuda_find_attention(const attention_problem *p, kernel_pass pass, kernel_variant variant,
                                kernel_family family) {
    return heddle__cuda_find_attention_from(p, pass, variant, family, 0);
}
