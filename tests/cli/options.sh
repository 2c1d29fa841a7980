# SPDX-License-Identifier: Apache-2.0
# The command passes no argument over: not behind what stands alone, not an option that is given twice, not one that says nothing
# of the rest. A part of test_cli.sh, whose functions it calls.
# Options are held in variables and split on purpose.
# shellcheck shell=bash disable=SC2086

for alone in --version --help -h help; do
    refuses "'extra' is given beside $alone" $alone extra
done
for command in info attention norm-linear random verify bench demo; do
    refuses "'extra' is not an option" $command --help extra
    refuses "--help is given twice" $command --help --help
done
refuses "--q is given beside --help" attention --q q.npy --help
refuses "--out is given beside --help" random --help --shape 3 --out a.npy
refuses "'--check' is not an option" demo --help -- --check
twice() { # COMMAND OPTION...
    refuses "$2 is given twice; see heddle $1 --help" "$@" "${@:2}"
}
for option in "--q a" "--out a" "--mask none" "--window 1,2" "--dropout 0.1" "--dtype f32" "--multiprocessors 2" --time --deterministic; do
    twice attention $option
done
for option in "--x a" "--out a" "--norm rms" "--eps 1" "--device cpu" --time --deterministic; do
    twice norm-linear $option
done
for option in "--shape 3" "--out a" "--seed 1" "--dtype f32" "--mean 1" "--std 1" "--p 1"; do
    twice random $option
done
for option in "--device cpu" "--case p22" "--filter a" "--seed 1" "--random 1" "--json a" --bins --verbose; do
    twice verify $option
done
for option in "--op all" "--device cpu" "--dtype f32" "--filter a" "--seconds 1" "--seed 1" "--html a" --no-error --json; do
    twice bench $option
done
for option in "--device cpu" "--text a" --quick; do
    twice demo $option
done
refuses "--out is given twice" random --shape 3 --out one.npy --dtype f32 --ou=two.npy
refuses "for the page" bench --peers one --peers two # which may be given several times
refuses "--random is for the sweep, which --case p22 leaves out" verify --case p22 --random 3
refuses "--verbose is for the sweep, which --case day19 leaves out" verify --case day19 --verbose
refuses "--verbose is for the sweep, which --bins leaves out" verify --bins --verbose
refuses "--random: with 0" verify --bins --random 0
for case in fa2-warps day55; do
    refuses "--seed is given, but nothing of --case $case is random" verify --case $case --seed 3
done
refuses "--text is for the training, which --quick leaves out" demo --quick --text .
refuses "--check is for the training, which --quick leaves out" demo --quick -- --check
refuses "--dev=ref is for heddle demo, too" demo -- --steps 1 --dev=ref
refuses "--text is for heddle demo, too" demo -- --text .
