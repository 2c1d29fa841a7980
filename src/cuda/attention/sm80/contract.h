/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family sm80 both count with: shared memory, and how the work is divided. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SM80_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_SM80_CONTRACT_H

#include "cuda/contract.h"

/* Bytes from row to row of a tile in shared memory: 16 more than a row has. What belongs to rows, or to keys by their number, lies in
 * these, so that tiles that fill 99 KiB fit. */
CONTRACT int sm80_pitch(int element, int dim) {
    return element * dim + 16;
}

/* The accumulators of 16 rows of more than 256 elements do not fit into a warp's registers: so many warps side by side own the same rows,
 * each some of their columns. */
CONTRACT int sm80_warps_of_a_row(int element, int dim) {
    return dim <= 256 ? 1 : element == 2 ? 2 : 4;
}

/* Tiles of 16 rows that such warps own, of a block that owns so many rows. */
CONTRACT int sm80_tiles(int element, int dim, int warps, int own) {
    return own * sm80_warps_of_a_row(element, dim) / (warps * 16);
}

/* Through which they add up their parts of a product of the block's rows and so many columns. */
CONTRACT int sm80_join_bytes(int element, int dim, int own, int columns) {
    const int warps = sm80_warps_of_a_row(element, dim);
    return warps > 1 ? warps * own * columns * 4 : 0;
}

/* Forward: Q, with marks of keys behind its rows; K and V twice; what warps add up. */
CONTRACT int sm80_forward_bytes(int element, int dim, int own, int block) {
    return (own + 4 * block) * sm80_pitch(element, dim) + sm80_join_bytes(element, dim, own, block);
}

/* Forward of 16 bits without options: bytes from row to row of K and V, which over a head dim of 64 have nothing between them. */
CONTRACT int sm80_lean_pitch(int dim) {
    return dim > 64 ? 2 * dim : sm80_pitch(2, dim);
}

/* Q, with marks of keys behind its rows; so many steps of K and V. */
CONTRACT int sm80_lean_bytes(int dim, int own, int block, int places) {
    return own * sm80_pitch(2, dim) + 2 * places * block * sm80_lean_pitch(dim);
}

/* The same with options: places for a step of K, and of V; biased: and of 16 bits for each score of a step. */
CONTRACT int sm80_rich_places(int dim) {
    return dim > 64 ? 1 : 2;
}

CONTRACT int sm80_rich_bytes(int dim, int own, int block, int places, int biased) {
    return sm80_lean_bytes(dim, own, block, places) + (biased ? own * block * 2 : 0);
}

/* Backward: do a step's numbers lie behind its rows? That is slower, and tiles of longer rows fill 99 KiB. */
CONTRACT int sm80_numbers_within(int element, int dim) {
    return element * dim > 256;
}

/* Two tensors of the block's own rows; two stages of two that stream, with four numbers for each row; what warps add up of two products. */
CONTRACT int sm80_backward_bytes(int element, int dim, int own, int block) {
    return (2 * own + 4 * block) * sm80_pitch(element, dim) +
           (sm80_numbers_within(element, dim) ? 0 : 2 * 4 * block * 4) + 2 * sm80_join_bytes(element, dim, own, block);
}

/* Do the sums of dK and dV fit into registers together? Else every second block makes one of them. */
CONTRACT int sm80_makes_both(int dim, int tiles) {
    return dim * tiles <= 128;
}

/* Backward, all gradients in one kernel: warps that have the same 32 keys. */
CONTRACT int sm80_fused_share(int warps, int own) {
    return warps * 32 / own;
}

/* K and V of the block's own rows; two stages of Q and dO, with four numbers a row; dS twice, and P where warps share keys. */
CONTRACT int sm80_fused_bytes(int element, int dim, int warps, int own, int block) {
    return (2 * own + 4 * block) * sm80_pitch(element, dim) +
           (sm80_fused_share(warps, own) > 1 ? 3 : 2) * own * sm80_pitch(element, block) + 8 * block * 4;
}

/* dbias: queries' rows and keys' rows of two tensors each; what warps add up of two products. */
CONTRACT int sm80_dbias_bytes(int element, int dim, int own, int block) {
    return 2 * (own + block) * sm80_pitch(element, dim) + 2 * sm80_join_bytes(element, dim, own, block);
}

/* weights: Q; K; what warps add up. */
CONTRACT int sm80_weights_bytes(int element, int dim, int own, int block) {
    return (own + block) * sm80_pitch(element, dim) + sm80_join_bytes(element, dim, own, block);
}

/* Decoding: tiles of K, and of V, that a warp has under way. */
CONTRACT int sm80_decode_stages(int element, int dim) {
    return element * dim > 512 ? 1 : 2;
}

/* Decoding: Q; a ring of tiles for each warp; of the tile that it is at a mark for every key. */
CONTRACT int sm80_decode_bytes(int element, int dim, int warps, int own, int block) {
    return own * sm80_pitch(element, dim) +
           warps * (2 * sm80_decode_stages(element, dim) * block * dim * element + block * 4);
}

/* Decoding of keys of 8 bits: tiles of K, and of V, that a warp has under way. */
#define SM80_BYTES_STAGES 2

/* Q; a ring of tiles of bytes for each warp, one tile of 16 bits behind it, and of that a mark for every key. */
CONTRACT int sm80_bytes_bytes(int dim, int warps, int own, int block) {
    return own * sm80_pitch(2, dim) + warps * ((2 * SM80_BYTES_STAGES + 2) * block * dim + block * 4);
}

/* Many queries of keys of 8 bits: Q, with marks of keys behind its rows; K and V; and their bytes. */
CONTRACT int sm80_byte_tiles_bytes(int dim, int own, int block) {
    return (own + 2 * block) * sm80_pitch(2, dim) + 2 * block * dim;
}

#endif
