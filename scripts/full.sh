#!/usr/bin/env bash
# The main job in every configuration of scripts/full.py, one after another; writes docs/full-matrix.md. An hour on 2 cores.
# Arguments choose configurations by name: scripts/full.sh float32 bfloat16
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$(scripts/find_python.sh)"
export KVFERRY_COMMAND="scripts/full.sh"
device="$("$python" -m scripts.accuracy --check)"
"$python" -m scripts.bootstrap "$device"
exec .venv/bin/python -m scripts.full "$@"
