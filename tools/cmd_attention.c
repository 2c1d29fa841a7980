/* SPDX-License-Identifier: Apache-2.0 */
#include "file_job.h"

#include <stdio.h>
#include <string.h>

static const char usage[] =
    "Usage: heddle attention --q FILE --k FILE --v FILE --out FILE [options]\n"
    "\n"
    "Computes O = softmax(scale·QKᵀ + mask) V and, given the gradient of O, those of the inputs.\n"
    "The arrays are NumPy files (.npy) of float16, float32 or float64; results have the type of --q.\n"
    "\n"
    "Shapes: q [b, h, sq, d], k [b, hk, sk, d], v [b, hk, sk, dv], out [b, h, sq, dv]; b alone or b and h may be left "
    "out\n"
    "of all of them. Where hk < h, each key head serves h/hk query heads in a row (GQA).\n"
    "\n"
    "Options\n"
    "  --lse FILE            write the log-sum-exp of each row [b, h, sq]; float32, or float64 for float64 input\n"
    "  --weights FILE        write the attention weights [b, h, sq, sk] (memory grows with sq·sk)\n"
    "  --scale S             factor of QKᵀ; default 1/sqrt(d)\n"
    "  --mask MASK           none (default), causal-top-left (query i sees keys 0..i), or causal-bottom-right (the "
    "last query\n"
    "                        sees the last key)\n"
    "  --window L,R          query i sees keys i-L to i+R, counted along the mask's diagonal (with no mask: the one\n"
    "                        that ends at the last key); -1 is unbounded\n"
    "  --q-offset N, --k-offset N\n"
    "                        this is a part of a larger problem, N queries (keys) behind its first: masks, windows,\n"
    "                        ALiBi and dropout go by the place in the whole\n"
    "  --whole-sq N, --whole-sk N\n"
    "                        queries (keys) of the whole; default: it ends with this part\n"
    "  --softcap C           C·tanh(score/C) in place of the score\n"
    "  --alibi FILE          slopes [h] or [b, h]; the score loses slope times the distance\n"
    "  --bias FILE           added to the scores; [b, h, sq, sk], where b, h and sq may be 1 or (from the left) left "
    "out\n"
    "  --bool-mask FILE      bool, shapes as --bias; False masks the key out\n"
    "  --sinks FILE          [h], a logit per head that takes part in the softmax but has no value\n"
    "  --dropout P --seed N  drop each weight with probability P\n"
    "  --cu-seqlens-q FILE --cu-seqlens-k FILE\n"
    "                        int32 [sequences + 1] from 0 to the total: q is then [total_q, h, d], k and v\n"
    "                        [total_k, hk, ...], sequences one after another\n"
    "  --seqlens-q FILE, --seqlens-k FILE\n"
    "                        int32 [b]: only the first so many queries or keys of each batch count\n"
    "  --q-segments FILE --k-segments FILE\n"
    "                        int32 [b, sq] and [b, sk] (packed: [total_q] and [total_k]): a query sees keys of its own "
    "number\n"
    "  --block-rows FILE --block-columns FILE, --block-size Q,K\n"
    "                        int32 [b or 1, h or 1, sq/Q + 1] and [numbers]: the blocks of K keys that each block of "
    "Q\n"
    "                        queries sees, as CSR; Q and K are 64 or 128 (default 128,128)\n"
    "  --block-table FILE    int32 [b, n]: k and v lie in pages, [pages, hk, page, ...] with pages of 16 to 256 keys;\n"
    "                        a row has the numbers of a sequence's pages (one that is none hides its keys); no "
    "gradients\n"
    "\n"
    "Gradients: any of these, with --dout (or --dlse, --dweights) given\n"
    "  --dout FILE           gradient of out, its shape; --dlse FILE, --dweights FILE: of lse and weights\n"
    "  --dq FILE --dk FILE --dv FILE --dbias FILE --dsinks FILE\n"
    "                        write the gradients of q, k, v, bias and sinks\n"
    "\n"
    "How\n"
    "  --dtype TYPE          compute in f32, bf16, f16 or f64; default: the type of --q\n"
    "  --device DEVICE       cpu (default), cuda, or ref: the formulas in float64, slow; f64 needs it\n"
    "  --deterministic       gradients with the same bits every time (the CPU's always are)\n"
    "  --multiprocessors N   of --device cuda take no more than N, where blocks stay; default: all\n"
    "  --time                print milliseconds and GFLOP/s of each pass (median of a second of runs)\n"
    "\n"
    "Example: make inputs of one batch, two heads, 33 positions and head dim 16, attend, and take the gradient\n"
    "  n=0; for x in q k v dout; do n=$((n+1)); heddle random --shape 1,2,33,16 --seed $n --out $x.npy; done\n"
    "  heddle attention --q q.npy --k k.npy --v v.npy --mask causal-top-left --out o.npy --lse lse.npy\n"
    "  heddle attention --q q.npy --k k.npy --v v.npy --dout dout.npy --dq dq.npy --dk dk.npy --dv dv.npy\n";

