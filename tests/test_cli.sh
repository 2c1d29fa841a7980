#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The command `heddle` from end to end: results, against NumPy's where that is there, every way an input can be bad, and
# that a failure leaves nothing behind.
# Called as  test_cli.sh <path to heddle>, or by ctest as  test_cli.sh <source> <build>.
# Options are held in variables and split on purpose; bytes are written by printf's format; `a && b || wrong` is meant as it is.
# shellcheck disable=SC2086,SC2059,SC2015
set -u
heddle=${HEDDLE_COMMAND:-${1:?usage: test_cli.sh <path to heddle>}}
[ -d "$heddle" ] && heddle=$2/heddle
[ -x "$heddle" ] || { echo "test_cli.sh: $heddle is not a program"; exit 1; }
heddle=$(cd "$(dirname "$heddle")" && pwd)/$(basename "$heddle")
tests=$(cd "$(dirname "$0")" && pwd)
directory=$(mktemp -d) && cd "$directory" || exit 1
trap 'cd / && rm -rf "$directory"' EXIT
failures=0

wrong() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

# works COMMAND...: exit status 0 and silence on stderr
works() {
    "$heddle" "$@" >out 2>err || wrong "heddle $*: status $?: $(cat err)"
    [ -s err ] && wrong "heddle $*: stderr: $(cat err)"
}

# refuses TEXT COMMAND...: exit status 2, one line on stderr with TEXT in it, and no new file
refuses() {
    local text=$1 before status
    shift
    before=$(ls -A)
    "$heddle" "$@" >out 2>err
    status=$?
    [ $status = 2 ] || wrong "heddle $*: status $status, not 2"
    [ "$(wc -l <err)" = 1 ] || wrong "heddle $*: not one line on stderr: $(cat err)"
    [ ! -s out ] || wrong "heddle $*: prints before it refuses: $(cat out)"
    grep -qF -- "$text" err || wrong "heddle $*: '$text' is not in: $(cat err)"
    [ "$(ls -A)" = "$before" ] || wrong "heddle $*: left $(comm -13 <(echo "$before") <(ls -A) | tr '\n' ' ')"
}

# The bytes of a file after its header, and its header's text.
body() { tail -c +"$(($(od -An -tu2 -j8 -N2 "$1") + 11))" "$1"; }
header() { dd if="$1" bs=1 skip=10 count="$(($(od -An -tu2 -j8 -N2 "$1")))" 2>/dev/null; }
shape() { header "$1" | sed "s/.*'shape': \(([^)]*)\).*/\1/"; }
little() { printf "\\x$(printf %02x $(($1 & 255)))\\x$(printf %02x $(($1 >> 8 & 255)))"; }

