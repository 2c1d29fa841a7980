/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of the family sm90 both count with: shared memory, the order of blocks, the sums of dQ. C and CUDA C. */
#ifndef HEDDLE_CUDA_ATTENTION_SM90_CONTRACT_H
#define HEDDLE_CUDA_ATTENTION_SM90_CONTRACT_H

#include "cuda/contract.h"

/* Tiles begin at multiples of so many bytes. */
#define SM90_TILE_ALIGNMENT 1024

/* Of a larger softcap tanh_of loses too much of scores far below it. */
#define SM90_MOST_CAP 64

/* Columns of a tile in memory: whole strips of 64. */
CONTRACT int sm90_columns(int dim) {
    return (dim + 63) / 64 * 64;
}

/* ------------------------------------------------------------------------------------------------------ forward */

/* The barriers of each kind of the forward, the most slots that one may have; bytes of what is told of a tile of queries. */
#define SM90_FORWARD_BARRIERS 7
#define SM90_MOST_STAGES 4
#define SM90_JOB_BYTES 80

/* Over d 256 K comes in chunks. Over d 320 the sums of a row do not fit into the registers of a warpgroup: a block makes so many columns of o,
 * another the rest. */
#define SM90_MOST_WHOLE 256
#define SM90_MOST_PART 320
CONTRACT int sm90_forward_part(int dim) {
    return dim > SM90_MOST_PART ? dim / 2 : dim;
}
CONTRACT unsigned sm90_forward_parts(int dim, int64_t dv) {
    return dim > SM90_MOST_PART && dv > sm90_forward_part(dim) ? 2 : 1;
}

/* Tiles of K, and of V, that are there or on their way; over d 256 of V alone. */
CONTRACT int sm90_forward_stages(int dim) {
    return dim > 384 ? 1 : dim > 64 ? 2 : SM90_MOST_STAGES;
}

/* Columns of K that come and go at once: over d 256 a part of a tile. */
CONTRACT int sm90_forward_chunk(int dim) {
    return dim <= SM90_MOST_WHOLE ? dim : dim % 128 ? 64 : 128;
}

/* Tiles of Q: with two, o leaves through the buffer of its own Q. */
CONTRACT int sm90_forward_q_stages(int dim) {
    return dim > 128 ? 1 : 2;
}

/* Chunks of K that are there or on their way: over d 256 as many as there is room for beside Q and V. */
#define SM90_FORWARD_TILES (224 * 1024)
CONTRACT int sm90_forward_slots(int dim, int own, int block) {
    const int stages = sm90_forward_stages(dim), v = stages * block * sm90_columns(sm90_forward_part(dim)) * 2;
    return dim <= SM90_MOST_WHOLE
               ? stages
               : (SM90_FORWARD_TILES - own * sm90_columns(dim) * 2 - v) / (block * sm90_forward_chunk(dim) * 2);
}

/* Q; K and V; of a tile of V a bit for each key; two jobs; barriers; over d 256 two more for each chunk of K, and of both jobs the part
 * of o. */
CONTRACT int sm90_forward_layout_bytes(int dim, int own, int block) {
    const int stages = sm90_forward_stages(dim), slots = sm90_forward_slots(dim, own, block);
    return sm90_forward_q_stages(dim) * own * sm90_columns(dim) * 2 +
           slots * block * sm90_columns(sm90_forward_chunk(dim)) * 2 +
           stages * (block * sm90_columns(sm90_forward_part(dim)) * 2 + 16) + 2 * SM90_JOB_BYTES +
           8 * SM90_FORWARD_BARRIERS * SM90_MOST_STAGES + (dim > SM90_MOST_WHOLE ? 2 * 8 * slots + 2 * 4 : 0);
}

/* Shared memory begins anywhere: what lies before the first tile comes on top. */
CONTRACT int sm90_forward_bytes(int dim, int own, int block) {
    return SM90_TILE_ALIGNMENT + sm90_forward_layout_bytes(dim, own, block);
}

/* Of keys in pages: log2 of the rows that are fetched at once; bytes, with a word for each tile of K. */
CONTRACT int sm90_box_bits(int page_bits) {
    return page_bits < 6 ? page_bits : 6;
}
CONTRACT int sm90_forward_paged_bytes(int dim, int own, int block) {
    return sm90_forward_bytes(dim, own, block) + sm90_forward_stages(dim) * 4;
}

/* Tiles come in pairs: so many of all units (heads of sequences), whose odd tiles in the middle pair with each other, 16 units at a
 * time. */
CONTRACT unsigned sm90_forward_pairs(unsigned units, unsigned tiles) {
    return units / 16 * 8 * tiles + (units % 16 * tiles + 1) / 2;
}

/* ----------------------------------------------------------------------------------------------------- backward */

/* Rows that a block owns, and rows of a tile of the sums of dQ. */
#define SM90_OWN_ROWS 128
#define SM90_SUM_ROWS 64

/* Numbers in a piece of the sums: 64 x 64. */
#define SM90_PIECE 4096

