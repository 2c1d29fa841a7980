#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The lines of C in the README are lines of examples/smallest.c, in their order: readme.sh <source tree>
set -eu
awk 'FNR == 1 { file++ }
     { line = $0; sub(/^ +/, "", line) }
     file == 1 && /^<!-- examples\/smallest.c -->$/ { marked = 1 }
     file == 1 && marked && /^```c$/ { inside = 1; next }
     file == 1 && /^```$/ { inside = marked = 0 }
     file == 1 && inside { wanted[++count] = line }
     file == 2 && found < count && index(line, wanted[found + 1]) == 1 { found++ }
     END {
         if (count < 5 || found < count) {
             print "README.md: examples/smallest.c has no line, or no such line there: " wanted[found + 1] > "/dev/stderr"
             exit 1
         }
         print "ok: README.md shows " count " lines of examples/smallest.c"
     }' "$1/README.md" "$1/examples/smallest.c"
