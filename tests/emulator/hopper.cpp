/* SPDX-License-Identifier: Apache-2.0
 * Hopper's own: what threads have told the copy engine and the tensor cores, and go on. Each thing is done as early or as late as a GPU might
 * do it, by EMULATOR_SEED: what nobody has waited for is NaN until then, and what is read late is what somebody wrote there too early. */
#include "hopper.h"

#include "run.h"

#include <algorithm>
#include <math.h>
#include <string.h>
#include <vector>

#define UNSET 0xff
#define DIMENSIONS 4
#define MOST_COLUMNS 256 /* of a product */
#define ATOM 1024        /* bytes of eight rows, which the swizzle of 128 bytes stays in */

/* -------------------------------------------------------------------------------------------------------- mbarriers */

#define MADE 0x2a5u

/* Eight bytes of shared memory. */
struct mbarrier {
    int32_t bytes; /* told of and not there yet; may come before they are told of */
    uint32_t wanted : 10, left : 10, phase : 1, made : 11;
};
static_assert(sizeof(mbarrier) == 8, "as PTX has it");

static mbarrier *barrier_at(uint32_t at) {
    mbarrier *b = (mbarrier *)emulator_shared(at, sizeof(mbarrier));
    if (b->made != MADE)
        emulator_fail("there is no barrier at %#x", at);
    return b;
}

static void end_phase(mbarrier *b) {
    if (b->left || b->bytes)
        return;
    b->left = b->wanted;
    b->phase ^= 1;
    emulator_wake(b);
}

void hopper_barrier(uint32_t at, int arrivals) {
    const mbarrier made = {0, (unsigned)arrivals & 0x3ff, (unsigned)arrivals & 0x3ff, 0, MADE};
    memcpy(emulator_shared(at, sizeof made), &made, sizeof made);
}

void hopper_arrive(uint32_t at, int bytes) {
    mbarrier *b = barrier_at(at);
    if (!b->left)
        emulator_fail("more than %d arrivals at the barrier at %#x", (int)b->wanted, at);
    b->bytes += bytes;
    b->left--;
    end_phase(b);
}

static void bring(mbarrier *b, int bytes) {
    b->bytes -= bytes;
    end_phase(b);
}

void hopper_wait(uint32_t at, int parity) {
    const mbarrier *b = barrier_at(at);
    while (b->phase == (unsigned)parity)
        emulator_sleep(b);
}

/* ------------------------------------------------------------------------------------------------------ copy engine */

/* A tensor map's 128 bytes. Two bytes an element, the first extent in boxes of 64. */
struct box_map {
    char *base;
    uint64_t extent[DIMENSIONS], stride[DIMENSIONS - 1];
    uint32_t box[DIMENSIONS], rank;
};
static_assert(sizeof(box_map) <= 128, "a tensor map");

void hopper_encode(void *map, unsigned rank, void *base, const uint64_t *extents, const uint64_t *strides,
                   const uint32_t *box) {
    box_map m = {};
    m.base = (char *)base;
    m.rank = rank;
    for (unsigned x = 0; x < DIMENSIONS; x++) {
        m.extent[x] = x < rank ? extents[x] : 1;
        m.box[x] = x < rank ? box[x] : 1;
        if (x + 1 < rank)
            m.stride[x] = strides[x];
    }
    memcpy(map, &m, sizeof m);
}

void hopper_move(void *map, void *base) {
    memcpy(map, &base, sizeof base);
}

struct engine_copy {
    mbarrier *barrier;
    char *to;
    const char *from; /* of a bulk copy; NULL: a box */
    char sent[16];    /* where its registers lie */
    bool is_sent;
    int bytes;
    box_map map;
    int x[DIMENSIONS];
};
static std::vector<engine_copy> copies;

/* Sixteen bytes at `at` of shared memory, whose 1024 bytes the swizzle of 128 bytes moves within: chunk c of row r is chunk c ^ r. */
static uint32_t swizzled(uint32_t at) {
    return at ^ (at >> 7 & 7) << 4;
}

/* Rows of 128 bytes; what lies outside of the tensor is 0. */
static void bring_box(const engine_copy *c) {
    const box_map *m = &c->map;
    uint32_t row = 0;
    for (uint32_t x3 = 0; x3 < m->box[3]; x3++)
        for (uint32_t x2 = 0; x2 < m->box[2]; x2++)
            for (uint32_t x1 = 0; x1 < m->box[1]; x1++, row++) {
                const int64_t at[DIMENSIONS] = {0, c->x[1] + (int64_t)x1, c->x[2] + (int64_t)x2, c->x[3] + (int64_t)x3};
                bool inside = true;
                const char *from = m->base;
                for (int d = 1; d < DIMENSIONS; d++) {
                    inside &= at[d] >= 0 && (uint64_t)at[d] < m->extent[d];
                    from += at[d] * (int64_t)m->stride[d - 1];
                }
                for (uint32_t x0 = 0; x0 < 64; x0++) {
                    const int64_t column = c->x[0] + (int64_t)x0;
                    const uint32_t to = row * 128 + x0 * 2;
                    char *const there = c->to + (to ^ (row & 7) << 4);
                    if (inside && column >= 0 && (uint64_t)column < m->extent[0])
                        memcpy(there, from + column * 2, 2);
                    else
                        memset(there, 0, 2);
                }
            }
}

