/* SPDX-License-Identifier: Apache-2.0
 *
 * The transformer of train_gpt.c, forward and backward, over one number type. The includer defines, once per type,
 *     REAL         float or double
 *     REAL_DTYPE   heddle's name of it
 *     NAME(x)      x with a suffix of its own
 * Each layer is   x -> [norm-linear -> attention -> linear] + x -> [norm-linear -> GELU -> linear] + x   (pre-norm),
 * where heddle does every norm-linear and every attention. All tensors are row-major with one row per token. */
#include "train_gpt_gpu.h"
#include "train_gpt_shared.h"

/* Every name below gets the suffix of its number type. */
#define gpt_layer NAME(gpt_layer)
#define gpt NAME(gpt)
#define take NAME(take)
#define place_activations NAME(place_activations)
#define gpt_create NAME(gpt_create)
#define gpt_destroy NAME(gpt_destroy)
#define value_of NAME(value_of)
#define gradient_of NAME(gradient_of)
#define workspace_for NAME(workspace_for)
#define linear_call NAME(linear_call)
#define linear_begin NAME(linear_begin)
#define norm_linear_forward NAME(norm_linear_forward)
#define norm_linear_backward NAME(norm_linear_backward)
#define attention_problem NAME(attention_problem)
#define attention_forward NAME(attention_forward)
#define attention_backward NAME(attention_backward)
#define vector NAME(vector)
#define pack_tiles NAME(pack_tiles)
#define tile_product NAME(tile_product)
#define add_product NAME(add_product)
#define linear_forward NAME(linear_forward)
#define linear_backward NAME(linear_backward)
#define gelu_block NAME(gelu_block)
#define gelu NAME(gelu)
#define add_to NAME(add_to)
#define embed NAME(embed)
#define embed_backward NAME(embed_backward)
#define gpt_loss NAME(gpt_loss)
#define gpt_forward NAME(gpt_forward)
#define gpt_backward NAME(gpt_backward)

/* ------------------------------------------------------------------------------------------------- the model */

typedef struct gpt_layer {
    REAL *x, *mean1, *rstd1, *qkv, *o, *lse; /* x: what the layer is given */
    REAL *mid, *mean2, *rstd2, *up, *act;    /* mid: x after attention; up: after GELU its derivative */
} gpt_layer;

typedef struct gpt {
    gpt_config c;
    gpt_tensor *table;
    int64_t parameters;
    REAL *value, *gradient, *moment1, *moment2;
    /* Every activation lies in this one block of memory. */
    REAL *activations;
    gpt_layer *layers;
    REAL *x, *mean, *rstd, *logits, *losses;
    REAL *dx, *dnorm, *dqkv, *dout, *dup;
    void *workspace;
    size_t workspace_bytes;
    double attention_seconds, norm_linear_seconds;
} gpt;

static REAL *take(REAL *base, int64_t *used, int64_t n) {
    REAL *p = base ? base + *used : NULL;
    *used += (n + 15) / 16 * 16;
    return p;
}

/* Gives every activation its place behind base; returns how many elements that takes (base may be NULL to ask). */
static int64_t place_activations(gpt *g, REAL *base) {
    const int64_t rows = (int64_t)g->c.batch * g->c.context, w = g->c.width;
    int64_t used = 0;
    for (int i = 0; i < g->c.layers; i++) {
        gpt_layer *l = &g->layers[i];
        l->x = take(base, &used, rows * w);
        l->mean1 = take(base, &used, rows);
        l->rstd1 = take(base, &used, rows);
        l->qkv = take(base, &used, rows * 3 * w);
        l->o = take(base, &used, rows * w);
        l->lse = take(base, &used, rows * g->c.heads);
        l->mid = take(base, &used, rows * w);
        l->mean2 = take(base, &used, rows);
        l->rstd2 = take(base, &used, rows);
        l->up = take(base, &used, rows * 4 * w);
        l->act = take(base, &used, rows * 4 * w);
    }
    g->x = take(base, &used, rows * w);
    g->mean = take(base, &used, rows);
    g->rstd = take(base, &used, rows);
    g->logits = take(base, &used, rows * g->c.vocabulary);
    g->losses = take(base, &used, rows);
    g->dx = take(base, &used, rows * w);
    g->dnorm = take(base, &used, rows * w);
    g->dqkv = take(base, &used, rows * 3 * w);
    g->dout = take(base, &used, rows * w);
    g->dup = take(base, &used, rows * 4 * w);
    return used;
}

