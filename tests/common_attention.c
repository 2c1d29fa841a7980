/* SPDX-License-Identifier: Apache-2.0
 * Attention problems: build the tensors that a description asks for, run, print; judge_attention.c compares. */
#include "common.h"

#include "../tools/device_memory.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DENSE(id, name, ...) #name,
#define STRIDED(id, name, ...) #name,
const char *const attention_tensor_name[T_COUNT] = {
#include "attention_fields.def"
};

heddle_attention attention_desc(heddle_dtype dtype, int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d,
                                int64_t dv) {
    return (heddle_attention){.size = sizeof(heddle_attention),
                              .dtype = dtype,
                              .device = test_device(),
                              .b = b,
                              .h = h,
                              .hk = hk,
                              .sq = sq,
                              .sk = sk,
                              .d = d,
                              .dv = dv};
}

attention_case attention_case_of(int64_t b, int64_t h, int64_t hk, int64_t sq, int64_t sk, int64_t d, int64_t dv) {
    return (attention_case){.a = attention_desc(HEDDLE_F32, b, h, hk, sq, sk, d, dv),
                            .seed = (uint64_t)(sq * 7 + sk + d)};
}

/* The public description keeps its defaults; the problem's own copy is literal. */
static void literal(heddle_strides *s, bool packed, int64_t h, int64_t rows, int64_t last) {
    if (!s->b && !s->h && !s->s)
        *s = packed ? (heddle_strides){0, last, h * last} : (heddle_strides){h * rows * last, rows * last, last};
    if (s->b == HEDDLE_BROADCAST || packed)
        s->b = 0;
    if (s->h == HEDDLE_BROADCAST)
        s->h = 0;
    if (s->s == HEDDLE_BROADCAST)
        s->s = 0;
}

/* A tensor of [b, h, s, last], b = 1 if it is packed, of pages in place of b; lse and dlse have no last dimension. */
static tensor data_tensor(const attention_problem *p, const tensor_field *f, int element, bool skew) {
    const heddle_attention *a = &p->a;
    const bool paged = a->features & HEDDLE_PAGES && f->shape[1] == 'g',
               packed = !paged && f->packed && a->features & HEDDLE_VARLEN;
    const int64_t h = attention_extent(a, f->shape[1]), last = f->shape[3] ? attention_extent(a, f->shape[3]) : 1;
    const int64_t rows = paged     ? a->page
                         : !packed ? attention_extent(a, f->shape[2])
                                   : attention_extent(a, f->shape[3] ? f->packed[0] : f->packed[1]);
    heddle_strides s = packed ? (heddle_strides){0, rows, 1} : (heddle_strides){h * rows, rows, 1};
    if (f->stride)
        memcpy(&s, (const char *)a + f->stride, sizeof s);
    literal(&s, packed, h, rows, last);
    int64_t dim[4] = {packed ? 1 : paged ? a->pages : a->b, h, rows, last};
    if (is_summed(f)) { /* one element along what it is summed over, be it nothing */
        dim[0] = dim[0] || s.b ? dim[0] : 1;
        dim[2] = dim[2] || s.s ? dim[2] : 1;
    }
    return tensor_new(a->device, element, dim, (int64_t[]){s.b, s.h, s.s, 1}, skew);
}

/* A row for each sequence, or one of all where rows are packed. */
static tensor rows_tensor(const heddle_attention *a, const tensor_field *f, int element, bool skew) {
    const char *shape = attention_shape(f, a->features);
    const int64_t last = attention_extent(a, shape[strlen(shape) - 1]);
    return tensor_new(a->device, element, (int64_t[]){shape == f->packed ? 1 : a->b, 1, 1, last},
                      (int64_t[]){shape == f->packed ? 0 : last, 0, 0, 1}, skew);
}

/* HEDDLE_BLOCKS: how many numbers its tensors have here. */
static int64_t row_numbers(const heddle_attention *a) {
    return attention_extent(a, 'B') * attention_extent(a, 'H') * attention_extent(a, 'r');
}

static int64_t columns_in_all(const heddle_attention *a) {
    return row_numbers(a) * (2 * ((a->sk + a->block_k - 1) / a->block_k) + 2);
}

