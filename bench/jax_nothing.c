/* SPDX-License-Identifier: Apache-2.0
 * A handler for XLA that does nothing: what a call of XLA to a handler costs by itself (bench/jax_overhead.py). */
#include "xla/ffi/api/c_api.h"

XLA_FFI_Error *nothing(XLA_FFI_CallFrame *frame) {
    for (XLA_FFI_Extension_Base *x = frame->extension_start; x; x = x->next)
        if (x->type == XLA_FFI_Extension_Metadata) {
            XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)x)->metadata;
            about->api_version.major_version = XLA_FFI_API_MAJOR;
            about->api_version.minor_version = XLA_FFI_API_MINOR;
        }
    return NULL;
}
