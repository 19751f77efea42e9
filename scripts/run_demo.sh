#!/usr/bin/env bash
# Something to look at: two engines behind vllm-router, some load with one slow request, that request's timeline, and a
# prompt that is read from the cache of the engine that has its beginning.
# Runs until Ctrl-C, or ends by itself with --once. Makes .venv on the first run.
# Engines are chosen by the variables of scripts/run_accuracy_test.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ $# == 0 || $* == --once ]] || { sed -n '2,5s/^# //p' scripts/run_demo.sh; exit 2; }
python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/run_demo.sh"

device="$("$python" -m scripts.accuracy --check)"
"$python" -m scripts.bootstrap "$device"
exec .venv/bin/python -m scripts.demo "$@"