# npy VERSION HEADER: a file from a header's text, without data
npy() {
    printf '\x93NUMPY'
    printf "\\x$(printf %02x "$1")\\x00"
    little ${#2}
    [ "$1" = 1 ] || printf '\x00\x00'
    printf %s "$2"
}

int32() {
    npy 1 "{'descr': '<i4', 'fortran_order': False, 'shape': ($#,), }"
    for x; do little "$x"; printf '\x00\x00'; done
}

# The same, a row of them.
table() {
    npy 1 "{'descr': '<i4', 'fortran_order': False, 'shape': (1, $#), }"
    for x; do
        if [ "$x" -lt 0 ]; then printf '\xff\xff\xff\xff'; else little "$x" && printf '\x00\x00'; fi
    done
}

touch out err

# -------------------------------------------------------------------------------------------------- information
works --version
works --help
for command in info attention norm-linear random verify bench demo; do
    works $command --help
    grep -q "^Usage: heddle $command" out || wrong "heddle $command --help does not begin with its usage"
    ! LC_ALL=C.UTF-8 grep -q '.\{121\}' out || wrong "heddle $command --help has lines of more than 120 characters"
done
works info
grep -q 'in use: ' out || wrong "heddle info does not name an instruction set"
HEDDLE_CPU=nonsense works info
grep -q 'in use: .* (HEDDLE_CPU=nonsense changes nothing)$' out || wrong "heddle info keeps quiet about HEDDLE_CPU"
grep -q '^  cpu ' out || wrong "heddle info does not list the cpu"
refuses "is no command" nonsense
refuses "heddle: unrecognized option" info --nonsense
refuses "nonsense" bench --op nonsense
refuses "--seconds" bench --seconds -1
refuses "never fast" bench --device ref
refuses "for the page" bench --peers nonsense
refuses "no row is called" bench --filter nonsense
refuses "nonsense" bench --html page --peers nonsense
works bench --op attention --dtype f32 --filter "s64 " --seconds 0 --json --seed 3 --html page.html
[ "$(grep -c '"error": [0-9]' out)" = 2 ] || wrong "heddle bench tells no errors of two passes"
grep -q '"name": "attention b1 h1 s64 d64"' page.html || wrong "the page has no rows"
[ "$(grep -o '"[a-z0-9]*, [0-9]* threads\?"' page.html | wc -l)" = 1 ] || wrong "the page does not tell the instruction set once"
grep -q '"processor": ".*", "instruction set": ".*", "cores": "[0-9]*", "memory": "[0-9.]* GiB", "system": "[^ ]* .*", "measured' page.html ||
    wrong "the page does not tell the machine: $(grep 'const MACHINE' page.html)"
grep -q '"peak_of": "float32"' page.html && grep -q 'float32</em> peak' page.html || wrong "the page does not tell what the peak is"
! grep -q 'src=\|href=\|/\*ROWS\*/' page.html || wrong "the page asks for other files, or has places left empty"
works bench --op norm-linear --dtype f32 --filter "[1," --seconds 0 --no-error
grep -q 'norm-linear \[1,768\] -> 3072 .* backward ' out || wrong "heddle bench --no-error prints no row"
works bench --dtype f32 --filter "[16,768] -> 3072 prepared" --seconds 0 --no-error --json
grep -q '"key": "prepared"' out || wrong "what bench/cpu.py recorded without an option stands beside one: $(cat out)"
refuses "is not an option" attention nonsense
# shellcheck source-path=SCRIPTDIR source=cli/options.sh
. "$tests/cli/options.sh" || exit 1
if [ -w /dev/full ]; then
    "$heddle" info >/dev/full 2>err
    [ $? = 2 ] && grep -q "standard output" err || wrong "heddle info into a full disk: $(cat err)"
fi

# ------------------------------------------------------------------------------------------------------- random
works random --shape 1,2,33,16 --seed 3 --dtype f32 --out q.npy
cp q.npy q2.npy
works random --shape 1,2,33,16 --seed 3 --dtype f32 --out q.npy
cmp -s q.npy q2.npy || wrong "the same seed gives other numbers"
[ "$(shape q.npy)" = "(1, 2, 33, 16)" ] || wrong "shape of q.npy: $(shape q.npy)"
works random --shape 5 --out one.npy
[ "$(shape one.npy)" = "(5,)" ] || wrong "shape of one.npy: $(shape one.npy)"
refuses "--shape" random --shape 3,x --out a.npy
refuses "too large" random --shape 4000000000,4000000000 --out a.npy
refuses "--shape is missing" random --out a.npy
refuses "--out is missing" random --shape 3
refuses "--p: 2 is outside 0 to 1" random --shape 3 --dtype bool --p 2 --out a.npy
refuses "--p: -7 is outside 0 to 1" random --shape 3 --dtype bool --p -7 --out a.npy
refuses "--p is given, but only --dtype bool has a probability, and this is f32" random --shape 3 --p .5 --out a.npy
refuses "--mean is given, but --dtype bool" random --shape 3 --mean 5 --dtype bool --out a.npy
refuses "--std is given, but --dtype bool" random --shape 3 --dtype bool --std 1 --out a.npy
refuses "--std: -1 is below 0" random --shape 3 --std -1 --out a.npy
refuses "--std: 1e+39 is infinite in f32" random --shape 3 --std 1e39 --out a.npy
refuses "--mean: 1e+06 is infinite in f16" random --shape 3 --dtype f16 --mean 1e6 --out a.npy
refuses "--mean: 65520 is infinite in f16" random --shape 3 --dtype f16 --mean 65520 --std 0 --out a.npy
refuses "--mean 0, --std 60000: element " random --shape 99 --dtype f16 --std 60000 --out a.npy
refuses "is infinite in f64" random --shape 9,9 --dtype f64 --std 1e308 --out a.npy
works random --shape 3 --dtype f16 --mean 65519 --std 0 --out edge.npy
[ "$(body edge.npy | od -An -tx2 | tr -d ' \n')" = 7bff7bff7bff ] || wrong "the largest float16: $(body edge.npy | od -An -tx2)"
works random --shape 3 --dtype bool --p 1 --out edge.npy
[ "$(body edge.npy | od -An -tx1 | tr -d ' \n')" = 010101 ] || wrong "a probability of 1: $(body edge.npy | od -An -tx1)"

# ---------------------------------------------------------------------------------------------------- attention
works random --shape 1,1,45,16 --seed 4 --out k.npy
works random --shape 1,1,45,24 --seed 5 --out v.npy
works random --shape 1,2,33,24 --seed 6 --out do.npy
works random --shape 33,45 --seed 7 --out bias.npy
works random --shape 1,1,1,45 --dtype bool --p 0.8 --out mask.npy
works random --shape 2 --seed 8 --out heads.npy
attention="attention --q q.npy --k k.npy --v v.npy"
gradients="--dout do.npy --dq dq.npy --dk dk.npy --dv dv.npy"
works $attention --out o.npy --lse lse.npy --weights p.npy $gradients
[ "$(shape o.npy)$(shape lse.npy)$(shape p.npy)" = "(1, 2, 33, 24)(1, 2, 33)(1, 2, 33, 45)" ] ||
    wrong "shapes of the results"
[ "$(shape dq.npy)$(shape dk.npy)$(shape dv.npy)" = "(1, 2, 33, 16)(1, 1, 45, 16)(1, 1, 45, 24)" ] ||
    wrong "shapes of the gradients"
works $attention --mask causal-bottom-right --window 20,-1 --q-offset 7 --whole-sq 99 --softcap 5 --bias bias.npy --bool-mask mask.npy \
    --alibi heads.npy --sinks heads.npy --dropout 0.1 --seed 9 --scale 0.2 --deterministic --out o2.npy $gradients \
    --dbias dbias.npy --dsinks dsinks.npy
[ "$(shape dbias.npy)$(shape dsinks.npy)" = "(33, 45)(2,)" ] || wrong "shapes of dbias and dsinks"
cmp -s o.npy o2.npy && wrong "options make no difference"
works $attention --device ref --dtype f64 --out o.npy
works $attention --dtype bf16 --out o.npy $gradients
works $attention --time
[ "$(grep -c GFLOP/s out)" = 1 ] || wrong "--time printed: $(cat out)"
works $attention --out /dev/null

# no queries at all: what sums over them is zero, and there
works random --shape 1,2,0,16 --out q0.npy
works random --shape 1,2,0,24 --out do0.npy
works random --shape 1,500 --seed 7 --out row.npy
works random --shape 1,1,500,16 --seed 4 --out k500.npy
works random --shape 1,1,500,24 --seed 4 --out v500.npy
works attention --q q0.npy --k k500.npy --v v500.npy --bias row.npy --out o.npy --dout do0.npy --dk dk.npy --dbias db0.npy
[ "$(shape db0.npy)" = "(1, 500)" ] && cmp -s <(body db0.npy) <(head -c 2000 /dev/zero) || wrong "dbias of no queries"

# fewer dimensions hold the same numbers
works random --shape 33,16 --seed 3 --out a.npy
works attention --q a.npy --k a.npy --v a.npy --out o.npy --lse lse.npy
works random --shape 1,1,33,16 --seed 3 --out b.npy
works attention --q b.npy --k b.npy --v b.npy --out o4.npy
[ "$(shape o.npy)$(shape lse.npy)" = "(33, 16)(33,)" ] || wrong "shapes of [s, d]"
cmp -s <(body o.npy) <(body o4.npy) || wrong "[s, d] and [1, 1, s, d] differ"

# lengths that the library would clamp are refused by name, and so is a seed of nothing
int32 33 >len_q.npy
int32 45 >len_k.npy
works $attention --seqlens-q len_q.npy --seqlens-k len_k.npy --out o.npy
int32 46 >bad.npy
refuses "--seqlens-k bad.npy: element 0 is 46, but must be from 0 to 45" $attention --seqlens-k bad.npy --out x.npy
refuses "--seqlens-q bad.npy: element 0 is 46, but must be from 0 to 33" $attention --seqlens-q bad.npy --seqlens-k len_k.npy --out x.npy
{ int32 0 | head -c -4; printf '\xff\xff\xff\xff'; } >bad.npy
refuses "--seqlens-k bad.npy: element 0 is -1, but" $attention --seqlens-k bad.npy --out x.npy
refuses "--seed is given without --dropout" $attention --seed 7 --out x.npy
works $attention --dropout 0 --seed 7 --out o.npy

# packed sequences are the single ones, one after another
works random --shape 12,2,16 --seed 1 --out pack.npy
int32 0 5 5 12 >cu.npy
packed="attention --q pack.npy --k pack.npy --v pack.npy"
works $packed --cu-seqlens-q cu.npy --cu-seqlens-k cu.npy --out o.npy --lse lse.npy
[ "$(shape o.npy)$(shape lse.npy)" = "(12, 2, 16)(2, 12)" ] || wrong "shapes of packed sequences"
int32 0 13 >bad.npy
refuses "from 0 to the number of rows, 12" $packed --cu-seqlens-q bad.npy --cu-seqlens-k cu.npy --out x.npy
int32 0 7 5 12 >bad.npy
refuses "less than the 7 before it" $packed --cu-seqlens-q bad.npy --cu-seqlens-k cu.npy --out x.npy
refuses "come together" $packed --cu-seqlens-q cu.npy --out x.npy

# keys in pages, in order, are the keys themselves; -1 is no page
works random --shape 1,2,5,16 --seed 1 --out qp.npy
works random --shape 2,1,16,16 --seed 2 --out kp.npy
works random --shape 2,1,16,24 --seed 3 --out vp.npy
works random --shape 1,1,32,16 --seed 2 --out kr.npy
works random --shape 1,1,32,24 --seed 3 --out vr.npy
table 0 1 >table.npy
paged="attention --q qp.npy --k kp.npy --v vp.npy"
works $paged --block-table table.npy --mask causal-bottom-right --out o.npy
works attention --q qp.npy --k kr.npy --v vr.npy --mask causal-bottom-right --out o2.npy
[ "$(shape o.npy)" = "(1, 2, 5, 24)" ] && cmp -s o.npy o2.npy || wrong "pages in order differ from the keys"
table -1 1 >hidden.npy
works $paged --block-table hidden.npy --out o2.npy
cmp -s o.npy o2.npy && wrong "a page that is none makes no difference"
works random --shape 4,2,16 --seed 4 --out pq.npy
int32 0 4 >one.npy
works attention --q pq.npy --k kp.npy --v vp.npy --cu-seqlens-q one.npy --block-table table.npy --out o.npy
[ "$(shape o.npy)" = "(4, 2, 24)" ] || wrong "shape of packed queries"
refuses "keys are not packed" $paged --block-table table.npy --cu-seqlens-k one.npy --out x.npy
refuses "with --block-table q is [b, h, sq, d]" attention --q pq.npy --k kp.npy --v vp.npy --block-table table.npy --out x.npy
works random --shape 2,1,8,16 --out k8.npy
refuses "page = 8 is not 16" attention --q qp.npy --k k8.npy --v k8.npy --block-table table.npy --out x.npy
refuses "[pages, hk, page, dv] = [1, 1, 32, 16] is expected" attention --q qp.npy --k kr.npy --v kp.npy --block-table table.npy --out x.npy
works random --shape 1,2,5,24 --out dop.npy
refuses "HEDDLE_PAGES has no backward" $paged --block-table table.npy --dout dop.npy --dq x.npy

# the result has the type of the input
for type in f16 f64; do
    for x in q k v; do works random --shape 4,7,8 --seed 1 --dtype $type --out $x$type.npy; done
done
works attention --q qf16.npy --k kf16.npy --v vf16.npy --out o.npy --lse lse.npy
header o.npy | grep -q "<f2" && header lse.npy | grep -q "<f4" || wrong "types of float16's results"
works attention --q qf64.npy --k kf64.npy --v vf64.npy --out o.npy --dtype f32
header o.npy | grep -q "<f8" || wrong "type of float64's result"
works attention --q qf64.npy --k kf64.npy --v vf64.npy --out o.npy --lse lse.npy --device ref
header lse.npy | grep -q "<f8" || wrong "type of float64's lse"
refuses "--dtype f32 to compute in float32" attention --q qf64.npy --k kf64.npy --v vf64.npy --out x.npy

refuses "--q FILE is missing" attention --k k.npy --v v.npy --out x.npy
refuses "nothing is asked for" $attention
refuses "needs --dout" $attention --dq x.npy
refuses "no gradient is asked for" $attention --out x.npy --dout do.npy
refuses "needs --bias" $attention --out x.npy --dout do.npy --dbias y.npy
refuses "'abc' is not a finite number" $attention --out x.npy --scale abc
refuses "'nan' is not a finite number" $attention --out x.npy --softcap nan
refuses "is none of none, causal-top-left, causal-bottom-right" $attention --out x.npy --mask causal
refuses "not two numbers" $attention --out x.npy --window 3
refuses "--window: -5,3 is below -1" $attention --out x.npy --window -5,3
refuses "--softcap: 0 would make all scores equal" $attention --out x.npy --softcap 0
refuses "--whole-sq: 0 is outside" $attention --out x.npy --whole-sq 0
refuses "--whole-sk: 0 is outside" $attention --out x.npy --whole-sk 0
refuses "--block-size is for the blocks" $attention --out x.npy --block-size 64,64
refuses "--multiprocessors is for --device cuda, but this is cpu" $attention --out x.npy --multiprocessors 3
refuses "--multiprocessors: 0 is outside" $attention --out x.npy --multiprocessors 0
refuses "q-offset" $attention --out x.npy --q-offset -3
refuses "whole_sq = 3 ends before" $attention --out x.npy --q-offset 2 --whole-sq 3
refuses "is none of f32, bf16, f16, f64" $attention --out x.npy --dtype f8
refuses "dropout = 1.5" $attention --out x.npy --dropout 1.5
refuses "has shape [1, 2, 33, 16], but [b, h, sq, dv] = [1, 2, 33, 24] is expected" $attention --dout q.npy --dq y.npy
refuses "does not broadcast" $attention --out x.npy --bias q.npy
refuses "it is float32, but bool" $attention --out x.npy --bool-mask bias.npy
refuses "is float16, but --q q.npy is float32" attention --q q.npy --k kf16.npy --v v.npy --out x.npy
refuses "the same number of dimensions" attention --q q.npy --k a.npy --v a.npy --out x.npy
works random --shape 1,3,45,16 --out k3.npy
works random --shape 1,3,45,24 --out v3.npy
refuses "hk = 3 does not divide h = 2" attention --q q.npy --k k3.npy --v v3.npy --out x.npy

# -------------------------------------------------------------------------------------------------- norm-linear
works random --shape 4,3,20 --seed 1 --mean 2 --out x.npy
works random --shape 7,20 --seed 2 --std 0.1 --out w.npy
works random --shape 20 --seed 3 --out g.npy
works random --shape 20 --seed 4 --out be.npy
works random --shape 7 --seed 5 --out c.npy
works random --shape 4,3,7 --seed 6 --out dy.npy
works norm-linear --x x.npy --w w.npy --out y.npy
affine="--gamma g.npy --beta be.npy --bias c.npy"
works norm-linear --x x.npy --w w.npy $affine --out y.npy --mean mean.npy --rstd rstd.npy \
    --dout dy.npy --dx dx.npy --dgamma dg.npy --dbeta db.npy --dw dw.npy --dbias dc.npy --eps 1e-4 --norm layer
[ "$(shape y.npy)$(shape mean.npy)$(shape dx.npy)$(shape dg.npy)$(shape dw.npy)$(shape dc.npy)" = \
    "(4, 3, 7)(4, 3)(4, 3, 20)(20,)(7, 20)(7,)" ] || wrong "shapes of norm-linear's results"
works norm-linear --x x.npy --w w.npy --norm rms --out y2.npy --time
cmp -s y.npy y2.npy && wrong "rms makes no difference"
refuses "--w FILE is missing" norm-linear --x x.npy --out z.npy
refuses "is expected" norm-linear --x x.npy --w w.npy --gamma c.npy --out z.npy
refuses "is not above 0" norm-linear --x x.npy --w w.npy --eps 0 --out z.npy
refuses "--multiprocessors is for --device cuda, but this is ref" norm-linear --x x.npy --w w.npy --out z.npy \
    --multiprocessors 3 --device ref
refuses "is none of layer, rms" norm-linear --x x.npy --w w.npy --norm batch --out z.npy
works norm-linear --x x.npy --w w.npy --activation silu --out y3.npy --u u.npy --dout y.npy --dx dx3.npy
[ "$(shape y3.npy)$(shape u.npy)$(shape dx3.npy)" = "(4, 3, 7)(4, 3, 7)(4, 3, 20)" ] || wrong "shapes with an activation"
works norm-linear --x x.npy --w w.npy --out y4.npy
cmp -s u.npy y4.npy || wrong "u is not what is there without an activation"
cmp -s y3.npy y4.npy && wrong "--activation changes nothing"
works random --shape 14,20 --seed 12 --std 0.1 --out w2.npy
works norm-linear --x x.npy --w w2.npy --activation swiglu --out y8.npy --u u8.npy --dout dy.npy --dx dx8.npy --dw dw8.npy \
    --dbias dc8.npy
[ "$(shape y8.npy)$(shape u8.npy)$(shape dx8.npy)$(shape dw8.npy)$(shape dc8.npy)" = \
    "(4, 3, 7)(4, 3, 14)(4, 3, 20)(14, 20)(14,)" ] || wrong "shapes with a gate"
works norm-linear --x x.npy --w w2.npy --out y9.npy
cmp -s u8.npy y9.npy || wrong "u of two halves is not what is there without an activation"
refuses "has 7 rows, but a gate" norm-linear --x x.npy --w w.npy --activation geglu --out y8.npy
refuses "is expected" norm-linear --x x.npy --w w2.npy --activation geglu --bias c.npy --out y8.npy
cp y4.npy residual.npy
works norm-linear --x x.npy --w w.npy --residual residual.npy --out y5.npy
cmp -s y5.npy y4.npy && wrong "--residual adds nothing"
works norm-linear --x x.npy --w w.npy --out y6.npy --z z.npy
cmp -s y6.npy y4.npy || wrong "--z changes out"
cp z.npy dz.npy
works norm-linear --x x.npy --w w.npy --out y6.npy --dout y4.npy --dx dx6.npy --z z.npy
works norm-linear --x x.npy --w w.npy --out y6.npy --dout y4.npy --dx dx7.npy --z z.npy --dz dz.npy
cmp -s dx6.npy dx7.npy && wrong "--dz adds nothing"
refuses "--dz needs --dout" norm-linear --x x.npy --w w.npy --dz dz.npy --dx dx8.npy
refuses "with HEDDLE_NO_NORM z is x" norm-linear --x x.npy --w w.npy --norm none --out y7.npy --z z7.npy
refuses "is none of none, gelu, gelu-tanh, silu, geglu, geglu-tanh, swiglu" norm-linear --x x.npy --w w.npy \
    --activation relu --out z.npy
refuses "HEDDLE_ACTIVATION is not set" norm-linear --x x.npy --w w.npy --out z.npy --u u.npy

# ---------------------------------------------------------------------------------------------------- bad files
bad() { # TEXT FILE
    refuses "$1" attention --q "$2" --k k.npy --v v.npy --out new.npy
}
bad "No such file" missing.npy
bad "Is a directory" .
: >bad.npy; bad "not a .npy file" bad.npy
printf 'hello, this is no array' >bad.npy; bad "not a .npy file" bad.npy
head -c 7 q.npy >bad.npy; bad "truncated" bad.npy
head -c 40 q.npy >bad.npy; bad "truncated: it ends inside its header" bad.npy
head -c 1000 q.npy >bad.npy; bad "truncated: its data ends after" bad.npy
{ cat q.npy; printf x; } >bad.npy; bad "goes on after" bad.npy
npy 4 "{}" >bad.npy; bad "version 4.0" bad.npy
sed 's/<f4/>f4/' q.npy >bad.npy; bad "big-endian" bad.npy
sed 's/<f4/<i8/' q.npy >bad.npy; bad "type '<i8'" bad.npy
sed 's/<f4/<c8/' q.npy >bad.npy; bad "type '<c8'" bad.npy
sed 's/False/True /' q.npy >bad.npy; bad "Fortran order" bad.npy
header_bad() { npy 1 "$1" >bad.npy; bad "$2" bad.npy; }
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 4), }" "too large"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 0), }" "too large"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,), }" "below 2^63"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000), }" "truncated"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }" "from 0"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (3), }" "malformed"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (1,1,1,1,1,1,1,1,1), }" "more than 8 dimensions"
header_bad "{'descr': '<f4', 'fortran_order': False, }" "malformed"
header_bad "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3,), }" "malformed"
header_bad "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'more': 1, }" "malformed"
header_bad "{'descr': '<f4', 'fortran_order': Maybe, 'shape': (3,), }" "malformed"
header_bad "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,), }" "records"
header_bad "{'descr': '<f4" "malformed"
header_bad "{'descr': '<f4
rm -rf', 'fortran_order': False, 'shape': (3,), }" "malformed"
header_bad "" "malformed"
header_bad "nonsense" "malformed"
{ printf '\x93NUMPY\x02\x00\xff\xff\xff\xff'; cat q.npy; } >bad.npy; bad "malformed" bad.npy