/* What kernels with options keep behind all else. */
#define SM90_BACKWARD_OPTIONS 400

/* Stages of Q and dO, where dK, dV and dQ are made at once. */
#define SM90_FUSED_STAGES 3

/* K, V; stages of Q and dO with three numbers a row; dS twice; of long ones two pieces of dQ; marks of keys; barriers: four for each
 * stage, four of dS, two of K and V, four of the pieces. */
CONTRACT int sm90_fused_bytes(int dim, int block, int is_long) {
    const int width = sm90_columns(dim) * 2;
    return 2 * SM90_OWN_ROWS * width + SM90_FUSED_STAGES * (2 * block * width + 3 * block * 4) +
           2 * SM90_OWN_ROWS * block * 2 + (is_long ? 2 * SM90_PIECE * 4 : 0) + SM90_OWN_ROWS * 4 +
           8 * (4 * SM90_FUSED_STAGES + 4 + 2 + 4);
}

/* The same for d over 128 with dropout alone, where a block owns 64 keys and a step has 64 queries. */
#define SM90_WIDE_STAGES 2

/* K, V; stages of Q and dO with three numbers a row; P; dS twice; marks of keys; barriers: four for each stage, two of P, four of dS, two
 * of K and V. */
CONTRACT int sm90_wide_bytes(int dim) {
    const int width = sm90_columns(dim) * 2;
    return 2 * 64 * width + SM90_WIDE_STAGES * (2 * 64 * width + 3 * 64 * 4) + 64 * 64 * 4 + 2 * 64 * 64 * 2 + 64 * 4 +
           8 * (4 * SM90_WIDE_STAGES + 2 + 4 + 2);
}

/* The same but for dropout alone, where a pair of blocks, a cluster, owns 128 keys: the first makes dV, the second dK, and each of dQ so many strips
 * of 64 columns. */
#define SM90_PAIR_TILES (224 * 1024)
#define SM90_PAIR_MOST_SLOTS 5 /* or numbers of a step would come while others of its place are read */
CONTRACT int sm90_is_pair(int dim, int own) {
    return dim > 128 && own == SM90_OWN_ROWS;
}
CONTRACT int sm90_pair_strips(int dim, int rank) {
    const int strips = sm90_columns(dim) / 64, first = strips / 2;
    return rank ? strips - first : first;
}

/* The first keeps K, the second V and the strips of K of its dQ. Both have two places for what comes from the other (dS; P, then dS); what is left
 * is slots of Q and dO. */
CONTRACT int sm90_pair_own_bytes(int dim, int rank) {
    return (sm90_columns(dim) / 64 + (rank ? sm90_pair_strips(dim, rank) : 0)) * SM90_OWN_ROWS * 128;
}
CONTRACT int sm90_pair_slots(int dim, int rank) {
    const int room =
        (SM90_PAIR_TILES - 2 * SM90_OWN_ROWS * 64 * 2 - sm90_pair_own_bytes(dim, rank)) / (64 * sm90_columns(dim) * 2);
    return room < SM90_PAIR_MOST_SLOTS ? room : SM90_PAIR_MOST_SLOTS;
}

/* Steps of whose rows there are numbers, two of each; that have been told of; bytes of what is told of a step, and of a tile of keys. */
#define SM90_PAIR_NUMBERS 3
#define SM90_PAIR_TOLD 8
#define SM90_PAIR_STEP_BYTES 16
#define SM90_PAIR_WORK_BYTES 104

/* All of that; marks of keys; barriers: two for each slot, two of the block's own, four for what comes from the other, four of P; options. */
CONTRACT int sm90_pair_bytes(int has_options) {
    return SM90_PAIR_TILES + SM90_PAIR_NUMBERS * 2 * 64 * 4 + SM90_OWN_ROWS * 4 +
           SM90_PAIR_TOLD * SM90_PAIR_STEP_BYTES + 2 * SM90_PAIR_WORK_BYTES +
           8 * (2 * SM90_PAIR_MOST_SLOTS + 2 + 4 + 4) + (has_options ? SM90_BACKWARD_OPTIONS : 0);
}

/* Slots for tiles that stream, beside the block's own, where dK and dV, and dQ, have kernels of their own. */
CONTRACT int sm90_backward_slots(int dim, int block) {
    return (dim > 128 ? 96 : 128) * 1024 / (block * sm90_columns(dim) * 2);
}

/* `tensors` of the block's own rows; slots with so many numbers a row; barriers: two for each slot, two of the own. */
CONTRACT int sm90_backward_bytes(int dim, int block, int tensors, int slots, int numbers) {
    const int width = sm90_columns(dim) * 2;
    return tensors * SM90_OWN_ROWS * width + slots * (block * width + numbers * block * 4) + 8 * (2 * slots + 2);
}

/* Do the sums of dK and dV fit into registers together? Else some blocks make dK, the others dV. */
CONTRACT int sm90_makes_both(int dim) {
    return dim <= 128;
}