static gpt gpt_create(const gpt_config *c) {
    gpt g = {.c = *c};
    g.table = allocate((size_t)tensor_count(c) * sizeof *g.table);
    g.layers = allocate((size_t)c->layers * sizeof *g.layers);
    g.parameters = lay_out_tensors(c, g.table);
    REAL **flat[] = {&g.value, &g.gradient, &g.moment1, &g.moment2};
    for (int i = 0; i < 4; i++)
        *flat[i] = allocate((size_t)g.parameters * sizeof(REAL));
    g.activations = allocate((size_t)place_activations(&g, NULL) * sizeof(REAL));
    place_activations(&g, g.activations);
    return g;
}

static void gpt_destroy(gpt *g) {
    void *all[] = {g->table, g->layers, g->value, g->gradient, g->moment1, g->moment2, g->activations, g->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static REAL *value_of(const gpt *g, int tensor) {
    return g->value + g->table[tensor].at;
}

static REAL *gradient_of(const gpt *g, int tensor) {
    return g->gradient + g->table[tensor].at;
}

/* ---------------------------------------------------------------------- what heddle does: norm-linear, attention */

static void *workspace_for(gpt *g, size_t bytes) {
    if (bytes > g->workspace_bytes) {
        free(g->workspace);
        g->workspace = allocate(bytes);
        g->workspace_bytes = bytes;
    }
    return g->workspace;
}

/* A norm-linear whose four tensors begin at `norm`, with the tensors that both passes read. */
typedef struct linear_call {
    heddle_norm_linear a;
    heddle_norm_linear_data t;
    gpu_call gpu;
    size_t x, y, w, k, n, m; /* bytes */
} linear_call;

static linear_call linear_begin(gpt *g, int norm, int64_t m, const REAL *x) {
    const int64_t k = g->table[norm + WEIGHT].cols, n = g->table[norm + WEIGHT].rows;
    const size_t r = sizeof(REAL);
    linear_call c = {.a = {.size = sizeof c.a, .dtype = REAL_DTYPE, .device = g->c.device, .m = m, .k = k, .n = n},
                     .t = {.size = sizeof c.t},
                     .gpu = gpu_begin(g->c.device),
                     .x = (size_t)(m * k) * r,
                     .y = (size_t)(m * n) * r,
                     .w = (size_t)(n * k) * r,
                     .k = (size_t)k * r,
                     .n = (size_t)n * r,
                     .m = (size_t)m * r};
    c.t.x = gpu_tensor(&c.gpu, x, c.x, false);
    c.t.gamma = gpu_tensor(&c.gpu, value_of(g, norm + GAMMA), c.k, false);
    c.t.beta = gpu_tensor(&c.gpu, value_of(g, norm + BETA), c.k, false);
    c.t.w = gpu_tensor(&c.gpu, value_of(g, norm + WEIGHT), c.w, false);
    return c;
}

/* y = norm(x)·Wᵀ + bias */
static void norm_linear_forward(gpt *g, int norm, int64_t m, const REAL *x, REAL *mean, REAL *rstd, REAL *y) {
    const double start = seconds_now();
    size_t bytes;
    linear_call c = linear_begin(g, norm, m, x);
    c.t.bias = gpu_tensor(&c.gpu, value_of(g, norm + BIAS), c.n, false);
    c.t.y = gpu_tensor(&c.gpu, y, c.y, true);
    c.t.mean = gpu_tensor(&c.gpu, mean, c.m, true);
    c.t.rstd = gpu_tensor(&c.gpu, rstd, c.m, true);
    must(heddle_norm_linear_workspace(&c.a, HEDDLE_FORWARD, &bytes), "norm-linear");
    void *workspace = gpu_tensor(&c.gpu, workspace_for(g, bytes), bytes, false);
    must(heddle_norm_linear_forward(&c.a, &c.t, workspace, bytes, NULL), "norm-linear forward");
    gpu_end(&c.gpu);
    g->norm_linear_seconds += seconds_now() - start;
}

static void norm_linear_backward(gpt *g, int norm, int64_t m, const REAL *x, REAL *mean, REAL *rstd, const REAL *dy,
                                 REAL *dx) {
    const double start = seconds_now();
    size_t bytes;
    linear_call c = linear_begin(g, norm, m, x);
    c.t.mean = gpu_tensor(&c.gpu, mean, c.m, false);
    c.t.rstd = gpu_tensor(&c.gpu, rstd, c.m, false);
    c.t.dy = gpu_tensor(&c.gpu, dy, c.y, false);
    c.t.dx = gpu_tensor(&c.gpu, dx, c.x, true);
    c.t.dgamma = gpu_tensor(&c.gpu, gradient_of(g, norm + GAMMA), c.k, true);
    c.t.dbeta = gpu_tensor(&c.gpu, gradient_of(g, norm + BETA), c.k, true);
    c.t.dw = gpu_tensor(&c.gpu, gradient_of(g, norm + WEIGHT), c.w, true);
    c.t.dbias = gpu_tensor(&c.gpu, gradient_of(g, norm + BIAS), c.n, true);
    must(heddle_norm_linear_workspace(&c.a, HEDDLE_BACKWARD, &bytes), "norm-linear");
    void *workspace = gpu_tensor(&c.gpu, workspace_for(g, bytes), bytes, false);
    must(heddle_norm_linear_backward(&c.a, &c.t, workspace, bytes, NULL), "norm-linear backward");
    gpu_end(&c.gpu);
    g->norm_linear_seconds += seconds_now() - start;
}

/* q, k and v lie side by side in each row of qkv, [b, s, 3, h, d], and stay there: the strides say so. The last `sq` of
 * `sk` positions ask; with fewer queries than keys the earlier rows of qkv are the cache of keys and values. */
static heddle_attention attention_problem(const gpt *g, int b, int sq, int sk) {
    const int64_t w = g->c.width, d = w / g->c.heads;
    const heddle_strides packed = {.b = sk * 3 * w, .h = d, .s = 3 * w}, rows = {.b = sq * w, .h = d, .s = w};
    return (heddle_attention){.size = sizeof(heddle_attention),
                              .dtype = REAL_DTYPE,
                              .device = g->c.device,
                              .b = b,
                              .h = g->c.heads,
                              .sq = sq,
                              .sk = sk,
                              .d = d,
                              .mask = HEDDLE_CAUSAL_BOTTOM_RIGHT,
                              .q_stride = packed,
                              .k_stride = packed,
                              .v_stride = packed,
                              .o_stride = rows,
                              .do_stride = rows,
                              .dq_stride = packed,
                              .dk_stride = packed,
                              .dv_stride = packed};
}

static void attention_forward(gpt *g, int b, int sq, int sk, const REAL *qkv, REAL *o, REAL *lse) {
    const double start = seconds_now();
    const int64_t w = g->c.width;
    const heddle_attention a = attention_problem(g, b, sq, sk);
    const size_t row = (size_t)(b * w) * sizeof(REAL), rows = (size_t)(b * sq) * sizeof(REAL);
    size_t bytes;
    gpu_call gpu = gpu_begin(g->c.device);
    const REAL *in = gpu_tensor(&gpu, qkv, (size_t)sk * 3 * row, false);
    const heddle_attention_data t = {.size = sizeof t,
                                     .q = in + (sk - sq) * 3 * w,
                                     .k = in + w,
                                     .v = in + 2 * w,
                                     .o = gpu_tensor(&gpu, o, (size_t)sq * row, true),
                                     .lse = gpu_tensor(&gpu, lse, (size_t)g->c.heads * rows, true)};
    must(heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes), "attention");
    void *workspace = gpu_tensor(&gpu, workspace_for(g, bytes), bytes, false);
    must(heddle_attention_forward(&a, &t, workspace, bytes, NULL), "attention forward");
    gpu_end(&gpu);
    g->attention_seconds += seconds_now() - start;
}

static void attention_backward(gpt *g, int b, int s, const REAL *qkv, REAL *o, REAL *lse, const REAL *dout,
                               REAL *dqkv) {
    const double start = seconds_now();
    const int64_t w = g->c.width;
    const heddle_attention a = attention_problem(g, b, s, s);
    const size_t all = (size_t)(b * s * w) * sizeof(REAL), rows = (size_t)(b * s) * sizeof(REAL);
    size_t bytes;
    gpu_call gpu = gpu_begin(g->c.device);
    const REAL *in = gpu_tensor(&gpu, qkv, 3 * all, false);
    REAL *out = gpu_tensor(&gpu, dqkv, 3 * all, true);
    const heddle_attention_data t = {.size = sizeof t,
                                     .q = in,
                                     .k = in + w,
                                     .v = in + 2 * w,
                                     .o = gpu_tensor(&gpu, o, all, false),
                                     .lse = gpu_tensor(&gpu, lse, (size_t)g->c.heads * rows, false),
                                     .dout = gpu_tensor(&gpu, dout, all, false),
                                     .dq = out,
                                     .dk = out + w,
                                     .dv = out + 2 * w};
    must(heddle_attention_workspace(&a, HEDDLE_BACKWARD, &bytes), "attention");
    void *workspace = gpu_tensor(&gpu, workspace_for(g, bytes), bytes, false);
    must(heddle_attention_backward(&a, &t, workspace, bytes, NULL), "attention backward");
    gpu_end(&gpu);
    g->attention_seconds += seconds_now() - start;
}

/* ------------------------------------------------------------------------- the plain linear, a blocked product */

typedef REAL vector __attribute__((vector_size(32), aligned(sizeof(REAL)), may_alias));

/* out[tile][p][i] = in(tile·TILE + i, p), zero past `count`. */
static void pack_tiles(int64_t count, int64_t k, const REAL *in, int64_t across, int64_t along, REAL *out) {
    for (int64_t first = 0; first < count; first += TILE, in += TILE * across, out += k * TILE) {
        const int64_t here = at_most(count - first, TILE);
        for (int64_t p = 0; p < k; p++)
            for (int64_t i = 0; i < TILE; i++)
                out[p * TILE + i] = i < here ? in[i * across + p * along] : 0;
    }
}

/* c[m,n] += a·b for one tile of packed a and b. */
PER_PROCESSOR static void tile_product(int64_t m, int64_t n, int64_t k, const REAL *a, const REAL *b, REAL *c,
                                       int64_t c_stride) {
    enum { LANES = sizeof(vector) / sizeof(REAL), VECTORS = TILE / LANES };
    vector sum[TILE][VECTORS] = {0};
    for (int64_t p = 0; p < k; p++)
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                sum[i][j] += a[p * TILE + i] * *(const vector *)(b + p * TILE + j * LANES);
    REAL out[TILE][TILE];
    memcpy(out, sum, sizeof out);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            c[i * c_stride + j] += out[i][j];
}

/* c[m,n] += a[m,k]·b[k,n]; a and b go by two strides each (down, right), so that a transpose is a swap of them. */
static void add_product(int64_t m, int64_t n, int64_t k, const REAL *a, int64_t a_down, int64_t a_right, const REAL *b,
                        int64_t b_down, int64_t b_right, REAL *c) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i0 = 0; i0 < m; i0 += BLOCK)
        for (int64_t j0 = 0; j0 < n; j0 += BLOCK) {
            REAL packed_a[BLOCK * BLOCK], packed_b[BLOCK * BLOCK];
            const int64_t mb = at_most(m - i0, BLOCK), nb = at_most(n - j0, BLOCK);
            for (int64_t p0 = 0; p0 < k; p0 += BLOCK) {
                const int64_t kb = at_most(k - p0, BLOCK);
                pack_tiles(mb, kb, a + i0 * a_down + p0 * a_right, a_down, a_right, packed_a);
                pack_tiles(nb, kb, b + p0 * b_down + j0 * b_right, b_right, b_down, packed_b);
                for (int64_t j = 0; j < nb; j += TILE)
                    for (int64_t i = 0; i < mb; i += TILE)
                        tile_product(at_most(mb - i, TILE), at_most(nb - j, TILE), kb, packed_a + i * kb,
                                     packed_b + j * kb, c + (i0 + i) * n + j0 + j, n);
            }
        }
}

