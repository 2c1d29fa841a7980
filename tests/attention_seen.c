/* SPDX-License-Identifier: Apache-2.0
 * Which keys a query sees, by the formulas of heddle.h, independent of src/. */
#include "common.h"

#include <math.h>
#include <stdlib.h>

void attention_lengths(const attention_problem *p, int64_t n, int64_t length[4]) {
    const heddle_attention *a = &p->a;
    int64_t first[2] = {0, 0}, rows[2] = {a->sq, a->sk};
    for (int side = 0; side < 2; side++) {
        const tensor *cu = &p->t[side ? T_CU_K : T_CU_Q], *len = &p->t[side ? T_LEN_K : T_LEN_Q];
        if (cu->host) {
            first[side] = (int64_t)tensor_raw(cu, n);
            rows[side] = (int64_t)tensor_raw(cu, n + 1) - first[side];
        }
        if (len->host && (int64_t)tensor_raw(len, n) < rows[side])
            rows[side] = (int64_t)tensor_raw(len, n);
    }
    memcpy(length, (int64_t[]){first[0], rows[0], first[1], rows[1]}, 4 * sizeof *length);
}

int64_t attention_page(const attention_problem *p, int64_t n, int64_t j) {
    const double page = tensor_get(&p->t[T_TABLE], n, 0, 0, j / p->a.page);
    return page >= 0 && page < (double)p->a.pages ? (int64_t)page : -1;
}

int64_t attention_diagonal(const heddle_attention *a, int64_t sq, int64_t sk) {
    if (a->mask == HEDDLE_CAUSAL_TOP_LEFT) /* the corner of the whole, as this part counts */
        return a->q_offset - a->k_offset;
    const int64_t behind_q = a->whole_sq ? a->whole_sq - a->q_offset - sq : 0,
                  behind_k = a->whole_sk ? a->whole_sk - a->k_offset - sk : 0;
    return sk + behind_k - sq - behind_q;
}

/* HEDDLE_BLOCKS, by the words of heddle.h. */
static bool is_listed(const attention_problem *p, int64_t n, int64_t x, int64_t r, int64_t column) {
    const heddle_attention *a = &p->a;
    const tensor *rows = &p->t[T_BLOCK_ROWS], *columns = &p->t[T_BLOCK_COLUMNS];
    const int64_t lists = (a->sq + a->block_q - 1) / a->block_q, h = a->blocks_of_h ? a->h : 1;
    const int64_t at = ((a->blocks_of_b ? n * h : 0) + (a->blocks_of_h ? x : 0)) * (lists + 1) + r;
    const double most = fmax(0, tensor_raw(rows, rows->span - 1));
    const double begin = fmin(fmax(tensor_raw(rows, at), 0), most), end = fmin(tensor_raw(rows, at + 1), most);
    for (int64_t y = (int64_t)begin; y < (int64_t)end; y++)
        if ((int64_t)tensor_raw(columns, y) == column)
            return true;
    return false;
}

seen_keys attention_sees(const attention_problem *p, const int64_t length[4], int64_t n, int64_t x, int64_t i,
                         bool *sees) {
    const heddle_attention *a = &p->a;
    const int64_t at = i + attention_diagonal(a, length[1], length[3]);
    seen_keys s = {0, i < length[1] ? length[3] : 0};
    if (a->mask != HEDDLE_MASK_NONE && s.to > at + 1)
        s.to = at + 1;
    if (a->features & HEDDLE_WINDOW && a->window_left >= 0 && s.from < at - a->window_left)
        s.from = at - a->window_left;
    if (a->features & HEDDLE_WINDOW && a->window_right >= 0 && s.to > at + a->window_right + 1)
        s.to = at + a->window_right + 1;
    for (int64_t j = 0; j < length[3]; j++)
        sees[j] = j >= s.from && j < s.to;
    for (int64_t j = s.from; j < s.to && a->features & HEDDLE_BIAS; j++)
        sees[j] = tensor_get(&p->t[T_BIAS], n, x, i, j) != -INFINITY;
    for (int64_t j = s.from; j < s.to && a->features & HEDDLE_BOOL_MASK; j++)
        sees[j] = sees[j] && tensor_get(&p->t[T_BOOL_MASK], n, x, i, j) != 0;
    for (int64_t j = s.from; j < s.to && a->features & HEDDLE_PAGES; j++)
        sees[j] = sees[j] && attention_page(p, n, j) >= 0;
    const tensor *own = &p->t[T_Q_SEGMENTS], *other = &p->t[T_K_SEGMENTS];
    const int64_t first_q = length[0],
                  first_k = a->features & HEDDLE_PAGES ? 0 : length[2]; /* 0 where rows are not packed */
    for (int64_t j = s.from; j < s.to && a->features & HEDDLE_SEGMENTS; j++)
        sees[j] = sees[j] && tensor_get(own, n, 0, 0, first_q + i) == tensor_get(other, n, 0, 0, first_k + j);
    for (int64_t j = s.from; j < s.to && a->features & HEDDLE_BLOCKS; j++)
        sees[j] = sees[j] && is_listed(p, n, x, i / a->block_q, j / a->block_k);
    while (s.from < s.to && !sees[s.from])
        s.from++;
    while (s.from < s.to && !sees[s.to - 1])
        s.to--;
    return s.from < s.to ? s : (seen_keys){0, 0};
}

double attention_keys_seen(const attention_problem *p) {
    double keys = 0, rows = 0;
    int64_t length[4];
    bool *sees = malloc((size_t)p->a.sk + 1);
    assert_non_null(sees);
    for (int64_t n = 0; n < p->a.b; n++) {
        attention_lengths(p, n, length);
        for (int64_t x = 0; x < p->a.h; x++)
            for (int64_t i = 0; i < length[1]; i++) {
                const seen_keys s = attention_sees(p, length, n, x, i, sees);
                for (int64_t j = s.from; j < s.to; j++)
                    keys += sees[j];
                rows += s.from < s.to;
            }
    }
    free(sees);
    return rows > 0 ? keys / rows : 0;
}
