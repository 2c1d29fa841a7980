/* SPDX-License-Identifier: Apache-2.0
 * The host side of the CUDA backend and its driver: what is missing is named, what fails is told, and the process goes on. Needs no
 * GPU. */
#define _POSIX_C_SOURCE 200809L
#include "scenario.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static heddle_attention usual_attention(void) {
    heddle_attention a = attention_desc(HEDDLE_BF16, 2, 8, 2, 1000, 1000, 128, 128);
    a.mask = HEDDLE_CAUSAL_BOTTOM_RIGHT;
    return a;
}

static heddle_norm_linear usual_norm_linear(void) {
    return norm_linear_desc(HEDDLE_F32, HEDDLE_LAYER_NORM, 1000, 512, 768);
}

static bool tells(heddle_status got, heddle_status wanted, const char *words) {
    return got == wanted && strstr(heddle_last_message(), words);
}

/* Both operations and passes answer the same. */
static void all_tell(heddle_status wanted, const char *words) {
    for (int pass = 0; pass < 2; pass++) {
        MUST(tells(run_attention(usual_attention(), (heddle_pass)pass, 0, NULL), wanted, words));
        MUST(tells(run_norm_linear(usual_norm_linear(), (heddle_pass)pass, 0, NULL), wanted, words));
    }
}

static void all_run(void) {
    for (int pass = 0; pass < 2; pass++) {
        MUST(run_attention(usual_attention(), (heddle_pass)pass, 0, NULL) == HEDDLE_OK);
        MUST(run_norm_linear(usual_norm_linear(), (heddle_pass)pass, 0, NULL) == HEDDLE_OK);
    }
}

static void no_gpu(void) {
    set("FAKE_DEVICES", "0");
    all_tell(HEDDLE_NO_DEVICE, "the CUDA driver sees no GPU");
    MUST(heddle_device_available(HEDDLE_CUDA, NULL, 0) == HEDDLE_NO_DEVICE);
}

static void unknown_family(void) {
    set("HEDDLE_CUDA_FAMILY", "sm12");
    MUST(run_attention(attention_desc(HEDDLE_F32, 1, 1, 1, 128, 128, 32, 32), HEDDLE_FORWARD, 0, NULL) == HEDDLE_OK);
    MUST(fake_launches("heddle_attention_fwd_f32_d32_full_small") == 1); /* as without it */
    char text[256];
    MUST(heddle_device_describe(HEDDLE_CUDA, text, sizeof text) == HEDDLE_OK);
    MUST(strstr(text, "; HEDDLE_CUDA_FAMILY=sm12 is no family of kernels"));
}

static void old_name_of_family(void) {
    char text[256];
    set("HEDDLE_CUDA", "sm80");
    MUST(heddle_device_describe(HEDDLE_CUDA, text, sizeof text) == HEDDLE_OK);
    MUST(strstr(text, "sm90 and sm80 kernels; HEDDLE_CUDA=sm80 changes nothing, the variable is HEDDLE_CUDA_FAMILY"));
}

/* As many KiB of shared memory as a smaller GPU has: nothing asks for more, and the kernels are that GPU's. */
static void limited_shared_memory(void) {
    char text[512];
    set("HEDDLE_CUDA_FAMILY", "sm80");
    set("HEDDLE_CUDA_SHARED", "99");
    MUST(heddle_device_describe(HEDDLE_CUDA, text, sizeof text) == HEDDLE_OK);
    MUST(strstr(text, "sm80 kernels; HEDDLE_CUDA_SHARED: 99 KiB of shared memory a block"));
    set("FAKE_SHARED", "101376"); /* what the fake holds launches to */
    all_run();
    MUST(fake_launches("heddle_attention_bwd_bf16_d128_least_sm80") == 1);
}

static void more_shared_memory_than_there_is(void) {
    char text[512];
    set("HEDDLE_CUDA_SHARED", "500");
    MUST(heddle_device_describe(HEDDLE_CUDA, text, sizeof text) == HEDDLE_OK && !strstr(text, "HEDDLE_CUDA_SHARED"));
    all_run();
}