enum {
    OPTION_SCALE = OPTION_OWN,
    OPTION_MASK,
    OPTION_WINDOW,
    OPTION_SOFTCAP,
    OPTION_DROPOUT,
    OPTION_SEED,
    OPTION_Q_OFFSET,
    OPTION_K_OFFSET,
    OPTION_WHOLE_SQ,
    OPTION_WHOLE_SK,
    OPTION_BLOCK_SIZE
};

static const struct option own_options[] = {
    {"scale", required_argument, NULL, OPTION_SCALE},           {"mask", required_argument, NULL, OPTION_MASK},
    {"window", required_argument, NULL, OPTION_WINDOW},         {"softcap", required_argument, NULL, OPTION_SOFTCAP},
    {"dropout", required_argument, NULL, OPTION_DROPOUT},       {"seed", required_argument, NULL, OPTION_SEED},
    {"q-offset", required_argument, NULL, OPTION_Q_OFFSET},     {"k-offset", required_argument, NULL, OPTION_K_OFFSET},
    {"whole-sq", required_argument, NULL, OPTION_WHOLE_SQ},     {"whole-sk", required_argument, NULL, OPTION_WHOLE_SK},
    {"block-size", required_argument, NULL, OPTION_BLOCK_SIZE}, {0},
};

static bool set_scale(heddle_attention *a, const char *text) {
    if (!parse_real("--scale", text, &a->scale))
        return false;
    if (a->scale == 0)
        complain("--scale: 0 would make all scores equal; leave --scale out for 1/sqrt(d)");
    return a->scale != 0;
}

static bool set_softcap(heddle_attention *a, const char *text) {
    if (!parse_real("--softcap", text, &a->softcap))
        return false;
    if (a->softcap == 0)
        complain("--softcap: 0 would make all scores equal; leave --softcap out for none");
    return a->softcap != 0;
}

static bool set_window(heddle_attention *a, const char *text) {
    int64_t side[2];
    int n = parse_list("--window", text, 2, side);
    if (n == 1)
        complain("--window: '%s' is not two numbers LEFT,RIGHT", text);
    if (n != 2)
        return false;
    if (side[0] < -1 || side[1] < -1)
        return complain("--window: %s is below -1, which is unbounded", text), false;
    a->features |= HEDDLE_WINDOW;
    a->window_left = side[0];
    a->window_right = side[1];
    return true;
}

static bool set_blocks(heddle_attention *a, const char *text) {
    int64_t side[2];
    if (parse_list("--block-size", text, 2, side) != 2 || side[0] < 1 || side[1] < 1 || side[0] > 255 || side[1] > 255)
        return complain("--block-size: '%s' is not two numbers Q,K of 64 or 128", text), false;
    a->block_q = (uint8_t)side[0];
    a->block_k = (uint8_t)side[1];
    return true;
}

