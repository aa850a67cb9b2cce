#!/usr/bin/env bash
# This script is `make test`, once everything is installed: it starts a Slurm cluster, and runs lint,
# types and tests.
#   tests/run.sh BIN [PYTEST ARGUMENTS]      BIN is the bin folder of the environment
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "$1")
shift

loud() { printf '\n*** %s\n\n' "$*" >&2; }

# The tests start hundreds of processes. Without bytecode files each would compile our modules anew.
unset PYTHONDONTWRITEBYTECODE
# One process does so for all what has changed, while the cluster starts; so does mypy its work.
compiling=""
said=""
types=""
if ! (($#)); then
    compiled=tests/__pycache__/compiled
    set -m # each gets a process group, so that `stop` reaches all processes that it starts
    if ! [[ -e $compiled ]] || [[ "$(dirname "$bin")/.test" -nt $compiled ]] ||
        [[ $(find tests hpctrain data_prep -name '*.py' -newer "$compiled" -print -quit) ]]; then
        mkdir -p tests/__pycache__
        touch "$compiled.begun"
        { "$bin/python" -m pytest --collect-only -qq && mv "$compiled.begun" "$compiled"; } \
            >/dev/null 2>&1 &
        compiling=$!
    fi
    said=$(mktemp -d)
    make --no-print-directory VENV="$(dirname "$bin")" types >"$said/types" 2>&1 &
    types=$!
    set +m
fi

ours=false
beside=""
stop() {
    for group in $compiling $beside $types; do kill -INT -- "-$group" 2>/dev/null || true; done
    if $ours; then slurm/dev-cluster down; fi
    if [[ $said ]]; then rm -rf "$said"; fi
}
trap stop EXIT
trap 'exit 130' INT # pytest ends itself on Ctrl-C, but bash would go on

# The tests that are not marked slurm ask a cluster for its limits where Slurm is installed. Each
# worker process that runs tests marked slurm starts a cluster of its own (tests/cluster.py).
if slurm/dev-cluster status >/dev/null 2>&1; then
    echo "using the development cluster that is up"
elif reason=$(slurm/dev-cluster check 2>&1); then
    ours=true
    slurm/dev-cluster up --nodes 4
else
    loud "NO SLURM CLUSTER: every test marked slurm is SKIPPED, because: $reason"
    if [[ ${CI:-} == true ]]; then
        loud "CI=true: a missing cluster is a failure"
        exit 1
    fi
fi
if slurm/dev-cluster status >/dev/null 2>&1; then
    eval "$(slurm/dev-cluster env)"
fi

make --no-print-directory VENV="$(dirname "$bin")" lint
if [[ $compiling ]]; then wait "$compiling" || true; fi # an error is told by the tests
compiling=""
all=()
if [[ ${HPCTRAIN_TESTS:-} == all ]]; then all=(--all); fi
# The order is that of tests/hooks.py, and not that of the number of tests in a file.
tests() { "$bin/python" -m pytest --durations=25 --no-loadscope-reorder "${all[@]}" "$@"; }
failed=0
if (($#)); then
    make --no-print-directory VENV="$(dirname "$bin")" types
    tests "$@" || failed=$?
else
    # The cluster tests mostly wait. The other tests run at the same time, in two processes, and
    # when the cluster tests have ended, a third process runs the tests of `later`, and those of
    # `parity` once more as on a CPU without vector instructions. Their output is shown afterwards.
    # make test-all has all layouts and four ranks there, too.
    parity=(tests/parallel/test_{parity,batch_norm,precision}.py
        -k "(one_process or bounds) and not -4-")
    if ((${#all[@]})); then parity=(tests/parallel tests/models/test_fields.py -k one_process); fi
    later=(tests/config tests/data tests/data_prep tests/session tests/shards)
    mkdir "$said/shared"
    export HPCTRAIN_TESTS_SHARED=$said/shared # tests/conftest.py
    style=(-o console_output_style=classic) # without percentages, which would fill a wide log
    if [[ -t 1 ]]; then style+=(--color=yes); fi
    set -m
    tests -m "not slurm" -n 2 --dist loadfile "${later[@]/#/--ignore=}" \
        --outcomes "$said/beside.json" "${style[@]}" \
        >"$said/beside" 2>&1 &
    beside=$!
    set +m
    codes=(0 0 0 0) # of the four runs of pytest
    tests -m slurm -n 3 --dist loadgroup --timeout 900 --outcomes "$said/cluster.json" \
        "${style[@]}" 2>&1 | tee -i "$said/cluster" || codes[0]=$?
    # The cluster has left a part of the machine free, which two processes of pytest would not use.
    tests -m "not slurm" "${later[@]}" --outcomes "$said/later.json" "${style[@]}" \
        >"$said/later" 2>&1 || codes[2]=$?
    ATEN_CPU_CAPABILITY=default tests -m "not slurm" "${parity[@]}" \
        --outcomes "$said/parity.json" "${style[@]}" >"$said/parity" 2>&1 || codes[3]=$?
    wait "$types" || failed=$?
    types=""
    wait "$beside" || codes[1]=$?
    beside=""
    cat "$said/types" "$said/beside" "$said/later" "$said/parity"
    # The failures are repeated at the end, for readers who see only the end of a log.
    if ((failed || codes[0] || codes[1] || codes[2] || codes[3])); then
        sed -sn '/= \(ERRORS\|FAILURES\) =/,$p' "$said"/{beside,later,parity,cluster}
        grep ': error: ' "$said/types" || true
    fi
    grep --no-filename 'slow tests were left out' "$said/beside" "$said/later" || true
    # On a busy machine, a test fails by accident now and then. The log has the output of both tries.
    if ((codes[0] || codes[1] || codes[2])); then
        "$bin/python" -m tests.second_try "$said/cluster.json=${codes[0]}" \
            "$said/beside.json=${codes[1]}" "$said/later.json=${codes[2]}" \
            -- "${all[@]}" --timeout 900 || failed=$?
    fi
    if ((codes[3])); then
        ATEN_CPU_CAPABILITY=default "$bin/python" -m tests.second_try \
            "$said/parity.json=${codes[3]}" -- "${all[@]}" --timeout 900 || failed=$?
    fi
fi
((failed == 0))
