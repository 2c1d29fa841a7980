/* SPDX-License-Identifier: Apache-2.0
 * What host and kernels of norm-linear both count with: tiles of the products, and what is done to rows before and after them. C and
 * CUDA C. */
#ifndef HEDDLE_CUDA_NORM_LINEAR_CONTRACT_H
#define HEDDLE_CUDA_NORM_LINEAR_CONTRACT_H

#include "cuda/contract.h"

/* Rows of a tile of a product; of sm80 columns, too. */
#define GEMM_TILE 128

/* Elements of a row that its short team takes; a longer one is the other team's. */
#define SHORT_ROW 1024

/* Threads of a block of prepare and finish; bytes where their warps meet. */
#define ROW_THREADS 256
#define MEETING_BYTES 256

/* What a block of prepare or finish does at a time: a row for each of its teams of so many threads. */
CONTRACT int64_t row_units(int64_t rows, int team) {
    const int teams = ROW_THREADS / team;
    return (rows + teams - 1) / teams;
}

/* ------------------------------------------------------------------------------------------------------ prepare */

#define PREPARE_SHORT_TEAM 32
#define PREPARE_TEAM 128
CONTRACT int prepare_team(int64_t cols) {
    return cols <= SHORT_ROW ? PREPARE_SHORT_TEAM : PREPARE_TEAM;
}

/* Chunks of eight elements of a row that wait for a thread in shared memory. */
#define PREPARE_HELD 4

/* For elements of so many bytes: blocks on a multiprocessor; bytes of a row of each team of a block, and a float a thread; how many such
 * there are; all of a block. */
CONTRACT int prepare_resident(int element) {
    return element == 2 ? 4 : 3;
}
CONTRACT int prepare_stage_bytes(int element) {
    return (PREPARE_HELD * 8 * element + 4) * ROW_THREADS;
}
CONTRACT int prepare_stages(int element) {
    return element == 2 ? 3 : 2;
}
CONTRACT int prepare_bytes(int element) {
    return prepare_stages(element) * prepare_stage_bytes(element) + MEETING_BYTES;
}

/* ------------------------------------------------------------------------------------------------------- finish */

/* Chunks of eight elements of a row that a thread holds; so many where a warp has the row. */
#define FINISH_RESIDENT 2
#define FINISH_HELD 2
#define FINISH_MOST_HELD 3

/* Columns of rows whose sums of dgamma and dbeta stay in the registers of a block. */
#define FINISH_TEAM ROW_THREADS
#define SUMMED_ROW (FINISH_HELD * 8 * FINISH_TEAM)

/* Rows that a team holds, in 16 bits, and that may be read and written 16 bytes at a time, are whole: vector says that they lie so. */
CONTRACT bool finish_is_whole(int element, int64_t cols, bool vector) {
    return element == 2 && vector && cols % 8 == 0 && cols <= SUMMED_ROW;
}

/* Of rows of so many columns: as few threads as hold all of them, if the block does. */
#define FINISH_WARP 32
#define FINISH_SHORT_TEAM 64
#define FINISH_MIDDLE_TEAM 128
CONTRACT int finish_team(int64_t cols, bool whole) {
    return cols <= FINISH_WARP * 8 * (whole ? FINISH_MOST_HELD : FINISH_HELD) ? FINISH_WARP
           : cols <= FINISH_SHORT_TEAM * 8 * FINISH_HELD                      ? FINISH_SHORT_TEAM
           : cols <= FINISH_MIDDLE_TEAM * 8 * FINISH_HELD                     ? FINISH_MIDDLE_TEAM
                                                                              : FINISH_TEAM;
}

/* Columns of a unit of the sums of another matrix, and the shares of its rows: by their number alone, so that the bits of the sums are always
 * the same. */
#define SUM_COLS 256
CONTRACT int64_t sum_parts(int64_t rows) {
    const int64_t parts = (rows + 63) / 64;
    return parts > 256 ? 256 : parts;
}

CONTRACT int64_t sum_units(int64_t cols) {
    return (cols + SUM_COLS - 1) / SUM_COLS;
}

/* As of prepare, but for rows of two tensors and two floats a thread. The sums of the warps lie where stages were. */
CONTRACT int finish_stage_bytes(int element) {
    return (2 * (element == 2 ? FINISH_MOST_HELD : FINISH_HELD) * 8 * element + 8) * ROW_THREADS;
}
CONTRACT int finish_stages(int element) {
    return element == 2 ? 3 : 2;
}
CONTRACT int finish_bytes(int element) {
    return finish_stages(element) * finish_stage_bytes(element) + MEETING_BYTES;
}

/* ----------------------------------------------------------------------------------------------------- activate */

#define ACTIVATE_THREADS 256
#define ACTIVATE_RESIDENT 3

/* Threads that have a row's chunks of eight elements, up to a warp, as a power of two. */
CONTRACT int activate_lanes_log2(int64_t cols) {
    int log2 = 0;
    while (log2 < 5 && INT64_C(8) << log2 < cols)
        log2++;
    return log2;
}

/* What a block does at a time: the columns of so many threads, of one share. */
CONTRACT int64_t activate_blocks(int64_t rows, int64_t cols) {
    const int64_t width = INT64_C(8) << activate_lanes_log2(cols);
    return sum_parts(rows) * ((cols + width - 1) / width);
}

/* ------------------------------------------------------------------------------------------------------------ z */

#define Z_THREADS 256
#define Z_RESIDENT 4

CONTRACT int64_t z_units(int64_t rows, int64_t cols) {
    return (rows * ((cols + 7) / 8) + Z_THREADS - 1) / Z_THREADS;
}

/* -------------------------------------------------------------------------------------------------------- total */

/* Warps of a block; columns that it has, a lane a column. */
#define TOTAL_WARPS 32
#define TOTAL_COLS 32

CONTRACT int64_t total_units(int64_t cols) {
    return (cols + TOTAL_COLS - 1) / TOTAL_COLS;
}

/* ---------------------------------------------------------------------------------------------------------- few */

/* Threads of a block; rows of x that it has, and so many in all; rows of W that it takes at a time; floats from one row's sums to the next. */
#define FEW_THREADS 512
#define FEW_ROWS 16
#define FEW_LIMIT 32
#define FEW_COLS 16
#define FEW_PART 20

/* Terms with zeros behind them; how often a warp loads its part of a row of W; tiles of rows of W. */
CONTRACT int few_padded(int k) {
    return (k + 63) / 64 * 64;
}
CONTRACT int few_groups(int k) {
    return (k + 64 * 4 * (FEW_THREADS / 32) - 1) / (64 * 4 * (FEW_THREADS / 32));
}
CONTRACT int few_tiles(int n) {
    return (n + FEW_COLS - 1) / FEW_COLS;
}

/* The rows of x; and two turns of all warps' sums. */
CONTRACT int64_t few_rows_bytes(int rows, int64_t k) {
    return (k + 63) / 64 * 64 * rows * 2;
}
CONTRACT int64_t few_bytes(int rows, int64_t k) {
    return few_rows_bytes(rows, k) + 2 * (FEW_THREADS / 32) * rows * FEW_PART * 4;
}

#endif