/* y = base + x·Wᵀ + bias, with the two tensors that begin at `weight`. */
static void linear_forward(gpt *g, int weight, int64_t m, const REAL *x, const REAL *base, REAL *y) {
    const int64_t n = g->table[weight].rows, k = g->table[weight].cols;
    const REAL *bias = value_of(g, weight + 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            y[i * n + j] = base[i * n + j] + bias[j];
    add_product(m, n, k, x, k, 1, value_of(g, weight), 1, k, y);
}

static void linear_backward(gpt *g, int weight, int64_t m, const REAL *x, const REAL *dy, REAL *dx) {
    const int64_t n = g->table[weight].rows, k = g->table[weight].cols;
    REAL *dw = gradient_of(g, weight), *dbias = gradient_of(g, weight + 1);
    memset(dx, 0, (size_t)(m * k) * sizeof *dx);
    memset(dw, 0, (size_t)(n * k) * sizeof *dw);
    memset(dbias, 0, (size_t)n * sizeof *dbias);
    add_product(m, k, n, dy, n, 1, value_of(g, weight), k, 1, dx);
    add_product(n, k, m, dy, 1, n, x, k, 1, dw);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            dbias[j] += dy[i * n + j];
}

/* ----------------------------------------------------------------------------------------- GELU, embedding, loss */

/* act = gelu(up) in the tanh form, x·sigmoid(2u) with u = sqrt(2/pi)(x + 0.044715 x³); up becomes the derivative. */
PER_PROCESSOR static void gelu_block(int64_t n, REAL *restrict up, REAL *restrict act) {
    const REAL twice_root = (REAL)1.59576912160573071176, cubic = (REAL)0.044715;
    for (int64_t i = 0; i < n; i++)
        act[i] = exp(-twice_root * (up[i] + cubic * up[i] * up[i] * up[i]));
    for (int64_t i = 0; i < n; i++) {
        const REAL x = up[i], gate = 1 / (1 + act[i]);
        act[i] = x * gate;
        up[i] = gate + x * gate * (1 - gate) * twice_root * (1 + 3 * cubic * x * x);
    }
}

static void gelu(int64_t n, REAL *up, REAL *act) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i += GELU_BLOCK)
        gelu_block(at_most(n - i, GELU_BLOCK), up + i, act + i);
}

