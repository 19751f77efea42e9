#!/usr/bin/env bash
# Everything that a node with GPUs can show of kvferry, with a report to attach to an issue: docs/gpu-check.md.
# Needs Python 3.11 and git; makes .venv on the first run. KVFERRY_DEVICE=cpu puts the CPU in the GPUs' place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/run_gpu_check.sh"

# Options first, as in run_accuracy_test.sh. Prints the device, or what --help and --list have to say.
device="$("$python" -m scripts.gpu_check --check "$@")" || exit $?
case "$device" in
    cpu | cuda) ;;
    *) printf '%s\n' "$device"; exit 0 ;;
esac
"$python" -m scripts.bootstrap "$device" dev
export PATH="$PWD/.venv/bin:$PATH"
exec python -m scripts.gpu_check "$@"
