/* SPDX-License-Identifier: Apache-2.0
 * What the library says of itself: names of statuses, messages, devices, versions. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static void test_status_strings(void **state) {
    (void)state;
    static const struct {
        heddle_status status;
        int value;
        const char *text;
    } all[] = {{HEDDLE_OK, 0, "HEDDLE_OK"},
               {HEDDLE_NULL_POINTER, 1, "HEDDLE_NULL_POINTER"},
               {HEDDLE_BAD_DESCRIPTOR_SIZE, 2, "HEDDLE_BAD_DESCRIPTOR_SIZE"},
               {HEDDLE_BAD_ENUM, 3, "HEDDLE_BAD_ENUM"},
               {HEDDLE_BAD_SIZE, 4, "HEDDLE_BAD_SIZE"},
               {HEDDLE_BAD_HEADS, 5, "HEDDLE_BAD_HEADS"},
               {HEDDLE_BAD_STRIDE, 6, "HEDDLE_BAD_STRIDE"},
               {HEDDLE_OVERFLOW, 7, "HEDDLE_OVERFLOW"},
               {HEDDLE_BAD_VALUE, 8, "HEDDLE_BAD_VALUE"},
               {HEDDLE_WORKSPACE_TOO_SMALL, 9, "HEDDLE_WORKSPACE_TOO_SMALL"},
               {HEDDLE_MISALIGNED, 10, "HEDDLE_MISALIGNED"},
               {HEDDLE_BAD_COMBINATION, 11, "HEDDLE_BAD_COMBINATION"},
               {HEDDLE_UNSUPPORTED, 20, "HEDDLE_UNSUPPORTED"},
               {HEDDLE_NO_DEVICE, 30, "HEDDLE_NO_DEVICE"},
               {HEDDLE_WRONG_DEVICE, 31, "HEDDLE_WRONG_DEVICE"},
               {HEDDLE_CUDA_ERROR, 40, "HEDDLE_CUDA_ERROR"},
               {HEDDLE_EARLIER_CUDA_ERROR, 41, "HEDDLE_EARLIER_CUDA_ERROR"}};
    for (size_t x = 0; x < COUNT(all); x++) {
        assert_int_equal(all[x].status, all[x].value);
        assert_string_equal(heddle_status_string(all[x].status), all[x].text);
    }
    assert_string_equal(heddle_status_string((heddle_status)12), "unknown status");
    assert_string_equal(heddle_status_string((heddle_status)-1), "unknown status");
}

static void *other_thread(void *unused) {
    heddle_attention a = attention_desc(HEDDLE_F32, 2, 8, 4, 12, 14, 16, 24);
    (void)unused;
    bool empty = heddle_last_message()[0] == '\0'; /* nothing has failed here yet */
    a.h = 10;
    bool refused = heddle_attention_supported(&a, NULL, 0) == HEDDLE_BAD_HEADS;
    return empty && refused && strstr(heddle_last_message(), "h = 10") ? (void *)1 : NULL;
}

static void test_message_per_thread(void **state) {
    (void)state;
    heddle_attention a = attention_desc(HEDDLE_F32, 2, 8, 4, 12, 14, 16, 24);
    a.hk = 3;
    assert_int_equal(heddle_attention_supported(&a, NULL, 0), HEDDLE_BAD_HEADS);
    const char *message = heddle_last_message();
    pthread_t thread;
    void *answer = NULL;
    assert_int_equal(pthread_create(&thread, NULL, other_thread, NULL), 0);
    assert_int_equal(pthread_join(thread, &answer), 0);
    assert_non_null(answer);
    assert_string_equal(message, "hk = 3 does not divide h = 8");
    a.hk = 4;
    assert_int_equal(heddle_attention_supported(&a, NULL, 0), HEDDLE_OK);
    assert_string_equal(heddle_last_message(), "hk = 3 does not divide h = 8"); /* stands until the next failure */
}

static void test_devices(void **state) {
    (void)state;
    char text[200] = "", cut[6] = ".....";
    assert_int_equal(heddle_version(), HEDDLE_VERSION);
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", HEDDLE_VERSION_MAJOR, HEDDLE_VERSION_MINOR, HEDDLE_VERSION_PATCH);
    assert_string_equal(heddle_version_string(), version);
    assert_int_equal(heddle_device_available(HEDDLE_CPU, NULL, 0), HEDDLE_OK);
    assert_int_equal(heddle_device_available(HEDDLE_REF, text, sizeof text), HEDDLE_OK);
    assert_int_equal(heddle_device_available((heddle_device)5, text, sizeof text), HEDDLE_BAD_ENUM);
    assert_non_null(strstr(text, "5"));
    assert_int_equal(heddle_device_describe(HEDDLE_CPU, text, sizeof text), HEDDLE_OK);
    assert_non_null(strstr(text, heddle_cpu_isa()));
    assert_int_equal(heddle_device_describe(HEDDLE_REF, text, sizeof text), HEDDLE_OK);
    assert_true(strlen(text) > 0);
    assert_int_equal(heddle_device_describe(HEDDLE_CPU, cut, sizeof cut), HEDDLE_OK);
    assert_int_equal(strlen(cut), 5);
    assert_int_equal(heddle_device_describe(HEDDLE_CPU, NULL, 0), HEDDLE_OK);
    assert_int_equal(heddle_device_describe((heddle_device)-1, text, sizeof text), HEDDLE_BAD_ENUM);
    bool listed = false;
    int count = 0;
    for (; heddle_cpu_isa_available(count); count++)
        listed = listed || !strcmp(heddle_cpu_isa_available(count), heddle_cpu_isa());
    assert_true(listed && count < 16);
    assert_null(heddle_cpu_isa_available(count + 1));
    assert_null(heddle_cpu_isa_available(-1));
}

int main(void) {
    test_begin();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status_strings),
        cmocka_unit_test(test_message_per_thread),
        cmocka_unit_test(test_devices),
    };
    return test_end(cmocka_run_group_tests(tests, NULL, NULL));
}
