#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The shared library exports the functions that heddle.h declares and nothing else; the static one defines no global name
# outside heddle_: symbols.sh <heddle.h> <libheddle.so> <libheddle.a>
set -eu
header=$1 shared=$2 static=$3

declared=$(sed -n 's/^HEDDLE_API .*[ *]\(heddle_[a-z0-9_]*\)(.*/\1/p' "$header" | LC_ALL=C sort)
if [ "$(wc -l <<<"$declared")" -ne "$(grep -c '^HEDDLE_API ' "$header")" ]; then
    echo "$header: a HEDDLE_API line without the function's name on it" >&2
    exit 1
fi

# The version node (A, absolute) is no symbol of ours.
exported=$(nm -D --defined-only "$shared" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort)
if ! diff <(echo "$declared") <(echo "$exported"); then
    echo "< is declared in heddle.h but not exported, > the other way round" >&2
    exit 1
fi

if nm -g --defined-only "$static" | awk 'NF == 3 { print $3 }' | grep -v '^heddle_'; then
    echo "libheddle.a defines these global names, which may collide with a user's" >&2
    exit 1
fi
echo "ok: $(wc -l <<<"$declared") functions declared and exported"