static bool set_option(job *j, int option, const char *text) {
    heddle_attention *a = &j->a;
    static const char *const masks[] = {"none", "causal-top-left", "causal-bottom-right", NULL};
    int mask;
    switch (option) {
    case OPTION_SCALE: return set_scale(a, text);
    case OPTION_MASK:
        if (!parse_choice("--mask", text, masks, &mask))
            return false;
        a->mask = (heddle_mask)mask;
        return true;
    case OPTION_WINDOW: return set_window(a, text);
    case OPTION_SOFTCAP: return set_softcap(a, text);
    case OPTION_DROPOUT: j->drops = true; return parse_real("--dropout", text, &a->dropout);
    case OPTION_SEED: j->seeds = true; return parse_seed("--seed", text, &a->seed);
    case OPTION_Q_OFFSET: return parse_int("--q-offset", text, 0, INT64_MAX, &a->q_offset);
    case OPTION_K_OFFSET: return parse_int("--k-offset", text, 0, INT64_MAX, &a->k_offset);
    case OPTION_WHOLE_SQ: return parse_int("--whole-sq", text, 1, INT64_MAX, &a->whole_sq);
    case OPTION_BLOCK_SIZE: return set_blocks(a, text);
    case OPTION_WHOLE_SK: return parse_int("--whole-sk", text, 1, INT64_MAX, &a->whole_sk);
    default: return false;
    }
}

/* ------------------------------------------------------------------------------------------------------- shapes */

/* The lengths of packed sequences: from 0 to the total without a step back. Gives the longest. */
static bool check_cu_seqlens(const file_job *w, int f, int64_t total, int64_t *longest) {
    const npy_array *a = &w->file[f];
    const char *option = job_fields(&w->j)[f].option;
    const int32_t *cu = a->data;
    *longest = 0;
    if (a->rank != 1 || a->count < 1 || cu[0] != 0 || cu[a->count - 1] != total) {
        complain("--%s %s: [sequences + 1] numbers from 0 to the number of rows, %lld, are expected", option,
                 w->path[f], (long long)total);
        return false;
    }
    for (int64_t n = 0; n + 1 < a->count; n++) {
        if (cu[n + 1] < cu[n]) {
            complain("--%s %s: element %lld is %d, less than the %d before it", option, w->path[f], (long long)(n + 1),
                     cu[n + 1], cu[n]);
            return false;
        }
        *longest = cu[n + 1] - cu[n] > *longest ? cu[n + 1] - cu[n] : *longest;
    }
    return true;
}

/* Numbers of queries or keys of each batch. The library, which must not wait for a GPU, clamps them. */
static bool check_seqlens(const file_job *w, int f, int64_t most) {
    const npy_array *a = &w->file[f];
    const int32_t *lengths = a->data;
    for (int64_t n = 0; lengths && n < a->count; n++)
        if (lengths[n] < 0 || lengths[n] > most) {
            complain("--%s %s: element %lld is %d, but must be from 0 to %lld", job_fields(&w->j)[f].option, w->path[f],
                     (long long)n, lengths[n], (long long)most);
            return false;
        }
    return true;
}

/* k, v and the table of keys in pages. */
static bool paged_dimensions(file_job *w) {
    heddle_attention *a = &w->j.a;
    const npy_array *k = &w->file[K], *v = &w->file[V], *table = &w->file[TABLE], *cu = &w->file[CU_Q];
    const int rank = cu->data ? 3 : 4;
    if (w->file[CU_K].data)
        return complain("--cu-seqlens-k: with --block-table keys are not packed"), false;
    if (w->file[Q].rank != rank || k->rank != 4 || v->rank != 4 || table->rank != 2) {
        complain("with --block-table q is %s, k and v are [pages, heads, page, head dim], and the table has two "
                 "dimensions",
                 cu->data ? "[total_q, h, d]" : "[b, h, sq, d]");
        return false;
    }
    const int64_t *q = w->file[Q].shape;
    a->pages = k->shape[0], a->hk = k->shape[1], a->page = k->shape[2], a->dv = v->shape[3];
    a->table = table->shape[1];
    a->sk = a->table < INT32_MAX && a->page < INT32_MAX ? a->table * a->page : INT64_MAX;
    a->h = q[1], a->d = q[rank - 1];
    if (!cu->data) {
        a->b = q[0], a->sq = q[2];
        return true;
    }
    a->b = cu->count - 1, a->total_q = q[0];
    return check_cu_seqlens(w, CU_Q, a->total_q, &a->sq);
}

