/* SPDX-License-Identifier: Apache-2.0
 * What a family of attention kernels supplies: which problems it takes, what it has of the workspace, its launches. Each has one file
 * for that, in its room; plan.c has the list. C only, and pure. */
#ifndef HEDDLE_CUDA_ATTENTION_FAMILY_H
#define HEDDLE_CUDA_ATTENTION_FAMILY_H

#include "cuda/attention/kernels.h"

/* Keys that are written to the workspace in front of all else, in 16 bits: as [b, hk, sk, d], with a mask that hides what is in no page; as
 * pages. */
typedef enum collected_as { NOT_COLLECTED, COLLECTED_ROWS, COLLECTED_PAGES } collected_as;

typedef struct attention_problem {
    const heddle_attention *a;     /* as the families have it: */
    const heddle_attention *made;  /* with a mask in place of its segments and lists of blocks; NULL: it has neither */
    const heddle_attention *given; /* as the caller has it, */
    collected_as collected;        /* and keys as these are */
    const cuda_facts *device;
    heddle_pass pass;
    bool rich;      /* more is asked for than the lean kernels can */
    bool stands_in; /* for a family that needs other pointers: with the workspace of that one */
} attention_problem;

/* The plan, in the part of an attention_plan that is the backend's own: kernels by their numbers, -1 for none; blocks; what lies where in
 * the workspace. */
typedef struct __attribute__((may_alias)) attention_choice {
    void *record, *context; /* the device, for run */
    int family;             /* its place in the list */
    int fwd, dkdv, dq;
    int bwd;                                 /* dkdv and dq in one; small: prep, too */
    int prep;                                /* none: the plain one */
    int light, gather;                       /* before prep, and after bwd */
    int split;                               /* float32 on Hopper */
    int few_fwd, few_prep, few_dkdv, few_dq; /* and sm80's, beside those, for rows that see few keys */
    int dbias;                               /* none: the plain one */
    bool splits_queries;                     /* Q and dO, too */
    int64_t lse_rows;                        /* over all heads */
    int64_t pack, key_shares, tiles_q, tiles_k;
    int64_t blocks; /* of fwd or of dq */
    int64_t blocks_dkdv;
    uint32_t blocks_of_dk; /* of those, where dK and dV have blocks of their own; for Hopper */
    size_t part_o, part_lse, base, rest, flags, sum, few,
        bytes;                              /* offsets in the workspace, and its size; 0: there is none */
    mask_map seen_by_queries, seen_of_keys; /* shapes; tiles_down 0: there is none */
    size_t kinds_q, bits_q, kinds_k, bits_k, seen, dirty, taken; /* offsets, likewise */
    collected_as collected;
    size_t collected_k, collected_v, collected_table, collected_lengths; /* offsets; 0: there is none */
    int64_t split_tiles_q, split_tiles_k;                                /* of a head */
    size_t split_tiles[SPLIT_TENSORS], split_info[SPLIT_TENSORS];        /* offsets */
} attention_choice;

/* Pointers aligned to 16 bytes; in backward dout. Where they are not so, another family stands in. */
enum { NEEDS_ALIGNMENT = 1, NEEDS_DOUT = 2 };

typedef struct attention_family {
    /* Does it take the problem? Then the kernels in c. */
    bool (*takes)(const attention_problem *p, attention_choice *c);
    /* Microseconds that it is predicted to take; NULL: nobody knows. */
    double (*time)(const attention_problem *p);
    /* Blocks, and the workspace behind c->bytes. */
    void (*lay_out)(const attention_problem *p, attention_choice *c);
    /* The launches up to o and lse, or to dq, dk and dv; the tensor maps that they read. */
    void (*launch)(const attention_problem *p, const attention_choice *c, attention_job *job);
    int needs;  /* of the pointers: NEEDS_... */
    bool pages; /* can it read keys from pages? The last of the list can */
    bool bytes; /* does it read a boolean mask's bytes where it has placed no map? */
} attention_family;

extern const attention_family heddle__attention_small, heddle__attention_short, heddle__attention_sm90,
    heddle__attention_sm90_f32, heddle__attention_sm80, heddle__attention_plain;

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static inline size_t align64(size_t n) {
    return (n + 63) / 64 * 64;
}

/* Has it no work at all? */
bool heddle__cuda_is_empty(const heddle_attention *a);

