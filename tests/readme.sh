#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program in the README is examples/smallest.c, letter by letter: readme.sh <source tree>
set -eu
awk '/^<!-- examples\/smallest.c -->$/ { marked = 1; next }
     marked && /^```c$/ { inside = 1; next }
     inside && /^```$/ { exit }
     inside' "$1/README.md" | diff "$1/examples/smallest.c" - || {
    echo "README.md and examples/smallest.c differ" >&2
    exit 1
}
echo "ok: README.md shows examples/smallest.c"