static bool packed_dimensions(file_job *w) {
    heddle_attention *a = &w->j.a;
    if (!w->file[CU_Q].data || !w->file[CU_K].data) {
        complain("--cu-seqlens-q and --cu-seqlens-k come together");
        return false;
    }
    if (w->file[Q].rank != 3 || w->file[K].rank != 3 || w->file[V].rank != 3) {
        complain("with --cu-seqlens-q, q, k and v have three dimensions: [total, heads, head dim]");
        return false;
    }
    const int64_t *q = w->file[Q].shape, *k = w->file[K].shape;
    a->total_q = q[0], a->h = q[1], a->d = q[2];
    a->total_k = k[0], a->hk = k[1], a->dv = w->file[V].shape[2];
    a->b = w->file[CU_Q].count - 1;
    return check_cu_seqlens(w, CU_Q, a->total_q, &a->sq) && check_cu_seqlens(w, CU_K, a->total_k, &a->sk);
}

static bool batched_dimensions(file_job *w) {
    heddle_attention *a = &w->j.a;
    int rank = w->file[Q].rank;
    for (int f = Q; f <= V; f++)
        if (w->file[f].rank < 2 || w->file[f].rank > 4 || w->file[f].rank != rank) {
            char shape[128];
            npy_shape_text(w->file[f].rank, w->file[f].shape, shape, sizeof shape);
            complain(
                "--%s %s has shape %s, but [b, h, s, d], [h, s, d] or [s, d], and the same number of dimensions for q, "
                "k and v, is expected",
                job_fields(&w->j)[f].option, w->path[f], shape);
            return false;
        }
    const int64_t *q = w->file[Q].shape + rank, *k = w->file[K].shape + rank;
    a->b = rank > 3 ? q[-4] : 1;
    a->h = rank > 2 ? q[-3] : 1;
    a->hk = rank > 2 ? k[-3] : 1;
    a->sq = q[-2], a->d = q[-1], a->sk = k[-2];
    a->dv = w->file[V].shape[rank - 1];
    return true;
}

static bool set_dimensions(file_job *w) {
    if (!(w->file[TABLE].data                        ? paged_dimensions(w)
          : w->file[CU_Q].data || w->file[CU_K].data ? packed_dimensions(w)
                                                     : batched_dimensions(w)))
        return false;
    if (w->j.a.hk > 0 && w->j.a.dv > 0) /* to the library, 0 would be a default */
        return true;
    complain("--%s %s has a dimension of 0 where heads or head dim are", w->j.a.hk ? "v" : "k",
             w->path[w->j.a.hk ? V : K]);
    return false;
}

static bool takes_broadcast(const tensor_field *t) {
    return t->role == ROLE_INPUT && is_of_scores(t->shape);
}

