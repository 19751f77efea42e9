#!/usr/bin/env bash
# The GPU check for a machine with a GPU and no package index, in deliveries of a limited size: docs/gpu-check.md.
# Needs .venv with the tools of development: `python3 -m scripts.bootstrap` makes it.
set -euo pipefail
export KVFERRY_COMMAND="scripts/gpu_bundle.sh"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if [ ! -x "$root/.venv/bin/python" ]; then
    echo "there is no $root/.venv; make it first: python3 -m scripts.bootstrap" >&2
    exit 1
fi
# DEST is from where this was called.
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$root/.venv/bin/python" -m scripts.gpu_bundle "$@"