static void add_to(int64_t n, const REAL *from, REAL *to) {
    for (int64_t i = 0; i < n; i++)
        to[i] += from[i];
}

static void embed(const gpt *g, const uint8_t *tokens, int b, int past, int s, REAL *x) {
    const int64_t w = g->c.width;
    const REAL *token = value_of(g, TOKEN), *position = value_of(g, POSITION);
    for (int64_t i = 0; i < (int64_t)b * s; i++)
        for (int64_t e = 0; e < w; e++)
            x[i * w + e] = token[tokens[i] * w + e] + position[(past + i % s) * w + e];
}

static void embed_backward(gpt *g, const uint8_t *tokens, int b, int s) {
    const int64_t w = g->c.width;
    REAL *token = gradient_of(g, TOKEN), *position = gradient_of(g, POSITION);
    memset(token, 0, (size_t)(g->c.vocabulary * w) * sizeof *token);
    memset(position, 0, (size_t)(g->c.context * w) * sizeof *position);
    for (int64_t i = 0; i < (int64_t)b * s; i++) {
        add_to(w, g->dx + i * w, token + tokens[i] * w);
        add_to(w, g->dx + i * w, position + i % s * w);
    }
}

/* The mean cross-entropy of the logits, in nats; they become their own gradient. */
static double gpt_loss(gpt *g, const uint8_t *targets, int64_t rows) {
    const int64_t v = g->c.vocabulary;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        REAL *logit = g->logits + i * v, top = logit[0], sum = 0, wanted = logit[targets[i]];
        for (int64_t j = 1; j < v; j++)
            top = logit[j] > top ? logit[j] : top;
        for (int64_t j = 0; j < v; j++)
            sum += logit[j] = exp(logit[j] - top);
        for (int64_t j = 0; j < v; j++)
            logit[j] = (logit[j] / sum - (j == targets[i])) / (REAL)rows;
        g->losses[i] = log(sum) + top - wanted;
    }
    double total = 0;
    for (int64_t i = 0; i < rows; i++)
        total += (double)g->losses[i];
    return total / (double)rows;
}