/* All tensors that the description has, poisoned; `skip` leaves optional ones out. */
static void make_tensors(attention_problem *p, uint32_t skip, bool skew, bool len_q, bool len_k) {
    const heddle_attention *a = &p->a;
    for (int x = 0; x < T_COUNT; x++) {
        const tensor_field *f = &attention_fields[x];
        const int element = element_of(f, a->dtype, a->features);
        if ((f->feature && !(a->features & f->feature)) || skip >> x & 1 || (x == T_LEN_Q && !len_q) ||
            (x == T_LEN_K && !len_k))
            continue;
        if (a->features & (HEDDLE_PAGES | HEDDLE_E4M3) && f->need[HEDDLE_FORWARD] == NEED_UNUSED)
            continue;
        if (a->features & HEDDLE_PAGES && x == T_CU_K)
            continue;
        if (x == T_K_SCALE || x == T_V_SCALE)
            p->t[x] = tensor_new(a->device, element, (int64_t[]){a->b, 1, 1, a->hk}, (int64_t[]){a->hk, 0, 0, 1}, skew);
        else if (x == T_ALIBI)
            p->t[x] = tensor_new(a->device, element, (int64_t[]){a->b, 1, 1, a->h},
                                 (int64_t[]){a->alibi_stride_b, 0, 0, 1}, skew);
        else if (x == T_TABLE || x == T_Q_SEGMENTS || x == T_K_SEGMENTS)
            p->t[x] = rows_tensor(a, f, element, skew);
        else if (x == T_BLOCK_ROWS || x == T_BLOCK_COLUMNS)
            p->t[x] = tensor_vector(a->device, element, x == T_BLOCK_ROWS ? row_numbers(a) : columns_in_all(a));
        else if (!f->shape[1])
            p->t[x] = tensor_vector(a->device, element, attention_extent(a, f->shape[0]));
        else
            p->t[x] = data_tensor(p, f, element, skew);
    }
}

static void fill_vector(tensor *t, const int32_t *values, int64_t n) {
    for (int64_t x = 0; x < n; x++)
        tensor_raw_set(t, x, values[x]);
}

/* Pages at random, some of them shared, some hidden; behind the last key of a sequence anything. */
static void fill_table(attention_problem *p, const attention_case *c, rng *r) {
    const heddle_attention *a = &p->a;
    const int32_t none[] = {-1, (int32_t)a->pages, (int32_t)a->pages + 7, INT32_MIN, INT32_MAX};
    tensor *t = &p->t[T_TABLE];
    int64_t length[4];
    for (int64_t n = 0; n < a->b; n++) {
        attention_lengths(p, n, length);
        for (int64_t x = 0; x < t->dim[3]; x++) {
            double page = (double)rng_between(r, INT32_MIN, INT32_MAX);
            if (x * a->page < length[3])
                page = a->pages == 0 || rng_chance(r, c->hidden_pages) ? none[rng_between(r, 0, COUNT(none) - 1)]
                                                                       : (double)rng_between(r, 0, a->pages - 1);
            tensor_set(t, n, 0, 0, x, page);
        }
    }
}

static void fill_segments(const attention_case *c, tensor *t, int kind, rng *r) {
    static const int32_t ids[] = {INT32_MIN, -7, 0, 1, 2, 70000, INT32_MAX};
    for (int64_t n = 0; n < t->dim[0]; n++) {
        int64_t document = rng_between(r, -9, 2), id = ids[rng_between(r, 0, COUNT(ids) - 1)];
        for (int64_t x = 0; x < t->dim[3]; x++) {
            document += rng_chance(r, 3.0 / (double)c->a.sk) || rng_chance(r, 0.01);
            if (kind == 2 || (kind == 3 && rng_chance(r, 0.08)))
                id = ids[rng_between(r, 0, COUNT(ids) - 1)];
            if (kind == 4)
                id = rng_chance(r, 0.02) ? INT32_MAX : 3;
            tensor_set(t, n, 0, 0, x, (double)(kind == 1 ? document : id));
        }
    }
}

