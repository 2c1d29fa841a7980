#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What is built is hardened: relocations are resolved at the start and read-only from then on, no stack is executable, programs
# are position-independent, frames with arrays are guarded, and of the C library those calls are made that know how much room there
# is (_FORTIFY_SOURCE, which glibc has): hardened.sh <file>...
set -eu
for file; do
    headers=$(readelf -lW "$file")
    if ! grep -q GNU_RELRO <<<"$headers" || ! readelf -dW "$file" | grep -qw NOW; then
        echo "$file: its relocations stay writable" >&2
        exit 1
    fi
    if grep GNU_STACK <<<"$headers" | grep -q RWE; then
        echo "$file: its stack is executable" >&2
        exit 1
    fi
    if ! readelf -hW "$file" | grep -q 'Type: *DYN'; then
        echo "$file: its addresses are fixed" >&2
        exit 1
    fi
    if ! nm -D "$file" | grep -q __stack_chk_fail; then
        echo "$file: no frame is guarded" >&2
        exit 1
    fi
    calls=$(nm -D --undefined-only "$file")
    grep -q GLIBC_ <<<"$calls" || continue
    if ! grep -v __stack_chk_fail <<<"$calls" | grep -q ' __[a-z_]*_chk'; then
        echo "$file: no call of the C library is checked" >&2
        exit 1
    fi
    if grep -E ' v?f?printf(@|$)' <<<"$calls" >&2; then # of these there is a checked one for every call
        echo "$file: not every call of the C library is checked" >&2
        exit 1
    fi
done
echo "ok: $#"
