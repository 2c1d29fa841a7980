/* SPDX-License-Identifier: Apache-2.0
 * AVX-512 with bfloat16, and AMX: eight registers that are tiles of 16 rows of 64 bytes. */
#define HAVE_BF16_TILES
#include "vec_avx512.h"

#include <string.h>

/* All eight tiles whole. Belongs to the thread, until end_tiles(). */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    _tile_loadconfig(&config);
}

INLINE void end_tiles(void) {
    _tile_release();
}

/* A block of up to 2 × 2 tiles of C stays in tiles 0..3; A comes through 4 and 5, B through 6 and 7. The numbers of the tiles are
 * part of the instructions, hence no loops. */
INLINE void load_sums(int rows, int columns, const float *c, int64_t stride, bool add) {
    const char *p = (const char *)c;
    const int64_t bytes = stride * 4, down = 16 * bytes;
    if (!add) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, p, bytes);
    if (columns > 1)
        _tile_loadd(1, p + 64, bytes);
    if (rows > 1)
        _tile_loadd(2, p + down, bytes);
    if (rows > 1 && columns > 1)
        _tile_loadd(3, p + down + 64, bytes);
}

INLINE void store_sums(int rows, int columns, float *c, int64_t stride) {
    char *p = (char *)c;
    const int64_t bytes = stride * 4, down = 16 * bytes;
    _tile_stored(0, p, bytes);
    if (columns > 1)
        _tile_stored(1, p + 64, bytes);
    if (rows > 1)
        _tile_stored(2, p + down, bytes);
    if (rows > 1 && columns > 1)
        _tile_stored(3, p + down + 64, bytes);
}

/* C += A·B over 32 sum indices: A 16 rows of 32 elements to a tile, `a_down` bytes to the next one; B tiles of 16 × 16 pairs, one
 * after the other. */
INLINE void multiply_tiles(int rows, int columns, const char *a, int64_t a_row, int64_t a_down, const char *b) {
    _tile_loadd(4, a, a_row);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (columns > 1) {
        _tile_loadd(7, b + 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (rows > 1) {
        _tile_loadd(5, a + a_down, a_row);
        _tile_dpbf16ps(2, 5, 6);
        if (columns > 1)
            _tile_dpbf16ps(3, 5, 7);
    }
}
