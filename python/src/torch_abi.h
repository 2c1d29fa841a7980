/* SPDX-License-Identifier: Apache-2.0
 * The C symbols of libtorch that the operators use, declared by us: PyTorch keeps them stable from 2.10 on, but its
 * headers for them are C++. What each does is told in PyTorch's torch/csrc/stable/c/shim.h and aoti_torch/c/shim.h. */
#ifndef HEDDLE_TORCH_ABI_H
#define HEDDLE_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct torch_tensor *tensor_handle;
typedef struct torch_library *library_handle;
typedef struct torch_guard *guard_handle;

/* One argument or result. A tensor is its handle, an int, float or bool its bits, an optional a pointer to one (or NULL).
 * A kernel owns the arguments that it is given. */
typedef uint64_t stable_value;
typedef void (*stable_kernel)(stable_value *stack, uint64_t arguments, uint64_t results);

/* The rules for stable_value that we follow are those of 2.10. */
#define TORCH_ABI_2_10 ((UINT64_C(2) << 56) | (UINT64_C(10) << 48))

/* All return 0 when they succeed. */
int32_t aoti_torch_library_init_def(const char *name, const char *file, uint32_t line, library_handle *made);
int32_t aoti_torch_library_init_impl(const char *name, const char *key, const char *file, uint32_t line,
                                     library_handle *made);
int32_t aoti_torch_library_def(library_handle library, const char *schema);
int32_t torch_library_impl(library_handle library, const char *name, stable_kernel kernel, uint64_t version);
int32_t aoti_torch_delete_library_object(library_handle library);
/* Takes the arguments from the stack and puts results there; the caller owns them. */
int32_t aoti_torch_call_dispatcher(const char *name, const char *overload, stable_value *stack);

int32_t aoti_torch_delete_tensor_object(tensor_handle tensor);
int32_t aoti_torch_new_tensor_handle(tensor_handle tensor, tensor_handle *made);
int32_t aoti_torch_is_defined(tensor_handle tensor, bool *defined);
int32_t aoti_torch_tensor_copy_(tensor_handle from, tensor_handle to);
int32_t aoti_torch_get_data_ptr(tensor_handle tensor, void **data);
int32_t aoti_torch_get_dim(tensor_handle tensor, int64_t *dim);
int32_t aoti_torch_get_sizes(tensor_handle tensor, int64_t **sizes);
int32_t aoti_torch_get_strides(tensor_handle tensor, int64_t **strides);
int32_t aoti_torch_get_dtype(tensor_handle tensor, int32_t *dtype);
int32_t aoti_torch_get_device_type(tensor_handle tensor, int32_t *type);
int32_t aoti_torch_get_device_index(tensor_handle tensor, int32_t *index);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, tensor_handle *made);
int32_t aoti_torch_new_uninitialized_tensor(tensor_handle *made); /* None in Python */
int32_t aoti_torch_zero_(tensor_handle tensor);
int32_t aoti_torch_create_device_guard(int32_t index, guard_handle *made);
int32_t aoti_torch_get_current_device_index(int32_t *index);
int32_t aoti_torch_delete_device_guard(guard_handle guard);
int32_t torch_get_num_threads(uint32_t *threads);

int32_t aoti_torch_device_type_cuda(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_float8_e4m3fn(void);
int32_t aoti_torch_dtype_uint8(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_bool(void);
int32_t aoti_torch_dtype_uint64(void);
int32_t aoti_torch_dtype_int8(void); /* these are named in messages alone */
int32_t aoti_torch_dtype_int16(void);
int32_t aoti_torch_dtype_float8_e5m2(void);
int32_t aoti_torch_dtype_float8_e4m3fnuz(void);
int32_t aoti_torch_dtype_complex64(void);
int32_t aoti_torch_dtype_complex128(void);

/* With cond false it throws a C++ exception, which becomes a RuntimeError: nothing may be left to free. */
void aoti_torch_check(bool cond, const char *function, const char *file, uint32_t line, const char *message);

/* The first two from 2.13 on, NULL before; the others, at::globalContext() and at::Context::deterministicAlgorithms() of C++,
 * have no C symbols. Windows knows no weak symbols: torch_call.c looks them up. */
#ifdef _WIN32
extern int32_t (*torch_delete_stable_ivalue)(stable_value *value);
extern const char *(*torch_exception_get_what_without_backtrace)(void);
extern void *(*torch_global_context)(void);
extern bool (*torch_deterministic_algorithms)(const void *context);
#else
#ifdef __APPLE__
#define TORCH_OPTIONAL __attribute__((weak_import))
#define TORCH_CXX(name) __asm__("_" name)
#else
#define TORCH_OPTIONAL __attribute__((weak))
#define TORCH_CXX(name) __asm__(name)
#endif
TORCH_OPTIONAL int32_t torch_delete_stable_ivalue(stable_value *value);
TORCH_OPTIONAL const char *torch_exception_get_what_without_backtrace(void);
/* C++'s operator delete, which frees an optional's box before 2.13. */
void heddle_cxx_delete(void *pointer) TORCH_CXX("_ZdlPv");
TORCH_OPTIONAL void *torch_global_context(void) TORCH_CXX("_ZN2at13globalContextEv");
TORCH_OPTIONAL bool torch_deterministic_algorithms(const void *context)
    TORCH_CXX("_ZNK2at7Context23deterministicAlgorithmsEv");
#endif

/* Only in builds of torch with CUDA, so it is looked up in libtorch_cuda.so. */
typedef int32_t (*current_cuda_stream)(int32_t device_index, void **stream);

#endif
