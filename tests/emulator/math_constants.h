/* SPDX-License-Identifier: Apache-2.0
 * In place of CUDA's own. */
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
