/* SPDX-License-Identifier: Apache-2.0
 * Random123's Philox, without the warnings of its headers. */
#ifndef HEDDLE_TESTS_RANDOM123_H
#define HEDDLE_TESTS_RANDOM123_H

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wextra"
#endif
#include <Random123/philox.h>
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif
