// SPDX-License-Identifier: Apache-2.0
// run_exported MODEL.pt2 _torch_ops.so: runs what export_model.py made, without Python. Loading the second file, of the Python
// package, tells PyTorch's dispatcher of heddle's operators.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <dlfcn.h>

#include <cstdio>

int main(int argc, char **argv) {
    if (argc != 3 || !dlopen(argv[2], RTLD_NOW)) {
        std::fprintf(stderr, "usage: run_exported MODEL.pt2 _torch_ops.so\n%s\n", argc == 3 ? dlerror() : "");
        return 2;
    }
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const at::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));
    for (int tokens : {100, 37}) {
        const at::Tensor x = at::linspace(-1, 1, tokens * 64, device).reshape({1, tokens, 64});
        const double sum = model.run({x})[0].to(at::kDouble).square().sum().item<double>();
        std::printf("%d tokens on %s: sum of squares %.4f\n", tokens, device.str().c_str(), sum);
    }
}