static void finish_copy(size_t x) {
    const engine_copy c = copies[x];
    copies.erase(copies.begin() + (long)x);
    if (c.is_sent)
        memcpy(c.to, c.sent, (size_t)c.bytes);
    else if (c.from)
        memcpy(c.to, c.from, (size_t)c.bytes);
    else
        bring_box(&c);
    bring(c.barrier, c.bytes);
}

bool hopper_go_on(void) {
    if (copies.empty())
        return false;
    finish_copy(emulator_random() % copies.size());
    return true;
}

/* Mostly later. */
static void tell_engine(const engine_copy &c) {
    memset(c.to, UNSET, (size_t)c.bytes);
    copies.push_back(c);
    if (emulator_random() % 4 == 0)
        hopper_go_on();
}

static char *copied_to(uint32_t to, int bytes) {
    for (int x = 0; x < bytes; x += 16)
        emulator_shared(to + (uint32_t)x, 16);
    return emulator_shared(to, 16);
}

void hopper_copy_box(uint32_t to, const void *map, uint32_t barrier, const int *x, unsigned rank, unsigned blocks) {
    engine_copy c = {};
    memcpy(&c.map, map, sizeof c.map);
    c.bytes = (int)(128 * c.map.box[1] * c.map.box[2] * c.map.box[3]);
    memcpy(c.x, x, rank * sizeof *x);
    if (c.map.rank != rank || c.map.box[0] != 64 || to % ATOM)
        emulator_fail("a box of rank %u by a map of rank %u to %#x", rank, c.map.rank, to);
    for (unsigned block = 0; block == 0 || blocks >> block; block++)
        if (!blocks || blocks >> block & 1) {
            c.to = copied_to(blocks ? emulator_address_in(to, (int)block) : to, c.bytes);
            c.barrier = barrier_at(blocks ? emulator_address_in(barrier, (int)block) : barrier);
            tell_engine(c);
        }
}

void hopper_copy(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    engine_copy c = {};
    if (bytes <= 0 || bytes % 16 || (uintptr_t)from % 16)
        emulator_fail("%d bytes to be copied from %p", bytes, from);
    c.to = copied_to(to, bytes);
    c.from = (const char *)from;
    c.bytes = bytes;
    c.barrier = barrier_at(barrier);
    tell_engine(c);
}

void hopper_send(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    engine_copy c = {};
    c.to = copied_to(to, bytes);
    c.is_sent = true;
    memcpy(c.sent, from, (size_t)bytes);
    c.bytes = bytes;
    c.barrier = barrier_at(barrier);
    tell_engine(c);
}

void hopper_arrive_behind_copies(uint32_t at) {
    emulator_commit();
    emulator_wait(0);
    hopper_arrive(at, 0);
}

/* ------------------------------------------------------------------------------------------------- sums and stores */

/* What a thread has told the engine to add or to store: told, read, and at last done. */
struct engine_store {
    unsigned thread;
    float *to; /* of a sum; NULL: a box */
    const char *from;
    int bytes;
    box_map map;
    int x[DIMENSIONS];
    std::vector<char> read;
};
static std::vector<engine_store> stores;

static void read_store(engine_store *s) {
    if (s->read.empty())
        s->read.assign(s->from, s->from + s->bytes);
}

static void finish_sum(const engine_store *s) {
    for (int x = 0; x < s->bytes / 4; x++) {
        float f;
        memcpy(&f, s->read.data() + 4 * x, 4);
        s->to[x] += f;
    }
}

/* Of a matrix. As an H200 has it, 16 bytes of which the first are inside are stored whole. */
static void finish_box(const engine_store *s) {
    const box_map *m = &s->map;
    for (uint32_t row = 0; row < m->box[1]; row++)
        for (uint32_t x0 = 0; x0 < 64; x0++) {
            const int64_t y = s->x[1] + (int64_t)row, column = s->x[0] + (int64_t)x0, first = column - x0 % 8;
            const uint32_t from = (row * 128 + x0 * 2) ^ (row & 7) << 4;
            if (y >= 0 && (uint64_t)y < m->extent[1] && first >= 0 && (uint64_t)first < m->extent[0])
                memcpy(m->base + y * (int64_t)m->stride[0] + column * 2, s->read.data() + from, 2);
        }
}

static void finish_store(engine_store *s) {
    read_store(s);
    s->to ? finish_sum(s) : finish_box(s);
}

static void finish_stores(unsigned thread) {
    for (engine_store &s : stores)
        if (s.thread == thread)
            finish_store(&s);
    stores.erase(
        std::remove_if(stores.begin(), stores.end(), [=](const engine_store &s) { return s.thread == thread; }),
        stores.end());
}

static void tell_to_store(engine_store s, uint32_t from) {
    s.thread = emulator_fiber();
    s.from = copied_to(from, s.bytes);
    stores.push_back(s);
    if (emulator_random() % 3 == 0)
        read_store(&stores.back());
    if (emulator_random() % 3 == 0)
        finish_stores(s.thread);
}

void hopper_add(float *to, uint32_t from, int bytes) {
    if (bytes <= 0 || bytes % 16 || (uintptr_t)to % 16)
        emulator_fail("%d bytes to be added at %p", bytes, (void *)to);
    engine_store s = {};
    s.to = to;
    s.bytes = bytes;
    tell_to_store(s, from);
}

void hopper_store_box(const void *map, uint32_t from, const int *x, unsigned rank) {
    engine_store s = {};
    memcpy(&s.map, map, sizeof s.map);
    memcpy(s.x, x, rank * sizeof *x);
    s.bytes = (int)(128 * s.map.box[1]);
    if (rank != 2 || s.map.rank != rank || s.map.box[0] != 64 || from % ATOM)
        emulator_fail("a box of rank %u by a map of rank %u from %#x", rank, s.map.rank, from);
    tell_to_store(s, from);
}

void hopper_wait_for_reads(void) {
    for (engine_store &s : stores)
        if (s.thread == emulator_fiber())
            read_store(&s);
}

void hopper_wait_for_stores(void) {
    finish_stores(emulator_fiber());
}

/* ----------------------------------------------------------------------------------------------------- products */

/* The accumulators of a warp, while products go on. */
struct accumulator {
    float (*c[EMULATOR_LANES])[4];
    int columns;
    std::vector<float> sums; /* [columns / 8][16][8] */
};
struct product {
    accumulator *of;
    hopper_product p;
    uint32_t rows_at; /* of a in shared memory, from this warp's on */
    uint32_t a[16][8];
    std::vector<uint32_t> b; /* [columns][8]; empty: not read yet */
    int group;
};
struct warp_products {
    std::vector<accumulator *> accumulators;
    std::vector<product> products;
    int committed = 0;
};
static warp_products warps[64];
#define WARPS_OF_GROUP 4

/* Which of its warpgroup a warp is; blocks may have other numbers of warps than multiples of four. */
static unsigned place_in_group(unsigned warp) {
    return warp % (emulator_now.threads.x / EMULATOR_LANES) % WARPS_OF_GROUP;
}

/* Those of this thread's warpgroup. */
static warp_products *warps_of_group(void) {
    const unsigned warp = emulator_fiber() / EMULATOR_LANES;
    return &warps[warp - place_in_group(warp)];
}

