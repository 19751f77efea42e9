#!/usr/bin/env bash
# All checks and tests; ends with one summary of them. With arguments: the checks, and pytest with these arguments:
# scripts/test.sh tests/plan -k runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/test.sh"
"$python" -m scripts.bootstrap cpu dev
scripts/fetch_prometheus.sh .venv/bin
export PATH="$PWD/.venv/bin:$PATH"

step() {
    printf '\n== %s\n' "$*"
    "$@"
}
if (($#)); then
    step ruff check .
    step ruff format --check .
    step mypy
    step lint-imports
    step python -m pytest -q --durations=15 "$@"
    exit
fi

# All that tests draw follows from it (tests/seeds.py).
export KVFERRY_SEED="${KVFERRY_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}"
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

check() { step "$@" || echo "FAILED $*" >>"$logs/failed checks"; }
checks() {
    check ruff check .
    check ruff format --check .
    check mypy
    check lint-imports
}
# A test of ten minutes hangs. Its stack is printed and its process ends, which only this can bring about: NIXL may hang
# while it holds the interpreter's lock.
tests() {
    step python -m pytest -q --durations=25 -o "cache_dir=$logs/cache" -o faulthandler_timeout=600 \
        -o faulthandler_exit_on_timeout=true "$@" tests
}

status=0
{ checks >"$logs/checks" 2>&1 && cat "$logs/checks"; } &
tests -n 4 --no-loadscope-reorder --max-worker-restart=0 | tee "$logs/tests" || status=$?
wait

# The tests that a run left in pytest's cache under this name.
named() { sed -n 's/^ *"\(.*\)": true,\?$/\1/p' "$logs/cache/v/$1" 2>/dev/null; }
# Whether the first name is one of the others.
among() {
    local name="$1" other
    shift
    for other; do [[ $other != "$name" ]] || return 0; done
    return 1
}

# Up to three tests that failed beside others are run once more by themselves, with the same seed. Processes of four
# workers share the machine, and one of them may miss a bound for that; a bug fails again. Two failures count in any case:
# of tests that draw, since what they drew is seldom drawn again, and of what is no test, since pytest would run all tests.
mapfile -t failed < <(named cache/lastfailed)
mapfile -t drawn < <(named kvferry/drawn_failures)
totals="$(tail -n 1 "$logs/tests")"
unsteady=()
others=0
for failure in "${failed[@]}"; do [[ $failure == *::* ]] || others=1; done
if ((status == 1 && ${#failed[@]} > 0 && ${#failed[@]} <= 3 && others == 0)) && tests --lf --lfnf=none; then
    for test in "${failed[@]}"; do among "$test" "${drawn[@]}" || unsteady+=("$test"); done
    failed=("${drawn[@]}")
    if ((${#drawn[@]} == 0)); then
        status=0
        totals="$(sed -E 's/[0-9]+ (failed|errors?)/& beside others and passed alone/g' <<<"$totals")"
    fi
fi

printf '\n== summary\n'
for test in "${failed[@]}"; do echo "FAILED $test"; done
for test in "${unsteady[@]}"; do echo "UNSTEADY $test failed beside other tests and passed alone"; done
for test in "${drawn[@]}"; do echo "DRAWN $test: the same again by KVFERRY_SEED=$KVFERRY_SEED"; done
cat "$logs/failed checks" 2>/dev/null || echo "all checks passed"
((status == 0)) || echo "tests failed: pytest's exit status is $status"
echo "drawn with KVFERRY_SEED=$KVFERRY_SEED"
echo "$totals"
[[ $status == 0 && ! -e "$logs/failed checks" ]]
