/* SPDX-License-Identifier: Apache-2.0
 * In place of the images that nvcc makes: the names of the modules, and what they are made of, by which the emulator finds its own. */
#define M(name, source) extern const unsigned char heddle__image_##name[];
#include "cuda/modules.def"
#undef M

#define M(name, source) const unsigned char heddle__image_##name[] = #name " " #source;
#include "cuda/modules.def"
#undef M
