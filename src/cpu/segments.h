/* SPDX-License-Identifier: Apache-2.0
 * HEDDLE_SEGMENTS: ids of queries against ids of keys. What a tile of queries sees is found by the least and the most of ids, of its
 * own and of each block of keys; so keys in a row that nobody sees cost nothing, in whatever order they come. */
#ifndef HEDDLE_CPU_SEGMENTS_H
#define HEDDLE_CPU_SEGMENTS_H

#include "../mask.h"
#include "vec.h"

#define BOUNDS_KEYS 128

typedef struct id_bounds {
    int32_t least, most;
} id_bounds;

INLINE id_bounds bounds_of(const int32_t *ids, int64_t n) {
    id_bounds r = {INT32_MAX, INT32_MIN};
    for (int64_t x = 0; x < n; x++) {
        r.least = ids[x] < r.least ? ids[x] : r.least;
        r.most = ids[x] > r.most ? ids[x] : r.most;
    }
    return r;
}

INLINE bool bounds_have(id_bounds r, int32_t id) {
    return r.least <= id && id <= r.most;
}

/* `keys` without what is in front of the first whose id is within the bounds, and behind the last. `blocks`: of BOUNDS_KEYS ids each. */
static range narrow_keys(const int32_t *ids, const id_bounds *blocks, id_bounds of, range keys) {
    const int64_t step = BOUNDS_KEYS;
    while (keys.begin < keys.end && !bounds_have(of, ids[keys.begin])) {
        const id_bounds *at = &blocks[++keys.begin / step];
        while (keys.begin % step == 0 && keys.begin < keys.end && (at->most < of.least || at->least > of.most)) {
            keys.begin += step;
            at++;
        }
    }
    while (keys.begin < keys.end && !bounds_have(of, ids[keys.end - 1])) {
        const id_bounds *at = &blocks[--keys.end / step];
        while (keys.end % step == 0 && keys.begin < keys.end && (at[-1].most < of.least || at[-1].least > of.most)) {
            keys.end -= step;
            at--;
        }
    }
    return keys;
}

/* What queries with ids within the bounds see of so many keys. */
static tile_kind kind_of_ids(id_bounds of, const int32_t *ids, int64_t n) {
    int32_t some = 0, none = 0;
    for (int64_t j = 0; j < n; j++) {
        const int32_t within = (ids[j] >= of.least) & (ids[j] <= of.most);
        some |= within;
        none |= !within;
    }
    return !some ? TILE_EMPTY : none || of.least != of.most ? TILE_PARTIAL : TILE_FULL;
}

#endif