/* Strides of a file of [b, h, sq, sk] whose leading dimensions may be 1 or left out. */
static bool set_broadcast(const file_job *w, int f, heddle_strides *stride) {
    const npy_array *a = &w->file[f];
    const int64_t full[4] = {w->j.a.b, w->j.a.h, w->j.a.sq, w->j.a.sk};
    int64_t size[4] = {1, 1, 1, 1}, step[4];
    bool fits = a->rank >= 1 && a->rank <= 4;
    for (int i = 0; fits && i < a->rank; i++)
        size[4 - a->rank + i] = a->shape[i];
    for (int i = 0; i < 4; i++)
        fits = fits && (size[i] == full[i] || (size[i] == 1 && i < 3));
    if (!fits) {
        char shape[128], expected[128];
        npy_shape_text(a->rank, a->shape, shape, sizeof shape);
        npy_shape_text(4, full, expected, sizeof expected);
        complain("--%s %s has shape %s, which does not broadcast to [b, h, sq, sk] = %s", job_fields(&w->j)[f].option,
                 w->path[f], shape, expected);
        return false;
    }
    step[2] = size[3], step[1] = size[2] * size[3], step[0] = size[1] * step[1];
    for (int i = 0; i < 3; i++)
        step[i] = size[i] == 1 && full[i] != 1 ? HEDDLE_BROADCAST : step[i];
    *stride = (heddle_strides){step[0], step[1], step[2]};
    return true;
}

static bool set_features(file_job *w) {
    heddle_attention *a = &w->j.a;
    const tensor_field *t = job_fields(&w->j);
    a->features |= file_job_features(w);
    if (w->path[DBIAS] && !w->path[BIAS])
        return complain("--dbias needs --bias"), false;
    if (w->path[DSINKS] && !w->path[SINKS])
        return complain("--dsinks needs --sinks"), false;
    if (w->file[ALIBI].data && w->file[ALIBI].rank == 2)
        a->alibi_stride_b = a->h;
    const npy_array *rows = &w->file[BLOCK_ROWS], *columns = &w->file[BLOCK_COLUMNS];
    if (!rows->data != !columns->data)
        return complain("--block-rows and --block-columns come together"), false;
    if (a->block_q && !rows->data)
        return complain("--block-size is for the blocks of --block-rows and --block-columns"), false;
    if (rows->data) {
        a->block_q = a->block_q ? a->block_q : 128;
        a->block_k = a->block_k ? a->block_k : 128;
        a->blocks_of_b = rows->rank == 3 && rows->shape[0] != 1;
        a->blocks_of_h = rows->rank == 3 && rows->shape[1] != 1;
        w->j.columns = columns->count;
        if (rows->count < 1 || ((const int32_t *)rows->data)[rows->count - 1] != columns->count)
            return complain("--block-rows %s: the last number must be that of all columns, %lld", w->path[BLOCK_ROWS],
                            (long long)columns->count),
                   false;
    }
    for (int f = 0; t[f].name; f++)
        if (takes_broadcast(&t[f]) && w->file[f].data &&
            !set_broadcast(w, f, (heddle_strides *)(void *)((char *)a + t[f].stride)))
            return false;
    a->dbias_stride = a->bias_stride;
    return true;
}

static int run(file_job *w) {
    uint64_t broadcast = 0;
    for (int f = 0; job_fields(&w->j)[f].name; f++)
        broadcast |= (uint64_t)takes_broadcast(&job_fields(&w->j)[f]) << f;
    for (int f = Q; f <= V; f++)
        if (!w->path[f])
            return complain("--%s FILE is missing; see heddle attention --help", job_fields(&w->j)[f].option);
    if (w->j.seeds && !w->j.drops)
        return complain("--seed is given without --dropout, which it is for");
    if (!file_job_read(w, Q) || !set_dimensions(w) || !set_features(w) || !file_job_check_shapes(w, Q, broadcast) ||
        !check_seqlens(w, LEN_Q, w->j.a.sq) || !check_seqlens(w, LEN_K, w->j.a.sk) || !file_job_choose_dtype(w, Q) ||
        !device_ready(w->device))
        return EXIT_TROUBLE;
    return file_job_finish(w, Q);
}

int cmd_attention(int argc, char **argv) {
    static const file_command command = {"attention", usage, own_options, set_option, run};
    file_job w = {.j = {.a = {.size = sizeof w.j.a}, .l = {.size = sizeof w.j.l}}};
    return file_job_main(&command, &w, argc, argv);
}