/* ---------------------------------------------------------------------------------------------- the whole model */

/* Logits for tokens[b, s] at the positions from `past` on. With past > 0, b must be 1 and the earlier positions must
 * have gone through here already; their keys and values are still in qkv. Row `past + i` belongs to token i. */
static void gpt_forward(gpt *g, const uint8_t *tokens, int b, int past, int s) {
    const int64_t w = g->c.width, m = (int64_t)b * s, r = past;
    for (int i = 0; i < g->c.layers; i++) {
        const gpt_layer *l = &g->layers[i];
        REAL *next = i + 1 < g->c.layers ? g->layers[i + 1].x : g->x;
        if (i == 0)
            embed(g, tokens, b, past, s, l->x + r * w);
        norm_linear_forward(g, layer_tensor(i, NORM_QKV), m, l->x + r * w, l->mean1 + r, l->rstd1 + r,
                            l->qkv + r * 3 * w);
        attention_forward(g, b, s, past + s, l->qkv, l->o + r * w, past ? NULL : l->lse);
        linear_forward(g, layer_tensor(i, W_PROJ), m, l->o + r * w, l->x + r * w, l->mid + r * w);
        norm_linear_forward(g, layer_tensor(i, NORM_UP), m, l->mid + r * w, l->mean2 + r, l->rstd2 + r,
                            l->up + r * 4 * w);
        gelu(m * 4 * w, l->up + r * 4 * w, l->act + r * 4 * w);
        linear_forward(g, layer_tensor(i, W_DOWN), m, l->act + r * 4 * w, l->mid + r * w, next + r * w);
    }
    norm_linear_forward(g, NORM_VOCAB, m, g->x + r * w, g->mean + r, g->rstd + r, g->logits + r * g->c.vocabulary);
}