static void wrong_limit(void) {
    char text[512];
    set("HEDDLE_CUDA_FAMILY", "sm12");
    set("HEDDLE_CUDA_SHARED", "99k");
    MUST(heddle_device_describe(HEDDLE_CUDA, text, sizeof text) == HEDDLE_OK);
    MUST(strstr(text, "HEDDLE_CUDA_FAMILY=sm12 is no family of kernels"));
    MUST(strstr(text, "; HEDDLE_CUDA_SHARED=99k is no number of KiB from 16 to 1024, and changes nothing"));
}

static void old_driver(void) {
    set("FAKE_VERSION", "11080");
    all_tell(HEDDLE_NO_DEVICE, "for CUDA 11.8, heddle needs 12.0");
}

static void driver_that_does_not_start(void) {
    set("FAKE_FAIL", "cuInit:803");
    all_tell(HEDDLE_NO_DEVICE, "does not start: FAKE_ERROR (803)");
}

static void turing(void) {
    set("FAKE_CC", "75");
    all_tell(HEDDLE_NO_DEVICE, "Fake GPU 0 (device 0, sm_75) is older than Ampere");
}

static void no_image(void) {
    set("FAKE_FAIL", "cuLibraryLoadData:209");
    all_tell(HEDDLE_UNSUPPORTED, "Fake GPU 0 (device 0, sm_90): this build of heddle has no kernel image for this GPU");
    set("FAKE_FAIL", "cuLibraryGetKernel:500");
    all_tell(HEDDLE_UNSUPPORTED, "no kernel image");
    set("FAKE_FAIL", NULL);
    all_run(); /* the process goes on */
}

static void failing_launch(void) {
    set("FAKE_FAIL", "cuLaunchKernelEx:700");
    all_tell(HEDDLE_EARLIER_CUDA_ERROR, "Fake GPU 0 (device 0, sm_90): earlier work on this GPU failed");
    set("FAKE_FAIL", "cuLaunchKernelEx:701");
    all_tell(HEDDLE_CUDA_ERROR, "cuLaunchKernelEx: FAKE_ERROR (701)");
    set("FAKE_FAIL", "cuLaunchKernelEx:999");
    all_tell(HEDDLE_CUDA_ERROR, "an unknown error (999)");
    set("FAKE_FAIL", "cuCtxGetCurrent:4");
    all_tell(HEDDLE_CUDA_ERROR, "cuCtxGetCurrent");
    set("FAKE_FAIL", NULL);
    all_run();
}

/* Memory that was this device's is another one's now, at the same addresses. */
static void moved_pointers(void) {
    set("FAKE_DEVICES", "2");
    all_run();
    set("FAKE_OWNER", "1");
    all_tell(HEDDLE_WRONG_DEVICE, "is memory of device 1, the current context is on Fake GPU 0 (device 0, sm_90)");
    set("FAKE_OWNER", NULL);
    all_run();
}

static void wrong_pointers(void) {
    heddle_attention a = usual_attention();
    a.device = HEDDLE_CUDA;
    size_t bytes = 0;
    MUST(heddle_attention_workspace(&a, HEDDLE_FORWARD, &bytes) == HEDDLE_OK);
    heddle_attention_data t = attention_pointers(&a, HEDDLE_FORWARD, 0);
    t.v = address(3, 1, 0);
    MUST(tells(heddle_attention_forward(&a, &t, address(0, 60, 0), bytes, NULL), HEDDLE_WRONG_DEVICE,
               "is memory of device 3, the current context is on Fake GPU 0 (device 0, sm_90)"));
    MUST(strstr(heddle_last_message(), "v = "));
    float host;
    t = attention_pointers(&a, HEDDLE_FORWARD, 0);
    t.lse = &host;
    MUST(tells(heddle_attention_forward(&a, &t, address(0, 60, 0), bytes, NULL), HEDDLE_WRONG_DEVICE,
               "is host memory, not memory of Fake GPU 0"));
    t.lse = NULL;
    t.dq = &host; /* backward's: not looked at */
    MUST(heddle_attention_forward(&a, &t, address(0, 60, 0), bytes, NULL) == HEDDLE_OK);
    MUST(fake_launches(NULL) > 0);
    const int before = fake_launches(NULL);
    set("FAKE_FAIL", "cuPointerGetAttributes:1");
    t.lse = address(0, 50, 0);
    MUST(tells(heddle_attention_forward(&a, &t, address(0, 60, 0), bytes, NULL), HEDDLE_CUDA_ERROR,
               "cuPointerGetAttributes"));
    set("FAKE_FAIL", NULL);
    MUST(fake_launches(NULL) == before);
    all_run();
}

