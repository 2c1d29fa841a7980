#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# sweep.sh <test_sweep> <cases> [<processes>]: so many random cases of attention and as many of norm-linear, of
# consecutive seeds from HEDDLE_SEED on, divided among processes (on a GPU, which has one process at a time, among as many
# threads of one); then the record: cases, failures, and for each bin the average of error over that of the plain
# computation, added to the end of HEDDLE_SWEEP_RECORD (or printed). Device, instruction set and family of kernels are
# those of HEDDLE_TEST_DEVICE, HEDDLE_CPU and HEDDLE_CUDA_FAMILY. Needs no network and builds nothing.
# sweep.sh --merge <counts>: the record of what several runs have left in HEDDLE_SWEEP_KEEP (a folder), on another machine
# than this one if HEDDLE_MACHINE names it. A record that is among them counts with the averages that it has, which are
# rounded to three digits.
# Exit status 1 when a case failed, a bin of 100 cases has an average above 1.1, or a process did not come to its end.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
most=1.1 # docs/design.md, section 4

# What the numbers are of: the processor's or the GPU's name, and the kernels.
machine() {
    if [ -n "${HEDDLE_MACHINE:-}" ]; then
        echo "$HEDDLE_MACHINE"
    elif [ "${HEDDLE_TEST_DEVICE:-cpu}" = cuda ]; then
        nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1
    else
        sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
    fi
}