/* The gradient of every parameter, after gpt_forward with past = 0 and gpt_loss of the same tokens. */
static void gpt_backward(gpt *g, const uint8_t *tokens, int b, int s) {
    const int64_t w = g->c.width, m = (int64_t)b * s;
    norm_linear_backward(g, NORM_VOCAB, m, g->x, g->mean, g->rstd, g->logits, g->dx);
    for (int i = g->c.layers - 1; i >= 0; i--) {
        const gpt_layer *l = &g->layers[i];
        linear_backward(g, layer_tensor(i, W_DOWN), m, l->act, g->dx, g->dup);
        for (int64_t j = 0; j < m * 4 * w; j++)
            g->dup[j] *= l->up[j];
        norm_linear_backward(g, layer_tensor(i, NORM_UP), m, l->mid, l->mean2, l->rstd2, g->dup, g->dnorm);
        add_to(m * w, g->dnorm, g->dx);
        linear_backward(g, layer_tensor(i, W_PROJ), m, l->o, g->dx, g->dout);
        attention_backward(g, b, s, l->qkv, l->o, l->lse, g->dout, g->dqkv);
        norm_linear_backward(g, layer_tensor(i, NORM_QKV), m, l->x, l->mean1, l->rstd1, g->dqkv, g->dnorm);
        add_to(m * w, g->dnorm, g->dx);
    }
    embed_backward(g, tokens, b, s);
}