/* Does no query see more than FEW_KEYS? */
bool heddle__cuda_attention_sees_few(const heddle_attention *a);

/* May D have to come from P and dP, in some sequence? */
bool heddle__cuda_attention_has_few_keys(const heddle_attention *a);

/* The kernel with the smallest head dim that will do; -1 if none does. */
int heddle__cuda_find_attention(const attention_problem *p, kernel_pass pass, kernel_variant variant,
                                kernel_family family);
/* The same, of at least so many columns. */
int heddle__cuda_find_attention_from(const attention_problem *p, kernel_pass pass, kernel_variant variant,
                                     kernel_family family, int64_t dim);

/* Predicted microseconds on the family small, and on the tensor cores, whichever family has them. */
double heddle__cuda_small_time(const attention_problem *p);
double heddle__cuda_tensor_core_time(const attention_problem *p);

/* -------------------------------------------------------------------------------------- the map of a boolean mask */

/* Is a pass for the map less work than what it saves? For families whose kernels read the mask's bytes where there is none. */
bool heddle__cuda_map_pays(const attention_problem *p);

/* So many of them differ; what one is like, in tiles of so many rows and columns, of which rows are queries or keys. */
int64_t heddle__cuda_count_maps(const heddle_attention *a);
mask_map heddle__cuda_shape_map(const heddle_attention *a, int rows, int columns, bool keys);

/* Behind what the workspace has already: the map in tiles of so many rows and columns, of which rows are queries or keys. */
void heddle__cuda_place_map(const attention_problem *p, int rows, int columns, bool keys, attention_choice *c);

/* The launch that makes the maps that have been placed. */
void heddle__cuda_add_mask(const attention_problem *p, const attention_choice *c, attention_job *job);

/* -------------------------------------------------------------------------------------------- segments and lists */

/* `a` itself; with segments or lists of blocks, or with keys of pages that are none now, *masked, which has a mask in their place, as it would
 * lie in the workspace. */
const heddle_attention *heddle__cuda_with_mask(const heddle_attention *a, collected_as collected,
                                               heddle_attention *masked);

/* Are its tiles so few that they can be counted? */
heddle_status heddle__cuda_check_tiles(const heddle_attention *a);

/* Behind what the workspace has already: what no family has placed, bytes if it reads them, or a map. */
void heddle__cuda_place_seen(const attention_problem *p, bool bytes, attention_choice *c);

/* What the kernel that makes it is given, and where it leaves bytes. */
void heddle__cuda_fill_seen(const attention_problem *p, const attention_choice *c, const heddle_attention_data *data,
                            char *workspace, attention_params *to);

/* Its launch, in front of all others. */
void heddle__cuda_add_seen(const attention_problem *p, attention_job *job);

/* ------------------------------------------------------------------------------------------------ keys collected */

/* As what are keys that Hopper's kernels do not take to be collected, if they take them then? */
collected_as heddle__cuda_how_collected(const heddle_attention *a, heddle_pass pass, const cuda_facts *device);

/* `a` itself, or *collected, which has keys like that. */
const heddle_attention *heddle__cuda_with_collected(const heddle_attention *a, collected_as as,
                                                    heddle_attention *collected);

/* Behind what the workspace has already: those keys. */
void heddle__cuda_place_collected(const attention_problem *p, attention_choice *c);

/* The launch that writes them, in front of all others; data: the caller's, to which they become the keys. */
void heddle__cuda_add_collect(const attention_problem *p, const attention_choice *c, char *workspace,
                              heddle_attention_data *data, attention_job *job);

/* ---------------------------------------------------------------------------------------------------- launches */

/* A launch, unless it has no blocks. */
void heddle__cuda_add_launch(attention_job *job, int kernel, int64_t grid);

/* One of the plain kernels. */
void heddle__cuda_add_plain(const attention_problem *p, attention_job *job, kernel_pass pass, int64_t grid);

/* All of prep for the tensor cores; where `light` has been before, blocks that look for what is left. */
void heddle__cuda_add_prep(const attention_problem *p, const attention_choice *c, attention_job *job);

/* dkdv and dq, as far as they are wanted. */
void heddle__cuda_add_dkdv_and_dq(const attention_choice *c, attention_job *job);

/* dbias by the kernel that the family has for it: a block for each tile, or `most` that take tile after tile. */
void heddle__cuda_add_dbias(const attention_problem *p, const attention_choice *c, int64_t most, attention_job *job);

#endif