# merge <counts>: the record on standard output; what is wrong on standard error.
merge() {
    awk -v commit="${HEDDLE_COMMIT:-$(git -C "$here" rev-parse HEAD 2>/dev/null)}" -v date="$(date -u +%Y-%m-%d)" \
        -v machine="$(machine)" -v most="$most" '
        function add_bin(bin, tensor, n, log_sum) {
            if (!(bin in tensors)) order[bins++] = bin
            if (!((bin, tensor) in count)) tensors[bin] = tensors[bin] " " tensor
            count[bin, tensor] += n; sum[bin, tensor] += log_sum
        }
        function add_cases(operation, n, wrong, from, to) {
            cases[operation] += n; failed[operation] += wrong
            if (!n) return # seeds of nothing
            if (!(operation in first) || from < first[operation]) first[operation] = from
            if (!(operation in last) || to > last[operation]) last[operation] = to
        }
        function add_device(name) {
            if (!(name in devices)) { devices[name] = 1; backend = backend (backend ? ", " : "") name }
        }
        /^[{ }]/ { # of a record
            split($0, part, "\"")
            if ($0 ~ /^\{"commit"/) {
                n = split(part[16], names, ", ")
                for (i = 1; i <= n; i++) add_device(names[i])
            } else if ($0 ~ /^ "(attention|norm-linear)"/) {
                n = split($0, x, /[^0-9]+/)
                add_cases(part[2], x[2], x[3], x[4], x[5])
            } else if ($0 ~ /^ "comparisons"/) {
                n = split($0, x, /[^0-9]+/)
                compared += x[2]; silent += x[3]
            } else if ($0 ~ /^ "worst/) {
                split($0, x, /: |,/)
                if (x[3] + 0 > worst) { worst = x[3] + 0; where = part[8] }
            } else if ($0 ~ /^  "/) {
                line = $0
                while (match(line, /"[a-z]+": \[[0-9]+, [0-9.]+\]/)) {
                    split(substr(line, RSTART, RLENGTH), x, /[^a-z0-9.]+/)
                    add_bin(part[2], x[2], x[3], x[3] * log(x[4] > 0 ? x[4] : 0.0004))
                    line = substr(line, RSTART + RLENGTH)
                }
            }
        }
        $1 == "device" { add_device($2 " " $3) }
        $1 == "cases" { add_cases($2, $4, $5, $3, $3 + $4 - 1) }
        $1 == "compared" { compared += $2; silent += $3 }
        $1 == "worst" && $2 > worst { worst = $2; where = $3 " " $4 }
        $1 == "bin" { add_bin($2 " " $3 " " $4 "<=" $5 " " $6 "<=" $7, $8, $9, $10) }
        END {
            printf "{\"commit\": \"%s\", \"date\": \"%s\", \"machine\": \"%s\", \"backend\": \"%s\",\n", commit, date, machine, backend
            n = split("attention norm-linear", operations, " ")
            for (i = 1; i <= n; i++) {
                o = operations[i]
                printf " \"%s\": {\"cases\": %d, \"failed\": %d, \"seeds\": [%.0f, %.0f]},\n", o, cases[o], failed[o], first[o], last[o]
                wrong += failed[o]
            }
            if (compared) printf " \"comparisons\": {\"compared\": %d, \"silent\": %d},\n", compared, silent
            printf " \"worst_error_over_tolerance\": {\"ratio\": %.3f, \"tensor\": \"%s\"},\n \"bins\": {\n", worst, where
            for (i = 0; i < bins; i++) {
                n = split(tensors[order[i]], names, " ")
                printf "  \"%s\": {", order[i]
                for (j = 1; j <= n; j++) {
                    c = count[order[i], names[j]]
                    average = exp(sum[order[i], names[j]] / c)
                    printf "%s\"%s\": [%d, %.3f]", (j > 1 ? ", " : ""), names[j], c, average
                    if (c >= 100 && average > most) {
                        printf "%s, %s: %.3f times the error of the plain computation on average of %d\n", order[i], names[j], average, c >"/dev/stderr"
                        wrong++
                    }
                }
                printf "}%s\n", (i + 1 < bins ? "," : "")
            }
            print " }}"
            exit (wrong > 0)
        }' "$@"
}

if [ "${1:-}" = --merge ]; then
    shift
    merge "$@"
    exit
fi

program=$1
cases=$2
processes=${3:-1}
seed=${HEDDLE_SEED:-1000000000}
status=0
running=()
[[ $cases =~ ^[0-9]+$ && $processes =~ ^[1-9][0-9]*$ && $seed =~ ^[0-9]+$ ]] || {
    echo "sweep.sh: cases, processes and HEDDLE_SEED are numbers" >&2
    exit 2
}
export HEDDLE_THREADS=1
if [ "${HEDDLE_TEST_DEVICE:-cpu}" = cuda ]; then
    HEDDLE_THREADS=$processes
    processes=1
fi
for ((i = 0; i < processes; i++)); do
    begin=$((cases * i / processes)) end=$((cases * (i + 1) / processes))
    HEDDLE_SEED=$((seed + begin)) HEDDLE_CASES=$((end - begin)) HEDDLE_COUNTS=$work/$i.counts \
        OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$program" >"$work/$i.out" 2>&1 &
    running+=($!)
done
for ((i = 0; i < processes; i++)); do
    code=0
    wait "${running[$i]}" || code=$?
    [ "$code" -ne 77 ] || {
        cat "$work/$i.out"
        exit 77
    }
    # The failures with what was wrong, or the end of what a process said that ended otherwise.
    grep -vE '^\[|cases from seed|on average: worst|tensors compared' "$work/$i.out"
    if [ "$code" -ne 0 ]; then
        status=1
        echo "process $i ended with status $code: $(grep -h ^cases "$work/$i.counts" | paste -sd ';' -)"
    fi
done
if [ -n "${HEDDLE_SWEEP_KEEP:-}" ]; then
    mkdir -p "$HEDDLE_SWEEP_KEEP"
    for ((i = 0; i < processes; i++)); do
        cp "$work/$i.counts" "$HEDDLE_SWEEP_KEEP/$(sed -n 's/^device \(.*\) \(.*\)$/\1-\2/p' "$work/$i.counts")-$seed-$cases-$i.counts"
    done
fi
merge "$work"/*.counts >"$work/record" || status=1
if [ -n "${HEDDLE_SWEEP_RECORD:-}" ]; then
    cat "$work/record" >>"$HEDDLE_SWEEP_RECORD"
else
    cat "$work/record"
fi
sed -n 's/^ "\([a-z-]*\)": {"cases": \([0-9]*\), "failed": \([0-9]*\).*$/\1: \2 cases, \3 failed/p' "$work/record"
# Last, so that whoever keeps the end of this alone has them.
sed -n 's/^\(.*\) FAILED: HEDDLE_SEED=\([0-9]*\) .*$/\1: seed \2 failed/p' "$work"/*.out
exit "$status"
