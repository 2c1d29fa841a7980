# SPDX-License-Identifier: Apache-2.0
"""python/src/xla_ffi.h against the header that jaxlib brings: every offset, size and value, by a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "python/src"
# Our structure: XLA's, and XLA's names of the fields in our order, and other names that they have in other versions.
# The last of ours may be before the last of XLA's.
STRUCTURES = {
    "xla_extension": ("Extension_Base|InternalExtension", "struct_size type next"),
    "xla_version": ("Api_Version", "struct_size extension_start major_version minor_version"),
    "xla_metadata": ("Metadata", "struct_size api_version traits"),
    "xla_metadata_extension": ("Metadata_Extension", "extension_base metadata"),
    "xla_error_create": ("Error_Create_Args", "struct_size extension_start message errc"),
    "xla_error_destroy": ("Error_Destroy_Args", "struct_size extension_start error"),
    "xla_stream_get": ("Stream_Get_Args", "struct_size extension_start ctx stream"),
    "xla_memory_allocate": ("DeviceMemory_Allocate_Args", "struct_size extension_start ctx size alignment data"),
    "xla_memory_free": ("DeviceMemory_Free_Args", "struct_size extension_start ctx size data"),
    "xla_api": (
        "Api",
        "struct_size extension_start api_version internal_api XLA_FFI_Error_Create "
        "XLA_FFI_Error_GetMessage|XLA_FFI_Error_GetDetails XLA_FFI_Error_Destroy XLA_FFI_Handler_Register "
        "XLA_FFI_Stream_Get XLA_FFI_Type_Register|XLA_FFI_TypeId_Register "
        "XLA_FFI_ExecutionContext_Get|XLA_FFI_InvokeContext_Get XLA_FFI_State_Set XLA_FFI_State_Get "
        "XLA_FFI_DeviceMemory_Allocate XLA_FFI_DeviceMemory_Free",
    ),
    "xla_buffer": ("Buffer", "struct_size extension_start dtype data rank dims"),
    "xla_span": ("ByteSpan", "ptr len"),
    "xla_array": ("Array", "dtype size data"),
    "xla_attributes": ("Attrs", "struct_size extension_start size types names attrs"),
    "xla_frame": ("CallFrame", "struct_size extension_start api ctx stage args rets attrs"),
}
# Handed to XLA whole: a size of another length would say another version.
WHOLE = ("xla_error_create", "xla_error_destroy", "xla_stream_get", "xla_memory_allocate", "xla_memory_free")
VALUES = {
    "XLA_MAJOR": "API_MAJOR",
    "XLA_METADATA": "Extension_Metadata",
    "XLA_ATTRIBUTE_ARRAY": "AttrType_ARRAY",
    "XLA_BUFFER": "ArgType_BUFFER",
    "XLA_EXECUTE": "ExecutionStage_EXECUTE",
    **{f"XLA_{name}": f"DataType_{name}" for name in ("PRED", "S32", "S64", "U8", "U32", "F16", "F32", "F64", "BF16")},
    **{
        f"XLA_{name}": f"Error_Code_{name}"
        for name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")
    },
}


def fields(header, structure):
    body = re.search(rf"typedef struct {structure} {{(.*?)}} {structure};", header, re.DOTALL).group(1)
    return re.findall(r"(\w+)(?=[,;]|\)\()", body)


def assertions(theirs_text):
    """Each in C, for the header whose text is given."""

    def named(names, prefix=""):
        (name,) = (n for n in names.split("|") if re.search(rf"\b{prefix}{n}\b", theirs_text))
        return name

    header = (SOURCES / "xla_ffi.h").read_text()
    assert set(re.findall(r"typedef struct (\w+) {", header)) == {*STRUCTURES, "xla_values"}
    structures = {**STRUCTURES, "xla_values": ("Args", "struct_size extension_start size types args")}
    for ours, (theirs, names) in [
        *structures.items(),
        ("xla_values", ("Rets", "struct_size extension_start size types rets")),
    ]:
        theirs = named(theirs, "XLA_FFI_")
        for mine, name in zip(fields(header, ours), map(named, names.split()), strict=True):
            yield f"offsetof({ours}, {mine}) == offsetof(XLA_FFI_{theirs}, {name})"
            yield f"sizeof((({ours} *)0)->{mine}) <= sizeof(((XLA_FFI_{theirs} *)0)->{name})"
        if ours in WHOLE:
            yield f"sizeof({ours}) - sizeof(XLA_FFI_{theirs}) == 0"
    for mine, name in VALUES.items():
        yield f"{mine} - (int)XLA_FFI_{name} == 0"
    yield "XLA_MINOR >= XLA_FFI_API_MINOR"


def compile_assertions(tmp_path, include, change=lambda text: text):
    lines = ['#include "xla_ffi.h"', '#include "xla/ffi/api/c_api.h"']
    lines += [
        f'_Static_assert({claim}, "{claim}");'
        for claim in assertions((Path(include) / "xla/ffi/api/c_api.h").read_text())
    ]
    source = tmp_path / "abi.c"
    source.write_text("\n".join(lines) + "\n")
    (tmp_path / "xla_ffi.h").write_text(change((SOURCES / "xla_ffi.h").read_text()))
    command = [os.environ.get("CC", "cc"), "-std=c11", "-fsyntax-only", f"-I{tmp_path}", f"-I{include}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not shutil.which(os.environ.get("CC", "cc")), reason="no C compiler")
def test_layout(tmp_path):
    jax = pytest.importorskip("jax")
    if not SOURCES.exists():
        pytest.skip("not in the source tree")
    done = compile_assertions(tmp_path, jax.ffi.include_dir())
    assert done.returncode == 0, done.stderr
    for before, after in (
        ("int major, minor;", "int64_t major, minor;"),
        ("int dtype;\n    size_t count;", "size_t dtype;\n    int count;"),
        ("XLA_BF16 = 16", "XLA_BF16 = 17"),
        ("    void (*error_get_message)(void *);\n", ""),
    ):
        assert before in (SOURCES / "xla_ffi.h").read_text()
        broken = compile_assertions(tmp_path, jax.ffi.include_dir(), lambda text, b=before, a=after: text.replace(b, a))
        assert broken.returncode != 0, f"nobody sees {after!r}"
