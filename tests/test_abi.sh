#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `./dev abi`: what it compares with where no version is tagged, and what of a report of abidiff it takes for a break.
# Called by ctest as  test_abi.sh <source> <build>.
# `a && b || wrong` is meant as it is.
# shellcheck disable=SC2015
set -u
source=$1
cd "$source" || exit 1
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
failures=0

wrong() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# ---------------------------------------------------------------------------------------------------------- the base
base=$(grep -v '^#' tests/abi.base)
[[ $base =~ ^[0-9a-f]{40}$ ]] && [ "$(wc -l <tests/abi.base)" = 2 ] || wrong "tests/abi.base is not a line of comment and a commit: $base"
if ! git rev-parse -q --verify HEAD >/dev/null 2>&1; then
    echo "not looked for, as this is no clone: $base"
elif [ "$(git rev-parse --is-shallow-repository)" = true ]; then
    echo "not looked for in a shallow clone: $base"
else
    git merge-base --is-ancestor "$base" HEAD || wrong "tests/abi.base: $base is no ancestor of HEAD"
    git cat-file -e "$base:include/heddle.h" || wrong "tests/abi.base: $base has no heddle.h"
fi

# A tree without a tag and without that commit says which one it looks for.
mkdir "$directory/tests"
if [ -f dev ] && git init -q "$directory" 2>/dev/null; then
    cp dev "$directory" && cp tests/abi.base "$directory/tests" || exit 1
    (cd "$directory" && HEDDLE_BUILD_DIR=$directory/build ./dev abi) >"$directory/out" 2>&1 && wrong "./dev abi passes without its base"
    grep -q "there is no commit $base" "$directory/out" || wrong "./dev abi does not look for tests/abi.base: $(cat "$directory/out")"
fi

# ---------------------------------------------------------------------------------------------------------- what breaks
report() { # as abidiff 2.2 has it
    cat <<TEXT
    parameter 1 of type 'const heddle_attention*' has sub-type changes:
        underlying type 'struct heddle_attention' at heddle.h:235:1 changed:
          type size changed from 3840 to 4480 (in bits)
          1 data member insertion:
            'int64_t multiprocessors', at offset 4416 (in bits) at heddle.h:263:1
          1 data member change:
            type of 'int32_t reserved0' changed:
              underlying type 'int' changed:
                type name changed from 'int' to 'unsigned char'
                type size changed from 32 to 8 (in bits)
            and name of 'heddle_attention::reserved0' changed to 'heddle_attention::block_q' at heddle.h:242:1
          1 enumerator insertion:
            'heddle_pass::HEDDLE_SIDEWARD' value '2'
$*
TEXT
}
report "" | awk -f tests/abi.awk || wrong "fields at the end, and what was reserved, are no break"
while IFS= read -r line; do
    report "            $line" | awk -f tests/abi.awk >/dev/null && wrong "no break: $line"
done <<'TEXT'
'heddle_dtype dtype' offset changed from 64 to 128 (in bits) (by +64 bits)
1 data member deletion:
2 enumerator deletions:
1 enumerator change:
type name changed from 'double' to 'float'
type size changed from 64 to 32 (in bits)
TEXT

# The same of abidiff itself, where it is.
compiled() { # NAME, the header on standard input: its structures and values in a library
    mkdir "$directory/$1"
    cat >"$directory/$1/heddle.h"
    printf '#include "heddle.h"\nint a(const heddle_attention *p) { return !p; }\nint b(const heddle_pass *p) { return !p; }\n' >"$directory/$1.c"
    ${CC:-cc} -g -shared -fPIC -I "$directory/$1" "$directory/$1.c" -o "$directory/$1.so"
}
breaks() { # NAME
    abidiff --redundant --headers-dir1 "$directory/now" --headers-dir2 "$directory/$1" "$directory/now.so" "$directory/$1.so" |
        awk -f tests/abi.awk >/dev/null
    [ $? = 1 ]
}
if command -v abidiff >/dev/null && compiled now <include/heddle.h; then
    sed 's/^} heddle_attention;/int64_t last;&/' include/heddle.h | compiled longer && ! breaks longer || wrong "a field at the end breaks"
    sed 's/^typedef struct heddle_attention {/&int64_t first;/' include/heddle.h | compiled moved && breaks moved || wrong "a field in front does not break"
    sed 's/HEDDLE_BACKWARD = 1/HEDDLE_BACKWARD = 2/' include/heddle.h | compiled other && breaks other || wrong "another value does not break"
else
    echo "left out without abidiff, or a compiler: its own reports"
fi

[ $failures = 0 ] && echo "ok"
[ $failures = 0 ]
