/* SPDX-License-Identifier: Apache-2.0
 * Tells PyTorch's dispatcher of the operators when this library is loaded: from Python (heddle._ops), or by a C++ program
 * that loads it with dlopen. Fake kernels, autograd and autocast are registered in Python. */
#include "torch_call.h"

#include <stdio.h>

static const char *const schemas[] = {
    "attention(Tensor q, Tensor k, Tensor v"
#define TENSOR(id, name, field) ", Tensor? " #name "=None"
#define NUMBER(id, schema, letter) ", " schema
#include "attention_arguments.def"
    ") -> (Tensor out, Tensor lse, Tensor weights)",
    "attention_backward(Tensor? dout, Tensor? dlse, Tensor? dweights, Tensor out, Tensor lse, Tensor q, Tensor k, "
    "Tensor v"
#define TENSOR(id, name, field) ", Tensor? " #name "=None"
#define NUMBER(id, schema, letter) ", " schema
#include "attention_arguments.def"
    ", int needs=31) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    "attention_plain(Tensor q, Tensor k, Tensor v, int causal, float scale, bool lse) -> (Tensor out, Tensor lse)",
    "attention_options(Tensor q, Tensor k, Tensor v"
#define TENSOR(id, name, field) ", Tensor? " #name "=None"
#define NUMBER(id, schema, letter) ", " schema
#include "attention_arguments.def"
    ", bool lse=True) -> (Tensor out, Tensor lse)",
    "attention_backward_plain(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, int causal, "
    "float scale, bool deterministic, int needs) -> (Tensor dq, Tensor dk, Tensor dv)",
    "attention_backward_heads(Tensor dout, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, int causal, "
    "float scale, bool deterministic) -> Tensor",
    "attention_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor seqlens_k, Tensor? q=None, "
    "Tensor? cos=None, Tensor? sin=None, Tensor? block_table=None, Tensor? cache_index=None, Tensor? cu_seqlens=None, "
    "int max_seqlen=0, int max_seqlen_k=0, bool interleaved=False, bool together=False, Tensor? k_scale=None, "
    "Tensor? v_scale=None) "
    "-> (Tensor rotated, Tensor lengths)",
    "norm_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? gamma=None, Tensor? beta=None, float eps=1e-05, "
    "int norm=0, bool tf32=False, int activation=0, bool keep_u=False, Tensor? residual=None, bool return_norm=False, "
    "Tensor? prepared=None, int multiprocessors=0) -> "
    "(Tensor y, Tensor mean, Tensor rstd, Tensor u, Tensor z)",
    "norm_linear_prepare(Tensor weight, Tensor? bias=None, Tensor? gamma=None, Tensor? beta=None, int norm=0, "
    "bool tf32=False, int activation=0, bool return_norm=False) -> Tensor",
    "norm_linear_backward(Tensor dy, Tensor? mean, Tensor? rstd, Tensor x, Tensor weight, Tensor? gamma=None, "
    "Tensor? beta=None, float eps=1e-05, int norm=0, bool deterministic=False, bool tf32=False, int needs=31, "
    "int activation=0, Tensor? u=None, Tensor? bias=None, int multiprocessors=0, Tensor? dz=None) -> "
    "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dgamma, Tensor dbeta)",
};

/* The dispatcher knows a library as long as its handle lives: as long as the process. */
static library_handle definitions, kernels[2];

static int32_t register_all(void) {
    static const char file[] =
        "heddle/torch_register.c"; /* PyTorch keeps the pointer; __FILE__ would tell where this was built */
    int32_t bad = aoti_torch_library_init_def("heddle", file, __LINE__, &definitions);
    for (size_t x = 0; !bad && x < sizeof schemas / sizeof *schemas; x++)
        bad = aoti_torch_library_def(definitions, schemas[x]);
    const char *const keys[] = {"CPU", "CUDA"};
    const struct {
        const char *name;
        stable_kernel kernel;
    } all[] = {
        {"attention", heddle_torch_attention},
        {"attention_backward", heddle_torch_attention_backward},
        {"attention_plain", heddle_torch_attention_plain},
        {"attention_options", heddle_torch_attention_options},
        {"attention_backward_plain", heddle_torch_attention_backward_plain},
        {"attention_backward_heads", heddle_torch_attention_backward_heads},
        {"attention_append", heddle_torch_attention_append},
        {"norm_linear", heddle_torch_norm_linear},
        {"norm_linear_prepare", heddle_torch_norm_linear_prepare},
        {"norm_linear_backward", heddle_torch_norm_linear_backward},
    };
    for (int key = 0; !bad && key < 2; key++) {
        bad = aoti_torch_library_init_impl("heddle", keys[key], file, __LINE__, &kernels[key]);
        for (size_t x = 0; !bad && x < sizeof all / sizeof *all; x++)
            bad = torch_library_impl(kernels[key], all[x].name, all[x].kernel, TORCH_ABI_2_10);
    }
    return bad;
}

/* 0 when the operators are there. */
__attribute__((visibility("default"))) int heddle_torch_registered = -1;

__attribute__((constructor)) static void when_loaded(void) {
    heddle_torch_registered = register_all();
}