/* Lists in no order, with numbers of no block and, now and then, a row's number that is none. */
static void fill_blocks(attention_problem *p, const attention_case *c, rng *r) {
    static const int32_t none[] = {-1, INT32_MIN, INT32_MAX, 1 << 20};
    const heddle_attention *a = &p->a;
    tensor *rows = &p->t[T_BLOCK_ROWS], *columns = &p->t[T_BLOCK_COLUMNS];
    const int64_t blocks = (a->sk + a->block_k - 1) / a->block_k, lists = attention_extent(a, 'r');
    const double density = c->block_density > 0 ? c->block_density : 0.5;
    int64_t y = 0;
    for (int64_t at = 0; at < rows->span; at++) {
        tensor_raw_set(rows, at, (double)y);
        for (int64_t x = 0; x < blocks && at % lists != lists - 1; x++)
            if (rng_chance(r, density))
                tensor_raw_set(columns, y++,
                               (double)(rng_chance(r, 0.9) ? (at % 2 ? x : blocks - 1 - x)
                                                           : none[rng_between(r, 0, COUNT(none) - 1)]));
        if (rng_chance(r, 0.03))
            tensor_raw_set(rows, at, rng_chance(r, 0.5) ? INT32_MIN : INT32_MAX);
    }
    tensor_raw_set(rows, rows->span - 1, (double)columns->span);
    for (; y < columns->span; y++)
        tensor_raw_set(columns, y, none[y % COUNT(none)]);
}

static void fill_huge_bias(attention_problem *p, double huge, int64_t from) {
    tensor *t = &p->t[T_BIAS];
    for (int64_t n = 0; n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++)
                for (int64_t j = 0; j < t->dim[3]; j++)
                    if ((i % 3 == 1 && t->stride[2] != 0) || j % 4 == 2 || (from && j >= from && x % 2 == 0))
                        tensor_set(t, n, x, i, j, huge);
}

static void fill_mask(attention_problem *p, const attention_case *c, rng *r) {
    tensor *t = &p->t[T_BOOL_MASK];
    double density = c->mask_density > 0 ? c->mask_density : 0.7;
    for (int64_t at = 0; at < t->span; at++)
        if (t->reached[at])
            tensor_raw_set(t, at, rng_chance(r, density) ? (double)rng_between(r, 1, 255) : 0);
    for (int64_t i = 0; i < t->dim[2] && c->mask_rows; i++)
        for (int64_t n = 0; i % 3 == 1 && n < t->dim[0]; n++)
            for (int64_t x = 0; x < t->dim[1]; x++)
                for (int64_t j = 0; j < t->dim[3]; j++)
                    tensor_set(t, n, x, i, j, 0);
    for (int64_t n = 0; c->mask_tiles && n < t->dim[0]; n++)
        for (int64_t x = 0; x < t->dim[1]; x++)
            for (int64_t i = 0; i < t->dim[2]; i++)
                for (int64_t j = 0; j < t->dim[3]; j++) {
                    const int64_t tile = (t->stride[0] ? n : 0) + (t->stride[1] ? 3 * x : 0) +
                                         (t->stride[2] ? i / c->mask_tiles * 5 : 0) + j / c->mask_tiles * 7;
                    if (tile % 4 != 2)
                        tensor_set(t, n, x, i, j, tile % 4 ? 0 : 1);
                }
}

/* The tensors that poison_unseen knows of. */
enum { U_Q, U_DOUT, U_DLSE, U_K, U_V, U_BIAS, U_DWEIGHTS, U_COUNT };
static const int unseen_of[U_COUNT] = {T_Q, T_DOUT, T_DLSE, T_K, T_V, T_BIAS, T_DWEIGHTS};

/* A byte for each element of a row; row i of head x, or the row of scores of one sequence. */
static void use_row(const attention_problem *p, unsigned char *const used[U_COUNT], int which, int64_t n, int64_t x,
                    int64_t i) {
    const tensor *t = &p->t[unseen_of[which]];
    if (t->host)
        memset(used[which] + tensor_at(t, n, x, i, 0), 1, (size_t)t->dim[3]);
}

