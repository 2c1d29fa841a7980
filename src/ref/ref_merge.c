/* SPDX-License-Identifier: Apache-2.0
 * heddle_attention_merge by its formula, in float64. */
#include "ref.h"

heddle_status heddle__ref_merge(const heddle_merge *m, void *o, void *lse, const void *other_o, const void *other_lse,
                                void *stream) {
    (void)stream;
    const heddle_dtype real = float_type(m->dtype);
    for (int64_t row = 0; row < m->b * m->h * m->s; row++) {
        const int64_t n = row / m->s / m->h, x = row / m->s % m->h, i = row % m->s;
        const int64_t to = n * m->o_stride.b + x * m->o_stride.h + i * m->o_stride.s;
        const int64_t from = n * m->other_stride.b + x * m->other_stride.h + i * m->other_stride.s;
        const double mine = load_element(real, lse, row), other = load_element(real, other_lse, row);
        double share[2];
        store_element(real, lse, row, merged_lse(mine, other, share));
        for (int64_t e = 0; e < m->dv; e++) {
            const double a = mine == -INFINITY ? 0 : share[0] * load_element(real, o, to + e);
            const double b = other == -INFINITY ? 0 : share[1] * load_element(m->dtype, other_o, from + e);
            store_element(real, o, to + e, a + b);
        }
    }
    return HEDDLE_OK;
}
