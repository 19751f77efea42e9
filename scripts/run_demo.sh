#!/usr/bin/env bash
# Something to look at: two engines behind vllm-router, Prometheus, some load with one slow request, the dashboard's values and
# that request's timeline. Runs until Ctrl-C, or ends by itself with --once. Makes .venv on the first run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/run_demo.sh"

device="$("$python" -m scripts.demo --check "$@")" || exit $?
case "$device" in
    cpu | cuda) ;;
    *) printf '%s\n' "$device"; exit 0 ;; # --help
esac
"$python" -m scripts.bootstrap "$device" dev
exec .venv/bin/python -m scripts.demo "$@"