/* Element (row, k) of an operand, k of the sum's 16: two bytes. */
static uint16_t element_at(uint64_t described, bool transposed, int row, int k) {
    const uint32_t start = (uint32_t)(described & 0x3fff) << 4, leading = (uint32_t)(described >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(described >> 32 & 0x3fff) << 4;
    const uint32_t at = transposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                   : start + row / 8 * stride + row % 8 * 128 + k * 2;
    uint16_t x;
    memcpy(&x, emulator_shared(swizzled(at), 2), 2);
    return x;
}

static void read_rows(uint64_t described, bool transposed, int first, int rows, uint32_t (*to)[8]) {
    if (described >> 62 != 1)
        emulator_fail("an operand without the swizzle of 128 bytes");
    for (int row = 0; row < rows; row++)
        for (int k = 0; k < 16; k += 2)
            to[row][k / 2] = element_at(described, transposed, first + row, k) |
                             (uint32_t)element_at(described, transposed, first + row, k + 1) << 16;
}

static void read_operands(product *t, int warp) {
    if (!t->p.a)
        read_rows(t->p.a_at, t->p.a_transposed, (int)place_in_group((unsigned)warp) * 16, 16, t->a);
    t->b.resize((size_t)t->p.columns * 8);
    read_rows(t->p.b_at, t->p.b_transposed, 0, t->p.columns, (uint32_t(*)[8])t->b.data());
}

static accumulator *find_accumulator(warp_products *w, void *const *lanes) {
    const hopper_product *first = (const hopper_product *)lanes[0];
    for (accumulator *x : w->accumulators)
        if (x->c[0] == first->c && x->columns == first->columns)
            return x;
    accumulator *made = new accumulator();
    made->columns = first->columns;
    made->sums.resize((size_t)first->columns * 16);
    for (int l = 0; l < EMULATOR_LANES; l++) {
        const hopper_product *p = (const hopper_product *)lanes[l];
        made->c[l] = p->c;
        for (int x = 0; x < first->columns * 16 / EMULATOR_LANES; x++) {
            const int y = x / 4, e = x % 4;
            made->sums[(size_t)(y * 128 + (l / 4 + e / 2 * 8) * 8 + l % 4 * 2 + e % 2)] = p->c[y][e];
        }
    }
    w->accumulators.push_back(made);
    return made;
}

/* Into the threads' registers: what has been summed, or that it is not there yet. */
static void store_sums(const accumulator *a, bool there) {
    for (int l = 0; l < EMULATOR_LANES; l++)
        for (int x = 0; x < a->columns * 16 / EMULATOR_LANES; x++) {
            const int y = x / 4, e = x % 4;
            a->c[l][y][e] = there ? a->sums[(size_t)(y * 128 + (l / 4 + e / 2 * 8) * 8 + l % 4 * 2 + e % 2)] : NAN;
        }
}

static void issue(void *const *lanes) {
    const int warp = (int)emulator_fiber() / EMULATOR_LANES;
    warp_products *w = &warps[warp];
    product t = {};
    t.p = *(const hopper_product *)lanes[0];
    t.of = find_accumulator(w, lanes);
    t.group = w->committed;
    for (int l = 0; l < EMULATOR_LANES && t.p.a; l++)
        for (int x = 0; x < 4; x++)
            t.a[l / 4 + x % 2 * 8][l % 4 + x / 2 * 4] = ((const hopper_product *)lanes[l])->a[x];
    if (emulator_random() % 2)
        read_operands(&t, warp);
    store_sums(t.of, false);
    w->products.push_back(t);
}

void hopper_multiply(const hopper_product *p) {
    emulator_meet(issue, (void *)p);
}

static void multiply(product *t, int warp) {
    if (t->b.empty())
        read_operands(t, warp);
    for (int y = 0; y < t->p.columns / 8; y++) {
        float(*c)[8] = (float(*)[8]) & t->of->sums[(size_t)y * 128];
        if (!t->p.add)
            memset(c, 0, 128 * sizeof(float));
        emulator_multiply(t->p.type, c, t->a[0], &t->b[(size_t)y * 64]);
    }
}

void hopper_commit(void) {
    emulator_meet(
        [](void *const *) {
            warps[emulator_fiber() / EMULATOR_LANES].committed++;
            emulator_wake(warps_of_group());
        },
        nullptr);
}

static void wait_for(void *const *lanes) {
    const int warp = (int)emulator_fiber() / EMULATOR_LANES, groups = *(const int *)lanes[0];
    warp_products *w = &warps[warp];
    for (int x = 0; x < WARPS_OF_GROUP; x++) /* a product is the warpgroup's: it has ended for all */
        for (product &t : warps_of_group()[x].products)
            if (t.group < w->committed - groups && t.b.empty())
                read_operands(&t, x);
    size_t left = 0;
    for (product &t : w->products)
        if (t.group < w->committed - groups)
            multiply(&t, warp);
        else
            w->products[left++] = t;
    w->products.resize(left);
    left = 0;
    for (accumulator *a : w->accumulators) {
        bool busy = false;
        for (const product &t : w->products)
            busy |= t.of == a;
        if (busy) {
            w->accumulators[left++] = a;
            continue;
        }
        store_sums(a, true);
        delete a;
    }
    w->accumulators.resize(left);
}

void hopper_wait_for_products(int groups) {
    const int ended = warps[emulator_fiber() / EMULATOR_LANES].committed - groups;
    for (int x = 0; x < WARPS_OF_GROUP; x++)
        while (warps_of_group()[x].committed < ended)
            emulator_sleep(warps_of_group());
    emulator_meet(wait_for, &groups);
}

void hopper_begin(void) {
    for (warp_products &w : warps) {
        for (accumulator *a : w.accumulators)
            delete a;
        w = warp_products();
    }
    copies.clear();
    stores.clear();
}

const char *hopper_end(void) {
    const char *wrong = NULL;
    for (engine_store &s : stores)
        if (s.read.empty())
            wrong = "a block has ended, and the copy engine may not have read what it is to store";
        else
            finish_store(&s);
    stores.clear();
    return wrong;
}
