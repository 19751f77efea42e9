#!/usr/bin/env bash
# The main job: two real vLLM engines hand KV caches over through kvferry, with the tokens of a single engine.
# Needs Python 3.11 and git; makes .venv on the first run. `--help` lists the environment variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/run_accuracy_test.sh"

# Settings first: a typo must not cost the minutes that an installation takes. Prints the device: cpu or cuda.
device="$("$python" -m scripts.accuracy --check "$@")" || exit $?
case "$device" in
    cpu | cuda) ;;
    *) printf '%s\n' "$device"; exit 0 ;; # --help
esac
"$python" -m scripts.bootstrap "$device"
exec .venv/bin/python -m scripts.accuracy "$@"