static void use_head(const attention_problem *p, unsigned char *const used[U_COUNT], int64_t n, int64_t x, bool *sees,
                     bool *seen) {
    const heddle_attention *a = &p->a;
    const int64_t pack = a->features & HEDDLE_VARLEN ? 0 : n, y = x / (a->h / a->hk);
    const tensor *bias = &p->t[T_BIAS];
    int64_t length[4];
    attention_lengths(p, n, length);
    memset(seen, 0, (size_t)length[3]);
    for (int64_t i = 0; i < length[1]; i++) {
        const seen_keys keys = attention_sees(p, length, n, x, i, sees);
        for (int z = keys.from < keys.to ? U_Q : U_DLSE; z <= U_DLSE; z++) /* dlse still goes to the sinks */
            use_row(p, used, z, pack, x, length[0] + i);
        for (int64_t j = keys.from; j < keys.to; j++)
            seen[j] = seen[j] || sees[j];
        for (int64_t j = keys.from; j < keys.to && bias->host; j++)
            if (sees[j])
                used[U_BIAS][tensor_at(bias, n, x, i, j)] = 1;
        if (p->t[T_DWEIGHTS].host)
            memset(used[U_DWEIGHTS] + tensor_at(&p->t[T_DWEIGHTS], n, x, i, 0), 1, (size_t)length[3]);
    }
    for (int64_t j = 0; j < length[3]; j++)
        for (int z = U_K; z <= U_V && seen[j]; z++)
            if (a->features & HEDDLE_PAGES)
                use_row(p, used, z, attention_page(p, n, j), y, j % a->page);
            else
                use_row(p, used, z, pack, y, length[2] + j);
}

/* NaN wherever no query looks: keys and values that none sees, queries that see none, rows outside every sequence, bias
 * that is masked out unless it is what masks. */
static void poison_unseen(attention_problem *p, bool bias_masks) {
    const heddle_attention *a = &p->a;
    unsigned char *used[U_COUNT];
    bool *sees = malloc(2 * (size_t)a->sk + 2);
    assert_non_null(sees);
    for (int z = 0; z < U_COUNT; z++)
        used[z] = calloc((size_t)p->t[unseen_of[z]].span + 1, 1);
    for (int64_t n = 0; n < a->b; n++)
        for (int64_t x = 0; x < a->h; x++)
            use_head(p, used, n, x, sees, sees + a->sk + 1);
    for (int z = 0; z < U_COUNT; z++) {
        tensor *t = &p->t[unseen_of[z]];
        const bool stays = bias_masks && z == U_BIAS;
        for (int64_t at = 0; t->host && !stays && at < t->span; at++)
            if (t->reached[at] && !used[z][at])
                tensor_raw_set(t, at,
                               at % 5 ? (double)NAN : 1e30); /* finite, to a tile that is scaled by its largest */
        free(used[z]);
    }
    free(sees);
}

static void fill_inputs(attention_problem *p, const attention_case *c) {
    rng r = {c->seed * 0x9E3779B97F4A7C15u + 17};
    const int segments = c->segments ? c->segments : 1 + (int)(c->seed / 3 % 4);
    tensor *t = p->t;
    for (int x = 0; x < T_COUNT; x++) {
        double magnitude = x == T_Q ? c->q_magnitude : x == T_K ? c->k_magnitude : x == T_V ? c->v_magnitude : 1;
        if (!t[x].host || !is_input(&attention_fields[x]))
            continue;
        switch (x) {
        case T_BOOL_MASK: fill_mask(p, c, &r); break;
        case T_CU_Q: fill_vector(&t[x], c->cu_q, p->a.b + 1); break;
        case T_CU_K: fill_vector(&t[x], c->cu_k, p->a.b + 1); break;
        case T_LEN_Q: fill_vector(&t[x], c->len_q, p->a.b); break;
        case T_LEN_K: fill_vector(&t[x], c->len_k, p->a.b); break;
        case T_TABLE: fill_table(p, c, &r); break;
        case T_BLOCK_ROWS: fill_blocks(p, c, &r);
        case T_BLOCK_COLUMNS: break;
        case T_Q_SEGMENTS:
        case T_K_SEGMENTS: fill_segments(c, &t[x], segments, &r); break;
        case T_RNG:
            for (int64_t y = 0; y < 2; y++)
                memcpy(t[x].host + (size_t)(t[x].guard + y) * 8, &(uint64_t){rng_next(&r)}, 8);
            break;
        case T_K_SCALE:
        case T_V_SCALE:
            for (int64_t at = 0; at < t[x].span; at++)
                tensor_raw_set(&t[x], at, (rng_chance(&r, 0.1) ? -1 : 1) * exp2(4 * rng_uniform(&r) - 2));
            break;
        case T_ALIBI:
            for (int64_t at = 0; at < t[x].span; at++)
                tensor_raw_set(&t[x], at, exp2(-8 * rng_uniform(&r)));
            break;
        default: tensor_fill_normal(&t[x], &r, magnitude == 0 ? 1 : magnitude);
        }
    }
    if (c->same_input) {
        tensor_convert(&t[T_K], &t[T_Q]);
        tensor_convert(&t[T_V], &t[T_Q]);
    }
    if (c->huge_bias != 0)
        fill_huge_bias(p, c->huge_bias, c->huge_from);
    if (c->poison_masked)
        poison_unseen(p, c->huge_bias != 0);
}

