/* SPDX-License-Identifier: Apache-2.0
 * Nothing: the operators are linked with a library of this and of libtorch_cpu.so's name, so that they ask for that name.
 * At run time it is the one that `import torch` has loaded. */
typedef int heddle_torch_stub;