# versions 2 and 3, other spellings of the header, and pipes
for version in 1 2 3; do
    { npy $version "  {\"shape\":( 1,2 ,33,16L) , 'fortran_order':False,'descr':'<f4'}  
"; body q.npy; } >same.npy
    works attention --q same.npy --k k.npy --v v.npy --out o3.npy
done
works $attention --out o4.npy
cmp -s o3.npy o4.npy || wrong "another spelling of the header gives another result"
works attention --q <(cat q.npy) --k k.npy --v v.npy --out o3.npy
cmp -s o3.npy o4.npy || wrong "a pipe gives another result"

# -------------------------------------------------------------------------------- all outputs or none, no leftovers
refuses "No such file" $attention --out new.npy --lse nowhere/lse.npy
refuses "two outputs" $attention --out new.npy --lse ./new.npy
mkdir sub
refuses "Is a directory" $attention --out new.npy --lse sub
[ -w /dev/full ] && refuses "No space left" $attention --out new.npy --lse /dev/full
refuses "No such file" $attention --out "" --lse new.npy
cp o4.npy kept.npy
(ulimit -f 2 && refuses "File too large" $attention --lse new.npy --out kept.npy && exit $failures)
[ $? = $failures ] || failures=$((failures + 1))
cmp -s o4.npy kept.npy || wrong "a failed write changed the file that was there"
ln -s o4.npy link.npy
works $attention --out link.npy
[ -L link.npy ] || wrong "a symbolic link was replaced"
mkdir there
ln -s new4.npy chain.npy
ln -s there/new5.npy far.npy
ln -s nowhere/new.npy lost.npy
ln -s loop.npy loop.npy
ln -s chain.npy dangling.npy
works $attention --out dangling.npy --lse far.npy
[ -L dangling.npy ] && [ -L chain.npy ] && cmp -s o4.npy new4.npy || wrong "a dangling link was not written through"
[ -L far.npy ] && [ "$(shape there/new5.npy)" = "(1, 2, 33)" ] || wrong "a link into a directory was not written through"
refuses "lost.npy: No such file" $attention --out lost.npy
refuses "Too many levels" $attention --out loop.npy
refuses "two outputs" $attention --out dangling.npy --lse new4.npy
chmod 600 kept.npy
works $attention --out kept.npy
[ "$(stat -c %a kept.npy)" = 600 ] || wrong "the file's mode was not kept"
left=$(find . -maxdepth 1 -name '.heddle*')
[ -z "$left" ] || wrong "temporary files were left: $left"

# ------------------------------------------------------------------------------------------------ verify and demo
for case in p22 day19 day50 day55 fa2-warps; do
    works verify --device cpu --case $case
    grep -q "overall: ok" out || wrong "heddle verify --case $case does not end with a verdict"
done
works verify --device ref --case fa2-warps
refuses "is none of p22" verify --case nonsense
works verify --device cpu --filter "fa2-warps: test 1" --json checks.json
line='^{"case": "fa2-warps", "name": "test 1: 4×4.*", "check": ".*", "device": "cpu", "family": "[a-z0-9]*", "dtype": "f32", "error": [0-9.e-]*'
[ "$(grep -c "$line, \"over_plain\": [0-9.e-]*, \"passed\": true}\$" checks.json)" = 5 ] &&
    [ "$(grep -c "$line, \"over_plain\": null, \"passed\": true}\$" checks.json)" = 5 ] && [ "$(wc -l <checks.json)" = 10 ] ||
    wrong "the checks as JSON: $(cat checks.json)"
grep -q "overall: ok, 10 checks" out && ! grep -q "test 2" out || wrong "heddle verify --filter runs others: $(cat out)"
works verify --device cpu --filter "attention, window of" --json checks.json
[ "$(sed 's/.*"dtype": "\([^"]*\)".*/\1/' checks.json | tr '\n' ' ')" = "f32 bf16 f16 " ] && grep -q "^  window of one key .* ok$" out &&
    grep -q "overall: ok, 1 checks" out || wrong "a line of the sweep as JSON: $(cat out checks.json)"
works verify --device cpu --filter "test 1" --json /dev/null
cp checks.json kept.json
refuses "no problem is called nonsense" verify --filter nonsense --json kept.json
cmp -s checks.json kept.json || wrong "checks that were not made took the place of others"
refuses "No such file" verify --filter "test 1" --json nowhere/checks.json
refuses "without --case and --filter" verify --bins --filter "test 1"
works verify --device cpu --bins --random 2 --json bins.json
works verify --device cpu --bins --random 2 --json bins.json
grep -q '^{"device": "cpu", "dtype": "b\?f[0-9]*", "d_up_to": ' bins.json && [ $(($(wc -l <bins.json) % 2)) = 0 ] || wrong "bins: $(cat bins.json)"
# on a terminal, how long it will take
if python3 -c 'import pty' 2>/dev/null; then
    cat >terminal.py <<'PY'
import os, pty, sys
process, terminal = pty.fork()
if process == 0:
    os.execv(sys.argv[1], sys.argv[1:])
text = b""
try:
    while more := os.read(terminal, 4096):
        text += more
except OSError:
    pass
sys.stdout.buffer.write(text)
sys.exit(os.waitpid(process, 0)[1])
PY
    python3 terminal.py "$heddle" verify --device cpu --case p22 >out || wrong "heddle verify on a terminal: $(cat out)"
    grep -q $'^0 of 3\r\033\[K' out && grep -q $'2 of 3, 0:0[0-9] left\r\033\[K random dY' out && ! grep -q '3 of 3' out ||
        wrong "no progress on a terminal: $(cat -v out)"
fi
works demo --quick
grep -q "once printed" out || wrong "heddle demo --quick does not show what was once printed"
refuses "is not an option" demo nonsense

# ----------------------------------------------------------------------------------------- the same by NumPy, if there
if python3 -c 'import numpy' 2>/dev/null; then
    works $attention --mask causal-top-left --bias bias.npy --out o.npy --lse lse.npy --dout do.npy --dq dq.npy \
        --dbias dbias.npy
    works norm-linear --x x.npy --w w.npy $affine --out y.npy
    python3 - <<'PY' || wrong "NumPy computes something else"
import numpy as np
q, k, v, do, bias = (np.load(n + '.npy').astype(float) for n in ('q', 'k', 'v', 'do', 'bias'))
s = q @ k.swapaxes(-1, -2) / 4 + bias
s = np.where(np.tri(33, 45, dtype=bool), s, -np.inf)
lse = np.log(np.exp(s).sum(-1))
p = np.exp(s - lse[..., None])
dp = do @ v.swapaxes(-1, -2)
ds = p * (dp - (p * dp).sum(-1, keepdims=True))
x, g, be, w, c = (np.load(n + '.npy').astype(float) for n in ('x', 'g', 'be', 'w', 'c'))
z = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + be
for name, right in (('o', p @ v), ('lse', lse), ('dq', ds @ k / 4), ('dbias', ds.sum((0, 1))), ('y', z @ w.T + c)):
    mine = np.load(name + '.npy')
    assert mine.dtype == np.float32 and mine.shape == right.shape, name
    assert np.abs(mine - right).max() < 4e-6 * np.abs(right).max(), (name, np.abs(mine - right).max())
PY
fi

[ $failures = 0 ] && echo "ok"
[ $failures = 0 ]
