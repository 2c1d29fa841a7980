/* SPDX-License-Identifier: Apache-2.0
 * windows_host TORCH_LIB _torch_ops.so: loads PyTorch for Windows and the operators, calls them through PyTorch's dispatcher
 * and compares with the formulas. There is no Python in it; tests/python/windows.py builds it and runs it in wine. */
#include "torch_abi.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <windows.h>

enum { S = 3, D = 4 };

static HMODULE torch;
#define CALL(name) ((__typeof__(&name))(void *)GetProcAddress(torch, #name))

static tensor_handle make(int64_t a, int64_t b, const float *values) {
    const int64_t sizes[] = {1, 1, a, b}, strides[] = {a * b, a * b, b, 1};
    const int skip = values && b == D && a == D ? 2 : 0; /* a weight has two dimensions */
    tensor_handle t = NULL;
    void *data = NULL;
    if (CALL(aoti_torch_empty_strided)(4 - skip, sizes + skip, strides + skip, CALL(aoti_torch_dtype_float32)(), 0, 0,
                                       &t) ||
        CALL(aoti_torch_get_data_ptr)(t, &data))
        return NULL;
    memcpy(data, values, sizeof(float) * (size_t)(a * b));
    return t;
}

static stable_value bits(double x) {
    stable_value v;
    memcpy(&v, &x, sizeof v);
    return v;
}

static double difference(tensor_handle t, const double *expected, int n) {
    float *data = NULL;
    double most = 0;
    CALL(aoti_torch_get_data_ptr)(t, (void **)&data);
    for (int x = 0; x < n; x++)
        most = fmax(most, fabs(data[x] - expected[x]));
    return most;
}

static float q[S * D], k[S * D], v[S * D], w[D * D];

static void attention(double *out, double scale) {
    for (int i = 0; i < S; i++) {
        double p[S], sum = 0;
        for (int j = 0; j <= i; j++) {
            double s = 0;
            for (int x = 0; x < D; x++)
                s += (double)q[i * D + x] * k[j * D + x];
            sum += p[j] = exp(s * scale);
        }
        for (int x = 0; x < D; x++) {
            out[i * D + x] = 0;
            for (int j = 0; j <= i; j++)
                out[i * D + x] += p[j] / sum * v[j * D + x];
        }
    }
}

static void norm_linear(double *y) {
    for (int i = 0; i < S; i++) {
        double mean = 0, variance = 0;
        for (int x = 0; x < D; x++)
            mean += q[i * D + x] / (double)D;
        for (int x = 0; x < D; x++)
            variance += (q[i * D + x] - mean) * (q[i * D + x] - mean) / D;
        for (int n = 0; n < D; n++) {
            y[i * D + n] = 0;
            for (int x = 0; x < D; x++)
                y[i * D + n] += (q[i * D + x] - mean) / sqrt(variance + 1e-5) * w[n * D + x];
        }
    }
}

#define H(tensor) ((stable_value)(uintptr_t)(tensor))

int main(int argc, char **argv) {
    char path[1024];
    if (argc != 3 || !SetDllDirectoryA(argv[1]))
        return 2;
    snprintf(path, sizeof path, "%s\\torch_cpu.dll", argv[1]);
    torch = LoadLibraryA(path);
    HMODULE operators = torch ? LoadLibraryExA(argv[2], NULL, LOAD_WITH_ALTERED_SEARCH_PATH) : NULL;
    if (!operators) {
        printf("%s could not be loaded: %lu\n", torch ? argv[2] : path, GetLastError());
        return 1;
    }
    int registered = -1;
    const FARPROC found = GetProcAddress(operators, "heddle_torch_registered");
    if (found)
        memcpy(&registered, (const void *)found, sizeof registered);
    printf("registered: %d\n", registered);
    for (int x = 0; x < S * D; x++) {
        q[x] = (float)sin(x), k[x] = (float)cos(3 * x), v[x] = (float)sin(5 * x + 1);
        w[x % (D * D)] = (float)cos(7 * x);
    }
    for (int x = 0; x < D * D; x++)
        w[x] = (float)cos(7 * x);
    double expected[S * D];
    stable_value stack[16] = {H(make(S, D, q)), H(make(S, D, k)), H(make(S, D, v)), 1, bits(0.5), 1};
    int bad = CALL(aoti_torch_call_dispatcher)("heddle::attention_plain", "", stack);
    attention(expected, 0.5);
    const double first = bad ? INFINITY : difference((tensor_handle)(uintptr_t)stack[0], expected, S * D);
    printf("attention_plain: status %d, differs by %.1e\n", bad, first);
    stable_value linear[16] = {H(make(S, D, q)), H(make(D, D, w)), 0, 0, 0, bits(1e-5), 0, 0, 0, 0};
    bad = CALL(aoti_torch_call_dispatcher)("heddle::norm_linear", "", linear);
    norm_linear(expected);
    const double second = bad ? INFINITY : difference((tensor_handle)(uintptr_t)linear[0], expected, S * D);
    printf("norm_linear: status %d, differs by %.1e\n", bad, second);
    /* An error of ours is a C++ exception that goes through our frames: the dispatcher's C function catches it. */
    stable_value wrong[16] = {H(make(S, D, q)), H(make(D, D, w)), H(make(S, D, v)), 1, bits(0.5), 1};
    bad = CALL(aoti_torch_call_dispatcher)("heddle::attention_plain", "", wrong);
    const char *(*what)(void) =
        (const char *(*)(void))(void *)GetProcAddress(torch, "torch_exception_get_what_without_backtrace");
    const char *why = bad && what ? what() : "";
    printf("a wrong call: status %d, %.60s\n", bad, why);
    return !(registered == 0 && first < 1e-6 && second < 1e-5 && bad && strstr(why, "heddle ValueError"));
}
