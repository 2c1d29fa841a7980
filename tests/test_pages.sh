#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the pages of docs/ show of a program's output, and draw of it, is what it prints: test_pages.sh <source tree> <build tree>
# In a page, <!-- examples/NAME.c KEY --> stands before a block with the section KEY of that output. Sections are divided
# by empty lines, and their first word is their key, a letter and a number; all of them must be shown, on one page.
set -eu
source=$(cd "$1" && pwd) build=$(cd "$2" && pwd)
output=$(mktemp)
directory=$(mktemp -d)
trap 'rm -rf "$output" "$directory"' EXIT
failures=0

# check PROGRAM PAGE
check() {
    local program=$build/examples/$1
    if [ ! -x "$program" ]; then
        echo "left out: $1 is not in this build"
        return
    fi
    "$program" >"$output" || { echo "FAILED: $1 ended with $?"; failures=$((failures + 1)); }
    awk -v name="examples/$1.c" -v page="docs/$2" '
        function wrong(text) { print "FAILED: " page ": " text; failed = 1 }
        NR == FNR && /^$/ { key = ""; next }
        NR == FNR { if (key == "") key = $1; printed[key] = printed[key] $0 "\n"; next }
        $1 == "<!--" && $2 == name { wanted = $3; next }
        wanted != "" && /^```/ && !inside { inside = 1; shown = ""; next }
        inside && /^```/ {
            if (!(wanted in printed)) wrong(name " prints no section " wanted)
            else if (shown != printed[wanted]) wrong("section " wanted " of " name " is now\n" printed[wanted])
            seen[wanted]++
            inside = 0; wanted = ""; next
        }
        inside { shown = shown $0 "\n" }
        END {
            for (key in printed)
                if (key ~ /^[A-Z][0-9]+$/ && !(key in seen)) wrong("does not show section " key " of " name)
            for (key in seen) sections++
            if (!sections) wrong("shows nothing of " name)
            if (!failed) print "ok: " page " shows " sections " sections of " name
            exit failed
        }' "$output" "$source/docs/$2" || failures=$((failures + 1))
}

check derivation math.md
check online_softmax algorithm.md

if ! command -v python3 >/dev/null; then
    echo "left out: the pictures, without python3"
elif [ -x "$build/examples/derivation" ]; then
    if python3 "$source/docs/draw.py" --check "$build"; then
        echo "ok: the pictures of docs/img"
    else
        failures=$((failures + 1))
    fi
fi
if command -v python3 >/dev/null; then
    if python3 "$source/docs/figures.py" --check; then
        echo "ok: what the README and docs/limits.md have of bench/results"
    else
        failures=$((failures + 1))
    fi
    if python3 "$source/docs/reference.py" --check; then
        echo "ok: the pages of the API in C and in Python"
    else
        failures=$((failures + 1))
    fi
fi
# Blocks of docs/start.md behind <!-- run -->: after "$ " stands a command, and below it what it prints; "..." is anything.
compare() {
    local command=$1 expected=$2 printed pattern
    printed=$(cd "$directory" && bash -c "$command" 2>&1) || true
    pattern=$(sed 's/[][\\*?]/\\&/g; s/\.\.\./*/g' <<<"$expected")
    # shellcheck disable=SC2053
    if [[ $printed == $pattern ]]; then
        commands=$((commands + 1))
    else
        printf 'FAILED: docs/start.md: %s\nprints\n%s\n' "$command" "$printed"
        failures=$((failures + 1))
    fi
}

session() {
    local line command="" expected="" marked=false inside=false commands=0
    ln -s "$source/include" "$source/examples" "$directory/"
    ln -s "$build" "$directory/build"
    while IFS= read -r line; do
        case $line in
        '<!-- run -->') marked=true ;;
        '```console') inside=$marked ;;
        '```'*)
            [ -z "$command" ] || compare "$command" "$expected"
            command="" expected="" marked=false inside=false
            ;;
        '$ '*)
            $inside || continue
            [ -z "$command" ] || compare "$command" "$expected"
            command=${line:2} expected=""
            ;;
        *) ! $inside || expected+=${expected:+$'\n'}$line ;;
        esac
    done <"$source/docs/start.md"
    [ "$commands" -gt 5 ] || failures=$((failures + 1))
    echo "docs/start.md: $commands commands ran as it says"
}

if [ ! -x "$build/heddle" ] || [ ! -f "$build/libheddle.so" ] || grep -q '^HEDDLE_SANITIZE:[^=]*=.' "$build/CMakeCache.txt"; then
    echo "left out: docs/start.md, which wants the command and a library without sanitizers"
elif ! command -v cc >/dev/null || ! python3 -c 'import numpy' 2>/dev/null; then
    echo "left out: docs/start.md, without cc or NumPy"
else
    session
fi
exit "$((failures > 0))"