static void streams(void) {
    for (int pass = 0; pass < 2; pass++) {
        void *const none = (void *)0x3000, *const foreign = (void *)0x2000, *const own = (void *)0x1000;
        const heddle_pass p = (heddle_pass)pass;
        MUST(tells(run_attention(usual_attention(), p, 0, none), HEDDLE_WRONG_DEVICE, "stream"));
        MUST(tells(run_norm_linear(usual_norm_linear(), p, 0, none), HEDDLE_WRONG_DEVICE, "stream"));
        MUST(tells(run_attention(usual_attention(), p, 0, foreign), HEDDLE_WRONG_DEVICE, "belongs to another context"));
        MUST(tells(run_norm_linear(usual_norm_linear(), p, 0, foreign), HEDDLE_WRONG_DEVICE, "Fake GPU 0"));
        MUST(pass || fake_launches(NULL) == 0);
        MUST(run_attention(usual_attention(), p, 0, own) == HEDDLE_OK);
        MUST(run_norm_linear(usual_norm_linear(), p, 0, (void *)2) == HEDDLE_OK);
    }
}

static void no_context(void) {
    set("FAKE_CONTEXT", "0");
    all_run();
    MUST(fake_depth() == 0);
    set("FAKE_FAIL", "cuCtxPushCurrent_v2:2");
    all_tell(HEDDLE_CUDA_ERROR, "cuCtxPushCurrent");
}

static void *first_call(void *unused) {
    (void)unused;
    for (int x = 0; x < 50; x++)
        all_run();
    return NULL;
}

static void many_threads(void) {
    pthread_t threads[8];
    for (size_t x = 0; x < COUNT(threads); x++)
        MUST(pthread_create(&threads[x], NULL, first_call, NULL) == 0);
    for (size_t x = 0; x < COUNT(threads); x++)
        pthread_join(threads[x], NULL);
}

/* --------------------------------------------------------------------------------------------------------- tests */

SCENARIO(no_gpu)
SCENARIO(unknown_family)
SCENARIO(old_name_of_family)
SCENARIO(limited_shared_memory)
SCENARIO(more_shared_memory_than_there_is)
SCENARIO(wrong_limit)
SCENARIO(old_driver)
SCENARIO(driver_that_does_not_start)
SCENARIO(turing)
SCENARIO(no_image)
SCENARIO(failing_launch)
SCENARIO(moved_pointers)
SCENARIO(wrong_pointers)
SCENARIO(streams)
SCENARIO(no_context)
SCENARIO(many_threads)

int main(void) {
    if (!is_fake_driver())
        return 77;
    unsetenv("HEDDLE_CUDA_FAMILY");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_gpu),
        cmocka_unit_test(test_unknown_family),
        cmocka_unit_test(test_old_name_of_family),
        cmocka_unit_test(test_limited_shared_memory),
        cmocka_unit_test(test_more_shared_memory_than_there_is),
        cmocka_unit_test(test_wrong_limit),
        cmocka_unit_test(test_old_driver),
        cmocka_unit_test(test_driver_that_does_not_start),
        cmocka_unit_test(test_turing),
        cmocka_unit_test(test_no_image),
        cmocka_unit_test(test_failing_launch),
        cmocka_unit_test(test_moved_pointers),
        cmocka_unit_test(test_wrong_pointers),
        cmocka_unit_test(test_streams),
        cmocka_unit_test(test_no_context),
        cmocka_unit_test(test_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