/* Of so many blocks, those that make dK where the others make dV: dK takes three products, dV two. */
CONTRACT unsigned sm90_blocks_of_dk(unsigned blocks, unsigned tiles) {
    return blocks >= 2 * tiles ? tiles : blocks * 3 / 5;
}

/* The same for d over 256, where a block owns 64 rows and a step has 64 of the other side. `tensors` of the block's own; tiles that are kept
 * for a step, two where there is room; strips of 64 columns that stream, as many as there is room for. */
#define SM90_LARGE_ROWS 64
#define SM90_STRIP (64 * 64 * 2)
#define SM90_LARGE_TILES (224 * 1024 - SM90_STRIP) /* beside those of dS */
CONTRACT int sm90_large_stages(int dim, int tensors) {
    return (tensors + 2) * (sm90_columns(dim) / 64) * SM90_STRIP + 3 * SM90_STRIP > SM90_LARGE_TILES ? 1 : 2;
}
CONTRACT int sm90_large_slots(int dim, int tensors) {
    return SM90_LARGE_TILES / SM90_STRIP - (tensors + sm90_large_stages(dim, tensors)) * (sm90_columns(dim) / 64);
}

/* All of that; dS; three numbers for each row of a stage; barriers: two for each slot and stage, two of the own. */
CONTRACT int sm90_large_layout_bytes(int dim, int tensors) {
    const int stages = sm90_large_stages(dim, tensors);
    return SM90_LARGE_TILES + SM90_STRIP + stages * 3 * SM90_LARGE_ROWS * 4 +
           8 * (2 * sm90_large_slots(dim, tensors) + 2 * stages + 2);
}

/* dQ and dK keep two tensors, dV one, by the same kernel as dK. */
CONTRACT int sm90_large_bytes(int dim, int makes_keys) {
    const int two = sm90_large_layout_bytes(dim, 2), one = sm90_large_layout_bytes(dim, 1);
    return makes_keys && one > two ? one : two;
}

/* ------------------------------------------------------------------------------------------------------ options */

/* A bias comes in boxes of 64 x 64, which begin as tiles do. */
#define SM90_BIAS_BOX (64 * 64 * 2)

CONTRACT int sm90_align(int bytes) {
    return (bytes + SM90_TILE_ALIGNMENT - 1) / SM90_TILE_ALIGNMENT * SM90_TILE_ALIGNMENT;
}

/* What the full kernels keep behind all else in forward, with two barriers for the bias of each warpgroup, and behind that the bias of a
 * tile. */
#define SM90_FORWARD_OPTIONS (160 + 3 * 16)

/* Of wide backward: that, and of dropout the bits of a step, with two barriers. */
#define SM90_WIDE_OPTIONS (SM90_BACKWARD_OPTIONS + 64 * 64 / 8 + 2 * 8)

/* Of a bias, where dK, dV and dQ are made at once: two barriers for each warpgroup and place; the places. Where a step has more queries
 * they are those of dS, which is made when the bias has been read. Dropout alone has its bits in their place, a bit for each element of two
 * steps. */
CONTRACT int sm90_fused_bias_places(int block) {
    return block > 64 ? 2 : 1;
}
CONTRACT int sm90_fused_options(int block) {
    return SM90_BACKWARD_OPTIONS + 2 * sm90_fused_bias_places(block) * 16 +
           (block > 64 ? 2 * SM90_OWN_ROWS * block / 8 : 2 * SM90_BIAS_BOX);
}

CONTRACT int sm90_forward_full_bytes(int dim, int own, int block) {
    return SM90_TILE_ALIGNMENT + sm90_align(sm90_forward_layout_bytes(dim, own, block) + SM90_FORWARD_OPTIONS) +
           own / 64 * (block / 64) * SM90_BIAS_BOX;
}

/* The gradient of a bias: slots of the block's queries and keys; the bias of a tile, in boxes, which has room for the sums of eight warps, too;
 * three numbers of each query of a step; what is told of so many steps; barriers: two for each slot, two for each that is told of, three. */
#define SM90_DBIAS_TOLD 2
#define SM90_DBIAS_TOLD_BYTES 160
CONTRACT int sm90_dbias_slot_bytes(int dim, int block) {
    return (SM90_OWN_ROWS + block) * sm90_columns(dim) * 2;
}
CONTRACT int sm90_dbias_slots(int dim, int block) {
    return 192 * 1024 / sm90_dbias_slot_bytes(dim, block);
}
CONTRACT int sm90_dbias_bytes(int dim, int block) {
    return sm90_dbias_slots(dim, block) * (sm90_dbias_slot_bytes(dim, block) + 2 * 8) +
           SM90_OWN_ROWS / 64 * (block / 64) * SM90_BIAS_BOX + 3 * SM90_OWN_ROWS * 4 +
           SM90_DBIAS_TOLD * (SM90_DBIAS_TOLD_BYTES + 2 * 8) + 3 * 8;
}

#endif
