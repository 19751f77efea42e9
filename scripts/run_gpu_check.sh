#!/usr/bin/env bash
# Everything that a node with GPUs can show of kvferry, with a report to attach to an issue: docs/gpu-check.md.
# Needs Python 3.11 and git; makes .venv on the first run. KVFERRY_DEVICE=cpu puts the CPU in the GPUs' place.
export KVFERRY_COMMAND="scripts/run_gpu_check.sh"
exec "$(dirname "$0")/launch.sh" scripts.gpu_check dev "$@"
