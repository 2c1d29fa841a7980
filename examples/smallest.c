/* SPDX-License-Identifier: Apache-2.0
 * Causal attention over 128 tokens with 8 heads of 64. */
#include <heddle.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, TOKENS = 128, DIM = 64, COUNT = HEADS * TOKENS * DIM };
static float q[COUNT], k[COUNT], v[COUNT], o[COUNT];

int main(void) {
    for (int i = 0; i < COUNT; i++)
        q[i] = k[i] = v[i] = (float)(i % 13 - 6) / 6;

    heddle_attention a = {.size = sizeof a, .b = 1, .h = HEADS, .sq = TOKENS, .sk = TOKENS, .d = DIM};
    a.mask = HEDDLE_CAUSAL_TOP_LEFT;
    heddle_attention_data t = {.size = sizeof t, .q = q, .k = k, .v = v, .o = o};

    size_t bytes = 0;
    heddle_status status = heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes);
    void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (status == HEDDLE_OK)
        status = heddle_attention_forward(&a, &t, workspace, bytes, NULL);
    free(workspace);
    if (status != HEDDLE_OK) {
        fprintf(stderr, "%s\n", heddle_last_message());
        return 1;
    }
    printf("o[0] = %g, o[last] = %g\n", o[0], o[COUNT - 1]);
    return 0;
}
