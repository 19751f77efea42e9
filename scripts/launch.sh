#!/usr/bin/env bash
# What run_accuracy_test.sh and run_gpu_check.sh share: MODULE SETS ARGUMENTS... runs `python -m MODULE ARGUMENTS` in .venv, which is
# made on the first run, with these SETS of scripts/bootstrap.py beside the runtime.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
module="$1" sets="$2"
shift 2

python="$(scripts/find_python.sh)"
# Settings first: a typo must not cost the minutes that an installation takes. Prints the device, or what --help and
# --list have to say.
device="$("$python" -m "$module" --check "$@")" || exit $?
case "$device" in
    cpu | cuda) ;;
    *) printf '%s\n' "$device"; exit 0 ;;
esac
# shellcheck disable=SC2086 # several words
"$python" -m scripts.bootstrap "$device" $sets
export PATH="$PWD/.venv/bin:$PATH"
exec python -m "$module" "$@"
