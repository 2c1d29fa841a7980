/* SPDX-License-Identifier: Apache-2.0
 * Included before everything else by a build that shall run on older systems (HEDDLE_OLD_GLIBC): the functions that got
 * a new version in glibc 2.29 (no more SVID errors) and 2.34 (libdl became part of libc) are asked for by the version
 * that glibc has had since its beginning on this processor. With them glibc 2.28 is enough: manylinux_2_28. */
#if defined(__x86_64__)
#define HEDDLE_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define HEDDLE_GLIBC "GLIBC_2.17"
#else
#error "HEDDLE_OLD_GLIBC knows x86-64 and aarch64"
#endif
#define HEDDLE_OLD(name) __asm__(".symver " #name "," #name "@" HEDDLE_GLIBC)
HEDDLE_OLD(exp);
HEDDLE_OLD(exp2);
HEDDLE_OLD(log);
HEDDLE_OLD(log2);
HEDDLE_OLD(pow);
HEDDLE_OLD(dlopen);
HEDDLE_OLD(dlsym);
HEDDLE_OLD(dlerror);
#undef HEDDLE_OLD
#undef HEDDLE_GLIBC