static void upload_all(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++)
        tensor_upload(&p->t[x]);
}

/* The description's defaults for sizes and scale, which the plain computation and the tensors need as numbers. */
static void fill_defaults(heddle_attention *a) {
    a->size = sizeof *a;
    a->hk = a->hk ? a->hk : a->h;
    a->dv = a->dv ? a->dv : a->d;
    a->scale = a->scale != 0 ? a->scale : 1 / sqrt((double)a->d);
}

attention_problem attention_new(const attention_case *c) {
    attention_problem p = {.a = c->a};
    fill_defaults(&p.a);
    p.a.device = test_device();
    make_tensors(&p, c->skip, c->seed % 3 == 0, c->len_q != NULL, c->len_k != NULL);
    fill_inputs(&p, c);
    upload_all(&p);
    return p;
}

attention_problem attention_copy(const attention_problem *p, heddle_dtype dtype, heddle_device device) {
    attention_problem q = {.a = p->a};
    q.a.dtype = dtype;
    q.a.device = device;
    uint32_t skip = 0;
    for (int x = 0; x < T_COUNT; x++)
        skip |= p->t[x].host ? 0 : UINT32_C(1) << x;
    make_tensors(&q, skip, p->t[T_Q].guard != 64, p->t[T_LEN_Q].host != NULL, p->t[T_LEN_K].host != NULL);
    for (int x = 0; x < T_COUNT; x++) {
        if (!is_input(&attention_fields[x]) || !p->t[x].host)
            continue;
        if (x == T_RNG)
            memcpy(q.t[x].host, p->t[x].host, (size_t)(q.t[x].span + 2 * q.t[x].guard) * 8);
        else
            tensor_convert(&q.t[x], &p->t[x]);
    }
    upload_all(&q);
    return q;
}

attention_problem attention_borrow(const attention_problem *p) {
    attention_problem q = {.a = p->a};
    q.a.device = HEDDLE_REF;
    for (int x = 0; x < T_COUNT; x++) {
        q.t[x] = p->t[x];
        q.t[x].borrowed = true;
        if (is_output(&attention_fields[x]) && p->t[x].host)
            q.t[x] = tensor_new(HEDDLE_REF, p->t[x].element, p->t[x].dim, p->t[x].stride, p->t[x].guard != 64);
    }
    return q;
}

void attention_free(attention_problem *p) {
    for (int x = 0; x < T_COUNT; x++)
        tensor_free(&p->t[x]);
}

heddle_attention_data attention_data(const attention_problem *p, bool backward) {
    heddle_attention_data data = {.size = sizeof data};
    for (int x = 0; x < T_COUNT; x++) {
        void *pointer = tensor_pointer(&p->t[x]);
        if (attention_fields[x].need[backward] != NEED_UNUSED)
            memcpy((char *)&data + attention_fields[x].offset, &pointer, sizeof pointer);
    }
    return data;
}

bool attention_pass(attention_problem *p, heddle_pass pass) {
    const char *side = p->a.device == HEDDLE_REF ? "ref" : "device",
               *name = pass == HEDDLE_FORWARD ? "forward" : "backward";
    size_t bytes = SIZE_MAX;
    heddle_status status = heddle_attention_workspace(&p->a, pass, &bytes);
    if (status != HEDDLE_OK) {
        printf("  %s %s: workspace query: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
        return false;
    }
    void *workspace = workspace_new(p->a.device, bytes), *stream = device_memory_stream();
    heddle_attention_data data = attention_data(p, pass == HEDDLE_BACKWARD);
    status = pass == HEDDLE_FORWARD ? heddle_attention_forward(&p->a, &data, workspace, bytes, stream)
                                    : heddle_attention_backward(&p->a, &data, workspace, bytes, stream);
    bool right = status == HEDDLE_OK;
    if (!right)
        printf("  %s %s: %s: %s\n", side, name, heddle_status_string(status), heddle_last_message());
    for (int x = 0; x < T_COUNT; x++)
        tensor_fetch(&p->t[x]); /* which workspace_intact waits for */
    if (!workspace_intact(p->a.device, workspace, bytes)) {
        printf("  %s %s: wrote outside its workspace of %zu bytes\n", side, name, bytes);
        right = false;
    }
    workspace_free(p->a.device, workspace, bytes);
    for (int x = 0; x < T_COUNT; x++) {
        if (!is_output_of(&attention_fields[x], pass) && !tensor_unchanged(&p->t[x])) {
            printf("  %s %s: changed %s, which it does not write\n", side, name, attention_tensor_name[x]);
            right = false;
        }
        if (is_output_of(&attention_fields[x], pass) && !tensor_gaps_unchanged(&p->t[x])) {
            printf("  %s %s: wrote around %s or between its rows\n", side, name, attention_tensor_name[x]);
            right = false;
        }
    }
    /* The outputs are the backward's inputs: they are as they should be from now on. */
    for (int x = 0; x < T_COUNT; x++)
        if (is_output_of(&attention_fields[x], pass))
            tensor_accept(&p->t[x]);
    return right;
}

void attention_run(attention_problem *p, heddle_pass pass) {
    assert_true(attention_pass(p, pass));
}

void attention_print(const attention_case *c) {
    static const char *const dtype[] = {"f32", "bf16", "f16", "f64"}, *const mask[] = {"none", "top-left",
                                                                                       "bottom-right"};
    static const struct {
        const char *name;
        uint64_t bit;
    } feature[] = {
#define FEATURE(name, bit) {#name, bit},
#include "attention_fields.def"
    };
    const heddle_attention *a = &c->a;
    printf("  case: %s b %" PRId64 " h %" PRId64 "/%" PRId64 " s %" PRId64 "x%" PRId64 " d %" PRId64 "/%" PRId64
           " mask %s scale %g softcap %g dropout %g seed %" PRIu64 " skip 0x%x",
           dtype[a->dtype & 3], a->b, a->h, a->hk, a->sq, a->sk, a->d, a->dv, mask[a->mask], a->scale, a->softcap,
           a->dropout, c->seed, (unsigned)c->skip);
    for (size_t x = 0; x < COUNT(feature); x++)
        if (a->features & feature[x].bit)
            printf(" %s", feature[x].name);
    if (a->features & HEDDLE_WINDOW)
        printf(" (%" PRId64 ", %" PRId64 ")", a->window_left, a->window_right);
    if (a->features & HEDDLE_VARLEN)
        printf(" total %" PRId64 " %" PRId64, a->total_q, a->total_k);
    if (a->features & HEDDLE_PAGES)
        printf(" of %" PRId64 ", %" PRId64 " of them, table %" PRId64 ", hidden %g", a->page, a->pages, a->table,
               c->hidden_pages);
    if (a->q_offset || a->k_offset || a->whole_sq || a->whole_sk || a->whole_h)
        printf(" part %" PRId64 " of %" PRId64 ", %" PRId64 " of %" PRId64 ", heads %" PRId64 " of %" PRId64,
               a->q_offset, a->whole_sq, a->k_offset, a->whole_sk, a->h_offset, a->whole_h);
    if (a->multiprocessors)
        printf(" multiprocessors %" PRId64, a->multiprocessors);
    for (int x = 0; x < T_COUNT; x++) {
        heddle_strides s = {0};
        if (attention_fields[x].stride)
            memcpy(&s, (const char *)a + attention_fields[x].stride, sizeof s);
        if (s.b || s.h || s.s)
            printf(" %s[%" PRId64 ",%" PRId64 ",%" PRId64 "]", attention_tensor_name[x], s.b, s.h, s.s);
    }
    if (c->first_part)
        printf(" in parts, %" PRId64 " keys first", c->first_part);
    printf("%s%s\n", c->same_input ? " q=k=v" : "", c->poison_masked ? " poisoned" : "");
}
